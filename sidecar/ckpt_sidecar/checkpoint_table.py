"""The coordinator: sessions, plans and attempts of the whole job. Pure: events in, actions out.

It talks to ranks (through the sidecars of their nodes) and never to storage; it sees no region and no byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

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
    FinalPlan,
    GlobalPlan,
    Hello,
    MakeGlobalPlan,
    Message,
    ProposePlan,
    RankLeft,
    Refused,
    ReportFailure,
    ReportSkip,
    RestoreStep,
    ShardPersisted,
    ShardStaged,
    Welcome,
)
from ckpt_sidecar.attempt import Attempt
from ckpt_sidecar.events import (
    Action,
    AtCoordinator,
    DirectoryOpened,
    DirectoryRefused,
    Event,
    OpenDirectory,
    Publish,
    Published,
    PublishFailed,
    Tick,
    ToRank,
)
from ckpt_sidecar.plan_exchange import entry_counts, mark_opaque, plan_conflicts, plan_warnings
from ckpt_sidecar.session import Session

DECIDE_TIMEOUT_S: Final = 600.0
"""How long rank 0's pre-commit hooks may take before the attempt is given up."""

PERSIST_TIMEOUT_S: Final = 7200.0
"""How long staged shards may take to become durable; the same bound as the longest among peers."""

MAX_ENDED_ATTEMPTS: Final = 64
"""Ended attempts kept to answer late ranks and ``status``; far more than can be in flight."""


@dataclass
class Counters:
    """What ``status`` counts since this coordinator began."""

    committed: int = 0
    failed: int = 0
    skipped: int = 0
    consecutive_failures: int = 0
    last_committed_step: int | None = None
    last_committed_s: float | None = None


