"""Loading with nothing but PyTorch: these functions run on stock ranks, which cannot import our packages.

It must import neither those nor the testkit.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

PLACEMENTS = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1)}


def load_into(checkpoint_id: str, template: dict[str, Any]) -> dict[str, Any]:
    """``template`` after ``dcp.load``: nested, of plain tensors and other values."""
    _assert_stock()
    _load(template, checkpoint_id)
    return template


def load_flat(checkpoint_id: str) -> dict[str, Any]:
    """Every entry of a checkpoint under its flattened key, tensors whole."""
    _assert_stock()
    state = dict.fromkeys(dcp.FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata)
    state.update(_empty_tensors(checkpoint_id))
    _load(state, checkpoint_id)
    return state


def load_each(checkpoint_ids: Sequence[str]) -> dict[str, dict[str, Any] | str]:
    """:func:`load_flat` of each; where that fails, why."""
    found: dict[str, dict[str, Any] | str] = {}
    for checkpoint_id in checkpoint_ids:
        try:
            found[checkpoint_id] = load_flat(checkpoint_id)
        except BaseException as error:  # noqa: BLE001 - DCP's own errors are no Exceptions
            found[checkpoint_id] = f"{type(error).__name__}: {error}"
    return found


def load_onto_mesh(
    checkpoint_id: str, mesh_shape: Sequence[int], placements: Mapping[str, Sequence[str]]
) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, loaded as DTensors on a mesh of all ranks, put together again.

    ``placements`` has, for each key, one of ``R``, ``S0``, ``S1`` per dimension of the mesh.
    """
    _assert_stock()
    mesh = init_device_mesh("cpu", tuple(mesh_shape))
    state: dict[str, Any] = {
        fqn: distribute_tensor(tensor, mesh, [PLACEMENTS[name] for name in placements[fqn]], src_data_rank=None)
        for fqn, tensor in _empty_tensors(checkpoint_id).items()
    }
    _load(state, checkpoint_id)
    assert all(isinstance(tensor, DTensor) for tensor in state.values())
    return {fqn: tensor.full_tensor() for fqn, tensor in state.items()}


def to_torch_save(checkpoint_id: str, target: str) -> None:
    """Convert a checkpoint to one ``torch.save`` file with PyTorch's own tool."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    _assert_stock()
    dcp_to_torch_save(checkpoint_id, target)


def _empty_tensors(checkpoint_id: str) -> dict[str, torch.Tensor]:
    metadata = dcp.FileSystemReader(checkpoint_id).read_metadata()
    return {
        fqn: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for fqn, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _load(state: dict[str, Any], checkpoint_id: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=checkpoint_id, no_dist=not dist.is_initialized())


def _assert_stock() -> None:
    assert not [name for name in sys.modules if name.startswith("ckpt_")]
    try:
        importlib.util.find_spec("ckpt_proto")
    except ImportError:
        return
    raise AssertionError("this process could import our packages")
