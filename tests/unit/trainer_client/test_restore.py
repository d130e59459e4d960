"""Finding and loading committed steps: in place, through stock DCP, and never what was not committed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_sidecar.commit import publish_checkpoint
from ckpt_trainer_client.errors import LoadFailed, NoCheckpoint
from ckpt_trainer_client.restore import committed_steps, load_step, with_per_rank
from testkit.plans import persist_attempt, save_key
from testkit.states import blank_like, differences, nested_state


def commit(directory: Path, step: int, state: dict[str, Any]) -> None:
    publish_checkpoint(persist_attempt(directory, [state], save_key(step)))


# ---------------------------------------------------------------- which steps there are


def test_a_directory_that_is_not_there_has_no_steps(tmp_path: Path) -> None:
    assert committed_steps(str(tmp_path / "missing")) == []
    assert committed_steps(str(tmp_path)) == []


def test_committed_steps_are_in_numeric_order(tmp_path: Path) -> None:
    for step in (300, 7, 1000):
        commit(tmp_path, step, {"a": 1})
    persist_attempt(tmp_path, [{"a": 1}], save_key(8))  # durable, never committed
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-010").mkdir()
    (tmp_path / "notes").write_text("")
    assert committed_steps(str(tmp_path)) == [7, 300, 1000]


def test_a_directory_that_is_a_file_is_an_error_and_not_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        committed_steps(str(tmp_path / "file"))


# ---------------------------------------------------------------- loading


def test_a_step_is_loaded_in_place(tmp_path: Path) -> None:
    commit(tmp_path, 5, {"w": torch.arange(4.0), "inner": {"n": 3, "list": [torch.ones(2)]}, "step": 5})
    weight, inner = torch.zeros(4), {"n": 0, "list": [torch.zeros(2)]}
    state: dict[str, Any] = {"w": weight, "inner": inner, "step": 0}
    load_step(state, str(tmp_path), 5)
    assert state["w"] is weight
    assert weight.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert state["inner"] is inner
    assert inner["n"] == 3
    assert inner["list"][0].tolist() == [1.0, 1.0]
    assert state["step"] == 5
    assert list(state) == ["w", "inner", "step"]


def test_the_steps_are_told_apart(tmp_path: Path) -> None:
    for step in (1, 2):
        commit(tmp_path, step, {"step": step})
    state = {"step": 0}
    load_step(state, str(tmp_path), 1)
    assert state == {"step": 1}
    load_step(state, str(tmp_path), 2)
    assert state == {"step": 2}


def test_an_object_with_a_state_dict_is_loaded(tmp_path: Path) -> None:
    saved, target = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    commit(tmp_path, 5, {"model": saved})
    load_step({"model": target}, str(tmp_path), 5)
    assert torch.equal(saved.weight, target.weight)
    assert torch.equal(saved.bias, target.bias)


def test_a_whole_state_comes_back(tmp_path: Path) -> None:
    commit(tmp_path, 5, nested_state(1))
    state = blank_like(nested_state(1))
    load_step(state, str(tmp_path), 5)
    assert differences(state, nested_state(1)) == []


def test_loading_alone_is_no_reason_for_a_warning(tmp_path: Path) -> None:
    """Warnings are errors here; DCP has one for a process without a group."""
    commit(tmp_path, 5, {"a": 1})
    load_step({"a": 0}, str(tmp_path), 5)


# ---------------------------------------------------------------- per rank


def test_per_rank_state_lies_under_a_name_of_its_rank() -> None:
    state, mine = {"a": 1}, {"seed": 3}
    whole = with_per_rank(state, mine, 7)
    assert whole == {"a": 1, "per_rank": {"rank-7": {"seed": 3}}}
    assert whole["per_rank"]["rank-7"] is mine
    assert state == {"a": 1}
    assert with_per_rank(state, None, 7) is state


def test_the_reserved_name_is_refused() -> None:
    with pytest.raises(ValueError, match="a key 'per_rank'"):
        with_per_rank({"per_rank": 1}, {"seed": 1}, 0)
    assert with_per_rank({"per_rank": 1}, None, 0) == {"per_rank": 1}


def two_ranks(tmp_path: Path) -> None:
    states = [
        with_per_rank({"w": torch.ones(3), "step": 5}, {"seed": rank, "state": torch.full((2,), rank)}, rank)
        for rank in range(2)
    ]
    publish_checkpoint(persist_attempt(tmp_path, states))


@pytest.mark.parametrize("rank", [0, 1])
def test_load_with_per_rank_reaches_the_callers_dict(tmp_path: Path, rank: int) -> None:
    """Each rank gets its own, and what all have: tensors and other values, nested or at the top."""
    two_ranks(tmp_path)
    state, mine = {"w": torch.zeros(3), "step": 0}, {"seed": -1, "state": torch.zeros(2, dtype=torch.int64)}
    load_step(state, str(tmp_path), 5, mine, rank)
    assert state["w"].tolist() == [1.0] * 3
    assert state["step"] == 5
    assert list(state) == ["w", "step"]
    assert mine["seed"] == rank
    assert mine["state"].tolist() == [rank] * 2


def test_per_rank_state_need_not_be_asked_for(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    state = {"step": 0}
    load_step(state, str(tmp_path), 5)
    assert state == {"step": 5}


def test_random_state_comes_back(tmp_path: Path) -> None:
    source = random.Random(3)
    commit(tmp_path, 5, with_per_rank({}, {"random": source.getstate(), "torch": torch.get_rng_state()}, 0))
    expected = source.random()
    mine: dict[str, Any] = {"random": None, "torch": torch.zeros_like(torch.get_rng_state())}
    load_step({}, str(tmp_path), 5, mine, 0)
    other = random.Random()
    other.setstate(mine["random"])
    assert other.random() == expected
    assert torch.equal(mine["torch"], torch.get_rng_state())


# ---------------------------------------------------------------- refusals


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    commit(tmp_path, 7, {"a": 1})
    with pytest.raises(NoCheckpoint, match=rf"step-8 does not exist; committed steps in {tmp_path}: \[7\]"):
        load_step({"a": 0}, str(tmp_path), 8)


def test_a_step_that_was_never_committed_is_refused(tmp_path: Path) -> None:
    persist_attempt(tmp_path, [{"a": 1}])
    state = {"a": 0}
    with pytest.raises(NoCheckpoint, match="step-5 exists but was never committed; committed steps in .*: none"):
        load_step(state, str(tmp_path), 5)
    assert state == {"a": 0}


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"w": torch.zeros(3), "extra": torch.zeros(1)}, "Missing key in checkpoint state_dict: extra"),
        ({"w": torch.zeros(7)}, "Size mismatch"),
    ],
    ids=["key", "shape"],
)
def test_a_state_dict_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, target: dict[str, Any], reason: str
) -> None:
    """DCP's own error is no Exception: a trainer's ``except Exception`` would miss it."""
    commit(tmp_path, 5, {"w": torch.ones(3)})
    with pytest.raises(LoadFailed, match=rf"step-5 could not be loaded: rank 0: \w+: {reason}"):
        load_step(target, str(tmp_path), 5)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    commit(tmp_path, 5, {"w": torch.ones(3)})
    [data] = (tmp_path / "step-5").glob("*.distcp")
    data.unlink()
    with pytest.raises(LoadFailed, match="FileNotFoundError"):
        load_step({"w": torch.zeros(3)}, str(tmp_path), 5)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of one; its collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_process_group_is_used_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(tmp_path, 5, {"a": 1})
    state = {"a": 0}
    load_step(state, str(tmp_path), 5)
    assert state == {"a": 1}


def test_keys_that_were_not_asked_for_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An optimizer without its state is asked for by mistake more often than on purpose."""
    commit(tmp_path, 7, {"model": {"w": torch.ones(2)}, "optim": {"exp_avg": torch.ones(2)}})
    load_step({"model": {"w": torch.zeros(2)}}, str(tmp_path), 7)
    assert "1 keys that were not asked for and so not loaded: optim.exp_avg" in caplog.text
    caplog.clear()
    load_step({"model": {"w": torch.zeros(2)}, "optim": {"exp_avg": torch.zeros(2)}}, str(tmp_path), 7)
    assert "not asked for" not in caplog.text
