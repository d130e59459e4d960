"""Two sidecars that talk: how a conversation begins, what ends it, and what changes nothing."""

from __future__ import annotations

import itertools

import pytest

from ckpt_proto.errors import LocalProtocolError
from ckpt_proto.peer_messages import MAX_PARCEL_BYTES, Parcel, PeerEnd, PeerPing
from ckpt_sidecar import parcel_boxes
from ckpt_sidecar.delivery import PING_S, Delivered, Delivery, Local, Up

A, B, C = "a" * 16, "b" * 16, "c" * 16


def delivery(life: str, first_call: int = 1, now_s: float = 0.0) -> Delivery:
    """One side, on ``node-a`` for the life that begins with a."""
    return Delivery(Local("job", f"node-{life[0]}", life), itertools.count(first_call).__next__, now_s)


def carry(here: Delivery, there: Delivery, now_s: float = 0.0) -> list[Up | Delivered]:
    """Everything that ``here`` has to send, taken to ``there``."""
    return [event for message in here.take_outgoing(now_s) for event in there.receive(message, now_s)]


def exchange(here: Delivery, there: Delivery, now_s: float = 0.0) -> list[Up | Delivered]:
    """Carry in turns until a round brings nothing; what happened at either side."""
    events: list[Up | Delivered] = []
    for _ in range(10):
        events += carry(here, there, now_s) + carry(there, here, now_s)
    return events


def pair() -> tuple[Delivery, Delivery]:
    """Two that are up with each other."""
    a, b = delivery(A), delivery(B)
    exchange(a, b)
    assert a.is_up and b.is_up
    return a, b


# ---------------------------------------------------------------- beginning


def test_the_first_contact_is_told_on_both_sides_once() -> None:
    a, b = delivery(A), delivery(B)
    assert exchange(a, b) == [Up(B, "node-b"), Up(A, "node-a")]
    assert exchange(a, b, 5.0) == []
    assert (a.life, a.node, b.life, b.node) == (B, "node-b", A, "node-a")


def test_both_may_begin_at_once() -> None:
    a, b = delivery(A), delivery(B)
    from_a, from_b = a.take_outgoing(0.0), b.take_outgoing(0.0)
    assert [*a.receive(from_b[0], 0.0), *b.receive(from_a[0], 0.0)] == []
    assert sorted(event.life for event in exchange(a, b) if isinstance(event, Up)) == [A, B]


def test_nothing_is_taken_before_the_other_side_was_heard_to_answer() -> None:
    a, b = delivery(A), delivery(B)
    assert not a.send(0, b"x")
    carry(a, b)
    assert not b.send(0, b"x")
    assert b.unacked == (0, 0)


def test_a_parcel_alone_can_tell_the_other_side_that_it_was_understood() -> None:
    a, b = delivery(A), delivery(B)
    carry(a, b)
    carry(b, a)
    a.send(3, b"x")
    assert carry(a, b) == [Up(A, "node-a"), Delivered(3, b"x")]


def test_a_side_that_does_not_know_the_other_as_it_is_now_is_answered_at_once() -> None:
    a, _ = pair()
    stray = PeerPing("job", "node-b", PeerEnd(B, 1), None, 0)
    assert a.receive(stray, 0.1) == []
    assert [(ping.sender, ping.receiver) for ping in a.take_outgoing(0.1)] == [(PeerEnd(A, 1), PeerEnd(B, 1))]


# ---------------------------------------------------------------- talking


def test_parcels_arrive_in_order_with_their_rank_and_are_acked_at_once() -> None:
    a, b = pair()
    for number in range(5):
        assert a.send(number, b"%d" % number)
    assert a.unacked == (5, 5)
    assert carry(a, b, 0.1) == [Delivered(number, b"%d" % number) for number in range(5)]
    acks = b.take_outgoing(0.1)
    assert [ack.acked for ack in acks] == [5]
    a.receive(acks[0], 0.1)
    assert a.unacked == (0, 0)


def test_a_doubled_parcel_is_acked_again_because_its_ack_may_be_lost() -> None:
    a, b = pair()
    a.send(0, b"x")
    parcels = a.take_outgoing(0.1)
    assert len(b.receive(parcels[0], 0.1)) == 1
    assert len(b.take_outgoing(0.1)) == 1
    assert b.receive(parcels[0], 0.2) == []
    assert [ack.acked for ack in b.take_outgoing(0.2)] == [1]


def test_a_parcel_of_the_other_direction_carries_the_ack() -> None:
    a, b = pair()
    a.send(0, b"question")
    carry(a, b, 0.1)
    b.send(0, b"answer")
    answers = b.take_outgoing(0.1)
    assert [(type(answer), answer.acked) for answer in answers] == [(Parcel, 1)]


def test_an_ack_is_not_acked() -> None:
    a, b = pair()
    a.send(0, b"x")
    carry(a, b, 0.1)
    carry(b, a, 0.1)
    assert a.take_outgoing(0.1) == []


def test_an_idle_side_pings_every_second() -> None:
    a, b = pair()
    assert a.take_outgoing(PING_S - 0.01) == []
    pings = a.take_outgoing(PING_S)
    assert [type(ping) for ping in pings] == [PeerPing]
    assert a.take_outgoing(PING_S) == []
    assert b.receive(pings[0], PING_S) == []
    assert b.heard_s == PING_S
    assert a.heard_s == 0.0


