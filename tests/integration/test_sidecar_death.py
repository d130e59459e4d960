"""The death of the sidecar, by SIGKILL, at every stage of a save: the next sidecar of the job goes on where it stopped.

In each test: the handle that the trainer holds already resolves as committed, stock PyTorch loads the values that were
staged, the next save works, and nothing is left in shared memory in the end (the fixtures look).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckpt_proto.runtime_dir import job_dirs, lock_owner
from ckpt_trainer_client import CheckpointClient, CheckpointFailed, filling
from ckpt_trainer_client.region_pool import RegionPool, RegionRequest
from testkit.forked_sidecars import ForkedSidecar
from testkit.kill_points import KillOrder
from testkit.ranks import RankStarter
from testkit.stock_load import load_each
from testkit.waiting import LIMIT_S, wait_until

MIB = 1 << 20
BYTES_PER_S = 8 * MIB
"""What the sidecar may write: a state of a few MB is being written for a while, a small one is not held up."""


@pytest.fixture
def sidecar(
    shm_root: Path, tmp_path: Path, ranks: RankStarter, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ForkedSidecar]:
    """The sidecar of this test's job, by whatever process it is run; the last one drains in good order."""
    folder = tmp_path / "sidecar"
    folder.mkdir()
    sidecar = ForkedSidecar(ranks, shm_root, folder / "sidecar.log", max_write_bytes_per_s=BYTES_PER_S)
    for name, value in sidecar.environment.items():
        monkeypatch.setenv(name, value)
    yield sidecar
    print(sidecar.story())
    assert sidecar.stop() == 0


def state(step: int, size: int = 1000) -> dict[str, Any]:
    """A state whose values tell its step: tensors, and a value that is none."""
    return {"x": torch.full((size,), float(step)), "y": torch.full((7,), step, dtype=torch.int64), "step": step}


@pytest.fixture
def check(tmp_path: Path, stock_ranks: RankStarter) -> Callable[[Sequence[int]], None]:
    """Whether exactly these steps are committed and stock PyTorch finds in each what was staged for it."""

    def look(steps: Sequence[int]) -> None:
        committed = sorted(tmp_path.glob("step-*/.metadata"))
        assert sorted(int(path.parent.name.partition("-")[2]) for path in committed) == sorted(steps)
        places = [str(tmp_path / f"step-{step}") for step in steps]
        [found] = stock_ranks.run(load_each, 1, places)
        for step, place in zip(steps, places, strict=True):
            content = found[place]
            assert isinstance(content, dict), content
            assert content["step"] == step
            assert bool((content["x"] == float(step)).all())
            assert bool((content["y"] == step).all())

    return look


Check = Callable[[Sequence[int]], None]


def restart(sidecar: ForkedSidecar, order: KillOrder | None = None) -> None:
    """The sidecar is killed, and its supervisor starts another, perhaps one that will die."""
    sidecar.kill()
    sidecar.start(order)


def is_writing(sidecar: ForkedSidecar, step: int) -> bool:
    return ("writing", step) in [(shard.state, shard.step) for shard in sidecar.status().shards]


def inodes(sidecar: ForkedSidecar) -> list[tuple[str, int]]:
    return [(path.name, path.stat().st_ino) for path in sidecar.regions]


# ---------------------------------------------------------------- idle


def test_idle(tmp_path: Path, sidecar: ForkedSidecar, check: Check) -> None:
    """Plan and regions are kept: the next save copies and sends one message, as if nothing had been."""
    with CheckpointClient(tmp_path) as client:
        client.save(state(1), step=1).result(LIMIT_S)
        before = inodes(sidecar)
        epoch = client._connection.plan_epoch
        restart(sidecar)
        for step in (2, 3, 4):
            client.save(state(step), step=step).result(LIMIT_S)
        assert inodes(sidecar) == before
        assert client._connection.plan_epoch == epoch
    check([1, 2, 3, 4])


