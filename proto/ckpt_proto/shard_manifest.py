"""The shard manifest: the durable record beside a data file of what lies where in it.

It is written after the data file is durable and stays as its integrity record. The manifests of all ranks together are
enough to build the checkpoint's ``.metadata``; nothing else has to survive. A stock DCP reader ignores them.
The file is one codec frame, so it is validated like a message.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_proto.errors import LocalProtocolError
from ckpt_proto.identity import MAX_RANKS, SaveKey
from ckpt_proto.messages import Message
from ckpt_proto.plan_items import PlanItem

MAX_NAME_BYTES = 255
"""Longest name of a file on Linux (NAME_MAX)."""


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
class ShardManifest(Message):
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
        if not 0 <= self.rank < self.world_size <= MAX_RANKS:
            raise LocalProtocolError(f"manifest of rank {self.rank} in a world of {self.world_size}")
        if "/" in self.file_name or "\0" in self.file_name or self.file_name in ("", ".", ".."):
            raise LocalProtocolError(f"manifest names a file {self.file_name!r} outside the checkpoint directory")
        if len(self.file_name.encode()) > MAX_NAME_BYTES:
            raise LocalProtocolError(
                f"manifest names a file with {len(self.file_name.encode())} bytes; {MAX_NAME_BYTES} are possible"
            )
        for entry in self.entries:
            if entry.offset_bytes + entry.length_bytes > self.file_bytes:
                raise LocalProtocolError(f"{entry.item.fqn}: entry ends behind the file's {self.file_bytes} bytes")
