"""What both sides of the link between sidecars do with frames: take them off a socket, check them, open parcels.

No frame can raise out of here but as :class:`RemoteProtocolError`, which the caller logs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import zmq

from ckpt_proto.codec import decode
from ckpt_proto.errors import RemoteProtocolError
from ckpt_proto.peer_messages import Parcel, PeerPing, PeerRefused
from ckpt_sidecar.delivery import Delivered, Up
from ckpt_sidecar.peer_events import FromPeer, PeerRefusal, PeerUp
from ckpt_sidecar.peer_socket import Complaints

MAX_AT_ONCE = 1000
"""Messages taken in one call: whoever floods the link does not keep the daemon from its other work."""

CALLS = itertools.count(1)
"""Of the process, not of one link: a number that was used in a conversation must never come again in the same life."""

PeerEvent = PeerUp | FromPeer | PeerRefusal

logger = logging.getLogger(__name__)


def put(socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
    """Send if that is possible at once."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        pass  # not connected, or the queue is full: as good as lost on the way, delivery sends it again


def received(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """Every message that is there, as its frames; at most :data:`MAX_AT_ONCE`."""
    for _ in range(MAX_AT_ONCE):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return


def peer_message(frames: list[zmq.Frame]) -> Parcel | PeerPing | PeerRefused:
    """The one message in ``frames``.

    Raises:
        RemoteProtocolError: it is none, or one that sidecars do not send to each other like this.
    """
    if len(frames) != 1:
        raise RemoteProtocolError(f"a message of {len(frames)} frames, expected 1")
    message = decode(frames[0].buffer)
    if not isinstance(message, (Parcel, PeerPing, PeerRefused)):
        raise RemoteProtocolError(f"{type(message).__name__} outside of a parcel")
    return message


def sender_of(frames: list[zmq.Frame]) -> str:
    """Address of the connection on which ``frames`` came, for the log."""
    try:
        return str(frames[-1].get("Peer-Address")).removeprefix("::ffff:")
    except zmq.ZMQError:
        return "an address that is gone"


def events_of(found: list[Up | Delivered], life: str, node: str, complaints: Complaints) -> list[PeerEvent]:
    """What a delivery says, as events with the messages inside."""
    events: list[PeerEvent] = []
    for item in found:
        if isinstance(item, Up):
            logger.info("the sidecar %s on %s is up", item.life, item.node)
            events.append(PeerUp(item.life, item.node))
            continue
        try:
            message = decode(item.frame)
            if isinstance(message, (Parcel, PeerPing, PeerRefused)):
                raise RemoteProtocolError(f"{type(message).__name__} inside a parcel")
        except RemoteProtocolError as error:
            complaints.log(f"dropped a parcel of the sidecar {life} on {node}: {error}")
            continue
        events.append(FromPeer(life, node, item.rank, message))
    return events
