"""What stock PyTorch makes of our checkpoints: sharded saves loaded on other numbers of ranks and other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_trainer_client import CheckpointClient
from testkit.ranks import RankStarter
from testkit.sharded_states import LOADED_1D, LOADED_2D, expected
from testkit.sidecars import Sidecar
from testkit.states import differences
from testkit.stock_load import load_flat, load_onto_mesh, to_torch_save


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["1d", "2d"])
def test_stock_dcp_loads_it_on_another_mesh_bit_for_bit(
    sharded_saves: dict[str, tuple[Path, Path]], name: str, mesh_shape: tuple[int, ...], stock_ranks: RankStarter
) -> None:
    placements = LOADED_1D if len(mesh_shape) == 1 else LOADED_2D
    world_size = mesh_shape[0] * len(mesh_shape)
    results = stock_ranks.run(
        load_onto_mesh, world_size, str(sharded_saves[name][0]), mesh_shape, placements, group=True
    )
    for found in results:
        assert differences(found, expected(2)) == []


@pytest.mark.parametrize("name", ["1d", "2d"])
def test_stock_dcp_loads_it_whole_without_a_process_group(
    sharded_saves: dict[str, tuple[Path, Path]], name: str, stock_ranks: RankStarter
) -> None:
    [found] = stock_ranks.run(load_flat, 1, str(sharded_saves[name][0]))
    assert differences(found, expected(2)) == []
    [earlier] = stock_ranks.run(load_flat, 1, str(sharded_saves[name][0].with_name("step-1")))
    assert differences(earlier, expected(1)) == []


def test_the_conversion_tool_of_pytorch_reads_it(
    sharded_saves: dict[str, tuple[Path, Path]], tmp_path: Path, stock_ranks: RankStarter
) -> None:
    stock_ranks.run(to_torch_save, 1, str(sharded_saves["2d"][0]), str(tmp_path / "whole.pt"))
    assert differences(torch.load(tmp_path / "whole.pt"), expected(2)) == []


# ---------------------------------------------------------------- real parallel models


def fsdp_model(seed: int, *, tensor_parallel: bool) -> tuple[Any, Any]:
    """Rank code: an FSDP2 model, on a 2x2 mesh with tensor parallelism, after one step of AdamW."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 8))
    if tensor_parallel:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def fsdp_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """Rank code: what a training script would save."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": 3}


def save_fsdp(directory: str, tensor_parallel: bool) -> dict[str, torch.Tensor]:
    """Rank code: save, and the whole tensors as FSDP puts them together."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.tensor import DTensor

    model, optimizer = fsdp_model(1, tensor_parallel=tensor_parallel)
    state = fsdp_state(model, optimizer)
    with CheckpointClient(directory) as client:
        client.save(state, step=1).result()
        other_model, other_optimizer = fsdp_model(2, tensor_parallel=tensor_parallel)
        target = fsdp_state(other_model, other_optimizer)
        client.load(target)
    flat, loaded = flatten_state_dict(state)[0], flatten_state_dict(target)[0]
    full = {key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in flat.items()}
    again = {key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in loaded.items()}
    assert differences(again, full) == []
    return {key: value for key, value in full.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("tensor_parallel", [False, True], ids=["FSDP2", "FSDP2 with tensor parallelism"])
def test_a_parallel_model_and_its_adamw(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter, stock_ranks: RankStarter, tensor_parallel: bool
) -> None:
    world_size = 4 if tensor_parallel else 2
    arguments = (str(tmp_path), tensor_parallel)
    [full, *_] = ranks.run(save_fsdp, world_size, *arguments, group=True, environment=sidecar.environment)
    assert len(full) == 16
    [found] = stock_ranks.run(load_flat, 1, str(tmp_path / "step-1"))
    assert differences({key: found[key] for key in full}, full) == []
    assert found["step"] == 3
