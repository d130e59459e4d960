"""Once a save is staged the tensors belong to training again: whatever it does to them, the old values are saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_trainer_client import CheckpointClient
from testkit.ranks import RankStarter
from testkit.sidecars import Sidecar
from testkit.states import adamw_state, blank_like, copied, differences, mapped, nested_state, random_tensor


def spoil(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrite every byte that the tensor can reach."""
    storage = tensor.detach().untyped_storage()
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0x5A)  # type: ignore[call-overload]
    return tensor


def loaded(client: CheckpointClient, state: Any, step: int) -> Any:
    """What the checkpoint of a step holds."""
    target = blank_like(state)
    client.load(target, step)
    return target


def test_every_tensor_is_overwritten_directly_after_save(tmp_path: Path, sidecar: Sidecar) -> None:
    with CheckpointClient(tmp_path) as client:
        client.save(nested_state(0), step=0).result()  # from here on the plan is known and save() is one copy
        state = nested_state(1)
        expected = copied(state)
        with sidecar.hanging():
            handle = client.save(state, step=1)
            assert handle.staged.done()
            assert not handle.persisted.done()
            mapped(state, spoil)
        handle.result()
        assert differences(loaded(client, state, 1), expected) == []


def test_the_first_save_is_as_safe_as_the_later_ones(tmp_path: Path, sidecar: Sidecar) -> None:
    state = nested_state(1)
    expected = copied(state)
    with CheckpointClient(tmp_path) as client:
        handle = client.save(state, step=1)
        mapped(state, spoil)
        handle.result()
        assert differences(loaded(client, state, 1), expected) == []


def test_training_goes_on_while_adamw_is_written(tmp_path: Path, sidecar: Sidecar) -> None:
    model, optimizer = adamw_state(1)
    with CheckpointClient(tmp_path) as client:
        for step in (1, 2, 3):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            expected = [copied(state["optimizer"]["state"]), copied(state["model"])]
            with sidecar.hanging() if step > 1 else nullcontext():  # the first one needs the sidecar, to plan
                handle = client.save(state, step=step)
                model(torch.ones(4, 6)).sum().backward()
                optimizer.step()
            handle.result()
            found = loaded(client, state, step)
            stored = {int(key): value for key, value in found["optimizer"]["state"].items()}
            assert differences([stored, found["model"]], expected) == []
            assert stored[0]["step"].shape == ()
            assert stored[0]["step"] == step


def test_two_saves_that_wait_together_have_each_their_own_values(tmp_path: Path, sidecar: Sidecar) -> None:
    with CheckpointClient(tmp_path, slots=2) as client:
        client.save(nested_state(0), step=0).result()
        states = {step: nested_state(step) for step in (1, 2)}
        handles = []
        with sidecar.hanging():
            for step, state in states.items():
                handles.append(client.save(state, step=step))
                mapped(state, spoil)
        for handle in handles:
            handle.result()
        for step, state in states.items():
            assert differences(loaded(client, state, step), copied(nested_state(step))) == []


def test_a_tensor_that_changes_while_it_is_being_written(tmp_path: Path, start_sidecar: Callable[..., Sidecar]) -> None:
    # Three windows of the writer per save, and a cap that keeps the second save waiting for the first.
    sidecar = start_sidecar(max_write_bytes_per_s=40 << 20)
    weights = torch.empty(5 << 20)
    with CheckpointClient(tmp_path) as client:
        handles = []
        for step in (1, 2):
            weights.fill_(step)
            handles.append(client.save({"weights": weights, "step": torch.tensor(step)}, step=step))
        weights.fill_(9.0)
        for handle in handles:
            handle.result()
        for step in (1, 2):
            found = loaded(client, {"weights": weights, "step": torch.tensor(0)}, step)
            assert found["step"] == step
            assert bool((found["weights"] == step).all())
        assert sidecar.status().committed_count == 2


def save_sharded_and_spoil(directory: str) -> None:
    """Rank code: DTensors, a 0-dim one among them, changed in place after each save."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))

    def make(step: int) -> dict[str, Any]:
        return {
            "sharded": distribute_tensor(random_tensor((5, 3), torch.float32, step), mesh, [Shard(0)]),
            "zero_dim": distribute_tensor(torch.tensor(float(step)), mesh, [Replicate()]),
            "plain": torch.tensor(step),
        }

    with CheckpointClient(directory) as client:
        handles = []
        for step in (1, 2, 3):
            state = make(step)
            handles.append(client.save(state, step=step))
            for tensor in state.values():
                spoil(tensor.to_local() if hasattr(tensor, "to_local") else tensor)
        for handle in handles:
            handle.result()
        for step in (1, 2, 3):
            target = make(77)
            client.load(target, step)
            expected = make(step)
            for key in ("sharded", "zero_dim"):
                assert differences(target[key].to_local(), expected[key].to_local()) == [], (key, step)
            assert target["plain"] == step


def test_sharded_tensors_are_overwritten_directly_after_save(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter
) -> None:
    ranks.run(save_sharded_and_spoil, 2, str(tmp_path), group=True, environment=sidecar.environment)


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_containers_that_change_after_save(tmp_path: Path, sidecar: Sidecar, kind: str) -> None:
    state: dict[str, Any] = {"values": [1, 2], "nested": {"x": torch.tensor(1), "y": 2}}
    with CheckpointClient(tmp_path) as client:
        for step in (1, 2):
            state = {"values": [step, 2], "nested": {"x": torch.tensor(step), "y": step}}
            handle = client.save(state, step=step)
            if kind == "list":
                state["values"].append(3)
            else:
                state["nested"].clear()
            handle.result()
            found = loaded(client, {"values": None, "nested": {"x": torch.tensor(0), "y": None}}, step)
            assert found == {"values": [step, 2], "nested": {"x": torch.tensor(step), "y": step}}
