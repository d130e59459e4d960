"""More saves than the storage can take: a save waits, bounded, or is skipped; every handle tells, none is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt_sidecar.status_query import ask_status
from ckpt_trainer_client import CheckpointClient, CheckpointFailed, SaveHandle, SaveSkipped
from testkit.ranks import RankStarter
from testkit.sidecars import Sidecar
from testkit.waiting import wait_until


def state(step: int) -> dict[str, torch.Tensor]:
    """A small state whose values tell its step."""
    return {"x": torch.full((1000,), float(step))}


def step_stored(client: CheckpointClient, step: int) -> float:
    """The value that a committed step holds."""
    target = state(-1)
    client.load(target, step)
    assert bool((target["x"] == target["x"][0]).all())
    return float(target["x"][0])


def ended(handle: SaveHandle) -> CheckpointFailed | None:
    """How a save ended, waited for."""
    handle.committed.exception(60)
    return handle.error()


@pytest.mark.parametrize("slots", [1, 2])
def test_waiting_for_a_region_is_bounded_and_training_goes_on(tmp_path: Path, sidecar: Sidecar, slots: int) -> None:
    with CheckpointClient(tmp_path, slots=slots, backpressure_timeout_s=0.2) as client:
        client.save(state(0), step=0).result()
        with sidecar.hanging(slots):
            staged = [client.save(state(step), step=step) for step in range(1, slots + 1)]
            too_many = client.save(state(9), step=9)
            failure = ended(too_many).failures[0]
        assert failure.kind == "RegionsExhausted"
        assert "step 9 within 0" in failure.message
        assert all(f"slot {slot} sealed (step {slot + 1})" in failure.message for slot in range(slots))
        assert not too_many.skipped
        for handle in staged:
            handle.result()
        client.save(state(10), step=10).result()
        assert client.steps() == [0, *range(1, slots + 1), 10]
        assert [step_stored(client, step) for step in client.steps()] == client.steps()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_skipping_tells_every_handle_of_a_burst(tmp_path: Path, sidecar: Sidecar, slots: int) -> None:
    with CheckpointClient(tmp_path, slots=slots, backpressure="skip") as client:
        client.save(state(0), step=0).result()
        skipped_before = sidecar.status().skipped_count
        with sidecar.hanging(slots):
            handles = [client.save(state(step), step=step) for step in range(1, 7)]
        failures = [ended(handle) for handle in handles]
        assert failures[:slots] == [None] * slots
        assert all(isinstance(failure, SaveSkipped) for failure in failures[slots:])
        assert [handle.skipped for handle in handles] == [False] * slots + [True] * (6 - slots)
        assert [handle.staged.exception() is None for handle in handles] == [True] * slots + [False] * (6 - slots)
        assert client.steps() == list(range(slots + 1))
        assert [step_stored(client, step) for step in client.steps()] == client.steps()
        assert sidecar.status().skipped_count - skipped_before == 6 - slots


@pytest.mark.parametrize("slots", [1, 2])
def test_no_save_of_a_burst_is_lost_while_the_storage_is_slow(
    tmp_path: Path, start_sidecar: Callable[..., Sidecar], slots: int
) -> None:
    # Each save books 0.1 s of the bandwidth, so later ones find every region taken and wait.
    start_sidecar(max_write_bytes_per_s=60_000)
    with CheckpointClient(tmp_path, slots=slots) as client:
        handles = [client.save(state(step), step=step) for step in range(6)]
        for handle in handles:
            handle.result()
        assert client.steps() == list(range(6))
        assert [step_stored(client, step) for step in range(6)] == list(range(6))


def save_while_rank_1_is_out_of_regions(
    directory: str, policy: str, shm_root: str, job_id: str
) -> tuple[str, bool, str]:
    """Rank code: rank 1 has one region, rank 0 two; the sidecar hangs while both save twice."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    with CheckpointClient(directory, slots=2 - rank, backpressure=policy, backpressure_timeout_s=0.2) as client:
        client.save(state(0), step=0).result()
        slots = wait_until(lambda: free_regions(shm_root, job_id), "regions are free and prepared")
        assert slots == [2, 1]
        sidecar_pid = ask_status(shm_root, job_id).pid
        dist.barrier()
        if rank == 1:
            os.kill(sidecar_pid, signal.SIGSTOP)
        dist.barrier()
        try:
            first, second = client.save(state(1), step=1), client.save(state(2), step=2)
            dist.barrier()
        finally:
            if rank == 1:
                os.kill(sidecar_pid, signal.SIGCONT)
        first.result()
        failure = ended(second)
        client.save(state(3), step=3).result()
        assert client.steps() == [0, 1, 3]
    return type(failure).__name__, second.skipped, str(failure)


def free_regions(shm_root: str, job_id: str) -> list[int] | None:
    """How many regions each rank may fill, once those of both are prepared."""
    ranks = ask_status(shm_root, job_id).ranks
    ready = [[slot.state == "free" and slot.region_bytes > 0 for slot in rank.slots[: 2 - rank.rank]] for rank in ranks]
    return [len(slots) for slots in ready] if all(all(slots) for slots in ready) else None


def test_a_save_that_one_rank_skips_is_skipped_on_all(tmp_path: Path, sidecar: Sidecar, ranks: RankStarter) -> None:
    arguments = (str(tmp_path), "skip", str(sidecar.shm_root), sidecar.job_id)
    results = ranks.run(save_while_rank_1_is_out_of_regions, 2, *arguments, group=True, environment=sidecar.environment)
    assert [result[:2] for result in results] == [("SaveSkipped", True)] * 2
    assert all("rank 1" in text for _, _, text in results)


def test_a_rank_that_waited_in_vain_fails_the_save_on_all(tmp_path: Path, sidecar: Sidecar, ranks: RankStarter) -> None:
    arguments = (str(tmp_path), "wait", str(sidecar.shm_root), sidecar.job_id)
    results = ranks.run(save_while_rank_1_is_out_of_regions, 2, *arguments, group=True, environment=sidecar.environment)
    assert [result[:2] for result in results] == [("CheckpointFailed", False)] * 2
    assert all("rank 1" in text and "RegionsExhausted" in text for _, _, text in results)


def test_the_stall_of_a_save_that_finds_no_region_ends_at_its_bound(tmp_path: Path, sidecar: Sidecar) -> None:
    with CheckpointClient(tmp_path, slots=1, backpressure_timeout_s=0.1) as client:
        client.save(state(0), step=0).result()
        with sidecar.hanging(1):
            client.save(state(1), step=1)
            for step in range(2, 7):
                handle = client.save(state(step), step=step)
                assert ended(handle).failures[0].kind == "RegionsExhausted"
        client.wait()
        assert client.steps() == [0, 1]
