"""What an earlier sidecar of the job has left in shared memory, taken over by the one that starts now. Pure.

A sealed region is a staged shard: it is written as if its rank had just submitted it. A region of a rank that lives is
kept with its plan, so the rank goes on filling it and never notices. What is neither is free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt_proto.lifecycles import RegionEvent
from ckpt_proto.messages import FinalPlan, RankLeft
from ckpt_sidecar.actions import Action, ToCoordinator, WriteShard
from ckpt_sidecar.events import FoundRegion
from ckpt_sidecar.rank_record import KEPT_SESSIONS, RankRecord, Slot
from ckpt_sidecar.shard_table import ShardTable


def whole(region: FoundRegion) -> bool:
    """Whether what is sealed in a region belongs to the layout that its journal describes."""
    sealed, ready = region.sealed, region.journal.ready
    return sealed is not None and (sealed.rank, sealed.plan_id, sealed.slot, sealed.generation) == (
        region.journal.owner.rank,
        ready.plan_id,
        ready.slot,
        ready.generation,
    )


def adopted_records(regions: Sequence[FoundRegion], generation: int) -> dict[int, RankRecord]:
    """One record per rank, of the newest client that had a region, with all the slots that the rank has.

    ``generation`` is where the count of slots without a region begins.
    """
    records: dict[int, RankRecord] = {}
    for region in sorted(regions, key=_age):
        owner = region.journal.owner
        old = records.get(owner.rank)
        slots = old.slots if old is not None else []
        earlier = old.sessions if old is not None else ()
        journal = region.journal
        records[owner.rank] = RankRecord(
            replace(owner, next_seq=0, in_flight=()),
            peer=b"",
            other_namespace=journal.other_namespace,
            alive=region.alive,
            session=owner.session,
            plan=FinalPlan(journal.planned_by, journal.ready.plan_id, journal.items) if region.alive else None,
            slots=slots,
            earlier_sessions=tuple(session for session in earlier if session != owner.session)[:KEPT_SESSIONS],
        )
        _place(region, slots, generation)
    for record in records.values():
        while len(record.slots) < record.hello.slots:
            record.slots.append(Slot(generation=generation))
    return records


def _age(region: FoundRegion) -> tuple[float, int]:
    return region.journal.owner.process_start_s, region.journal.planned_by.seq


def _place(region: FoundRegion, slots: list[Slot], generation: int) -> None:
    ready = region.journal.ready
    while len(slots) <= ready.slot:
        slots.append(Slot(generation=generation))
    slot = slots[ready.slot] = Slot(generation=ready.generation, ready=ready)
    if whole(region):
        slot.walk(RegionEvent.FILL)
        slot.walk(RegionEvent.SEAL)


def adopted_writes(regions: Sequence[FoundRegion], torch_version: str) -> list[WriteShard]:
    """The writes of everything that is sealed, in the order of the saves."""
    sealed = [region for region in regions if whole(region)]
    sealed.sort(key=lambda region: (*_age(region), region.sealed.save.seq if region.sealed else 0))
    writes = []
    for region in sealed:
        journal, submit = region.journal, region.sealed
        assert submit is not None
        owner = journal.owner
        writes.append(
            WriteShard(submit, journal.items, owner.directory, owner.world_size, torch_version, journal.ready)
        )
    return writes


def departures(regions: Sequence[FoundRegion]) -> list[Action]:
    """What the coordinator is told of the dead whose regions were found."""
    owners = [region.journal.owner for region in regions if not region.alive]
    dead = {(owner.rank, owner.session): owner.directory for owner in owners}
    reason = "its process had ended when the sidecar was started again"
    return [
        ToCoordinator(rank, RankLeft(rank, reason, session, directory)) for (rank, session), directory in dead.items()
    ]


def state_of(ranks: Mapping[int, RankRecord], shards: ShardTable) -> list[Action]:
    """Everything that a coordinator which knows nothing of a node must hear of it: who has gone, who is here, what is
    staged and has no known end.

    Who has gone comes first: the session of a rank that was restarted is over before its new client asks to join.
    """
    here = [
        ToCoordinator(rank, replace(record.hello, session=record.session))
        for rank, record in ranks.items()
        if record.alive
    ]
    reason = "its process had ended before the coordinator was started again"
    left = [
        ToCoordinator(rank, RankLeft(rank, reason, session))
        for rank, record in ranks.items()
        for session in (record.earlier_sessions if record.alive else record.sessions or ("",))
    ]
    return [*left, *here, *shards.say_again()]
