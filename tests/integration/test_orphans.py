"""Jobs that nobody serves: ranks and sidecar were killed with a save staged. The node has it, and it is not lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_proto.runtime_dir import job_dirs
from ckpt_sidecar.orphans import orphaned_jobs
from ckpt_trainer_client import CheckpointClient
from testkit import node_rank
from testkit.cluster import NodeRank
from testkit.sidecars import Sidecar
from testkit.waiting import LIMIT_S, wait_until

SLOW_BYTES_PER_S = 200_000
ELEMENTS = 1_000_000
"""4 MB: twenty seconds of writing, so the kill meets it."""


@contextmanager
def rank_of(sidecar: Sidecar, directory: Path, log: Path) -> Iterator[NodeRank]:
    """A rank in a process of its own, served by ``sidecar``."""
    with open(log, "ab") as errors:
        process = subprocess.Popen(
            [sys.executable, node_rank.__file__, str(directory)],
            env={**os.environ, **sidecar.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    rank = NodeRank(0, process)
    try:
        yield rank
    finally:
        rank.kill()


@pytest.fixture
def dead_job(tmp_path: Path, start_sidecar: Callable[..., Sidecar]) -> Path:
    """The checkpoint directory of a job that was killed with step 7 staged and not written, its sidecar too."""
    sidecar = start_sidecar(job_id="dead", max_write_bytes_per_s=SLOW_BYTES_PER_S)
    directory = tmp_path / "checkpoints"
    with rank_of(sidecar, directory, tmp_path / "rank.log") as rank:
        assert rank.hear() == {"welcomed": None}
        rank.tell(do="save", step=7, elements=ELEMENTS)
        assert rank.hear() == {"staged": True}
        sidecar.kill()
    assert not (directory / "step-7" / ".metadata").exists()
    return directory


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


def test_recover_writes_what_lies_in_shared_memory(dead_job: Path, shm_root: Path) -> None:
    assert [path.name for path in orphaned_jobs(shm_root)] == ["dead"]
    command = [sys.executable, "-m", "ckpt_sidecar", "recover", str(dead_job), "--shm-root", str(shm_root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "job dead: what it had left in shared memory is finished (exit code 0)" in done.stderr
    assert_holds_step_7(dead_job)
    assert job_dirs(shm_root) == []


def test_recover_leaves_jobs_of_other_directories_alone(dead_job: Path, tmp_path: Path, shm_root: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-m", "ckpt_sidecar", "recover", str(elsewhere), "--shm-root", str(shm_root)]
    assert subprocess.run(command, timeout=LIMIT_S, cwd="/").returncode == 0
    assert [path.name for path in orphaned_jobs(shm_root)] == ["dead"]
    command = [sys.executable, "-m", "ckpt_sidecar", "recover", str(dead_job), "--shm-root", str(shm_root)]
    assert subprocess.run(command, timeout=LIMIT_S, cwd="/").returncode == 0


def test_a_job_that_is_started_right_after_the_kill_resumes_from_it(
    dead_job: Path, start_sidecar: Callable[..., Sidecar]
) -> None:
    start_sidecar(job_id="rerun")
    with CheckpointClient(dead_job) as client:
        assert client.latest() == 7
    assert_holds_step_7(dead_job)


def test_a_job_whose_rank_lives_is_no_orphan(
    tmp_path: Path, shm_root: Path, start_sidecar: Callable[..., Sidecar]
) -> None:
    sidecar = start_sidecar(job_id="living")
    with rank_of(sidecar, tmp_path / "checkpoints", tmp_path / "rank.log") as rank:
        rank.hear()
        rank.tell(do="save", step=1)
        rank.hear()
        sidecar.kill()
        assert orphaned_jobs(shm_root) == []
        sidecar.start()
        rank.tell(do="result", step=1)
        assert "committed" in rank.hear()
        rank.tell(do="close")
        rank.hear()
