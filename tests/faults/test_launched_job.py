"""The whole job is killed from outside, 50 ms after every rank has staged: ranks, torchrun and ckpt-torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from testkit.leaks import left_in, processes_marked
from testkit.nodes import Node
from testkit.outcomes import Outcomes
from testkit.ranks import TESTS, RankStarter
from testkit.stock_load import load_each
from testkit.training import Attempt, Program, read_records, train
from testkit.verdict import Problem, judge
from testkit.waiting import LIMIT_S, wait_until

WORLD_SIZE = 2
STRUCK = 2
AFTER_STAGED_S = 0.05
WRITE_BYTES_PER_S = 4 << 20
"""So slow that the second save, of four MB, is being written when the job is killed."""


@contextmanager
def launched(program: Program, shm_root: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The job under ckpt-torchrun, in a process group of its own; nothing of it is left afterwards."""
    command = [sys.executable, "-m", "ckpt_sidecar.launcher", "--job-id", "job", "--shm-root", str(shm_root)]
    command += ["--nice", "0", "--max-write-bytes-per-s", str(WRITE_BYTES_PER_S), "--"]
    command += ["--nproc-per-node", str(WORLD_SIZE), "--master-port", "0", "-m", "testkit.training"]
    command += [program.directory, program.records, str(program.last_step), "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        kill_job(process, Path(program.records), shm_root)
        process.wait(LIMIT_S)


def kill_job(launcher: subprocess.Popen[bytes], records: Path, shm_root: Path) -> None:
    """SIGKILL to ckpt-torchrun and torchrun, which share a process group, and to the ranks, which have their own."""
    ranks = {int(entry.text) for entry in read_records(records) if entry.what == "started"}
    if launcher.poll() is None:
        os.killpg(launcher.pid, signal.SIGKILL)
    for pid in ranks.intersection(processes_marked(str(shm_root))):  # a pid may be somebody else's by now
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def staged_by(records: Path, step: int) -> set[int]:
    """The ranks that have staged a step."""
    return {
        entry.rank for entry in read_records(records) if (entry.what, entry.attempt) == ("staged", Attempt(0, step))
    }


def restart(node: Node, program: Program) -> None:
    """The job's second life, to its end."""
    try:
        node.start_sidecar()
        node.start_ranks(train, WORLD_SIZE, program, 1, None, restarts=0)
        wait_until(lambda: not node.living_ranks(), "the restarted job has ended")
        assert node.end_ranks() == dict.fromkeys(range(WORLD_SIZE), "")
        assert node.stop_sidecar() == 0
    finally:
        node.close()


@pytest.mark.faults
def test_what_was_staged_is_committed_when_the_whole_job_is_killed(
    tmp_path: Path, shm_root: Path, processes: RankStarter, stock_ranks: RankStarter, outcomes: Outcomes
) -> None:
    directory, records, logs = (tmp_path / name for name in ("checkpoints", "records", "logs"))
    for path in (directory, records, logs):
        path.mkdir()
    program = Program(str(directory), str(records), STRUCK + 2)
    with outcomes.run("ranks, torchrun and wrapper killed 50 ms after staged") as row:
        with launched(program, shm_root, tmp_path / "launcher.log") as launcher:
            every_rank = set(range(WORLD_SIZE))
            wait_until(lambda: staged_by(records, STRUCK) == every_rank, f"every rank has staged step {STRUCK}")
            time.sleep(AFTER_STAGED_S)  # the moment that is tested
            assert not (directory / f"step-{STRUCK}" / ".metadata").exists(), "the save was too quick to be struck"
            kill_job(launcher, records, shm_root)
        leaked = [Problem("leaked", line) for line in left_in(shm_root)]
        print((tmp_path / "launcher.log").read_text())
        restart(Node(processes, shm_root, logs, range(WORLD_SIZE)), program)
        entries = read_records(records)
        outcome = judge(
            directory, entries, WORLD_SIZE, lambda names: stock_ranks.run(load_each, 1, names)[0], found=leaked
        )
        row.count(outcome)
    print(outcome)
    assert not outcome.problems
    restarted = [Attempt(1, STRUCK + 1), Attempt(1, STRUCK + 2)]
    assert outcome.committed == {*(Attempt(0, step) for step in range(1, STRUCK + 1)), *restarted}
