"""Storage is the ledger: which shards of an attempt are durable, read from their manifests. Torch-free."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ckpt_proto.checkpoint_layout import METADATA_NAME, checkpoint_id, data_file_name, manifest_name
from ckpt_proto.codec import MAX_MESSAGE_BYTES, decode
from ckpt_proto.errors import RemoteProtocolError, StorageError
from ckpt_proto.identity import SaveKey
from ckpt_proto.regular_file import UnfitFile, read_regular_file
from ckpt_proto.shard_manifest import StoredManifest
from ckpt_sidecar.actions import ListShards
from ckpt_sidecar.events import ListedShard
from ckpt_sidecar.metadata_file import MetadataUnreadable, read_metadata_file


def durable_shard(directory: str, rank: int, save: SaveKey) -> StoredManifest | None:
    """The manifest of a rank's part of an attempt whose data file is there with its recorded length; None if it is not,
    or if the manifest is none of that file.

    Raises:
        StorageError: the storage cannot be read.
    """
    where = Path(checkpoint_id(directory, save.step))
    name = data_file_name(rank, save.save_id)
    try:
        frame, _ = read_regular_file(where / manifest_name(rank, save.save_id), MAX_MESSAGE_BYTES)
        manifest = decode(frame)
        found = os.lstat(where / name)
    except (FileNotFoundError, UnfitFile, RemoteProtocolError):
        return None
    except (OSError, StorageError) as error:
        raise StorageError(f"cannot look for the shard of rank {rank} in {where}: {error}") from error
    if not isinstance(manifest, StoredManifest):
        return None
    said = (manifest.rank, manifest.save, manifest.file_name, manifest.file_bytes)
    return manifest if stat.S_ISREG(found.st_mode) and said == (rank, save, name, found.st_size) else None


def is_published(directory: str, save: SaveKey) -> bool:
    """Whether the ``.metadata`` of a step is that of an attempt: it is committed, whoever was told.

    Raises:
        StorageError: the storage cannot be read.
    """
    try:
        return read_metadata_file(Path(checkpoint_id(directory, save.step)) / METADATA_NAME).save_id == save.save_id
    except (FileNotFoundError, MetadataUnreadable):
        return False  # what is there and cannot be read is somebody else's


def list_shards(order: ListShards) -> tuple[ListedShard, ...]:
    """Which of the ranks asked for have a durable shard.

    Raises:
        StorageError: the storage cannot be read.
    """
    found = []
    for rank in order.ranks:
        manifest = durable_shard(order.directory, rank, order.save)
        if manifest is not None and manifest.world_size == order.world_size:
            found.append(ListedShard(rank, manifest.plan_id, manifest.overwrite))
    return tuple(found)
