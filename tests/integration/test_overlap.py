"""Saves that are copied behind forward and backward: what is saved is the state at the call, and training waits for no
more than what is left of the copy. The copies of most tests begin only when they are waited for: as late as can be."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_trainer_client import CheckpointClient, CheckpointFailed, TensorChanged
from ckpt_trainer_client.stage_thread import StageThread
from testkit.late_copies import late_copies
from testkit.ranks import RankStarter
from testkit.sidecars import Sidecar
from testkit.states import blank_like, copied, differences
from testkit.waiting import LIMIT_S, wait_until

LARGE = 50_000
"""Elements of a float32 tensor that is not copied in the call."""


@pytest.fixture
def late() -> Iterator[list[str]]:
    with late_copies() as by:
        yield by


class Normalised(torch.nn.Module):
    """Batch normalisation, and a large statistic of its own, both changed by forward."""

    statistic: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 64, 3)
        self.norm = torch.nn.BatchNorm2d(64)
        self.last = torch.nn.Linear(64, LARGE // 64)
        self.register_buffer("statistic", torch.zeros(LARGE))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(images)).mean((2, 3))
        self.statistic += hidden.detach().sum()
        return self.last(hidden)


def backward(model: torch.nn.Module, seed: int) -> None:
    """Forward and backward on random images."""
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    model(images).square().mean().backward()


def whole_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def loaded(client: CheckpointClient, state: Any, step: int) -> Any:
    """What the checkpoint of a step holds."""
    target = blank_like(state)
    client.load(target, step)
    return target


def test_a_model_with_batch_normalisation_is_saved_as_it_was_at_the_call(
    tmp_path: Path, sidecar: Sidecar, late: list[str]
) -> None:
    torch.manual_seed(1)
    model = Normalised()
    optimizer = torch.optim.AdamW(model.parameters())
    kept: dict[int, Any] = {}
    with CheckpointClient(tmp_path, overlap=True) as client:
        client.guard(optimizer, model)
        for step in range(5):
            backward(model, step)  # the copy of the save before is under way
            optimizer.step()
            optimizer.zero_grad()
            state = whole_state(model, optimizer)
            kept[step] = copied(state)
            client.save(state, step=step)
        client.wait()
        for step, expected in kept.items():
            assert differences(loaded(client, expected, step), expected) == []
    assert "ckpt-stage_0" in late


def test_staged_is_told_when_the_tensors_may_change(tmp_path: Path, sidecar: Sidecar, late: list[str]) -> None:
    state = {"x": torch.ones(LARGE), "little": torch.ones(3), "text": "x"}
    with CheckpointClient(tmp_path) as client:
        client.before_optimizer_step()
        handle = client.save(state, step=1, overlap=True)
        assert not handle.staged.done()
        assert late == ["MainThread"]  # what is little is copied
        state["little"].zero_()
        client.before_optimizer_step()
        assert handle.staged.done()
        assert handle.wait_s > 0
        state["x"].zero_()
        handle.result(LIMIT_S)
        target = {"x": torch.zeros(LARGE), "little": torch.zeros(3), "text": ""}
        client.load(target, 1)
    assert differences(target, {"x": torch.ones(LARGE), "little": torch.ones(3), "text": "x"}) == []


def test_a_save_waits_for_the_copy_of_the_save_before_and_close_for_the_last(
    tmp_path: Path, sidecar: Sidecar, late: list[str]
) -> None:
    state = {"x": torch.zeros(LARGE)}
    with CheckpointClient(tmp_path, overlap=True) as client:
        client.before_optimizer_step()
        first = client.save(state, step=1)
        second = client.save(state, step=2)
        assert first.staged.done()
        assert not second.staged.done()
    assert second.result(0) == str(tmp_path / "step-2")


def test_blocking_saves_and_loads_wait_for_the_copy_too(tmp_path: Path, sidecar: Sidecar, late: list[str]) -> None:
    state = {"x": torch.ones(LARGE)}
    with CheckpointClient(tmp_path, overlap=True) as client:
        client.before_optimizer_step()
        handle = client.save(state, step=1)
        client.save(state, step=2, blocking=True)
        assert handle.staged.done()
        handle = client.save(state, step=3)
        client.load(state, 2)  # writes into the very tensors
        assert handle.staged.done()
        handle.result(LIMIT_S)


def test_without_a_promise_to_wait_everything_is_copied_in_the_call(
    tmp_path: Path, sidecar: Sidecar, late: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    state = {"x": torch.ones(LARGE)}
    with CheckpointClient(tmp_path, overlap=True) as client, caplog.at_level(logging.WARNING):
        for step in (1, 2):
            handle = client.save(state, step=step)
            assert handle.staged.done()
        client.guard(torch.optim.SGD([torch.nn.Parameter(state["x"])]))
        assert not client.save(state, step=3).staged.done()
    assert late == ["MainThread", "MainThread", "MainThread", "ckpt-stage_0"]
    assert len([text for text in caplog.messages if "before_optimizer_step" in text]) == 1


# ---------------------------------------------------------------- changed while it was copied


def test_a_tensor_that_is_changed_too_early_fails_the_save_by_name_and_is_copied_in_the_call_next_time(
    tmp_path: Path, sidecar: Sidecar, late: list[str]
) -> None:
    state = {"model": {"early": torch.ones(LARGE), "good": torch.ones(LARGE)}}
    with CheckpointClient(tmp_path, overlap=True) as client:
        client.before_optimizer_step()
        for step in (1, 2):
            handle = client.save(state, step=step)
            state["model"]["early"] += 1
            client.before_optimizer_step()
            if step == 1:
                with pytest.raises(CheckpointFailed, match=r"model\.early") as raised:
                    handle.result(LIMIT_S)
                assert TensorChanged.__name__ in str(raised.value)
                assert "good" not in str(raised.value)
        handle.result(LIMIT_S)
        assert client.steps() == [2]
        assert loaded(client, state, 2)["model"]["early"][0] == 2


def test_the_debug_mode_finds_changes_that_leave_no_trace(
    tmp_path: Path, sidecar: Sidecar, late: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"x": torch.ones(LARGE), "y": torch.ones(LARGE)}
    monkeypatch.setenv("CKPT_SIDECAR_CHECK_OVERLAP", "1")
    with CheckpointClient(tmp_path, overlap=True) as client:
        client.before_optimizer_step()
        handle = client.save(state, step=1)
        state["y"].data[7] = 0.5
        client.before_optimizer_step()
        with pytest.raises(CheckpointFailed, match="y"):
            handle.result(LIMIT_S)
        client.save(state, step=2)
        client.before_optimizer_step()
    assert client.steps() == [2]


def test_what_the_user_names_is_copied_in_the_call(tmp_path: Path, sidecar: Sidecar, late: list[str]) -> None:
    state = {"model": {"cache": torch.ones(LARGE)}, "x": torch.ones(LARGE)}
    with CheckpointClient(tmp_path, overlap=True, copy_first=["model.*"]) as client:
        client.before_optimizer_step()
        client.save(state, step=1)
        state["model"]["cache"].zero_()
        client.wait()
        assert loaded(client, state, 1)["model"]["cache"].sum() == LARGE


def save_sharded_with_overlap(directory: str) -> None:
    """Rank code: sharded tensors; one is changed too early, on rank 0 only."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    state = {name: distribute_tensor(torch.ones(2 * LARGE), mesh, [Shard(0)], src_data_rank=None) for name in "xy"}
    with CheckpointClient(directory, overlap=True) as client, late_copies():
        client.before_optimizer_step()
        for step in (1, 2, 3):
            handle = client.save(state, step=step)
            if step == 2 and client._config.rank == 0:
                state["y"] += 1
            client.before_optimizer_step()
            if step == 2:
                with pytest.raises(CheckpointFailed, match="rank 0.*y"):
                    handle.result(LIMIT_S)
                state["x"] *= 2
        handle.result(LIMIT_S)
        assert client.steps() == [1, 3]
        target = {"x": distribute_tensor(torch.zeros(2 * LARGE), mesh, [Shard(0)], src_data_rank=None)}
        client.load(target, 3)
        assert target["x"].to_local().sum() == 2 * LARGE


