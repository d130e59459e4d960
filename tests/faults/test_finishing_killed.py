"""A job is killed, sidecar and ranks, and whoever finishes what it had staged is killed too; then the job is run again.

A dead job is finished by a sidecar that the next sidecar on the node starts for it, or ``ckpt-sidecar recover``. In
each test the second save of the dead job was staged on both ranks and half written: it is committed in the end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from ckpt_proto.process import process_start_s
from ckpt_proto.runtime_dir import lock_owner
from testkit.finisher import ENVIRONMENT, arm_finishers
from testkit.kill_points import LAST_WORDS, LAST_WORDS_BEFORE_A_STOP, KillOrder, arm
from testkit.kill_scenario import WINDOWS, WORLD_SIZE
from testkit.leaks import left_in
from testkit.nodes import Node
from testkit.outcomes import Outcome, Outcomes
from testkit.ranks import RankStarter, RunningRanks
from testkit.stock_load import load_each
from testkit.training import Attempt, Program, read_records, train
from testkit.verdict import A_KILLED_SIDECAR_MAY, Problem, judge
from testkit.waiting import wait_until

STAGED: Final = 2
HALF_WRITTEN: Final = KillOrder("after the first window", 4)
"""Where the dead job's sidecar is killed: with the second save, when both ranks have sealed their part of it."""

EVERY_RANK: Final = set(range(WORLD_SIZE))


class Jobs:
    """One checkpoint directory on one node: the job that was killed, and the one that is run in its place."""

    def __init__(self, starter: RankStarter, stock: RankStarter, shm_root: Path, folder: Path) -> None:
        self.directory, self._records, logs = (folder / name for name in ("checkpoints", "records", "logs"))
        for path in (self.directory, self._records, logs):
            path.mkdir()
        self._starter, self._stock, self._shm_root = starter, stock, shm_root
        self._program = Program(str(self.directory), str(self._records))
        self.dead = Node(starter, shm_root, logs, range(WORLD_SIZE), job_id="dead", constants=WINDOWS)
        self.next = Node(starter, shm_root, logs, range(WORLD_SIZE), job_id="next", constants=WINDOWS)
        self._recoveries: list[RunningRanks] = []

    @property
    def is_committed(self) -> bool:
        """Whether what was staged is."""
        return (self.directory / f"step-{STAGED}" / ".metadata").exists()

    def kill_all(self) -> None:
        """The first job's life, until nothing of it runs."""
        self.dead.start_sidecar(HALF_WRITTEN)
        self.dead.start_ranks(train, WORLD_SIZE, self._program, 0, None)
        wait_until(lambda: self._staged_by() == EVERY_RANK, "every rank has staged the save")
        wait_until(lambda: process_start_s(self.dead.sidecar_pid) is None, "the sidecar has died")
        self.dead.kill_ranks()
        assert self.dead.end_ranks() == dict.fromkeys(EVERY_RANK, "killed")
        assert self.dead.has_died_at_its_point()
        assert not self.is_committed

    def _staged_by(self) -> set[int]:
        struck = Attempt(0, STAGED)
        return {
            entry.rank for entry in read_records(self._records) if (entry.what, entry.attempt) == ("staged", struck)
        }

    def recover(self, finishers: KillOrder | None = None, order: KillOrder | None = None) -> RunningRanks:
        """Start ``ckpt-sidecar recover``, armed or with armed finishers, on the checkpoint directory."""
        arguments = (str(self.directory), str(self._shm_root), finishers, order)
        self._recoveries.append(self._starter.start(recover, 1, *arguments, environment=ENVIRONMENT))
        return self._recoveries[-1]

    def await_death_of_the_finisher(self) -> None:
        """Until the sidecar that finishes the dead job has killed itself."""
        wait_until(lambda: LAST_WORDS in self._told(), "the finisher is at its point")
        wait_until(lambda: lock_owner(self.dead.directory) is None, "it is gone")

    def await_stop_of_the_finisher(self) -> int:
        """Until the sidecar that finishes the dead job has stopped itself; its pid."""
        wait_until(lambda: LAST_WORDS_BEFORE_A_STOP in self._told(), "the finisher is at its point")
        pid = lock_owner(self.dead.directory)
        assert pid
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T", "it stops")
        return pid

    def _told(self) -> str:
        return "\n".join([self.next.story(), *(running.text(0) for running in self._recoveries)])

    def await_end_of_the_dead(self) -> None:
        """Until nothing of the dead job lies in shared memory."""
        wait_until(lambda: not self.dead.directory.exists(), "the dead job is finished")
        assert self.is_committed

    def run_again(self, row: Outcome) -> None:
        """The second job, whose sidecar serves already, to its end; then the judgement over both."""
        self.next.start_ranks(train, WORLD_SIZE, self._program, 1, None)
        wait_until(lambda: not self.next.living_ranks(), "the job that was run again has ended")
        ends, code = self.next.end_ranks(), self.next.stop_sidecar()
        entries = read_records(self._records)
        leaked = [Problem("leaked", line) for line in left_in(self._shm_root)]
        outcome = judge(
            self.directory, entries, WORLD_SIZE, lambda names: self._stock.run(load_each, 1, names)[0], found=leaked
        )
        row.count(outcome)
        print("\n".join([str(outcome), *map(str, entries), self._told()]))
        assert (ends, code) == (dict.fromkeys(EVERY_RANK, ""), 0)
        assert not outcome.unexpected(A_KILLED_SIDECAR_MAY, {Attempt(0, STAGED)})
        again = {Attempt(1, STAGED + 1), Attempt(1, STAGED + 2)}
        assert outcome.committed == {*(Attempt(0, step) for step in range(1, STAGED + 1)), *again}

    def close(self) -> None:
        """Leave no process of these jobs behind, however the test went; finishers are found by their shared memory."""
        self.dead.close()
        self.next.close()
        for running in self._recoveries:
            if process_start_s(running.pids[0]) is not None:
                os.kill(running.pids[0], signal.SIGKILL)


