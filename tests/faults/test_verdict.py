"""The verdict itself: each kind of problem is found when it is there, and none when there is none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from testkit.kill_points import KillOrder, KillPointGone, find
from testkit.kill_scenario import COMMITTED, FAILED, KEPT, Scenario
from testkit.training import Attempt, Entry, Program, own_state_of, state_of
from testkit.verdict import Outcome, Problem, judge

WORLD_SIZE = 2
FIRST, SECOND = Attempt(0, 1), Attempt(0, 2)


def stored(mark: int, rank_1_mark: int | None = None) -> dict[str, Any]:
    """A checkpoint as stock DCP gives it; rank 1's own part may be of another attempt."""
    state = state_of(mark, 5)
    flat = {f"weights.{index}": tensor for index, tensor in enumerate(state.pop("weights"))}
    for rank, own_mark in enumerate((mark, mark if rank_1_mark is None else rank_1_mark)):
        for key, value in own_state_of(own_mark, 5, rank).items():
            flat[f"per_rank.rank-{rank}.{key}"] = value
    return {**flat, **state}


def visible(directory: Path, step: int) -> None:
    """A committed step, of stock DCP's making; what is in it does not matter here."""
    if not (directory / f"step-{step}").exists():
        dcp.save({"x": torch.ones(2)}, checkpoint_id=directory / f"step-{step}", no_dist=True)


def told(attempt: Attempt, *ends: str, staged: Sequence[int] = (0, 1)) -> list[Entry]:
    """The records of one attempt: staged by some ranks, its end on each of the first ones."""
    lines = [Entry("begun", 0, rank, attempt) for rank in range(WORLD_SIZE)]
    lines += [Entry("staged", 0, rank, attempt) for rank in staged]
    return lines + [Entry(end, 0, rank, attempt, "" if end == "committed" else "why") for rank, end in enumerate(ends)]


CLOSED = [Entry("closed", 0, rank) for rank in range(WORLD_SIZE)]
GOOD = told(FIRST, "committed", "committed")


def kinds(directory: Path, records: Sequence[Entry], contents: dict[int, Any], **options: Any) -> list[str]:
    """The kinds of problems that are found."""
    for step in contents:
        visible(directory, step)  # unless the test has made it
    by_path = {str(directory / f"step-{step}"): content for step, content in contents.items()}
    outcome = judge(directory, records, WORLD_SIZE, lambda names: by_path, **options)
    return [problem.kind for problem in outcome.problems]


def test_a_job_without_a_fault_has_no_problem(tmp_path: Path) -> None:
    records = [*GOOD, *told(SECOND, "failed", "failed", staged=[0]), *CLOSED, Entry("resumed", 1, 0, FIRST)]
    assert kinds(tmp_path, records, {1: stored(FIRST.mark)}) == []


def test_a_step_that_is_replaced_was_committed(tmp_path: Path) -> None:
    again = Attempt(0, 1, 1)
    assert kinds(tmp_path, [*GOOD, *told(again, "committed", "committed")], {1: stored(again.mark)}) == []
    assert "lost" in kinds(tmp_path, told(again, "failed", "failed"), {1: stored(FIRST.mark)})


@pytest.mark.parametrize(
    ("kind", "records", "contents"),
    [
        ("torn", GOOD, {1: stored(FIRST.mark, SECOND.mark)}),
        ("torn", GOOD, {1: stored(SECOND.mark)}),
        ("torn", GOOD, {1: "CheckpointException: it cannot be read"}),
        ("torn", GOOD, {1: {"mark": FIRST.mark}}),
        ("torn", GOOD, {1: {**stored(FIRST.mark), "ramp": torch.rand(5)}}),
        ("lost", told(FIRST, "failed", "failed"), {}),
        ("claimed", told(FIRST, "committed", staged=[0]), {}),
        ("denied", told(FIRST, "failed", "failed"), {1: stored(FIRST.mark)}),
        ("split", told(FIRST, "committed", "failed"), {1: stored(FIRST.mark)}),
        ("hung", [*told(FIRST, "committed"), *CLOSED], {1: stored(FIRST.mark)}),
        ("hung", told(FIRST, "committed", "late"), {1: stored(FIRST.mark)}),
        ("hung", [*told(FIRST, staged=[]), Entry("failed", 0, 0, FIRST, "")], {}),
        ("astray", [*GOOD, Entry("resumed", 1, 0, None)], {1: stored(FIRST.mark)}),
        ("astray", [*GOOD, Entry("resumed", 1, 1, SECOND)], {1: stored(FIRST.mark)}),
    ],
)
def test_what_must_not_be_is_found(tmp_path: Path, kind: str, records: list[Entry], contents: dict[int, Any]) -> None:
    assert kind in kinds(tmp_path, records, contents)


