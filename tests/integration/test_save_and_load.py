"""One client from first save to close: what it saves comes back bit for bit, and its handles tell what happened."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckpt_trainer_client import (
    AlreadyCommitted,
    CheckpointClient,
    CheckpointFailed,
    ClientClosed,
    NoCheckpoint,
)
from testkit.ranks import RankStarter
from testkit.sidecars import Sidecar
from testkit.states import adamw_state, blank_like, copied, differences, mapped, nested_state, random_tensor, same_bits
from testkit.stock_load import load_flat, load_into
from testkit.waiting import wait_until

pytestmark = pytest.mark.usefixtures("sidecar")


def loaded(client: CheckpointClient, state: Any, step: int) -> Any:
    """What the client loads for a state of this structure."""
    target = blank_like(state)
    assert client.load(target, step) == step
    return target


# ---------------------------------------------------------------- values


def test_every_kind_of_value_comes_back_bit_for_bit(tmp_path: Path, stock_ranks: RankStarter) -> None:
    state = nested_state(1)
    expected = copied(state)
    with CheckpointClient(tmp_path) as client:
        where = client.save(state, step=1).result()
        assert differences(loaded(client, state, 1), expected) == []
    [from_stock] = stock_ranks.run(load_into, 1, where, blank_like(state))
    assert differences(from_stock, expected) == []


def test_several_saves_of_one_client_each_hold_their_own_values(tmp_path: Path) -> None:
    with CheckpointClient(tmp_path) as client:
        handles = [client.save(nested_state(step), step=step) for step in range(1, 6)]
        assert [handle.result() for handle in handles] == [str(tmp_path / f"step-{step}") for step in range(1, 6)]
        for step in range(1, 6):
            state = nested_state(step)
            assert differences(loaded(client, state, step), copied(state)) == []


def test_adamw_and_its_model_are_resumed_exactly(tmp_path: Path) -> None:
    model, optimizer = adamw_state(1)
    with CheckpointClient(tmp_path) as client:
        client.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, step=1).result()
        expected = copied(optimizer.state_dict()["state"])
        other_model, other_optimizer = adamw_state(2)
        target = {"model": other_model.state_dict(), "optimizer": other_optimizer.state_dict(), "step": 0}
        client.load(target)
    other_model.load_state_dict(target["model"])
    other_optimizer.load_state_dict(target["optimizer"])
    assert target["step"] == 1
    assert differences(other_model.state_dict(), copied(model.state_dict())) == []
    assert differences(other_optimizer.state_dict()["state"], expected) == []
    assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_objects_with_state_dict_are_saved_and_loaded(tmp_path: Path) -> None:
    model, optimizer = adamw_state(1)
    expected = copied(model.state_dict())
    other_model, other_optimizer = adamw_state(2)
    with CheckpointClient(tmp_path) as client:
        client.save({"model": model, "optimizer": optimizer, "step": 7}, step=1).result()
        target = {"model": other_model, "optimizer": other_optimizer, "step": 0}
        client.load(target)
    assert target["step"] == 7
    assert differences(other_model.state_dict(), expected) == []
    assert differences(other_optimizer.state_dict()["state"], copied(optimizer.state_dict()["state"])) == []


def test_parameters_whose_storage_was_replaced_between_saves(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    with CheckpointClient(tmp_path) as client:
        client.save(model.state_dict(), step=1).result()
        model.weight.data = random_tensor((3, 4), torch.float32, 5)
        client.save(model.state_dict(), step=2).result()
        storage = model.weight.data.untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        storage.resize_(nbytes)
        model.weight.data.fill_(7.0)
        client.save(model.state_dict(), step=3).result()
        expected = {1: None, 2: random_tensor((3, 4), torch.float32, 5), 3: torch.full((3, 4), 7.0)}
        for step in (2, 3):
            assert same_bits(loaded(client, model.state_dict(), step)["weight"], expected[step])


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:TypedStorage:UserWarning")
def test_quantised_tensors_are_stored_as_torch_saves_them(tmp_path: Path, stock_ranks: RankStarter) -> None:
    def quantised(values: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor(values, scale=0.5, zero_point=3, dtype=torch.quint8)

    dense = torch.tensor([[0.0, 2.0], [3.0, 0.5]])
    with CheckpointClient(tmp_path) as client:
        for step in (1, 2):
            where = client.save({"quantised": quantised(dense + step), "dense": dense + step}, step=step).result()
    template = {"quantised": quantised(torch.zeros(2, 2)), "dense": torch.zeros(2, 2)}
    [found] = stock_ranks.run(load_into, 1, where, template)
    assert torch.equal(found["quantised"].int_repr(), quantised(dense + 2).int_repr())
    assert torch.equal(found["dense"], dense + 2)


@pytest.mark.parametrize(
    "state",
    [{}, {"empty": torch.empty(0)}, {"step": 3}, {"nothing": {}, "list": []}],
    ids=["no key", "an empty tensor", "one number", "empty containers"],
)
def test_a_state_with_hardly_anything_in_it(tmp_path: Path, state: dict[str, Any], stock_ranks: RankStarter) -> None:
    with CheckpointClient(tmp_path) as client:
        for step in (1, 2):
            where = client.save(state, step=step).result()
    [found] = stock_ranks.run(load_flat, 1, where)
    expected = {key: value for key, value in state.items() if value != {}}
    assert differences(found, copied(expected)) == []


def test_blocking_save_writes_the_same_bytes_as_an_asynchronous_one(tmp_path: Path) -> None:
    state = nested_state(3)
    with CheckpointClient(tmp_path) as client:
        handle = client.save(state, step=1, blocking=True)
        assert handle.committed.done()
        client.save(state, step=2).result()
    [one] = (tmp_path / "step-1").glob("*.distcp")
    [other] = (tmp_path / "step-2").glob("*.distcp")
    assert one.read_bytes() == other.read_bytes()


def test_step_zero_and_the_largest_step(tmp_path: Path) -> None:
    with CheckpointClient(tmp_path) as client:
        for step in (0, 2**63 - 2):
            client.save({"x": torch.tensor(1)}, step=step).result()
        assert client.steps() == [0, 2**63 - 2]
        assert client.latest() == 2**63 - 2


# ---------------------------------------------------------------- planners


class CountingPlanner(DefaultSavePlanner):
    """Saves under other keys than it is given, and counts how often it planned."""

    plans = 0

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(
            {f"saved_{key}": value for key, value in state_dict.items()}, storage_meta, is_coordinator
        )

    def create_local_plan(self) -> Any:
        self.plans += 1
        return super().create_local_plan()


def test_the_plan_of_a_users_planner_is_kept_while_it_is_the_same_object(
    tmp_path: Path, stock_ranks: RankStarter
) -> None:
    planner = CountingPlanner()
    with CheckpointClient(tmp_path, planner=planner) as client:
        for step in (1, 2, 3):
            where = client.save({"x": torch.tensor(step)}, step=step).result()
        assert planner.plans == 1
        client.save({"x": torch.tensor(4)}, step=4, planner=CountingPlanner()).result()
        client.save({"x": torch.tensor(5), "y": torch.tensor(5)}, step=5).result()
        assert planner.plans == 2
    [found] = stock_ranks.run(load_flat, 1, where)
    assert found == {"saved_x": torch.tensor(3)}


class DemandingPlanner(DefaultSavePlanner):
    """Expects the caller's keys, as a user's planner may."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({"model": state_dict["model"]}, storage_meta, is_coordinator)


