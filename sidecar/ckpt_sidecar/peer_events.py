"""What can happen between the sidecars of several nodes: data only, like ``events.py``."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_proto.errors import FailureReport
from ckpt_proto.messages import Message
from ckpt_sidecar.events import Event


@dataclass(frozen=True)
class PeerUp(Event):
    """A sidecar of another node can be talked to and knows nothing: first contact, its restart, or a reset.

    Whatever was sent to it before and has not arrived is gone; the owner says its whole state again.
    """

    life: str
    node: str


@dataclass(frozen=True)
class FromPeer(Event):
    """A message of another node's sidecar; ``rank`` is whom it comes from or goes to, ``UNKNOWN_RANK`` for nobody."""

    life: str
    node: str
    rank: int
    message: Message


@dataclass(frozen=True)
class PeerRefusal(Event):
    """The one at the coordinator's address does not belong to this job, or does not let this sidecar in."""

    failure: FailureReport


@dataclass(frozen=True)
class PeerSilence:
    """How long nothing was heard of a peer that is or was up, in seconds; it pings every second."""

    life: str
    node: str
    silent_s: float
