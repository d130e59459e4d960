"""DCP's plan objects <-> the records that cross the socket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckpt_proto.plan_items import ItemKind, Plan, PlanItem
from ckpt_trainer_client.errors import PlanningError

_KINDS = {
    WriteItemType.TENSOR: ItemKind.TENSOR.value,
    WriteItemType.SHARD: ItemKind.SHARD.value,
    WriteItemType.BYTE_IO: ItemKind.BYTES.value,
}
_TYPES = {kind: item_type for item_type, kind in _KINDS.items()}


def to_wire(plan: SavePlan) -> Plan:
    """The plan as records. ``opaque`` is not known to DCP and left False.

    Raises:
        PlanningError: the plan's ``planner_data`` is neither None nor a mapping of keys to paths.
    """
    paths = plan.planner_data
    if paths is not None and not isinstance(paths, Mapping):
        raise PlanningError(
            f"planner_data is a {type(paths).__name__}; a sidecar can carry a mapping of keys to paths only"
        )
    return tuple(_to_item(item, paths or {}) for item in plan.items)


def _to_item(item: WriteItem, paths: Mapping[str, Any]) -> PlanItem:
    fqn, data = item.index.fqn, item.tensor_data
    path = paths.get(fqn)
    path = None if path is None else tuple(path)
    hint = -1 if item.index.index is None else item.index.index
    if data is None:
        return PlanItem(fqn, _KINDS[item.type], path, index_hint=hint)
    properties = data.properties
    return PlanItem(
        fqn=fqn,
        kind=_KINDS[item.type],
        path=path,
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
        global_sizes=tuple(data.size),
        dtype=_name(properties.dtype),
        requires_grad=bool(properties.requires_grad),
        pin_memory=bool(properties.pin_memory),
        layout=_name(properties.layout),
        memory_format=_name(properties.memory_format),
        index_hint=hint,
    )


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


def from_wire(plan: Plan) -> SavePlan:
    """The records as DCP's plan, ``planner_data`` included if the items have paths."""
    paths = {item.fqn: item.path for item in plan if item.path is not None}
    has_paths = bool(paths) or not plan
    return SavePlan([_from_item(item) for item in plan], planner_data=paths if has_paths else None)


def _from_item(item: PlanItem) -> WriteItem:
    hint = item.index_hint if item.index_hint >= 0 else None
    if item.kind == ItemKind.BYTES.value:
        return WriteItem(MetadataIndex(item.fqn, index=hint), _TYPES[item.kind])
    offsets = torch.Size(item.offsets)
    properties = TensorProperties(
        dtype=getattr(torch, item.dtype),
        layout=getattr(torch, item.layout),
        requires_grad=item.requires_grad,
        memory_format=getattr(torch, item.memory_format),
        pin_memory=item.pin_memory,
    )
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, torch.Size(item.sizes)), properties, torch.Size(item.global_sizes)
    )
    return WriteItem(MetadataIndex(item.fqn, offsets, hint), _TYPES[item.kind], tensor_data=data)