def test_a_planner_is_only_ever_given_the_state_that_the_user_saves(tmp_path: Path, stock_ranks: RankStarter) -> None:
    with CheckpointClient(tmp_path, planner=DemandingPlanner()) as client:
        for step in (1, 2):
            where = client.save({"model": torch.tensor(step), "left out": 1}, step=step).result()
    [found] = stock_ranks.run(load_flat, 1, where)
    assert found == {"model": torch.tensor(2)}


def save_replicated(directory: str) -> list[str]:
    """Rank code: the same state on every rank, kept by the lowest one."""
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    state = {f"layer {index}": torch.full((100,), float(index)) for index in range(4)}
    with CheckpointClient(directory, planner=planner) as client:
        where = Path(client.save(state, step=1).result())
        client.save(state, step=2).result()
    return sorted(path.name for path in where.glob("*.distcp") if path.stat().st_size)


def test_deduplication_to_the_lowest_rank_leaves_the_other_ranks_nothing_to_write(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter, stock_ranks: RankStarter
) -> None:
    [files, _] = ranks.run(save_replicated, 2, str(tmp_path), environment=sidecar.environment)
    assert [name[:4] for name in files] == ["__0_"]
    [found] = stock_ranks.run(load_flat, 1, str(tmp_path / "step-2"))
    assert differences(found, {f"layer {index}": torch.full((100,), float(index)) for index in range(4)}) == []


# ---------------------------------------------------------------- state of one rank


