"""What lies under the link between sidecars: socket options with their reasons, the door, and the log of who failed.

Everything is polled by the thread that owns the link; nothing here starts a thread. libzmq drops a connection that
fails to authenticate without a word, so its monitor is what tells the address and the reason.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket as stdlib_socket
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from ckpt_proto.coordinator_address import is_loopback, join_address, split_address
from ckpt_proto.errors import CheckpointError
from ckpt_proto.peer_messages import MAX_PARCEL_BYTES
from ckpt_sidecar.peer_keys import ZAP_ENDPOINT, zap_answer

MAX_FRAME_BYTES = MAX_PARCEL_BYTES + 4096
MAX_QUEUED = 1000
DEAD_AFTER_MS = 10_000
MAX_COMPLAINTS = 1000
UNKNOWN_HOST = "a host that was gone at once"

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_REASONS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "one side has a key and the other has none",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "the two sides have different keys",
}

logger = logging.getLogger(__name__)


class PeerAddressTaken(CheckpointError):
    """The coordinator cannot listen where the other nodes will look for it."""


def configure(socket: zmq.Socket[bytes]) -> None:
    """Options of both sides; to be set before bind and connect.

    No TCP keep-alive and no ZMTP heartbeat: both sides say something every second, so a connection whose other end is
    gone always has bytes that are not acked, and the kernel ends it after ``TCP_MAXRT``. A heartbeat would also end one
    that is busy with a single large parcel. ZeroMQ then connects again, and ``delivery`` sends again what was lost.
    """
    socket.set(zmq.TCP_MAXRT, DEAD_AFTER_MS)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)  # a larger one ends the connection before it is taken into memory
    # Above the window of a delivery; what does not fit is dropped, and sent again later.
    socket.set(zmq.SNDHWM, MAX_QUEUED)
    socket.set(zmq.RCVHWM, MAX_QUEUED)
    socket.set(zmq.LINGER, 1000)  # the last words of a sidecar that ends, but not for a node that is gone
    socket.set(zmq.IPV6, 1)  # takes IPv4 too; falls back to it where the kernel has no IPv6
    socket.set(zmq.HANDSHAKE_IVL, 10_000)


def configure_client(socket: zmq.Socket[bytes]) -> None:
    """Options of the side that connects."""
    # Without it, every ping of a long absence waits for the connection and arrives in one heap; delivery knows better
    # what to send again.
    socket.set(zmq.IMMEDIATE, 1)
    socket.set(zmq.RECONNECT_IVL, 100)
    socket.set(zmq.RECONNECT_IVL_MAX, 2000)
    socket.set(zmq.CONNECT_TIMEOUT, 5000)  # the kernel's own is two minutes: a link that heals is found in seconds


def listen(socket: zmq.Socket[bytes], address: str) -> str:
    """Bind to a loopback address, or for any other to its port on all interfaces: a host name in ``address`` is what
    other nodes call this one, and need not be a name of an interface here (NAT, Kubernetes services).

    Returns:
        ``host:port`` that was bound; the port is drawn by the kernel if it is 0 in ``address``.

    Raises:
        PeerAddressTaken: somebody has the port, or it must not be used.
    """
    host, port = split_address(address)
    bound = _numeric(host) if is_loopback(host) else "*"
    try:
        socket.bind(f"tcp://{join_address(bound, port)}")
    except zmq.ZMQError as error:
        raise PeerAddressTaken(
            f"the coordinator cannot listen on port {port} ({error.strerror}){_holder_of(port)}: end that, or set "
            f"CKPT_SIDECAR_COORDINATOR=HOST:PORT with another port, the same on every node of this job"
        ) from error
    actual = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
    return join_address(host, int(actual.rpartition(":")[2]))


def endpoint_of(address: str) -> str:
    """``host:port`` as the ZeroMQ address to connect to."""
    host, port = split_address(address)
    return f"tcp://{join_address(_numeric(host), port)}"


def _numeric(host: str) -> str:
    """``localhost`` as a number: both sides must mean the same one, and bind takes no names."""
    return "127.0.0.1" if host.lower().rstrip(".") == "localhost" else host


def _holder_of(port: int) -> str:
    """Who listens on ``port`` on this machine, for the error text; empty if that cannot be seen."""
    import psutil  # takes a while to import and is needed by an error only

    try:
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and getattr(connection.laddr, "port", None) == port
                and connection.pid
            ):
                return f": process {connection.pid} ({psutil.Process(connection.pid).name()}) has it"
    except (psutil.Error, OSError):
        pass  # a hint only: of another user, or gone meanwhile
    return ""


class Complaints:
    """Logs the same complaint the 1st, 2nd, 4th, 8th... time: whoever is refused tries again every second."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def log(self, text: str) -> bool:
        """Whether it was logged this time."""
        if text not in self._counts and len(self._counts) >= MAX_COMPLAINTS:
            self._counts.clear()
        count = self._counts[text] = self._counts.get(text, 0) + 1
        due = count & (count - 1) == 0
        if due:
            logger.warning("%s%s", text, f" ({count} times)" if count > 1 else "")
        return due


