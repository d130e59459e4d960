"""What a sidecar takes from training, and how it keeps out of its way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ckpt_proto.status import MannersStatus
from ckpt_sidecar.politeness import QUIET_SAMPLES
from ckpt_trainer_client import CheckpointClient
from ckpt_trainer_client.sidecar_link import HEARTBEAT_S
from testkit.sidecars import Sidecar
from testkit.waiting import LIMIT_S, wait_until

MIB = 1 << 20
QUIET_STEP_S = 0.02
SLOW_STEP_S = 0.08


def cores_of_all_threads(pid: int) -> set[frozenset[int]]:
    return {frozenset(os.sched_getaffinity(int(task))) for task in os.listdir(f"/proc/{pid}/task")}


@pytest.fixture
def one_core() -> Iterator[int]:
    """This process, which is the trainer, is pinned to one of several cores."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core here: the sidecar has nowhere else to go")
    core = min(before)
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        pytest.skip(f"cores cannot be chosen here: {error}")
    if os.sched_getaffinity(0) != {core}:
        pytest.skip("cores cannot be chosen here: the system does as if")
    yield core
    os.sched_setaffinity(0, before)


def test_a_sidecar_leaves_the_cores_that_ranks_are_pinned_to(tmp_path: Path, sidecar: Sidecar, one_core: int) -> None:
    others = frozenset(os.sched_getaffinity(sidecar.pid)) - {one_core}
    with CheckpointClient(tmp_path) as client:
        wait_until(lambda: cores_of_all_threads(sidecar.pid) == {others}, "every thread is on the other cores")
        assert sidecar.status().manners.cores == tuple(sorted(others))
        client.save({"x": torch.ones(1000)}, step=1).result(LIMIT_S)
    wait_until(lambda: cores_of_all_threads(sidecar.pid) == {others | {one_core}}, "it takes them back")


def test_what_writing_costs_is_in_the_status(tmp_path: Path, start_sidecar: Callable[..., Sidecar]) -> None:
    sidecar = start_sidecar()
    with CheckpointClient(tmp_path) as client:
        before = sidecar.status().manners
        assert before.cpu_s_per_gb is None
        client.save({"x": torch.ones(8 * MIB)}, step=1).result(LIMIT_S)
        after = sidecar.status().manners
    assert after.cpu_s_per_gb is not None
    written_gb = 32 * MIB / 1e9
    assert 0 < after.cpu_s_per_gb * written_gb < after.cpu_s
    assert after.write_cap_bytes_per_s is None


class Training:
    """Steps of a given length, in which nothing is computed: the machine's load does not matter."""

    def __init__(self, client: CheckpointClient) -> None:
        self._client = client
        self._forward = threading.Event()

    def until(self, condition: Callable[[], bool], step_s: float) -> None:
        steps = 0
        while not condition():
            self._forward.wait(step_s)
            self._client.before_optimizer_step()
            steps += 1
            assert steps * step_s < LIMIT_S, "it has not happened"


def test_a_write_that_slows_training_is_slowed(tmp_path: Path, start_sidecar: Callable[..., Sidecar]) -> None:
    given = 48.0 * MIB
    sidecar = start_sidecar(max_write_bytes_per_s=given)
    seen: list[MannersStatus] = []

    def look() -> MannersStatus:
        seen.append(sidecar.status().manners)
        return seen[-1]

    with CheckpointClient(tmp_path) as client:
        training = Training(client)
        beats = iter(range(10_000))
        training.until(lambda: next(beats) * QUIET_STEP_S > (QUIET_SAMPLES + 3) * HEARTBEAT_S, QUIET_STEP_S)
        handle = client.save({"x": torch.ones(40 * MIB)}, step=1)
        training.until(lambda: look() is not None and handle.done(), SLOW_STEP_S)
        assert handle.result(LIMIT_S)
    assert max(manners.slowdown or 0.0 for manners in seen) > 2
    slowest = min(manners.write_cap_bytes_per_s or given for manners in seen)
    assert slowest < given
    wait_until(lambda: look().write_cap_bytes_per_s == given, "the next write may be as fast as ever")
