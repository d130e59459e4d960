"""The plans of a job: proposals of all ranks in, one final plan per rank out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt_proto.errors import FailureReport
from ckpt_proto.messages import FinalPlan, GlobalPlan, MakeGlobalPlan, Message, ProposePlan
from ckpt_sidecar.attempt import Attempt
from ckpt_sidecar.plan_exchange import entry_counts, mark_opaque, plan_conflicts, plan_warnings


@dataclass(frozen=True)
class PlanStep:
    """What follows from a message about plans: failures that end the attempt, or messages to ranks.

    ``replan``: the ranks must forget their plans.
    """

    messages: tuple[tuple[int, Message], ...] = ()
    failures: tuple[FailureReport, ...] = ()
    replan: bool = False


class PlanBook:
    """Numbers the plans and remembers how many entries each rank of each plan writes."""

    def __init__(self) -> None:
        self._made = 0
        self._entry_counts: dict[str, tuple[int, ...]] = {}

    def entry_counts(self, plan_id: str) -> tuple[int, ...]:
        """Planned entries of each rank; empty for a plan that was made before this coordinator lived."""
        return self._entry_counts.get(plan_id, ())

    def keep_only(self, plan_ids: Iterable[str]) -> None:
        """Forget all other plans."""
        kept = set(plan_ids)
        self._entry_counts = {plan_id: counts for plan_id, counts in self._entry_counts.items() if plan_id in kept}

    def propose(self, attempt: Attempt, rank: int, message: ProposePlan) -> PlanStep:
        """A rank's local plan; the last one makes rank 0 plan for all."""
        if rank in attempt.proposals or attempt.planned:
            return PlanStep()
        attempt.proposals[rank] = message
        if attempt.staged:
            return structures_differ(attempt)
        if len(attempt.proposals) < attempt.world_size:
            return PlanStep()
        proposals = _in_order(attempt)
        conflicts = plan_conflicts(proposals)
        if conflicts:
            return PlanStep(failures=tuple(conflicts))
        attempt.planned = True
        return PlanStep(((0, MakeGlobalPlan(attempt.save, tuple(proposal.items for proposal in proposals))),))

    def plan(self, attempt: Attempt, message: GlobalPlan) -> PlanStep:
        """Rank 0's global plan; every rank gets its part."""
        if attempt.plan_id or not attempt.planned:
            return PlanStep()
        if len(message.plans) != attempt.world_size:
            text = f"the planner made {len(message.plans)} plans for {attempt.world_size} ranks"
            return PlanStep(failures=(FailureReport("PlanningError", text, rank=0),))
        self._made += 1
        attempt.plan_id = f"{attempt.save.session}-p{self._made}"
        self._entry_counts[attempt.plan_id] = entry_counts(message.plans)
        proposals = _in_order(attempt)
        attempt.proposals.clear()
        warnings = plan_warnings(proposals)
        opaque = [{item.key for item in proposal.items if item.opaque} for proposal in proposals]
        final = [mark_opaque(plan, keys) for plan, keys in zip(message.plans, opaque, strict=True)]
        return PlanStep(
            tuple((rank, FinalPlan(attempt.save, attempt.plan_id, plan, warnings)) for rank, plan in enumerate(final))
        )


def structures_differ(attempt: Attempt) -> PlanStep:
    """Some ranks have planned anew while others staged under the cached plan: the save fails, the next plans anew."""
    failures = []
    for rank, proposal in sorted(attempt.proposals.items()):
        keys = ", ".join(proposal.changed_keys) or "none was cached before"
        text = f"the state dict of rank {rank} has changed (keys: {keys}) while that of ranks {sorted(attempt.staged)} "
        text += "has not"
        failures.append(FailureReport("StructureDiffers", text, "the next save plans anew on every rank", rank))
    return PlanStep(failures=tuple(failures), replan=True)


def _in_order(attempt: Attempt) -> Sequence[ProposePlan]:
    return [attempt.proposals[rank] for rank in range(attempt.world_size)]
