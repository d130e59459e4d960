"""The layout of a region: where each entry of a rank's plan lies in the data file.

A region is the exact image of the ``.distcp`` file it will become. Framed tensors come first, at offsets that depend
on the plan only and are aligned (a reader follows the offsets in ``.metadata`` and never sees the padding); byte
entries, whose lengths change between saves, follow each other at the end.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ckpt_proto.codec import pack_records
from ckpt_proto.plan_items import Plan, PlanItem
from ckpt_proto.shard_manifest import LayoutEntry
from ckpt_sidecar.frames import Frame, frame_of

ENTRY_ALIGNMENT_BYTES = 64
"""torch aligns a payload to 64 bytes within its archive; an archive at such an offset keeps that in the file."""


@dataclass(frozen=True)
class FramedEntry:
    """A dense tensor: its archive begins at ``offset_bytes``, its raw bytes at ``payload_offset``."""

    item: PlanItem
    offset_bytes: int
    frame: Frame

    @property
    def payload_offset(self) -> int:
        """Where the raw bytes begin in the region and in the file."""
        return self.offset_bytes + len(self.frame.head)

    @property
    def payload_end(self) -> int:
        """Where the tail begins."""
        return self.payload_offset + self.frame.payload_bytes


@dataclass(frozen=True)
class ShardLayout:
    """Where everything of one rank's plan lies. ``byte_offset`` is where the byte entries begin.

    ``items`` is the plan in its own order, which is also the order of the manifest and so of ``.metadata``.
    """

    items: Plan
    framed: tuple[FramedEntry, ...]
    byte_items: tuple[PlanItem, ...]
    byte_offset: int

    def region_bytes(self, byte_capacity: int) -> int:
        """Bytes of a region with room for ``byte_capacity`` bytes of byte entries."""
        return self.byte_offset + byte_capacity

    @cached_property
    def packed(self) -> bytes:
        """The part of a manifest that is the same in every save."""
        places = {entry.item.key: (entry.offset_bytes, entry.frame.entry_bytes) for entry in self.framed}
        return pack_records(tuple(LayoutEntry(item, *places.get(item.key, (0, 0))) for item in self.items))

    def file_bytes(self, byte_lengths: Sequence[int]) -> int:
        """Length of the data file of one save."""
        return self.byte_offset + sum(byte_lengths)


def lay_out(items: Plan) -> ShardLayout:
    """The layout of a plan. Pure but for the frames' cache; 20 us per item, 0.2 ms per new dtype and shape."""
    framed: list[FramedEntry] = []
    position = 0
    for item in items:
        if item.is_framed:
            frame = frame_of(item.dtype, item.sizes)
            framed.append(FramedEntry(item, position, frame))
            position += -(-frame.entry_bytes // ENTRY_ALIGNMENT_BYTES) * ENTRY_ALIGNMENT_BYTES
    byte_items = tuple(item for item in items if not item.is_framed)
    return ShardLayout(items, tuple(framed), byte_items, position)


def write_frames(layout: ShardLayout, mapping: mmap.mmap) -> None:
    """Put heads and tails into a region; done once per plan, saves only change payloads and CRCs after that."""
    for entry in layout.framed:
        mapping[entry.offset_bytes : entry.payload_offset] = entry.frame.head
        mapping[entry.payload_end : entry.payload_end + len(entry.frame.tail)] = entry.frame.tail
