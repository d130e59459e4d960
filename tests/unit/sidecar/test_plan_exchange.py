"""What the coordinator reads off the plans of all ranks: counts, differing values, opaque marks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_proto.messages import ProposePlan
from ckpt_proto.plan_items import PlanItem
from ckpt_sidecar.plan_exchange import MAX_NAMED_KEYS, entry_counts, mark_opaque, plan_conflicts, plan_warnings
from testkit.tables import ITEMS, RNG, WEIGHT, key, propose


def proposal(**digests: str) -> ProposePlan:
    """A plan of one tensor and byte entries with these digests."""
    items = (WEIGHT, *(PlanItem(name, "bytes") for name in digests))
    return ProposePlan(key(), items, tuple(digest.encode() for digest in digests.values()))


def test_every_rank_s_entries_are_counted() -> None:
    assert entry_counts([ITEMS, (), (WEIGHT,)]) == (2, 0, 1)


@pytest.mark.parametrize(
    "proposals",
    [
        [],
        [proposal(rng="1")],
        [proposal(rng="1", step="2"), proposal(rng="1", step="2")],
        [proposal(rng="1"), proposal(loader="2")],
        [proposal(rng="1", step="2"), proposal(step="2", rng="1")],
    ],
    ids=["nobody", "one rank", "equal values", "different keys", "another order"],
)
def test_values_that_agree_give_no_warning(proposals: list[ProposePlan]) -> None:
    assert plan_warnings(proposals) == ()


def test_a_value_that_differs_between_ranks_is_named_with_the_way_out() -> None:
    (warning,) = plan_warnings([proposal(rng="1", step="9"), proposal(rng="2", step="9"), proposal(rng="3", step="9")])
    assert "values of 1 keys differ" in warning
    assert ": rng. " in warning
    assert "step" not in warning
    assert "per_rank=" in warning


def test_of_many_keys_only_the_first_are_named() -> None:
    names = [f"k{index:02}" for index in range(MAX_NAMED_KEYS + 5)]
    (warning,) = plan_warnings([proposal(**dict.fromkeys(names, "1")), proposal(**dict.fromkeys(names, "2"))])
    assert f"of {len(names)} keys" in warning
    assert names[MAX_NAMED_KEYS - 1] in warning
    assert names[MAX_NAMED_KEYS] not in warning
    assert ", ..." in warning


def test_too_few_digests_are_no_error() -> None:
    assert plan_warnings([ProposePlan(key(), ITEMS, ()), propose(key())]) == ()


# ---------------------------------------------------------------- tensors that cannot be one


def test_shards_of_one_tensor_do_not_contradict_each_other() -> None:
    upper = PlanItem("w", "shard", offsets=(0,), sizes=(4,), global_sizes=(8,), dtype="float32")
    lower = replace(upper, offsets=(4,), requires_grad=True, index_hint=1)
    assert plan_conflicts([propose(key(), (upper,)), propose(key(), (lower, RNG))]) == []


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (replace(WEIGHT, dtype="bfloat16"), "w is tensor float32[8] on rank 0 and tensor bfloat16[8] on rank 1"),
        (replace(WEIGHT, global_sizes=(9,)), "tensor float32[9] on rank 1"),
        (replace(WEIGHT, kind="shard"), "shard float32[8] on rank 1"),
        (PlanItem("w", "bytes"), "bytes on rank 1"),
    ],
    ids=["dtype", "shape", "kind", "bytes"],
)
def test_tensors_that_cannot_be_parts_of_one_are_named_with_both_forms(mine: PlanItem, words: str) -> None:
    (conflict,) = plan_conflicts([propose(key()), propose(key(), (mine,))])
    assert (conflict.kind, conflict.rank) == ("StateDiffers", 1)
    assert words in conflict.message


def test_a_key_is_named_once_and_only_the_first_keys_are() -> None:
    plans = [
        tuple(PlanItem(f"k{index:02}", "tensor", dtype=dtype) for index in range(MAX_NAMED_KEYS + 5))
        for dtype in ("float32", "bfloat16", "uint8")
    ]
    conflicts = plan_conflicts([propose(key(), plan) for plan in plans])
    assert [conflict.message[:3] for conflict in conflicts] == [f"k{index:02}" for index in range(MAX_NAMED_KEYS)]


# ---------------------------------------------------------------- opaque marks


def test_items_are_marked_opaque_by_name_and_offsets() -> None:
    other = PlanItem("w", "shard", offsets=(0,), sizes=(4,), global_sizes=(8,), dtype="float32")
    half = PlanItem("w", "shard", offsets=(4,), sizes=(4,), global_sizes=(8,), dtype="float32")
    marked = mark_opaque((other, half, RNG), {half.key})
    assert [item.opaque for item in marked] == [False, True, False]
    assert marked[0] is other


def test_nothing_to_mark_leaves_the_plan_as_it_is() -> None:
    assert mark_opaque(ITEMS, set()) == ITEMS
