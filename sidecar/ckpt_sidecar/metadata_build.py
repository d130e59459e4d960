"""From what lies where to DCP's ``Metadata``. The only importer of DCP's private name ``_StorageInfo``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
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

from ckpt_proto.errors import IncompleteCheckpoint
from ckpt_proto.plan_items import ItemKind, PlanItem
from ckpt_proto.shard_manifest import ShardManifest
from ckpt_sidecar.frames import FrameError, dtype_of

DCP_VERSION = "1.0.0"
"""Value of ``Metadata.version`` that DCP's own writer sets (the field exists since torch 2.9)."""

_MEMORY_FORMATS = {name: getattr(torch, name) for name in ("contiguous_format", "channels_last", "preserve_format")}


@dataclass(frozen=True)
class StoredFile:
    """A data file by its name: the items in it, and the place (offset and length in bytes) of each."""

    name: str
    items: Sequence[PlanItem]
    places: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, manifest: ShardManifest) -> StoredFile:
        """What a manifest says."""
        entries = manifest.entries
        places = [(entry.offset_bytes, entry.length_bytes) for entry in entries]
        return cls(manifest.file_name, [entry.item for entry in entries], places)


def check_items(items: Iterable[PlanItem]) -> None:
    """Every item is there once and the parts of each tensor make it up.

    Raises:
        IncompleteCheckpoint: it is not so; the text names the key and the numbers.
    """
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


def build_metadata(files: Sequence[StoredFile], where: str, save_id: str) -> Metadata:
    """The table of contents that DCP's own planner and writer would have made for these files.

    Raises:
        IncompleteCheckpoint: an item names a dtype, layout or memory format that torch does not have.
    """
    state: dict[str, Any] = {}
    planner_data: dict[str, tuple[str | int, ...]] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for file in files:
        for item, (offset, length) in zip(file.items, file.places, strict=True):
            _add_state(state, item)
            if item.path is not None:
                planner_data[item.fqn] = item.path
            storage[_index(item)] = _StorageInfo(file.name, offset, length)
    metadata = Metadata(
        state_dict_metadata=state,
        planner_data=planner_data or None,
        storage_data=storage,
        # A str: a pickled pathlib.Path is not readable across Python 3.12 / 3.13.
        storage_meta=StorageMeta(checkpoint_id=where, save_id=save_id),
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
