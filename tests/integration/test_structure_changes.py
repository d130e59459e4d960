"""A state dict that changes its shape: planned anew when all ranks change, refused on every rank when only some do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_trainer_client import CheckpointClient, CheckpointFailed
from testkit.ranks import RankStarter
from testkit.sidecars import Sidecar
from testkit.states import blank_like, copied, differences, random_tensor
from testkit.stock_load import load_each, load_flat

pytestmark = pytest.mark.usefixtures("sidecar")

# Each differs from the one before in the way that its name says.
STATES: dict[str, dict[str, Any]] = {
    "start": {"a": random_tensor((4, 3), torch.float32, 1), "b": random_tensor((5,), torch.float32, 2), "step": 1},
    "grown": {"a": random_tensor((6, 3), torch.float32, 3), "b": random_tensor((5,), torch.float32, 4), "step": 2},
    "shrunk": {"a": random_tensor((1, 3), torch.float32, 5), "b": random_tensor((5,), torch.float32, 6), "step": 3},
    "same bytes, other shape": {"a": random_tensor((3, 1), torch.float32, 7), "b": torch.ones(5), "step": 4},
    "same bytes, other dtype": {"a": random_tensor((3, 1), torch.int32, 8), "b": torch.ones(5), "step": 5},
    "half the bytes": {"a": random_tensor((3, 1), torch.bfloat16, 9), "b": torch.ones(5), "step": 6},
    "key added": {"a": random_tensor((3, 1), torch.bfloat16, 10), "b": torch.ones(5), "c": torch.zeros(2), "step": 7},
    "key removed": {"b": torch.ones(5), "c": torch.zeros(2), "step": 8},
    "keys swapped": {"c": torch.ones(5), "b": torch.zeros(2), "step": 9},
    "tensor became a number": {"c": torch.ones(5), "b": 4.5, "step": 10},
    "number became a tensor": {"c": torch.ones(5), "b": torch.tensor(4.5), "step": torch.tensor(11)},
    "nested": {"c": {"d": [torch.ones(5)]}, "b": torch.tensor(4.5), "step": torch.tensor(12)},
    "much larger": {"a": random_tensor((300_000,), torch.float32, 13)},
    "small again": {"a": random_tensor((3,), torch.float32, 14)},
}


def test_every_change_on_one_rank_is_planned_anew(tmp_path: Path) -> None:
    with CheckpointClient(tmp_path) as client:
        for step, state in enumerate(STATES.values()):
            client.save(state, step=step).result()
            client.save(state, step=100 + step).result()
        for step, (name, state) in enumerate(STATES.items()):
            for saved in (step, 100 + step):
                target = blank_like(state)
                client.load(target, saved)
                assert differences(target, copied(state)) == [], name


def test_a_change_while_earlier_saves_are_being_written(tmp_path: Path) -> None:
    states = list(STATES.values())
    with CheckpointClient(tmp_path) as client:
        handles = [client.save(state, step=step) for step, state in enumerate(states)]
        for handle in handles:
            handle.result()
        for step, state in enumerate(states):
            target = blank_like(state)
            client.load(target, step)
            assert differences(target, copied(state)) == []


def test_only_requires_grad_or_strides_changed(tmp_path: Path) -> None:
    base = random_tensor((4, 4), torch.float32, 1)
    states = [base.clone(), torch.nn.Parameter(base.clone()), base.clone().t(), base.clone()]
    with CheckpointClient(tmp_path) as client:
        for step, tensor in enumerate(states):
            client.save({"x": tensor}, step=step).result()
        for step, tensor in enumerate(states):
            target = {"x": torch.zeros(4, 4)}
            client.load(target, step)
            assert torch.equal(target["x"], tensor.detach())


# ---------------------------------------------------------------- several ranks


def save_each(directory: str, names: list[str]) -> None:
    """Rank code: save states one after the other."""
    with CheckpointClient(directory) as client:
        for step, name in enumerate(names):
            client.save(STATES[name], step=step).result()


def test_every_change_on_all_ranks_is_planned_anew(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter, stock_ranks: RankStarter
) -> None:
    names = [name for name in STATES if name != "nested"]
    ranks.run(save_each, 2, str(tmp_path), names, environment=sidecar.environment)
    places = [str(tmp_path / f"step-{step}") for step in range(len(names))]
    [loaded] = stock_ranks.run(load_each, 1, places)
    for place, name in zip(places, names, strict=True):
        assert differences(loaded[place], copied(STATES[name])) == [], name


def save_with_one_rank_changed(directory: str, odd_rank: int) -> list[str]:
    """Rank code: rank ``odd_rank`` alone has another shape in the middle; the texts of the failures."""
    rank = int(os.environ["RANK"])
    texts = []
    with CheckpointClient(directory) as client:
        usual = {"weight": torch.ones(4), "bias": torch.ones(2)}
        for step in (1, 2):
            client.save(usual, step=step).result()
        changed = {"weight": torch.ones(5), "bias": torch.ones(2)}
        for step in (3, 5):
            handle = client.save(changed if rank == odd_rank else usual, step=step)
            try:
                handle.result()
            except CheckpointFailed as error:
                texts.append(str(error))
            client.save(usual, step=step + 1).result()
        client.save(changed, step=7).result()
        assert client.steps() == [1, 2, 4, 6, 7]
    return texts


@pytest.mark.parametrize("odd_rank", [0, 1])
def test_a_change_on_one_rank_fails_on_every_rank_and_names_rank_and_key(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter, stock_ranks: RankStarter, odd_rank: int
) -> None:
    results = ranks.run(save_with_one_rank_changed, 2, str(tmp_path), odd_rank, environment=sidecar.environment)
    for texts in results:
        assert len(texts) == 2
        for text in texts:
            assert f"rank {odd_rank}" in text
            assert "weight" in text
            assert "bias" not in text
    for step in (4, 6):
        [found] = stock_ranks.run(load_flat, 1, str(tmp_path / f"step-{step}"))
        assert differences(found, {"weight": torch.ones(4), "bias": torch.ones(2)}) == []


def save_other_keys(directory: str) -> str:
    """Rank code: each rank has keys of its own, from the first save on."""
    rank = int(os.environ["RANK"])
    with CheckpointClient(directory) as client:
        for step in (1, 2):
            where = client.save({f"of rank {rank}": torch.tensor(10 * step + rank)}, step=step).result()
    return where


@pytest.mark.parametrize("world_size", [3, 8])
def test_ranks_may_have_different_keys(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter, stock_ranks: RankStarter, world_size: int
) -> None:
    [where, *_] = ranks.run(save_other_keys, world_size, str(tmp_path), environment=sidecar.environment)
    [found] = stock_ranks.run(load_flat, 1, where)
    assert found == {f"of rank {rank}": torch.tensor(20 + rank) for rank in range(world_size)}


def save_nothing_on_some_ranks(directory: str) -> str:
    """Rank code: only rank 1 has anything to save."""
    rank = int(os.environ["RANK"])
    with CheckpointClient(directory) as client:
        for step in (1, 2):
            where = client.save({"x": torch.tensor(step)} if rank == 1 else {}, step=step).result()
    return where


def test_ranks_with_nothing_to_save(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter, stock_ranks: RankStarter
) -> None:
    [where, *_] = ranks.run(save_nothing_on_some_ranks, 3, str(tmp_path), environment=sidecar.environment)
    [found] = stock_ranks.run(load_flat, 1, where)
    assert found == {"x": torch.tensor(2)}


def save_contradicting_shapes(directory: str) -> str:
    """Rank code: one key, two global shapes."""
    from ckpt_trainer_client import PlanningError

    rank = int(os.environ["RANK"])
    with CheckpointClient(directory) as client:
        try:
            handle = client.save({"weight": torch.ones(3 + rank), "bias": torch.ones(1)}, step=1)
            handle.committed.exception()
            text = str(handle.error())
        except PlanningError as error:
            text = str(error)
        client.save({"weight": torch.ones(3)}, step=2).result()
        assert client.steps() == [2]
    return text


def test_shapes_that_contradict_each_other_under_one_key(tmp_path: Path, sidecar: Sidecar, ranks: RankStarter) -> None:
    for text in ranks.run(save_contradicting_shapes, 2, str(tmp_path), environment=sidecar.environment):
        assert "weight" in text
        assert "bias" not in text


# ---------------------------------------------------------------- byte entries


def test_values_that_grow_from_save_to_save(tmp_path: Path, sidecar: Sidecar) -> None:
    sizes = [10, 1_000, 100_000, 100_001, 3_000_000, 5, 2_000_000]
    with CheckpointClient(tmp_path) as client:
        handles = []
        for step, size in enumerate(sizes):
            state = {"x": torch.full((100,), float(step)), "blob": os.urandom(size), "text": "x" * size}
            handles.append((state, client.save(state, step=step)))
        for step, (state, handle) in enumerate(handles):
            handle.result()
            target = blank_like(state)
            client.load(target, step)
            assert differences(target, state) == []


def save_growing(directory: str) -> None:
    """Rank code: values that grow on one rank only."""
    rank = int(os.environ["RANK"])
    with CheckpointClient(directory) as client:
        for step, size in enumerate((10, 200_000, 1_000_000)):
            mine = {"loader": bytes([rank]) * (size if rank else 10)}
            state = {"x": torch.full((10,), float(step))}
            client.save(state, step=step, per_rank=mine).result()
            found = {"loader": b""}
            client.load({"x": torch.zeros(10)}, step, per_rank=found)
            assert found == mine


def test_values_that_grow_on_one_rank(tmp_path: Path, sidecar: Sidecar, ranks: RankStarter) -> None:
    ranks.run(save_growing, 2, str(tmp_path), environment=sidecar.environment)


# ---------------------------------------------------------------- disagreement


def save_different_steps(directory: str) -> str:
    """Rank code: the ranks are one step apart."""
    rank = int(os.environ["RANK"])
    with CheckpointClient(directory) as client:
        client.save({"x": torch.ones(2)}, step=1).result()
        handle = client.save({"x": torch.ones(2)}, step=2 + rank)
        handle.committed.exception()
        text = str(handle.error())
        client.save({"x": torch.ones(2)}, step=9).result()
        assert client.steps() == [1, 9]
    return text


def test_steps_that_differ_between_ranks(tmp_path: Path, sidecar: Sidecar, ranks: RankStarter) -> None:
    for text in ranks.run(save_different_steps, 2, str(tmp_path), environment=sidecar.environment):
        assert "save number 1 is of step" in text
        assert "on rank 0" in text
        assert "on rank 1" in text
    assert not (tmp_path / "step-2").exists()
    assert not (tmp_path / "step-3").exists()


def skip_a_save_on_rank_1(directory: str) -> str:
    """Rank code: rank 1 does not call save() at all; how the save ended on rank 0."""
    import torch.distributed as dist

    with CheckpointClient(directory, stage_timeout_s=0.5) as client:
        client.save({"x": torch.ones(2)}, step=1).result()
        text = ""
        if dist.get_rank() == 0:
            handle = client.save({"x": torch.ones(2)}, step=2)
            handle.committed.exception()
            text = str(handle.error())
        dist.barrier()
    return text


def test_a_rank_that_never_calls_save_is_named(tmp_path: Path, sidecar: Sidecar, ranks: RankStarter) -> None:
    [text, _] = ranks.run(skip_a_save_on_rank_1, 2, str(tmp_path), group=True, environment=sidecar.environment)
    assert "rank 1 on" in text
    assert "has not staged step 2 after" in text
    assert not (tmp_path / "step-2").exists()


def save_first_with_different_steps(directory: str) -> str:
    """Rank code: the ranks disagree from the first save on, before any plan exists."""
    rank = int(os.environ["RANK"])
    with CheckpointClient(directory) as client:
        handle = client.save({"x": torch.ones(2)}, step=2 + rank)
        handle.committed.exception()
        text = str(handle.error())
        client.save({"x": torch.ones(2)}, step=9).result()
    return text


def test_steps_that_differ_at_the_first_save(tmp_path: Path, sidecar: Sidecar, ranks: RankStarter) -> None:
    for text in ranks.run(save_first_with_different_steps, 2, str(tmp_path), environment=sidecar.environment):
        assert "save number 0 is of step" in text


def save_values_that_differ(directory: str) -> list[str]:
    """Rank code: random state under one key; what the client logs as warnings."""
    import logging

    rank = int(os.environ["RANK"])
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt_trainer_client").addHandler(handler)
    with CheckpointClient(directory) as client:
        for step in (1, 2):
            client.save({"rng": bytes([rank]), "epoch": 3, "x": torch.ones(2)}, step=step).result()
    return records


def test_values_that_differ_between_ranks_under_one_key_are_warned_of(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter
) -> None:
    for records in ranks.run(save_values_that_differ, 2, str(tmp_path), environment=sidecar.environment):
        [warning] = records
        assert "rng" in warning
        assert "per_rank" in warning
        assert "epoch" not in warning


def overwrite_on_one_rank(directory: str) -> str:
    """Rank code: only rank 0 allows the step to be replaced."""
    from ckpt_trainer_client import AlreadyCommitted

    rank = int(os.environ["RANK"])
    with CheckpointClient(directory) as client:
        client.save({"x": torch.tensor(1)}, step=1).result()
        try:
            handle = client.save({"x": torch.tensor(2)}, step=1, overwrite=rank == 0)
            handle.committed.exception()
            text = str(handle.error())
        except AlreadyCommitted as error:
            text = str(error)
        target = {"x": torch.tensor(0)}
        client.load(target, 1)
        assert target["x"] == 1
    return text


def test_one_rank_alone_cannot_overwrite_a_step(tmp_path: Path, sidecar: Sidecar, ranks: RankStarter) -> None:
    for text in ranks.run(overwrite_on_one_rank, 2, str(tmp_path), environment=sidecar.environment):
        assert "step 1" in text
        assert "overwrite" in text
