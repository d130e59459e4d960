"""What ends or carries on an attempt without a message of its ranks: time, silence, and what storage says. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey, step_text
from ckpt_proto.lifecycles import CheckpointState
from ckpt_proto.messages import (
    ShardStaged,
)
from ckpt_sidecar.actions import Action
from ckpt_sidecar.attempt import LISTING_S, RETURN_S, Attempt
from ckpt_sidecar.attempt_table import AttemptTable
from ckpt_sidecar.events import ListedShard, NodeSilent, ShardsListed
from ckpt_sidecar.membership import Membership
from ckpt_sidecar.plan_book import (
    lacks_its_plan,
    plan_lost,
)

PLAN_LOST_S: Final = 15.0
"""How long ranks wait for a plan that rank 0 made before this coordinator lived."""

NODE_GRACE_S: Final = 5.0
"""How old an attempt must be before a silent node ends it: the node may be about to come back."""


class AttemptWatch:
    """Looks after the attempts of an attempt table; ``members`` and ``attempts`` are the checkpoint table's own."""

    def __init__(self, members: Membership, attempts: AttemptTable) -> None:
        self._members = members
        self._attempts = attempts
        self._end = attempts.end

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed: who is late, what must be looked for, whom nobody waits for any longer."""
        actions: list[Action] = self._end.tick(now_s)
        for attempt in [attempt for attempt in self._attempts.book.attempts.values() if attempt.is_open]:
            late = attempt.overdue(now_s)
            if late:
                failures = [self._late(attempt.save, rank, what) for rank, what in late]
                actions += self._end.abort(attempt, failures, now_s)
            elif lacks_its_plan(attempt) and attempt.proposals and now_s - attempt.news_s >= PLAN_LOST_S:
                actions += self._attempts.take(attempt, plan_lost(attempt, sorted(attempt.proposals)), now_s)
            elif attempt.must_be_listed(now_s):
                actions += self._end.look(attempt, now_s)
            elif attempt.is_left_alone(now_s) and not self._members.is_member(attempt.save.session, 0):
                actions += self._end.publish(attempt, now_s, f"rank 0 has not come back within {RETURN_S:.0f} s")
        return actions

    def _late(self, save: SaveKey, rank: int, what: str) -> FailureReport:
        return self._attempts.at(
            save, rank, FailureReport("RankLate", f"{self._members.name(save.session, rank)} {what}")
        )

    def node_silent(self, event: NodeSilent, now_s: float) -> list[Action]:
        """What needs a node that does not answer can not be saved; its ranks may be well and stay in the session."""
        self._members.silent(event.ranks)
        actions: list[Action] = []
        for attempt in list(self._attempts.book.attempts.values()):
            missing = [rank for rank in event.ranks if rank in attempt.unpersisted_ranks]
            if not missing or attempt.state is not CheckpointState.OPEN or now_s - attempt.opened_s < NODE_GRACE_S:
                continue
            if now_s - attempt.opened_s <= attempt.stage_timeout_s and self._members.degrade(
                attempt.save.session, missing
            ):
                continue  # they may have no sidecar and write all the same: the tick looks for what they have written
            if not attempt.silence_listed:
                attempt.silence_listed = True  # what it has written before it fell silent counts
                actions += self._end.look(attempt, now_s)
            elif not attempt.is_listing or now_s - (attempt.listed_s or now_s) > LISTING_S:
                actions += self._end.abort(attempt, self._silent(attempt, event, missing), now_s)
        return actions

    def _silent(self, attempt: Attempt, event: NodeSilent, missing: Sequence[int]) -> list[FailureReport]:
        named = list(missing[:20])
        text = (
            f"node {event.node} has not been heard of for {event.silent_s:.0f} s, and {step_text(attempt.save.step)} "
        )
        text += f"needs its ranks {named}"
        hint = "is the node up, and can it reach the coordinator? the next save tries again"
        return [FailureReport("NodeLost", text, hint, rank, event.node) for rank in named]

    def listed(self, event: ShardsListed, now_s: float) -> list[Action]:
        """What is on storage counts, whoever has not told us."""
        attempt = self._attempts.book.get(event.save)
        if attempt is None:
            return []
        attempt.is_listing = False
        if not attempt.is_open or attempt.publishing or attempt.withdrawing_s is not None:
            return []
        if event.published:
            return self._end.found_published(attempt, now_s)
        told = [] if attempt.doomed else self._attempts.told(attempt)
        if attempt.doomed or told:
            attempt.failures = tuple(told) or attempt.failures
            found = {shard.rank for shard in event.shards}
            return self._end.give_up(attempt, now_s, is_complete=found.issuperset(attempt.unpersisted_ranks))
        return self._count(attempt, event.shards, now_s)

    def _count(self, attempt: Attempt, shards: Sequence[ListedShard], now_s: float) -> list[Action]:
        """Take durable shards for persisted; who is gone and left nothing can not be waited for."""
        actions: list[Action] = []
        for shard in shards:
            if attempt.state is not CheckpointState.OPEN:
                return actions
            staged = ShardStaged(attempt.save, shard.rank, shard.plan_id, shard.overwrite)
            actions += self._attempts.staged(attempt, shard.rank, staged, now_s)
            if attempt.is_open:
                actions += self._attempts.persisted(attempt, shard.rank, now_s)
        if attempt.state is not CheckpointState.OPEN or not attempt.adopted:
            return actions
        excuses = {rank: self._members.excuse(attempt.save, rank) for rank in attempt.unstaged_ranks}
        lost = [self._attempts.lost(attempt.save, rank, why) for rank, why in excuses.items() if why is not None]
        return [*actions, *(self._end.abort(attempt, lost, now_s) if lost else [])]
