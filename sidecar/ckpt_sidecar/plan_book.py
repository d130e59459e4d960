"""The plans of a job: proposals of all ranks in, one final plan per rank out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import step_text
from ckpt_proto.messages import FinalPlan, GlobalPlan, MakeGlobalPlan, Message, ProposePlan
from ckpt_proto.plan_items import Plan
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
        self._entry_counts: dict[str, tuple[int, ...]] = {}
        self._made: dict[str, tuple[Plan, ...]] = {}

    def entry_counts(self, plan_id: str) -> tuple[int, ...]:
        """Planned entries of each rank; empty for a plan that was made before this coordinator lived."""
        return self._entry_counts.get(plan_id, ())

    def keep_only(self, plan_ids: Iterable[str]) -> None:
        """Forget all other plans."""
        kept = set(plan_ids)
        self._entry_counts = {plan_id: counts for plan_id, counts in self._entry_counts.items() if plan_id in kept}
        self._made = {plan_id: plans for plan_id, plans in self._made.items() if plan_id in kept}

    def drop(self, plan_id: str) -> None:
        """Every rank has the plan, or nobody wants it: what may have to be said again is let go of."""
        self._made.pop(plan_id, None)

    def propose(self, attempt: Attempt, rank: int, message: ProposePlan) -> PlanStep:
        """A rank's local plan; the last one makes rank 0 plan for all.

        Said twice by a rank that was welcomed again: it has not heard the answer, which is given again.
        """
        if attempt.planned:
            return self._say_again(attempt, rank, message)
        if rank in attempt.proposals or rank in attempt.staged:
            return PlanStep()
        attempt.proposals[rank] = message
        if lacks_its_plan(attempt):
            return PlanStep()
        if attempt.staged:
            return structures_differ(attempt)
        if len(attempt.proposals) < attempt.world_size:
            return PlanStep()
        conflicts = plan_conflicts(_in_order(attempt))
        if conflicts:
            return PlanStep(failures=tuple(conflicts))
        attempt.planned = True
        return PlanStep((_order(attempt),))

    def _say_again(self, attempt: Attempt, rank: int, message: ProposePlan) -> PlanStep:
        if not attempt.plan_id:
            return PlanStep((_order(attempt),)) if rank == 0 else PlanStep()
        made = self._made.get(attempt.plan_id)
        return PlanStep((_final(attempt, rank, made[rank], message),)) if made else PlanStep()

    def plan(self, attempt: Attempt, message: GlobalPlan) -> PlanStep:
        """Rank 0's global plan; every rank that has proposed gets its part.

        Those are all ranks, unless a restarted coordinator is told of a plan that was made before it lived: then they
        are the ranks that never got theirs.
        """
        is_new = attempt.planned and not attempt.plan_id
        was_lost = attempt.adopted and not attempt.planned and attempt.plan_id in ("", made_by(attempt))
        if not is_new and not was_lost:
            return PlanStep()
        if len(message.plans) != attempt.world_size:
            text = f"the planner made {len(message.plans)} plans for {attempt.world_size} ranks"
            return PlanStep(failures=(FailureReport("PlanningError", text, rank=0),))
        attempt.planned = True
        attempt.plan_id = made_by(attempt)
        self._entry_counts[attempt.plan_id] = entry_counts(message.plans)
        self._made[attempt.plan_id] = message.plans
        proposals = dict(sorted(attempt.proposals.items()))
        attempt.proposals.clear()
        warnings = plan_warnings(list(proposals.values()))
        plans = message.plans
        return PlanStep(tuple(_final(attempt, rank, plans[rank], mine, warnings) for rank, mine in proposals.items()))


def made_by(attempt: Attempt) -> str:
    """The plan that this attempt makes, if it makes one: a restarted coordinator must not give its name to another."""
    return f"{attempt.save.session}-p{attempt.save.seq + 1}"


def lacks_its_plan(attempt: Attempt) -> bool:
    """Whether the plan was made before this coordinator lived: some ranks have staged by it, others wait for theirs.

    Rank 0 says it again when it is welcomed again.
    """
    return attempt.adopted and not attempt.planned and attempt.plan_id == made_by(attempt)


def plan_lost(attempt: Attempt, ranks: Sequence[int]) -> PlanStep:
    """Nobody is left to say the plan again that these ranks never got."""
    failures = []
    for rank in ranks:
        text = f"the plan of {step_text(attempt.save.step)} was lost with the sidecar before rank {rank} had it, while "
        text += f"ranks {sorted(attempt.staged)} had staged"
        failures.append(FailureReport("PlanLost", text, "the next save plans anew on every rank", rank))
    return PlanStep(failures=tuple(failures), replan=True)


def _final(
    attempt: Attempt, rank: int, plan: Plan, proposal: ProposePlan, warnings: tuple[str, ...] = ()
) -> tuple[int, Message]:
    opaque = {item.key for item in proposal.items if item.opaque}
    return rank, FinalPlan(attempt.save, attempt.plan_id, mark_opaque(plan, opaque), warnings)


def structures_differ(attempt: Attempt) -> PlanStep:
    """Some ranks have planned anew while others staged under the cached plan: the save fails, the next plans anew."""
    failures = []
    for rank, proposal in sorted(attempt.proposals.items()):
        keys = ", ".join(proposal.changed_keys) or "none was cached before"
        text = f"the state dict of rank {rank} has changed (keys: {keys}) while that of ranks {sorted(attempt.staged)} "
        text += "has not"
        failures.append(FailureReport("StructureDiffers", text, "the next save plans anew on every rank", rank))
    return PlanStep(failures=tuple(failures), replan=True)


def _order(attempt: Attempt) -> tuple[int, Message]:
    return 0, MakeGlobalPlan(attempt.save, tuple(proposal.items for proposal in _in_order(attempt)))


def _in_order(attempt: Attempt) -> Sequence[ProposePlan]:
    return [attempt.proposals[rank] for rank in range(attempt.world_size)]