def test_sharded_tensors(tmp_path: Path, sidecar: Sidecar, ranks: RankStarter) -> None:
    ranks.run(save_sharded_with_overlap, 2, str(tmp_path), group=True, environment=sidecar.environment)


# ---------------------------------------------------------------- devices


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device here: pinned copies on a side stream are not run"
)
def test_copies_from_a_device_are_pinned_and_ordered_after_its_work(tmp_path: Path, sidecar: Sidecar) -> None:
    weight = torch.zeros(4_000, 4_000, device="cuda")
    with CheckpointClient(tmp_path, overlap=True) as client:
        client.before_optimizer_step()
        for step in (1, 2, 3):
            for _ in range(20):  # queued, not done, when the save is called
                weight = weight @ weight + step
            allocated = torch.cuda.memory_allocated()
            expected = weight.clone()
            client.save({"weight": weight}, step=step)
            _ = weight @ weight  # forward and backward go on
            client.before_optimizer_step()
            weight.fill_(step)
            client.wait()
            target = {"weight": torch.zeros(4_000, 4_000)}
            client.load(target, step)
            assert torch.equal(target["weight"], expected.cpu())
            del expected, _
            assert torch.cuda.memory_allocated() <= allocated
        regions = client._saver._stager._regions.values()
        assert all(region._pinned > 0 for region in regions)


