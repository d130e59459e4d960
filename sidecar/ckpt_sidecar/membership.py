"""Who takes part: handshakes, sessions and the step to restore, at the coordinator. Pure.

One session at a time. A Hello joins it, begins the next one if it is over, or is refused; the directory is looked at
anew whenever a session begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ckpt_proto.errors import FailureReport
from ckpt_proto.messages import AskRestoreStep, Hello, RankLeft, Refused, RestoreStep, Welcome
from ckpt_sidecar.events import Action, OpenDirectory, ToRank
from ckpt_sidecar.session import Session

KEPT_SESSIONS: Final = 8
"""Sessions remembered for ranks that are late to leave them."""


@dataclass(frozen=True)
class Departure:
    """A rank has left the session ``token``; ``reason`` is empty if it said goodbye."""

    token: str
    rank: int
    reason: str


class Membership:
    """The sessions of one job.

    ``steps`` are the committed steps by directory, kept up by the owner after each commit.
    """

    def __init__(self, new_token: Callable[[], str]) -> None:
        self._new_token = new_token
        self._tokens: set[str] = set()
        self._joining: list[Hello] = []
        self._asking: list[tuple[int, AskRestoreStep]] = []
        self._past: dict[str, Session] = {}
        self.session: Session | None = None
        self.steps: dict[str, set[int]] = {}

    # ------------------------------------------------------------ coming

    def hello(self, hello: Hello) -> tuple[list[Action], list[Departure]]:
        """A rank asks to take part."""
        session = self.session
        refusal = session.refusal(hello) if session else None
        if refusal is not None:
            return [ToRank(hello.rank, Refused(refusal))], []
        if session is not None and not session.ended_by(hello):
            return self._join(hello)
        known = any(other.directory == hello.directory for other in self._joining)
        self._joining.append(hello)
        return ([] if known else [OpenDirectory(hello.directory)]), []

    def opened(self, directory: str, steps: tuple[int, ...]) -> tuple[list[Action], list[Departure]]:
        """The directory can be used: those who waited for it join."""
        self.steps[directory] = set(steps)
        actions: list[Action] = []
        departures: list[Departure] = []
        for hello in self._take_joining(directory):
            more_actions, more_departures = self._join(hello)
            actions += more_actions
            departures += more_departures
        return actions, departures

    def refused(self, directory: str, failure: FailureReport) -> list[Action]:
        """The directory cannot be used."""
        return [ToRank(hello.rank, Refused(failure)) for hello in self._take_joining(directory)]

    def _take_joining(self, directory: str) -> list[Hello]:
        mine = [hello for hello in self._joining if hello.directory == directory]
        self._joining = [hello for hello in self._joining if hello.directory != directory]
        return mine

    def _join(self, hello: Hello) -> tuple[list[Action], list[Departure]]:
        session = self.session
        refusal = session.refusal(hello) if session else None
        if refusal is not None:
            return [ToRank(hello.rank, Refused(refusal))], []
        departures: list[Departure] = []
        if session is not None and session.ended_by(hello):
            departures = [Departure(session.token, rank, "the job has been restarted") for rank in session.members]
            session = None
        if session is None:
            session = self.session = Session.of(self._token_for(hello), hello)
            self._past[session.token] = session
            for token in list(self._past)[:-KEPT_SESSIONS]:
                del self._past[token]
        session.join(hello)
        steps = tuple(sorted(self.steps.get(session.directory, ())))
        welcome = Welcome(session.token, sidecar_id="", node=hello.node, torch_version="", committed_steps=steps)
        return [ToRank(hello.rank, welcome)], departures

    def _token_for(self, hello: Hello) -> str:
        """A client of a restarted coordinator brings its token along; one that this coordinator has seen end is new."""
        token = hello.session if hello.session and hello.session not in self._tokens else self._new_token()
        self._tokens.add(token)
        return token

    # ------------------------------------------------------------ going

    def left(self, message: RankLeft) -> Departure | None:
        """A rank is gone; None if it was no member of the session of now."""
        self._joining = [hello for hello in self._joining if hello.rank != message.rank]
        self._asking = [(rank, ask) for rank, ask in self._asking if rank != message.rank]
        session = self.session
        if session is None or not session.leave(message.rank, message.reason):
            return None
        return Departure(session.token, message.rank, message.reason)

    def name(self, token: str, rank: int) -> str:
        """``rank 5 on node-b`` if the session is the one of now."""
        return self.session.name(rank) if self.session and self.session.token == token else f"rank {rank}"

    def node(self, token: str, rank: int) -> str:
        """The node of a rank, if the session is the one of now."""
        return self.session.nodes.get(rank, "") if self.session and self.session.token == token else ""

    def is_member(self, token: str, rank: int) -> bool:
        """Whether the rank's client lives and belongs to that session, which is the one of now."""
        return self.session is not None and self.session.token == token and rank in self.session.members

    # ------------------------------------------------------------ which step to restore

    def ask(self, rank: int, message: AskRestoreStep, *, must_wait: bool) -> list[Action]:
        """The n-th question of a rank for the step to restore: every rank gets the same answer to its n-th.

        ``must_wait``: a save that an earlier life staged can still be committed, and is newer than what is there.
        """
        self._asking.append((rank, message))
        return [] if must_wait else self.answer()

    def answer(self) -> list[Action]:
        """Answer every question that is open."""
        asking, self._asking = self._asking, []
        actions: list[Action] = []
        for rank, message in asking:
            session = self._past.get(message.session, self.session)
            if session is None:
                continue
            newest = max(self.steps.get(session.directory, ()), default=None)
            actions.append(
                ToRank(rank, RestoreStep(message.ask, session.restore_answers.setdefault(message.ask, newest)))
            )
        return actions