@pytest.mark.parametrize("name", ["step-1/__0_00000000-1.distcp", "step-1/.metadata.1.tmp", "step-2/x", "probe"])
def test_what_belongs_to_no_checkpoint_is_found(tmp_path: Path, name: str) -> None:
    visible(tmp_path, 1)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert kinds(tmp_path, GOOD, {1: stored(FIRST.mark)}) == ["littered"]


def test_a_refused_save_is_not_lost(tmp_path: Path) -> None:
    records = told(SECOND, "failed", "failed")
    assert kinds(tmp_path, records, {}, vetoed=2) == []
    assert kinds(tmp_path, records, {}, vetoed=3) == ["lost"]


# ---------------------------------------------------------------- what a scenario expects

PROGRAM = Program("", "")
ALL = [Attempt(0, step) for step in range(1, 5)]
LATER = [Attempt(1, 5), Attempt(1, 6)]


def outcome(committed: Sequence[Attempt], *problems: Problem) -> Outcome:
    """An outcome; what is not committed has failed."""
    return Outcome(frozenset(committed), frozenset({*ALL, *LATER} - set(committed)), problems)


def test_a_killed_rank_fails_its_save_and_those_after_it() -> None:
    scenario = Scenario(KillOrder("halfway through the copy", 2, 1), 2, FAILED)
    assert scenario.unexpected(outcome([FIRST, *LATER]), PROGRAM) == []
    assert scenario.unexpected(outcome([FIRST, SECOND, *LATER]), PROGRAM) == ["step 2 (life 0) is committed"]
    assert scenario.unexpected(outcome(LATER), PROGRAM) == ["step 1 (life 0) is not committed"]
    assert scenario.unexpected(outcome([FIRST, LATER[0]]), PROGRAM) != []
    assert scenario.unexpected(outcome([FIRST, *LATER], Problem("lost", "", SECOND)), PROGRAM) != []


def test_a_killed_sidecar_may_harm_only_what_was_in_flight() -> None:
    scenario = Scenario(KillOrder("after the first window", 4), 2, KEPT)
    fine = [FIRST, *ALL[2:], *LATER]
    for kind in scenario.allowed - {"littered"}:
        assert scenario.unexpected(outcome(fine, Problem(kind, "", SECOND)), PROGRAM) == []
        assert scenario.unexpected(outcome(fine, Problem(kind, "", FIRST)), PROGRAM) != []
    for kind in ("torn", "hung", "claimed", "astray", "leaked", "unclean"):
        assert scenario.unexpected(outcome(fine, Problem(kind, "", SECOND)), PROGRAM) != []
    assert scenario.unexpected(outcome([FIRST, *LATER]), PROGRAM) != []


def test_what_was_published_stays_whatever_a_killed_sidecar_may_do() -> None:
    scenario = Scenario(KillOrder("after .metadata is linked", 2), 2, COMMITTED)
    assert scenario.unexpected(outcome([*ALL, *LATER]), PROGRAM) == []
    assert scenario.unexpected(outcome([FIRST, *ALL[2:], *LATER]), PROGRAM) == ["step 2 (life 0) is not committed"]


def test_a_point_that_has_moved_is_named() -> None:
    with pytest.raises(KillPointGone, match=r"ckpt_sidecar\.commit:nothing"):
        find("ckpt_sidecar.commit", "nothing")
    with pytest.raises(KillPointGone, match="ckpt_sidecar.nowhere"):
        find("ckpt_sidecar.nowhere", "x")
    with pytest.raises(ValueError, match="no point of a sidecar"):
        Scenario(KillOrder("before close"), 1, COMMITTED)
