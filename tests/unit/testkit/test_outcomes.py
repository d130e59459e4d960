"""The table of outcomes: sums by group, also of runs that failed."""

from __future__ import annotations

import pytest

from testkit.outcomes import HEADINGS, Outcomes


def clocked(*times_s: float) -> Outcomes:
    """A collector that was made at 0 and whose clock goes on like this."""
    times = iter([0.0, *times_s])
    return Outcomes(lambda: next(times))


def test_nothing_run_is_no_table() -> None:
    assert Outcomes().lines() == []
    assert Outcomes().markdown().splitlines()[1:] == ["| --- " + "| ---: " * (len(HEADINGS) - 1) + "|"]


def test_runs_of_a_group_are_one_row_and_a_failed_run_counts_too() -> None:
    outcomes = clocked(0.0, 1.5, 10.0, 12.0, 20.0, 20.5, 200.0)
    with outcomes.run("rank killed") as outcome:
        outcome.committed += 3_000
    with pytest.raises(ValueError, match="broken"), outcomes.run("rank killed") as outcome:
        outcome.torn += 1
        raise ValueError("broken")
    with outcomes.run("disk full", runs=1_000, unit="writes") as outcome:
        outcome.failed += 2
    headings, killed, full, total = outcomes.lines()
    assert headings.split() == " ".join(HEADINGS).split()
    assert killed.split() == "rank killed 2 3,000 0 1 0 0 0 3.5 s".split()
    assert full.split() == "disk full 1,000 writes 0 2 0 0 0 0 0.5 s".split()
    assert total.split() == "all 3,000 2 1 0 0 0 3:20 min".split()
    assert len({len(line) for line in (headings, full, killed, total)}) == 1


def test_a_group_with_a_failed_test_says_so() -> None:
    outcomes = clocked(0.0, 1.0, 1.0, 2.0, 2.0)
    for test in ("test_a", "test_b"):
        outcomes.test = test
        with outcomes.run("rank killed"):
            pass
    _, killed, _ = outcomes.rows({"test_b", "test_c"})
    assert killed[0] == "rank killed (1 FAILED)"


def test_a_document_gets_the_same_table() -> None:
    outcomes = clocked(0.0, 1.0, 1.0)
    with outcomes.run("rank killed"):
        pass
    assert outcomes.markdown().splitlines()[2] == "| rank killed | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 1.0 s |"
