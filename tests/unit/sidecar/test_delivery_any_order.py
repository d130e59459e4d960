"""Whatever a transport loses, doubles, delays and reorders, and whoever restarts meanwhile: once, in order, all of it.

A failing play prints its seed and its last moves; ``BadTransport(seed)`` plays it again.
"""

from __future__ import annotations

import pytest

from ckpt_sidecar import parcel_boxes
from testkit.bad_transport import BadTransport, End, Talk

PLAYS = 1500
MOVES = 60


def check(play: BadTransport) -> None:
    """Everything that holds after every play."""
    for end, other in ((play.a, play.b), (play.b, play.a)):
        check_what_arrived(end.talks, other.talks)
        check_the_last_talk(end, other)
        if not play.lives_end:
            assert len(end.talks) == 1, "a conversation has ended although both sides lived"


def check_what_arrived(talks: list[Talk], others: list[Talk]) -> None:
    """In each talk: the beginning of what the other life has sent in one of its talks with this one, once, in order."""
    sources = []
    for talk in talks:
        if not talk.got:
            continue
        matching = [other for other in others if other.sent[: len(talk.got)] == talk.got]
        assert len(matching) == 1, f"{talk.life} got what nobody sent like this: {talk.got}"
        assert (matching[0].life, matching[0].other) == (talk.other, talk.life), f"taken for another's: {talk.got}"
        assert matching[0] not in sources, f"delivered in two talks: {talk.got}"
        sources.append(matching[0])


def check_the_last_talk(end: End, other: End) -> None:
    """Both are up with each other's present life and have all of what was sent."""
    assert end.delivery.is_up, "not up although everything gets through"
    assert (end.talks[-1].life, end.talks[-1].other) == (end.life, other.life)
    assert end.talks[-1].got == other.talks[-1].sent
    assert other.delivery.unacked == (0, 0)


def play_all(seeds: range) -> list[BadTransport]:
    """Plays every seed and checks it."""
    plays = []
    for seed in seeds:
        play = BadTransport(seed)
        play.play(MOVES)
        try:
            check(play)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *play.story[:1], *play.story[-200:]])) from error
        plays.append(play)
    return plays


def test_what_was_sent_arrives_once_in_order_and_whole() -> None:
    plays = play_all(range(PLAYS))
    assert sum(len(talk.got) for play in plays for talk in play.a.talks) > 20 * PLAYS
    assert sum(play.a.lives > 1 for play in plays) > PLAYS / 10


def test_it_does_so_with_small_windows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel_boxes, "WINDOW_PARCELS", 4)
    monkeypatch.setattr(parcel_boxes, "PROBE_PARCELS", 2)
    monkeypatch.setattr(parcel_boxes, "WINDOW_BYTES", 200)
    play_all(range(PLAYS // 3))


def test_memory_stays_bounded_and_a_conversation_that_would_grow_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel_boxes, "MAX_UNACKED_PARCELS", 15)
    seen = 0
    for seed in range(PLAYS // 3):
        play = BadTransport(seed)
        play.lives_end = True  # by too much that is not acked
        play.play(MOVES)
        check(play)
        assert max(play.a.most_unacked, play.b.most_unacked)[0] <= 15
        seen += len(play.a.talks) > play.a.lives + play.b.lives
    assert seen > PLAYS / 20
