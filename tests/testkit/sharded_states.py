"""Global tensors whose sizes no mesh divides, as DTensors, saved through us and through stock ``dcp.save``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from testkit.states import differences, random_tensor
from testkit.stock_load import PLACEMENTS

SHAPES: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
    "five": ((5,), torch.float32),
    "two": ((2,), torch.bfloat16),
    "one": ((1,), torch.float32),
    "five_by_seven": ((5, 7), torch.float32),
    "seven_by_two": ((7, 2), torch.bfloat16),
    "two_by_one": ((2, 1), torch.float16),
    "one_by_five": ((1, 5), torch.int64),
    "even": ((8, 8), torch.float64),
    "cube": ((3, 5, 2), torch.complex64),
}
"""Uneven shards, empty ones, and ranks with nothing at all, on every mesh with more than one rank."""

SAVED_1D = {fqn: ["S1"] if fqn == "one_by_five" else ["S0"] for fqn in SHAPES} | {"even": ["R"]}
SAVED_2D = {fqn: ["S0", "R"] if len(shape) == 1 else ["S0", "S1"] for fqn, (shape, _) in SHAPES.items()} | {
    "even": ["R", "S0"],
    "seven_by_two": ["S0", "S0"],
    "cube": ["S1", "S0"],
}
LOADED_1D = {fqn: ["R"] if fqn == "cube" else ["S0"] for fqn in SHAPES}
LOADED_2D = {fqn: ["R", "S0"] if len(shape) == 1 else ["S1", "S0"] for fqn, (shape, _) in SHAPES.items()}


def whole(fqn: str, seed: int) -> torch.Tensor:
    """The global tensor of a key."""
    shape, dtype = SHAPES[fqn]
    return random_tensor(shape, dtype, seed + len(fqn))


def expected(seed: int) -> dict[str, torch.Tensor]:
    """All global tensors."""
    return {fqn: whole(fqn, seed) for fqn in SHAPES}


def sharded_state(mesh_shape: Sequence[int], placements: Mapping[str, Sequence[str]], seed: int) -> dict[str, Any]:
    """Rank code: the global tensors as DTensors."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", tuple(mesh_shape))
    return {
        fqn: distribute_tensor(
            whole(fqn, seed), mesh, [PLACEMENTS[name] for name in placements[fqn]], src_data_rank=None
        )
        for fqn in SHAPES
    }


def save_sharded(
    directory: str, stock_directory: str, mesh_shape: Sequence[int], placements: Mapping[str, Sequence[str]]
) -> None:
    """Rank code: two saves with one plan, loaded again; the second one is saved by stock ``dcp.save`` too."""
    import torch.distributed.checkpoint as dcp

    from ckpt_trainer_client import CheckpointClient

    with CheckpointClient(directory) as client:
        for step in (1, 2):
            state = sharded_state(mesh_shape, placements, step)
            client.save(state, step=step).result()
        dcp.save(state, checkpoint_id=stock_directory)
        target = sharded_state(mesh_shape, placements, 77)
        assert client.load(target) == 2
        for fqn, tensor in target.items():
            assert differences(tensor.to_local(), state[fqn].to_local()) == [], fqn
