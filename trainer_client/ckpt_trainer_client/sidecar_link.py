"""The one thread and the one socket between a rank and its sidecar. The only ZeroMQ user of the client.

`ckpt-link` owns the DEALER socket: other threads hand it messages through a queue, and what arrives is handed to
``on_message`` on this thread, which must be quick and must not run user code. It sends a heartbeat every second;
libzmq reconnects by itself when the sidecar is restarted, and the new sidecar asks for a Hello through Pong.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq

from ckpt_proto.codec import MAX_MESSAGE_BYTES, decode, encode
from ckpt_proto.errors import RemoteProtocolError
from ckpt_proto.messages import Heartbeat, Message
from ckpt_proto.runtime_dir import endpoint

HEARTBEAT_S = 1.0

logger = logging.getLogger(__name__)


class SidecarLink:
    """Started by :meth:`start`, ended by :meth:`close`; ``send`` may be called from any thread in between.

    ``step_s`` says what goes into a heartbeat.
    ``on_beat`` is called once a second on the link's thread, after the heartbeat was sent; ``on_failure`` once, last,
    if the thread ends by an error of ours.
    """

    def __init__(
        self,
        directory: Path,
        on_message: Callable[[Message], None],
        on_beat: Callable[[], None],
        on_failure: Callable[[Exception], None],
        step_s: Callable[[], float] = float,
    ) -> None:
        self._directory = directory
        self._on_message = on_message
        self._on_beat = on_beat
        self._on_failure = on_failure
        self._step_s = step_s
        self._outgoing: deque[bytes] = deque()
        # Guards the wake-up descriptor only: once it is closed its number may be somebody else's.
        self._sending = threading.Lock()
        self._stop = False
        self._beat = False
        self._asked_s: float | None = None  # when the oldest heartbeat was sent that has no answer

    @property
    def silent_s(self) -> float:
        """For how many seconds the sidecar owes an answer. Not since it was heard: this process may have been stopped
        itself."""
        return time.monotonic() - self._asked_s if self._asked_s is not None else 0.0

    def start(self) -> None:
        """Connect (lazily: libzmq waits for the socket to appear) and start the thread."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.connect(endpoint(self._directory))
        self._thread = threading.Thread(target=self._run, name="ckpt-link", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue a message."""
        frame = encode(message)
        with self._sending:
            if self._stop:
                logger.debug("dropped a message: the link is closed")
                return
            self._outgoing.append(frame)
            os.eventfd_write(self._wake_fd, 1)

    def start_heartbeat(self) -> None:
        """From now on send heartbeats: the answer tells whether the sidecar knows us, also before the first Welcome."""
        self._beat = True

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is queued, end the thread, close the socket."""
        with self._sending:
            self._stop = True
            os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RuntimeError(f"the thread ckpt-link has not ended within {timeout_s} s")
        os.close(self._wake_fd)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        next_beat_s = time.monotonic()
        try:
            while True:
                poller.poll(max(0, round((next_beat_s - time.monotonic()) * 1000)))
                self._clear_wake()
                self._receive_all()
                if self._beat and time.monotonic() >= next_beat_s:
                    self._ask()
                    self._on_beat()
                if time.monotonic() >= next_beat_s:
                    next_beat_s = time.monotonic() + HEARTBEAT_S
                self._send_all()
                if self._stop and not self._outgoing:
                    return
        except Exception as error:
            logger.critical("the link to the sidecar has failed: no save can succeed any more", exc_info=True)
            self._on_failure(error)
        finally:
            self._socket.close(linger=1000)
            self._context.term()

    def _ask(self) -> None:
        if not self._outgoing:  # else what waits there is answered too, and a sidecar that is away may be so for days
            self._outgoing.append(encode(Heartbeat(self._step_s())))
        if self._asked_s is None:
            self._asked_s = time.monotonic()

    def _clear_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass  # woken by the socket or the clock

    def _receive_all(self) -> None:
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._asked_s = None
            try:
                message = decode(frame.buffer)
            except RemoteProtocolError as error:
                logger.error("dropped a message of the sidecar: %s", error)
                continue
            try:
                self._on_message(message)
            except Exception:
                # One message that we cannot take must not cost all saves to come.
                logger.exception("a %s of the sidecar could not be taken in", type(message).__name__)

    def _send_all(self) -> None:
        while self._outgoing:
            try:
                self._socket.send(self._outgoing[0], zmq.NOBLOCK)
            except zmq.Again:
                if self._stop:
                    self._outgoing.clear()
                return  # the sidecar is away; tried again at the next beat
            self._outgoing.popleft()
