"""Who takes part, seen from a coordinator that is younger than a session."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from ckpt_proto.messages import RankLeft, Refused, ShardStaged, Welcome
from ckpt_sidecar.actions import OpenDirectory, ToRank
from ckpt_sidecar.membership import ADOPTED_STAGE_TIMEOUT_S, KEPT_SESSIONS, Departure, Membership, Terms
from testkit.tables import DIRECTORY, FAILURE, PLAN_ID, SESSION, STAGE_TIMEOUT_S, hello, key, propose

OLD = "abcdef01"
SAVE = key(3, session=OLD)


@pytest.fixture
def members() -> Membership:
    """Those of a coordinator that was started a moment ago; new sessions are 0000000a, 0000000b and so on."""
    tokens = count(10)
    return Membership(lambda: f"{next(tokens):08x}")


def comes(members: Membership, rank: int, **changes: Any) -> list[Departure]:
    """A rank is welcomed, its directory opened if need be; returns who left by that."""
    actions, departures = members.hello(hello(rank, 2, **changes))
    for action in actions:
        if isinstance(action, OpenDirectory):
            answers, more = members.opened(action.directory, ())
            actions, departures = [*actions, *answers], [*departures, *more]
    assert any(isinstance(action, ToRank) and isinstance(action.message, Welcome) for action in actions), actions
    return departures


def token(members: Membership) -> str:
    assert members.session is not None
    return members.session.token


# ---------------------------------------------------------------- coming back


def test_ranks_bring_their_session_along(members: Membership) -> None:
    comes(members, 0, session=OLD)
    comes(members, 1, session=OLD)
    assert token(members) == OLD
    assert members.may_be_resumed(OLD)


def test_a_session_of_this_coordinator_holds_no_surprise(members: Membership) -> None:
    comes(members, 0)
    assert token(members) == SESSION
    assert not members.may_be_resumed(SESSION)
    assert members.has_seen(SESSION)
    assert not members.has_seen(OLD)


def test_who_comes_back_to_a_session_that_was_followed_by_another_gets_a_new_one(members: Membership) -> None:
    comes(members, 0, session=OLD)
    members.left(RankLeft(0, "killed", OLD))
    comes(members, 0, pid=77)
    assert token(members) == SESSION
    members.left(RankLeft(0, "killed", SESSION))
    comes(members, 1, session=OLD)
    assert token(members) not in (OLD, SESSION)


def test_a_member_comes_back_to_a_session_that_another_has_left(members: Membership) -> None:
    """It finds out there who has left; in a new session it would fail all its saves in flight."""
    comes(members, 0, session=OLD)
    comes(members, 1, session=OLD)
    members.left(RankLeft(1, "killed", OLD))
    comes(members, 0, session=OLD)
    assert token(members) == OLD


def test_a_rank_of_an_old_session_does_not_disturb_the_one_of_now(members: Membership) -> None:
    comes(members, 0)
    comes(members, 1)
    ((action,), _) = members.hello(hello(1, 2, session=OLD))
    assert isinstance(action, ToRank)
    assert isinstance(action.message, Refused)
    assert token(members) == SESSION


def test_what_is_in_flight_is_spared_when_the_directory_is_opened(members: Membership) -> None:
    assert members.hello(hello(0, 2, session=OLD)) == ([OpenDirectory(DIRECTORY, (OLD,))], [])
    other = replace(hello(1, 2, session=OLD), directory="/elsewhere")
    assert members.hello(other) == ([OpenDirectory("/elsewhere", (OLD,))], [])


def test_what_a_refused_client_knows_counts(members: Membership) -> None:
    """It lives, and was told by an earlier coordinator that its save has failed: the others must not commit it."""
    members.hello(hello(0, 2, session=OLD, next_seq=SAVE.seq + 1))
    members.refused(DIRECTORY, FAILURE)
    comes(members, 1, session=OLD, next_seq=SAVE.seq + 1, in_flight=(SAVE.seq,))
    assert members.was_told(SAVE, 0)
    assert not members.was_told(SAVE, 1)
    assert not members.was_told(replace(SAVE, session=SESSION), 0)


# ---------------------------------------------------------------- going


def test_a_death_that_was_noticed_before_anybody_came_is_remembered(members: Membership) -> None:
    assert members.left(RankLeft(1, "killed", OLD)) == Departure(OLD, 1, "killed")
    assert members.excuse(SAVE, 1) == "killed"
    assert members.is_gone(OLD, 1)
    comes(members, 0, session=OLD)
    assert members.session is not None
    assert members.session.closed
    assert members.session.departed == {1: "killed"}


def test_a_rank_that_was_never_seen_here_may_leave_a_session_that_was_taken_up(members: Membership) -> None:
    comes(members, 0, session=OLD)
    assert members.left(RankLeft(1, "killed", OLD)) == Departure(OLD, 1, "killed")
    assert members.left(RankLeft(1, "killed", OLD)) is None


def test_a_rank_that_is_not_a_member_of_a_session_of_now_leaves_nothing(members: Membership) -> None:
    comes(members, 0)
    assert members.left(RankLeft(1, "killed", SESSION)) is None
    assert members.left(RankLeft(1, "killed")) is None


def test_a_rank_that_leaves_an_earlier_session_stays_in_the_one_of_now(members: Membership) -> None:
    """Its old process is missed after the new one has come."""
    comes(members, 0)
    comes(members, 1)
    assert members.left(RankLeft(0, "killed", OLD)) == Departure(OLD, 0, "killed")
    assert members.is_member(SESSION, 0)


def test_a_rank_that_leaves_while_its_directory_is_opened_does_not_join(members: Membership) -> None:
    members.hello(hello(0, 2, session=OLD))
    members.left(RankLeft(0, "killed", OLD))
    assert members.opened(DIRECTORY, ()) == ([], [])
    assert members.session is None


def test_ranks_of_a_session_that_a_restart_has_ended_are_gone(members: Membership) -> None:
    comes(members, 0, session=OLD)
    comes(members, 1, session=OLD)
    departures = comes(members, 0, incarnation=1)
    assert {(departure.token, departure.rank) for departure in departures} == {(OLD, 0), (OLD, 1)}
    for rank in (0, 1):
        assert members.is_gone(OLD, rank)
        assert members.excuse(SAVE, rank) == "the job has been restarted"


# ---------------------------------------------------------------- who is gone


def test_of_a_session_that_was_taken_up_nobody_is_gone_before_it_is_said(members: Membership) -> None:
    assert not members.is_gone(OLD, 0)
    comes(members, 1, session=OLD)
    assert not members.is_gone(OLD, 0)
    assert not members.is_gone(OLD, 1)
    assert members.excuse(SAVE, 0) is None


def test_of_a_session_of_this_coordinator_whoever_is_no_member_is_gone(members: Membership) -> None:
    comes(members, 0)
    assert not members.is_gone(SESSION, 0)
    assert members.is_gone(SESSION, 1)


@pytest.mark.parametrize(
    ("next_seq", "in_flight", "excused"),
    [(4, (), True), (4, (2,), True), (4, (3,), False), (3, (), False), (0, (), False)],
    ids=["knows the end", "knows the end, not of an earlier", "in flight", "not begun", "nothing begun"],
)
def test_a_member_knows_the_end_of_a_save_that_is_neither_to_come_nor_in_flight(
    members: Membership, next_seq: int, in_flight: tuple[int, ...], excused: bool
) -> None:
    comes(members, 0, session=OLD, next_seq=next_seq, in_flight=in_flight)
    assert members.was_told(SAVE, 0) == excused


# ---------------------------------------------------------------- terms


STAGED = ShardStaged(SAVE, 0, PLAN_ID, False, 3, "/from/the/shard")


def terms(members: Membership, rank: int, save: Any = SAVE, message: Any = None) -> Terms | None:
    return members.terms(save, rank, message or propose(save))


def test_a_member_opens_a_save_by_the_terms_of_its_session(members: Membership) -> None:
    comes(members, 0)
    assert terms(members, 0, key()) == Terms(2, DIRECTORY, STAGE_TIMEOUT_S, adopted=False)
    comes(members, 1)
    assert terms(members, 1, key()) == Terms(2, DIRECTORY, STAGE_TIMEOUT_S, adopted=False)


def test_a_save_of_a_session_that_was_taken_up_is_adopted(members: Membership) -> None:
    comes(members, 0, session=OLD)
    assert terms(members, 0) == Terms(2, DIRECTORY, STAGE_TIMEOUT_S, adopted=True)
    assert terms(members, 1) == Terms(2, DIRECTORY, STAGE_TIMEOUT_S, adopted=True)  # it has not come back yet


def test_a_rank_that_waits_for_its_directory_may_speak_of_its_saves(members: Membership) -> None:
    members.hello(hello(0, 2, session=OLD))
    assert terms(members, 1) == Terms(2, DIRECTORY, STAGE_TIMEOUT_S, adopted=True)


def test_a_staged_shard_brings_its_terms_along(members: Membership) -> None:
    expected = Terms(3, "/from/the/shard", ADOPTED_STAGE_TIMEOUT_S, adopted=True)
    assert terms(members, 0, message=STAGED) == expected
    comes(members, 0)  # the next life of the job
    assert terms(members, 0, message=STAGED) == expected


def test_nobody_else_opens_a_save_of_a_session_that_is_not_known(members: Membership) -> None:
    assert terms(members, 0) is None
    assert terms(members, 0, message=replace(STAGED, world_size=0)) is None


def test_a_save_of_a_session_that_this_coordinator_began_is_opened_by_members_only(members: Membership) -> None:
    comes(members, 0)
    assert terms(members, 1, key()) is None
    members.left(RankLeft(0, "killed", SESSION))
    assert terms(members, 0, key(), replace(STAGED, save=key())) is None


# ---------------------------------------------------------------- bounds


def test_sessions_of_long_ago_are_forgotten(members: Membership) -> None:
    for life in range(3 * KEPT_SESSIONS):
        comes(members, 0, pid=100 + life)
        members.left(RankLeft(0, "killed"))
    assert len(members._past) <= KEPT_SESSIONS
