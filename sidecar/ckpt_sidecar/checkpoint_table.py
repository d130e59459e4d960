"""The coordinator: plans and attempts of the whole job. Pure: events in, actions out.

It talks to ranks (through the sidecars of their nodes) and never to storage; it sees no region and no byte. Who takes
part is ``membership``'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    GlobalPlan,
    Hello,
    Message,
    ProposePlan,
    RankLeft,
    ReportFailure,
    ReportSkip,
    ShardPersisted,
    ShardStaged,
    Welcome,
)
from ckpt_sidecar.attempt import DECIDE_TIMEOUT_S, LISTING_S, PERSIST_TIMEOUT_S, RETURN_S, Attempt
from ckpt_sidecar.attempt_book import MAX_ENDED_ATTEMPTS, AttemptBook
from ckpt_sidecar.counters import Counters
from ckpt_sidecar.events import (
    Action,
    AtCoordinator,
    DirectoryOpened,
    DirectoryRefused,
    Event,
    ListedShard,
    ListShards,
    NodeSilent,
    Publish,
    Published,
    PublishFailed,
    ShardsListed,
    Tick,
    ToRank,
)
from ckpt_sidecar.membership import Departure, Membership, Terms
from ckpt_sidecar.plan_book import (
    PlanBook,
    PlanStep,
    lacks_its_plan,
    made_by,
    plan_lost,
    structures_differ,
)
from ckpt_sidecar.routes import session_of
from ckpt_sidecar.session import Session

PLAN_LOST_S: Final = 15.0
"""How long ranks wait for a plan that rank 0 made before this coordinator lived."""

NODE_GRACE_S: Final = 5.0
"""How old an attempt must be before a silent node ends it: the node may be about to come back."""

PUBLISH_AGAIN_S: Final = 2.0
"""Wait before publishing is tried again after an error that may pass."""

__all__ = ["DECIDE_TIMEOUT_S", "MAX_ENDED_ATTEMPTS", "PERSIST_TIMEOUT_S", "CheckpointTable"]


class CheckpointTable:
    """The coordinator's decisions. ``handle`` is the only method that changes anything."""

    def __init__(self, new_token: Callable[[], str], *, retry_s: float = 30.0) -> None:
        """``new_token`` draws a session's name; ``retry_s``: how long publishing that fails is tried again."""
        self._retry_s = retry_s
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
        return self._book.is_busy or self._members.is_opening

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
            case PublishFailed():
                return self._not_published(event, now_s)
            case ShardsListed(save=save):
                attempt = self._book.get(save)
                return self._listed(attempt, event, now_s) if attempt is not None else []
            case NodeSilent():
                return self._node_silent(event, now_s)
            case Tick():
                return self._tick(now_s)
        return []

    def _from_rank(self, rank: int, message: Message, now_s: float) -> list[Action]:
        if not isinstance(message, Hello):
            self._members.heard(rank, session_of(message))
        match message:
            case Hello():
                return self._joined(self._members.hello(message), now_s)
            case RankLeft():
                departure = self._members.left(message)
                self._members.remember_to_sweep(message)
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
            terms = self._members.terms(save, rank, message)
            if terms is None:
                return [ToRank(rank, Aborted(save, (self._ended(save, rank),)))]
            attempt = self._open(save, terms, now_s)
        attempt.keys.setdefault(rank, save)
        if not attempt.is_open:
            return self._answer_late(attempt, rank)
        if attempt.approved or attempt.doomed:
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
        for action in actions:
            if isinstance(action, ToRank) and action.rank == 0 and isinstance(action.message, Welcome):
                actions = [*actions, *self._ask_again(action.message.session)]
        return [*before, *actions]

    def _ask_again(self, token: str) -> list[Action]:
        """Rank 0 is back in its session: the question whether to commit may have been lost on the way."""
        return [
            self._ask_commit(attempt)
            for attempt in self._book.open_of(token)
            if attempt.state is CheckpointState.COMPLETE and not attempt.approved and not attempt.doomed
        ]

    def _ask_commit(self, attempt: Attempt) -> Action:
        return ToRank(0, AskCommit(attempt.save, checkpoint_id(attempt.directory, attempt.save.step)))

    def _depart(self, departure: Departure, now_s: float) -> list[Action]:
        """A rank is gone: what it had not staged can not be saved, what it had staged goes on without it."""
        rank, reason = departure.rank, departure.reason
        actions: list[Action] = []
        for attempt in self._book.open_of(departure.token):
            attempt.tell(now_s, f"rank {rank} left{': ' + reason if reason else ''}")
            if rank not in attempt.staged and attempt.adopted:
                actions += self._list(attempt, now_s)  # what it had staged before we lived may be durable
            elif rank not in attempt.staged:
                actions += self._abort(attempt, [self._lost(attempt.save, rank, reason)], now_s)
            elif rank == 0 and attempt.asked_s is not None and not attempt.approved and not attempt.doomed:
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

    def _open(self, save: SaveKey, terms: Terms, now_s: float) -> Attempt:
        attempt = self._book.open(save, terms, now_s)
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
        if session is None or session.token != attempt.save.session or attempt.adopted:
            return []
        gone = [other for other in session.departed if other not in attempt.staged]
        return [self._lost(attempt.save, other, session.departed[other]) for other in gone]

    def _abort(
        self, attempt: Attempt, failures: Sequence[FailureReport], now_s: float, *, replan: bool = False
    ) -> list[Action]:
        """Give an attempt up.

        One that was taken up is looked for on storage first: the coordinator that was killed may have published it and
        told nobody. Not while a plan for it is proposed: then a rank has not staged it.
        """
        if attempt.doomed:
            return []
        attempt.failures, attempt.replan = tuple(failures), replan
        if attempt.adopted and not attempt.proposals:
            attempt.doomed = True
            return self._list(attempt, now_s)
        return self._aborted(attempt, now_s)

    def _aborted(self, attempt: Attempt, now_s: float) -> list[Action]:
        attempt.walk(CheckpointEvent.ABORT)
        attempt.ended_s = now_s
        attempt.proposals.clear()
        self._plans.drop(attempt.plan_id)
        attempt.tell(now_s, f"aborted: {'; '.join(map(str, attempt.failures))}")
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
        had_a_plan = attempt.planned or lacks_its_plan(attempt)
        if attempt.adopted and had_a_plan and self._members.is_new_to(attempt.save, rank):
            # Another client of the rank has had a part in this plan: two must not stage one save.
            return self._take(attempt, plan_lost(attempt, [rank]), now_s)
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
        waits_for_it = attempt.adopted and message.plan_id == made_by(attempt)
        if attempt.proposals and not attempt.planned and not waits_for_it:
            return self._take(attempt, structures_differ(attempt), now_s)
        if attempt.plan_id and message.plan_id != attempt.plan_id:
            text = f"rank {rank} staged plan {message.plan_id}, others {attempt.plan_id}"
            failure = self._at(attempt.save, rank, FailureReport("PlanDiffers", text))
            return self._abort(attempt, [failure], now_s, replan=True)
        attempt.plan_id = message.plan_id
        if not attempt.unstaged_ranks:
            self._plans.drop(attempt.plan_id)
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
        told = self._told(attempt)
        if told:
            return self._abort(attempt, told, now_s)
        if self._members.is_gone(attempt.save.session, 0):
            return self._publish(attempt, now_s, "rank 0 is gone")
        return [self._ask_commit(attempt)]

    def _list(self, attempt: Attempt, now_s: float) -> list[Action]:
        attempt.listed_s = now_s
        attempt.is_listing = True
        return [ListShards(attempt.save, attempt.directory, attempt.world_size, tuple(attempt.unpersisted_ranks))]

    def _listed(self, attempt: Attempt, event: ShardsListed, now_s: float) -> list[Action]:
        """What is on storage counts, whoever has not told us."""
        attempt.is_listing = False
        if not attempt.is_open or attempt.publishing:
            return []
        if event.published:
            if attempt.state is CheckpointState.OPEN:
                attempt.walk(CheckpointEvent.ALL_PERSISTED)
            return self._published(attempt.save, now_s)
        if attempt.doomed:
            return self._aborted(attempt, now_s)
        told = self._told(attempt)
        if told:
            attempt.failures = tuple(told)
            return self._aborted(attempt, now_s)
        return self._count(attempt, event.shards, now_s)

    def _told(self, attempt: Attempt) -> list[FailureReport]:
        """Ranks that know the end of an attempt that was taken up: if it is not published, it was given up."""
        if not attempt.adopted:
            return []
        why = "it was told by an earlier coordinator how the save has ended"
        ranks = [rank for rank in range(attempt.world_size) if self._members.was_told(attempt.save, rank)]
        return [self._at(attempt.save, rank, FailureReport("SaveEnded", why)) for rank in ranks]

    def _count(self, attempt: Attempt, shards: Sequence[ListedShard], now_s: float) -> list[Action]:
        """Take durable shards for persisted; who is gone and left nothing can not be waited for."""
        actions: list[Action] = []
        for shard in shards:
            if attempt.state is not CheckpointState.OPEN:
                return actions
            staged = ShardStaged(attempt.save, shard.rank, shard.plan_id, shard.overwrite)
            actions += self._staged(attempt, shard.rank, staged, now_s)
            if attempt.is_open:
                actions += self._persisted(attempt, shard.rank, now_s)
        if attempt.state is not CheckpointState.OPEN or not attempt.adopted:
            return actions
        excuses = {rank: self._members.excuse(attempt.save, rank) for rank in attempt.unstaged_ranks}
        lost = [self._lost(attempt.save, rank, why) for rank, why in excuses.items() if why is not None]
        return [*actions, *(self._abort(attempt, lost, now_s) if lost else [])]

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
            delay_s = PUBLISH_AGAIN_S if attempt.publish_failed_s is not None else 0.0
            actions.append(Publish(save, directory, world_size, attempt.plan_id, counts, attempt.overwrite, delay_s))
        return actions

    def _not_published(self, event: PublishFailed, now_s: float) -> list[Action]:
        attempt = self.attempts[event.save.session, event.save.seq]
        attempt.publishing = False
        if attempt.publish_failed_s is None:
            attempt.publish_failed_s = now_s
        if event.may_pass and now_s + PUBLISH_AGAIN_S <= attempt.publish_failed_s + self._retry_s:
            attempt.tell(now_s, f"not published yet: {event.failure.message}")
            return self._publish_approved(now_s)
        attempt.approved = ""
        return self._abort(attempt, [event.failure], now_s)

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
        actions: list[Action] = self._members.sweeps()
        for attempt in list(self.attempts.values()):
            late = attempt.overdue(now_s)
            if late:
                failures = [self._late(attempt.save, rank, what) for rank, what in late]
                actions += self._abort(attempt, failures, now_s)
            elif lacks_its_plan(attempt) and attempt.proposals and now_s - attempt.news_s >= PLAN_LOST_S:
                actions += self._take(attempt, plan_lost(attempt, sorted(attempt.proposals)), now_s)
            elif attempt.must_be_listed(now_s):
                actions += self._list(attempt, now_s)
            elif attempt.is_left_alone(now_s) and not self._members.is_member(attempt.save.session, 0):
                actions += self._publish(attempt, now_s, f"rank 0 has not come back within {RETURN_S:.0f} s")
        return actions

    def _node_silent(self, event: NodeSilent, now_s: float) -> list[Action]:
        """What needs a node that does not answer can not be saved; its ranks may be well and stay in the session."""
        self._members.silent(event.ranks)
        actions: list[Action] = []
        for attempt in list(self.attempts.values()):
            missing = [rank for rank in event.ranks if rank in attempt.unpersisted_ranks]
            if not missing or attempt.state is not CheckpointState.OPEN or now_s - attempt.opened_s < NODE_GRACE_S:
                continue
            if not attempt.silence_listed:
                attempt.silence_listed = True  # what it has written before it fell silent counts
                actions += self._list(attempt, now_s)
            elif not attempt.is_listing or now_s - (attempt.listed_s or now_s) > LISTING_S:
                actions += self._abort(attempt, self._silent(attempt, event, missing), now_s)
        return actions

    def _silent(self, attempt: Attempt, event: NodeSilent, missing: Sequence[int]) -> list[FailureReport]:
        named = list(missing[:20])
        text = f"node {event.node} has not been heard of for {event.silent_s:.0f} s, and step {attempt.save.step} "
        text += f"needs its ranks {named}"
        hint = "is the node up, and can it reach the coordinator? the next save tries again"
        return [FailureReport("NodeLost", text, hint, rank, event.node) for rank in named]

    def _late(self, save: SaveKey, rank: int, what: str) -> FailureReport:
        return self._at(save, rank, FailureReport("RankLate", f"{self._members.name(save.session, rank)} {what}"))
