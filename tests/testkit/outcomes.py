"""What became of the saves that fault tests disturbed: one row per scenario, printed when the tests are over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testkit.verdict import Outcome as Judged

HEADINGS = ("scenario", "runs", "committed", "failed by name", "torn", "lost", "leaked", "hung", "wall time")


@dataclass
class Outcome:
    """Sums over the runs of a scenario. ``failed`` are saves that ended with an error that says why; ``torn`` committed
    steps that cannot be read; ``lost`` staged saves of which nobody was told; ``leaked`` things left behind; ``hung``
    waits that did not end. The last four are 0 unless something is broken."""

    runs: int = 0
    committed: int = 0
    failed: int = 0
    torn: int = 0
    lost: int = 0
    leaked: int = 0
    hung: int = 0
    wall_s: float = 0.0

    def count(self, judged: Judged) -> None:
        """Add what a whole job has come to."""
        self.committed += len(judged.committed)
        self.failed += len(judged.failed)
        kinds = [problem.kind for problem in judged.problems]
        self.torn += sum(kind in ("torn", "claimed", "split") for kind in kinds)
        self.lost += sum(kind in ("lost", "denied", "astray") for kind in kinds)
        self.leaked += kinds.count("leaked")
        self.hung += kinds.count("hung")


class Outcomes:
    """The collector of one test run. ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_scenario: dict[str, Outcome] = {}

    @contextmanager
    def run(self, scenario: str) -> Iterator[Outcome]:
        """One run of a scenario; the test counts in what it is given. Counts also if the test fails."""
        outcome = self._by_scenario.setdefault(scenario, Outcome())
        outcome.runs += 1
        started_s = self._clock()
        try:
            yield outcome
        finally:
            outcome.wall_s += self._clock() - started_s

    def lines(self) -> list[str]:
        """The table, empty if nothing was run."""
        if not self._by_scenario:
            return []
        assert len(HEADINGS) == 1 + len(fields(Outcome))
        rows = [HEADINGS, *(_row(scenario, outcome) for scenario, outcome in sorted(self._by_scenario.items()))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def _row(scenario: str, outcome: Outcome) -> tuple[str, ...]:
    *counts, wall_s = astuple(outcome)
    return (scenario, *map(str, counts), f"{wall_s:.1f} s")
