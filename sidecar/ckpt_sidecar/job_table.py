"""One node: its ranks, their regions and shard jobs. Pure: events in, actions out.

No clock, socket, thread, file or torch in here; the time comes with each event. The lifecycles of
region and shard job are walked by the tables in ``ckpt_proto.lifecycles``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ckpt_proto.errors import FailureReport, LocalProtocolError, report_of
from ckpt_proto.identity import SaveKey
from ckpt_proto.lifecycles import SHARD, RegionEvent, RegionState, ShardEvent, ShardState, is_terminal, walk
from ckpt_proto.messages import (
    Aborted,
    AskRestoreStep,
    Committed,
    DecideCommit,
    Farewell,
    FinalPlan,
    GlobalPlan,
    Goodbye,
    GrowRegion,
    Heartbeat,
    Hello,
    Message,
    Pong,
    ProposePlan,
    RankLeft,
    Refused,
    RegionReady,
    RegionRefused,
    ReportFailure,
    ReportSkip,
    ShardPersisted,
    ShardStaged,
    SlotFreed,
    SubmitShard,
    Welcome,
)
from ckpt_sidecar.admission import check_submission, refusal
from ckpt_sidecar.events import (
    UNKNOWN_PID,
    Action,
    CancelShard,
    Event,
    FromCoordinator,
    FromRank,
    RankDied,
    RegionFailed,
    RegionPrepared,
    RemoveShardFiles,
    Send,
    ShardBroken,
    ShardDurable,
    ShardStarted,
    ToCoordinator,
    WriteShard,
)
from ckpt_sidecar.rank_record import FIRST_BYTE_CAPACITY, RankRecord

FOR_COORDINATOR: Final = (ProposePlan, GlobalPlan, ReportSkip, ReportFailure, DecideCommit, AskRestoreStep)
"""What a client may say to the coordinator; everything else is said by sidecars."""

MAX_ENDED_JOBS: Final = 64
"""Ended shard jobs kept for ``status``, late messages and diagnosis."""


@dataclass
class ShardJob:
    """One rank's part of one attempt."""

    submit: SubmitShard
    directory: str
    state: ShardState
    queued_s: float
    aborted: bool = False
    nbytes: int = 0

    def walk(self, event: ShardEvent) -> None:
        """One step of the shard job's lifecycle."""
        self.state = walk(SHARD, self.state, event)


