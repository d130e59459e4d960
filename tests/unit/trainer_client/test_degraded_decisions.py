"""What a rank does next about a save while no sidecar runs: a failure needs a part that is taken back."""

from __future__ import annotations

import pytest

from ckpt_proto.errors import FailureReport
from ckpt_trainer_client.degraded_decisions import (
    GIVE_UP_S,
    IN_DOUBT,
    MAX_NAMED,
    WITHDRAWN_S,
    Ledger,
    Move,
    Progress,
    given_up_by_first,
    hung,
    late,
    next_move,
    region_gone,
)

NOW_S = 1000.0
WHY = (FailureReport("RankLate", "rank 1 is late", "is it alive?", 1),)
NOTHING, ALL, PUBLISHED = Ledger(False, frozenset()), Ledger(False, frozenset({0, 1})), Ledger(True, frozenset({0, 1}))


def progress(**changes: object) -> Progress:
    """A save that is waited for since a second, within a minute."""
    made = Progress(NOW_S - 1, 60.0)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def accepted(**changes: object) -> Progress:
    return progress(accepted=True, complete_s=NOW_S, **changes)


def move(rank: int, of: Progress, ledger: Ledger) -> Move:
    return next_move(rank, 2, of, ledger, NOW_S)


# ---------------------------------------------------------------- commit


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "of", [progress(), progress(failures=WHY), progress(failures=WHY, withdrawn_s=0.0, giving_up_s=0.0)]
)
def test_what_metadata_names_is_committed_whatever_was_thought_of_it(rank: int, of: Progress) -> None:
    assert move(rank, of, PUBLISHED) is Move.COMMITTED


def test_rank_0_publishes_what_is_complete_and_accepted() -> None:
    assert move(0, accepted(), ALL) is Move.PUBLISH


@pytest.mark.parametrize(
    ("rank", "of", "ledger"),
    [
        (1, accepted(), ALL),
        (0, accepted(), Ledger(False, frozenset({0}))),
        (0, accepted(), Ledger(False, frozenset(), "it cannot be read")),
        (0, progress(complete_s=NOW_S), ALL),
        (0, progress(accepted=True), ALL),
    ],
    ids=["not rank 0", "incomplete", "unreadable", "not accepted", "not seen complete"],
)
def test_nothing_else_is_published(rank: int, of: Progress, ledger: Ledger) -> None:
    assert move(rank, of, ledger) is Move.WAIT


def test_what_was_in_flight_when_the_sidecar_was_lost_is_left_alone_for_a_time() -> None:
    of = accepted(settle_s=10.0)
    assert next_move(0, 2, of, ALL, NOW_S + 9.9) is Move.WAIT
    assert next_move(0, 2, of, ALL, NOW_S + 10.0) is Move.PUBLISH


# ---------------------------------------------------------------- given up


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_is_taken_back_before_the_save_fails(rank: int) -> None:
    assert move(rank, progress(failures=WHY), ALL) is Move.WITHDRAW
    assert move(rank, accepted(failures=WHY), ALL) is Move.WITHDRAW


def test_rank_0_fails_once_its_part_is_taken_back() -> None:
    assert move(0, progress(failures=WHY, giving_up_s=NOW_S, withdrawn_s=NOW_S), NOTHING) is Move.FAIL


def test_another_rank_first_looks_whether_rank_0_was_publishing_just_then() -> None:
    of = progress(failures=WHY, giving_up_s=NOW_S, withdrawn_s=NOW_S)
    assert next_move(1, 2, of, NOTHING, NOW_S + WITHDRAWN_S - 0.1) is Move.WAIT
    assert next_move(1, 2, of, NOTHING, NOW_S + WITHDRAWN_S) is Move.FAIL


def test_taking_back_is_tried_for_so_long_and_then_the_failure_is_in_doubt() -> None:
    of = progress(failures=WHY, giving_up_s=NOW_S)
    assert next_move(1, 2, of, ALL, NOW_S + GIVE_UP_S) is Move.WITHDRAW
    assert next_move(1, 2, of, ALL, NOW_S + GIVE_UP_S + 0.1) is Move.FAIL
    assert [failure.hint for failure in of.failures_told()] == [f"is it alive?; {IN_DOUBT}"]


def test_a_failure_of_what_was_taken_back_is_certain() -> None:
    assert progress(failures=WHY, giving_up_s=0.0, withdrawn_s=1.0).failures_told() == WHY


def test_a_save_is_overdue_after_its_bound() -> None:
    assert not progress().is_overdue(NOW_S + 59)
    assert progress().is_overdue(NOW_S + 59.1)


# ---------------------------------------------------------------- why


def test_another_rank_sees_that_rank_0_has_taken_its_shard_back() -> None:
    [failure] = given_up_by_first(1, 5, progress(seen_first=True), NOTHING)
    assert (failure.kind, failure.rank) == ("CommitRefused", 0)
    assert "rank 0 has taken its shard of step 5 back" in failure.message


@pytest.mark.parametrize(
    ("rank", "seen", "ledger"),
    [
        (0, True, NOTHING),
        (1, False, NOTHING),
        (1, True, ALL),
        (1, True, Ledger(False, frozenset(), "it cannot be read")),
    ],
    ids=["rank 0 itself", "never seen", "there", "unreadable"],
)
def test_rank_0_has_not_given_it_up(rank: int, seen: bool, ledger: Ledger) -> None:
    assert given_up_by_first(rank, 5, progress(seen_first=seen), ledger) == ()


def test_who_is_late_is_named() -> None:
    failures = late(5, [1, 3], NOTHING, 61.0, "")
    assert [(failure.kind, failure.rank) for failure in failures] == [("RankLate", 1), ("RankLate", 3)]
    assert "rank 3 has no durable shard of step 5 after 61 s" in failures[1].message
    assert len(late(5, range(1000), NOTHING, 61.0, "")) == MAX_NAMED


def test_if_nobody_is_late_rank_0_has_not_committed() -> None:
    [failure] = late(5, [], ALL, 61.0, "publish: no space")
    assert (failure.kind, failure.rank, failure.hint) == ("RankLate", 0, "publish: no space")
    assert "rank 0 has not committed step 5" in failure.message


def test_a_storage_that_cannot_be_looked_at_is_the_reason() -> None:
    [failure] = late(5, [1], Ledger(False, frozenset(), "no such device"), 61.0, "")
    assert failure.kind == "StorageError"
    assert "no such device" in failure.message


def test_a_region_that_is_gone_is_named() -> None:
    [failure] = region_gone(5, "/dev/shm/x")
    assert failure.kind == "RegionError"
    assert "step 5 is gone: /dev/shm/x has been removed" in failure.message


def test_a_storage_that_hangs_leaves_the_save_in_doubt() -> None:
    failure = hung(5, 700.0)
    assert failure.kind == "PublishStalled"
    assert "has not answered for 700 s" in failure.message
    assert "may still be committed" in failure.hint
