"""The coordinator's attempts, from the first that is heard of one to its commit or abort. Pure.

Who takes part is ``membership``'s business, what time and storage say ``attempt_watch``'s, how attempts end
``attempt_end``'s.
"""

from __future__ import annotations

from ckpt_proto.checkpoint_layout import checkpoint_id
from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey, step_text
from ckpt_proto.lifecycles import CheckpointEvent, CheckpointState
from ckpt_proto.messages import (
    Aborted,
    AskCommit,
    Committed,
    DecideCommit,
    GlobalPlan,
    Message,
    ProposePlan,
    ReportFailure,
    ReportSkip,
    ShardPersisted,
    ShardStaged,
)
from ckpt_sidecar.actions import Action, ToRank
from ckpt_sidecar.attempt import Attempt
from ckpt_sidecar.attempt_book import AttemptBook
from ckpt_sidecar.attempt_end import AttemptEnd
from ckpt_sidecar.counters import Counters
from ckpt_sidecar.membership import Departure, Membership, Terms
from ckpt_sidecar.plan_book import (
    PlanBook,
    PlanStep,
    lacks_its_plan,
    made_by,
    plan_lost,
    structures_differ,
)


class AttemptTable:
    """What the coordinator decides of each attempt; the checkpoint table calls it.

    ``members`` is the checkpoint table's own; ``retry_s`` and ``stall_s`` are as ``AttemptEnd`` takes them.
    """

    def __init__(self, members: Membership, retry_s: float, stall_s: float) -> None:
        self._members = members
        self._plans = PlanBook()
        self.book = AttemptBook()
        self.counters = Counters()
        self.end = AttemptEnd(members, self.book, self._plans, self.counters, retry_s, stall_s)

    def about(self, save: SaveKey, rank: int, message: Message, now_s: float) -> list[Action]:
        """A message of a rank, or about it, that is about an attempt."""
        attempt = self.book.get(save)
        if attempt is None:
            if self.book.is_forgotten(save):
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
        return self.end.abort(attempt, failures, now_s) if failures else self._progress(attempt, rank, message, now_s)

    def _progress(self, attempt: Attempt, rank: int, message: Message, now_s: float) -> list[Action]:
        match message:
            case ProposePlan():
                return self._proposed(attempt, rank, message, now_s)
            case GlobalPlan() if rank == 0:
                return self._planned(attempt, message, now_s)
            case ShardStaged():
                return self.staged(attempt, rank, message, now_s)
            case ShardPersisted():
                return self.persisted(attempt, rank, now_s)
            case ReportSkip(reason=reason):
                attempt.skipped = True
                return self.end.abort(
                    attempt, [self.at(attempt.save, rank, FailureReport("SaveSkipped", reason))], now_s
                )
            case ReportFailure(failure=failure, replan=replan):
                return self.end.abort(attempt, [self.at(attempt.save, rank, failure)], now_s, replan=replan)
            case DecideCommit() if rank == 0:
                return self._decided(attempt, message, now_s)
        return []

    def at(self, save: SaveKey, rank: int, failure: FailureReport) -> FailureReport:
        """A failure, attributed to a rank and its node."""
        return failure.at(rank, self._members.node(save.session, rank))

    # ------------------------------------------------------------ coming and going

    def depart(self, departure: Departure, now_s: float) -> list[Action]:
        """A rank is gone: what it had not staged can not be saved, what it had staged goes on without it."""
        rank, reason = departure.rank, departure.reason
        actions: list[Action] = []
        for attempt in self.book.open_of(departure.token):
            attempt.tell(now_s, f"rank {rank} left{': ' + reason if reason else ''}")
            if rank not in attempt.staged and attempt.adopted:
                actions += self.end.look(attempt, now_s)  # what it had staged before we lived may be durable
            elif rank not in attempt.staged:
                actions += self.end.abort(attempt, [self.lost(attempt.save, rank, reason)], now_s)
            elif rank == 0 and attempt.asked_s is not None and not attempt.approved and not attempt.doomed:
                actions += self.end.publish(attempt, now_s, "rank 0 is gone")
        return actions

    def ask_again(self, token: str) -> list[Action]:
        """Rank 0 is back in its session: the question whether to commit may have been lost on the way."""
        return [
            self._ask_commit(attempt)
            for attempt in self.book.open_of(token)
            if attempt.state is CheckpointState.COMPLETE and not attempt.approved and not attempt.doomed
        ]

    def _ask_commit(self, attempt: Attempt) -> Action:
        return ToRank(0, AskCommit(attempt.save, checkpoint_id(attempt.directory, attempt.save.step)))

    def lost(self, save: SaveKey, rank: int, reason: str) -> FailureReport:
        """A rank that has left before it had staged."""
        name = self._members.name(save.session, rank)
        text = f"{name} left before it had staged {step_text(save.step)}: {reason or 'it closed its client'}"
        return self.at(save, rank, FailureReport("RankLost", text))

    def _ended(self, save: SaveKey, rank: int) -> FailureReport:
        text = f"session {save.session} of rank {rank} is over: another rank of it was restarted"
        return self.at(save, rank, FailureReport("SessionEnded", text, "restart every rank, as torchelastic does"))

    # ------------------------------------------------------------ attempts

    def _open(self, save: SaveKey, terms: Terms, now_s: float) -> Attempt:
        attempt = self.book.open(save, terms, now_s)
        # The plan in use was used by the newest attempts; a plan that no kept attempt names is gone for good.
        self._plans.keep_only(kept.plan_id for kept in self.book.attempts.values())
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
                f"save number {mine.seq} is of {step_text(mine.step)} on rank {rank} and of "
                f"{step_text(attempt.save.step)} on rank {first}"
            )
            hint = "every rank must call save() for the same steps in the same order"
            return [self.at(attempt.save, rank, FailureReport("StepsDiffer", text, hint))]
        session = self._members.session
        if session is None or session.token != attempt.save.session or attempt.adopted:
            return []
        gone = [other for other in session.departed if other not in attempt.staged]
        return [self.lost(attempt.save, other, session.departed[other]) for other in gone]

    # ------------------------------------------------------------ plans

    def take(self, attempt: Attempt, step: PlanStep, now_s: float) -> list[Action]:
        """What follows from a message about plans."""
        if step.failures:
            failures = [self.at(attempt.save, failure.rank, failure) for failure in step.failures]
            return self.end.abort(attempt, failures, now_s, replan=step.replan)
        return [ToRank(rank, message) for rank, message in step.messages]

    def _proposed(self, attempt: Attempt, rank: int, message: ProposePlan, now_s: float) -> list[Action]:
        had_a_plan = attempt.planned or lacks_its_plan(attempt)
        if attempt.adopted and had_a_plan and self._members.is_new_to(attempt.save, rank):
            # Another client of the rank has had a part in this plan: two must not stage one save.
            return self.take(attempt, plan_lost(attempt, [rank]), now_s)
        attempt.tell(now_s, f"rank {rank} proposed {len(message.items)} items")
        return self.take(attempt, self._plans.propose(attempt, rank, message), now_s)

    def _planned(self, attempt: Attempt, message: GlobalPlan, now_s: float) -> list[Action]:
        attempt.tell(now_s, "rank 0 made the global plan")
        return self.take(attempt, self._plans.plan(attempt, message), now_s)

    # ------------------------------------------------------------ from staged to committed

    def staged(self, attempt: Attempt, rank: int, message: ShardStaged, now_s: float) -> list[Action]:
        """A rank's region is sealed."""
        if rank in attempt.staged:
            return []
        if attempt.staged and message.overwrite != attempt.overwrite:
            text = f"rank {rank} called save() with overwrite={message.overwrite}, other ranks with {attempt.overwrite}"
            failure = self.at(attempt.save, rank, FailureReport("OverwriteDiffers", text))
            return self.end.abort(attempt, [failure], now_s)
        attempt.staged.add(rank)
        attempt.overwrite = message.overwrite
        attempt.tell(now_s, f"rank {rank} staged")
        waits_for_it = attempt.adopted and message.plan_id == made_by(attempt)
        if attempt.proposals and not attempt.planned and not waits_for_it:
            return self.take(attempt, structures_differ(attempt), now_s)
        if attempt.plan_id and message.plan_id != attempt.plan_id:
            text = f"rank {rank} staged plan {message.plan_id}, others {attempt.plan_id}"
            failure = self.at(attempt.save, rank, FailureReport("PlanDiffers", text))
            return self.end.abort(attempt, [failure], now_s, replan=True)
        attempt.plan_id = message.plan_id
        if not attempt.unstaged_ranks:
            self._plans.drop(attempt.plan_id)
        return []

    def persisted(self, attempt: Attempt, rank: int, now_s: float) -> list[Action]:
        """A rank's shard is durable; the last one has rank 0 asked, or the attempt published."""
        if rank in attempt.persisted:
            return []
        attempt.persisted.add(rank)
        attempt.tell(now_s, f"rank {rank} persisted")
        if len(attempt.persisted) < attempt.world_size:
            return []
        attempt.walk(CheckpointEvent.ALL_PERSISTED)
        attempt.asked_s = now_s
        told = self.told(attempt)
        if told:
            return self.end.abort(attempt, told, now_s)
        if self._members.is_gone(attempt.save.session, 0):
            return self.end.publish(attempt, now_s, "rank 0 is gone")
        return [self._ask_commit(attempt)]

    def told(self, attempt: Attempt) -> list[FailureReport]:
        """Ranks that know the end of an attempt that was taken up: if it is not published, it was given up."""
        if not attempt.adopted:
            return []
        why = "it was told by an earlier coordinator how the save has ended"
        ranks = [rank for rank in range(attempt.world_size) if self._members.was_told(attempt.save, rank)]
        return [self.at(attempt.save, rank, FailureReport("SaveEnded", why)) for rank in ranks]

    def _decided(self, attempt: Attempt, message: DecideCommit, now_s: float) -> list[Action]:
        if message.accept:
            is_due = attempt.state is CheckpointState.COMPLETE
            return self.end.publish(attempt, now_s, "rank 0 ordered the commit") if is_due else []
        text = f"a pre-commit hook refused step {attempt.save.step}: {message.reason}"
        return self.end.abort(attempt, [self.at(attempt.save, 0, FailureReport("CommitVetoed", text))], now_s)
