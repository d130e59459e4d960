"""Plan items: what may be one, and what makes two of them the same entry."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
from hypothesis import given

from ckpt_proto.errors import LocalProtocolError
from ckpt_proto.plan_items import MAX_DIMENSIONS, PlanItem
from testkit.protocol_values import REPEATABLE, plan_items


def shard(**changes: Any) -> PlanItem:
    values: dict[str, Any] = {"offsets": (4, 0), "sizes": (4, 8), "global_sizes": (8, 8), "dtype": "float32"}
    return PlanItem("w", "shard", **{**values, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": (4,)},
        {"sizes": (4, 8, 1)},
        {"global_sizes": ()},
        {"offsets": (-1, 0)},
        {"sizes": (-4, 8)},
        {"offsets": (5, 0)},
        {"sizes": (4, 9)},
        {"offsets": (0,) * 65, "sizes": (1,) * 65, "global_sizes": (1,) * 65},
    ],
)
def test_a_shard_must_lie_inside_its_tensor(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError, match="^w: "):
        shard(**changes)


def test_a_shard_may_fill_its_tensor_to_the_last_element_and_may_be_empty() -> None:
    assert shard(offsets=(0, 0), sizes=(8, 8)).is_framed
    assert shard(offsets=(8, 0), sizes=(0, 8)).is_framed


def test_the_largest_number_of_dimensions_is_accepted() -> None:
    ones = (1,) * MAX_DIMENSIONS
    assert shard(offsets=(0,) * MAX_DIMENSIONS, sizes=ones, global_sizes=ones).is_framed


def test_a_tensor_without_dimensions_is_valid() -> None:
    assert PlanItem("step", "tensor", dtype="int64").key == ("step", ())


def test_a_tensor_needs_a_dtype_and_bytes_have_none() -> None:
    with pytest.raises(LocalProtocolError, match="needs a dtype"):
        shard(dtype="")
    with pytest.raises(LocalProtocolError, match="needs a dtype"):
        PlanItem("rng", "bytes", dtype="uint8")


@pytest.mark.parametrize("kind", ["", "TENSOR", "sparse"])
def test_an_unknown_kind_is_refused(kind: str) -> None:
    with pytest.raises(LocalProtocolError, match="is no kind of item"):
        PlanItem("w", kind, dtype="float32")


@pytest.mark.parametrize(
    ("item", "framed"),
    [
        (shard(), True),
        (PlanItem("w", "tensor", dtype="float32"), True),
        (shard(opaque=True), False),
        (PlanItem("rng", "bytes"), False),
    ],
    ids=["shard", "tensor", "opaque", "bytes"],
)
def test_only_dense_tensors_have_a_fixed_place(item: PlanItem, framed: bool) -> None:
    assert item.is_framed is framed


def test_shards_of_one_tensor_are_told_apart_by_their_offsets() -> None:
    assert shard().key != shard(offsets=(0, 0)).key
    assert shard().key == shard(requires_grad=True, opaque=True).key


def test_bytes_are_known_by_their_name_alone_and_never_equal_a_tensor() -> None:
    assert PlanItem("x", "bytes").key == ("x", None)
    assert PlanItem("x", "bytes").key != PlanItem("x", "tensor", dtype="float32").key


@REPEATABLE
@given(item=plan_items())
def test_every_valid_item_is_hashable_and_equal_to_its_copy(item: PlanItem) -> None:
    assert {item: 1}[PlanItem(*astuple(item))] == 1
