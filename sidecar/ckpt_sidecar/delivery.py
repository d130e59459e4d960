"""Reliable, ordered, exactly-once delivery between two sidecars.

Made for a transport that may lose, double, delay and reorder what it carries.

A *conversation* is named by its two ends, each a life and a number that its process never uses again. All promises
hold within one conversation, and it lasts as long as both lives do: a cut link, however long, does not end it. It
ends when the other side is another life, has forgotten this one, or acks nothing until memory would grow; both
owners are then told that the other side knows nothing (:class:`Up`), and say their whole state again.

A conversation begins only after the other end was heard to answer an end made for it: a late message can never begin
one, end one, or be taken for a part of one. Until then an established one goes on::

    A                                 B
    | PeerPing a.1 -> nobody          |       first contact: B does not know yet whether this is late
    |-------------------------------->|
    |         PeerPing b.1 -> a.1     |       answers what A just made: A knows that B lives now
    |<--------------------------------|
    | Parcel a.1 -> b.1, number 1     |       and B that A does
    |-------------------------------->|
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ckpt_proto.errors import LocalProtocolError
from ckpt_proto.peer_messages import MAX_PARCEL_BYTES, Parcel, PeerEnd, PeerPing
from ckpt_sidecar.parcel_boxes import Inbox, Outbox

PING_S = 1.0
"""Something is sent at least so often, in seconds, so that a silence means something."""


@dataclass(frozen=True)
class Local:
    """Who this sidecar is in every message: ``life`` is its ``sidecar_id``."""

    job_id: str
    node: str
    life: str


@dataclass(frozen=True)
class Up:
    """A conversation has begun. What was sent in an earlier one and has not arrived is gone."""

    life: str
    node: str


@dataclass(frozen=True)
class Delivered:
    """The next parcel of the conversation that began last."""

    rank: int
    frame: bytes


class Delivery:
    """This side of the talk with one other sidecar. Called by the owner of the sockets; does no I/O, knows no clock.

    Args:
        local: this sidecar.
        next_call: gives a number that this process has never used for a conversation, each higher than the one before.
        now_s: seconds of any clock that never goes back; the same for all methods.
    """

    def __init__(self, local: Local, next_call: Callable[[], int], now_s: float) -> None:
        self._local = local
        self._next_call = next_call
        self._here = PeerEnd(local.life, next_call())
        self._there: PeerEnd | None = None
        self._node = ""
        self._is_up = False
        self._outbox, self._inbox = Outbox(), Inbox()
        self._rival: PeerEnd | None = None
        self._here_for_rival: PeerEnd | None = None
        self._owes_ping = True
        self._owes_rival = False
        self._last_sent_s = -math.inf
        self.heard_s = now_s

    # ------------------------------------------------------------ what the owner sees

    @property
    def is_up(self) -> bool:
        """Whether there is a conversation, so that parcels are taken."""
        return self._is_up

    @property
    def life(self) -> str:
        """The other life; empty as long as nobody was heard."""
        return self._there.life if self._there else ""

    @property
    def node(self) -> str:
        """The node that the other life says it is on."""
        return self._node

    @property
    def unacked(self) -> tuple[int, int]:
        """``(parcels, bytes)`` that were sent and may not have arrived."""
        return len(self._outbox), self._outbox.nbytes

    def send(self, rank: int, frame: bytes) -> bool:
        """Take a parcel; :meth:`take_outgoing` then has it.

        Returns:
            False if there is no conversation, or this parcel would be too much of what is not acked, which ends the
            conversation: the parcel is dropped, and :class:`Up` will ask for the whole state.

        Raises:
            LocalProtocolError: the frame is larger than :data:`MAX_PARCEL_BYTES`; nothing has changed.
        """
        if not 0 < len(frame) <= MAX_PARCEL_BYTES:
            raise LocalProtocolError(
                f"a message of {len(frame)} bytes for another node; at most {MAX_PARCEL_BYTES} can be sent"
            )
        if not self._is_up:
            return False
        if not self._outbox.has_room(len(frame)):
            self._begin_anew()
            return False
        self._outbox.add(rank, frame)
        return True

    def receive(self, message: Parcel | PeerPing, now_s: float) -> list[Up | Delivered]:
        """Take in what the transport brought; returns what it means to the owner, in order."""
        sender, receiver = message.sender, message.receiver
        if self._is_late(sender):
            return []
        if self._is_up and sender == self._there and receiver == self._here:
            return [*self._converse(message, now_s)]
        if self._is_up:
            return self._hear_rival(message, now_s)
        self._there = sender
        self._owes_ping = True
        if receiver != self._here:
            return []
        self._is_up = True
        return self._greet(message, now_s)

    def say_again(self, now_s: float) -> None:
        """The transport begins anew, and what was on its way has probably been lost: do not wait for a silence."""
        self._owes_ping = True
        self._outbox.resend_now(now_s)

    def take_outgoing(self, now_s: float) -> list[Parcel | PeerPing]:
        """Everything to be handed to the transport now; call it after :meth:`send` and :meth:`receive`, and every
        second."""
        outgoing: list[Parcel | PeerPing] = []
        if self._is_up and self._there is not None:
            for number, rank, frame in self._outbox.take_ready(now_s):
                outgoing.append(self._parcel(self._there, number, rank, frame))
        if not outgoing and (self._owes_ping or now_s - self._last_sent_s >= PING_S):
            outgoing.append(self._ping(self._here, self._there, self._inbox.acked))
        if outgoing:
            self._owes_ping = False
            self._last_sent_s = now_s
        if self._owes_rival and self._here_for_rival is not None:
            outgoing.append(self._ping(self._here_for_rival, self._rival, 0))
            self._owes_rival = False
        return outgoing

    # ------------------------------------------------------------ conversation

    def _is_late(self, sender: PeerEnd) -> bool:
        """Whether the same process has begun a later conversation already."""
        known = [end for end in (self._there, self._rival) if end is not None and end.life == sender.life]
        return sender != self._there and any(sender.call < end.call for end in known)

    def _converse(self, message: Parcel | PeerPing, now_s: float) -> list[Delivered]:
        self.heard_s = now_s
        self._node = message.node
        self._outbox.hear(now_s)
        self._outbox.take_ack(message.acked, now_s)
        if isinstance(message, PeerPing):
            return []
        self._owes_ping = True  # the ack of a doubled parcel too: the first one may have been lost
        return [Delivered(*parcel) for parcel in self._inbox.take(message.number, message.rank, message.frame)]

    def _hear_rival(self, message: Parcel | PeerPing, now_s: float) -> list[Up | Delivered]:
        """Somebody else than this conversation's other end, or it does not know this end: a new life, or a late
        message. Only one that lives can answer to the end that is made for it here."""
        sender, receiver = message.sender, message.receiver
        assert self._there is not None
        if self._here_for_rival is not None and receiver == self._here_for_rival:
            self._here, self._there = self._here_for_rival, sender
            self._forget()
            return self._greet(message, now_s)
        elsewhere = receiver is not None and receiver.life != self._here.life
        if sender == self._there or (sender.life == self._there.life and elsewhere):
            self._owes_ping = True
            return []
        self._rival = sender
        self._here_for_rival = self._here_for_rival or PeerEnd(self._local.life, self._next_call())
        self._owes_rival = True
        return []

    def _greet(self, message: Parcel | PeerPing, now_s: float) -> list[Up | Delivered]:
        self._owes_ping = True  # the other side waits for an answer to its end
        return [Up(message.sender.life, message.node), *self._converse(message, now_s)]

    def _begin_anew(self) -> None:
        """Drop everything. The other side may be well: it has to learn that this end is another one now."""
        self._here = PeerEnd(self._local.life, self._next_call())
        self._is_up = False
        self._forget()
        self._owes_ping = True

    def _forget(self) -> None:
        self._outbox, self._inbox = Outbox(), Inbox()
        self._rival = self._here_for_rival = None
        self._owes_rival = False

    # ------------------------------------------------------------ messages

    def _ping(self, sender: PeerEnd, receiver: PeerEnd | None, acked: int) -> PeerPing:
        return PeerPing(self._local.job_id, self._local.node, sender, receiver, acked)

    def _parcel(self, receiver: PeerEnd, number: int, rank: int, frame: bytes) -> Parcel:
        local, acked = self._local, self._inbox.acked
        return Parcel(local.job_id, local.node, self._here, receiver, number, acked, rank, frame)
