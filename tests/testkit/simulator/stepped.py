"""The client's real parts, without its threads: what blocks there is asked again here, one step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import FinalPlan, Hello, MakeGlobalPlan, Message, Pong, ProposePlan, RegionReady
from ckpt_trainer_client.config import ClientConfig
from ckpt_trainer_client.connection import Connection
from ckpt_trainer_client.handshake import Handshake
from ckpt_trainer_client.plan_exchange import PlanExchange
from ckpt_trainer_client.region_pool import RegionPool, RegionRequest
from ckpt_trainer_client.saves_in_flight import SavesInFlight


class SteppedPool(RegionPool):
    """``acquire`` and ``grow`` as questions that may be asked again."""

    def try_acquire(self, request: RegionRequest, asked: set[tuple[int, int]], waited_s: float) -> RegionReady | None:
        """One round of ``acquire``: None if it would wait on."""
        with self._changed:
            request.check()
            ready = self._take_free(request)
            if ready is not None:
                return ready
            self._ask(request, asked)
            self._raise_if_hopeless(request)
            if waited_s > request.timeout_s:
                self._raise_late(request, request.timeout_s)
            return None

    def try_grow(
        self, ready: RegionReady, request: RegionRequest, capacity: int, asked: set[tuple[int, int]]
    ) -> RegionReady | None:
        """One round of ``grow``: None if it would wait on."""
        with self._changed:
            request.check()
            return self._grown(ready, request, capacity, asked)


class SteppedExchange(PlanExchange):
    """``exchange`` as questions that may be asked again."""

    def propose(self, proposal: ProposePlan) -> None:
        """The beginning of ``exchange``."""
        with self._arrived:
            self._proposed = proposal
        self._send(proposal)

    def end(self) -> None:
        """The end of ``exchange``."""
        with self._arrived:
            self._proposed = None

    def take(self, save: SaveKey) -> FinalPlan | MakeGlobalPlan | None:
        """One round of ``_next``: None if it would wait on."""
        with self._arrived:
            return self._at_hand(save)


class _Inline:
    """``ckpt-callbacks`` that is never late: the order in which handles are resolved is the order of what arrives."""

    def submit(self, work: Callable[[], None]) -> None:
        work()


class _Later:
    """``ckpt-decide``: hooks that run when a step is given to them."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        self.work.append(work)


class _Link:
    """``ckpt-link``: what is sent goes to the simulated connection."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self.send = send


class SteppedHandshake(Handshake):
    """Without the seconds between two Hellos."""

    def on_pong(self, pong: Pong) -> None:
        if not pong.known:
            self.say_hello()


class SteppedConnection(Connection):
    """The real connection on a simulated link, of a simulated process."""

    def __init__(
        self, config: ClientConfig, pid: int, send: Callable[[Message], None], hooks: tuple[Callable[..., object], ...]
    ) -> None:
        super().__init__(config, hooks, ())
        self.pid = pid
        self._torch_version = "2.13.0"
        self._link: Any = _Link(send)
        self._callbacks: Any = _Inline()
        self._handshake: SteppedHandshake = SteppedHandshake(config, send, self._hello)
        self._later = _Later()
        self._decisions._thread = self._later  # type: ignore[assignment]
        self.saves = SavesInFlight(self._callbacks)
        self.pool: SteppedPool = SteppedPool(config.slots)
        self.exchange: SteppedExchange = SteppedExchange(self.send, config.stage_timeout_s)

    def say_hello(self) -> None:
        """What ``open`` sends first."""
        self._link.send(self._hello())

    def hear(self, message: Message) -> None:
        """Something arrives."""
        self._on_message(message)

    def decide(self) -> bool:
        """A hook ends; False if none runs."""
        if not self._later.work:
            return False
        self._later.work.popleft()()
        return True

    def give_up_sidecar(self) -> None:
        """``_on_beat`` after the client's own bound without a sidecar."""
        self._fail_all("SidecarLost", "no sidecar ran", "see the sidecar's log")

    @property
    def is_welcome(self) -> bool:
        """Whether ``open`` has returned."""
        return self._handshake.is_welcome

    @property
    def is_refused(self) -> bool:
        """Whether the client raises, or can save nothing any more."""
        return self._handshake.is_refused

    def _hello(self) -> Hello:
        return replace(super()._hello(), pid=self.pid, process_start_s=float(self.pid))
