"""The commit: shard manifests -> completeness check -> DCP ``Metadata`` -> ``.metadata`` published, last.

The only importer of DCP's private name ``_StorageInfo``. The metadata is built from the manifests alone, so that any
process can finish a complete attempt on any later day.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_proto.attempt_files import durable_ranks
from ckpt_proto.checkpoint_layout import METADATA_NAME, attempt_of, checkpoint_id, manifest_name
from ckpt_proto.codec import MAX_MESSAGE_BYTES, decode
from ckpt_proto.errors import AlreadyCommitted, IncompleteCheckpoint, RemoteProtocolError, StorageError
from ckpt_proto.identity import SaveKey, save_key_of
from ckpt_proto.plan_items import ItemKind, PlanItem
from ckpt_proto.regular_file import read_regular_file
from ckpt_proto.shard_manifest import ShardManifest
from ckpt_sidecar.actions import Publish
from ckpt_sidecar.durable_fs import NotDurable, publish, remove_files, sync_dir
from ckpt_sidecar.frames import FrameError, dtype_of
from ckpt_sidecar.metadata_file import read_metadata_file

logger = logging.getLogger(__name__)

DCP_VERSION = "1.0.0"
"""Value of ``Metadata.version`` that DCP's own writer sets (the field exists since torch 2.9)."""

_MEMORY_FORMATS = {name: getattr(torch, name) for name in ("contiguous_format", "channels_last", "preserve_format")}


def publish_checkpoint(order: Publish, *, remove_superseded: bool = True) -> None:
    """Carry out a commit order. Publishing what is published already succeeds and changes nothing.

    ``remove_superseded``: with ``overwrite``, remove the files of every attempt before this one. Whoever finishes what
    another job left must not: it does not know whose those are.

    Raises:
        IncompleteCheckpoint: a manifest or data file is missing, has a wrong size, belongs to another plan, or the
            entries do not add up to the whole state; nothing became visible.
        AlreadyCommitted: the step has been committed by another attempt and ``overwrite`` was not asked for, or by a
            later save of the same session.
    """
    directory = Path(checkpoint_id(order.directory, order.save.step))
    target = directory / METADATA_NAME
    if _is_published(target, order.save):
        _try_to_sync(directory)
        return
    _check_free(target, order)
    manifests = read_manifests(directory, order.save.save_id, order.world_size)
    check_complete(directory, manifests, order)
    metadata = build_metadata(manifests, str(directory))
    try:
        publish(
            target,
            pickle.dumps(metadata, protocol=4),
            overwrite=order.overwrite,
            last_look=partial(_look_once_more, directory, order),
        )
    except AlreadyCommitted:
        if not _is_published(target, order.save):
            raise
        _try_to_sync(directory)
    except NotDurable as error:
        # The new checkpoint is visible and whole, so the commit stands; the files of the old one stay for the crash
        # that would bring its .metadata back.
        logger.error("%s", error)
        return
    if order.overwrite and remove_superseded:
        _try_to_remove_superseded(directory, order.save)


def _is_published(target: Path, save: SaveKey) -> bool:
    """Whether the attempt's ``.metadata`` is there: who published it may have been killed before telling anybody."""
    return _save_id_in(target) == save.save_id


def _try_to_sync(directory: Path) -> None:
    # What is visible must never be reported as not published: the attempt's files would be removed.
    try:
        sync_dir(directory)
    except OSError as error:
        logger.error("%s has its %s, but cannot be made durable: %s", directory, METADATA_NAME, error)


