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

    def crcs(self) -> list[int]:
        """The CRC of each entry in plan order; complete once the sweep has reached the end of the file."""
        assert self._index == len(self._spans), "the sweep has not reached the end"
        count = len(self._layout.framed)
        framed, others = iter(self._crcs[:count]), iter(self._crcs[count:])
        return [next(framed) if item.is_framed else next(others) for item in self._layout.items]

    def byte_places(self) -> tuple[int, ...]:
        """Offset and length of each byte entry, in plan order."""
        spans = self._spans[len(self._layout.framed) :]
        return tuple(number for start, stop in spans for number in (start, stop - start))

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
