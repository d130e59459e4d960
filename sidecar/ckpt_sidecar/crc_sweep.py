"""One pass over a sealed region that computes and patches the CRCs just ahead of the writer.

The writer takes the region window by window from the front. Before a window is written, every CRC field in it must be
final: a field lies behind its payload, so sweeping up to the window's end is enough. The CRC of each entry is the zip
record's own CRC-32 (of the payload), or for byte entries that of the whole entry.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence

from isal import isal_zlib

from ckpt_proto.shard_manifest import ManifestEntry
from ckpt_sidecar.dcp_layout import ShardLayout


class CrcSweep:
    """The sweep over one region. Only the thread that writes the shard calls it."""

    def __init__(self, layout: ShardLayout, byte_lengths: Sequence[int], mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._view = memoryview(mapping)
        self._spans = _spans(layout, byte_lengths)
        self._patches = [(entry.payload_end, entry.frame.crc_offsets) for entry in layout.framed]
        self._crcs = [0] * len(self._spans)
        self._index = 0
        self._position = 0
        self._layout = layout
        self._byte_lengths = byte_lengths

    def advance(self, limit: int) -> None:
        """Sweep everything that lies before offset ``limit`` (bytes)."""
        while self._index < len(self._spans):
            start, stop = self._spans[self._index]
            begin, end = max(start, self._position), min(stop, limit)
            if begin < end:
                self._crcs[self._index] = isal_zlib.crc32(self._view[begin:end], self._crcs[self._index])
                self._position = end
            if stop > limit:
                return
            self._patch(self._index)
            self._index += 1

    def _patch(self, index: int) -> None:
        if index < len(self._patches):
            tail_at, offsets = self._patches[index]
            for offset in offsets:
                struct.pack_into("<I", self._mapping, tail_at + offset, self._crcs[index])

    def entries(self) -> tuple[ManifestEntry, ...]:
        """The manifest's entries in plan order; complete once the sweep has reached the end of the file."""
        assert self._index == len(self._spans), "the sweep has not reached the end"
        framed = iter(
            [
                ManifestEntry(entry.item, entry.offset_bytes, entry.frame.entry_bytes, crc)
                for entry, crc in zip(self._layout.framed, self._crcs, strict=False)
            ]
        )
        count = len(self._layout.framed)
        others = iter(
            [
                ManifestEntry(item, start, stop - start, crc)
                for item, (start, stop), crc in zip(
                    self._layout.byte_items, self._spans[count:], self._crcs[count:], strict=True
                )
            ]
        )
        return tuple(next(framed) if item.is_framed else next(others) for item in self._layout.items)

    def close(self) -> None:
        """Let go of the mapping."""
        self._view.release()


def _spans(layout: ShardLayout, byte_lengths: Sequence[int]) -> list[tuple[int, int]]:
    spans = [(entry.payload_offset, entry.payload_end) for entry in layout.framed]
    position = layout.byte_offset
    for length in byte_lengths:
        spans.append((position, position + length))
        position += length
    return spans