def save_own_randomness(directory: str) -> tuple[Any, Any]:
    """Rank code: what belongs to this rank alone, saved and loaded again."""
    import os

    rank = int(os.environ["RANK"])
    mine = {"rng": torch.Generator().manual_seed(rank).get_state(), "python": random.Random(rank).getstate()}
    with CheckpointClient(directory) as client:
        client.save({"weight": torch.ones(3)}, step=1, per_rank=mine).result()
        found = blank_like(mine)
        state = {"weight": torch.zeros(3)}
        client.load(state, per_rank=found)
    assert torch.equal(state["weight"], torch.ones(3))
    return mine, found


def test_each_rank_gets_its_own_state_back(tmp_path: Path, sidecar: Sidecar, ranks: RankStarter) -> None:
    for mine, found in ranks.run(save_own_randomness, 2, str(tmp_path), environment=sidecar.environment):
        assert differences(found, mine) == []


def test_the_key_of_per_rank_state_cannot_be_taken_twice(tmp_path: Path) -> None:
    with CheckpointClient(tmp_path) as client:
        with pytest.raises(ValueError, match="per_rank"):
            client.save({"per_rank": 1}, step=1, per_rank={"x": 1})
        client.save({"per_rank": 1}, step=2).result()


# ---------------------------------------------------------------- steps


def test_a_committed_step_is_replaced_only_when_asked_to(tmp_path: Path) -> None:
    with CheckpointClient(tmp_path) as client:
        client.save({"x": torch.tensor(1)}, step=5).result()
        [first] = (tmp_path / "step-5").glob("*.distcp")
        with pytest.raises(AlreadyCommitted, match=r"step 5 .* overwrite=True"):
            client.save({"x": torch.tensor(2)}, step=5)
        assert first.exists()
        assert loaded(client, {"x": torch.tensor(0)}, 5)["x"] == 1
        client.save({"x": torch.tensor(3)}, step=5, overwrite=True).result()
        assert loaded(client, {"x": torch.tensor(0)}, 5)["x"] == 3
        assert not first.exists()


def test_latest_steps_and_loading_a_chosen_step(tmp_path: Path) -> None:
    with CheckpointClient(tmp_path) as client:
        assert client.latest() is None
        assert client.steps() == []
        with pytest.raises(NoCheckpoint, match="no committed checkpoint"):
            client.load({"x": torch.tensor(0)})
        for step in (10, 9, 100):
            client.save({"x": torch.tensor(step)}, step=step).result()
        assert client.steps() == [9, 10, 100]
        assert client.latest() == 100
        target = {"x": torch.tensor(0)}
        assert client.load(target) == 100
        assert target["x"] == 100
        assert loaded(client, target, 9)["x"] == 9
        assert client.checkpoint_id(9) == str(tmp_path / "step-9")
        with pytest.raises(NoCheckpoint, match=r"step-11 does not exist; committed steps .*\[9, 10, 100\]"):
            client.load(target, 11)


def test_the_next_client_finds_what_the_last_one_saved(tmp_path: Path) -> None:
    with CheckpointClient(tmp_path) as client:
        client.save({"x": torch.tensor(1)}, step=1)
    with CheckpointClient(tmp_path) as client:
        assert client.latest() == 1
        with pytest.raises(AlreadyCommitted):
            client.save({"x": torch.tensor(1)}, step=1)
        client.save({"x": torch.tensor(2)}, step=2).result()
        assert loaded(client, {"x": torch.tensor(0)}, 2)["x"] == 2


# ---------------------------------------------------------------- handles


def test_a_handle_tells_three_facts_in_order(tmp_path: Path) -> None:
    with CheckpointClient(tmp_path) as client:
        handle = client.save({"x": torch.ones(10)}, step=1)
        assert handle.staged.done()
        assert handle.result() == handle.committed.result() == str(tmp_path / "step-1")
        assert handle.persisted.done()
        assert handle.done()
        assert handle.error() is None
        assert handle.step == 1
        assert 0 <= handle.staged_at_s <= handle.persisted_at_s <= handle.committed_at_s
        assert handle.staged_at_s <= handle.stall_s


def test_a_handle_can_be_awaited(tmp_path: Path) -> None:
    async def save_all(client: CheckpointClient) -> list[str]:
        handles = [client.save({"x": torch.tensor(step)}, step=step) for step in (1, 2, 3)]
        return [await handles[0], *await asyncio.gather(*handles[1:])]

    with CheckpointClient(tmp_path) as client:
        assert asyncio.run(save_all(client)) == [str(tmp_path / f"step-{step}") for step in (1, 2, 3)]


