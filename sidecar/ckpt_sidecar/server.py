"""The sidecar's socket for its own node: frames in, messages out. Between nodes: ``peer_server``, ``peer_client``.

One ROUTER on an ipc path in the job's private directory. Who may talk is decided three times: by the mode of the
directory, by libzmq's uid filter (set before bind, or it has no effect), and by the peer's credentials from the kernel.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from ckpt_proto.codec import MAX_MESSAGE_BYTES, decode, encode
from ckpt_proto.errors import LocalProtocolError, RemoteProtocolError, report_of
from ckpt_proto.messages import Hello, Message, Refused
from ckpt_proto.runtime_dir import endpoint, socket_path
from ckpt_sidecar.events import UNKNOWN_PID

_CREDENTIALS = struct.Struct("3i")
MAX_QUEUED = 1_000
"""Messages kept for one slow client, and of one that is faster than the loop; steady state has a handful per save."""
MAX_RECEIVED = 200
"""Messages taken in before the loop looks at its workers and its clock again: a few milliseconds' worth."""
MAX_DESCRIPTORS = 1 << 16
REFUSALS_LOGGED_EVERY_S = 1.0

logger = logging.getLogger(__name__)


class Server:
    """The socket, owned by the daemon's main thread. ``clock`` gives monotonic seconds."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        _allow_many_connections()
        self._directory = directory
        self._clock = clock
        self._refused = 0
        self._refusals_logged_s = -REFUSALS_LOGGED_EVERY_S
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

    def watch(self, sockets: list[zmq.Socket[bytes]]) -> None:
        """Let :meth:`wait` also return when one of these sockets has something to read."""
        for other in sockets:
            self._poller.register(other, zmq.POLLIN)

    def unwatch(self, sockets: list[zmq.Socket[bytes]]) -> None:
        """Undo :meth:`watch`; before they are closed."""
        for other in sockets:
            self._poller.unregister(other)

    def wait(self, timeout_s: float) -> None:
        """Wait for a message, a wake-up or the timeout."""
        self._poller.poll(max(0, round(timeout_s * 1000)))

    def receive(self) -> Iterator[tuple[bytes, int, Message]]:
        """Messages that are there, at most :data:`MAX_RECEIVED`: ``(peer, pid, message)``. A bad frame is answered with
        Refused and dropped."""
        for _ in range(MAX_RECEIVED):
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
                self._log_refusal(error)
                self.send(peer, Refused(report_of(error)))
                continue
            yield peer, pid, message

    def send(self, peer: bytes, message: Message) -> None:
        """Queue a message; one for a client that has gone is dropped, as its death is noticed elsewhere.

        In place of one that is too large to be sent the client gets Refused, which names both numbers: it fails what it
        waits for, and the sidecar goes on serving the others.
        """
        try:
            frame = encode(message)
        except LocalProtocolError as error:
            logger.error("%s", error)
            frame = encode(Refused(report_of(error)))
        self._socket.send_multipart([peer, frame])

    def _log_refusal(self, error: RemoteProtocolError) -> None:
        """One line a second, however fast bad frames come: the log may lie in shared memory."""
        self._refused += 1
        now_s = self._clock()
        if now_s - self._refusals_logged_s >= REFUSALS_LOGGED_EVERY_S:
            logger.warning("refused messages: %d since the last such line, the newest: %s", self._refused, error)
            self._refused, self._refusals_logged_s = 0, now_s

    def close(self) -> None:
        """Send what is queued (at most a second), close, remove the socket's file."""
        self._socket.close()
        self._context.term()
        socket_path(self._directory).unlink(missing_ok=True)


def _allow_many_connections() -> None:
    """Take as many descriptors as the system gives: libzmq ends the process when a connection finds none left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _peer_pid(frame: zmq.Frame) -> int:
    """Pid of the sender from the kernel; 0 if it lives in another pid namespace.

    Raises:
        RemoteProtocolError: the sender is of another user, or its connection is gone.
    """
    try:
        copy = os.dup(int(frame.get(zmq.SRCFD)))
    except OSError as error:
        raise RemoteProtocolError(f"cannot tell who sent a message: {error}") from error
    try:
        connection = socket.socket(fileno=copy)
    except OSError as error:
        os.close(copy)  # the number has become something else meanwhile, no socket
        raise RemoteProtocolError(f"cannot tell who sent a message: {error}") from error
    try:
        with connection:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError as error:
        raise RemoteProtocolError(f"cannot tell who sent a message: {error}") from error
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise RemoteProtocolError(f"a message of user {uid}; this sidecar serves user {os.geteuid()}")
    return int(pid)