def read_manifests(directory: Path, save_id: str, world_size: int) -> list[ShardManifest]:
    """The manifests of an attempt, in the order of ranks.

    Raises:
        IncompleteCheckpoint: one is missing or is not a manifest; the error names ranks.
        StorageError: one cannot be read.
    """
    manifests: list[ShardManifest] = []
    missing: list[int] = []
    for rank in range(world_size):
        path = directory / manifest_name(rank, save_id)
        try:
            frame, _ = read_regular_file(path, MAX_MESSAGE_BYTES)
        except FileNotFoundError:
            missing.append(rank)
            continue
        try:
            manifest = decode(frame)
        except RemoteProtocolError as error:
            raise IncompleteCheckpoint(f"{path} is no shard manifest: {error}") from error
        if not isinstance(manifest, ShardManifest):
            raise IncompleteCheckpoint(f"{path} is a {type(manifest).__name__}, no shard manifest")
        manifests.append(manifest)
    if missing:
        raise IncompleteCheckpoint(f"{directory}: attempt {save_id} has no shard manifest of ranks {missing[:20]}")
    return manifests


def _look_once_more(directory: Path, order: Publish) -> None:
    _check_still_there(directory, order)
    if order.overwrite:
        _check_free(directory / METADATA_NAME, order)


def _check_free(target: Path, order: Publish) -> None:
    """Whether the attempt may have the name: free, or to be overwritten, but never by an earlier save of one session,
    which a coordinator may take up when another process has committed the later one from the directory.

    Raises:
        AlreadyCommitted: it may not.
    """
    if not target.exists():
        return
    save, text = order.save, f"step {order.save.step} is committed already in {target.parent}"
    if not order.overwrite:
        raise AlreadyCommitted(text)
    by = save_key_of(_save_id_in(target), save.step)
    if by is not None and by.session == save.session and by.seq > save.seq:
        raise AlreadyCommitted(f"{text} by a later save, {by.save_id}")


def _save_id_in(target: Path) -> str:
    """The save id in a ``.metadata``; empty if there is none, or none that can be read."""
    try:
        return read_metadata_file(target).save_id
    except FileNotFoundError:
        return ""
    except StorageError as error:
        logger.warning("taken for somebody else's: %s", error)
        return ""


def _check_still_there(directory: Path, order: Publish) -> None:
    """Somebody who takes the attempt for given up removes manifests first, and looks for the commit before data files.

    Raises:
        IncompleteCheckpoint: a manifest has gone since it was read.
        StorageError: the directory cannot be read.
    """
    durable = durable_ranks(directory, order.save.save_id)
    gone = [rank for rank in range(order.world_size) if rank not in durable]
    if gone:
        text = f"{directory}: the shard manifests of ranks {gone[:20]} were removed while attempt "
        raise IncompleteCheckpoint(f"{text}{order.save.save_id} was published")


def check_complete(directory: Path, manifests: Sequence[ShardManifest], order: Publish) -> None:
    """Every planned item is present exactly once and every file has its recorded size.

    Raises:
        IncompleteCheckpoint: it is not so; the error names rank, file and numbers.
    """
    for rank, manifest in enumerate(manifests):
        said = (manifest.rank, manifest.save, manifest.world_size, manifest.plan_id)
        if said != (rank, order.save, order.world_size, order.plan_id):
            raise IncompleteCheckpoint(f"manifest of rank {rank} in {directory} belongs to another save: {said}")
        if order.entry_counts and len(manifest.entries) != order.entry_counts[rank]:
            raise IncompleteCheckpoint(
                f"rank {rank} wrote {len(manifest.entries)} entries, {order.entry_counts[rank]} were planned"
            )
        path = directory / manifest.file_name
        size = os.stat(path).st_size if path.exists() else None
        if size != manifest.file_bytes:
            raise IncompleteCheckpoint(f"{path} has {size} bytes, its manifest says {manifest.file_bytes}")
    _check_items(entry.item for manifest in manifests for entry in manifest.entries)