def test_awaiting_a_failed_save_raises_its_failure(tmp_path: Path) -> None:
    async def save(client: CheckpointClient) -> None:
        await client.save({"x": torch.tensor(1)}, step=1)

    with (
        CheckpointClient(tmp_path, pre_commit=[lambda step, where: False]) as client,
        pytest.raises(CheckpointFailed, match="returned False"),
    ):
        asyncio.run(save(client))


def test_callbacks_run_on_a_thread_of_their_own_and_must_not_use_the_client(tmp_path: Path) -> None:
    names: list[str] = []
    raised: list[BaseException] = []
    told = threading.Event()

    def callback(future: object) -> None:
        names.append(threading.current_thread().name)
        try:
            client.save({"x": torch.tensor(2)}, step=2)
        except ClientClosed as error:
            raised.append(error)
        told.set()

    may_commit = threading.Event()
    with (
        CheckpointClient(tmp_path, pre_commit=[lambda step, where: may_commit.wait(60)]) as client,
        set_at_end(may_commit),
    ):
        client.save({"x": torch.tensor(1)}, step=1).committed.add_done_callback(callback)
        may_commit.set()
        assert told.wait(60)
    assert names == ["ckpt-callbacks"]
    assert "must not call the client" in str(raised[0])


@contextmanager
def set_at_end(event: threading.Event) -> Iterator[None]:
    """Whatever the test finds, nobody waits for ``event`` when its client is closed."""
    try:
        yield
    finally:
        event.set()


def test_a_slow_callback_holds_up_no_save(tmp_path: Path) -> None:
    may_commit, may_return = threading.Event(), threading.Event()
    with (
        CheckpointClient(tmp_path, pre_commit=[lambda step, where: may_commit.wait(60)]) as client,
        set_at_end(may_commit),
        set_at_end(may_return),
    ):
        client.save({"x": torch.tensor(1)}, step=1).committed.add_done_callback(lambda future: may_return.wait(60))
        may_commit.set()
        second = client.save({"x": torch.tensor(2)}, step=2)
        assert second.staged.done()
        may_return.set()
        second.result()


def test_a_wait_that_is_cut_short_names_who_is_late(tmp_path: Path) -> None:
    may_commit = threading.Event()
    with (
        CheckpointClient(tmp_path, pre_commit=[lambda step, where: may_commit.wait(60)]) as client,
        set_at_end(may_commit),
    ):
        handle = client.save({"x": torch.tensor(1)}, step=1)
        handle.persisted.result(60)
        with pytest.raises(TimeoutError, match=r"step 1 is not committed after 0\.05 s: rank 0 on .* has not decided"):
            handle.result(0.05)
        with pytest.raises(TimeoutError, match="step 1 is still in flight"):
            client.wait(0.05)
        may_commit.set()
        client.wait()
        assert handle.done()


# ---------------------------------------------------------------- hooks


def test_post_commit_hooks_are_told_on_every_commit_and_may_fail(tmp_path: Path) -> None:
    told: list[tuple[int, str]] = []

    def broken(step: int, where: str) -> None:
        raise RuntimeError("a hook's own trouble")

    with CheckpointClient(tmp_path, post_commit=[broken, lambda step, where: told.append((step, where))]) as client:
        for step in (1, 2):
            client.save({"x": torch.tensor(step)}, step=step).result()
    assert told == [(1, str(tmp_path / "step-1")), (2, str(tmp_path / "step-2"))]


def save_with_hooks(directory: str) -> tuple[list[int], list[int]]:
    """Rank code: the steps for which this rank's hooks were asked and told."""
    asked: list[int] = []
    told: list[int] = []
    with CheckpointClient(
        directory,
        pre_commit=[lambda step, where: asked.append(step)],
        post_commit=[lambda step, where: told.append(step)],
    ) as client:
        for step in (1, 2):
            client.save({"x": torch.tensor(step)}, step=step)
    return asked, told


def test_rank_0_is_asked_before_a_commit_and_every_rank_is_told_after_it(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter
) -> None:
    results = ranks.run(save_with_hooks, 2, str(tmp_path), environment=sidecar.environment)
    # Two saves in flight may become durable, and so be committed, in either order.
    assert [(sorted(asked), sorted(told)) for asked, told in results] == [([1, 2], [1, 2]), ([], [1, 2])]


def refuse(step: int, where: str) -> bool:
    """A hook that vetoes step 2 only, when the data files are there and ``.metadata`` is not."""
    assert list(Path(where).glob("*.distcp"))
    assert not (Path(where) / ".metadata").exists()
    return step != 2


