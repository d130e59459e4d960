"""What became of the saves that fault tests disturbed: one row per group of tests, told when the tests are over."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testkit.verdict import Outcome as Judged

HEADINGS = ("group", "runs", "saves committed", "failed by name", "torn", "lost", "leaked", "hung", "wall time")


@dataclass
class Outcome:
    """Sums over the runs of a group. ``failed`` are saves that ended with an error that says why; ``torn`` committed
    steps that cannot be read; ``lost`` staged saves of which nobody was told; ``leaked`` things left behind; ``hung``
    waits that did not end. The last four are 0 unless something is broken. ``unit`` is what ``runs`` counts, if not
    runs; ``tests`` are those that have counted here."""

    unit: str = ""
    runs: int = 0
    committed: int = 0
    failed: int = 0
    torn: int = 0
    lost: int = 0
    leaked: int = 0
    hung: int = 0
    wall_s: float = 0.0
    tests: set[str] = field(default_factory=set)

    def count(self, judged: Judged) -> None:
        """Add what a whole job has come to."""
        self.committed += len(judged.committed)
        self.failed += len(judged.failed)
        kinds = [problem.kind for problem in judged.problems]
        self.torn += sum(kind in ("torn", "claimed", "split") for kind in kinds)
        self.lost += sum(kind in ("lost", "denied", "astray") for kind in kinds)
        self.leaked += kinds.count("leaked")
        self.hung += kinds.count("hung")

    @property
    def sums(self) -> tuple[int, ...]:
        """What is counted in saves, in the order of the table."""
        return (self.committed, self.failed, self.torn, self.lost, self.leaked, self.hung)


class Outcomes:
    """The collector of one test run, from its start on. ``clock`` gives monotonic seconds.

    Attributes:
        test: the id of the test that is running.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_group: dict[str, Outcome] = {}
        self._started_s = clock()
        self.test = ""

    @contextmanager
    def run(self, group: str, *, runs: int = 1, unit: str = "") -> Iterator[Outcome]:
        """One test's part of a group, which counts in what it is given, also if it fails. ``unit`` is of ``runs``."""
        outcome = self._by_group.setdefault(group, Outcome(unit))
        outcome.runs += runs
        outcome.tests.add(self.test)
        started_s = self._clock()
        try:
            yield outcome
        finally:
            outcome.wall_s += self._clock() - started_s

    def rows(self, failed: Collection[str] = ()) -> list[tuple[str, ...]]:
        """Headings, groups in the order of their tests, and all of them; empty if there was none. The time of all is
        that of the whole test run. ``failed`` are the ids of tests that have failed: what they did not come to count
        is missing in their groups, which says so."""
        if not self._by_group:
            return []
        groups = [
            (
                _label(group, outcome, failed),
                f"{outcome.runs:,} {outcome.unit}".strip(),
                *_numbers(outcome.sums),
                _time(outcome.wall_s),
            )
            for group, outcome in self._by_group.items()
        ]
        sums = [sum(column) for column in zip(*(outcome.sums for outcome in self._by_group.values()), strict=True)]
        return [HEADINGS, *groups, ("all", "", *_numbers(sums), _time(self._clock() - self._started_s))]

    def lines(self, failed: Collection[str] = ()) -> list[str]:
        """The table for a terminal."""
        rows = self.rows(failed)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]

    def markdown(self, failed: Collection[str] = ()) -> str:
        """The table for a document."""
        headings, *rows = self.rows(failed) or [HEADINGS]
        ruler = ["---"] + ["---:"] * (len(HEADINGS) - 1)
        return "".join(f"| {' | '.join(row)} |\n" for row in (headings, ruler, *rows))


def _label(group: str, outcome: Outcome, failed: Collection[str]) -> str:
    count = len(outcome.tests.intersection(failed))
    return f"{group} ({count} FAILED)" if count else group


def _numbers(numbers: Sequence[int]) -> list[str]:
    return [f"{number:,}" for number in numbers]


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes else f"{seconds:.1f} s"
