"""What a node knows of one rank: its client, its plan, its regions. Pure data and the rule for preparing a region."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ckpt_proto.lifecycles import REGION, RegionEvent, RegionState, walk
from ckpt_proto.messages import FinalPlan, Hello, RegionReady
from ckpt_sidecar.events import PrepareRegion

FIRST_BYTE_CAPACITY: Final = 64 << 10
"""Room in bytes kept for byte entries of a new region; GrowRegion asks for more."""


@dataclass
class Slot:
    """One region of one rank. ``ready`` is None until it has been prepared; ``preparing`` while a worker is at it."""

    state: RegionState = RegionState.FREE
    generation: int = 0
    ready: RegionReady | None = None
    preparing: bool = False

    def walk(self, event: RegionEvent) -> None:
        """One step of the region's lifecycle."""
        self.state = walk(REGION, self.state, event)


@dataclass
class RankRecord:
    """One rank of this node. ``session`` is empty until the coordinator has welcomed it.

    ``other_namespace``: the kernel cannot name its process to us, so only heartbeats tell whether it lives.
    """

    hello: Hello
    peer: bytes
    other_namespace: bool = False
    alive: bool = True
    left_in_order: bool = False
    session: str = ""
    plan: FinalPlan | None = None
    slots: list[Slot] = field(default_factory=list)

    @classmethod
    def succeeding(cls, old: RankRecord | None, hello: Hello, peer: bytes, *, other_namespace: bool) -> RankRecord:
        """The record of a new client, which takes the regions of the rank's earlier one over: their pages are warm."""
        record = cls(hello, peer, other_namespace, slots=old.slots if old else [])
        for slot in record.slots:
            slot.ready = None if slot.state is RegionState.FREE else slot.ready
        while len(record.slots) < hello.slots:
            record.slots.append(Slot())
        return record

    def prepare(self, index: int, byte_capacity: int = FIRST_BYTE_CAPACITY) -> PrepareRegion | None:
        """Have a slot prepared for the plan, unless it is in use, being prepared, or ready for it."""
        slot, plan = self.slots[index], self.plan
        if index >= self.hello.slots:
            return None  # left over from an earlier client of the rank that had more
        if plan is None or slot.preparing or slot.state is not RegionState.FREE:
            return None
        if slot.ready and slot.ready.plan_id == plan.plan_id and slot.ready.byte_capacity >= byte_capacity:
            return None
        slot.preparing = True
        slot.ready = None
        slot.generation += 1
        return PrepareRegion(self.hello.rank, index, slot.generation, plan.plan_id, plan.items, byte_capacity)
