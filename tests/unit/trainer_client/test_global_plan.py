"""Our global plan and that of DCP's stock planner: the same for whatever ranks may have, also what is refused."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace

import pytest
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckpt_proto.plan_items import ItemKind, Plan, PlanItem
from ckpt_trainer_client.errors import PlanningError
from ckpt_trainer_client.global_plan import stock_global_plan
from ckpt_trainer_client.wire_plan import from_wire, to_wire
from testkit.plans import bytes_item, shard_item, tensor_item


def by_stock(plans: list[Plan], *, to_lowest_rank: bool) -> tuple[Plan, ...]:
    """What DCP decides, in our records, each rank with the paths of all."""
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=to_lowest_rank)
    local = [replace(plan, planner_data=plan.planner_data or {}) for plan in map(from_wire, plans)]
    final, metadata = planner.create_global_plan(local)
    return tuple(to_wire(replace(plan, planner_data=metadata.planner_data)) for plan in final)


def random_plans(rng: random.Random) -> list[Plan]:
    """Sharded by rows and by blocks, replicated, alone, scalars and values: in any mixture."""
    world_size = rng.randrange(1, 5)
    plans: list[list[PlanItem]] = [[] for _ in range(world_size)]
    for index in range(rng.randrange(1, 12)):
        fqn = f"m.{index}"
        path = ("m", rng.choice([str(index), index]))
        kind = rng.choice(["rows", "blocks", "replicated", "alone", "scalar", "value"])
        if kind == "rows":
            rows = rng.randrange(0, 9)
            cuts = sorted(rng.randrange(0, rows + 1) for _ in range(world_size - 1))
            bounds = [0, *cuts, rows]
            for rank in range(world_size):
                size = bounds[rank + 1] - bounds[rank]
                if size or rows == 0:
                    plans[rank].append(shard_item(fqn, (bounds[rank], 0), (size, 3), (rows, 3)))
                if rows == 0:
                    break
        elif kind == "blocks":
            for at in range(4):
                item = shard_item(fqn, (at // 2 * 2, at % 2 * 3), (2, 3), (4, 6), rng.choice(["float32"]))
                plans[at % world_size].append(item)
        elif kind in ("replicated", "scalar", "value"):
            one = {
                "replicated": tensor_item(fqn, (rng.randrange(1, 50), 2), "bfloat16"),
                "scalar": tensor_item(fqn, ()),
                "value": bytes_item(fqn),
            }[kind]
            for rank in range(world_size):
                plans[rank].append(one)
        else:
            plans[rng.randrange(world_size)].append(tensor_item(fqn, (4,), "int64"))
        if rng.random() < 0.8:
            plans = [[replace(i, path=path) if i.fqn == fqn else i for i in plan] for plan in plans]
    for plan in plans:
        rng.shuffle(plan)
    return [tuple(plan) for plan in plans]


@pytest.mark.parametrize("to_lowest_rank", [False, True])
def test_the_plan_is_that_of_stock_dcp(to_lowest_rank: bool) -> None:
    rng = random.Random(20)
    for _ in range(400):
        plans = random_plans(rng)
        assert stock_global_plan(plans, to_lowest_rank=to_lowest_rank) == by_stock(plans, to_lowest_rank=to_lowest_rank)


def test_the_mark_of_what_the_trainer_serialises_is_kept() -> None:
    plan = (tensor_item("a", (2,), opaque=True), tensor_item("b", (2,)))
    [final] = stock_global_plan([plan], to_lowest_rank=False)
    assert [item.opaque for item in final] == [True, False]


HALF = shard_item("w", (0, 0), (2, 4), (4, 4))
REFUSED: dict[str, list[Plan]] = {
    "a hole": [(HALF,), (shard_item("w", (3, 0), (1, 4), (4, 4)),)],
    "an overlap": [(HALF,), (shard_item("w", (1, 0), (2, 4), (4, 4)),)],
    "an overlap in the second dimension": [
        (shard_item("w", (0, 0), (4, 2), (4, 4)),),
        (shard_item("w", (0, 1), (4, 2), (4, 4)),),
    ],
    "overlaps that add up": [
        (HALF, shard_item("w", (2, 0), (1, 4), (4, 4))),
        (shard_item("w", (1, 0), (1, 4), (4, 4)),),
    ],
    "two values of one name": [(replace(tensor_item("w", (2,)), offsets=(0,)),), (bytes_item("w"),)],
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_stock_dcp_refuses_is_refused(what: str) -> None:
    plans = REFUSED[what]
    with pytest.raises(PlanningError, match="w"):
        stock_global_plan(plans, to_lowest_rank=False)
    with warnings.catch_warnings(), pytest.raises((ValueError, AssertionError)):
        by_stock(plans, to_lowest_rank=False)


def test_the_complaint_has_the_numbers() -> None:
    with pytest.raises(PlanningError, match="w: the ranks have 12 of its 16 elements"):
        stock_global_plan(REFUSED["a hole"], to_lowest_rank=False)
    with pytest.raises(PlanningError, match=r"w: the shards at \[0, 0\] of \[2, 4\] and \[1, 0\] of \[2, 4\] overlap"):
        stock_global_plan([*REFUSED["an overlap"], (shard_item("w", (3, 0), (0, 4), (4, 4)),)], to_lowest_rank=False)


def test_a_rank_alone_may_have_a_part_of_a_tensor() -> None:
    """As with stock DCP: a job of one rank saves what it has."""
    plans = [(HALF,)]
    assert stock_global_plan(plans, to_lowest_rank=False) == by_stock(plans, to_lowest_rank=False)


def test_many_ranks_with_a_row_each_are_compared_with_their_neighbours_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_trainer_client import global_plan

    compared: list[PlanItem] = []
    real = global_plan._overlap
    monkeypatch.setattr(global_plan, "_overlap", lambda one, two: compared.append(one) or real(one, two))
    ranks = 300
    plans = [(shard_item("wide", (rank, 0), (1, 4096), (ranks, 4096)),) for rank in range(ranks)]
    assert len(stock_global_plan(plans, to_lowest_rank=False)) == ranks
    assert len(compared) <= ranks


def test_every_kind_of_item_has_a_size_or_none() -> None:
    assert {kind.value for kind in ItemKind} == {"tensor", "shard", "bytes"}
