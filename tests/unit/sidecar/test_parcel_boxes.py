"""Numbers without gaps, a window that moves, and bounds on what either side keeps."""

from __future__ import annotations

import pytest

from ckpt_sidecar import parcel_boxes
from ckpt_sidecar.parcel_boxes import FIRST_RESEND_S, LONGEST_RESEND_S, PROBE_PARCELS, WINDOW_PARCELS, Inbox, Outbox


def filled(count: int, frame: bytes = b"frame") -> Outbox:
    """An outbox with so many parcels, none sent."""
    box = Outbox()
    for _ in range(count):
        box.add(0, frame)
    return box


def numbers(box: Outbox, now_s: float) -> list[int]:
    """The numbers of what is ready."""
    return [number for number, _, _ in box.take_ready(now_s)]


# ---------------------------------------------------------------- outbox


def test_parcels_are_sent_in_the_order_in_which_they_were_added_and_once() -> None:
    box = Outbox()
    box.add(3, b"a")
    box.add(4, b"b")
    assert list(box.take_ready(0.0)) == [(1, 3, b"a"), (2, 4, b"b")]
    assert numbers(box, 0.5) == []


def test_an_acked_parcel_is_forgotten() -> None:
    box = filled(3)
    numbers(box, 0.0)
    box.take_ack(2, 0.1)
    assert (len(box), box.nbytes, box.acked) == (1, 5, 2)
    assert numbers(box, 100.0) == [3]


@pytest.mark.parametrize("number", [0, 1, 4, 2**63 - 1])
def test_a_late_ack_and_one_of_what_was_never_sent_change_nothing(number: int) -> None:
    box = filled(3)
    numbers(box, 0.0)
    box.take_ack(1, 0.1)
    box.take_ack(number, 0.2)
    assert (len(box), box.acked) == (2, 1)


def test_no_more_than_the_window_is_on_its_way() -> None:
    box = filled(WINDOW_PARCELS + 10)
    assert numbers(box, 0.0) == list(range(1, WINDOW_PARCELS + 1))
    box.take_ack(7, 0.1)
    assert numbers(box, 0.1) == list(range(WINDOW_PARCELS + 1, WINDOW_PARCELS + 8))


def test_large_parcels_share_the_window_and_one_above_it_travels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel_boxes, "WINDOW_BYTES", 10)
    box = Outbox()
    for nbytes in (4, 6, 1, 50, 2):
        box.add(0, bytes(nbytes))
    assert numbers(box, 0.0) == [1, 2]
    box.take_ack(1, 0.0)
    assert numbers(box, 0.0) == [3]
    box.take_ack(3, 0.0)
    assert numbers(box, 0.0) == [4]
    assert numbers(box, 0.0) == []
    box.take_ack(4, 0.0)
    assert numbers(box, 0.0) == [5]


def test_what_is_not_acked_is_sent_again_a_few_at_a_time_and_ever_less_often() -> None:
    box = filled(WINDOW_PARCELS)
    numbers(box, 0.0)
    again = list(range(1, PROBE_PARCELS + 1))
    now_s, waited_s = 0.0, FIRST_RESEND_S
    for _ in range(6):
        assert numbers(box, now_s + waited_s - 0.01) == []
        now_s += waited_s
        assert numbers(box, now_s) == again
        waited_s = min(2 * waited_s, LONGEST_RESEND_S)


def test_new_parcels_wait_while_nothing_is_acked() -> None:
    box = filled(PROBE_PARCELS)
    numbers(box, 0.0)
    numbers(box, FIRST_RESEND_S)
    box.add(0, b"new")
    assert numbers(box, FIRST_RESEND_S) == []


def test_the_first_ack_after_a_silence_opens_the_window_again() -> None:
    box = filled(WINDOW_PARCELS)
    numbers(box, 0.0)
    numbers(box, FIRST_RESEND_S)
    box.take_ack(1, FIRST_RESEND_S)
    assert numbers(box, FIRST_RESEND_S) == list(range(PROBE_PARCELS + 1, WINDOW_PARCELS + 1))


def test_an_ack_of_more_than_was_sent_again_skips_what_the_receiver_had_kept() -> None:
    box = filled(WINDOW_PARCELS)
    numbers(box, 0.0)
    numbers(box, FIRST_RESEND_S)
    box.take_ack(WINDOW_PARCELS - 1, FIRST_RESEND_S)
    assert (len(box), box.nbytes) == (1, 5)
    assert numbers(box, FIRST_RESEND_S) == [WINDOW_PARCELS]


def test_after_a_silence_the_other_side_need_not_wait_for_the_whole_backoff() -> None:
    box = filled(1)
    numbers(box, 0.0)
    for now_s in (1.0, 3.0, 7.0):
        assert numbers(box, now_s) == [1]
    box.hear(7.5)
    assert numbers(box, 7.5 + FIRST_RESEND_S) == [1]


def test_being_heard_all_the_time_does_not_put_a_resend_off() -> None:
    box = filled(1)
    numbers(box, 0.0)
    for tenth in range(10):
        box.hear(tenth / 10)
    assert numbers(box, FIRST_RESEND_S) == [1]


def test_room_is_bounded_in_parcels_and_in_bytes_but_one_parcel_always_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel_boxes, "MAX_UNACKED_PARCELS", 3)
    monkeypatch.setattr(parcel_boxes, "MAX_UNACKED_BYTES", 20)
    assert Outbox().has_room(1000)
    assert filled(2).has_room(10)
    assert not filled(2).has_room(11)
    assert not filled(3).has_room(1)


# ---------------------------------------------------------------- inbox


def test_parcels_come_out_in_order_whatever_order_they_came_in() -> None:
    box = Inbox()
    assert box.take(3, 0, b"c") == []
    assert box.take(2, 0, b"b") == []
    assert box.take(1, 5, b"a") == [(5, b"a"), (0, b"b"), (0, b"c")]
    assert box.acked == 3


def test_a_parcel_that_comes_twice_comes_out_once() -> None:
    box = Inbox()
    assert box.take(1, 0, b"a") == [(0, b"a")]
    assert box.take(1, 0, b"a") == []
    assert box.take(3, 0, b"c") == []
    assert box.take(3, 0, b"other") == []
    assert box.take(2, 0, b"b") == [(0, b"b"), (0, b"c")]
    assert box.take(3, 0, b"c") == []


def test_what_lies_beyond_the_window_is_not_kept() -> None:
    box = Inbox()
    assert box.take(WINDOW_PARCELS, 0, b"kept") == []
    assert box.take(WINDOW_PARCELS + 1, 0, b"dropped") == []
    for number in range(1, WINDOW_PARCELS):
        box.take(number, 0, b"x")
    assert box.acked == WINDOW_PARCELS


def test_what_comes_too_early_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel_boxes, "WINDOW_BYTES", 10)
    box = Inbox()
    for number in (4, 3, 2):
        box.take(number, 0, bytes(5))
    box.take(1, 0, bytes(50))
    assert box.acked == 1
    box.take(2, 0, bytes(5))
    assert box.acked == 4
    assert box.take(7, 0, bytes(10)) == []
    assert [len(frame) for _, frame in box.take(5, 0, b"") + box.take(6, 0, b"")] == [0, 0, 10]
