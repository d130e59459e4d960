"""The messages between sidecars: what is out of bounds cannot be made, so neither be received."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ckpt_proto.codec import decode, encode
from ckpt_proto.errors import UNKNOWN_RANK, FailureReport, LocalProtocolError
from ckpt_proto.identity import MAX_RANKS
from ckpt_proto.messages import Heartbeat
from ckpt_proto.peer_messages import MAX_NUMBER, MAX_PARCEL_BYTES, Parcel, PeerEnd, PeerPing, PeerRefused

HERE, THERE = PeerEnd("0123456789abcdef", 1), PeerEnd("fedcba9876543210", 7)
PARCEL = Parcel("job", "node-a", HERE, THERE, 1, 0, 3, encode(Heartbeat()))
PING = PeerPing("job", "node-a", HERE, None, 0)


def test_the_message_inside_a_parcel_comes_out_as_it_went_in() -> None:
    parcel = decode(encode(PARCEL))
    assert isinstance(parcel, Parcel)
    assert decode(parcel.frame) == Heartbeat()


def test_an_end_is_named_by_life_and_call() -> None:
    assert str(THERE) == "fedcba9876543210.7"


@pytest.mark.parametrize(
    "life", ["", "0123456789abcde", "0123456789abcdef0", "0123456789ABCDEF", "../../etc/passwd", "\n"]
)
def test_a_life_is_sixteen_hexadecimal_digits(life: str) -> None:
    with pytest.raises(LocalProtocolError, match="sixteen hexadecimal digits"):
        PeerEnd(life, 1)


@pytest.mark.parametrize("call", [0, -1, MAX_NUMBER + 1])
def test_a_call_is_counted_from_1(call: int) -> None:
    with pytest.raises(LocalProtocolError, match="call"):
        PeerEnd(HERE.life, call)


@pytest.mark.parametrize(
    "changes",
    [
        {"job_id": "../x"},
        {"node": ""},
        {"node": "n" * 256},
        {"node": "a\nforged log line"},
        {"number": 0},
        {"number": MAX_NUMBER + 1},
        {"acked": -1},
        {"rank": -2},
        {"rank": MAX_RANKS},
        {"frame": b""},
        {"frame": bytes(MAX_PARCEL_BYTES + 1)},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_a_parcel_out_of_bounds_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        dataclasses.replace(PARCEL, **changes)


@pytest.mark.parametrize("changes", [{"job_id": ""}, {"node": "\0"}, {"acked": -1}], ids=str)
def test_a_ping_out_of_bounds_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        dataclasses.replace(PING, **changes)


@pytest.mark.parametrize("changes", [{"job_id": "-"}, {"node": ""}], ids=str)
def test_a_refusal_out_of_bounds_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        dataclasses.replace(PeerRefused("job", "node-a", FailureReport("WrongJob", "no")), **changes)


def test_a_parcel_may_be_about_no_rank() -> None:
    assert dataclasses.replace(PARCEL, rank=UNKNOWN_RANK).rank == UNKNOWN_RANK
