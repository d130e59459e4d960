"""Messages between the sidecars of several nodes: the envelope in which every other message crosses the network.

A *life* is the random id of one sidecar process. A *conversation* is one numbered exchange between two lives; each side
counts the ones it has begun, and the pair of :class:`PeerEnd` names it. See ``delivery.py`` of the sidecar for what
the numbers promise, and PROTOCOL.md for the order of things.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpt_proto.errors import UNKNOWN_RANK, FailureReport, LocalProtocolError
from ckpt_proto.identity import MAX_RANKS, check_job_id
from ckpt_proto.messages import Message

MAX_PARCEL_BYTES = 128 << 20
"""Largest frame inside a parcel: the plan of one rank with 500,000 items. Plans of all ranks together never travel."""

MAX_NODE_CHARACTERS = 255
MAX_NUMBER = 2**63 - 1
_LIFE = re.compile(r"[0-9a-f]{16}")


def check_life(life: str) -> str:
    """Return ``life`` if it is sixteen hexadecimal digits, else raise :class:`LocalProtocolError`."""
    if not _LIFE.fullmatch(life):
        raise LocalProtocolError(f"life {life[:40]!r} is not sixteen hexadecimal digits")
    return life


def check_node(node: str) -> str:
    """Return ``node`` if it can stand in a log line, else raise :class:`LocalProtocolError`."""
    if not 0 < len(node) <= MAX_NODE_CHARACTERS or not node.isprintable():
        raise LocalProtocolError(f"node {node[:40]!r} is not 1 to {MAX_NODE_CHARACTERS} printable characters")
    return node


def _check_number(name: str, value: int, lowest: int) -> None:
    if not lowest <= value <= MAX_NUMBER:
        raise LocalProtocolError(f"{name} {value} is outside {lowest} .. 2^63-1")


@dataclass(frozen=True)
class PeerEnd:
    """One end of a conversation: a life, and how many conversations this process had begun when it began this one."""

    life: str
    call: int

    def __post_init__(self) -> None:
        check_life(self.life)
        _check_number("call", self.call, 1)

    def __str__(self) -> str:
        """For log lines."""
        return f"{self.life}.{self.call}"


@dataclass(frozen=True)
class PeerPing(Message):
    """Sidecar -> sidecar: opens a conversation, acks, and every second says that the sender lives. Answer: only if it
    does not know the other end as it is now.

    ``receiver`` is None while the sender knows nobody. ``acked``: every parcel of the receiver up to this number has
    been taken in.
    """

    job_id: str
    node: str
    sender: PeerEnd
    receiver: PeerEnd | None
    acked: int

    def __post_init__(self) -> None:
        check_job_id(self.job_id)
        check_node(self.node)
        _check_number("acked", self.acked, 0)


@dataclass(frozen=True)
class Parcel(Message):
    """Sidecar -> sidecar: one message, as the frame it has on a node. Answer: PeerPing or Parcel with ``acked``.

    ``number`` counts the sender's parcels in this conversation from 1. ``rank`` is whom the message comes from (to the
    coordinator) or goes to (from it); ``UNKNOWN_RANK`` if it is about no rank.
    """

    job_id: str
    node: str
    sender: PeerEnd
    receiver: PeerEnd
    number: int
    acked: int
    rank: int
    frame: bytes

    def __post_init__(self) -> None:
        check_job_id(self.job_id)
        check_node(self.node)
        _check_number("parcel number", self.number, 1)
        _check_number("acked", self.acked, 0)
        if self.rank != UNKNOWN_RANK and not 0 <= self.rank < MAX_RANKS:
            raise LocalProtocolError(f"rank {self.rank} of a parcel is outside 0 .. {MAX_RANKS - 1}")
        if not 0 < len(self.frame) <= MAX_PARCEL_BYTES:
            raise LocalProtocolError(f"a parcel of {len(self.frame)} bytes; 1 to {MAX_PARCEL_BYTES} can be sent")


@dataclass(frozen=True)
class PeerRefused(Message):
    """Sidecar -> sidecar, instead of an answer: the two do not belong together. ``job_id`` is the sender's own job."""

    job_id: str
    node: str
    failure: FailureReport

    def __post_init__(self) -> None:
        check_job_id(self.job_id)
        check_node(self.node)