class JobTable:
    """The node's decisions. ``handle`` is the only method that changes anything."""

    def __init__(self, job_id: str, sidecar_id: str, node: str, torch_version: str) -> None:
        self._job_id = job_id
        self._sidecar_id = sidecar_id
        self._node = node
        self._torch_version = torch_version
        self.draining = False
        self.ranks: dict[int, RankRecord] = {}
        self.jobs: dict[tuple[int, SaveKey], ShardJob] = {}
        self.written_bytes = 0
        self.lost: dict[SaveKey, str] = {}
        self._forgotten: dict[tuple[int, str], int] = {}

    # ------------------------------------------------------------ questions

    @property
    def is_busy(self) -> bool:
        """Whether a shard job has not ended."""
        return any(not is_terminal(SHARD, job.state) for job in self.jobs.values())

    @property
    def living_ranks(self) -> list[int]:
        """Ranks of this node whose client is connected."""
        return [rank for rank, record in self.ranks.items() if record.alive]

    @property
    def ended_in_order(self) -> bool:
        """Whether there were ranks and the client of each has said Goodbye: nobody is coming back."""
        return bool(self.ranks) and all(record.left_in_order for record in self.ranks.values())

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event, return what to do. An event that changes nothing returns no action."""
        match event:
            case FromRank():
                return self._from_rank(event, now_s)
            case FromCoordinator(rank=rank, message=message):
                return self._from_coordinator(rank, message)
            case RankDied(rank=rank, pid=pid, reason=reason):
                return self._rank_gone(rank, pid, reason)
            case RegionPrepared(rank=rank, ready=ready):
                return self._region_prepared(rank, ready)
            case RegionFailed():
                return self._region_failed(event)
            case ShardStarted(rank=rank, save=save):
                return self._shard_started(rank, save)
            case ShardDurable(rank=rank, save=save, nbytes=nbytes):
                return self._shard_durable(rank, save, nbytes)
            case ShardBroken(rank=rank, save=save, failure=failure):
                return self._shard_broken(rank, save, failure)
        return []

    def _from_rank(self, event: FromRank, now_s: float) -> list[Action]:
        message = event.message
        if isinstance(message, Hello):
            return self._hello(event, message)
        record = self._record_of(event.peer)
        if isinstance(message, Heartbeat):
            return [Send(event.peer, Pong(self._sidecar_id, known=record is not None))]
        if record is None:
            answer = Farewell() if isinstance(message, Goodbye) else Pong(self._sidecar_id, known=False)
            return [Send(event.peer, answer)]
        rank = record.hello.rank
        if isinstance(message, Goodbye):
            return [*self._rank_gone(rank, record.hello.pid, ""), Send(event.peer, Farewell())]
        if isinstance(message, SubmitShard):
            return self._submit(record, message, now_s)
        if isinstance(message, GrowRegion):
            return self._grow(record, message)
        if isinstance(message, (ReportFailure, ReportSkip)) and (rank, message.save) in self.jobs:
            return []  # what is sealed is no longer the client's to give up
        return [ToCoordinator(rank, message)] if isinstance(message, FOR_COORDINATOR) else []

    def _record_of(self, peer: bytes) -> RankRecord | None:
        for record in self.ranks.values():
            if record.peer == peer and record.alive:
                return record
        return None

    # ------------------------------------------------------------ coming and going

    def _hello(self, event: FromRank, hello: Hello) -> list[Action]:
        old = self.ranks.get(hello.rank)
        if old is not None and old.alive and (old.peer, old.hello.pid) == (event.peer, hello.pid):
            return []  # said twice on one connection, because the first had no answer yet: it gets one
        failure = refusal(hello, event.pid, old, self._job_id, self._torch_version, draining=self.draining)
        if failure is not None:
            return [Send(event.peer, Refused(failure.at(hello.rank, self._node)))]
        elsewhere = event.pid == UNKNOWN_PID
        record = RankRecord.succeeding(old, hello, event.peer, other_namespace=elsewhere)
        self.ranks[hello.rank] = record
        return [ToCoordinator(hello.rank, hello)]

    def _rank_gone(self, rank: int, pid: int, reason: str) -> list[Action]:
        record = self.ranks.get(rank)
        if record is None or not record.alive or record.hello.pid != pid:
            return []
        record.alive = False
        record.left_in_order = not reason
        record.plan = None
        return [ToCoordinator(rank, RankLeft(rank, reason))]

    # ------------------------------------------------------------ plans and regions

    def _from_coordinator(self, rank: int, message: Message) -> list[Action]:
        record = self.ranks.get(rank)
        actions: list[Action] = []
        if isinstance(message, Aborted):
            actions += self._abort_job(rank, message.save)
        if isinstance(message, (Aborted, Committed)):
            self._remember_lost(rank, message)
        if record is None or not record.alive:
            return actions
        if isinstance(message, Welcome):
            record.session = message.session
            message = replace(message, sidecar_id=self._sidecar_id, node=self._node, torch_version=self._torch_version)
        elif isinstance(message, Refused):
            record.alive = False
        elif isinstance(message, FinalPlan):
            record.plan = message
            for index in range(record.hello.slots):
                actions += self._prepare(record, index)
        elif isinstance(message, (Aborted, Committed)) and message.save.session != record.session:
            return actions
        elif isinstance(message, Aborted) and message.replan and not _is_newer(record.plan, message.save):
            record.plan = None
        return [Send(record.peer, message), *actions]

    def _prepare(self, record: RankRecord, index: int, byte_capacity: int = FIRST_BYTE_CAPACITY) -> list[Action]:
        order = record.prepare(index, byte_capacity)
        return [order] if order else []

    def _region_prepared(self, rank: int, ready: RegionReady) -> list[Action]:
        record = self.ranks[rank]
        slot = record.slots[ready.slot]
        slot.preparing = False
        if record.plan is None or ready.plan_id != record.plan.plan_id or not record.alive:
            return self._prepare(record, ready.slot)
        slot.ready = ready
        return [Send(record.peer, ready)]

    def _region_failed(self, event: RegionFailed) -> list[Action]:
        record = self.ranks[event.rank]
        record.slots[event.slot].preparing = False
        if record.plan is None or event.plan_id != record.plan.plan_id or not record.alive:
            return self._prepare(record, event.slot)
        failure = event.failure.at(event.rank, self._node)
        return [Send(record.peer, RegionRefused(event.plan_id, event.slot, failure))]

    def _grow(self, record: RankRecord, message: GrowRegion) -> list[Action]:
        plan = record.plan
        if plan is None or plan.plan_id != message.plan_id or message.slot >= record.hello.slots:
            failure = FailureReport("StalePlan", f"plan {message.plan_id} is not the plan of rank {record.hello.rank}")
            return [Send(record.peer, RegionRefused(message.plan_id, message.slot, failure))]
        return self._prepare(record, message.slot, max(message.byte_capacity, FIRST_BYTE_CAPACITY))

    # ------------------------------------------------------------ shard jobs

    def _submit(self, record: RankRecord, submit: SubmitShard, now_s: float) -> list[Action]:
        rank = record.hello.rank
        if (rank, submit.save) in self.jobs or submit.save.seq <= self._forgotten.get((rank, submit.save.session), -1):
            return []  # said before: writing it again would be over the file of a save that may be committed
        try:
            plan = check_submission(record, submit)
        except LocalProtocolError as error:
            failure = report_of(error, hint="the next save is planned anew").at(rank, self._node)
            told = ToCoordinator(rank, ReportFailure(submit.save, failure))
            return [*self._give_back(record, submit), told]
        slot = record.slots[submit.slot]
        slot.walk(RegionEvent.FILL)
        slot.walk(RegionEvent.SEAL)
        self._forget_old_jobs()
        directory = record.hello.directory
        self.jobs[rank, submit.save] = ShardJob(submit, directory, ShardState.QUEUED, now_s)
        return [
            WriteShard(submit, plan.items, directory, record.hello.world_size, self._torch_version),
            ToCoordinator(rank, ShardStaged(submit.save, rank, submit.plan_id, submit.overwrite)),
        ]

    def _give_back(self, record: RankRecord, submit: SubmitShard) -> list[Action]:
        """The client counts a slot as ours since it sealed it: give it back, unless a job has it."""
        in_use = submit.slot < len(record.slots) and record.slots[submit.slot].state is not RegionState.FREE
        return [] if in_use else [Send(record.peer, SlotFreed(submit.slot, submit.generation))]

    def _forget_old_jobs(self) -> None:
        ended = [key for key, job in self.jobs.items() if is_terminal(SHARD, job.state)]
        for rank, save in ended[: max(0, len(ended) - MAX_ENDED_JOBS)]:
            del self.jobs[rank, save]
            session = (rank, save.session)
            self._forgotten[session] = max(save.seq, self._forgotten.get(session, -1))

    def _shard_started(self, rank: int, save: SaveKey) -> list[Action]:
        job = self.jobs[rank, save]
        if job.state is ShardState.QUEUED:
            job.walk(ShardEvent.START)
        return []

    def _shard_durable(self, rank: int, save: SaveKey, nbytes: int) -> list[Action]:
        job = self.jobs[rank, save]
        job.walk(ShardEvent.DURABLE)
        job.nbytes = nbytes
        self.written_bytes += nbytes
        if job.aborted:
            return [RemoveShardFiles(rank, save, job.directory), *self._release(rank, job)]
        persisted = ShardPersisted(save, rank, nbytes)
        record = self.ranks[rank]
        mine = record.alive and record.session == save.session
        to_client: list[Action] = [Send(record.peer, persisted)] if mine else []
        return [*to_client, *self._release(rank, job), ToCoordinator(rank, persisted)]

    def _shard_broken(self, rank: int, save: SaveKey, failure: FailureReport) -> list[Action]:
        job = self.jobs[rank, save]
        job.walk(ShardEvent.CANCEL if job.aborted else ShardEvent.FAIL)
        actions: list[Action] = [RemoveShardFiles(rank, save, job.directory), *self._release(rank, job)]
        if not job.aborted:
            actions.append(ToCoordinator(rank, ReportFailure(save, failure.at(rank, self._node))))
        return actions

    def _abort_job(self, rank: int, save: SaveKey) -> list[Action]:
        job = self.jobs.get((rank, save))
        if job is None or job.aborted:
            return []
        job.aborted = True
        if job.state is ShardState.PERSISTED:
            return [RemoveShardFiles(rank, save, job.directory)]
        if is_terminal(SHARD, job.state):
            return []
        return [CancelShard(rank, save)]

    def _remember_lost(self, rank: int, message: Aborted | Committed) -> None:
        """What was staged and could not be saved, when nobody was left to be told. A later commit makes it history."""
        if isinstance(message, Committed):
            self.lost.clear()
            return
        record = self.ranks.get(rank)
        told = record is not None and record.alive and record.session == message.save.session
        if (rank, message.save) in self.jobs and not told and not message.skipped:
            self.lost[message.save] = "; ".join(map(str, message.failures))

    def _release(self, rank: int, job: ShardJob) -> list[Action]:
        record = self.ranks[rank]
        index = job.submit.slot
        slot = record.slots[index]
        slot.walk(RegionEvent.RELEASE)
        again = self._prepare(record, index)
        if again or not record.alive or index >= record.hello.slots:
            return again
        return [Send(record.peer, SlotFreed(index, slot.generation))]


def _is_newer(plan: FinalPlan | None, save: SaveKey) -> bool:
    """Whether ``plan`` was made after ``save``: an order to plan anew that is repeated late must not void it."""
    return plan is not None and plan.save.seq > save.seq
