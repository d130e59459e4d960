"""What a node knows of one rank: its client, its plan, its regions. Pure data and the rule for preparing a region."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from ckpt_proto.lifecycles import REGION, RegionEvent, RegionState, walk
from ckpt_proto.messages import FinalPlan, Hello, Message, Refused, RegionReady, Welcome
from ckpt_sidecar.actions import Action, BreakSeal, PrepareRegion, Send

FIRST_BYTE_CAPACITY: Final = 64 << 10
"""Room in bytes kept for byte entries of a new region; GrowRegion asks for more."""

KEPT_SESSIONS: Final = 8
"""Earlier sessions of a rank that are remembered."""


@dataclass
class Slot:
    """One region of one rank. ``ready`` is None until it has been prepared; ``preparing`` while a worker is at it,
    ``asked_bytes`` the room for byte entries that was asked for meanwhile."""

    state: RegionState = RegionState.FREE
    generation: int = 0
    ready: RegionReady | None = None
    preparing: bool = False
    asked_bytes: int = 0

    def walk(self, event: RegionEvent) -> None:
        """One step of the region's lifecycle."""
        self.state = walk(REGION, self.state, event)


@dataclass
class RankRecord:
    """One rank of this node. ``session`` is empty until the coordinator has welcomed it, ``peer`` while a client that
    an earlier sidecar served has not said Hello to this one.

    ``other_namespace``: the kernel cannot name its process to us, so only heartbeats tell whether it lives.
    ``earlier_sessions`` are those of earlier clients of the rank, newest first, for a coordinator that was restarted.
    """

    hello: Hello
    peer: bytes
    other_namespace: bool = False
    alive: bool = True
    left_in_order: bool = False
    session: str = ""
    plan: FinalPlan | None = None
    slots: list[Slot] = field(default_factory=list)
    earlier_sessions: tuple[str, ...] = ()

    @classmethod
    def succeeding(
        cls, old: RankRecord | None, hello: Hello, peer: bytes, *, other_namespace: bool, generation: int = 0
    ) -> RankRecord:
        """The record of a new client, which takes the regions of the rank's earlier one over: their pages are warm.

        ``generation`` is where the count of new slots begins.
        """
        earlier = old.sessions[:KEPT_SESSIONS] if old else ()
        record = cls(hello, peer, other_namespace, slots=old.slots if old else [], earlier_sessions=earlier)
        record.forget_regions()
        while len(record.slots) < hello.slots:
            record.slots.append(Slot(generation=generation))
        return record

    @property
    def sessions(self) -> tuple[str, ...]:
        """Every session of the rank that is remembered, newest first."""
        return (self.session, *self.earlier_sessions) if self.session else self.earlier_sessions

    def is_client_of(self, hello: Hello) -> bool:
        """Whether ``hello`` is of the client of this record, which has connected again: it keeps plan and regions.

        Also of one that was refused meanwhile: it goes on filling the regions that it knows.
        """
        same = (self.hello.pid, self.hello.process_start_s) == (hello.pid, hello.process_start_s)
        return same and bool(hello.session) and self.session in ("", hello.session)

    @property
    def is_unused(self) -> bool:
        """Whether the rank is gone and no worker is at one of its regions."""
        return not self.alive and all(slot.state is RegionState.FREE and not slot.preparing for slot in self.slots)

    @property
    def is_stray(self) -> bool:
        """Whether the rank never took part: it was not welcomed and has no region."""
        used = any(slot.ready or slot.preparing or slot.state is not RegionState.FREE for slot in self.slots)
        return not self.session and not used

    def is_another(self, message: Message) -> bool:
        """Whether ``message`` answers the Hello of an earlier client of the rank."""
        return isinstance(message, (Welcome, Refused)) and message.pid not in (0, self.hello.pid)

    def forget_regions(self) -> None:
        """What is ready and free is prepared anew for the next plan, without being asked for."""
        for slot in self.slots:
            slot.ready = None if slot.state is RegionState.FREE else slot.ready

    def begins(self, seq: int) -> None:
        """The client is at a save: a coordinator that is new is to know that it has a part in it."""
        hello = self.hello
        if seq >= hello.next_seq:
            in_flight = {*hello.in_flight, *range(hello.next_seq, seq + 1)}
            self.hello = replace(hello, next_seq=seq + 1, in_flight=tuple(sorted(in_flight)))

    def hears_the_end(self, seq: int) -> None:
        """The client is told how a save has ended: a coordinator that is new is to know that from its Hello."""
        hello = self.hello
        in_flight = {*hello.in_flight, *range(hello.next_seq, seq)} - {seq}
        self.hello = replace(hello, next_seq=max(hello.next_seq, seq + 1), in_flight=tuple(sorted(in_flight)))

    def tell(self, message: Message) -> list[Action]:
        """Send to the client, if it is there."""
        return [Send(self.peer, message)] if self.alive and self.peer else []

    def prepare(self, index: int, byte_capacity: int = FIRST_BYTE_CAPACITY) -> PrepareRegion | None:
        """Have a slot prepared for the plan, unless it is in use, being prepared, or ready for it."""
        slot, plan = self.slots[index], self.plan
        if index >= self.hello.slots:
            return None  # left over from an earlier client of the rank that had more
        if slot.preparing:
            slot.asked_bytes = max(slot.asked_bytes, byte_capacity)
        if plan is None or slot.preparing or slot.state is not RegionState.FREE:
            return None
        if slot.ready and slot.ready.plan_id == plan.plan_id and slot.ready.byte_capacity >= byte_capacity:
            return None
        slot.preparing = True
        slot.ready = None
        slot.generation += 1
        return PrepareRegion(
            self.hello.rank,
            index,
            slot.generation,
            plan.plan_id,
            plan.items,
            byte_capacity,
            owner=replace(self.hello, session=self.session or self.hello.session),
            planned_by=plan.save,
            other_namespace=self.other_namespace,
        )

    def break_seals(self) -> list[Action]:
        """What is sealed and no job has: an earlier client, or the same in an earlier session, gave it up."""
        free = [index for index, slot in enumerate(self.slots) if slot.state is RegionState.FREE]
        return [BreakSeal(self.hello.rank, index) for index in free]

    def prepared(self, ready: RegionReady) -> list[Action]:
        """A worker has prepared a region: offer it, or have it prepared anew if something else is wanted by now."""
        slot = self.slots[ready.slot]
        asked_bytes, slot.preparing, slot.asked_bytes = slot.asked_bytes, False, 0
        fits = self.plan is not None and ready.plan_id == self.plan.plan_id and ready.byte_capacity >= asked_bytes
        if not fits or not self.alive:
            order = self.prepare(ready.slot, max(asked_bytes, FIRST_BYTE_CAPACITY))
            return [order] if order else []
        slot.ready = ready
        return self.tell(ready)

    def offer(self, index: int) -> list[Action]:
        """Say again which region is ready in a slot, or have it prepared: what was said before may be lost.

        Not one that is ready for another plan: the client may not have heard of this one and fill it by that. When it
        has, it asks (GrowRegion).
        """
        slot = self.slots[index]
        if self.plan and slot.state is RegionState.FREE and slot.ready:
            return self.tell(slot.ready) if slot.ready.plan_id == self.plan.plan_id else []
        order = self.prepare(index)
        return [order] if order else []
