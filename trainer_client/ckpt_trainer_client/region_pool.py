"""This rank's regions as the client sees them: which slot may be filled, and what to do when none may.

Thread rule: ``ckpt-link`` reports what the sidecar says, the trainer's thread acquires and seals; one lock guards the
slots and is held for dictionary work only, never while copying or waiting for the sidecar.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckpt_proto.errors import FailureReport, NotEnoughSharedMemory, RegionError
from ckpt_proto.lifecycles import REGION, RegionEvent, RegionState, walk
from ckpt_proto.messages import RegionReady, RegionRefused
from ckpt_trainer_client.errors import RegionsExhausted, SaveSkipped


@dataclass
class _Slot:
    """``ready`` is None until the sidecar has prepared the region for a plan."""

    state: RegionState = RegionState.FREE
    ready: RegionReady | None = None
    refusal: RegionRefused | None = None
    step: int = -1


class RegionPool:
    """The slots of one rank."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = [_Slot() for _ in range(slots)]
        self._changed = threading.Condition()
        self._clock = clock
        self._broken: str = ""

    # ------------------------------------------------------------ reported by the link

    def on_ready(self, ready: RegionReady) -> None:
        """The sidecar has prepared a region; it is free from now on."""
        with self._changed:
            slot = self._slots[ready.slot]
            if slot.state is RegionState.SEALED:
                slot.state = walk(REGION, slot.state, RegionEvent.RELEASE)
            slot.ready, slot.refusal = ready, None
            self._changed.notify_all()

    def on_refused(self, refusal: RegionRefused) -> None:
        """The sidecar could not prepare a region."""
        with self._changed:
            slot = self._slots[refusal.slot]
            slot.ready, slot.refusal = None, refusal
            self._changed.notify_all()

    def on_freed(self, index: int, generation: int) -> None:
        """The sidecar has let go of a slot; a message about an earlier generation is ignored."""
        with self._changed:
            slot = self._slots[index]
            if slot.state is RegionState.SEALED and slot.ready and slot.ready.generation == generation:
                slot.state = walk(REGION, slot.state, RegionEvent.RELEASE)
                self._changed.notify_all()

    def reset(self) -> None:
        """The sidecar is a new one and knows none of our regions."""
        with self._changed:
            for index in range(len(self._slots)):
                self._slots[index] = _Slot()
            self._changed.notify_all()

    def interrupt(self, why: str) -> None:
        """Let a waiting :meth:`acquire` fail with ``why``; empty takes that back."""
        with self._changed:
            self._broken = why
            self._changed.notify_all()

    # ------------------------------------------------------------ called by the trainer

    @property
    def all_busy(self) -> bool:
        """Whether every slot is still with the sidecar."""
        with self._changed:
            return all(slot.state is RegionState.SEALED for slot in self._slots)

    def acquire(self, plan_id: str, step: int, policy: str, timeout_s: float) -> RegionReady:
        """Take a free slot that is prepared for the plan; it is FILLING until sealed or discarded.

        Raises:
            SaveSkipped: every slot is being persisted and ``policy`` is ``skip``.
            RegionsExhausted: none became free within ``timeout_s``; the text names the steps that hold them.
            NotEnoughSharedMemory, RegionError: the sidecar could not make a region.
        """
        deadline = self._clock() + timeout_s
        with self._changed:
            while True:
                self._raise_if_hopeless(plan_id, step, policy)
                for slot in self._slots:
                    if slot.state is RegionState.FREE and slot.ready and slot.ready.plan_id == plan_id:
                        slot.state = walk(REGION, slot.state, RegionEvent.FILL)
                        slot.step = step
                        return slot.ready
                if not self._changed.wait(deadline - self._clock()):
                    raise RegionsExhausted(
                        f"no region became free for step {step} within {timeout_s:.0f} s: {self._describe()}; the "
                        "storage is slower than the saves, or the sidecar is stuck (see ckpt-sidecar status)"
                    )

    def grow(self, ready: RegionReady, step: int, timeout_s: float) -> RegionReady:
        """Wait until the slot that this rank is filling has been prepared anew with more room."""
        deadline = self._clock() + timeout_s
        with self._changed:
            slot = self._slots[ready.slot]
            while slot.ready is None or slot.ready.generation == ready.generation:
                if slot.refusal is not None:
                    raise _refused(slot.refusal)
                if self._broken:
                    raise RegionError(self._broken)
                if not self._changed.wait(deadline - self._clock()):
                    raise RegionError(f"the region for step {step} was not grown within {timeout_s:.0f} s")
            return slot.ready

    def seal(self, index: int) -> None:
        """The slot is whole and belongs to the sidecar."""
        self._walk(index, RegionEvent.SEAL)

    def discard(self, index: int) -> None:
        """What was filled in is not wanted; the slot is free again."""
        self._walk(index, RegionEvent.DISCARD)

    def _walk(self, index: int, event: RegionEvent) -> None:
        with self._changed:
            slot = self._slots[index]
            slot.state = walk(REGION, slot.state, event)
            self._changed.notify_all()

    def _raise_if_hopeless(self, plan_id: str, step: int, policy: str) -> None:
        if self._broken:
            raise RegionError(self._broken)
        busy = all(slot.state is RegionState.SEALED for slot in self._slots)
        if busy and policy == "skip":
            raise SaveSkipped(step, [FailureReport("SaveSkipped", f"no free region: {self._describe()}")])
        usable = [slot for slot in self._slots if slot.refusal is None]
        if not usable:
            refusal = self._slots[0].refusal
            assert refusal is not None
            if refusal.plan_id == plan_id:
                raise _refused(refusal)

    def _describe(self) -> str:
        return ", ".join(
            f"slot {index} {slot.state.value}" + (f" (step {slot.step})" if slot.step >= 0 else "")
            for index, slot in enumerate(self._slots)
        )


def _refused(refusal: RegionRefused) -> RegionError:
    kind = NotEnoughSharedMemory if refusal.failure.kind == NotEnoughSharedMemory.__name__ else RegionError
    return kind(str(refusal.failure))