# ---------------------------------------------------------------- the trainer is sacred


def test_tensors_are_let_go_of_when_they_may_change(tmp_path: Path, sidecar: Sidecar, late: list[str]) -> None:
    with CheckpointClient(tmp_path, overlap=True) as client:
        client.before_optimizer_step()
        gc.collect()
        gc.disable()
        try:
            for step in (1, 2, 3):
                tensor = torch.ones(LARGE)
                reference = weakref.ref(tensor)
                handle = client.save({"x": tensor}, step=step)
                if step == 3:
                    tensor += 1
                del tensor
                assert reference() is not None  # it is being copied
                client.before_optimizer_step()
                assert reference() is None
            with pytest.raises(CheckpointFailed):
                handle.result(LIMIT_S)
        finally:
            gc.enable()
    assert client.steps() == [1, 2]


def test_neither_optimizer_nor_client_is_kept_alive_by_the_guard(tmp_path: Path, sidecar: Sidecar) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with CheckpointClient(tmp_path, overlap=True) as client:
        client.guard(optimizer, model)
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
    optimizer.step()
    optimizer_gone, model_gone = weakref.ref(optimizer), weakref.ref(model)
    del optimizer, model
    gc.collect()
    assert (optimizer_gone(), model_gone()) == (None, None)


def fork_while_copying(directory: str) -> None:
    """Rank code: a child takes an optimizer step of its own while its parent's save is copied."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(LARGE))])
    with CheckpointClient(directory, overlap=True) as client, late_copies():
        client.guard(optimizer)
        client.save({"x": torch.ones(LARGE)}, step=1)
        pid = os.fork()
        if pid == 0:
            optimizer.step()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        client.wait()
        assert client.steps() == [1]


def test_a_child_that_is_forked_while_a_save_is_copied(tmp_path: Path, sidecar: Sidecar, ranks: RankStarter) -> None:
    ranks.run(fork_while_copying, 1, str(tmp_path), environment=sidecar.environment)


def save_and_hang(directory: str, mark: str) -> None:
    """Rank code: is killed while the second save is copied."""
    client = CheckpointClient(directory, overlap=True)
    client.before_optimizer_step()
    with late_copies():
        client.save({"x": torch.ones(LARGE)}, step=1)
        client.wait()
        client.save({"x": torch.zeros(LARGE)}, step=2)
        Path(mark).touch()
        signal.pause()


def test_a_rank_that_is_killed_while_it_copies_leaves_the_checkpoint_before(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter
) -> None:
    directory, mark = tmp_path / "checkpoints", tmp_path / "mark"
    running = ranks.start(save_and_hang, 1, str(directory), str(mark), environment=sidecar.environment)
    wait_until(mark.exists, "the save is being copied")
    os.kill(running.pids[0], signal.SIGKILL)
    assert running.exit_codes() == [-signal.SIGKILL]
    with CheckpointClient(directory) as client:
        target = {"x": torch.zeros(LARGE)}
        assert client.load(target) == 1
        assert target["x"].sum() == LARGE
        client.save(target, step=3).result(LIMIT_S)
        assert client.steps() == [1, 3]


@pytest.mark.parametrize("is_started", [False, True], ids=["before it is started", "when it was started"])
def test_an_interrupt_while_the_copy_is_handed_to_its_thread(
    tmp_path: Path, sidecar: Sidecar, late: list[str], monkeypatch: pytest.MonkeyPatch, is_started: bool
) -> None:
    real = StageThread.start

    def start(thread: StageThread, work: Callable[[], None]) -> bool:
        if is_started:
            real(thread, work)
        raise KeyboardInterrupt

    state = {"x": torch.ones(LARGE)}
    with CheckpointClient(tmp_path, overlap=True) as client:
        client.before_optimizer_step()
        client.save(state, step=1)
        with monkeypatch.context() as patch:
            patch.setattr(StageThread, "start", start)
            with pytest.raises(KeyboardInterrupt):
                client.save(state, step=2)
        client.before_optimizer_step()
        state["x"].zero_()
        for step in (3, 4, 5):
            client.save(state, step=step)
        client.wait()
        assert client.steps() == [1, 3, 4, 5]
        assert loaded(client, state, 3)["x"].sum() == 0


LEAVING = """
import torch
from ckpt_trainer_client import CheckpointClient
client = CheckpointClient({directory!r}, overlap=True)
client.before_optimizer_step()
client.save({{"x": torch.ones(20_000_000)}}, step=1)
"""


def test_a_script_that_ends_without_close_has_its_last_save_committed(tmp_path: Path, sidecar: Sidecar) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVING.format(directory=str(tmp_path))],
        env={**os.environ, **sidecar.environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    wait_until((tmp_path / "step-1" / ".metadata").exists, "the sidecar commits it")
