"""Nobody can start a sidecar any more: ranks with the policy ``degraded`` have their saves written and committed by
stand-ins, and go on with a sidecar when there is one again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_trainer_client import CheckpointClient, degraded_saves
from ckpt_trainer_client.degraded_decisions import IN_DOUBT
from testkit.forked_sidecars import ForkedSidecar
from testkit.ranks import RankStarter
from testkit.stock_load import load_each
from testkit.waiting import LIMIT_S, wait_until

BOUND_S = 4.0
"""How long the clients wait for a sidecar; longer than their patience before they look whether one runs."""

Check = Callable[[Sequence[int]], None]


@pytest.fixture
def sidecar(
    shm_root: Path, tmp_path: Path, ranks: RankStarter, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ForkedSidecar]:
    """The sidecar of this test's job; no client ever starts one."""
    folder = tmp_path / "sidecar"
    folder.mkdir()
    sidecar = ForkedSidecar(ranks, shm_root, folder / "sidecar.log")
    for name, value in sidecar.environment.items():
        monkeypatch.setenv(name, value)
    yield sidecar
    print(sidecar.story())
    assert sidecar.stop() == 0


@pytest.fixture
def check(tmp_path: Path, stock_ranks: RankStarter) -> Check:
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

    return look


def state(step: int) -> dict[str, Any]:
    """A state whose values tell its step: a tensor, and a value that is none."""
    return {"x": torch.full((1000,), float(step)), "step": step}


def client_of(directory: str | Path, **options: Any) -> CheckpointClient:
    given = {"no_sidecar": "degraded", "connect_timeout_s": BOUND_S, "stage_timeout_s": 60.0, **options}
    return CheckpointClient(directory, **given)


def tell(directory: str, rank: int, what: str) -> None:
    Path(directory, f"rank-{rank}.{what}").touch()


def told(directory: Path, what: str) -> Callable[[], bool]:
    return lambda: all((directory / f"rank-{rank}.{what}").exists() for rank in (0, 1))


def await_degraded(client: CheckpointClient) -> None:
    """Wait until this client goes on without a sidecar."""
    degraded = client._connection._degraded
    assert degraded is not None
    wait_until(degraded._active.is_set, "no sidecar has run for too long")


# ---------------------------------------------------------------- saving on


def save_without_and_with_a_sidecar(directory: str) -> list[int]:
    """Rank code: the sidecar is killed when the second save is staged, the third is begun without one."""
    degraded_saves.SETTLE_S = 1.0  # both ranks know the same of the second
    rank = int(os.environ["RANK"])
    with client_of(directory) as client:
        client.save(state(1), step=1, per_rank={"rank": rank}).result(LIMIT_S)
        handles = [client.save(state(2), step=2, per_rank={"rank": rank})]
        tell(directory, rank, "staged")
        wait_until(Path(directory, "killed").exists, "there is no sidecar")
        handles.append(client.save(state(3), step=3, per_rank={"rank": rank}))
        for handle in handles:
            handle.result(LIMIT_S)
            assert handle.persisted.done()
        tell(directory, rank, "degraded")
        wait_until(Path(directory, "served").exists, "there is a sidecar again")
        client.save(state(4), step=4, per_rank={"rank": rank}).result(LIMIT_S)
        return client.steps()


def test_two_ranks_save_on_and_go_on_with_a_sidecar_when_there_is_one(
    tmp_path: Path, sidecar: ForkedSidecar, check: Check, ranks: RankStarter
) -> None:
    running = ranks.start(save_without_and_with_a_sidecar, 2, str(tmp_path), environment=sidecar.environment)
    wait_until(told(tmp_path, "staged"), "the second save is staged")
    sidecar.kill()
    (tmp_path / "killed").touch()
    wait_until(told(tmp_path, "degraded"), "three saves are committed")
    sidecar.start()
    (tmp_path / "served").touch()
    assert running.results() == [[1, 2, 3, 4]] * 2
    logs = [running.text(rank) for rank in (0, 1)]
    assert [log.count("is written without one") for log in logs] == [1, 1], logs
    assert [log.count("answers again") for log in logs] == [1, 1], logs
    check([1, 2, 3, 4])


# ---------------------------------------------------------------- what fails


def fail_twice(directory: str) -> tuple[list[str], float]:
    """Rank code: without a sidecar, a save of another structure than before, and one that a hook refuses."""
    with client_of(directory, pre_commit=[lambda step, where: step != 3]) as client:
        client.save(state(1), step=1).result(LIMIT_S)
        tell(directory, 0, "staged")
        await_degraded(client)
        changed = client.save({**state(2), "new": torch.ones(3)}, step=2)
        errors = [str(changed.committed.exception(LIMIT_S))]
        errors.append(str(client.save(state(3), step=3).committed.exception(LIMIT_S)))
        errors += sorted(path.name for path in Path(directory, "step-3").glob("*.manifest"))
        tell(directory, 0, "failed")
        wait_until(Path(directory, "served").exists, "there is a sidecar again")
        client.save(state(4), step=4).result(LIMIT_S)
        return errors, changed.stall_s