class CheckpointTable:
    """The coordinator's decisions. ``handle`` is the only method that changes anything."""

    def __init__(self, new_token: Callable[[], str]) -> None:
        self._new_token = new_token
        self.session: Session | None = None
        self.steps: dict[str, set[int]] = {}
        self.attempts: dict[tuple[str, int], Attempt] = {}
        self.counters = Counters()
        self._entry_counts: dict[str, tuple[int, ...]] = {}
        self._waiting: list[Hello] = []
        self._plans_made = 0

    # ------------------------------------------------------------ questions

    @property
    def is_busy(self) -> bool:
        """Whether an attempt can still end in a commit."""
        return any(attempt.is_open for attempt in self.attempts.values())

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event, return what to do."""
        match event:
            case AtCoordinator(rank=rank, message=message):
                return self._from_rank(rank, message, now_s)
            case DirectoryOpened(directory=directory, steps=steps):
                return self._directory_opened(directory, steps, now_s)
            case DirectoryRefused(directory=directory, failure=failure):
                return self._directory_refused(directory, failure)
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
        if isinstance(message, Hello):
            return self._hello(message, now_s)
        if isinstance(message, RankLeft):
            return self._rank_left(message, now_s)
        if isinstance(message, AskRestoreStep):
            return self._restore_step(rank, message)
        save: SaveKey | None = getattr(message, "save", None)
        if save is None:
            return []
        attempt = self._attempt(rank, save, now_s)
        if attempt is None:
            return []
        if not attempt.is_open:
            return self._answer_late(attempt, rank, save)
        gives_up = isinstance(message, (ReportFailure, ReportSkip))
        if attempt.keys[rank] != attempt.save and not gives_up:
            return self._steps_differ(attempt, rank, now_s)
        return self._progress(attempt, rank, message, now_s)

    def _progress(self, attempt: Attempt, rank: int, message: Message, now_s: float) -> list[Action]:
        match message:
            case ProposePlan():
                return self._proposed(attempt, rank, message, now_s)
            case GlobalPlan(plans=plans) if rank == 0:
                return self._planned(attempt, message, now_s) if plans else []
            case ShardStaged():
                return self._staged(attempt, rank, message, now_s)
            case ShardPersisted():
                return self._persisted(attempt, rank, now_s)
            case ReportSkip(reason=reason):
                attempt.skipped = True
                return self._abort(attempt, [FailureReport("SaveSkipped", reason).at(rank, self._node(rank))], now_s)
            case ReportFailure(failure=failure):
                return self._abort(attempt, [failure.at(rank, self._node(rank))], now_s)
            case DecideCommit() if rank == 0:
                return self._decided(attempt, message, now_s)
        return []

    # ------------------------------------------------------------ sessions

    def _hello(self, hello: Hello, now_s: float) -> list[Action]:
        steps = self.steps.get(hello.directory)
        if steps is None or self.session is None or self.session.ended_by(hello):
            # A new session looks at the directory anew: steps may have come or gone since.
            self._waiting.append(hello)
            waiting_already = sum(other.directory == hello.directory for other in self._waiting) > 1
            return [] if waiting_already else [OpenDirectory(hello.directory)]
        return self._join(hello, now_s)

    def _join(self, hello: Hello, now_s: float) -> list[Action]:
        session = self.session
        actions: list[Action] = []
        if session is not None:
            refusal = session.refusal(hello)
            if refusal is not None:
                return [ToRank(hello.rank, Refused(refusal))]
            if session.ended_by(hello):
                actions += self._end_session(session, now_s)
                session = None
        if session is None:
            session = self.session = Session.of(hello.session or self._new_token(), hello)
        session.join(hello)
        steps = tuple(sorted(self.steps[hello.directory]))
        welcome = Welcome(session.token, sidecar_id="", node=hello.node, torch_version="", committed_steps=steps)
        return [*actions, ToRank(hello.rank, welcome)]

    def _directory_opened(self, directory: str, steps: tuple[int, ...], now_s: float) -> list[Action]:
        self.steps[directory] = set(steps)
        actions: list[Action] = []
        for hello in self._take_waiting(directory):
            actions += self._join(hello, now_s)
        return actions

    def _directory_refused(self, directory: str, failure: FailureReport) -> list[Action]:
        return [ToRank(hello.rank, Refused(failure)) for hello in self._take_waiting(directory)]

    def _take_waiting(self, directory: str) -> list[Hello]:
        mine = [hello for hello in self._waiting if hello.directory == directory]
        self._waiting = [hello for hello in self._waiting if hello.directory != directory]
        return mine

    def _end_session(self, session: Session, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for rank in list(session.members):
            actions += self._leave(session, rank, "the job has been restarted", now_s)
        return actions

    def _rank_left(self, message: RankLeft, now_s: float) -> list[Action]:
        self._waiting = [hello for hello in self._waiting if hello.rank != message.rank]
        if self.session is None:
            return []
        return self._leave(self.session, message.rank, message.reason, now_s)

    def _leave(self, session: Session, rank: int, reason: str, now_s: float) -> list[Action]:
        """A rank is gone: what it had not staged can not be saved, what it had staged goes on without it."""
        if not session.leave(rank):
            return []
        actions: list[Action] = []
        for attempt in list(self.attempts.values()):
            if not attempt.is_open or attempt.save.session != session.token:
                continue
            attempt.tell(now_s, f"rank {rank} left{': ' + reason if reason else ''}")
            if rank not in attempt.staged:
                text = f"{session.name(rank)} left before it had staged step {attempt.save.step}"
                failure = FailureReport("RankLost", f"{text}: {reason or 'it closed its client'}")
                actions += self._abort(attempt, [failure.at(rank, self._node(rank))], now_s)
            elif rank == 0 and attempt.asked_s is not None and not attempt.publishing:
                actions += self._publish(attempt, now_s, "rank 0 is gone")
        return actions

    def _restore_step(self, rank: int, message: AskRestoreStep) -> list[Action]:
        session = self.session
        if session is None:
            return []
        if message.ask not in session.restore_answers:
            session.restore_answers[message.ask] = max(self.steps[session.directory], default=None)
        return [ToRank(rank, RestoreStep(message.ask, session.restore_answers[message.ask]))]

    def _node(self, rank: int) -> str:
        return self.session.nodes.get(rank, "") if self.session else ""

    # ------------------------------------------------------------ attempts

    def _attempt(self, rank: int, save: SaveKey, now_s: float) -> Attempt | None:
        """The attempt a message belongs to; a first message opens it, a message of another life belongs to none."""
        attempt = self.attempts.get((save.session, save.seq))
        if attempt is None:
            session = self.session
            if session is None or save.session != session.token or rank not in session.members:
                return None
            self._forget_old_attempts()
            attempt = Attempt(save, session.world_size, session.directory, session.stage_timeout_s, now_s)
            self.attempts[save.session, save.seq] = attempt
        attempt.keys.setdefault(rank, save)
        return attempt

    def _forget_old_attempts(self) -> None:
        ended = [key for key, attempt in self.attempts.items() if not attempt.is_open]
        for key in ended[: max(0, len(ended) - MAX_ENDED_ATTEMPTS)]:
            del self.attempts[key]
        # The plan in use was used by the newest attempts; a plan that no kept attempt names is gone for good.
        used = {attempt.plan_id for attempt in self.attempts.values()}
        self._entry_counts = {plan_id: counts for plan_id, counts in self._entry_counts.items() if plan_id in used}

    def _answer_late(self, attempt: Attempt, rank: int, save: SaveKey) -> list[Action]:
        if attempt.state is CheckpointState.ABORTED:
            return [ToRank(rank, Aborted(save, attempt.failures, attempt.skipped))]
        return [ToRank(rank, Committed(save, checkpoint_id(attempt.directory, save.step)))]

    def _steps_differ(self, attempt: Attempt, rank: int, now_s: float) -> list[Action]:
        mine = attempt.keys[rank].step
        first = next(other for other, key in attempt.keys.items() if key == attempt.save)
        failure = FailureReport(
            "StepsDiffer",
            f"save number {attempt.save.seq} is of step {mine} on rank {rank} and of step {attempt.save.step} on rank "
            f"{first}",
            hint="every rank must call save() for the same steps in the same order",
        )
        return self._abort(attempt, [failure.at(rank, self._node(rank))], now_s)

    def _abort(
        self, attempt: Attempt, failures: list[FailureReport], now_s: float, *, replan: bool = False
    ) -> list[Action]:
        attempt.walk(CheckpointEvent.ABORT)
        attempt.failures = tuple(failures)
        attempt.ended_s = now_s
        attempt.proposals.clear()
        attempt.tell(now_s, f"aborted: {'; '.join(map(str, failures))}")
        if attempt.skipped:
            self.counters.skipped += 1
        else:
            self.counters.failed += 1
            self.counters.consecutive_failures += 1
        return [
            ToRank(rank, Aborted(attempt.keys.get(rank, attempt.save), attempt.failures, attempt.skipped, replan))
            for rank in range(attempt.world_size)
        ]

    # ------------------------------------------------------------ plans

    def _proposed(self, attempt: Attempt, rank: int, message: ProposePlan, now_s: float) -> list[Action]:
        if rank in attempt.proposals or attempt.planned:
            return []
        attempt.proposals[rank] = message
        attempt.tell(now_s, f"rank {rank} proposed {len(message.items)} items")
        if attempt.staged:
            return self._plans_differ(attempt, now_s)
        if len(attempt.proposals) < attempt.world_size:
            return []
        conflicts = plan_conflicts([attempt.proposals[each] for each in range(attempt.world_size)])
        if conflicts:
            return self._abort(attempt, conflicts, now_s)
        attempt.planned = True
        plans = tuple(attempt.proposals[each].items for each in range(attempt.world_size))
        return [ToRank(0, MakeGlobalPlan(attempt.save, plans))]

    def _plans_differ(self, attempt: Attempt, now_s: float) -> list[Action]:
        failures = []
        for rank, proposal in sorted(attempt.proposals.items()):
            keys = ", ".join(proposal.changed_keys) or "none was cached before"
            failures.append(
                FailureReport(
                    "StructureDiffers",
                    f"the state dict of rank {rank} has changed (keys: {keys}) while that of ranks "
                    f"{sorted(attempt.staged)} has not",
                    hint="the next save plans anew on every rank",
                ).at(rank, self._node(rank))
            )
        return self._abort(attempt, failures, now_s, replan=True)

    def _planned(self, attempt: Attempt, message: GlobalPlan, now_s: float) -> list[Action]:
        if attempt.plan_id or not attempt.planned:
            return []
        if len(message.plans) != attempt.world_size:
            text = f"the planner made {len(message.plans)} plans for {attempt.world_size} ranks"
            return self._abort(attempt, [FailureReport("PlanningError", text).at(0, self._node(0))], now_s)
        self._plans_made += 1
        attempt.plan_id = f"{attempt.save.session}-p{self._plans_made}"
        self._entry_counts[attempt.plan_id] = entry_counts(message.plans)
        warnings = plan_warnings([attempt.proposals[rank] for rank in range(attempt.world_size)])
        attempt.tell(now_s, f"plan {attempt.plan_id} made")
        opaque = {rank: {item.key for item in p.items if item.opaque} for rank, p in attempt.proposals.items()}
        attempt.proposals.clear()
        return [
            ToRank(rank, FinalPlan(attempt.save, attempt.plan_id, mark_opaque(plan, opaque[rank]), warnings))
            for rank, plan in enumerate(message.plans)
        ]

    # ------------------------------------------------------------ from staged to committed

    def _staged(self, attempt: Attempt, rank: int, message: ShardStaged, now_s: float) -> list[Action]:
        if rank in attempt.staged:
            return []
        if attempt.staged and message.overwrite != attempt.overwrite:
            text = f"rank {rank} called save() with overwrite={message.overwrite}, other ranks with {attempt.overwrite}"
            return self._abort(attempt, [FailureReport("OverwriteDiffers", text).at(rank, self._node(rank))], now_s)
        attempt.staged.add(rank)
        attempt.overwrite = message.overwrite
        attempt.tell(now_s, f"rank {rank} staged")
        if attempt.proposals and not attempt.planned:
            return self._plans_differ(attempt, now_s)
        if attempt.plan_id and message.plan_id != attempt.plan_id:
            text = f"rank {rank} staged plan {message.plan_id}, others {attempt.plan_id}"
            return self._abort(
                attempt, [FailureReport("PlanDiffers", text).at(rank, self._node(rank))], now_s, replan=True
            )
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
        session = self.session
        if session is None or session.token != attempt.save.session or 0 not in session.members:
            return self._publish(attempt, now_s, "rank 0 is gone")
        return [ToRank(0, AskCommit(attempt.save, checkpoint_id(attempt.directory, attempt.save.step)))]

    def _decided(self, attempt: Attempt, message: DecideCommit, now_s: float) -> list[Action]:
        if attempt.state is not CheckpointState.COMPLETE or attempt.publishing:
            return []
        if message.accept:
            return self._publish(attempt, now_s, "rank 0 ordered the commit")
        failure = FailureReport("CommitVetoed", f"a pre-commit hook refused step {attempt.save.step}: {message.reason}")
        return self._abort(attempt, [failure.at(0, self._node(0))], now_s)

    def _publish(self, attempt: Attempt, now_s: float, why: str) -> list[Action]:
        attempt.publishing = True
        attempt.tell(now_s, f"publishing: {why}")
        counts = self._entry_counts.get(attempt.plan_id, ())
        return [
            Publish(attempt.save, attempt.directory, attempt.world_size, attempt.plan_id, counts, attempt.overwrite)
        ]

    def _published(self, save: SaveKey, now_s: float) -> list[Action]:
        attempt = self.attempts[save.session, save.seq]
        attempt.walk(CheckpointEvent.PUBLISH)
        attempt.publishing = False
        attempt.ended_s = now_s
        attempt.tell(now_s, "committed")
        self.steps.setdefault(attempt.directory, set()).add(save.step)
        counters = self.counters
        counters.committed += 1
        counters.consecutive_failures = 0
        counters.last_committed_step = save.step
        counters.last_committed_s = now_s
        where = checkpoint_id(attempt.directory, save.step)
        return [ToRank(rank, Committed(save, where)) for rank in range(attempt.world_size)]

    # ------------------------------------------------------------ time

    def _tick(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for attempt in list(self.attempts.values()):
            failures = self._overdue(attempt, now_s)
            if failures:
                actions += self._abort(attempt, failures, now_s)
        return actions

    def _overdue(self, attempt: Attempt, now_s: float) -> list[FailureReport]:
        age_s = now_s - attempt.opened_s
        step = attempt.save.step
        if not attempt.is_open or attempt.publishing:
            return []
        if attempt.unstaged_ranks and age_s > attempt.stage_timeout_s:
            return [
                self._late(rank, f"has not staged step {step} after {age_s:.0f} s") for rank in attempt.unstaged_ranks
            ]
        if attempt.state is CheckpointState.OPEN and age_s > PERSIST_TIMEOUT_S:
            return [
                self._late(rank, f"has not persisted step {step} after {age_s:.0f} s")
                for rank in attempt.unpersisted_ranks
            ]
        if attempt.asked_s is not None and now_s - attempt.asked_s > DECIDE_TIMEOUT_S:
            return [
                self._late(0, f"has not decided on the commit of step {step} after {now_s - attempt.asked_s:.0f} s")
            ]
        return []

    def _late(self, rank: int, what: str) -> FailureReport:
        name = self.session.name(rank) if self.session else f"rank {rank}"
        return FailureReport("RankLate", f"{name} {what}").at(rank, self._node(rank))