def _check_items(items: Iterable[PlanItem]) -> None:
    seen: set[tuple[str, tuple[int, ...] | None]] = set()
    stored: dict[str, int] = {}
    whole: dict[str, int] = {}
    for item in items:
        if item.key in seen:
            raise IncompleteCheckpoint(f"{item.fqn} at {item.offsets} is stored twice")
        seen.add(item.key)
        if item.kind != ItemKind.BYTES.value:
            stored[item.fqn] = stored.get(item.fqn, 0) + math.prod(item.sizes)
            whole[item.fqn] = math.prod(item.global_sizes)
    for fqn, elements in stored.items():
        if elements != whole[fqn]:
            raise IncompleteCheckpoint(f"{fqn} has {elements} of {whole[fqn]} elements stored")


def build_metadata(manifests: Sequence[ShardManifest], where: str) -> Metadata:
    """The table of contents that DCP's own planner and writer would have made for these manifests."""
    state: dict[str, Any] = {}
    planner_data: dict[str, tuple[str | int, ...]] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for manifest in manifests:
        for entry in manifest.entries:
            item = entry.item
            _add_state(state, item)
            if item.path is not None:
                planner_data[item.fqn] = item.path
            storage[_index(item)] = _StorageInfo(manifest.file_name, entry.offset_bytes, entry.length_bytes)
    metadata = Metadata(
        state_dict_metadata=state,
        planner_data=planner_data or None,
        storage_data=storage,
        # A str: a pickled pathlib.Path is not readable across Python 3.12 / 3.13.
        storage_meta=StorageMeta(checkpoint_id=where, save_id=manifests[0].save.save_id),
    )
    if any(field.name == "version" for field in fields(Metadata)):
        metadata.version = DCP_VERSION
    return metadata


def _index(item: PlanItem) -> MetadataIndex:
    if item.kind == ItemKind.BYTES.value:
        return MetadataIndex(item.fqn)
    hint = item.index_hint if item.index_hint >= 0 else None
    return MetadataIndex(item.fqn, torch.Size(item.offsets), hint)


def _add_state(state: dict[str, Any], item: PlanItem) -> None:
    if item.kind == ItemKind.BYTES.value:
        state[item.fqn] = BytesStorageMetadata()
        return
    if item.fqn not in state:
        state[item.fqn] = TensorStorageMetadata(_properties(item), torch.Size(item.global_sizes), [])
    state[item.fqn].chunks.append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)))


def _properties(item: PlanItem) -> TensorProperties:
    """What a manifest says of a tensor. The names in it are looked up in torch, which has much besides layouts.

    Raises:
        IncompleteCheckpoint: one of them is no dtype, layout or memory format.
    """
    layout = getattr(torch, item.layout, None)
    memory_format = _MEMORY_FORMATS.get(item.memory_format)
    if not isinstance(layout, torch.layout) or memory_format is None:
        raise IncompleteCheckpoint(
            f"{item.fqn}: torch {torch.__version__} in the sidecar has no layout {item.layout[:80]!r} or no memory "
            f"format {item.memory_format[:80]!r}"
        )
    try:
        dtype = dtype_of(item.dtype)
    except FrameError as error:
        raise IncompleteCheckpoint(f"{item.fqn}: {error}") from error
    return TensorProperties(
        dtype=dtype,
        layout=layout,
        requires_grad=item.requires_grad,
        memory_format=memory_format,
        pin_memory=item.pin_memory,
    )


def _try_to_remove_superseded(directory: Path, save: SaveKey) -> None:
    # What cannot be removed is garbage that nothing refers to; the commit stands.
    try:
        _remove_superseded(directory, save)
    except OSError as error:
        logger.warning("files of older attempts are left in %s: %s", directory, error)


def _remove_superseded(directory: Path, save: SaveKey) -> None:
    """Remove the files of attempts before this one; a later attempt of the same session may be under way and stays."""
    superseded: list[Path] = []
    for path in directory.iterdir():
        attempt = attempt_of(path.name)
        if attempt is None:
            continue
        session, _, seq = attempt[1].partition("-")
        if session != save.session or int(seq) < save.seq:
            superseded.append(path)
    remove_files(superseded)
