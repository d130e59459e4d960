"""Two hundred saves while random processes are killed at random moments: nothing is torn, nothing grows."""

from __future__ import annotations

import os
import random
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from testkit.leaks import left_in
from testkit.nodes import Node
from testkit.outcomes import Outcomes
from testkit.ranks import RankStarter
from testkit.stock_load import load_each
from testkit.training import Attempt, Entry, Program, read_records, train
from testkit.verdict import A_KILLED_SIDECAR_MAY, Problem, judge
from testkit.waiting import wait_until

SAVES = 200
WORLD_SIZE = 2
LAST_KILL_AT_STEP = SAVES - 15
"""The saves after the last kill show that the job has come back."""
LIMIT_S = 900.0

ALLOWED_RSS_BYTES = 16 << 20
"""A sidecar that was started again has other pages than the one before; a leak of one state per save: 80 MB."""

ALLOWED_DESCRIPTORS = 6
"""A connection of a dead rank is closed when the kernel gets to it, and writers open a file each."""

ALLOWED_SHM_BYTES = 64 << 10
"""Less than the smallest region: a slot more than the ranks have would be seen."""


@dataclass(frozen=True)
class Sample:
    """What the sidecar holds at one moment."""

    rss_bytes: int
    descriptors: int
    shm_bytes: int


class Storm:
    """Kills, drawn from a seed: after so many lines in the ranks' records, and then a random moment."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._draw_next(0)

    def _draw_next(self, lines: int) -> None:
        # One in five comes while the job is being started again.
        self._after_lines = lines + (
            self._draw.randint(1, 8) if self._draw.random() < 0.2 else self._draw.randint(20, 90)
        )
        self._due_s: float | None = None
        self._delay_s = self._draw.uniform(0.0, 0.03)
        self._victim = self._draw.choice((0, 1, 0, 1, None))

    def victim(self, lines: int, now_s: float) -> tuple[int | None] | None:
        """Who is to die now, ``(rank,)`` or ``(None,)`` for the sidecar; None if it is nobody's turn."""
        if self._due_s is None and lines >= self._after_lines:
            self._due_s = now_s + self._delay_s
        if self._due_s is None or now_s < self._due_s:
            return None
        victim = (self._victim,)
        self._draw_next(lines)
        return victim


class Job:
    """The job under the storm: what a launcher does when something dies."""

    def __init__(self, node: Node, program: Program, storm: Storm) -> None:
        self._node = node
        self._program = program
        self._storm = storm
        self._life = 0
        self._lines = -1
        self._victims: set[int] = set()
        self._hello_lost = False
        """A sidecar was killed in a handshake: a client may wait in vain for its answer, and the launcher steps in."""
        self.samples: list[Sample] = []
        self.in_flight: set[Attempt] = set()
        self.problems: list[Problem] = []
        self.story: list[str] = []

    def run(self) -> None:
        """From the first start to the end of the last save."""
        self._node.start_sidecar()
        self._start_ranks()
        wait_until(self._look, f"{SAVES} saves", LIMIT_S)

    def _start_ranks(self) -> None:
        self._victims, self._hello_lost = set(), False
        self._node.start_ranks(train, WORLD_SIZE, self._program, self._life, None, restarts=self._life)

    def _look(self) -> bool:
        self._node.look_after_sidecar()
        records = read_records(Path(self._program.records), self._life)
        if len(records) != self._lines and any(entry.what == "committed" for entry in records):
            self.samples.append(sample(self._node))
        self._lines = len(records)
        living = self._node.living_ranks()
        if not living:
            return self._end_life(records)
        if self._victims - set(living):
            self._node.kill_ranks()
            return False
        if max((entry.attempt.step for entry in records if entry.attempt), default=0) < LAST_KILL_AT_STEP:
            victim = self._storm.victim(self._total_lines(), time.monotonic())
            if victim is not None:
                self._kill(*victim, records)
        return False

    def _total_lines(self) -> int:
        return sum(path.read_bytes().count(b"\n") for path in Path(self._program.records).iterdir())

    def _kill(self, rank: int | None, records: Sequence[Entry]) -> None:
        if rank is None:
            self.story.append(f"life {self._life}: the sidecar is killed")
            self._hello_lost = sum(entry.what == "resumed" for entry in records) < WORLD_SIZE
            self.in_flight |= in_flight(records)
            self._node.kill_sidecar()
            # What was begun between the look and the death was in flight too.
            self.in_flight |= in_flight(read_records(Path(self._program.records), self._life))
        elif rank in self._node.living_ranks():
            self.story.append(f"life {self._life}: rank {rank} is killed")
            self._victims.add(rank)
            self._node.kill_rank(rank)

    def _end_life(self, records: Sequence[Entry]) -> bool:
        ends = self._node.end_ranks()
        for rank, end in ends.items():
            if end and not (end == "killed" and self._victims) and not self._hello_lost:
                self.problems.append(Problem("unclean", f"life {self._life}, rank {rank}: {end}"))
        if not any(ends.values()):
            return True
        if self.problems:
            raise AssertionError(f"{self.problems}\n{self._node.story()}")
        self._life += 1
        self._start_ranks()
        return False


