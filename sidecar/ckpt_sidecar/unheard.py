"""Saves whose end a node does not hear, because the coordinator, on another node, is silent. Pure.

Storage is asked in its place: a save is committed when ``.metadata`` names it, whoever says so. What is not committed
there when patience is at its end fails in doubt: the coordinator may be well behind a broken network, and may commit or
remove it later, so nothing of it is touched here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckpt_proto.checkpoint_layout import checkpoint_id
from ckpt_proto.errors import FailureReport
from ckpt_proto.messages import Aborted, Committed
from ckpt_sidecar.actions import Action, FindCommit
from ckpt_sidecar.events import CommitLookedFor, CoordinatorSilent
from ckpt_sidecar.rank_record import RankRecord
from ckpt_sidecar.shard_job import ShardJob
from ckpt_sidecar.shard_table import ShardTable

LOOKS: Final = 8
"""How often the storage is looked at in the time after which ranks are told that the end is in doubt."""


class UnheardEnds:
    """The part of the node's decisions that is about a silent coordinator; the job table calls it."""

    def __init__(self, ranks: Mapping[int, RankRecord], shards: ShardTable, node: str) -> None:
        self._ranks = ranks
        self._shards = shards
        self._node = node

    def coordinator_silent(self, event: CoordinatorSilent, now_s: float) -> list[Action]:
        """Look for what it may have committed; who has waited for long enough is told that the end is in doubt."""
        actions: list[Action] = []
        for job in self._shards.unsettled:
            if job.submit.save.session not in event.sessions:
                continue
            if job.is_persisted and not job.looking and now_s - job.looked_s >= event.patience_s / LOOKS:
                job.looking, job.looked_s = True, now_s
                actions.append(FindCommit(job.submit.rank, job.submit.save, job.directory))
            actions += self._give_up(job, event)
        return actions

    def _give_up(self, job: ShardJob, event: CoordinatorSilent) -> list[Action]:
        submit, record = job.submit, self._ranks.get(job.submit.rank)
        if record is None or record.session != submit.save.session or job.in_doubt:
            return []
        patience_s = max(event.patience_s, record.hello.stage_timeout_s if record.hello.degrades else 0.0)
        if event.silent_s < patience_s:
            return []
        job.in_doubt = True
        failure = job.failure or self._doubt(job, event)
        return record.tell(Aborted(submit.save, (failure,), files_stay=True))

    def _doubt(self, job: ShardJob, event: CoordinatorSilent) -> FailureReport:
        text = f"the coordinator at {event.address} was not heard of for {event.silent_s:.0f} s, so it is not known "
        text += f"here whether step {job.submit.save.step} is saved; it may be committed yet"
        hint = "is the node of rank 0 up, and can this one reach it? steps() tells what is committed"
        return FailureReport("CoordinatorLost", text, hint, job.submit.rank, self._node)

    def looked_for(self, event: CommitLookedFor) -> Committed | None:
        """The commit that was found, if it is news."""
        job = self._shards.jobs.get((event.rank, event.save))
        if job is None:
            return None
        job.looking = False
        if not event.is_published or job.settled:
            return None
        return Committed(event.save, checkpoint_id(job.directory, event.save.step))
