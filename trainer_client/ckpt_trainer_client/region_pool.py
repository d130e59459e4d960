"""This rank's regions as the client sees them: which slot may be filled, and what to do when none may.

Thread rule: ``ckpt-link`` reports what the sidecar says, the trainer's thread acquires and seals; one lock guards the
slots and is held for dictionary work only, never while copying or waiting for the sidecar.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckpt_proto.errors import FailureReport, NotEnoughSharedMemory, RegionError
from ckpt_proto.identity import step_text
from ckpt_proto.lifecycles import REGION, RegionEvent, RegionState, walk
from ckpt_proto.messages import RegionReady, RegionRefused
from ckpt_trainer_client.errors import CheckpointFailed, RegionsExhausted, SaveSkipped

PREPARE_TIMEOUT_S = 600.0
"""How long the sidecar may take to import torch and to reserve and touch a region: 1 TiB at 2 GiB/s."""


@dataclass
class _Slot:
    """``ready`` is None until the sidecar has prepared the region for a plan.

    ``asked_bytes`` is the room for byte entries that the sidecar was asked for: until it has answered, it may begin to
    prepare the region at any moment, whether the save that needed the room goes on or not. ``ask`` asks for it.
    """

    state: RegionState = RegionState.FREE
    ready: RegionReady | None = None
    refusal: RegionRefused | None = None
    step: int = -1
    seq: int = -1
    asked_bytes: int = 0
    ask: Callable[[int, int], None] | None = None
    break_seal: Callable[[], None] | None = None

    def is_sealed_for(self, plan_id: str) -> bool:
        """Whether another save of the plan can be filled in once that in the slot is written."""
        return self.state is RegionState.SEALED and self.ready is not None and self.ready.plan_id == plan_id


@dataclass(frozen=True)
class RegionRequest:
    """One save's wish for a region.

    Attributes:
        policy: ``wait`` or ``skip`` when every slot is busy; ``timeout_s`` bounds every wait.
        seq: the save's number, by which the sidecar says which save it has let go of.
        check: raises if the attempt has been given up; called whenever a wait is interrupted.
        prepare: asks the sidecar to prepare ``(slot, byte_capacity)`` anew.
    """

    plan_id: str
    step: int
    policy: str
    timeout_s: float
    seq: int
    check: Callable[[], None]
    prepare: Callable[[int, int], None]


class RegionPool:
    """The slots of one rank."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = [_Slot() for _ in range(slots)]
        self._changed = threading.Condition()
        self._clock = clock
        self._broken: str = ""
        self._unserved: FailureReport | None = None
        self._resumed = 0

    # ------------------------------------------------------------ reported by the link

    def on_ready(self, ready: RegionReady) -> None:
        """The sidecar has prepared a region; it is free from now on. Said again of the same one it changes nothing."""
        with self._changed:
            if ready.slot >= len(self._slots):
                return  # meant for an earlier client of this rank, which had more slots
            slot = self._slots[ready.slot]
            if slot.ready == ready:
                return
            if slot.state is RegionState.SEALED:
                slot.state = walk(REGION, slot.state, RegionEvent.RELEASE)
            slot.ready, slot.refusal = ready, None
            if ready.byte_capacity >= slot.asked_bytes:
                slot.asked_bytes = 0
            self._changed.notify_all()

    def on_refused(self, refusal: RegionRefused) -> None:
        """The sidecar could not prepare a region."""
        with self._changed:
            if refusal.slot >= len(self._slots):
                return
            slot = self._slots[refusal.slot]
            slot.ready, slot.refusal, slot.asked_bytes = None, refusal, 0
            self._changed.notify_all()

    def on_freed(self, index: int, generation: int, seq: int) -> None:
        """The sidecar has let go of a slot that save number ``seq`` held; an earlier generation or save is ignored."""
        with self._changed:
            if index >= len(self._slots):
                return
            slot = self._slots[index]
            if slot.seq != seq or slot.ready is None or slot.ready.generation != generation:
                return
            if slot.state is RegionState.SEALED:
                slot.state = walk(REGION, slot.state, RegionEvent.RELEASE)
                self._changed.notify_all()

    def reset(self) -> None:
        """The sidecar is a new one and knows none of our regions."""
        with self._changed:
            for index in range(len(self._slots)):
                self._slots[index] = _Slot()
            self._changed.notify_all()

    def resume(self) -> None:
        """The sidecar may have lost what it was asked: what waits for a region asks again."""
        with self._changed:
            self._resumed += 1
            for index, slot in enumerate(self._slots):
                if slot.asked_bytes and slot.ask is not None:
                    slot.ask(index, slot.asked_bytes)
            self._changed.notify_all()

    def holds(self, index: int, seq: int) -> bool:
        """Whether a slot is the sidecar's, sealed for save number ``seq``."""
        with self._changed:
            slot = self._slots[index]
            return slot.state is RegionState.SEALED and slot.seq == seq

    def break_seal(self, seq: int) -> None:
        """A save was given up: who finds its region, when this process and its sidecar are dead, must not commit it.

        The slot stays the sidecar's until it frees it.
        """
        with self._changed:
            for slot in self._slots:
                if slot.state is RegionState.SEALED and slot.seq == seq and slot.break_seal is not None:
                    slot.break_seal()
                    slot.break_seal = None

    def interrupt(self, why: str) -> None:
        """Let a waiting :meth:`acquire` fail with ``why``; empty takes that back."""
        with self._changed:
            self._broken = why
            self._changed.notify_all()

    def serve(self, unserved: FailureReport | None) -> None:
        """While ``unserved`` is given no sidecar prepares regions: what needs one fails at once, for that reason."""
        with self._changed:
            self._unserved = unserved
            self._changed.notify_all()

    def wake(self) -> None:
        """Let a waiting :meth:`acquire` or :meth:`grow` look again whether its save is still wanted."""
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------ called by the trainer

    @property
    def all_busy(self) -> bool:
        """Whether no slot can become free without the sidecar finishing a write."""
        with self._changed:
            return self._all_busy()

    def acquire(self, request: RegionRequest) -> RegionReady:
        """Take a free slot that is prepared for the plan; it is FILLING until sealed or discarded.

        Raises:
            SaveSkipped: every slot is being persisted and the policy is ``skip``.
            RegionsExhausted: none became free in time; the text names the steps that hold them.
            NotEnoughSharedMemory, RegionError: the sidecar could not make a region.
            CheckpointFailed: the attempt was given up meanwhile, or needs a sidecar and there is none.
        """
        started_s = self._clock()
        asked: set[tuple[int, int]] = set()
        with self._changed:
            while True:
                request.check()
                ready = self._take_free(request)
                if ready is not None:
                    return ready
                self._ask(request, asked)
                self._raise_if_hopeless(request)
                bound_s = request.timeout_s if self._all_busy() else PREPARE_TIMEOUT_S
                if not self._changed.wait(max(0.0, started_s + bound_s - self._clock())):
                    self._raise_late(request, bound_s)

    def _raise_late(self, request: RegionRequest, bound_s: float) -> None:
        state = f"for {step_text(request.step)} within {bound_s:g} s: {self._describe()}"
        if self._all_busy():
            raise RegionsExhausted(
                f"no region became free {state}; the storage is slower than the saves, or the sidecar is stuck (see "
                "ckpt-sidecar status)"
            )
        raise RegionError(f"the sidecar has prepared no region {state}; see ckpt-sidecar status and the sidecar's log")

    def grow(self, ready: RegionReady, request: RegionRequest, byte_capacity: int) -> RegionReady:
        """Have the slot that this rank is filling prepared anew with more room, and wait for that.

        Raises:
            NotEnoughSharedMemory, RegionError: it could not be done, or not in time.
            CheckpointFailed: the attempt was given up meanwhile, or there is no sidecar.
        """
        deadline = self._clock() + PREPARE_TIMEOUT_S
        asked: set[tuple[int, int]] = set()
        with self._changed:
            while True:
                request.check()
                grown = self._grown(ready, request, byte_capacity, asked)
                if grown is not None:
                    return grown
                if not self._changed.wait(deadline - self._clock()):
                    text = f"the region for {step_text(request.step)} was not grown to hold {byte_capacity} bytes of "
                    raise RegionError(f"{text}byte entries within {PREPARE_TIMEOUT_S:g} s")

    def _grown(
        self, ready: RegionReady, request: RegionRequest, byte_capacity: int, asked: set[tuple[int, int]]
    ) -> RegionReady | None:
        """The slot if it has grown; else asks for it, again whenever a restarted sidecar has prepared it small."""
        slot = self._slots[ready.slot]
        now = slot.ready if slot.ready is not None else ready
        if now.generation != ready.generation and now.byte_capacity >= byte_capacity:
            return now
        if slot.refusal is not None:
            raise _refused(slot.refusal)
        if self._broken:
            raise RegionError(self._broken)
        if self._unserved is not None:
            text = f"its byte entries need {byte_capacity} bytes, more than the region has room for"
            raise _cannot_wait(request, self._unserved, text)
        if (self._resumed, now.generation) not in asked:
            asked.add((self._resumed, now.generation))
            slot.asked_bytes, slot.ask = byte_capacity, request.prepare
            request.prepare(ready.slot, byte_capacity)
            return self._grown(ready, request, byte_capacity, asked)  # the answer may have come at once
        return None

    def _take_free(self, request: RegionRequest) -> RegionReady | None:
        for slot in self._slots:
            free = slot.state is RegionState.FREE and not slot.asked_bytes
            if free and slot.ready and slot.ready.plan_id == request.plan_id:
                slot.state = walk(REGION, slot.state, RegionEvent.FILL)
                slot.step, slot.seq = request.step, request.seq
                return slot.ready
        return None

    def _ask(self, request: RegionRequest, asked: set[tuple[int, int]]) -> None:
        """Ask for a region where there is none for the plan: the sidecar does not touch one that is ready for another
        plan before, and may hold one that only an earlier client of the rank knew; what did not fit into shared memory
        may fit now. Once per acquire, and again when the sidecar was restarted."""
        for index, slot in enumerate(self._slots):
            fits = slot.ready is not None and slot.ready.plan_id == request.plan_id
            lacks_one = slot.state is RegionState.FREE and not slot.asked_bytes and not fits
            if lacks_one and (index, self._resumed) not in asked:
                asked.add((index, self._resumed))
                slot.refusal = None
                request.prepare(index, 0)

    def seal(
        self, index: int, request: RegionRequest, set_seal: Callable[[], None], break_seal: Callable[[], None]
    ) -> None:
        """The slot is whole and belongs to the sidecar: sealed under the lock, so that a save that was given up is
        either not sealed or found by :meth:`break_seal`.

        Args:
            index: the slot.
            request: that for which it was acquired.
            set_seal: writes the seal.
            break_seal: takes it back; called by the link's thread while the slot is sealed.

        Raises:
            RegionError: the slot is not being filled any more, because the sidecar was restarted meanwhile.
            CheckpointFailed: the attempt was given up meanwhile.
        """
        with self._changed:
            slot = self._slots[index]
            if slot.state is not RegionState.FILLING:
                raise RegionError(f"the sidecar was restarted while slot {index} was being filled")
            request.check()  # what is sealed counts, also for a sidecar that has not heard that the save was given up
            set_seal()
            slot.state, slot.break_seal = walk(REGION, slot.state, RegionEvent.SEAL), break_seal

    def discard(self, index: int) -> None:
        """What was filled in is not wanted; the slot is free again, if it is not so already after a reset."""
        with self._changed:
            slot = self._slots[index]
            if slot.state is RegionState.FILLING:
                slot.state = walk(REGION, slot.state, RegionEvent.DISCARD)
                self._changed.notify_all()

    def _all_busy(self) -> bool:
        sealed = sum(slot.state is RegionState.SEALED for slot in self._slots)
        lacking = [slot for slot in self._slots if slot.state is not RegionState.SEALED and self._is_lacking(slot)]
        return sealed > 0 and sealed + len(lacking) == len(self._slots)

    def _is_lacking(self, slot: _Slot) -> bool:
        """Whether a slot has no region to fill, and nobody is about to make one."""
        unserved = self._unserved is not None and (slot.ready is None or slot.asked_bytes > 0)
        return slot.refusal is not None or unserved

    def _raise_if_hopeless(self, request: RegionRequest) -> None:
        if self._broken:
            raise RegionError(self._broken)
        if self._unserved is not None and not any(slot.is_sealed_for(request.plan_id) for slot in self._slots):
            text = f"no region is prepared for its plan: {self._describe()}"
            raise _cannot_wait(request, self._unserved, text)
        if self._all_busy() and request.policy == "skip":
            failure = FailureReport("SaveSkipped", f"no free region: {self._describe()}")
            raise SaveSkipped(request.step, [failure])
        others = [slot for slot in self._slots if slot.state is not RegionState.FILLING]  # a preparation takes them all
        refusals = [slot.refusal for slot in others if slot.refusal is not None]
        if refusals and len(refusals) == len(others) and refusals[0].plan_id == request.plan_id:
            raise _refused(refusals[0])

    def _describe(self) -> str:
        return ", ".join(
            f"slot {index} {slot.state.value}" + (f" ({step_text(slot.step)})" if slot.step >= 0 else "")
            for index, slot in enumerate(self._slots)
        )


def _cannot_wait(request: RegionRequest, unserved: FailureReport, needs: str) -> CheckpointFailed:
    text = f"{step_text(request.step)} cannot be saved without a sidecar: {needs}; {unserved.message}"
    return CheckpointFailed(request.step, [replace(unserved, message=text)])


def _refused(refusal: RegionRefused) -> RegionError:
    failure = refusal.failure
    if failure.kind == NotEnoughSharedMemory.__name__:
        return NotEnoughSharedMemory(failure.message)
    return RegionError(f"the sidecar could not make the region: {failure.kind}: {failure.message}")
