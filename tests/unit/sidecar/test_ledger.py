"""Which shards are durable, as their manifests and data files on storage say."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_proto.checkpoint_layout import checkpoint_id, data_file_name, manifest_name
from ckpt_proto.codec import MAX_MESSAGE_BYTES, decode, encode
from ckpt_proto.errors import StorageError
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import Heartbeat
from ckpt_proto.shard_manifest import ShardManifest, StoredManifest
from ckpt_sidecar.actions import ListShards
from ckpt_sidecar.events import ListedShard
from ckpt_sidecar.ledger import durable_shard, list_shards
from testkit.tables import PLAN_ID, TORCH, key

SAVE = key()
NBYTES = 100


def lay(directory: Path, rank: int = 0, save: SaveKey = SAVE, world_size: int = 2, *, overwrite: bool = False) -> Path:
    """A durable shard; returns where it lies."""
    where = Path(checkpoint_id(str(directory), save.step))
    where.mkdir(exist_ok=True)
    name = data_file_name(rank, save.save_id)
    (where / name).write_bytes(b"\0" * NBYTES)
    manifest = StoredManifest.of(ShardManifest(save, rank, world_size, PLAN_ID, name, NBYTES, TORCH, overwrite, ()))
    (where / manifest_name(rank, save.save_id)).write_bytes(encode(manifest))
    return where


def order(directory: Path, *ranks: int, world_size: int = 2) -> ListShards:
    return ListShards(SAVE, str(directory), world_size, ranks)


def test_a_shard_with_manifest_and_whole_data_file_is_durable(tmp_path: Path) -> None:
    lay(tmp_path)
    found = durable_shard(str(tmp_path), 0, SAVE)
    assert found is not None
    assert (found.rank, found.save, found.file_bytes) == (0, SAVE, NBYTES)


def test_what_was_never_written_is_not(tmp_path: Path) -> None:
    assert durable_shard(str(tmp_path), 0, SAVE) is None
    lay(tmp_path)
    assert durable_shard(str(tmp_path), 1, SAVE) is None
    assert durable_shard(str(tmp_path), 0, key(0, session="0000000b")) is None
    assert durable_shard(str(tmp_path), 0, key(1, step=SAVE.step)) is None


def no_data_file(where: Path) -> None:
    (where / data_file_name(0, SAVE.save_id)).unlink()


def short_data_file(where: Path) -> None:
    os.truncate(where / data_file_name(0, SAVE.save_id), NBYTES - 1)


def long_data_file(where: Path) -> None:
    os.truncate(where / data_file_name(0, SAVE.save_id), NBYTES + 1)


def torn_manifest(where: Path) -> None:
    path = where / manifest_name(0, SAVE.save_id)
    path.write_bytes(path.read_bytes()[:-3])


def another_message(where: Path) -> None:
    (where / manifest_name(0, SAVE.save_id)).write_bytes(encode(Heartbeat()))


def manifest_of_another_rank(where: Path) -> None:
    lay(where.parent, rank=1)
    (where / manifest_name(1, SAVE.save_id)).replace(where / manifest_name(0, SAVE.save_id))


def manifest_of_another_save(where: Path) -> None:
    other = key(5, step=SAVE.step)
    lay(where.parent, save=other)
    (where / manifest_name(0, other.save_id)).replace(where / manifest_name(0, SAVE.save_id))


def manifest_of_another_file(where: Path) -> None:
    path = where / manifest_name(0, SAVE.save_id)
    manifest = decode(path.read_bytes())
    assert isinstance(manifest, StoredManifest)
    (where / "elsewhere").write_bytes(b"\0" * NBYTES)
    path.write_bytes(encode(replace(manifest, file_name="elsewhere")))


def link_in_place_of_the_data_file(where: Path) -> None:
    path = where / data_file_name(0, SAVE.save_id)
    path.symlink_to(path.replace(where / "elsewhere"))


def link_in_place_of_the_manifest(where: Path) -> None:
    path = where / manifest_name(0, SAVE.save_id)
    path.symlink_to(path.replace(where / "elsewhere"))


def pipe_in_place_of_the_manifest(where: Path) -> None:
    path = where / manifest_name(0, SAVE.save_id)
    path.unlink()
    os.mkfifo(path)  # to read it would wait for a writer for ever


def manifest_larger_than_any_message(where: Path) -> None:
    os.truncate(where / manifest_name(0, SAVE.save_id), MAX_MESSAGE_BYTES + 1)  # a hole; read, it would be memory


SPOILED = [
    no_data_file,
    short_data_file,
    long_data_file,
    torn_manifest,
    another_message,
    manifest_of_another_rank,
    manifest_of_another_save,
    manifest_of_another_file,
    link_in_place_of_the_data_file,
    link_in_place_of_the_manifest,
    pipe_in_place_of_the_manifest,
    manifest_larger_than_any_message,
]


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_what_is_not_whole_is_not_durable(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    spoil(lay(tmp_path))
    assert durable_shard(str(tmp_path), 0, SAVE) is None
    assert list_shards(order(tmp_path, 0)) == ()


def test_a_step_that_is_a_file_has_no_shard(tmp_path: Path) -> None:
    Path(checkpoint_id(str(tmp_path), SAVE.step)).touch()
    assert durable_shard(str(tmp_path), 0, SAVE) is None


def test_a_storage_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    where = Path(checkpoint_id(str(tmp_path), SAVE.step))
    where.symlink_to(where)
    with pytest.raises(StorageError, match=f"cannot look for the shard of rank 0 in {where}"):
        list_shards(order(tmp_path, 0))


def test_only_the_ranks_asked_for_are_listed_with_what_their_manifests_say(tmp_path: Path) -> None:
    lay(tmp_path, 0)
    lay(tmp_path, 1, overwrite=True)
    assert list_shards(order(tmp_path, 0, 1)) == (ListedShard(0, PLAN_ID, False), ListedShard(1, PLAN_ID, True))
    assert list_shards(order(tmp_path, 1)) == (ListedShard(1, PLAN_ID, True),)


def test_a_shard_of_a_world_of_another_size_is_not_of_this_attempt(tmp_path: Path) -> None:
    lay(tmp_path, 0, world_size=3)
    assert list_shards(order(tmp_path, 0)) == ()
    assert list_shards(order(tmp_path, 0, world_size=3)) == (ListedShard(0, PLAN_ID, False),)
