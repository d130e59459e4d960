"""A session: who belongs together, who is refused, when a new life begins."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_sidecar.session import Session
from testkit.tables import DIRECTORY, hello


def session_of(*ranks: int, world_size: int = 3, **changes: Any) -> Session:
    """A session that these ranks have joined."""
    session = Session.of("0000000a", hello(ranks[0], world_size, **changes))
    for rank in ranks:
        session.join(hello(rank, world_size, node=f"node-{rank}", **changes))
    return session


def kind_of_refusal(session: Session, /, **changes: Any) -> str | None:
    """Kind of the refusal of rank 2 with these differences, None if it may come in."""
    failure = session.refusal(hello(2, **{"world_size": 3, **changes}))
    return failure.kind if failure else None


def test_a_session_is_as_its_first_member_says() -> None:
    session = Session.of("0000000a", hello(1, 3, incarnation=2, stage_timeout_s=5.0))
    assert (session.token, session.world_size, session.directory) == ("0000000a", 3, DIRECTORY)
    assert (session.incarnation, session.stage_timeout_s, session.members) == (2, 5.0, {})


def test_ranks_of_the_same_world_directory_and_life_come_together() -> None:
    session = session_of(0, 1)
    assert session.refusal(hello(2, 3)) is None
    assert not session.ended_by(hello(2, 3))
    assert sorted(session.members) == [0, 1]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"world_size": 4}, "WorldSizeDiffers"),
        ({"directory": "/elsewhere"}, "DirectoryDiffers"),
        ({"session": "ffffffff"}, "StaleSession"),
        ({"session": "0000000a"}, None),
    ],
    ids=str,
)
def test_who_does_not_fit_is_refused(changes: dict[str, Any], kind: str | None) -> None:
    assert kind_of_refusal(session_of(0, 1), **changes) == kind


def test_a_refusal_names_both_sides() -> None:
    failure = session_of(0, 1).refusal(hello(2, 3, directory="/elsewhere"))
    assert failure is not None
    assert "rank 2 saves to /elsewhere" in failure.message
    assert f"ranks [0, 1] save to {DIRECTORY}" in failure.message
    failure = session_of(0, 1).refusal(hello(2, 4))
    assert failure is not None
    assert "rank 2 says the world has 4 ranks, ranks [0, 1] say 3" in failure.message


def test_a_rank_of_an_earlier_restart_is_refused_and_both_restarts_are_named() -> None:
    failure = session_of(0, incarnation=3).refusal(hello(2, 3, incarnation=1))
    assert failure is not None
    assert failure.kind == "StaleIncarnation"
    assert "restart 1" in failure.message
    assert "restart 3" in failure.message


def test_a_later_restart_ends_the_session_whatever_else_differs() -> None:
    later = hello(0, 5, incarnation=1, directory="/elsewhere")
    assert session_of(0, 1).refusal(later) is None
    assert session_of(0, 1).ended_by(later)


def test_after_a_rank_has_left_nobody_joins_any_more() -> None:
    session = session_of(0, 1)
    assert session.leave(1)
    assert session.closed
    assert session.ended_by(hello(1, 3))
    assert session.refusal(hello(1, 3, directory="/elsewhere")) is None


def test_leaving_twice_is_noticed() -> None:
    session = session_of(0, 1)
    assert session.leave(1)
    assert not session.leave(1)


def test_a_rank_that_never_joined_does_not_close_the_session_when_it_leaves() -> None:
    """It is a member of the session before this one, and its end is noticed only now."""
    session = session_of(0, 1)
    assert not session.leave(2)
    assert not session.closed


def test_a_job_that_starts_over_is_taken_when_the_last_rank_of_the_old_one_has_gone() -> None:
    """The counter of restarts begins at 0 when the launcher itself is started again under the same job id."""
    session = session_of(0, 1, incarnation=3)
    session.leave(0)
    session.leave(1)
    assert session.refusal(hello(0, 3, incarnation=0)) is None
    assert session.ended_by(hello(0, 3, incarnation=0))


def test_a_rank_is_named_with_its_node_as_far_as_known_also_after_it_left() -> None:
    session = session_of(0, 1)
    session.leave(1)
    assert session.name(1) == "rank 1 on node-1"
    assert session.name(2) == "rank 2"