def explode(step: int, where: str) -> None:
    """A hook that vetoes step 2 by raising."""
    if step == 2:
        raise ArithmeticError("loss is NaN")


@pytest.mark.parametrize(("hook", "reason"), [(refuse, "refuse returned False"), (explode, "loss is NaN")])
def test_a_pre_commit_hook_can_veto(tmp_path: Path, hook: Callable[[int, str], object], reason: str) -> None:
    with CheckpointClient(tmp_path, pre_commit=[hook]) as client:
        client.save({"x": torch.tensor(1)}, step=1).result()
        with pytest.raises(CheckpointFailed, match=reason) as caught:
            client.save({"x": torch.tensor(2)}, step=2).result()
        assert caught.value.failures[0].kind == "CommitVetoed"
        client.save({"x": torch.tensor(3)}, step=3).result()
        assert client.steps() == [1, 3]
        assert client.latest() == 3
        assert not (tmp_path / "step-2").exists()


def test_a_step_can_be_tried_again_after_a_veto(tmp_path: Path) -> None:
    answers = iter([True, False, True, False])
    with CheckpointClient(tmp_path, pre_commit=[lambda step, where: next(answers)]) as client:
        client.save({"x": torch.tensor(1)}, step=1).result()
        client.save({"x": torch.tensor(2)}, step=2).committed.exception(60)
        client.save({"x": torch.tensor(3)}, step=2).result()
        assert loaded(client, {"x": torch.tensor(0)}, 2)["x"] == 3
        vetoed = client.save({"x": torch.tensor(4)}, step=2, overwrite=True)
        vetoed.committed.exception(60)
        assert "veto" in str(vetoed.error()).lower()
        assert loaded(client, {"x": torch.tensor(0)}, 2)["x"] == 3
    files = (tmp_path / "step-2").glob
    wait_until(lambda: len(list(files("*.distcp"))) == 1, "the files of the vetoed attempt are removed")


# ---------------------------------------------------------------- end


def test_a_closed_client_refuses_everything_but_another_close(tmp_path: Path) -> None:
    client = CheckpointClient(tmp_path)
    handle = client.save({"x": torch.tensor(1)}, step=1)
    client.close()
    assert handle.result() == str(tmp_path / "step-1")
    client.close()
    for use in (
        lambda: client.save({"x": torch.tensor(2)}, step=2),
        client.latest,
        lambda: client.load({}),
        client.wait,
    ):
        with pytest.raises(ClientClosed, match="closed"):
            use()


def test_close_raises_the_failure_of_the_last_save_if_nobody_was_told(tmp_path: Path) -> None:
    client = CheckpointClient(tmp_path, pre_commit=[lambda step, where: False])
    client.save({"x": torch.tensor(1)}, step=1)
    with pytest.raises(CheckpointFailed, match="step 1 was not saved"):
        client.close()


def test_an_error_in_the_with_block_is_not_replaced_by_one_of_close(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        CheckpointClient(tmp_path, pre_commit=[lambda step, where: False]) as client,
    ):
        client.save({"x": torch.tensor(1)}, step=1)
        raise ZeroDivisionError


def test_nothing_but_checkpoints_is_left_in_the_directory(tmp_path: Path) -> None:
    with CheckpointClient(tmp_path) as client:
        for step in (1, 2):
            client.save({"x": torch.tensor(step)}, step=step)
    names = [path.relative_to(tmp_path).parts for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted((step, name.partition("_")[0] + Path(name).suffix) for step, name in names) == [
        (step, kind) for step in ("step-1", "step-2") for kind in (".distcp", ".manifest", ".metadata")
    ]


def test_a_relative_directory_means_where_the_client_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with CheckpointClient("run") as client:
        monkeypatch.chdir("/")
        assert client.save({"x": torch.tensor(1)}, step=1).result() == str(tmp_path / "run" / "step-1")
        assert client.steps() == [1]


def test_mapping_types_and_number_keys_are_taken_as_dcp_takes_them(tmp_path: Path, stock_ranks: RankStarter) -> None:
    from collections import OrderedDict

    state = OrderedDict(
        a=OrderedDict({0: torch.tensor(1), 1: torch.tensor(2)}), b=mapped({"c": torch.tensor(3)}, torch.clone)
    )
    with CheckpointClient(tmp_path) as client:
        where = client.save(state, step=1).result()
    [found] = stock_ranks.run(load_flat, 1, where)
    assert found == {"a.0": torch.tensor(1), "a.1": torch.tensor(2), "b.c": torch.tensor(3)}