def recover(directory: str, shm_root: str, finishers: KillOrder | None, order: KillOrder | None) -> int:
    """Process code: ``ckpt-sidecar recover`` that perhaps dies at a point, or the sidecars that it starts. Returns its
    exit code."""
    from ckpt_sidecar.__main__ import main

    if finishers is not None:
        arm_finishers(finishers, WINDOWS)
    if order is not None:
        arm(order)
    return main(["recover", directory, "--shm-root", shm_root])


@pytest.fixture
def jobs(tmp_path: Path, shm_root: Path, processes: RankStarter, stock_ranks: RankStarter) -> Iterator[Jobs]:
    made = Jobs(processes, stock_ranks, shm_root, tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def row(outcomes: Outcomes) -> Iterator[Outcome]:
    with outcomes.run("whoever finishes a dead job killed too") as found:
        yield found


AT_ITS_POINTS = [
    *(
        (point, False)
        for point in (
            "before a shard is written",
            "after the first window",
            "before a data file is durable",
            "before a manifest has its name",
            "after a manifest has its name",
            "before a durable shard is reported",
            "before the checkpoint is published",
            "before .metadata is linked",
        )
    ),
    ("after .metadata is linked", True),
    ("before the commit is reported", True),
]
"""With whether what was staged is committed then."""


@pytest.mark.faults
@pytest.mark.parametrize(("point", "committed"), AT_ITS_POINTS, ids=[point for point, _ in AT_ITS_POINTS])
def test_the_sidecar_that_the_next_one_starts_is_killed(jobs: Jobs, row: Outcome, point: str, committed: bool) -> None:
    """The next one is killed after it, and its successor has the dead job finished."""
    jobs.kill_all()
    jobs.next.start_sidecar(finishers=KillOrder(point))
    jobs.await_death_of_the_finisher()
    assert jobs.is_committed == committed
    jobs.next.kill_sidecar()
    jobs.next.look_after_sidecar()
    jobs.await_end_of_the_dead()
    jobs.run_again(row)


@pytest.mark.faults
def test_a_job_that_is_run_again_while_what_it_had_staged_is_finished_once_more(jobs: Jobs, row: Outcome) -> None:
    """Nobody waits for the second finisher but the ranks, which find the step that it commits."""
    jobs.kill_all()
    jobs.next.start_sidecar(finishers=KillOrder("before .metadata is linked"))
    jobs.await_death_of_the_finisher()
    jobs.next.kill_sidecar()
    jobs.next.look_after_sidecar()
    jobs.run_again(row)


@pytest.mark.faults
def test_the_next_sidecar_is_killed_and_the_one_that_it_has_started_goes_on(jobs: Jobs, row: Outcome) -> None:
    """Its successor leaves the dead job to who has it."""
    jobs.kill_all()
    jobs.next.start_sidecar(finishers=KillOrder("after the first window", stops=True))
    finisher = jobs.await_stop_of_the_finisher()
    jobs.next.kill_sidecar()
    jobs.next.look_after_sidecar()
    assert lock_owner(jobs.dead.directory) == finisher
    os.kill(finisher, signal.SIGCONT)
    jobs.await_end_of_the_dead()
    jobs.run_again(row)


@pytest.mark.faults
def test_the_next_sidecar_is_killed_together_with_the_one_that_it_has_started(jobs: Jobs, row: Outcome) -> None:
    jobs.kill_all()
    jobs.next.start_sidecar(finishers=KillOrder("after the first window", stops=True))
    finisher = jobs.await_stop_of_the_finisher()
    jobs.next.kill_sidecar()
    os.kill(finisher, signal.SIGKILL)
    wait_until(lambda: lock_owner(jobs.dead.directory) is None, "the finisher is gone")
    jobs.next.look_after_sidecar()
    jobs.await_end_of_the_dead()
    jobs.run_again(row)


@pytest.mark.faults
@pytest.mark.parametrize("point", ["after the first window", "before a manifest has its name"])
def test_the_sidecar_that_recover_starts_is_killed(jobs: Jobs, row: Outcome, point: str) -> None:
    """Recover leaves what is incomplete, and the next one has it written to its end."""
    jobs.kill_all()
    assert jobs.recover(KillOrder(point)).results() == [0]
    jobs.await_death_of_the_finisher()
    assert not jobs.is_committed
    assert jobs.recover().results() == [0]
    jobs.await_end_of_the_dead()
    jobs.next.start_sidecar()
    jobs.run_again(row)


@pytest.mark.faults
def test_the_sidecar_that_recover_starts_is_killed_when_a_shard_is_durable(jobs: Jobs, row: Outcome) -> None:
    """The other rank's shard may be durable by then too: it is written beside it. Then the first recover commits."""
    jobs.kill_all()
    assert jobs.recover(KillOrder("after a manifest has its name")).results() == [0]
    jobs.await_death_of_the_finisher()
    assert jobs.recover().results() == [0]
    jobs.await_end_of_the_dead()
    jobs.next.start_sidecar()
    jobs.run_again(row)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("point", "committed"), [("before .metadata is linked", False), ("after .metadata is linked", True)]
)
def test_recover_is_killed_too_while_it_commits(jobs: Jobs, row: Outcome, point: str, committed: bool) -> None:
    """The sidecar that it had started made everything durable, and was killed; recover itself then commits it."""
    jobs.kill_all()
    recovering = jobs.recover(KillOrder("before the checkpoint is published"), KillOrder(point))
    assert recovering.exit_codes() == [-signal.SIGKILL]
    assert jobs.is_committed == committed
    assert jobs.recover().results() == [0]
    jobs.await_end_of_the_dead()
    jobs.next.start_sidecar()
    jobs.run_again(row)


@pytest.mark.faults
@pytest.mark.parametrize("goes_on", [True, False], ids=["which goes on", "which is killed too"])
def test_recover_is_killed_while_it_waits_for_the_sidecar_that_it_has_started(
    jobs: Jobs, row: Outcome, goes_on: bool
) -> None:
    jobs.kill_all()
    recovering = jobs.recover(KillOrder("after the first window", stops=True))
    finisher = jobs.await_stop_of_the_finisher()
    os.kill(recovering.pids[0], signal.SIGKILL)
    assert recovering.exit_codes() == [-signal.SIGKILL]
    if goes_on:
        assert jobs.recover().results() == [0]  # leaves the dead job to who has it
        assert not jobs.is_committed
        os.kill(finisher, signal.SIGCONT)
    else:
        os.kill(finisher, signal.SIGKILL)
        wait_until(lambda: lock_owner(jobs.dead.directory) is None, "the finisher is gone")
        assert jobs.recover().results() == [0]
    jobs.await_end_of_the_dead()
    jobs.next.start_sidecar()
    jobs.run_again(row)
