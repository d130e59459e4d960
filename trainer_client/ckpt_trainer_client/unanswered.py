"""What this rank has said and has no answer to: a sidecar or coordinator that was restarted has lost it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import (
    FinalPlan,
    GlobalPlan,
    MakeGlobalPlan,
    Message,
    ReportFailure,
    ReportSkip,
    Resubmit,
    SubmitShard,
)

MAX_KEPT = 64
"""Submissions and failures kept to be said again; far more than can be in flight."""


class Unanswered:
    """Kept by the connection. Thread rule: any thread may call; a lock is held for dictionary work only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plan: FinalPlan | None = None
        self._global: GlobalPlan | None = None
        self._submits: dict[SaveKey, SubmitShard] = {}
        self._reports: dict[int, ReportFailure | ReportSkip] = {}

    def planned(self, message: FinalPlan | MakeGlobalPlan) -> None:
        """A final plan is the plan from now on."""
        if isinstance(message, FinalPlan):
            with self._lock:
                self._plan = message

    def made(self, plan: GlobalPlan) -> None:
        """This rank has planned for all; ranks that a restarted coordinator finds without a plan get it from here."""
        with self._lock:
            self._global = plan

    def forget_plan(self) -> None:
        """The ranks plan anew."""
        with self._lock:
            self._plan = None

    def submitted(self, submit: SubmitShard) -> None:
        """A region has been handed over."""
        with self._lock:
            self._submits[submit.save] = submit
            for save in list(self._submits)[:-MAX_KEPT]:
                del self._submits[save]

    def submits(self) -> list[SubmitShard]:
        """What has been handed over, in the order of the saves; also of some that have ended."""
        with self._lock:
            return sorted(self._submits.values(), key=lambda submit: submit.save.seq)

    def reported(self, report: ReportFailure | ReportSkip) -> None:
        """This rank has given a save up."""
        with self._lock:
            self._reports[report.save.seq] = report
            for seq in list(self._reports)[:-MAX_KEPT]:
                del self._reports[seq]

    def ended(self, save: SaveKey) -> None:
        """The coordinator has said how a save has ended."""
        with self._lock:
            self._reports.pop(save.seq, None)
            if self._global is not None and self._global.save.seq <= save.seq:
                self._global = None

    def to_say_again(
        self, plan_id: str, pending: Sequence[SaveKey], holds: Callable[[int, int], bool]
    ) -> list[Message]:
        """What to say to a sidecar that has welcomed us again, in this order.

        Args:
            plan_id: the plan that the sidecar has for this rank.
            pending: the saves whose end is not known.
            holds: whether a slot still counts as the sidecar's for a save number.
        """
        with self._lock:
            open_saves = set(pending)
            self._submits = {
                save: submit
                for save, submit in self._submits.items()
                if save in open_saves or holds(submit.slot, save.seq)
            }
            plan = [self._plan] if self._plan is not None and self._plan.plan_id != plan_id else []
            for_all = [self._global] if self._global is not None else []
            return [*plan, *for_all, *map(Resubmit, self._submits.values()), *self._reports.values()]
