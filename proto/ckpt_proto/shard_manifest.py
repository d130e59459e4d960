"""The shard manifest: the durable record beside a data file of what lies where in it.

It is written after the data file is durable and stays as its integrity record. The manifests of all ranks together are
enough to build the checkpoint's ``.metadata``; nothing else has to survive. A stock DCP reader ignores them.

On storage it is a :class:`StoredManifest`, one codec frame, so it is validated like a message. What is the same in
every save of a plan is one field of bytes there: who has seen them once need not look into them again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ckpt_proto.codec import pack_records, unpack_records
from ckpt_proto.errors import LocalProtocolError
from ckpt_proto.identity import MAX_RANKS, SaveKey
from ckpt_proto.messages import Message
from ckpt_proto.plan_items import PlanItem

MAX_NAME_BYTES = 255
"""Longest name of a file on Linux (NAME_MAX)."""

CRC_BYTES = 4


@dataclass(frozen=True)
class ManifestEntry:
    """One stored item: ``crc32`` is of the tensor's payload bytes (the zip record's own CRC) or of the whole byte
    entry."""

    item: PlanItem
    offset_bytes: int
    length_bytes: int
    crc32: int

    def __post_init__(self) -> None:
        if self.offset_bytes < 0 or self.length_bytes < 0:
            raise LocalProtocolError(f"{self.item.fqn}: negative offset or length in a manifest")
        if not 0 <= self.crc32 < 2**32:
            raise LocalProtocolError(f"{self.item.fqn}: CRC {self.crc32} is not 32 bits wide")


@dataclass(frozen=True)
class ShardManifest:
    """What one rank's data file of one attempt holds.

    ``file_name`` is relative to the checkpoint directory. ``plan_id`` ties the ranks' manifests of one attempt
    together: all have the same, or the attempt is not one checkpoint. ``overwrite`` repeats the order given with the
    save.
    """

    save: SaveKey
    rank: int
    world_size: int
    plan_id: str
    file_name: str
    file_bytes: int
    torch_version: str
    overwrite: bool
    entries: tuple[ManifestEntry, ...]

    def __post_init__(self) -> None:
        _check_head(self)
        for entry in self.entries:
            if entry.offset_bytes + entry.length_bytes > self.file_bytes:
                raise LocalProtocolError(f"{entry.item.fqn}: entry ends behind the file's {self.file_bytes} bytes")


@dataclass(frozen=True)
class LayoutEntry:
    """Where an item lies in every save of its plan: both 0 for a byte entry, whose place changes."""

    item: PlanItem
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True)
class StoredManifest(Message):
    """A :class:`ShardManifest` as it is stored.

    ``layout`` is the packed :class:`LayoutEntry` records in plan order, ``byte_places`` offset and length of each byte
    entry in that order, ``crcs`` the CRC-32 of every entry, 4 bytes each, little-endian.
    """

    save: SaveKey
    rank: int
    world_size: int
    plan_id: str
    file_name: str
    file_bytes: int
    torch_version: str
    overwrite: bool
    layout: bytes
    byte_places: tuple[int, ...]
    crcs: bytes

    def __post_init__(self) -> None:
        _check_head(self)
        if len(self.crcs) % CRC_BYTES or len(self.byte_places) % 2:
            raise LocalProtocolError(f"{self.file_name}: CRCs or byte places of a manifest are cut short")
        for offset, length in self.byte_pairs():
            if not 0 <= offset <= offset + length <= self.file_bytes:
                raise LocalProtocolError(
                    f"{self.file_name}: {length} bytes at {offset} are not in the file's {self.file_bytes} bytes"
                )

    @property
    def entry_count(self) -> int:
        """How many items are stored."""
        return len(self.crcs) // CRC_BYTES

    def byte_pairs(self) -> list[tuple[int, int]]:
        """Offset and length of each byte entry."""
        return list(zip(self.byte_places[::2], self.byte_places[1::2], strict=True))

    @classmethod
    def of(cls, manifest: ShardManifest) -> StoredManifest:
        """The form to store."""
        entries = manifest.entries
        layout = tuple(
            LayoutEntry(entry.item, entry.offset_bytes, entry.length_bytes)
            if entry.item.is_framed
            else LayoutEntry(entry.item, 0, 0)
            for entry in entries
        )
        places = [place for entry in entries if not entry.item.is_framed for place in _place_of(entry)]
        return cls(
            manifest.save,
            manifest.rank,
            manifest.world_size,
            manifest.plan_id,
            manifest.file_name,
            manifest.file_bytes,
            manifest.torch_version,
            manifest.overwrite,
            pack_records(layout),
            tuple(places),
            pack_crcs([entry.crc32 for entry in entries]),
        )

    def whole(self) -> ShardManifest:
        """What it says, looked at entry by entry.

        Raises:
            RemoteProtocolError, LocalProtocolError: the layout is none, or the parts do not fit together.
        """
        layout = unpack_records(LayoutEntry, self.layout)
        places = iter(self.byte_pairs())
        count = sum(not entry.item.is_framed for entry in layout)
        if len(layout) != self.entry_count or count != len(self.byte_places) // 2:
            raise LocalProtocolError(
                f"{self.file_name}: {len(layout)} items, {count} of them bytes, have {self.entry_count} CRCs and "
                f"{len(self.byte_places) // 2} byte places"
            )
        crcs = struct.unpack(f"<{self.entry_count}I", self.crcs)
        entries = []
        for entry, crc in zip(layout, crcs, strict=True):
            place = (entry.offset_bytes, entry.length_bytes) if entry.item.is_framed else next(places)
            entries.append(ManifestEntry(entry.item, *place, crc))
        return ShardManifest(
            self.save,
            self.rank,
            self.world_size,
            self.plan_id,
            self.file_name,
            self.file_bytes,
            self.torch_version,
            self.overwrite,
            tuple(entries),
        )


def pack_crcs(crcs: list[int]) -> bytes:
    """CRC-32s as they are stored."""
    return struct.pack(f"<{len(crcs)}I", *crcs)


def _place_of(entry: ManifestEntry) -> tuple[int, int]:
    return entry.offset_bytes, entry.length_bytes


def _check_head(manifest: ShardManifest | StoredManifest) -> None:
    name = manifest.file_name
    if not 0 <= manifest.rank < manifest.world_size <= MAX_RANKS:
        raise LocalProtocolError(f"manifest of rank {manifest.rank} in a world of {manifest.world_size}")
    if "/" in name or "\0" in name or name in ("", ".", ".."):
        raise LocalProtocolError(f"manifest names a file {name!r} outside the checkpoint directory")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise LocalProtocolError(
            f"manifest names a file with {len(name.encode())} bytes; {MAX_NAME_BYTES} are possible"
        )
