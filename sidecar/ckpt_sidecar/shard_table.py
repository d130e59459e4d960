"""The shard jobs of a node: from a sealed region to a durable data file, tried again, given up or told again. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_proto.errors import FailureReport, LocalProtocolError, report_of
from ckpt_proto.identity import SaveKey
from ckpt_proto.lifecycles import RegionEvent, RegionState, ShardEvent, ShardState
from ckpt_proto.messages import (
    Aborted,
    Committed,
    ReportFailure,
    ShardPersisted,
    SlotFreed,
    SubmitShard,
)
from ckpt_sidecar.actions import Action, BreakSeal, CancelShard, FindShard, RemoveShardFiles, ToCoordinator, WriteShard
from ckpt_sidecar.admission import check_submission
from ckpt_sidecar.events import (
    Event,
    ShardBroken,
    ShardDurable,
    ShardFound,
    ShardMissing,
    ShardSealed,
    ShardStalled,
    ShardStarted,
)
from ckpt_sidecar.rank_record import RankRecord
from ckpt_sidecar.shard_job import ShardBook, ShardJob


class ShardTable:
    """The part of the node's decisions that is about shard jobs; the job table calls it.

    ``ranks`` is the job table's own, ``retry_s`` how long a write that fails is tried again. ``lost`` has what was
    staged and could not be saved while nobody was left to be told, by save.
    """

    def __init__(self, ranks: dict[int, RankRecord], node: str, torch_version: str, retry_s: float) -> None:
        self._ranks = ranks
        self._node = node
        self._torch_version = torch_version
        self._retry_s = retry_s
        self.jobs = ShardBook()
        self.written_bytes = 0
        self.lost: dict[SaveKey, str] = {}

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take an event of a worker."""
        match event:
            case ShardStarted(rank=rank, save=save):
                return self._started(rank, save)
            case ShardDurable(rank=rank, save=save, nbytes=nbytes):
                return self._durable(rank, save, nbytes)
            case ShardBroken():
                return self._broken(event, now_s)
            case ShardStalled():
                return self._stalled(event)
            case ShardSealed() | ShardFound() | ShardMissing():
                return self._looked_for(event, now_s)
        return []

    def adopt(self, orders: Iterable[WriteShard], now_s: float) -> list[Action]:
        """Write what an earlier sidecar has left sealed."""
        actions: list[Action] = []
        for order in orders:
            job = ShardJob.queued(order, now_s)
            self.jobs.add(job)
            actions += [order, ToCoordinator(order.submit.rank, job.staged())]
        return actions

    @property
    def unsettled(self) -> list[ShardJob]:
        """Jobs of attempts whose end this node has not heard."""
        return [job for job in self.jobs.values() if not job.settled]

    def say_again(self) -> list[Action]:
        """What a coordinator must know of the jobs whose end this node has not heard."""
        actions: list[Action] = []
        for job in self.unsettled:
            rank, save = job.submit.rank, job.submit.save
            if job.failure is not None:
                actions.append(ToCoordinator(rank, ReportFailure(save, job.failure)))
                continue
            actions.append(ToCoordinator(rank, job.staged()))
            if job.is_persisted:
                actions.append(ToCoordinator(rank, ShardPersisted(save, rank, job.nbytes)))
        return actions

    def submit(self, record: RankRecord, submit: SubmitShard, now_s: float) -> list[Action]:
        """A rank has sealed a region: write it."""
        rank = record.hello.rank
        if (rank, submit.save) in self.jobs or self.jobs.is_forgotten(rank, submit.save):
            return []  # said before: writing it again would be over the file of a save that may be committed
        try:
            plan = check_submission(record, submit)
        except LocalProtocolError as error:
            failure = report_of(error, hint="the next save is planned anew").at(rank, self._node)
            told = ToCoordinator(rank, ReportFailure(submit.save, failure, replan=True))
            return [*self._give_back(record, submit), told]
        slot = record.slots[submit.slot]
        slot.walk(RegionEvent.FILL)
        slot.walk(RegionEvent.SEAL)
        assert slot.ready is not None
        hello = record.hello
        order = WriteShard(submit, plan.items, hello.directory, hello.world_size, self._torch_version, slot.ready)
        job = ShardJob.queued(order, now_s)
        self.jobs.add(job)
        return [order, ToCoordinator(rank, job.staged())]

    def _give_back(self, record: RankRecord, submit: SubmitShard) -> list[Action]:
        """The client counts a slot as ours since it sealed it: give it back, unless a job has it.

        The seal goes first: a sidecar that starts later would take what was refused for a staged shard.
        """
        in_use = submit.slot < len(record.slots) and record.slots[submit.slot].state is not RegionState.FREE
        return [] if in_use else [BreakSeal(record.hello.rank, submit.slot), *_let_go(record, submit)]

    def resubmit(self, record: RankRecord, submit: SubmitShard) -> list[Action]:
        """A rank that was welcomed again does not know what became of a shard: tell it, or look."""
        rank = record.hello.rank
        if submit.rank != rank or submit.save.session != record.session:
            return []
        job = self.jobs.get((rank, submit.save))
        if job is not None:
            return self._tell_again(record, job)
        if self.jobs.is_forgotten(rank, submit.save):
            return _let_go(record, submit)
        return [FindShard(submit, record.hello.directory)]

    def _tell_again(self, record: RankRecord, job: ShardJob) -> list[Action]:
        submit = job.submit
        freed = _let_go(record, submit) if job.is_ended else []
        told: list[Action] = [ToCoordinator(submit.rank, job.staged())]
        if job.is_persisted:
            persisted = ShardPersisted(submit.save, submit.rank, job.nbytes)
            told += [*record.tell(persisted), ToCoordinator(submit.rank, persisted)]
        return [*freed, *told]

    def _looked_for(self, event: ShardSealed | ShardFound | ShardMissing, now_s: float) -> list[Action]:
        """What became of a shard that a rank does not know the end of."""
        submit = event.submit
        record = self._ranks.get(submit.rank)
        if (submit.rank, submit.save) in self.jobs or record is None or record.session != submit.save.session:
            return []  # it has come meanwhile, or its rank has gone
        if isinstance(event, ShardSealed):
            return self.submit(record, submit, now_s)
        if isinstance(event, ShardMissing):
            failed = ReportFailure(submit.save, event.failure.at(submit.rank, self._node))
            return [*_let_go(record, submit), ToCoordinator(submit.rank, failed)]
        job = ShardJob(submit, event.directory, ShardState.PERSISTED, now_s, nbytes=event.nbytes)
        job.world_size = record.hello.world_size
        self.jobs.add(job)
        return self._tell_again(record, job)

    def _started(self, rank: int, save: SaveKey) -> list[Action]:
        """A writer has taken a job."""
        job = self.jobs[rank, save]
        if job.state is ShardState.QUEUED:
            job.walk(ShardEvent.START)
        return []

    def _durable(self, rank: int, save: SaveKey, nbytes: int) -> list[Action]:
        """A job's data file and manifest are durable."""
        job = self.jobs[rank, save]
        job.walk(ShardEvent.DURABLE)
        job.nbytes = nbytes
        self.written_bytes += nbytes
        if job.aborted:
            return [*self._release(rank, job), RemoveShardFiles(rank, save, job.directory)]
        persisted = ShardPersisted(save, rank, nbytes)
        record = self._ranks[rank]
        to_client = record.tell(persisted) if record.session == save.session else []
        return [*to_client, *self._release(rank, job), ToCoordinator(rank, persisted)]

    def _stalled(self, event: ShardStalled) -> list[Action]:
        """The save is given up; the region stays in use until the writer comes back."""
        job = self.jobs[event.rank, event.save]
        if job.state is not ShardState.WRITING or job.aborted or job.failure is not None:
            return []
        text = f"step {event.save.step}: nothing was written to {job.directory} for {event.idle_s:.0f} s "
        text += f"({event.written_bytes} of {event.total_bytes} bytes)"
        hint = "does the storage hang? its region is in use until the write returns"
        job.failure = FailureReport("StorageStalled", text, hint, event.rank, self._node)
        return [ToCoordinator(event.rank, ReportFailure(event.save, job.failure))]

    def _broken(self, event: ShardBroken, now_s: float) -> list[Action]:
        """A try to write has failed: try again, or give the job up."""
        rank, save = event.rank, event.save
        job = self.jobs[rank, save]
        again = job.next_try(now_s, self._retry_s) if event.may_pass and not job.aborted else None
        if again is not None:
            job.walk(ShardEvent.RETRY)
            return [again]
        job.walk(ShardEvent.CANCEL if job.aborted else ShardEvent.FAIL)
        actions: list[Action] = [*self._release(rank, job), RemoveShardFiles(rank, save, job.directory)]
        if not job.aborted and job.failure is None:
            job.failure = event.failure.at(rank, self._node)
            actions.append(ToCoordinator(rank, ReportFailure(save, job.failure)))
        return actions

    def abort(self, rank: int, save: SaveKey, *, files_stay: bool) -> list[Action]:
        """The coordinator has given an attempt up: so does this node, unless it may still appear."""
        job = self.jobs.get((rank, save))
        if job is None or job.aborted:
            return []
        job.aborted = True
        if files_stay:
            return []
        if job.state is ShardState.PERSISTED:
            return [RemoveShardFiles(rank, save, job.directory)]
        return [] if job.is_ended else [CancelShard(rank, save)]

    def commit(self, rank: int, save: SaveKey) -> None:
        """The coordinator has published an attempt."""
        job = self.jobs.get((rank, save))
        if job is not None:
            job.committed = True

    def remember_lost(self, rank: int, message: Aborted | Committed) -> None:
        """How an attempt has ended: what was staged and could not be saved, when nobody was left to be told, is kept. A
        later commit makes it history."""
        if isinstance(message, Committed):
            self.lost.clear()
            return
        record = self._ranks.get(rank)
        told = record is not None and record.alive and record.session == message.save.session
        if (rank, message.save) in self.jobs and not told and not message.skipped:
            self.lost[message.save] = "; ".join(map(str, message.failures))

    def _release(self, rank: int, job: ShardJob) -> list[Action]:
        record = self._ranks[rank]
        index = job.submit.slot
        slot = record.slots[index]
        slot.walk(RegionEvent.RELEASE)
        broken = BreakSeal(rank, index)
        again = _prepared(record, index)
        if again or index >= record.hello.slots:
            return [broken, *again]
        return [broken, *record.tell(_freed(job.submit))]


def _let_go(record: RankRecord, submit: SubmitShard) -> list[Action]:
    """Tell the client that a slot is its own again, if the region is the one that it has sealed.

    Else another one is being prepared or has been told of, and is the client's from then on: a client that filled the
    region that it knows would do so under the hands of a worker.
    """
    slot = record.slots[submit.slot] if submit.slot < len(record.slots) else None
    if slot is None or slot.preparing or slot.ready is None or slot.ready.generation != submit.generation:
        return []
    return record.tell(_freed(submit))


def _prepared(record: RankRecord, index: int) -> list[Action]:
    order = record.prepare(index)
    return [order] if order else []


def _freed(submit: SubmitShard) -> SlotFreed:
    return SlotFreed(submit.slot, submit.generation, submit.save.seq)
