"""The table of outcomes: sums by scenario, also of runs that failed."""

from __future__ import annotations

import pytest

from testkit.outcomes import HEADINGS, Outcomes


def test_nothing_run_is_no_table() -> None:
    assert Outcomes().lines() == []


def test_runs_of_a_scenario_are_one_row_and_a_failed_run_counts_too() -> None:
    times_s = iter([0.0, 1.5, 10.0, 12.0, 20.0, 20.5])
    outcomes = Outcomes(lambda: next(times_s))
    with outcomes.run("rank killed") as outcome:
        outcome.committed += 3
    with pytest.raises(ValueError, match="broken"), outcomes.run("rank killed") as outcome:
        outcome.torn += 1
        raise ValueError("broken")
    with outcomes.run("disk full") as outcome:
        outcome.failed += 2
    headings, full, killed = outcomes.lines()
    assert headings.split() == " ".join(HEADINGS).split()
    assert full.split() == "disk full 1 0 2 0 0 0 0 0.5 s".split()
    assert killed.split() == "rank killed 2 3 0 1 0 0 0 3.5 s".split()
    assert len({len(line) for line in (headings, full, killed)}) == 1
