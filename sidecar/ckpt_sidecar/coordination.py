"""The sidecar's side of the job: hands what its ranks say to the coordinator, wherever that is, and, if it is the
coordinator itself, hands the answers to the sidecars of the other nodes.

Owned by the daemon's main thread. On one node no socket is opened and everything is a function call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import zmq

from ckpt_proto.errors import UNKNOWN_RANK, CheckpointError, report_of
from ckpt_proto.messages import Hello, Message, Refused
from ckpt_sidecar.delivery import Local
from ckpt_sidecar.events import (
    AtCoordinator,
    CoordinatorRefuses,
    CoordinatorSilent,
    CoordinatorUp,
    Event,
    FromCoordinator,
    NodeSilent,
)
from ckpt_sidecar.peer_client import PeerClient
from ckpt_sidecar.peer_events import FromPeer, PeerRefusal, PeerSilence, PeerUp
from ckpt_sidecar.peer_keys import PeerKeys, keys_for
from ckpt_sidecar.peer_server import PeerServer
from ckpt_sidecar.routes import HERE, CoordinatorRoutes, RankPlaces

logger = logging.getLogger(__name__)

FORGET_S = 600.0
"""What is kept for a sidecar that serves no rank any more is dropped when it was silent for so long."""

PATIENCE = 2
"""How many times the node timeout a coordinator may be silent before ranks are told so: by then it has given up, or
committed, what it waited for from this node."""

Sockets = Callable[[list[zmq.Socket[bytes]]], None]


class Coordination:
    """Links to other nodes, opened when a Hello asks for them.

    Args:
        local: this sidecar.
        key_file, insecure: as ``keys_for`` takes them.
        node_timeout_s: a node that was not heard of for so long is given up for the saves in flight.
        watch, unwatch: have the main loop wake up for sockets, or no more.
    """

    def __init__(
        self,
        local: Local,
        *,
        key_file: Path | None,
        insecure: bool,
        node_timeout_s: float,
        watch: Sockets,
        unwatch: Sockets,
    ) -> None:
        self._local = local
        self._key_file = key_file
        self._insecure = insecure
        self._node_timeout_s = node_timeout_s
        self._watch = watch
        self._unwatch = unwatch
        self._routes = CoordinatorRoutes()
        self._places = RankPlaces()
        self._server: PeerServer | None = None
        self._clients: dict[str, PeerClient] = {}
        self._silent_s: dict[str, float] = {}

    # ------------------------------------------------------------ questions

    @property
    def unacked_parcels(self) -> int:
        """Messages that may not have arrived at other nodes yet."""
        links: list[PeerClient | PeerServer] = [*self._clients.values(), *([self._server] if self._server else [])]
        return sum(link.unacked_parcels for link in links)

    def described(self) -> tuple[str, ...]:
        """One line per link, for ``status``."""
        lines = [f"coordinator at {address}: {_state(link.is_up)}" for address, link in self._clients.items()]
        if self._server is not None:
            lines.append(f"coordinates at {self._server.address}")
            lines += [f"node {name} last heard {silent_s:.0f} s ago" for name, silent_s in self._silent_s.items()]
        return tuple(lines)

    def address(self, rank: int, message: Message) -> str:
        """Where a message of a rank, or about it, goes; empty for this process."""
        return self._routes.address(rank, message)

    def recall(self, hello: Hello) -> None:
        """What an earlier sidecar of this node knew of a rank: where the coordinator of its session is."""
        try:
            self._open_for(hello)
        except (CheckpointError, ValueError) as error:
            logger.error("what rank 0 had staged can be committed by another start only: %s", error)
        self._routes.learn(hello.rank, hello)

    # ------------------------------------------------------------ from this node to the coordinator

    def to_coordinator(self, rank: int, message: Message, now_s: float) -> list[Event]:
        """Hand on what a rank of this node says, or what is said about it; what has to be handled here is returned."""
        try:
            others: list[Event] = self._open_for(message) if isinstance(message, Hello) else []
            self._routes.learn(rank, message)
            address = self._routes.address(rank, message)
            if address == HERE:
                self._places.learn(rank, message, HERE)
                return [AtCoordinator(rank, message), *others]
            self._client(address, now_s).send(rank, message, now_s)
        except (CheckpointError, ValueError) as error:
            logger.error("rank %d cannot be heard by the coordinator: %s", rank, error)
            return [FromCoordinator(rank, Refused(report_of(error).at(rank, self._local.node)))]
        return []

    def _open_for(self, hello: Hello) -> list[Event]:
        """Rank 0 makes this sidecar the coordinator; any other rank has it connect to where rank 0 is."""
        address = hello.coordinator
        if hello.rank != 0 or not address or self._routes.served == address:
            return []
        if self._server is not None:
            self._unwatch(self._server.sockets)
            self._server.close()
        self._server = PeerServer(address, self._local, self._keys(address))
        self._watch(self._server.sockets)
        self._routes.served = address
        logger.info("coordinating the job at %s", self._server.address)
        mistaken = self._clients.pop(address, None)
        if mistaken is None:
            return []
        self._close(mistaken)
        return [CoordinatorUp()]  # ranks of this node came before rank 0, and spoke to nobody

    def _client(self, address: str, now_s: float) -> PeerClient:
        if address not in self._clients:
            client = PeerClient(address, self._local, self._keys(address), now_s)
            self._clients[address] = client
            self._watch(client.sockets)
            logger.info("connecting to the coordinator at %s", address)
        return self._clients[address]

    def _keys(self, address: str) -> PeerKeys | None:
        return keys_for(address, self._key_file, insecure=self._insecure)

    # ------------------------------------------------------------ from the coordinator to ranks

    def to_rank(self, rank: int, message: Message, now_s: float) -> list[Event]:
        """Hand on what the coordinator in this process says to a rank, wherever that is."""
        life = self._places.life(rank, message)
        if life == HERE:
            return [FromCoordinator(rank, message)]
        if self._server is not None:
            try:
                self._server.send(life, rank, message, now_s)
            except CheckpointError as error:
                logger.error("rank %d cannot be told: %s", rank, error)
        return []

    # ------------------------------------------------------------ from other nodes

    def receive(self, now_s: float) -> list[Event]:
        """Everything that has come from other nodes, as events for the tables."""
        events: list[Event] = []
        if self._server is not None:
            for event in self._server.receive(now_s):
                if isinstance(event, FromPeer) and event.rank != UNKNOWN_RANK:
                    self._places.learn(event.rank, event.message, event.life)
                    events.append(AtCoordinator(event.rank, event.message))
                elif isinstance(event, PeerUp):
                    logger.info("the sidecar of node %s is there (%s)", event.node, event.life)
        for address, client in list(self._clients.items()):
            for event in client.receive(now_s):
                events += self._from_coordinator(address, event)
        return events

    def _from_coordinator(self, address: str, event: FromPeer | PeerUp | PeerRefusal) -> list[Event]:
        if isinstance(event, PeerRefusal):
            return [CoordinatorRefuses(event.failure)]
        if isinstance(event, PeerUp):
            logger.info("the coordinator at %s is there (node %s)", address, event.node)
            return [CoordinatorUp()]
        self._routes.learn(event.rank, event.message)
        return [FromCoordinator(event.rank, event.message)]

    # ------------------------------------------------------------ time

    def tick(self, now_s: float) -> list[Event]:
        """Once a second: pings, what was not acked is said again, who is silent is told of."""
        events = [event for client in self._clients.values() if (event := self._unheard(client, now_s)) is not None]
        return [*events, *self._tick_server(now_s)] if self._server is not None else events

    def _unheard(self, client: PeerClient, now_s: float) -> Event | None:
        silent_s = client.tick(now_s).silent_s
        sessions = self._routes.sessions_at(client.address)
        if silent_s < self._node_timeout_s or not sessions:
            return None
        return CoordinatorSilent(client.address, sessions, silent_s, PATIENCE * self._node_timeout_s)

    def _tick_server(self, now_s: float) -> list[Event]:
        assert self._server is not None
        silences = self._server.tick(now_s)
        here = self._places.other_lives()
        for silence in silences:
            if silence.life not in here and silence.silent_s > FORGET_S:
                self._server.forget(silence.life)
        self._silent_s = {silence.node: silence.silent_s for silence in silences if silence.life in here}
        return [event for silence in silences if (event := self._gave_up(silence)) is not None]

    def _gave_up(self, silence: PeerSilence) -> Event | None:
        ranks = self._places.ranks_at(silence.life)
        if silence.silent_s < self._node_timeout_s or not ranks:
            return None
        return NodeSilent(silence.node, tuple(ranks), silence.silent_s)

    def keep_only(self, addresses: set[str]) -> None:
        """Close the links to coordinators that no rank and no unfinished save of this node needs any more."""
        for address in set(self._clients) - addresses:
            logger.info("no longer connected to the coordinator at %s", address)
            self._close(self._clients.pop(address))

    def close(self) -> None:
        """Close every link; what is queued is sent for at most a second."""
        for client in self._clients.values():
            client.close()
        if self._server is not None:
            self._server.close()

    def _close(self, client: PeerClient) -> None:
        self._unwatch(client.sockets)
        client.close()


def _state(is_up: bool) -> str:
    return "connected" if is_up else "not reached"
