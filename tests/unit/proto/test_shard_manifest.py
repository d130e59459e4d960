"""The shard manifest: one codec frame that is checked when it is read back, years later perhaps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ckpt_proto.codec import decode, encode
from ckpt_proto.errors import LocalProtocolError
from ckpt_proto.shard_manifest import ManifestEntry, ShardManifest
from testkit.protocol_values import BYTES, SAVE, TENSOR

MANIFEST = ShardManifest(
    save=SAVE,
    rank=1,
    world_size=2,
    plan_id="9f3ac1d2-p1",
    file_name="__1_9f3ac1d2-3.distcp",
    file_bytes=100,
    torch_version="2.13.0",
    overwrite=False,
    entries=(ManifestEntry(TENSOR, 0, 60, 1), ManifestEntry(BYTES, 60, 40, 2)),
)


def test_a_manifest_is_read_back_as_it_was_written() -> None:
    assert decode(encode(MANIFEST)) == MANIFEST


def test_a_rank_without_entries_has_a_manifest_too() -> None:
    empty = dataclasses.replace(MANIFEST, file_bytes=0, entries=())
    assert decode(encode(empty)) == empty


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc/passwd", "sub/file", "a\0b"])
def test_a_manifest_never_leads_out_of_its_checkpoint(name: str) -> None:
    with pytest.raises(LocalProtocolError, match="outside the checkpoint directory"):
        dataclasses.replace(MANIFEST, file_name=name)


def test_a_manifest_names_no_file_that_cannot_be() -> None:
    assert dataclasses.replace(MANIFEST, file_name="x" * 255).file_name
    with pytest.raises(LocalProtocolError, match="256 bytes; 255 are possible"):
        dataclasses.replace(MANIFEST, file_name="é" * 128)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0), (0, 2**20 + 1)])
def test_a_rank_outside_its_world_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"rank {rank} in a world of {world_size}"):
        dataclasses.replace(MANIFEST, rank=rank, world_size=world_size)


@pytest.mark.parametrize("file_bytes", [99, 0, -1])
def test_an_entry_never_ends_behind_its_file(file_bytes: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"behind the file's {file_bytes} bytes"):
        dataclasses.replace(MANIFEST, file_bytes=file_bytes)


@pytest.mark.parametrize(
    "changes", [{"offset_bytes": -1}, {"length_bytes": -1}, {"crc32": -1}, {"crc32": 2**32}], ids=str
)
def test_an_entry_out_of_bounds_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError, match=r"model\.weight"):
        dataclasses.replace(MANIFEST.entries[0], **changes)


def test_the_largest_crc_is_valid() -> None:
    assert dataclasses.replace(MANIFEST.entries[0], crc32=2**32 - 1).crc32 == 2**32 - 1
