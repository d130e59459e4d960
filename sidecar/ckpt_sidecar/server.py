"""The sidecar's socket for its own node: frames in, messages out. Between nodes: ``peer_server``, ``peer_client``.

One ROUTER on an ipc path in the job's private directory. Who may talk is decided three times: by the mode of the
directory, by libzmq's uid filter (set before bind, or it has no effect), and by the peer's credentials from the kernel.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import zmq

from ckpt_proto.codec import MAX_MESSAGE_BYTES, decode, encode
from ckpt_proto.errors import RemoteProtocolError, report_of
from ckpt_proto.messages import Hello, Message, Refused
from ckpt_proto.runtime_dir import endpoint, socket_path
from ckpt_sidecar.events import UNKNOWN_PID

_CREDENTIALS = struct.Struct("3i")
MAX_QUEUED = 10_000
"""Messages kept for one slow client; steady state has a handful per save."""

logger = logging.getLogger(__name__)


class Server:
    """The socket, owned by the daemon's main thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.set(zmq.SNDHWM, MAX_QUEUED)
        self._socket.set(zmq.RCVHWM, MAX_QUEUED)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.set(zmq.IPC_FILTER_UID, os.geteuid())
        socket_path(directory).unlink(missing_ok=True)
        self._socket.bind(endpoint(directory))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def wake_by(self, fd: int) -> None:
        """Let :meth:`wait` also return when ``fd`` becomes readable."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Wait for a message, a wake-up or the timeout."""
        self._poller.poll(max(0, round(timeout_s * 1000)))

    def receive(self) -> Iterator[tuple[bytes, int, Message]]:
        """Every message that is there: ``(peer, pid, message)``. A bad frame is answered with Refused and dropped."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer, body = frames[0].bytes, frames[-1]
            try:
                if len(frames) != 2:
                    raise RemoteProtocolError(f"a message of {len(frames)} frames, expected 2")
                message = decode(body.buffer)
                # Only a Hello needs it, and it waits for the answer: the connection of a rank that was killed right
                # after it submitted is gone already, its message counts all the same.
                pid = _peer_pid(body) if isinstance(message, Hello) else UNKNOWN_PID
            except RemoteProtocolError as error:
                logger.warning("refused a message: %s", error)
                self.send(peer, Refused(report_of(error)))
                continue
            yield peer, pid, message

    def send(self, peer: bytes, message: Message) -> None:
        """Queue a message; one for a client that has gone is dropped, as its death is noticed elsewhere."""
        self._socket.send_multipart([peer, encode(message)])

    def close(self) -> None:
        """Send what is queued (at most a second), close, remove the socket's file."""
        self._socket.close()
        self._context.term()
        socket_path(self._directory).unlink(missing_ok=True)


def _peer_pid(frame: zmq.Frame) -> int:
    """Pid of the sender from the kernel; 0 if it lives in another pid namespace.

    Raises:
        RemoteProtocolError: the sender is of another user, or its connection is gone.
    """
    fd = frame.get(zmq.SRCFD)
    try:
        with socket.socket(fileno=os.dup(int(fd))) as connection:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError as error:
        raise RemoteProtocolError(f"cannot tell who sent a message: {error}") from error
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise RemoteProtocolError(f"a message of user {uid}; this sidecar serves user {os.geteuid()}")
    return int(pid)
