"""DCP's plans as records and back: nothing is lost, nothing is added."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckpt_proto.codec import decode, encode
from ckpt_proto.messages import GlobalPlan
from ckpt_proto.plan_items import PlanItem
from ckpt_trainer_client.errors import PlanningError
from ckpt_trainer_client.wire_plan import from_wire, to_wire
from testkit.plans import save_key, states_of_ranks, stock_plans
from testkit.states import nested_state, tensor_zoo


def same(one: SavePlan, other: SavePlan) -> None:
    """Equal, index hints included: DCP's own equality leaves those out."""
    assert one == other
    assert [item.index.index for item in one.items] == [item.index.index for item in other.items]


def through_the_wire(plan: SavePlan) -> SavePlan:
    message = decode(encode(GlobalPlan(save_key(), (to_wire(plan),))))
    assert isinstance(message, GlobalPlan)
    return from_wire(message.plans[0])


@pytest.mark.parametrize("state", [tensor_zoo(3), nested_state(4)], ids=["tensors", "nested"])
def test_local_and_final_plans_come_back_equal(state: dict[str, Any]) -> None:
    stock = stock_plans([state])
    same(from_wire(to_wire(stock.local[0])), stock.local[0])
    same(through_the_wire(stock.local[0]), stock.local[0])
    same(from_wire(to_wire(stock.final[0])), stock.final[0])


def test_plans_of_sharded_state_come_back_equal() -> None:
    for plan in stock_plans(states_of_ranks(3)).local:
        same(through_the_wire(plan), plan)


def test_a_planner_that_keeps_no_paths_has_none_afterwards() -> None:
    stock = stock_plans([{"a": torch.ones(2), "b": {"c": 1}}], lambda: DefaultSavePlanner(flatten_state_dict=False))
    assert stock.local[0].planner_data is None
    same(through_the_wire(stock.local[0]), stock.local[0])


def test_an_empty_plan_has_no_paths_but_keeps_them_possible() -> None:
    """The global planner merges the mappings of all ranks; a rank that saves nothing has an empty one."""
    plan = from_wire(to_wire(SavePlan([], planner_data={})))
    assert plan.items == []
    assert plan.planner_data == {}


def test_a_path_keeps_the_types_of_its_parts() -> None:
    [item] = to_wire(stock_plans([{"a": [{"7": torch.ones(1)}]}]).local[0])
    assert item.path == ("a", 0, "7")
    plan = from_wire((item,))
    assert plan.planner_data == {"a.0.7": ("a", 0, "7")}
    assert type(plan.planner_data["a.0.7"][1]) is int


def tensor_data(**changes: Any) -> TensorWriteData:
    properties = TensorProperties(dtype=torch.bfloat16, requires_grad=True, pin_memory=True)
    data = TensorWriteData(ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([3, 4])), properties, torch.Size([9, 4]))
    return replace(data, **changes)


def test_every_field_of_an_item_is_carried() -> None:
    item = WriteItem(MetadataIndex("w", torch.Size([2, 0]), 5), WriteItemType.SHARD, tensor_data=tensor_data())
    [record] = to_wire(SavePlan([item], planner_data={"w": ("w",)}))
    assert record == PlanItem(
        fqn="w",
        kind="shard",
        path=("w",),
        offsets=(2, 0),
        sizes=(3, 4),
        global_sizes=(9, 4),
        dtype="bfloat16",
        requires_grad=True,
        pin_memory=True,
        layout="strided",
        memory_format="contiguous_format",
        index_hint=5,
    )
    [back] = from_wire((record,)).items
    assert back == item
    assert back.index.index == 5
    assert type(back.index.offset) is type(back.tensor_data.chunk.sizes) is torch.Size


@pytest.mark.parametrize("hint", [None, 0, 3])
@pytest.mark.parametrize("item_type", [WriteItemType.TENSOR, WriteItemType.BYTE_IO])
def test_a_missing_index_hint_stays_missing(item_type: WriteItemType, hint: int | None) -> None:
    data = tensor_data() if item_type is WriteItemType.TENSOR else None
    offset = torch.Size([2, 0]) if data else None
    [back] = from_wire(
        to_wire(SavePlan([WriteItem(MetadataIndex("w", offset, hint), item_type, tensor_data=data)]))
    ).items
    assert (back.type, back.index.index, back.index.offset) == (item_type, hint, offset)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.preserve_format])
def test_memory_formats_are_carried(memory_format: torch.memory_format) -> None:
    data = tensor_data(properties=TensorProperties(dtype=torch.float32, memory_format=memory_format))
    item = WriteItem(MetadataIndex("w", torch.Size([2, 0])), WriteItemType.SHARD, tensor_data=data)
    assert from_wire(to_wire(SavePlan([item]))).items == [item]


@pytest.mark.parametrize("paths", [[("a",)], "a", 3, {"a"}])
def test_planner_data_that_is_no_mapping_is_refused(paths: object) -> None:
    with pytest.raises(PlanningError, match=f"planner_data is a {type(paths).__name__}"):
        to_wire(SavePlan([], planner_data=paths))


def test_a_mapping_of_any_kind_is_taken() -> None:
    item = WriteItem(MetadataIndex("w"), WriteItemType.BYTE_IO)
    [record] = to_wire(SavePlan([item], planner_data=ChainMap({"w": ["x", 1]}, {"other": ("y",)})))
    assert record.path == ("x", 1)
