"""Who takes part: handshakes, sessions and the step to restore, at the coordinator. Pure.

One session at a time. A Hello joins it, begins the next one if it is over, or is refused; the directory is looked at
anew whenever a session begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import (
    AskRestoreStep,
    Hello,
    Message,
    RankLeft,
    Refused,
    RestoreStep,
    ShardStaged,
    Welcome,
)
from ckpt_sidecar.actions import Action, OpenDirectory, ToRank
from ckpt_sidecar.session import Session

KEPT_SESSIONS: Final = 8
"""Sessions remembered for ranks that are late to leave them."""


ADOPTED_STAGE_TIMEOUT_S: Final = 600.0
"""Bound for an attempt of which nothing is known but what is staged: the default of clients."""


@dataclass(frozen=True)
class Terms:
    """What an attempt is opened with. ``adopted``: its session is older than this coordinator."""

    world_size: int
    directory: str
    stage_timeout_s: float
    adopted: bool


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
        self._drawn: set[str] = set()
        self._gone: dict[str, dict[int, str]] = {}
        self._spoken: dict[str, set[int]] = {}
        self._to_sweep: set[str] = set()
        self._sweeping: set[str] = set()
        self._swept: set[str] = set()
        self._joining: list[Hello] = []
        self._said: dict[str, dict[int, Hello]] = {}
        self._asking: list[tuple[int, AskRestoreStep]] = []
        self._past: dict[str, Session] = {}
        self.session: Session | None = None
        self.steps: dict[str, set[int]] = {}

    # ------------------------------------------------------------ coming

    @property
    def is_opening(self) -> bool:
        """Whether a directory is being opened, for a rank that waits or for what dead ones have left there."""
        return bool(self._joining or self._to_sweep or self._sweeping)

    def hello(self, hello: Hello) -> tuple[list[Action], list[Departure]]:
        """A rank asks to take part."""
        self._take_note(hello)
        session = self.session
        refusal = session.refusal(hello) if session else None
        if refusal is not None:
            return [ToRank(hello.rank, Refused(refusal, hello.pid))], []
        if session is not None and not session.ended_by(hello):
            return self._join(hello)
        known = any(other.directory == hello.directory for other in self._joining)
        self._joining.append(hello)
        spare = tuple({other.session for other in self._joining if other.session})
        return ([] if known else [OpenDirectory(hello.directory, spare)]), []

    def _take_note(self, hello: Hello) -> None:
        """What a client says that it knows counts also if it is refused."""
        if hello.session:
            self._said.setdefault(hello.session, {})[hello.rank] = hello
            for token in list(self._said)[:-KEPT_SESSIONS]:
                del self._said[token]

    def opened(self, directory: str, steps: tuple[int, ...]) -> tuple[list[Action], list[Departure]]:
        """The directory can be used: those who waited for it join."""
        self._sweeping.discard(directory)
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
        self._sweeping.discard(directory)
        return [ToRank(hello.rank, Refused(failure, hello.pid)) for hello in self._take_joining(directory)]

    def _take_joining(self, directory: str) -> list[Hello]:
        mine = [hello for hello in self._joining if hello.directory == directory]
        self._joining = [hello for hello in self._joining if hello.directory != directory]
        return mine

    def _join(self, hello: Hello) -> tuple[list[Action], list[Departure]]:
        session = self.session
        refusal = session.refusal(hello) if session else None
        if refusal is not None:
            return [ToRank(hello.rank, Refused(refusal, hello.pid))], []
        departures: list[Departure] = []
        if session is not None and session.ended_by(hello):
            departures = [Departure(session.token, rank, "the job has been restarted") for rank in session.members]
            if self.may_be_resumed(session.token):
                gone = {departure.rank: departure.reason for departure in departures}
                self._gone.setdefault(session.token, {}).update({**session.departed, **gone})
            session = None
        if session is None:
            session = self.session = Session.of(self._token_for(hello), hello)
            session.taken_up = self.may_be_resumed(session.token)
            session.spoken = self._spoken.setdefault(session.token, set())
            for rank, reason in self._gone.get(session.token, {}).items():
                session.bury(rank, reason)
            self._past[session.token] = session
            for token in list(self._past)[:-KEPT_SESSIONS]:
                del self._past[token]
        session.join(hello)
        steps = tuple(sorted(self.steps.get(session.directory, ())))
        welcome = Welcome(session.token, "", hello.node, torch_version="", committed_steps=steps, pid=hello.pid)
        return [ToRank(hello.rank, welcome)], departures

    def _token_for(self, hello: Hello) -> str:
        """A client of a restarted coordinator brings its token along; one that this coordinator has seen end is new."""
        if hello.session and not self.has_seen(hello.session):
            return hello.session
        token = self._new_token()
        self._drawn.add(token)
        return token

    def has_seen(self, token: str) -> bool:
        """Whether this coordinator has begun or taken up that session."""
        return token in self._drawn or token in self._past

    # ------------------------------------------------------------ going

    def left(self, message: RankLeft) -> Departure | None:
        """A rank is gone; None if that says nothing new about a session."""
        rank, reason, session = message.rank, message.reason, self.session
        if message.session and (session is None or session.token != message.session):
            return self._left_earlier(message)
        self._joining = [hello for hello in self._joining if hello.rank != rank]
        self._asking = [(other, ask) for other, ask in self._asking if other != rank]
        if session is None:
            return None
        if session.leave(rank, reason) or (self.may_be_resumed(session.token) and session.bury(rank, reason)):
            return Departure(session.token, rank, reason)
        return None

    def remember_to_sweep(self, message: RankLeft) -> None:
        """A rank was dead already when its sidecar started: it may have been the last of its session, and all of it
        durable, so that nobody will ask for the commit."""
        if message.directory and message.session not in self._swept and self.may_be_resumed(message.session):
            self._swept.add(message.session)
            self._to_sweep.add(message.directory)

    def sweeps(self) -> list[Action]:
        """Have finished what dead ranks left in their directories, once those that live have said so."""
        directories, self._to_sweep = sorted(self._to_sweep), set()
        self._sweeping.update(directories)
        living = {hello.session for hello in self._joining if hello.session}
        if self.session is not None and self.session.members:
            living.add(self.session.token)
        return [OpenDirectory(directory, tuple(sorted(living))) for directory in directories]

    def _left_earlier(self, message: RankLeft) -> Departure | None:
        """A rank of a session that is not the one of now: only what this coordinator took up can depend on it."""
        waits = [hello for hello in self._joining if (hello.rank, hello.session) == (message.rank, message.session)]
        self._joining = [hello for hello in self._joining if hello not in waits]
        if not self.may_be_resumed(message.session):
            return None
        self._gone.setdefault(message.session, {})[message.rank] = message.reason
        return Departure(message.session, message.rank, message.reason)

    # ------------------------------------------------------------ sessions of an earlier coordinator

    def may_be_resumed(self, token: str) -> bool:
        """Whether a session is older than this coordinator, which then does not know all about it."""
        return token not in self._drawn

    def terms(self, save: SaveKey, rank: int, message: Message) -> Terms | None:
        """By which terms an attempt that a rank speaks of is opened; None if it must not be.

        A member of the session of now may open one. In a session that is older than this coordinator so may a rank
        that is about to join, or one whose shard is staged, dead or alive.
        """
        session, adopted = self.session, self.may_be_resumed(save.session)
        if not adopted and not self.is_member(save.session, rank):
            return None
        if session is not None and session.token == save.session:
            return Terms(session.world_size, session.directory, session.stage_timeout_s, adopted)
        known = [hello for hello in self._joining if hello.session == save.session]
        if known:
            return Terms(known[0].world_size, known[0].directory, known[0].stage_timeout_s, adopted=True)
        if isinstance(message, ShardStaged) and message.world_size:
            return Terms(message.world_size, message.directory, ADOPTED_STAGE_TIMEOUT_S, adopted=True)
        return None

    def excuse(self, save: SaveKey, rank: int) -> str | None:
        """Why a rank of a session that was taken up will stage nothing more for a save; None if it may."""
        gone = self._gone.get(save.session, {}).get(rank)
        session = self.session
        if session is not None and session.token == save.session:
            return session.departed.get(rank, gone)
        return gone

    def was_told(self, save: SaveKey, rank: int) -> bool:
        """Whether the rank's client knows how a save has ended: an earlier coordinator, or itself, has given it up,
        unless it is published."""
        session = self._past.get(save.session)
        hello = session.hellos.get(rank) if session is not None else None
        hello = hello or self._said.get(save.session, {}).get(rank)
        return hello is not None and save.seq < hello.next_seq and save.seq not in hello.in_flight

    def is_new_to(self, save: SaveKey, rank: int) -> bool:
        """Whether the rank's client had not begun a save when it said Hello last: it lost nothing of it."""
        hello = self.session.members.get(rank) if self.session is not None else None
        return hello is None or hello.next_seq <= save.seq

    def is_gone(self, token: str, rank: int) -> bool:
        """Whether the rank's client has left that session, as far as this coordinator can know."""
        if self.is_member(token, rank):
            return False
        session = self.session
        buried = session is not None and session.token == token and rank in session.departed
        return buried or not self.may_be_resumed(token) or rank in self._gone.get(token, {})

    def silent(self, ranks: Iterable[int]) -> None:
        """The node of these ranks does not answer. Ranks of an earlier session may have lived there."""
        if self.session is not None:
            self.session.silent.update(self.session.members.keys() & set(ranks))

    def degrade(self, token: str, ranks: Iterable[int]) -> bool:
        """Whether the clients of these ranks of a session have their shards written without a sidecar."""
        session = self._past.get(token)
        return session is not None and all(rank in session.hellos and session.hellos[rank].degrades for rank in ranks)

    def heard(self, rank: int, token: str) -> None:
        """Something was heard of a rank, perhaps about a session: a client of it has been there."""
        if self.session is not None:
            self.session.silent.discard(rank)
        if token and self.may_be_resumed(token):
            self._spoken.setdefault(token, set()).add(rank)

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
