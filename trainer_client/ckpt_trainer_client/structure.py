"""The structure of a state dict: what a plan depends on, and nothing of what changes from step to step.

Compared whole, not hashed: two structures that are not equal never share a plan. Unlike DCP's own plan cache it knows
dtypes and belongs to one client. No tensor is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.tensor import DTensor

from ckpt_trainer_client.errors import UnsupportedLeaf

Structure = dict[str, tuple[Any, ...]]
MAX_CHANGED_KEYS = 20


def structure_of(flat: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]) -> Structure:
    """The structure of a flattened state dict: key -> what its entries in a plan depend on.

    ``paths`` says how each key was nested: the same keys nested otherwise are another structure.

    Raises:
        UnsupportedLeaf: a value has no structure, such as a parameter of a lazy module that has not been initialised.
    """
    structure: Structure = {}
    for fqn, value in flat.items():
        try:
            structure[fqn] = (paths.get(fqn), *leaf_structure(fqn, value))
        except Exception as error:
            kind = type(value)
            raise UnsupportedLeaf(f"{fqn} is a {kind.__module__}.{kind.__qualname__}: {error}") from error
    return structure


def leaf_structure(fqn: str, value: Any) -> tuple[Any, ...]:
    """What the entries of one leaf in a plan depend on."""
    if isinstance(value, DTensor):
        local = value.to_local()
        if not hasattr(local, "__create_write_items__"):
            return ("dtensor", value.shape, value.placements, value.device_mesh, *_tensor(local))
    if hasattr(value, "__create_write_items__"):
        # Tensor subclasses that know their own shards: only the items they make say where those lie.
        return ("items", type(value), tuple(value.__create_write_items__(fqn, value)))
    if hasattr(value, "local_shards"):
        return ("sharded", value.metadata())  # DCP's old ShardedTensor
    if isinstance(value, torch.Tensor):
        return (type(value), *_tensor(value))
    return ("bytes",)


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.dtype, tensor.layout, tensor.requires_grad)


def changed_keys(old: Structure | None, new: Structure) -> tuple[str, ...]:
    """Keys that were added, removed or changed, at most :data:`MAX_CHANGED_KEYS`; empty if there was no old
    structure."""
    if old is None:
        return ()
    changed = [fqn for fqn in {**old, **new} if old.get(fqn) != new.get(fqn)]
    return tuple(changed[:MAX_CHANGED_KEYS])


def planner_key(planner: SavePlanner) -> tuple[Any, ...] | None:
    """What identifies a planner's decisions, or None if they cannot be known and its plan must not be cached.

    A stock planner is known by its options. Of a user's planner only the object itself is certain to decide alike, so
    it is known by identity: pass the same object to every save to have its plan cached.
    """
    if type(planner) is DefaultSavePlanner:
        return (
            DefaultSavePlanner,
            planner.flatten_state_dict,
            planner.flatten_sharded_tensors,
            planner.dedup_save_to_lowest_rank,
        )
    return (type(planner), id(planner)) if isinstance(getattr(planner, "state_dict", None), dict) else None
