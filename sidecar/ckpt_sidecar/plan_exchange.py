"""What the coordinator reads off the plans of all ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from ckpt_proto.errors import FailureReport
from ckpt_proto.messages import ProposePlan
from ckpt_proto.plan_items import ItemKind, Plan, PlanItem

MAX_NAMED_KEYS = 20


def entry_counts(plans: Sequence[Plan]) -> tuple[int, ...]:
    """How many entries each rank will write."""
    return tuple(len(plan) for plan in plans)


def plan_warnings(proposals: Sequence[ProposePlan]) -> tuple[str, ...]:
    """Sentences about values that differ between ranks under one key.

    DCP's de-duplication keeps one rank's value of a key that several ranks have, chosen by load; if the values differ
    (random state, data loader position) the checkpoint silently holds one of them.
    """
    seen: dict[str, bytes] = {}
    differing: list[str] = []
    for proposal in proposals:
        fqns = (item.fqn for item in proposal.items if item.kind == ItemKind.BYTES.value)
        for fqn, digest in zip(fqns, proposal.byte_digests, strict=False):
            if seen.setdefault(fqn, digest) != digest and fqn not in differing:
                differing.append(fqn)
    if not differing:
        return ()
    named = ", ".join(differing[:MAX_NAMED_KEYS]) + (", ..." if len(differing) > MAX_NAMED_KEYS else "")
    warning = (
        f"the values of {len(differing)} keys differ between ranks but only one rank's value is saved: {named}. "
        "Pass state that belongs to one rank as save(..., per_rank=...)"
    )
    return (warning,)


def plan_conflicts(proposals: Sequence[ProposePlan]) -> list[FailureReport]:
    """One report for each key under which ranks have tensors that cannot be parts of one, at most 20.

    DCP would silently keep one rank's tensor. Kind, global shape and dtype must agree.
    """
    first: dict[str, tuple[int, PlanItem]] = {}
    conflicts: dict[str, FailureReport] = {}
    for rank, proposal in enumerate(proposals):
        for item in proposal.items:
            other, known = first.setdefault(item.fqn, (rank, item))
            if _whole(item) != _whole(known) and item.fqn not in conflicts:
                text = f"{item.fqn} is {_describe(known)} on rank {other} and {_describe(item)} on rank {rank}"
                hint = "ranks must agree on a key's tensor; state of one rank goes to save(..., per_rank=...)"
                conflicts[item.fqn] = FailureReport("StateDiffers", text, hint, rank)
    return list(conflicts.values())[:MAX_NAMED_KEYS]


def _whole(item: PlanItem) -> tuple[object, ...]:
    return item.kind, item.global_sizes, item.dtype


def _describe(item: PlanItem) -> str:
    return f"{item.kind} {item.dtype}{list(item.global_sizes)}" if item.dtype else item.kind


def mark_opaque(plan: Plan, keys: AbstractSet[tuple[str, tuple[int, ...] | None]]) -> Plan:
    """``plan`` with the items of ``keys`` marked opaque: DCP's own items cannot carry the mark through the planner."""
    return tuple(replace(item, opaque=True) if item.key in keys else item for item in plan) if keys else plan