def test_a_structure_change_and_a_veto_fail_by_name_and_no_later_sidecar_commits_them(
    tmp_path: Path, sidecar: ForkedSidecar, check: Check, ranks: RankStarter
) -> None:
    running = ranks.start(fail_twice, 1, str(tmp_path), environment=sidecar.environment)
    wait_until((tmp_path / "rank-0.staged").exists, "the first save is committed")
    sidecar.kill()
    wait_until((tmp_path / "rank-0.failed").exists, "two saves have failed")
    sidecar.start()
    (tmp_path / "served").touch()
    [([changed, refused, *left], stall_s)] = running.results()
    assert "step 2 cannot be saved without a sidecar: its state dict needs a new plan (changed: new)" in changed
    assert stall_s < BOUND_S
    assert "a pre-commit hook refused step 3" in refused
    assert "[CommitVetoed]" in refused
    assert IN_DOUBT not in refused
    assert left == []
    check([1, 4])


def save_late(directory: str) -> list[str]:
    """Rank code: rank 1 saves the second step when rank 0 has given it up, and there is a sidecar again."""
    rank = int(os.environ["RANK"])
    with client_of(directory, stage_timeout_s=BOUND_S) as client:
        client.save(state(1), step=1, per_rank={"rank": rank}).result(LIMIT_S)
        tell(directory, rank, "staged")
        wait_until(Path(directory, "killed").exists, "there is no sidecar")
        errors: list[str] = []
        if rank == 0:
            handle = client.save(state(2), step=2, per_rank={"rank": rank})
            errors.append(str(handle.committed.exception(LIMIT_S)))
        tell(directory, rank, "failed")
        wait_until(Path(directory, "served").exists, "there is a sidecar again")
        if rank == 1:
            handle = client.save(state(2), step=2, per_rank={"rank": rank})
            errors.append(str(handle.committed.exception(LIMIT_S)))
        client.save(state(3), step=3, per_rank={"rank": rank}).result(LIMIT_S)
        return errors


@pytest.mark.faults
def test_a_rank_that_does_not_save_is_named_and_its_late_part_is_not_committed(
    tmp_path: Path, sidecar: ForkedSidecar, check: Check, ranks: RankStarter
) -> None:
    running = ranks.start(save_late, 2, str(tmp_path), environment=sidecar.environment)
    wait_until(told(tmp_path, "staged"), "the first save is committed")
    sidecar.kill()
    (tmp_path / "killed").touch()
    wait_until(told(tmp_path, "failed"), "rank 0 has given the second save up")
    sidecar.start()
    (tmp_path / "served").touch()
    [[error], [late]] = running.results()
    assert "rank 1 has no durable shard of step 2" in error
    assert "step 2" in late
    check([1, 3])


# ---------------------------------------------------------------- closing, and without the policy


def close_without_a_sidecar(directory: str) -> bool:
    """Rank code: the client is closed while its last save is in flight and no sidecar runs."""
    client = client_of(directory)
    client.save(state(1), step=1).result(LIMIT_S)
    tell(directory, 0, "staged")
    wait_until(Path(directory, "killed").exists, "there is no sidecar")
    handle = client.save(state(2), step=2)
    client.close()
    return handle.done()


@pytest.mark.faults
def test_closing_waits_for_a_save_that_stand_ins_commit(
    tmp_path: Path, sidecar: ForkedSidecar, check: Check, ranks: RankStarter
) -> None:
    running = ranks.start(close_without_a_sidecar, 1, str(tmp_path), environment=sidecar.environment)
    wait_until((tmp_path / "rank-0.staged").exists, "the first save is committed")
    sidecar.kill()
    (tmp_path / "killed").touch()
    assert running.results() == [True]
    check([1, 2])
    sidecar.start()


def fail_without_a_sidecar(directory: str) -> str:
    """Rank code: a save while no sidecar runs, by the policy that is the default."""
    with CheckpointClient(directory, connect_timeout_s=BOUND_S) as client:
        client.save(state(1), step=1).result(LIMIT_S)
        tell(directory, 0, "staged")
        wait_until(Path(directory, "killed").exists, "there is no sidecar")
        error = client.save(state(2), step=2).committed.exception(LIMIT_S)
        tell(directory, 0, "failed")
        wait_until(Path(directory, "served").exists, "there is a sidecar again")
        client.save(state(3), step=3).result(LIMIT_S)
        return str(error)


@pytest.mark.faults
def test_by_default_a_save_without_a_sidecar_fails_by_name(
    tmp_path: Path, sidecar: ForkedSidecar, check: Check, ranks: RankStarter
) -> None:
    running = ranks.start(fail_without_a_sidecar, 1, str(tmp_path), environment=sidecar.environment)
    wait_until((tmp_path / "rank-0.staged").exists, "the first save is committed")
    sidecar.kill()
    (tmp_path / "killed").touch()
    wait_until((tmp_path / "rank-0.failed").exists, "the second save has failed")
    assert not (tmp_path / "step-2").exists()
    sidecar.start()
    (tmp_path / "served").touch()
    [error] = running.results()
    assert "[SidecarLost]" in error
    assert "while step 2 was in flight" in error
    check([1, 3])