class Doorkeeper:
    """Answers libzmq's question who may come in (ZAP). To be made before the socket that it guards is bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], public: bytes, complaints: Complaints) -> None:
        self._public = public
        self._complaints = complaints
        self.socket = context.socket(zmq.REP)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def answer_all(self) -> None:
        """Answer everybody who waits at the door; nobody gets in before."""
        while True:
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            answer, refusal = zap_answer(request, self._public)
            self.socket.send_multipart(answer)
            if refusal:
                self._complaints.log(f"refused the sidecar at {refusal}")


@dataclass(frozen=True)
class FailedHandshake:
    """A connection that ended before a message could come through. ``host`` is empty for one that this side has made.

    ``certain``: it cannot have been an accident, such as the end of the other process in this very moment.
    """

    host: str
    reason: str
    certain: bool


class HandshakeLog:
    """Reads the monitor of a socket: which connections failed before a message could come through, and why.

    ``begun`` counts the connections that messages can come through, ``ended`` all that have ended, also those.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._watched = socket
        self._hosts: dict[int, str] = {}
        self._failed: tuple[int, int] | None = None
        self.begun = self.ended = 0
        endpoint = f"inproc://peer-monitor-{secrets.token_hex(8)}"
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED
        socket.monitor(endpoint, events)
        self.socket = socket.context.socket(zmq.PAIR)
        self.socket.set(zmq.RCVHWM, 0)  # with a limit the I/O thread would wait for us in the middle of its work
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def read(self) -> list[FailedHandshake]:
        """What has failed since the last call."""
        found: list[FailedHandshake] = []
        while True:
            try:
                event = recv_monitor_message(self.socket, zmq.NOBLOCK)
            except zmq.Again:
                return found
            kind, value = event["event"], event["value"]
            if kind == zmq.EVENT_ACCEPTED:
                self._hosts[value] = _host_of(value)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.begun += 1
            elif kind & _FAILED:
                self._failed = (kind, value)
            elif kind == zmq.EVENT_DISCONNECTED:  # comes right after, and is the one that has the descriptor
                self.ended += 1
                host = self._hosts.pop(value, "")
                if self._failed:
                    found.append(_describe(host, *self._failed))
                self._failed = None

    def close(self) -> None:
        """Stop to watch; before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close()


def _describe(host: str, kind: int, value: int) -> FailedHandshake:
    if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return FailedHandshake(host, "the key was refused", certain=True)
    if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        reason = _REASONS.get(value, f"that is no handshake of a sidecar (error {value:#x})")
        return FailedHandshake(host, reason, certain=True)
    return FailedHandshake(host, "the connection was closed in the handshake, as when keys differ", certain=False)


def _host_of(fd: int) -> str:
    """The other end of a connection of libzmq's, which may be closed by now: whoever fails is gone in a moment."""
    try:
        copy = os.dup(fd)
    except OSError:
        return UNKNOWN_HOST
    try:
        connection = stdlib_socket.socket(fileno=copy)
    except OSError:
        os.close(copy)  # the number has become something else meanwhile, no socket
        return UNKNOWN_HOST
    with connection:
        try:
            return str(connection.getpeername()[0]).removeprefix("::ffff:")
        except (OSError, IndexError):
            return UNKNOWN_HOST  # another kind of socket, or connected no longer