def in_flight(records: Sequence[Entry]) -> set[Attempt]:
    """The attempts whose end not every rank has written down."""
    begun = {entry.attempt for entry in records if entry.what == "begun"}
    ends = [entry.attempt for entry in records if entry.what in ("committed", "failed")]
    return {attempt for attempt in begun if attempt is not None and ends.count(attempt) < WORLD_SIZE}


def sample(node: Node) -> Sample:
    """What the node's sidecar holds now."""
    process = Path(f"/proc/{node.sidecar_pid}")
    pages = int((process / "statm").read_text().split()[1])
    blocks = sum(path.stat().st_blocks for path in node.directory.glob("*.region"))
    return Sample(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(process / "fd")), blocks * 512)


def growth(samples: Sequence[Sample]) -> Sample:
    """The medians of the last quarter less those of the first."""
    quarter = len(samples) // 4
    first, last = samples[:quarter], samples[-quarter:]

    def median(name: str, of: Sequence[Sample]) -> int:
        return round(statistics.median(getattr(each, name) for each in of))

    return Sample(*(median(name, last) - median(name, first) for name in ("rss_bytes", "descriptors", "shm_bytes")))


def storm_over(node: Node, job: Job) -> tuple[int | None, list[Problem]]:
    """Run the job to its end: the exit code of the last sidecar, and what must not be."""
    try:
        job.run()
        code = node.stop_sidecar()
        return code, [*job.problems, *(Problem("leaked", line) for line in left_in(node.shm_root))]
    finally:
        node.close()


@pytest.mark.faults
def test_many_saves_and_many_deaths(
    tmp_path: Path, shm_root: Path, processes: RankStarter, stock_ranks: RankStarter, outcomes: Outcomes
) -> None:
    seed = int(os.environ.get("KILL_SEED") or secrets.randbelow(1 << 32))
    print(f"again with KILL_SEED={seed}")
    directory, records, logs = (tmp_path / name for name in ("checkpoints", "records", "logs"))
    for path in (directory, records, logs):
        path.mkdir()
    program = Program(str(directory), str(records), SAVES, later_steps=None, elements=2_000, overlap=True)
    node = Node(processes, shm_root, logs, range(WORLD_SIZE))
    job = Job(node, program, Storm(seed))
    with outcomes.run(f"anything killed at random moments of {SAVES} saves") as row:
        code, found = storm_over(node, job)
        entries = read_records(records)
        outcome = judge(
            directory, entries, WORLD_SIZE, lambda names: stock_ranks.run(load_each, 1, names)[0], found=found
        )
        row.count(outcome)
    grown = growth(job.samples)
    print("\n".join([*job.story, str(outcome), f"{len(job.samples)} samples, grown by {grown}"]))
    assert code == 0
    assert not outcome.unexpected(A_KILLED_SIDECAR_MAY if node.deaths else frozenset(), job.in_flight)
    assert Attempt(max(attempt.life for attempt in outcome.committed), SAVES) in outcome.committed
    assert grown.rss_bytes < ALLOWED_RSS_BYTES
    assert grown.descriptors < ALLOWED_DESCRIPTORS
    assert grown.shm_bytes < ALLOWED_SHM_BYTES
