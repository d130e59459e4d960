"""The coordinator's side of the link between sidecars: those of all other nodes connect to it.

Owned by the daemon's main thread; never blocks. What ``send`` has taken arrives once and in order, as long as both
processes live, whatever happens to the connection (see ``delivery``).

Who a message is from is said by the message, not by the connection: a life is answered where it was heard last. So a
node that connects again needs no identity of its own to take over (no ``ROUTER_HANDOVER``), and its old connection may
take as long to die as it likes. Everybody who is let in has the job's key and is trusted to be who it says.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from ckpt_proto.codec import encode
from ckpt_proto.errors import FailureReport, RemoteProtocolError, report_of
from ckpt_proto.messages import Message
from ckpt_proto.peer_messages import Parcel, PeerPing, PeerRefused
from ckpt_sidecar.delivery import Delivery, Local
from ckpt_sidecar.peer_events import PeerSilence
from ckpt_sidecar.peer_frames import CALLS, PeerEvent, events_of, peer_message, put, received, sender_of
from ckpt_sidecar.peer_keys import PeerKeys
from ckpt_sidecar.peer_socket import Complaints, Doorkeeper, HandshakeLog, configure, listen

MAX_PEERS = 4096
FORGET_AFTER_S = 600.0
"""When there is no room for another peer, one that was silent for so long makes it."""

logger = logging.getLogger(__name__)


@dataclass
class _Peer:
    delivery: Delivery
    route: bytes
    was_up: bool = False


class PeerServer:
    """The coordinator's side: many sidecars connect to it.

    Args:
        address: ``host:port`` as the other nodes know it; a loopback host is bound alone, any other as all interfaces.
        local: this sidecar.
        keys: from ``keys_for``; None: anybody who can connect is let in.

    Raises:
        PeerAddressTaken: the port cannot be had.
    """

    def __init__(self, address: str, local: Local, keys: PeerKeys | None) -> None:
        self._local = local
        self._peers: dict[str, _Peer] = {}
        self._complaints = Complaints()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket)
        self._socket.set(zmq.BACKLOG, MAX_PEERS)  # all nodes of a large job connect in the same moment
        self._log = HandshakeLog(self._socket)
        self._door: Doorkeeper | None = None
        try:
            if keys is not None:
                self._door = Doorkeeper(self._context, keys.public, self._complaints)
                keys.serve(self._socket)
            self.address = listen(self._socket, address)
        except BaseException:
            self.close()
            raise

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """To be polled for input; when one has some, call :meth:`receive`. Nobody gets in while it is not called."""
        guards = [self._log.socket] + ([self._door.socket] if self._door else [])
        return [self._socket, *guards]

    @property
    def unacked_parcels(self) -> int:
        """How many messages may not have arrived yet: what a drain waits for, within bounds."""
        return sum(peer.delivery.unacked[0] for peer in self._peers.values())

    def receive(self, now_s: float) -> list[PeerEvent]:
        """Everything that has come, in order. A bad frame is logged and dropped; its sender is told why."""
        if self._door:
            self._door.answer_all()
        for failed in self._log.read():
            self._complaints.log(f"refused a connection from {failed.host}: {failed.reason}")
        events: list[PeerEvent] = []
        heard: dict[str, None] = {}
        for route, message in self._arrived():
            if (peer := self._peer_of(route, message, now_s)) is None:
                continue
            peer.route = route
            heard[message.sender.life] = None
            events += events_of(
                peer.delivery.receive(message, now_s), message.sender.life, message.node, self._complaints
            )
            peer.was_up |= peer.delivery.is_up
        for life in heard:
            if life in self._peers:
                self._flush(self._peers[life], now_s)
        return events

    def send(self, life: str, rank: int, message: Message, now_s: float) -> bool:
        """Send to one peer; ``rank`` is whom the message is for.

        Returns:
            False if it is not up: the message is dropped, and PeerUp will say when to tell it the whole state.

        Raises:
            LocalProtocolError: the message is too large.
        """
        frame = encode(message)
        peer = self._peers.get(life)
        if peer is None:
            return False
        was_up = peer.delivery.is_up
        taken = peer.delivery.send(rank, frame)
        if was_up and not taken:
            logger.warning(
                "the sidecar %s on %s acks nothing: its conversation is begun anew", life, peer.delivery.node
            )
        self._flush(peer, now_s)
        return taken

    def tick(self, now_s: float) -> list[PeerSilence]:
        """Send again what was not acked, and pings; call it every second.

        Returns:
            How long each peer that was up has been silent; it stays in the list until :meth:`forget`.
        """
        for peer in self._peers.values():
            self._flush(peer, now_s)
        return [
            PeerSilence(life, peer.delivery.node, now_s - peer.delivery.heard_s)
            for life, peer in self._peers.items()
            if peer.was_up
        ]

    def forget(self, life: str) -> None:
        """Drop what is kept for a peer. Should it come back, it is up anew and knows nothing."""
        self._peers.pop(life, None)

    def close(self) -> None:
        """Send what is queued (at most a second) and close. What is not acked is lost."""
        self._log.close()
        if self._door:
            self._door.socket.close()
        self._socket.close()
        self._context.term()

    def _arrived(self) -> Iterator[tuple[bytes, Parcel | PeerPing]]:
        for frames in received(self._socket):
            route = frames[0].bytes
            try:
                message = peer_message(frames[1:])
                if isinstance(message, PeerRefused):
                    raise RemoteProtocolError("a refusal, which only a coordinator sends")
            except RemoteProtocolError as error:
                self._complaints.log(f"dropped what came from {sender_of(frames)}: {error}")
                self._refuse(route, report_of(error))
                continue
            if message.job_id != self._local.job_id:
                self._refuse_job(route, message)
                continue
            yield route, message

    def _peer_of(self, route: bytes, message: Parcel | PeerPing, now_s: float) -> _Peer | None:
        life = message.sender.life
        if life in self._peers:
            return self._peers[life]
        if life == self._local.life:
            self._complaints.log(f"dropped a message of this very sidecar, from node {message.node}")
            return None
        if len(self._peers) >= MAX_PEERS and not self._make_room(now_s):
            text = f"{MAX_PEERS} sidecars are connected to the coordinator on {self._local.node}, no more are taken"
            self._complaints.log(text)
            self._refuse(route, FailureReport("TooManySidecars", text, node=self._local.node))
            return None
        self._peers[life] = _Peer(Delivery(self._local, CALLS.__next__, now_s), route)
        return self._peers[life]

    def _make_room(self, now_s: float) -> bool:
        life, peer = min(self._peers.items(), key=lambda item: (item[1].was_up, item[1].delivery.heard_s))
        if peer.was_up and now_s - peer.delivery.heard_s < FORGET_AFTER_S:
            return False
        self.forget(life)
        return True

    def _refuse_job(self, route: bytes, message: Parcel | PeerPing) -> None:
        self._complaints.log(f"refused the sidecar on {message.node} of job {message.job_id}: it is not of this job")
        text = f"port {self.address.rpartition(':')[2]} on {self._local.node} is served by job {self._local.job_id}, "
        failure = FailureReport("WrongJob", text + f"not by job {message.job_id}", node=self._local.node)
        self._refuse(route, failure)

    def _refuse(self, route: bytes, failure: FailureReport) -> None:
        put(self._socket, [route, encode(PeerRefused(self._local.job_id, self._local.node, failure))])

    def _flush(self, peer: _Peer, now_s: float) -> None:
        for message in peer.delivery.take_outgoing(now_s):
            put(self._socket, [peer.route, encode(message)])
