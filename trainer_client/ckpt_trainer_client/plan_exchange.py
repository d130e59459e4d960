"""Getting a plan that all ranks agree on, through the sidecars. No collective, no process group."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ckpt_proto.errors import FailureReport, report_of
from ckpt_proto.identity import SaveKey, step_text
from ckpt_proto.messages import Aborted, FinalPlan, GlobalPlan, MakeGlobalPlan, Message, ProposePlan, ReportFailure
from ckpt_trainer_client.errors import CheckpointFailed, SaveSkipped
from ckpt_trainer_client.planning import PlanningState, SavePlanned

logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""The coordinator gives an attempt up after the stage timeout and says who is late; the client waits a little
longer."""


class PlanExchange:
    """What the link has received about the attempts that the trainer's thread is waiting for.

    Thread rule: ``ckpt-link`` adds, the trainer's thread takes; guarded by one condition.
    """

    def __init__(self, send: Callable[[Message], None], timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s + GRACE_S
        self._arrived = threading.Condition()
        self._final: FinalPlan | None = None
        self._to_make: MakeGlobalPlan | None = None
        self._aborted: dict[int, Aborted] = {}
        self._proposed: ProposePlan | None = None
        self._unserved: FailureReport | None = None

    def serve(self, unserved: FailureReport | None) -> None:
        """While ``unserved`` is given no sidecar hands plans on: a save that needs one fails at once, for that reason.

        Called by the link.
        """
        with self._arrived:
            self._unserved = unserved
            self._arrived.notify_all()

    def on_message(self, message: FinalPlan | MakeGlobalPlan | Aborted) -> None:
        """Called by the link."""
        with self._arrived:
            if isinstance(message, Aborted):
                self._aborted[message.save.seq] = message
            elif isinstance(message, FinalPlan):
                self._final = message
            else:
                self._to_make = message
            self._arrived.notify_all()

    def raise_if_aborted(self, save: SaveKey) -> None:
        """Raise if the coordinator has given up this attempt, perhaps before this rank began it.

        Raises:
            CheckpointFailed: with the failures of the ranks.
        """
        with self._arrived:
            self._raise_if_aborted(save)

    def _raise_if_aborted(self, save: SaveKey) -> None:
        for seq in [seq for seq in self._aborted if seq < save.seq]:
            del self._aborted[seq]
        aborted = self._aborted.get(save.seq)
        if aborted is not None:
            raise (SaveSkipped if aborted.skipped else CheckpointFailed)(save.step, aborted.failures)

    def exchange(self, save: SaveKey, state: PlanningState, changed_keys: tuple[str, ...]) -> SavePlanned:
        """Propose this rank's local plan and return its final one. On rank 0 also makes the global plan.

        Raises:
            PlanningError, UnsupportedLeaf: this rank's part failed.
            CheckpointFailed: another rank's part failed, a rank did not call ``save()`` in time, or no sidecar runs.
        """
        with self._arrived:
            self._raise_if_unserved(save, changed_keys)
        items, digests = state.local_plan()
        proposal = ProposePlan(save, items, digests, changed_keys)
        with self._arrived:
            self._proposed = proposal
        self._send(proposal)
        try:
            return self._await_plan(save, state, changed_keys)
        finally:
            with self._arrived:
                self._proposed = None

    def say_again(self) -> None:
        """Called by the link: the coordinator may have lost what was proposed, or its answer."""
        with self._arrived:
            proposal = self._proposed
        if proposal is not None:
            self._send(proposal)

    def _raise_if_unserved(self, save: SaveKey, changed_keys: tuple[str, ...]) -> None:
        if self._unserved is None:
            return
        changed = f" (changed: {', '.join(changed_keys)})" if changed_keys else ""
        text = (
            f"{step_text(save.step)} cannot be saved without a sidecar: its state dict needs a new plan{changed}, on "
        )
        text += f"which the ranks agree through one; {self._unserved.message}"
        raise CheckpointFailed(save.step, [replace(self._unserved, message=text)])

    def _await_plan(self, save: SaveKey, state: PlanningState, changed_keys: tuple[str, ...]) -> SavePlanned:
        deadline = time.monotonic() + self._timeout_s
        while True:
            message = self._next(save, deadline, changed_keys)
            if isinstance(message, FinalPlan):
                for warning in message.warnings:
                    logger.warning("%s", warning)
                return state.finish(message.plan_id, message.items)
            self._make(save, state, message)

    def _next(self, save: SaveKey, deadline: float, changed_keys: tuple[str, ...] = ()) -> FinalPlan | MakeGlobalPlan:
        with self._arrived:
            while True:
                answer = self._at_hand(save)
                if answer is not None:
                    return answer
                self._raise_if_unserved(save, changed_keys)
                if not self._arrived.wait(deadline - time.monotonic()):
                    text = f"no plan for {step_text(save.step)} after {self._timeout_s:.0f} s: "
                    text += "the coordinator does not answer"
                    raise CheckpointFailed(save.step, [FailureReport("PlanTimeout", text)])

    def _at_hand(self, save: SaveKey) -> FinalPlan | MakeGlobalPlan | None:
        """What has arrived for a save. A final plan counts also if the save was given up since: regions are prepared
        for it already, and the next save must not fill them by an earlier one."""
        if self._final is not None and self._final.save == save:
            final, self._final = self._final, None
            return final
        self._raise_if_aborted(save)
        if self._to_make is not None and self._to_make.save == save:
            order, self._to_make = self._to_make, None
            return order
        return None

    def _make(self, save: SaveKey, state: PlanningState, order: MakeGlobalPlan) -> None:
        try:
            self._send(GlobalPlan(save, state.global_plan(order.plans)))
        except Exception as error:
            self._send(ReportFailure(save, report_of(error)))
            raise