def test_a_lost_parcel_is_sent_again() -> None:
    a, b = pair()
    a.send(0, b"lost")
    a.take_outgoing(0.1)
    a.send(0, b"next")
    assert carry(a, b, 0.2) == []
    assert exchange(a, b, 5.0) == [Delivered(0, b"lost"), Delivered(0, b"next")]


def test_on_a_new_connection_everything_is_said_again_at_once() -> None:
    a, b = pair()
    a.send(0, b"lost")
    a.take_outgoing(0.1)
    a.say_again(0.2)
    assert carry(a, b, 0.2) == [Delivered(0, b"lost")]
    assert carry(b, a, 0.2) == []
    a.say_again(0.3)
    assert [type(message) for message in a.take_outgoing(0.3)] == [PeerPing]


def test_a_frame_that_is_empty_or_too_large_is_refused_and_nothing_has_changed() -> None:
    a, b = pair()
    for frame in (b"", bytes(MAX_PARCEL_BYTES + 1)):
        with pytest.raises(LocalProtocolError, match=f"a message of {len(frame)} bytes"):
            a.send(0, frame)
    assert a.send(0, b"x")
    assert exchange(a, b) == [Delivered(0, b"x")]


# ---------------------------------------------------------------- ending


def test_a_new_life_of_the_other_side_is_told_and_nothing_of_the_old_one_is_sent_to_it() -> None:
    a, b = pair()
    a.send(0, b"for b")
    c = delivery(C)
    assert exchange(a, c, 1.0) == [Up(A, "node-a"), Up(C, "node-c")]
    assert a.unacked == (0, 0)
    a.send(0, b"for c")
    assert exchange(a, c, 2.0) == [Delivered(0, b"for c")]
    assert not b.unacked[0]


def test_a_conversation_goes_on_until_the_new_life_has_answered() -> None:
    a, b = pair()
    late = PeerPing("job", "node-c", PeerEnd(C, 4), PeerEnd(A, 1), 0)
    assert a.receive(late, 0.1) == []
    a.send(0, b"x")
    challenge = a.take_outgoing(0.2)
    assert [(type(message), message.receiver.life if message.receiver else "") for message in challenge] == [
        (Parcel, B),
        (PeerPing, C),
    ]
    assert [event for message in challenge for event in b.receive(message, 0.2)] == [Delivered(0, b"x")]
    exchange(a, b, 0.3)
    assert (a.life, b.life) == (B, A)
    assert a.unacked == (0, 0)


def test_a_side_that_turns_to_another_life_answers_it_at_once() -> None:
    a, _ = pair()
    c = delivery(C, first_call=2)
    a.receive(PeerPing("job", "node-c", PeerEnd(C, 1), None, 0), 0.1)
    assert carry(a, c, 0.1) == []
    assert carry(c, a, 0.1) == [Up(C, "node-c")]
    assert carry(a, c, 0.1) == [Up(A, "node-a")]


def test_late_parcels_of_an_earlier_life_change_nothing() -> None:
    a, b = pair()
    b.send(0, b"late")
    late = b.take_outgoing(0.1)
    c = delivery(C)
    exchange(a, c, 1.0)
    assert [event for message in late for event in a.receive(message, 1.1)] == []
    assert exchange(a, c, 2.0) == []
    assert a.life == C


def test_parcels_for_an_earlier_life_of_this_side_change_nothing() -> None:
    _, b = pair()
    b.send(0, b"for the first a")
    late = b.take_outgoing(0.1)
    a2 = delivery("a" * 15 + "2")
    exchange(a2, b, 1.0)
    assert [event for message in late for event in a2.receive(message, 1.1)] == []
    assert exchange(a2, b, 2.0) == []
    assert a2.is_up


def test_a_side_that_has_forgotten_the_other_begins_a_new_conversation_of_the_same_lives() -> None:
    a, b = pair()
    a.send(0, b"lost")
    a.take_outgoing(0.1)
    b.send(0, b"lost too")
    late = b.take_outgoing(0.1)
    b = delivery(B, first_call=2)
    assert exchange(a, b, 1.0) == [Up(A, "node-a"), Up(B, "node-b")]
    a.send(0, b"x")
    assert exchange(a, b, 1.0) == [Delivered(0, b"x")]
    assert [event for message in late for event in a.receive(message, 1.2)] == []
    assert a.take_outgoing(1.2) == [], "a late message of an earlier conversation was answered"


def test_too_much_that_is_not_acked_ends_the_conversation_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel_boxes, "MAX_UNACKED_PARCELS", 3)
    a, b = pair()
    b.send(0, b"from b")
    b.take_outgoing(0.1)
    assert [a.send(0, b"x") for _ in range(4)] == [True, True, True, False]
    assert a.unacked == (0, 0)
    assert not a.is_up
    events = exchange(a, b, 1.0)
    assert sorted(events, key=str) == [Up(A, "node-a"), Up(B, "node-b")]
    assert b.unacked == (0, 0)
    a.send(0, b"again")
    assert exchange(a, b, 1.0) == [Delivered(0, b"again")]


def test_a_parcel_of_the_other_side_alone_does_not_revive_a_conversation_that_was_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parcel_boxes, "MAX_UNACKED_PARCELS", 1)
    a, b = pair()
    a.send(0, b"x")
    a.send(0, b"x")
    b.send(0, b"y")
    assert carry(b, a, 0.1) == []
    assert not a.is_up
