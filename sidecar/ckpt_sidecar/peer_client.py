"""A node's side of the link between sidecars: connected to the coordinator's address, whoever serves it now.

Owned by the daemon's main thread; never blocks. What ``send`` has taken arrives once and in order, as long as both
processes live, whatever happens to the connection (see ``delivery``).
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator

import zmq

from ckpt_proto.codec import encode
from ckpt_proto.errors import FailureReport, RemoteProtocolError
from ckpt_proto.messages import Message
from ckpt_proto.peer_messages import Parcel, PeerPing, PeerRefused
from ckpt_sidecar.delivery import Delivery, Local
from ckpt_sidecar.peer_events import PeerRefusal, PeerSilence
from ckpt_sidecar.peer_frames import CALLS, PeerEvent, events_of, peer_message, put, received
from ckpt_sidecar.peer_keys import PeerKeys
from ckpt_sidecar.peer_socket import Complaints, HandshakeLog, configure, configure_client, endpoint_of

CONNECT_AFTER_S = 5.0
SILENT_S = 60.0
"""libzmq connects again by itself, but never after a handshake that was refused or made no sense, although that may be
put right: the wrong key file, another program on the port. So this side does it when a connection has ended and nothing
was heard since, and after a long silence."""

SURE_AFTER = 4
"""Handshakes in a row that end without a reason: one may have met a coordinator that was ending, four have not."""

logger = logging.getLogger(__name__)


class PeerClient:
    """The link to whoever serves one coordinator's address.

    Args:
        address: ``host:port``; a name is looked up anew by every attempt to connect.
        local: this sidecar.
        keys: from ``keys_for``.
        now_s: silence is counted from here until something is heard.
    """

    def __init__(self, address: str, local: Local, keys: PeerKeys | None, now_s: float) -> None:
        self.address = address
        self._local = local
        self._delivery = Delivery(local, CALLS.__next__, now_s)
        self._complaints = Complaints()
        self._failures = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure(self._socket)
        configure_client(self._socket)
        if keys is not None:
            keys.join(self._socket)
        self._log = HandshakeLog(self._socket)
        self._endpoint = endpoint_of(address)
        self._socket.connect(self._endpoint)
        self._connect_at_s = now_s + SILENT_S
        self._flush(now_s)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """To be polled for input; when one has some, call :meth:`receive`."""
        return [self._socket, self._log.socket]

    @property
    def is_up(self) -> bool:
        """Whether the coordinator takes messages now."""
        return self._delivery.is_up

    @property
    def unacked_parcels(self) -> int:
        """How many messages may not have arrived yet."""
        return self._delivery.unacked[0]

    def receive(self, now_s: float) -> list[PeerEvent]:
        """Everything that has come, in order. A bad frame is logged and dropped."""
        events = self._look_at_the_connection(now_s)
        for message in self._arrived():
            if isinstance(message, PeerRefused):
                events += self._refused(message)
                continue
            self._failures = 0
            self._connect_at_s = now_s + SILENT_S
            told = self._delivery.receive(message, now_s)
            events += events_of(told, message.sender.life, message.node, self._complaints)
        self._flush(now_s)
        return events

    def send(self, rank: int, message: Message, now_s: float) -> bool:
        """Send to the coordinator; ``rank`` is whom the message is from.

        Returns:
            False if it is not up: the message is dropped, and PeerUp will say when to tell it the whole state.

        Raises:
            LocalProtocolError: the message is too large.
        """
        was_up = self._delivery.is_up
        taken = self._delivery.send(rank, encode(message))
        if was_up and not taken:
            logger.warning("the coordinator at %s acks nothing: the conversation is begun anew", self.address)
        self._flush(now_s)
        return taken

    def tick(self, now_s: float) -> PeerSilence:
        """Send again what was not acked, and pings; call it every second.

        Returns:
            How long the coordinator has been silent; life and node are empty as long as none was up.
        """
        if now_s >= self._connect_at_s:
            self._connect_again(now_s)
        self._flush(now_s)
        delivery = self._delivery
        return PeerSilence(delivery.life if delivery.node else "", delivery.node, now_s - delivery.heard_s)

    def close(self) -> None:
        """Send what is queued (at most a second) and close. What is not acked is lost."""
        self._log.close()
        self._socket.close()
        self._context.term()

    def _look_at_the_connection(self, now_s: float) -> list[PeerEvent]:
        events: list[PeerEvent] = []
        begun, ended = self._log.begun, self._log.ended
        for failed in self._log.read():
            self._failures += 1
            text = f"the coordinator at {self.address} does not let this sidecar in: {failed.reason}"
            if self._complaints.log(text) and (failed.certain or self._failures >= SURE_AFTER):
                hint = "give the same --peer-key-file to the sidecars of all nodes; see the coordinator's log"
                events.append(PeerRefusal(FailureReport("PeerKeyError", text, hint, node=self._local.node)))
        if self._log.begun > begun:
            self._delivery.say_again(now_s)
        if self._log.ended > ended:
            self._connect_at_s = min(self._connect_at_s, now_s + CONNECT_AFTER_S)
        return events

    def _arrived(self) -> Iterator[Parcel | PeerPing | PeerRefused]:
        for frames in received(self._socket):
            try:
                message = peer_message(frames)
            except RemoteProtocolError as error:
                self._complaints.log(f"dropped what came from the coordinator at {self.address}: {error}")
                continue
            if isinstance(message, PeerRefused) or message.job_id == self._local.job_id:
                yield message
            else:
                self._complaints.log(f"dropped a message of job {message.job_id} from {self.address}")

    def _connect_again(self, now_s: float) -> None:
        self._connect_at_s = now_s + SILENT_S
        try:
            self._socket.disconnect(self._endpoint)
        except zmq.ZMQError as error:
            if error.errno != errno.ENOENT:
                raise
            # libzmq has given the connection up for good
        self._socket.connect(self._endpoint)

    def _refused(self, refusal: PeerRefused) -> list[PeerEvent]:
        failure = refusal.failure
        if not self._complaints.log(f"the sidecar at {self.address} refuses this one: {failure}"):
            return []
        hint = "set CKPT_SIDECAR_COORDINATOR=HOST:PORT with another port, the same on every node of this job"
        text = f"{failure.message} (the coordinator's address is {self.address})"
        return [PeerRefusal(FailureReport(failure.kind, text, failure.hint or hint, node=failure.node))]

    def _flush(self, now_s: float) -> None:
        for message in self._delivery.take_outgoing(now_s):
            put(self._socket, [encode(message)])