def test_idle_and_saves_are_staged_while_there_is_none(tmp_path: Path, sidecar: ForkedSidecar, check: Check) -> None:
    with CheckpointClient(tmp_path, slots=2) as client:
        client.save(state(1), step=1).result(LIMIT_S)
        wait_until(lambda: sidecar.can_be_filled(2), "both regions are free")
        sidecar.kill()
        handles = [client.save(state(step), step=step) for step in (2, 3)]
        assert all(handle.staged.done() for handle in handles)
        sidecar.start()
        for handle in handles:
            handle.result(LIMIT_S)
        client.save(state(4), step=4).result(LIMIT_S)
    check([1, 2, 3, 4])


def own_sidecar(shm_root: Path) -> int:
    """The sidecar that a client of this test has started."""
    [directory] = job_dirs(shm_root)
    pid = lock_owner(directory)
    assert pid
    return pid


@pytest.mark.faults
def test_one_that_a_client_had_started_is_replaced_by_the_client(tmp_path: Path, shm_root: Path, check: Check) -> None:
    with CheckpointClient(tmp_path) as client:
        client.save(state(1), step=1).result(LIMIT_S)
        killed = own_sidecar(shm_root)
        os.kill(killed, signal.SIGKILL)
        client.save(state(2), step=2).result(LIMIT_S)
        assert own_sidecar(shm_root) != killed
        assert client.latest() == 2
    check([1, 2])


# ---------------------------------------------------------------- stopped


def test_a_sidecar_that_is_stopped_fails_saves_by_name_and_serves_on_when_it_goes_on(
    tmp_path: Path, sidecar: ForkedSidecar, check: Check
) -> None:
    """It holds the job's lock, so no other can take its place. What a rank was told has failed is not committed."""
    with CheckpointClient(tmp_path, slots=1, connect_timeout_s=4.0) as client:
        client.save(state(1), step=1).result(LIMIT_S)
        wait_until(lambda: sidecar.can_be_filled(1), "the region is free")
        sidecar.pause()
        staged = client.save(state(2), step=2)
        assert staged.staged.done()
        waiting = client.save(state(3), step=3)  # for the only region
        for handle in (staged, waiting):
            with pytest.raises(CheckpointFailed, match=r"has not answered for \d+ s.*SidecarSilent"):
                handle.result(LIMIT_S)
        sidecar.resume()
        assert client.latest() == 1  # it answers
        client.save(state(4), step=4).result(LIMIT_S)
        assert client.latest() == 4
    check([1, 4])


# ---------------------------------------------------------------- while the rank is in save()


class Stage(DefaultSavePlanner):
    """Kills the sidecar at one step of planning, once."""

    def __init__(self, at: str, strike: Callable[[], None]) -> None:
        super().__init__()
        self._at = at
        self._strike = strike

    def _reached(self, step: str) -> None:
        if step == self._at:
            self._at = ""
            self._strike()

    def create_local_plan(self) -> Any:
        self._reached("before it proposes")
        return super().create_local_plan()

    def create_global_plan(self, plans: Any) -> Any:
        self._reached("while it plans for all")
        return super().create_global_plan(plans)

    def finish_plan(self, plan: Any) -> Any:
        self._reached("when it has the plan")
        return super().finish_plan(plan)


@pytest.mark.parametrize("at", ["before it proposes", "while it plans for all", "when it has the plan"])
def test_while_a_rank_plans(tmp_path: Path, sidecar: ForkedSidecar, check: Check, at: str) -> None:
    planner = Stage(at, lambda: restart(sidecar))
    with CheckpointClient(tmp_path, planner=planner) as client:
        handle = client.save(state(1), step=1)
        handle.result(LIMIT_S)
        assert planner._at == ""
        client.save(state(2), step=2).result(LIMIT_S)
    check([1, 2])


