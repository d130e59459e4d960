"""One node: its ranks, their regions and shard jobs. Pure: events in, actions out.

No clock, socket, thread, file or torch in here; the time comes with each event. The lifecycles of
region and shard job are walked by the tables in ``ckpt_proto.lifecycles``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ckpt_proto.errors import FailureReport
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
    RegionRefused,
    ReportFailure,
    ReportSkip,
    Resubmit,
    SubmitShard,
    Welcome,
)
from ckpt_sidecar.actions import Action, RemoveRegions, Send, ToCoordinator
from ckpt_sidecar.admission import refusal
from ckpt_sidecar.adoption import adopted_records, adopted_writes, departures, state_of
from ckpt_sidecar.events import (
    UNKNOWN_PID,
    CommitLookedFor,
    CoordinatorRefuses,
    CoordinatorSilent,
    CoordinatorUp,
    Event,
    FoundRegion,
    FromCoordinator,
    FromRank,
    RankDied,
    RegionFailed,
    RegionPrepared,
    RegionsFound,
)
from ckpt_sidecar.rank_record import FIRST_BYTE_CAPACITY, RankRecord
from ckpt_sidecar.shard_job import ShardBook
from ckpt_sidecar.shard_table import ShardTable
from ckpt_sidecar.unheard import UnheardEnds

FOR_COORDINATOR: Final = (ProposePlan, GlobalPlan, ReportSkip, ReportFailure, DecideCommit, AskRestoreStep)
"""What a client may say to the coordinator; everything else is said by sidecars."""


class JobTable:
    """The node's decisions. ``handle`` is the only method that changes anything."""

    def __init__(
        self,
        job_id: str,
        sidecar_id: str,
        node: str,
        torch_version: str,
        *,
        retry_s: float = 30.0,
        generation: int = 0,
    ) -> None:
        """``retry_s``: how long a write that fails is tried again; ``generation``: where the count of new slots begins,
        high enough to meet none that an earlier sidecar has given out."""
        self._job_id = job_id
        self._sidecar_id = sidecar_id
        self._node = node
        self._torch_version = torch_version
        self._generation = generation
        self.draining = False
        self.ranks: dict[int, RankRecord] = {}
        self.shards = ShardTable(self.ranks, node, torch_version, retry_s)
        self._unheard = UnheardEnds(self.ranks, self.shards, node)

    # ------------------------------------------------------------ questions

    @property
    def jobs(self) -> ShardBook:
        """The shard jobs that are remembered."""
        return self.shards.jobs

    @property
    def is_busy(self) -> bool:
        """Whether a shard job has not ended."""
        return self.jobs.is_busy

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
                return self.ranks[rank].prepared(ready)
            case RegionFailed():
                return self._region_failed(event)
            case RegionsFound(regions=regions):
                return self._adopt(regions, now_s)
            case CoordinatorUp():
                return self.say_again()
            case CoordinatorRefuses(failure=failure):
                return self._refuse_waiting(failure)
            case CoordinatorSilent():
                return self._unheard.coordinator_silent(event, now_s)
            case CommitLookedFor(rank=rank):
                found = self._unheard.looked_for(event)
                return self._from_coordinator(rank, found) if found else []
        return self.shards.handle(event, now_s)

    def _from_rank(self, event: FromRank, now_s: float) -> list[Action]:
        message = event.message
        if isinstance(message, Hello):
            return self._hello(event, message)
        record = self._record_of(event.peer)
        if isinstance(message, Heartbeat):
            return [Send(event.peer, Pong(self._sidecar_id, known=record is not None))]
        if record is None:
            return [Send(event.peer, Pong(self._sidecar_id, known=False))]
        rank = record.hello.rank
        if isinstance(message, Goodbye):
            return [*self._rank_gone(rank, record.hello.pid, ""), Send(event.peer, Farewell())]
        match message:
            case SubmitShard():
                return self.shards.submit(record, message, now_s)
            case Resubmit(submit=submit):
                return self.shards.resubmit(record, submit)
            case GrowRegion():
                return self._grow(record, message)
            case FinalPlan():
                return self._take_plan(record, message)
            case ProposePlan(save=save) if save.session == record.session:
                record.begins(save.seq)
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
        if old is not None and old.is_client_of(hello):
            old.hello, old.peer, old.alive, old.left_in_order = hello, event.peer, True, False
            return [ToCoordinator(hello.rank, hello), *self._give_up_ended(hello)]
        elsewhere = event.pid == UNKNOWN_PID
        record = RankRecord.succeeding(old, hello, event.peer, other_namespace=elsewhere, generation=self._generation)
        self.ranks[hello.rank] = record
        broken = record.break_seals() if old is not None else []
        return [*broken, ToCoordinator(hello.rank, hello), *self._give_up_ended(hello)]

    def _give_up_ended(self, hello: Hello) -> list[Action]:
        """What an earlier sidecar had told the client to have failed must not be committed by this one."""
        ended = self.jobs.unknown_to(hello.rank, hello.session, hello.next_seq, hello.in_flight)
        failure = FailureReport("SaveEnded", "the rank was told by an earlier sidecar that this save has failed")
        failure = failure.at(hello.rank, self._node)
        return [ToCoordinator(hello.rank, ReportFailure(job.submit.save, failure)) for job in ended]

    def _rank_gone(self, rank: int, pid: int, reason: str) -> list[Action]:
        record = self.ranks.get(rank)
        if record is None or not record.alive or record.hello.pid != pid:
            return []
        record.alive = False
        record.left_in_order = not reason
        record.plan = None
        return [ToCoordinator(rank, RankLeft(rank, reason, record.session))]

    def _adopt(self, regions: tuple[FoundRegion, ...], now_s: float) -> list[Action]:
        """Take over from an earlier sidecar of the job: its ranks, what they had sealed, and who of them has died."""
        self.ranks.update(adopted_records(regions, self._generation))
        here = [ToCoordinator(rank, record.hello) for rank, record in self.ranks.items() if record.alive]
        staged = self.shards.adopt(adopted_writes(regions, self._torch_version), now_s)
        return [*departures(regions), *here, *staged]

    def say_again(self) -> list[Action]:
        """What a coordinator that knows nothing of this node must hear; called by the owner when it meets one, after it
        has looked for the dead: a dead rank whose Hello is refused is not looked at again."""
        return state_of(self.ranks, self.shards)

    def _refuse_waiting(self, failure: FailureReport) -> list[Action]:
        """The coordinator can not be talked to: those that wait for their first Welcome are told why."""
        waiting = [record for record in self.ranks.values() if record.alive and not record.session]
        told = [action for record in waiting for action in record.tell(Refused(failure))]
        for record in waiting:
            record.alive = False
        return told

    # ------------------------------------------------------------ plans and regions

    def _from_coordinator(self, rank: int, message: Message) -> list[Action]:
        record = self.ranks.get(rank)
        actions = self._save_ended(rank, message) if isinstance(message, (Aborted, Committed)) else []
        if record is None or not record.alive or record.is_another(message):
            return actions
        if isinstance(message, Welcome):
            return [*self._welcome(record, message), *self._drop_superfluous()]
        elif isinstance(message, Refused):
            told = record.tell(message)
            # One that was served before lives on, unserved: what it has sealed is looked for when its process ends.
            record.alive, record.peer = bool(record.session), b""
            record.plan = record.plan if record.alive else None
            if record.is_stray:
                del self.ranks[rank]
            return told
        elif isinstance(message, FinalPlan):
            record.plan = message
            for index in range(record.hello.slots):
                # What is ready for another plan is the client's until it asks: see RankRecord.offer.
                actions += self._prepare(record, index) if record.slots[index].ready is None else []
        elif isinstance(message, (Aborted, Committed)):
            if message.save.session != record.session:
                return actions
            # An order to plan anew does not void the plan here: a rank may still be filling a region by it, for a save
            # before the one that was given up. The next plan replaces it.
            record.hears_the_end(message.save.seq)
        return [*record.tell(message), *actions]

    def _save_ended(self, rank: int, message: Aborted | Committed) -> list[Action]:
        aborted: list[Action] = []
        if isinstance(message, Committed):
            self.shards.commit(rank, message.save)
        else:
            aborted = self.shards.abort(rank, message.save, files_stay=message.files_stay)
        self.shards.remember_lost(rank, message)
        return [*aborted, *self._drop_superfluous()]

    def _welcome(self, record: RankRecord, message: Welcome) -> list[Action]:
        broken = record.break_seals() if record.session not in ("", message.session) else []
        if record.session != message.session:
            record.session, record.plan = message.session, None
            if record.hello.session != message.session:
                record.forget_regions()  # as the client does
        message = replace(
            message,
            sidecar_id=self._sidecar_id,
            node=self._node,
            torch_version=self._torch_version,
            plan_id=record.plan.plan_id if record.plan else "",
        )
        offers = [action for index in range(record.hello.slots) for action in record.offer(index)]
        return [*broken, *record.tell(message), *offers]

    def _drop_superfluous(self) -> list[Action]:
        """Regions of ranks that a smaller world has no more are given back as soon as nothing is sealed in them."""
        world_size = max((record.hello.world_size for record in self.ranks.values() if record.alive), default=None)
        if world_size is None:
            return []
        superfluous = [rank for rank, record in self.ranks.items() if rank >= world_size and record.is_unused]
        return [RemoveRegions(rank, len(self.ranks.pop(rank).slots)) for rank in superfluous]

    def _take_plan(self, record: RankRecord, plan: FinalPlan) -> list[Action]:
        """A rank brings the plan that an earlier sidecar had given it and this one does not have."""
        if plan.save.session != record.session or (record.plan and record.plan.save.seq >= plan.save.seq):
            return []
        record.plan = plan
        return [action for index in range(record.hello.slots) for action in record.offer(index)]

    def _prepare(self, record: RankRecord, index: int, byte_capacity: int = FIRST_BYTE_CAPACITY) -> list[Action]:
        order = record.prepare(index, byte_capacity)
        return [order] if order else []

    def _region_failed(self, event: RegionFailed) -> list[Action]:
        record = self.ranks[event.rank]
        slot = record.slots[event.slot]
        slot.preparing, slot.asked_bytes = False, 0
        if record.plan is None or event.plan_id != record.plan.plan_id or not record.alive:
            return self._prepare(record, event.slot)
        failure = event.failure.at(event.rank, self._node)
        return record.tell(RegionRefused(event.plan_id, event.slot, failure))

    def _grow(self, record: RankRecord, message: GrowRegion) -> list[Action]:
        plan = record.plan
        if plan is None or plan.plan_id != message.plan_id or message.slot >= record.hello.slots:
            failure = FailureReport("StalePlan", f"plan {message.plan_id} is not the plan of rank {record.hello.rank}")
            return record.tell(RegionRefused(message.plan_id, message.slot, failure))
        return self._prepare(record, message.slot, max(message.byte_capacity, FIRST_BYTE_CAPACITY))
