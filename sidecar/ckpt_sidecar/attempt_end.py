"""How the coordinator's attempts end: published, or given up. Pure.

What leads to an end is ``attempt_table``'s and ``attempt_watch``'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ckpt_proto.checkpoint_layout import checkpoint_id
from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_proto.lifecycles import CheckpointEvent, CheckpointState
from ckpt_proto.messages import Committed
from ckpt_sidecar.actions import Action, ListShards, Publish, ToRank, Withdraw
from ckpt_sidecar.attempt import Attempt
from ckpt_sidecar.attempt_book import AttemptBook
from ckpt_sidecar.counters import Counters
from ckpt_sidecar.events import PublishFailed, WithdrawFailed, Withdrawn
from ckpt_sidecar.membership import Membership
from ckpt_sidecar.plan_book import PlanBook

AGAIN_S: Final = 2.0
"""Wait before publishing or withdrawing is tried again after an error that may pass."""

STALLED_HINT: Final = "does the storage hang? its files stay: should it appear after all, it is whole"
NOT_WITHDRAWN_HINT: Final = "its files could not be removed and are complete: the next start may commit it"


class AttemptEnd:
    """Publishes attempts and gives them up; ``members``, ``book`` and ``plans`` are the attempt table's own.

    ``retry_s``: how long publishing that fails is tried again; ``stall_s``: how long storage may take for it.
    """

    def __init__(
        self,
        members: Membership,
        book: AttemptBook,
        plans: PlanBook,
        counters: Counters,
        retry_s: float,
        stall_s: float,
    ) -> None:
        self._members = members
        self._book = book
        self._plans = plans
        self._counters = counters
        self._retry_s = retry_s
        self._stall_s = stall_s

    def earlier_life_is_busy(self) -> bool:
        """Whether an attempt of another session than that of now can still end in a commit."""
        return self._book.earlier_life_is_busy(self._members.session.token if self._members.session else "")

    def look(self, attempt: Attempt, now_s: float) -> list[Action]:
        """Have storage looked at for what is durable of an attempt, and whether it is published."""
        attempt.listed_s = now_s
        attempt.is_listing = True
        return [ListShards(attempt.save, attempt.directory, attempt.world_size, tuple(attempt.unpersisted_ranks))]

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed: nobody waits for ever for a storage that does not answer."""
        actions: list[Action] = []
        for attempt in list(self._book.attempts.values()):
            since_s = attempt.publishing_s if attempt.withdrawing_s is None else attempt.withdrawing_s
            if not attempt.is_open or since_s is None or now_s - since_s <= self._stall_s:
                continue
            waited = f"the storage has not answered for {now_s - since_s:.0f} s"
            if attempt.withdrawing_s is None:
                actions += self._publishing_stalled(attempt, now_s, waited)
            else:
                actions += self._end_in_doubt(attempt, now_s, waited)
        return actions

    # ------------------------------------------------------------ given up

    def abort(
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
            return self.look(attempt, now_s)
        return self.give_up(attempt, now_s, is_complete=attempt.state is CheckpointState.COMPLETE)

    def give_up(self, attempt: Attempt, now_s: float, *, is_complete: bool) -> list[Action]:
        """An attempt will not be committed, whose ``failures`` are known.

        One that is complete on storage would be committed by whoever finds it there, so it is made incomplete before
        anybody is told.
        """
        if not is_complete:
            return self._end_aborted(attempt, now_s)
        attempt.doomed, attempt.withdrawing_s = True, now_s
        attempt.tell(now_s, "to be withdrawn")
        return [Withdraw(attempt.save, attempt.directory)]

    def withdrawn(self, event: Withdrawn, now_s: float) -> list[Action]:
        """A complete attempt is no longer complete, unless it is found to be published."""
        attempt = self._book.get(event.save)
        if attempt is None or attempt.withdrawing_s is None or not attempt.is_open:
            return []
        if event.published:
            return self.found_published(attempt, now_s)
        return self._end_aborted(attempt, now_s)

    def not_withdrawn(self, event: WithdrawFailed, now_s: float) -> list[Action]:
        """A complete attempt could not be made incomplete: try again, or say so."""
        attempt = self._book.get(event.save)
        if attempt is None or attempt.withdrawing_s is None or not attempt.is_open:
            return []
        was_tried = attempt.publish_failed_s is not None  # the storage has had its time already
        if event.may_pass and not was_tried and now_s + AGAIN_S <= attempt.withdrawing_s + self._retry_s:
            return [Withdraw(attempt.save, attempt.directory, AGAIN_S)]
        return self._end_in_doubt(attempt, now_s, event.failure.message)

    def _end_in_doubt(self, attempt: Attempt, now_s: float, why: str) -> list[Action]:
        """What is complete on storage may be committed by whoever finds it, so no file of it may be removed either."""
        text = f"step {attempt.save.step} is given up, and is still complete on storage: {why}"
        attempt.failures = (*attempt.failures, FailureReport("NotWithdrawn", text, NOT_WITHDRAWN_HINT))
        return self._end_aborted(attempt, now_s, files_stay=True)

    def _end_aborted(self, attempt: Attempt, now_s: float, *, files_stay: bool = False) -> list[Action]:
        """An attempt is given up; every rank is told."""
        attempt.walk(CheckpointEvent.ABORT)
        attempt.ended_s = now_s
        attempt.proposals.clear()
        self._plans.drop(attempt.plan_id)
        attempt.tell(now_s, f"aborted: {'; '.join(map(str, attempt.failures))}")
        if not attempt.save.is_preparation:
            self._counters.count_aborted(skipped=attempt.skipped)
        attempt.files_stay = files_stay
        told = [ToRank(rank, attempt.aborted_for(rank)) for rank in range(attempt.world_size)]
        return [*told, *self._answer_if_settled(), *self._publish_approved(now_s)]

    def _answer_if_settled(self) -> list[Action]:
        return [] if self.earlier_life_is_busy() else self._members.answer()

    # ------------------------------------------------------------ published

    def publish(self, attempt: Attempt, now_s: float, why: str) -> list[Action]:
        """The commit is ordered."""
        if self._members.session is not None and self._book.is_superseded(attempt, self._members.session.token):
            text = f"the restarted job has begun to save step {attempt.save.step} itself"
            return self.abort(attempt, [FailureReport("Superseded", text)], now_s)
        attempt.approved = why
        attempt.tell(now_s, f"to be published: {why}")
        return self._publish_approved(now_s)

    def _publish_approved(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for attempt in self._book.to_publish():
            attempt.publishing_s = now_s
            attempt.tell(now_s, "publishing")
            counts = self._plans.entry_counts(attempt.plan_id)
            save, directory, world_size = attempt.save, attempt.directory, attempt.world_size
            delay_s = AGAIN_S if attempt.publish_failed_s is not None else 0.0
            actions.append(Publish(save, directory, world_size, attempt.plan_id, counts, attempt.overwrite, delay_s))
        return actions

    def not_published(self, event: PublishFailed, now_s: float) -> list[Action]:
        """Publishing has failed: try again, or give the attempt up."""
        attempt = self._book.get(event.save)
        if attempt is None or not attempt.is_open:
            return []  # it was given up because the storage hung
        attempt.publishing_s = None
        if attempt.publish_failed_s is None:
            attempt.publish_failed_s = now_s
        if event.may_pass and now_s + AGAIN_S <= attempt.publish_failed_s + self._retry_s:
            attempt.tell(now_s, f"not published yet: {event.failure.message}")
            return self._publish_approved(now_s)
        attempt.approved = ""
        return self.abort(attempt, [event.failure], now_s)

    def _publishing_stalled(self, attempt: Attempt, now_s: float, waited: str) -> list[Action]:
        """Nobody can say whether an attempt will appear: its ranks are let go, its files stay."""
        where = checkpoint_id(attempt.directory, attempt.save.step)
        text = f"step {attempt.save.step} is durable but not published: {waited} ({where})"
        attempt.failures = (FailureReport("PublishStalled", text, STALLED_HINT),)
        return self._end_aborted(attempt, now_s, files_stay=True)

    def published(self, save: SaveKey, now_s: float) -> list[Action]:
        """An attempt is committed."""
        attempt = self._book.get(save)
        if attempt is None:
            return []
        if not attempt.is_open:  # given up because the storage hung, and there after all
            attempt.tell(now_s, "committed after all")
            self._counters.count_committed(save.step, now_s)
            return self._tell_committed(attempt)
        attempt.walk(CheckpointEvent.PUBLISH)
        attempt.publishing_s = None
        attempt.ended_s = now_s
        attempt.tell(now_s, "committed")
        self._counters.count_committed(save.step, now_s)
        return [*self._tell_committed(attempt), *self._answer_if_settled(), *self._publish_approved(now_s)]

    def found_published(self, attempt: Attempt, now_s: float) -> list[Action]:
        """Storage says that an attempt is committed, whoever has done it."""
        if attempt.state is CheckpointState.OPEN:
            attempt.walk(CheckpointEvent.ALL_PERSISTED)
        return self.published(attempt.save, now_s)

    def _tell_committed(self, attempt: Attempt) -> list[Action]:
        save, where = attempt.save, checkpoint_id(attempt.directory, attempt.save.step)
        self._members.steps.setdefault(attempt.directory, set()).add(save.step)
        return [ToRank(rank, Committed(save, where)) for rank in range(attempt.world_size)]
