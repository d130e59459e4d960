"""The coordinator: plans and attempts of the whole job. Pure: events in, actions out.

It talks to ranks (through the sidecars of their nodes) and never to storage; it sees no region and no byte. Who takes
part is ``membership``'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpt_proto.checkpoint_layout import checkpoint_id
from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_proto.lifecycles import CheckpointEvent, CheckpointState
from ckpt_proto.messages import (
    Aborted,
    AskCommit,
    AskRestoreStep,
    Committed,
    DecideCommit,
    GlobalPlan,
    Hello,
    Message,
    ProposePlan,
    RankLeft,
    ReportFailure,
    ReportSkip,
    ShardPersisted,
    ShardStaged,
)
from ckpt_sidecar.attempt import DECIDE_TIMEOUT_S, PERSIST_TIMEOUT_S, Attempt
from ckpt_sidecar.attempt_book import MAX_ENDED_ATTEMPTS, AttemptBook
from ckpt_sidecar.counters import Counters
from ckpt_sidecar.events import (
    Action,
    AtCoordinator,
    DirectoryOpened,
    DirectoryRefused,
    Event,
    Publish,
    Published,
    PublishFailed,
    Tick,
    ToRank,
)
from ckpt_sidecar.membership import Departure, Membership
from ckpt_sidecar.plan_book import PlanBook, PlanStep, structures_differ
from ckpt_sidecar.session import Session

__all__ = ["DECIDE_TIMEOUT_S", "MAX_ENDED_ATTEMPTS", "PERSIST_TIMEOUT_S", "CheckpointTable"]


class CheckpointTable:
    """The coordinator's decisions. ``handle`` is the only method that changes anything."""

    def __init__(self, new_token: Callable[[], str]) -> None:
        self._members = Membership(new_token)
        self._plans = PlanBook()
        self._book = AttemptBook()
        self.counters = Counters()

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
        return self._book.attempts

    @property
    def is_busy(self) -> bool:
        """Whether an attempt can still end in a commit."""
        return self._book.is_busy

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
                return self._published(save, now_s)
            case PublishFailed(save=save, failure=failure):
                attempt = self.attempts[save.session, save.seq]
                attempt.publishing = False
                return self._abort(attempt, [failure], now_s)
            case Tick():
                return self._tick(now_s)
        return []

    def _from_rank(self, rank: int, message: Message, now_s: float) -> list[Action]:
        match message:
            case Hello():
                return [*self._joined(self._members.hello(message), now_s), *self._ask_again(message)]
            case RankLeft():
                departure = self._members.left(message)
                return self._depart(departure, now_s) if departure else []
            case AskRestoreStep():
                return self._members.ask(rank, message, must_wait=self._earlier_life_is_busy())
        save: SaveKey | None = getattr(message, "save", None)
        return self._about(save, rank, message, now_s) if save is not None else []

    def _about(self, save: SaveKey, rank: int, message: Message, now_s: float) -> list[Action]:
        attempt = self._book.get(save)
        if attempt is None:
            if self._book.is_forgotten(save):
                return []  # it has ended long ago, and the rank was told then
            if not self._members.is_member(save.session, rank):
                return [ToRank(rank, Aborted(save, (self._ended(save, rank),)))]
            attempt = self._open(save, now_s)
        attempt.keys.setdefault(rank, save)
        if not attempt.is_open:
            return self._answer_late(attempt, rank)
        if attempt.approved:
            return []
        failures = self._impossible(attempt, rank, message)
        return self._abort(attempt, failures, now_s) if failures else self._progress(attempt, rank, message, now_s)

    def _progress(self, attempt: Attempt, rank: int, message: Message, now_s: float) -> list[Action]:
        match message:
            case ProposePlan():
                return self._proposed(attempt, rank, message, now_s)
            case GlobalPlan() if rank == 0:
                return self._planned(attempt, message, now_s)
            case ShardStaged():
                return self._staged(attempt, rank, message, now_s)
            case ShardPersisted():
                return self._persisted(attempt, rank, now_s)
            case ReportSkip(reason=reason):
                attempt.skipped = True
                return self._abort(attempt, [self._at(attempt.save, rank, FailureReport("SaveSkipped", reason))], now_s)
            case ReportFailure(failure=failure):
                return self._abort(attempt, [self._at(attempt.save, rank, failure)], now_s)
            case DecideCommit() if rank == 0:
                return self._decided(attempt, message, now_s)
        return []

    def _at(self, save: SaveKey, rank: int, failure: FailureReport) -> FailureReport:
        return failure.at(rank, self._members.node(save.session, rank))

    # ------------------------------------------------------------ coming and going

    def _joined(self, outcome: tuple[list[Action], list[Departure]], now_s: float) -> list[Action]:
        actions, departures = outcome
        before: list[Action] = []
        for departure in departures:
            before += self._depart(departure, now_s)
        return [*before, *actions]

    def _ask_again(self, hello: Hello) -> list[Action]:
        """Rank 0 has reconnected to its session: the question whether to commit may have been lost on the way."""
        if hello.rank != 0 or not hello.session or not self._members.is_member(hello.session, 0):
            return []
        return [
            self._ask_commit(attempt)
            for attempt in self._book.open_of(hello.session)
            if attempt.state is CheckpointState.COMPLETE and not attempt.approved
        ]

    def _ask_commit(self, attempt: Attempt) -> Action:
        return ToRank(0, AskCommit(attempt.save, checkpoint_id(attempt.directory, attempt.save.step)))

    def _depart(self, departure: Departure, now_s: float) -> list[Action]:
        """A rank is gone: what it had not staged can not be saved, what it had staged goes on without it."""
        rank, reason = departure.rank, departure.reason
        actions: list[Action] = []
        for attempt in self._book.open_of(departure.token):
            attempt.tell(now_s, f"rank {rank} left{': ' + reason if reason else ''}")
            if rank not in attempt.staged:
                actions += self._abort(attempt, [self._lost(attempt.save, rank, reason)], now_s)
            elif rank == 0 and attempt.asked_s is not None and not attempt.approved:
                actions += self._publish(attempt, now_s, "rank 0 is gone")
        return actions

    def _lost(self, save: SaveKey, rank: int, reason: str) -> FailureReport:
        name = self._members.name(save.session, rank)
        text = f"{name} left before it had staged step {save.step}: {reason or 'it closed its client'}"
        return self._at(save, rank, FailureReport("RankLost", text))

    def _ended(self, save: SaveKey, rank: int) -> FailureReport:
        text = f"session {save.session} of rank {rank} is over: another rank of it was restarted"
        return self._at(save, rank, FailureReport("SessionEnded", text, "restart every rank, as torchelastic does"))

    def _earlier_life_is_busy(self) -> bool:
        return self._book.earlier_life_is_busy(self.session.token if self.session else "")

    def _answer_if_settled(self) -> list[Action]:
        return [] if self._earlier_life_is_busy() else self._members.answer()

    # ------------------------------------------------------------ attempts

    def _open(self, save: SaveKey, now_s: float) -> Attempt:
        session = self.session
        assert session is not None
        attempt = self._book.open(save, session, now_s)
        # The plan in use was used by the newest attempts; a plan that no kept attempt names is gone for good.
        self._plans.keep_only(kept.plan_id for kept in self.attempts.values())
        return attempt

    def _answer_late(self, attempt: Attempt, rank: int) -> list[Action]:
        if attempt.state is CheckpointState.ABORTED:
            return [ToRank(rank, attempt.aborted_for(rank))]
        save = attempt.keys[rank]
        return [ToRank(rank, Committed(save, checkpoint_id(attempt.directory, save.step)))]

    def _impossible(self, attempt: Attempt, rank: int, message: Message) -> list[FailureReport]:
        """Why the attempt cannot be completed any more, now that this rank takes part in it."""
        if isinstance(message, (ReportFailure, ReportSkip)):
            return []  # the rank gives the reason itself
        mine = attempt.keys[rank]
        if mine != attempt.save:
            first = next(other for other, key in attempt.keys.items() if key == attempt.save)
            text = (
                f"save number {mine.seq} is of step {mine.step} on rank {rank} and of step {attempt.save.step} on rank "
                f"{first}"
            )
            hint = "every rank must call save() for the same steps in the same order"
            return [self._at(attempt.save, rank, FailureReport("StepsDiffer", text, hint))]
        session = self.session
        if session is None or session.token != attempt.save.session:
            return []
        gone = [other for other in session.departed if other not in attempt.staged]
        return [self._lost(attempt.save, other, session.departed[other]) for other in gone]

    def _abort(
        self, attempt: Attempt, failures: Sequence[FailureReport], now_s: float, *, replan: bool = False
    ) -> list[Action]:
        attempt.walk(CheckpointEvent.ABORT)
        attempt.failures = tuple(failures)
        attempt.replan = replan
        attempt.ended_s = now_s
        attempt.proposals.clear()
        attempt.tell(now_s, f"aborted: {'; '.join(map(str, failures))}")
        self.counters.count_aborted(skipped=attempt.skipped)
        told = [ToRank(rank, attempt.aborted_for(rank)) for rank in range(attempt.world_size)]
        return [*told, *self._answer_if_settled(), *self._publish_approved(now_s)]

    # ------------------------------------------------------------ plans

    def _take(self, attempt: Attempt, step: PlanStep, now_s: float) -> list[Action]:
        if step.failures:
            failures = [self._at(attempt.save, failure.rank, failure) for failure in step.failures]
            return self._abort(attempt, failures, now_s, replan=step.replan)
        return [ToRank(rank, message) for rank, message in step.messages]

    def _proposed(self, attempt: Attempt, rank: int, message: ProposePlan, now_s: float) -> list[Action]:
        attempt.tell(now_s, f"rank {rank} proposed {len(message.items)} items")
        return self._take(attempt, self._plans.propose(attempt, rank, message), now_s)

    def _planned(self, attempt: Attempt, message: GlobalPlan, now_s: float) -> list[Action]:
        attempt.tell(now_s, "rank 0 made the global plan")
        return self._take(attempt, self._plans.plan(attempt, message), now_s)

    # ------------------------------------------------------------ from staged to committed

    def _staged(self, attempt: Attempt, rank: int, message: ShardStaged, now_s: float) -> list[Action]:
        if rank in attempt.staged:
            return []
        if attempt.staged and message.overwrite != attempt.overwrite:
            text = f"rank {rank} called save() with overwrite={message.overwrite}, other ranks with {attempt.overwrite}"
            failure = self._at(attempt.save, rank, FailureReport("OverwriteDiffers", text))
            return self._abort(attempt, [failure], now_s)
        attempt.staged.add(rank)
        attempt.overwrite = message.overwrite
        attempt.tell(now_s, f"rank {rank} staged")
        if attempt.proposals and not attempt.planned:
            return self._take(attempt, structures_differ(attempt), now_s)
        if attempt.plan_id and message.plan_id != attempt.plan_id:
            text = f"rank {rank} staged plan {message.plan_id}, others {attempt.plan_id}"
            failure = self._at(attempt.save, rank, FailureReport("PlanDiffers", text))
            return self._abort(attempt, [failure], now_s, replan=True)
        attempt.plan_id = message.plan_id
        return []

    def _persisted(self, attempt: Attempt, rank: int, now_s: float) -> list[Action]:
        if rank in attempt.persisted:
            return []
        attempt.persisted.add(rank)
        attempt.tell(now_s, f"rank {rank} persisted")
        if len(attempt.persisted) < attempt.world_size:
            return []
        attempt.walk(CheckpointEvent.ALL_PERSISTED)
        attempt.asked_s = now_s
        if not self._members.is_member(attempt.save.session, 0):
            return self._publish(attempt, now_s, "rank 0 is gone")
        return [self._ask_commit(attempt)]

    def _decided(self, attempt: Attempt, message: DecideCommit, now_s: float) -> list[Action]:
        if attempt.state is not CheckpointState.COMPLETE:
            return []
        if message.accept:
            return self._publish(attempt, now_s, "rank 0 ordered the commit")
        text = f"a pre-commit hook refused step {attempt.save.step}: {message.reason}"
        return self._abort(attempt, [self._at(attempt.save, 0, FailureReport("CommitVetoed", text))], now_s)

    def _publish(self, attempt: Attempt, now_s: float, why: str) -> list[Action]:
        if self.session is not None and self._book.is_superseded(attempt, self.session.token):
            text = f"the restarted job has begun to save step {attempt.save.step} itself"
            return self._abort(attempt, [FailureReport("Superseded", text)], now_s)
        attempt.approved = why
        attempt.tell(now_s, f"to be published: {why}")
        return self._publish_approved(now_s)

    def _publish_approved(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for attempt in self._book.to_publish():
            attempt.publishing = True
            attempt.tell(now_s, "publishing")
            counts = self._plans.entry_counts(attempt.plan_id)
            save, directory, world_size = attempt.save, attempt.directory, attempt.world_size
            actions.append(Publish(save, directory, world_size, attempt.plan_id, counts, attempt.overwrite))
        return actions

    def _published(self, save: SaveKey, now_s: float) -> list[Action]:
        attempt = self.attempts[save.session, save.seq]
        attempt.walk(CheckpointEvent.PUBLISH)
        attempt.publishing = False
        attempt.ended_s = now_s
        attempt.tell(now_s, "committed")
        self._members.steps.setdefault(attempt.directory, set()).add(save.step)
        self.counters.count_committed(save.step, now_s)
        where = checkpoint_id(attempt.directory, save.step)
        told = [ToRank(rank, Committed(save, where)) for rank in range(attempt.world_size)]
        return [*told, *self._answer_if_settled(), *self._publish_approved(now_s)]

    # ------------------------------------------------------------ time

    def _tick(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for attempt in list(self.attempts.values()):
            late = attempt.overdue(now_s)
            if late:
                failures = [self._late(attempt.save, rank, what) for rank, what in late]
                actions += self._abort(attempt, failures, now_s)
        return actions

    def _late(self, save: SaveKey, rank: int, what: str) -> FailureReport:
        return self._at(save, rank, FailureReport("RankLate", f"{self._members.name(save.session, rank)} {what}"))
