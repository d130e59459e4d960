"""The shard manifest: one codec frame that is checked when it is read back, years later perhaps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ckpt_proto.codec import decode, encode
from ckpt_proto.errors import LocalProtocolError, RemoteProtocolError
from ckpt_proto.shard_manifest import ManifestEntry, ShardManifest, StoredManifest, pack_crcs
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


def read_back(manifest: ShardManifest) -> ShardManifest:
    stored = decode(encode(StoredManifest.of(manifest)))
    assert isinstance(stored, StoredManifest)
    return stored.whole()


def test_a_manifest_is_read_back_as_it_was_written() -> None:
    assert read_back(MANIFEST) == MANIFEST


def test_a_rank_without_entries_has_a_manifest_too() -> None:
    empty = dataclasses.replace(MANIFEST, file_bytes=0, entries=())
    assert read_back(empty) == empty


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


STORED = StoredManifest.of(MANIFEST)


def test_what_is_stored_says_how_much_there_is_without_being_unpacked() -> None:
    stored = dataclasses.replace(STORED, layout=b"not looked at")
    assert (stored.entry_count, stored.byte_pairs()) == (2, [(60, 40)])


def test_two_saves_of_a_plan_have_the_same_layout() -> None:
    tensor, value = MANIFEST.entries
    moved = (
        dataclasses.replace(tensor, crc32=77),
        dataclasses.replace(value, offset_bytes=70, length_bytes=3, crc32=5),
    )
    other = StoredManifest.of(dataclasses.replace(MANIFEST, entries=moved))
    assert other.layout == STORED.layout
    assert other.whole().entries == moved


@pytest.mark.parametrize(
    "changes",
    [
        {"crcs": b"123"},
        {"byte_places": (60,)},
        {"byte_places": (60, 41)},
        {"byte_places": (-1, 2)},
        {"byte_places": (60, -1)},
        {"file_bytes": 99},
        {"rank": 2},
        {"file_name": "../x"},
    ],
    ids=str,
)
def test_a_stored_manifest_out_of_bounds_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        dataclasses.replace(STORED, **changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layout": b""}, "no packed LayoutEntrys"),
        ({"layout": b"\xc1"}, "no packed LayoutEntrys"),
        ({"layout": b"\x81\x01\x02"}, "no packed LayoutEntrys"),
        ({"layout": b"\x01"}, "expected an array"),
        ({"layout": b"\x91\x93\x01\x02\x03"}, "expected an array of PlanItem"),
        ({"crcs": pack_crcs([1])}, "have 1 CRCs"),
        ({"byte_places": ()}, "0 byte places"),
        ({"byte_places": (60, 40, 0, 0)}, "2 byte places"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises((LocalProtocolError, RemoteProtocolError), match=complaint):
        dataclasses.replace(STORED, **changes).whole()