def test_while_a_rank_fills_its_region(
    tmp_path: Path, sidecar: ForkedSidecar, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The region is not sealed: nobody but the rank may touch it, and it seals it as if nothing had been."""
    copy_all = filling.copy_all

    def copy_half_kill_copy_the_rest(targets: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        copy_all(targets[:1], tensors[:1])
        restart(sidecar)
        copy_all(targets[1:], tensors[1:])

    with CheckpointClient(tmp_path) as client:
        client.save(state(1), step=1).result(LIMIT_S)
        with monkeypatch.context() as patch:
            patch.setattr(filling, "copy_all", copy_half_kill_copy_the_rest)
            handle = client.save(state(2), step=2)
        handle.result(LIMIT_S)
        client.save(state(3), step=3).result(LIMIT_S)
    check([1, 2, 3])


def test_while_a_rank_waits_for_a_region(tmp_path: Path, sidecar: ForkedSidecar, check: Check) -> None:
    """Its only region is with a sidecar that hangs and is killed."""
    with CheckpointClient(tmp_path, slots=1) as client, ThreadPoolExecutor(1) as trainer:
        client.save(state(1), step=1).result(LIMIT_S)
        wait_until(lambda: sidecar.can_be_filled(1), "the region is free")
        sidecar.pause()
        staged = client.save(state(2), step=2)
        saving = trainer.submit(client.save, state(3), step=3)
        wait_until(lambda: client._connection.next_seq == 3, "the third save has begun")
        restart(sidecar)
        staged.result(LIMIT_S)
        saving.result(LIMIT_S).result(LIMIT_S)
        client.save(state(4), step=4).result(LIMIT_S)
    check([1, 2, 3, 4])


def test_while_a_region_grows(
    tmp_path: Path, sidecar: ForkedSidecar, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request to grow goes to a sidecar that dies before it reads it."""
    grow = RegionPool.grow

    def kill_and_grow(pool: RegionPool, ready: Any, request: RegionRequest, byte_capacity: int) -> Any:
        sidecar.pause()
        with ThreadPoolExecutor(1) as trainer:
            growing = trainer.submit(grow, pool, ready, request, byte_capacity)
            restart(sidecar)
            return growing.result(LIMIT_S)

    with CheckpointClient(tmp_path) as client:
        client.save({**state(1), "notes": b"short"}, step=1).result(LIMIT_S)
        with monkeypatch.context() as patch:
            patch.setattr(RegionPool, "grow", kill_and_grow)
            client.save({**state(2), "notes": b"long" * 100_000}, step=2).result(LIMIT_S)
        client.save({**state(3), "notes": b"short again"}, step=3).result(LIMIT_S)
    check([1, 2, 3])


# ---------------------------------------------------------------- while it writes


def test_in_the_middle_of_a_write(tmp_path: Path, sidecar: ForkedSidecar, check: Check) -> None:
    with CheckpointClient(tmp_path) as client:
        client.save(state(1), step=1).result(LIMIT_S)
        handle = client.save(state(2, 4 * MIB), step=2)
        wait_until(lambda: is_writing(sidecar, 2), "the write is under way")
        sidecar.kill()
        assert client.steps() == [1]
        assert not handle.done()
        sidecar.start()
        handle.result(LIMIT_S)
        client.save(state(3), step=3).result(LIMIT_S)
    check([1, 2, 3])


def test_while_rank_0_decides_on_replacing_a_checkpoint(tmp_path: Path, sidecar: ForkedSidecar, check: Check) -> None:
    """The old one stands until the new one is published; the hook runs once, whoever asks how often."""
    may_commit = threading.Event()
    asked: list[int] = []

    def hook(step: int, where: str) -> bool:
        asked.append(step)
        return may_commit.wait(LIMIT_S)

    with CheckpointClient(tmp_path, pre_commit=[hook]) as client:
        may_commit.set()
        client.save({**state(5), "x": torch.zeros(1000)}, step=5).result(LIMIT_S)
        may_commit.clear()
        try:
            replacing = client.save(state(5), step=5, overwrite=True)
            wait_until(lambda: len(asked) == 2, "rank 0 is asked")
            restart(sidecar)
            wait_until(lambda: sidecar.status().checkpoints, "the new sidecar knows of the save")
            old = {"x": torch.ones(1000)}
            client.load(old, 5)
            assert not old["x"].any()
        finally:
            may_commit.set()
        replacing.result(LIMIT_S)
        assert asked == [5, 5], "the hook has run again"
        client.save(state(6), step=6).result(LIMIT_S)
    check([5, 6])


# ---------------------------------------------------------------- between two steps of a commit


FIRST_SAVE = [
    "before a manifest has its name",
    "before a durable shard is reported",
    "before the checkpoint is published",
    "before .metadata is linked",
    "after .metadata is linked",
    "before the commit is reported",
    "before a rank is told of the commit",
]
REPLACING_SAVE = ["before .metadata is replaced", "after .metadata is replaced", "before the commit is reported"]


@pytest.mark.parametrize(
    ("points", "overwrite"), [(FIRST_SAVE, False), (REPLACING_SAVE, True)], ids=["first", "replacing"]
)
def test_between_any_two_steps_of_one_save(
    tmp_path: Path, sidecar: ForkedSidecar, check: Check, points: list[str], overwrite: bool
) -> None:
    """One save, one handle, one sidecar after another."""
    with CheckpointClient(tmp_path) as client:
        client.save({**state(1), "x": torch.zeros(1000)}, step=1).result(LIMIT_S)
        step = 1 if overwrite else 2
        sidecar.kill()
        handle = client.save(state(step), step=step, overwrite=overwrite)
        for point in points:
            sidecar.start(KillOrder(point))
            sidecar.await_death()
            assert not handle.done()
        sidecar.start()
        handle.result(LIMIT_S)
        assert handle.persisted.done()
        client.save(state(3), step=3).result(LIMIT_S)
        client.save(state(1), step=1, overwrite=True).result(LIMIT_S)
    check([1, 3] if overwrite else [1, 2, 3])


# ---------------------------------------------------------------- ranks die too


def save_twice_and_die(directory: str, size: int, dying: list[int], told: str) -> list[int]:
    """Rank code: some ranks are killed when the second save is staged on all; the others wait for its commit."""
    import torch.distributed as dist

    client = CheckpointClient(directory)
    client.save(state(1, size), step=1).result(LIMIT_S)
    handle = client.save(state(2, size), step=2)
    dist.barrier()
    if dist.get_rank() in dying:
        Path(told).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    handle.result(LIMIT_S)
    client.close()
    return client.steps()


@pytest.mark.parametrize(
    "dying",
    [
        pytest.param([0], id="rank 0"),
        pytest.param([1], id="rank 1", marks=pytest.mark.faults),
        pytest.param([0, 1], id="all ranks"),
    ],
)
def test_in_the_middle_of_a_write_and_ranks_die_too(
    tmp_path: Path, sidecar: ForkedSidecar, check: Check, ranks: RankStarter, dying: list[int]
) -> None:
    """Nobody but the regions in shared memory knows of the second save then."""
    told = tmp_path / "told"
    arguments = (str(tmp_path), 4 * MIB, dying, str(told))
    running = ranks.start(save_twice_and_die, 2, *arguments, group=True, environment=sidecar.environment)
    wait_until(told.exists, "the second save is staged")
    sidecar.kill()
    assert not (tmp_path / "step-2" / ".metadata").exists()
    sidecar.start()
    assert running.exit_codes() == [-signal.SIGKILL if rank in dying else 0 for rank in (0, 1)]
    wait_until((tmp_path / "step-2" / ".metadata").exists, "the staged save is committed")
    for rank in {0, 1} - set(dying):
        assert running.result_of(rank) == [1, 2]
    with CheckpointClient(tmp_path) as client:  # the job's next life, on one rank
        assert client.latest() == 2
        client.save(state(3), step=3).result(LIMIT_S)
    check([1, 2, 3])


def test_when_all_is_durable_and_nobody_is_left(
    tmp_path: Path, sidecar: ForkedSidecar, check: Check, ranks: RankStarter
) -> None:
    """Neither a rank nor a region knows of the second save then, but the storage does."""
    restart(sidecar, KillOrder("before the checkpoint is published", 2))
    arguments = (str(tmp_path), 1000, [0, 1], str(tmp_path / "told"))
    running = ranks.start(save_twice_and_die, 2, *arguments, group=True, environment=sidecar.environment)
    assert running.exit_codes() == [-signal.SIGKILL] * 2
    sidecar.await_death()
    assert not (tmp_path / "step-2" / ".metadata").exists()
    sidecar.start()
    wait_until((tmp_path / "step-2" / ".metadata").exists, "the durable save is committed")
    with CheckpointClient(tmp_path) as client:
        assert client.latest() == 2
        client.save(state(3), step=3).result(LIMIT_S)
    check([1, 2, 3])
