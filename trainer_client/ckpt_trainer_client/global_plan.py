"""The global plan of a stock planner, made of our records: what ``DefaultSavePlanner.create_global_plan`` decides, at a
cost that is linear in the items.

DCP's own builds an object for each item five times over and compares every two chunks of a tensor that lie beside each
other in its longest dimension, which for 1,024 ranks with a row each of a wide matrix is half a million pairs.
Source of the rules: ``dedup_save_plans``, ``create_default_global_save_plan`` and ``_validate_global_plan`` of torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from functools import cache

import torch

from ckpt_proto.gc_pause import gc_paused
from ckpt_proto.plan_items import ItemKind, Plan, PlanItem
from ckpt_trainer_client.errors import PlanningError

_BYTES = ItemKind.BYTES.value
_SHARD = ItemKind.SHARD.value

Key = tuple[str, tuple[int, ...] | None]


def stock_global_plan(plans: Sequence[Plan], *, to_lowest_rank: bool) -> tuple[Plan, ...]:
    """The final plan of every rank.

    Of what several ranks have, the one with the least to write so far keeps it, or with ``to_lowest_rank`` the lowest.
    Chunks of a tensor are numbered in the order of ranks; a key's path is that of the first rank that has one.

    Raises:
        PlanningError: a whole value is there in several places, or shards overlap or leave something out.
    """
    with gc_paused():
        writers = _writers(plans, to_lowest_rank)
        paths = _paths(plans)
        chunks: dict[str, list[PlanItem]] = {}
        final = tuple(_final(rank, plan, writers, paths, chunks) for rank, plan in enumerate(plans))
        for fqn, items in chunks.items():
            _check(fqn, items, is_alone=len(plans) == 1)
    return final


def _writers(plans: Sequence[Plan], to_lowest_rank: bool) -> dict[Key, int]:
    """Which rank keeps each item. Most have one holder: those get no list of their own."""
    holders: dict[Key, int | list[int]] = {}
    last: dict[Key, PlanItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan:
            key = item.key
            before = holders.setdefault(key, rank)
            if isinstance(before, list):
                before.append(rank)
            elif before != rank:
                holders[key] = [before, rank]
            last[key] = item
    planned = [0] * len(plans)
    writers: dict[Key, int] = {}
    for key, ranks in holders.items():
        if isinstance(ranks, int):
            writer = ranks
        else:
            writer = ranks[0] if to_lowest_rank else min(ranks, key=planned.__getitem__)
        planned[writer] += _bytes_of(last[key]) or 1
        writers[key] = writer
    return writers


def _bytes_of(item: PlanItem) -> int:
    """As DCP counts: of the whole tensor, also for a shard of it."""
    if item.kind == _BYTES:
        return 0
    return math.prod(item.global_sizes) * _itemsize(item.dtype)


@cache
def _itemsize(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size


def _paths(plans: Sequence[Plan]) -> dict[str, tuple[str | int, ...]]:
    paths: dict[str, tuple[str | int, ...]] = {}
    for plan in plans:
        for item in plan:
            if item.path is not None and item.fqn not in paths:
                paths[item.fqn] = item.path
    return paths


def _final(
    rank: int,
    plan: Plan,
    writers: dict[Key, int],
    paths: dict[str, tuple[str | int, ...]],
    chunks: dict[str, list[PlanItem]],
) -> Plan:
    """What one rank writes; adds its chunks to those of the ranks before it."""
    kept = []
    for item in plan:
        if writers[item.key] != rank:
            continue
        others = chunks.setdefault(item.fqn, [])
        if item.kind != _SHARD and others:
            raise PlanningError(f"{item.fqn} is a whole {item.kind} of rank {rank}, and something else has its name")
        hint = item.index_hint if item.kind == _BYTES else len(others)
        path = paths.get(item.fqn)
        if hint != item.index_hint or path != item.path:
            item = _renumbered(item, hint, path)  # noqa: PLW2901
        others.append(item)
        kept.append(item)
    return tuple(kept)


def _renumbered(item: PlanItem, hint: int, path: tuple[str | int, ...] | None) -> PlanItem:
    """``dataclasses.replace`` takes three times as long."""
    return PlanItem(
        item.fqn, item.kind, path, item.offsets, item.sizes, item.global_sizes, item.dtype, item.requires_grad,
        item.pin_memory, item.layout, item.memory_format, hint, item.opaque,
    )  # fmt: skip


def _check(fqn: str, items: Sequence[PlanItem], *, is_alone: bool) -> None:
    whole = items[0].global_sizes
    if items[0].kind == _BYTES or not whole:
        return
    stored, expected = sum(math.prod(item.sizes) for item in items), math.prod(whole)
    if stored != expected and not is_alone:
        raise PlanningError(f"{fqn}: the ranks have {stored} of its {expected} elements; their shards must make it up")
    if len(items) > 1:
        _check_apart(fqn, [item for item in items if math.prod(item.sizes)])


def _check_apart(fqn: str, items: Sequence[PlanItem]) -> None:
    """Whether no two shards overlap: a sweep along the dimension in which they begin at the most places, so that few
    are open at once."""
    if len(items) < 2:
        return
    dimensions = range(len(items[0].offsets))
    along = max(dimensions, key=lambda dimension: len({item.offsets[dimension] for item in items}))
    active: list[tuple[int, int]] = []
    for index in sorted(range(len(items)), key=lambda index: items[index].offsets[along]):
        start = items[index].offsets[along]
        del active[: bisect_right(active, (start, len(items)))]
        for _, other in active:
            if _overlap(items[index], items[other]):
                one, two = _place(items[other]), _place(items[index])
                raise PlanningError(f"{fqn}: the shards at {one} and {two} overlap")
        insort(active, (start + items[index].sizes[along], index))


def _overlap(one: PlanItem, two: PlanItem) -> bool:
    sides: Iterable[tuple[int, int, int, int]] = zip(one.offsets, one.sizes, two.offsets, two.sizes, strict=True)
    return all(at < there + size and there < at + mine for at, mine, there, size in sides)


def _place(item: PlanItem) -> str:
    return f"{list(item.offsets)} of {list(item.sizes)}"
