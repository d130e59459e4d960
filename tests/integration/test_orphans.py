"""Jobs that nobody serves: ranks and sidecar were killed with a save staged. The node has it, and it is not lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_proto.process import process_start_s
from ckpt_proto.runtime_dir import job_dirs
from ckpt_sidecar.__main__ import main
from ckpt_sidecar.orphans import orphaned_jobs
from ckpt_trainer_client import CheckpointClient
from testkit.ranks import RankStarter, RunningRanks
from testkit.sidecars import Sidecar
from testkit.waiting import LIMIT_S, wait_until

SLOW_BYTES_PER_S = 200_000
ELEMENTS = 1_000_000
"""4 MB: twenty seconds of writing, so the kill meets it."""


def save_and_wait(directory: str, step: int, elements: int, staged: str, may_end: str) -> None:
    """Rank code: one save, staged, and its end awaited once ``may_end`` is there: in a dead job that never comes."""
    client = CheckpointClient(directory)
    handle = client.save({"weight.0": torch.full((elements,), float(step))}, step=step)
    assert handle.staged.exception() is None
    Path(staged).touch()
    wait_until(Path(may_end).exists, "the test is done with this rank")
    handle.result(LIMIT_S)
    client.close()


@contextmanager
def rank_of(sidecar: Sidecar, ranks: RankStarter, folder: Path, step: int, elements: int) -> Iterator[RunningRanks]:
    """A rank that has staged a step, served by ``sidecar``; killed in the end, if it lives."""
    staged, may_end = folder / "staged", folder / "may-end"
    arguments = (str(folder / "checkpoints"), step, elements, str(staged), str(may_end))
    rank = ranks.start(save_and_wait, 1, *arguments, environment=sidecar.environment)
    try:
        wait_until(lambda: staged.exists() or process_start_s(rank.pids[0]) is None, "the rank has staged")
        assert staged.exists(), rank.text(0)
        yield rank
    finally:
        if process_start_s(rank.pids[0]) is not None:
            os.kill(rank.pids[0], signal.SIGKILL)
            rank.exit_codes()


@pytest.fixture
def dead_job(tmp_path: Path, start_sidecar: Callable[..., Sidecar], ranks: RankStarter) -> Path:
    """The checkpoint directory of a job that was killed with step 7 staged and not written, its sidecar too."""
    sidecar = start_sidecar(job_id="dead", max_write_bytes_per_s=SLOW_BYTES_PER_S)
    with rank_of(sidecar, ranks, tmp_path, 7, ELEMENTS):
        sidecar.kill()
    assert not (tmp_path / "checkpoints" / "step-7" / ".metadata").exists()
    return tmp_path / "checkpoints"


def assert_holds_step_7(directory: Path) -> None:
    state = {"weight.0": torch.zeros(ELEMENTS)}
    dcp.load(state, checkpoint_id=str(directory / "step-7"))
    assert torch.equal(state["weight.0"], torch.full((ELEMENTS,), 7.0))


def test_the_next_sidecar_of_another_job_has_it_finished(
    dead_job: Path, shm_root: Path, start_sidecar: Callable[..., Sidecar]
) -> None:
    start_sidecar(job_id="other")
    wait_until((dead_job / "step-7" / ".metadata").exists, "the dead job's step is committed")
    wait_until(lambda: [path.name for path in job_dirs(shm_root)] == ["other"], "its directory is gone")
    assert_holds_step_7(dead_job)


def test_recover_writes_what_lies_in_shared_memory_for_its_directory_alone(
    dead_job: Path, tmp_path: Path, shm_root: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    assert main(["recover", str(tmp_path / "elsewhere"), "--shm-root", str(shm_root)]) == 0
    assert [path.name for path in orphaned_jobs(shm_root)] == ["dead"]
    command = [sys.executable, "-m", "ckpt_sidecar", "recover", str(dead_job), "--shm-root", str(shm_root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "job dead: what it had left in shared memory is finished (exit code 0)" in done.stderr
    assert_holds_step_7(dead_job)
    assert job_dirs(shm_root) == []


def test_a_job_that_is_started_right_after_the_kill_resumes_from_it(
    dead_job: Path, start_sidecar: Callable[..., Sidecar]
) -> None:
    start_sidecar(job_id="rerun")
    with CheckpointClient(dead_job) as client:
        assert client.latest() == 7
    assert_holds_step_7(dead_job)


def test_a_job_whose_rank_lives_is_no_orphan(
    tmp_path: Path, shm_root: Path, start_sidecar: Callable[..., Sidecar], ranks: RankStarter
) -> None:
    sidecar = start_sidecar(job_id="living")
    with rank_of(sidecar, ranks, tmp_path, 1, 1000) as rank:
        sidecar.kill()
        assert orphaned_jobs(shm_root) == []
        sidecar.start()
        (tmp_path / "may-end").touch()
        assert rank.results() == [None]
