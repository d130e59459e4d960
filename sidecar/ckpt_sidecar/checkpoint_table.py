"""The coordinator: plans and attempts of the whole job. Pure: events in, actions out.

It talks to ranks (through the sidecars of their nodes) and never to storage; it sees no region and no byte. Who takes
part is ``membership``'s business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import (
    AskRestoreStep,
    Hello,
    Message,
    RankLeft,
    Welcome,
)
from ckpt_sidecar.actions import Action, OpenDirectory, ToRank
from ckpt_sidecar.attempt import DECIDE_TIMEOUT_S, PERSIST_TIMEOUT_S, Attempt
from ckpt_sidecar.attempt_book import MAX_ENDED_ATTEMPTS
from ckpt_sidecar.attempt_table import AttemptTable
from ckpt_sidecar.attempt_watch import AttemptWatch
from ckpt_sidecar.counters import Counters
from ckpt_sidecar.events import (
    AtCoordinator,
    DirectoryOpened,
    DirectoryRefused,
    Event,
    NodeSilent,
    Published,
    PublishFailed,
    ShardsListed,
    Tick,
    WithdrawFailed,
    Withdrawn,
)
from ckpt_sidecar.membership import Departure, Membership
from ckpt_sidecar.routes import session_of
from ckpt_sidecar.session import Session

__all__ = ["COORDINATOR_EVENTS", "DECIDE_TIMEOUT_S", "MAX_ENDED_ATTEMPTS", "PERSIST_TIMEOUT_S", "CheckpointTable"]


COORDINATOR_EVENTS = (
    AtCoordinator,
    DirectoryOpened,
    DirectoryRefused,
    NodeSilent,
    PublishFailed,
    Published,
    ShardsListed,
    Tick,
    WithdrawFailed,
    Withdrawn,
)
"""The events that :class:`CheckpointTable` takes; all others are the job table's."""


class CheckpointTable:
    """The coordinator's decisions. ``handle`` is the only method that changes anything."""

    def __init__(self, new_token: Callable[[], str], *, retry_s: float = 30.0, stall_s: float = 600.0) -> None:
        """``new_token`` draws a session's name; ``retry_s``: how long publishing that fails is tried again;
        ``stall_s``: how long storage may take to publish."""
        self._members = Membership(new_token)
        self._attempts = AttemptTable(self._members, retry_s, stall_s)
        self._end = self._attempts.end
        self._watch = AttemptWatch(self._members, self._attempts)

    # ------------------------------------------------------------ questions

    @property
    def session(self) -> Session | None:
        """The session of now."""
        return self._members.session

    @property
    def steps(self) -> dict[str, set[int]]:
        """The committed steps by directory."""
        return self._members.steps

    @property
    def attempts(self) -> dict[tuple[str, int], Attempt]:
        """The attempts that are remembered, by session and number."""
        return self._attempts.book.attempts

    @property
    def counters(self) -> Counters:
        """How attempts have ended so far."""
        return self._attempts.counters

    @property
    def is_busy(self) -> bool:
        """Whether an attempt can still end in a commit."""
        return self._attempts.book.is_busy or self._members.is_opening

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event, return what to do."""
        match event:
            case AtCoordinator(rank=rank, message=message):
                return self._from_rank(rank, message, now_s)
            case DirectoryOpened(directory=directory, steps=steps):
                return self._joined(self._members.opened(directory, steps), now_s)
            case DirectoryRefused(directory=directory, failure=failure):
                return self._members.refused(directory, failure)
            case Published(save=save):
                return self._end.published(save, now_s)
            case PublishFailed():
                return self._end.not_published(event, now_s)
            case Withdrawn():
                return self._end.withdrawn(event, now_s)
            case WithdrawFailed():
                return self._end.not_withdrawn(event, now_s)
            case ShardsListed():
                return self._watch.listed(event, now_s)
            case NodeSilent():
                return self._watch.node_silent(event, now_s)
            case Tick():
                return [*self._sparing(self._members.sweeps()), *self._watch.tick(now_s)]
        return []

    def _from_rank(self, rank: int, message: Message, now_s: float) -> list[Action]:
        if not isinstance(message, Hello):
            self._members.heard(rank, session_of(message))
        match message:
            case Hello():
                actions, departures = self._members.hello(message)
                return self._joined((self._sparing(actions), departures), now_s)
            case RankLeft():
                departure = self._members.left(message)
                self._members.remember_to_sweep(message)
                return self._attempts.depart(departure, now_s) if departure else []
            case AskRestoreStep():
                return self._members.ask(rank, message, must_wait=self._end.earlier_life_is_busy())
        save: SaveKey | None = getattr(message, "save", None)
        return self._attempts.about(save, rank, message, now_s) if save is not None else []

    def _sparing(self, actions: list[Action]) -> list[Action]:
        """Whoever looks through a directory keeps away from attempts that are in hand here."""
        in_hand = self._attempts.book.in_hand
        return [
            replace(action, spare=(*action.spare, *in_hand)) if isinstance(action, OpenDirectory) else action
            for action in actions
        ]

    def _joined(self, outcome: tuple[list[Action], list[Departure]], now_s: float) -> list[Action]:
        actions, departures = outcome
        before: list[Action] = []
        for departure in departures:
            before += self._attempts.depart(departure, now_s)
        for action in actions:
            if isinstance(action, ToRank) and action.rank == 0 and isinstance(action.message, Welcome):
                actions = [*actions, *self._attempts.ask_again(action.message.session)]
        return [*before, *actions]
