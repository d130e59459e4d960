"""How a client and the sidecar meet and part: Hello until a Welcome, Hello again when it does not know us, Goodbye."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ckpt_proto.errors import SidecarUnreachable
from ckpt_proto.messages import Farewell, Goodbye, Hello, Message, Pong, Refused, Welcome
from ckpt_trainer_client.config import ClientConfig
from ckpt_trainer_client.errors import SidecarRefused
from ckpt_trainer_client.sidecar_start import ensure_sidecar, sidecar_runs

HELLO_AGAIN_S = 5.0
"""A Hello after which the sidecar still does not know us for so long was lost with one that died."""


class Handshake:
    """Thread rule: :meth:`meet` and :meth:`part` are for the trainer's thread, the rest for the link's.

    Args:
        config: the client's.
        send: queues a message for the sidecar.
        hello: what to say; asked for anew each time.
    """

    def __init__(self, config: ClientConfig, send: Callable[[Message], None], hello: Callable[[], Hello]) -> None:
        self._config = config
        self._send = send
        self._hello = hello
        self._changed = threading.Condition()
        self._welcome: Welcome | None = None
        self._refused: Refused | None = None
        self._farewell = False
        self._closing = False
        self._hello_sent_s = -HELLO_AGAIN_S
        self._greeted = ""  # the sidecar that the last Hello was meant for, as far as known

    @property
    def is_welcome(self) -> bool:
        """Whether a sidecar has ever welcomed this client."""
        return self._welcome is not None

    @property
    def is_refused(self) -> bool:
        """Whether the sidecar, or the coordinator, will not have this client."""
        return self._refused is not None

    @property
    def is_parting(self) -> bool:
        """Whether Goodbye has been said."""
        return self._closing

    # ------------------------------------------------------------ on the trainer's thread

    def meet(self, deadline: float) -> None:
        """Find or start a sidecar and be welcomed by it, until ``deadline`` in ``time.monotonic()`` seconds.

        Raises:
            SidecarUnreachable, SidecarRefused: as the client's constructor says.
        """
        while True:
            ensure_sidecar(self._config, deadline)
            if self._welcome is not None:
                return  # a Hello that was sent to an earlier sidecar has reached this one
            with self._changed:
                self._refused = None
            self.say_hello()
            answer = self._await_answer(deadline)
            if isinstance(answer, Welcome):
                return
            if answer is not None and answer.failure.kind != "SidecarDraining":
                raise SidecarRefused(answer.failure)
            if time.monotonic() > deadline:
                raise SidecarUnreachable(
                    f"the sidecar of job {self._config.job_id} has not welcomed rank {self._config.rank} within "
                    f"{self._config.connect_timeout_s:.0f} s{self._coordinator_hint()}"
                )

    def _coordinator_hint(self) -> str:
        address = self._config.coordinator
        if not address or self._config.rank == 0:
            return ""
        return (
            f": the coordinator, the sidecar of rank 0's node, has not answered at {address}; is rank 0 up, and can "
            "this node reach that port? (another address: CKPT_SIDECAR_COORDINATOR=HOST:PORT on every node)"
        )

    def _await_answer(self, deadline: float) -> Welcome | Refused | None:
        """The answer to a Hello; None if the sidecar has gone or drains, and another Hello is due."""
        with self._changed:
            while True:
                if self._welcome is not None:
                    return self._welcome
                if self._refused is not None:
                    if self._refused.failure.kind == "SidecarDraining":
                        self._changed.wait(0.1)
                    return self._refused
                if time.monotonic() > deadline:
                    return None
                if not self._changed.wait(1.0) and not sidecar_runs(self._config.runtime_dir):
                    return None

    def part(self, deadline: float) -> bool:
        """Say Goodbye and wait for the Farewell; a sidecar that is away is not waited for.

        Returns:
            Whether it has answered.
        """
        self._closing = True
        self._send(Goodbye())
        with self._changed:
            while not self._farewell and self._refused is None and time.monotonic() < deadline:
                if not self._changed.wait(0.5) and not sidecar_runs(self._config.runtime_dir):
                    return self._farewell
            return self._farewell

    # ------------------------------------------------------------ on the link's thread

    def say_hello(self) -> None:
        """Say who we are."""
        self._hello_sent_s = time.monotonic()
        self._send(self._hello())

    def on_pong(self, pong: Pong) -> None:
        """A sidecar that does not know us is a new one, or has never got our Hello."""
        same = self._greeted in ("", pong.sidecar_id)
        if pong.known or (same and time.monotonic() - self._hello_sent_s < HELLO_AGAIN_S):
            return  # heartbeats that queued while the sidecar was away are all answered alike: one Hello will do
        self._greeted = pong.sidecar_id
        self.say_hello()
        if self._closing:
            self._send(Goodbye())  # the one that was said has gone with the sidecar that it was said to

    def on_answer(self, answer: Welcome | Refused | Farewell) -> None:
        """The answer to Hello or Goodbye, when everything that follows from it has been done."""
        with self._changed:
            match answer:
                case Welcome():
                    self._welcome, self._greeted = answer, answer.sidecar_id
                case Refused():
                    self._refused = answer
                case Farewell():
                    self._farewell = True
            self._changed.notify_all()
