"""The structure of a state dict: changes whenever a plan would, and at no other time; keeps no tensor alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_trainer_client.errors import UnsupportedLeaf
from ckpt_trainer_client.planning import PlanningState
from ckpt_trainer_client.structure import MAX_CHANGED_KEYS, Structure, changed_keys, planner_key
from testkit.plans import RowShard
from testkit.states import nested_state


def structure(state: dict[str, Any]) -> Structure:
    """As a save sees it: through the planner."""
    found = PlanningState(state, None, is_coordinator=False).structure
    assert found is not None
    return found


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which this process is the first; nothing is ever sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def base() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(3, 4), "b": torch.zeros(3)}, "list": [torch.zeros(2)], "step": 1, "name": "a"}


def changed(change: Any) -> dict[str, Any]:
    state = base()
    change(state)
    return state


CHANGES: dict[str, Any] = {
    "another dtype": lambda s: s["model"].update(w=torch.zeros(3, 4, dtype=torch.bfloat16)),
    "another shape": lambda s: s["model"].update(w=torch.zeros(4, 3)),
    "one more dimension": lambda s: s["model"].update(b=torch.zeros(3, 1)),
    "no dimension": lambda s: s["model"].update(b=torch.tensor(0.0)),
    "requires grad": lambda s: s["model"].update(w=torch.zeros(3, 4, requires_grad=True)),
    "a parameter": lambda s: s["model"].update(w=torch.nn.Parameter(torch.zeros(3, 4))),
    "another layout": lambda s: s["model"].update(w=torch.zeros(3, 4).to_sparse()),
    "a tensor became a value": lambda s: s.update(list=[3]),
    "a value became a tensor": lambda s: s.update(step=torch.tensor(1)),
    "a key more": lambda s: s["model"].update(extra=torch.zeros(1)),
    "a value more": lambda s: s.update(epoch=3),
    "a key less": lambda s: s["model"].pop("b"),
    "another name": lambda s: s["model"].update(v=s["model"].pop("w")),
    "a longer list": lambda s: s["list"].append(torch.zeros(2)),
    "other nesting, same names": lambda s: s.update({"model.b": s["model"].pop("b")}),
    "a mapping instead of a list": lambda s: s.update(list={"0": s["list"][0]}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_a_plan_changes_the_structure(what: str) -> None:
    assert structure(changed(CHANGES[what])) != structure(base())


SAME: dict[str, Any] = {
    "other numbers": lambda s: s["model"]["w"].fill_(7),
    "another tensor": lambda s: s["model"].update(w=torch.ones(3, 4)),
    "other strides": lambda s: s["model"].update(w=torch.ones(4, 3).t()),
    "a view of a larger storage": lambda s: s["model"].update(w=torch.ones(9, 4)[3:6]),
    "another value": lambda s: s.update(step=2, name="b"),
    "a value of another type": lambda s: s.update(step=None, name=[1, 2, 3]),
    "another order": lambda s: s.update(step=s.pop("step")),
}


@pytest.mark.parametrize("what", SAME)
def test_what_changes_from_step_to_step_is_not_in_the_structure(what: str) -> None:
    assert structure(changed(SAME[what])) == structure(base())


def test_a_large_state_is_equal_to_itself() -> None:
    assert structure(nested_state(1)) == structure(nested_state(2))


# ---------------------------------------------------------------- sharded tensors


def dtensor(mesh: DeviceMesh, local: torch.Tensor, placement: Any) -> DTensor:
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def test_sharded_tensors_are_equal_if_they_lie_alike(mesh: DeviceMesh) -> None:
    def state(local: torch.Tensor, placement: Any) -> Structure:
        return structure({"w": dtensor(mesh, local, placement)})

    same = state(torch.zeros(2, 4), Shard(0))
    assert state(torch.ones(2, 4), Shard(0)) == same
    assert state(torch.ones(4, 2), Shard(1)) != same  # the same whole, dealt out otherwise
    assert state(torch.ones(4, 4), Replicate()) != same
    assert state(torch.ones(2, 4, dtype=torch.float64), Shard(0)) != same
    assert structure({"w": torch.zeros(2, 4)}) != same


def test_another_mesh_is_another_structure(mesh: DeviceMesh) -> None:
    other = init_device_mesh("cpu", (1, 2))
    one = structure({"w": DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)], run_check=False)})
    two = structure({"w": DTensor.from_local(torch.zeros(2, 4), other, [Replicate(), Shard(0)], run_check=False)})
    assert one != two


def test_a_shard_that_moved_is_another_structure() -> None:
    """Its rank may hold other rows of the same number: the old plan would store them at the old place."""
    first = structure({"w": RowShard.of(torch.zeros(2, 3), 0, 6)})
    assert structure({"w": RowShard.of(torch.zeros(2, 3), 2, 6)}) != first
    assert structure({"w": RowShard.of(torch.zeros(2, 3), 0, 8)}) != first


def test_a_shard_inside_a_sharded_tensor_counts_too(mesh: DeviceMesh) -> None:
    def state(first_row: int) -> Structure:
        sharded = dtensor(mesh, torch.zeros(2, 3), Shard(0))
        sharded._local_tensor = RowShard.of(torch.zeros(2, 3), first_row, 6)
        return structure({"w": sharded})

    assert state(0) == state(0)
    assert state(0) != state(2)


def test_a_value_without_a_structure_is_named() -> None:
    """A parameter of a lazy module that has seen no input has no shape."""
    with pytest.raises(UnsupportedLeaf, match=r"model\.w is a .*UninitializedParameter"):
        structure({"model": {"w": torch.nn.UninitializedParameter()}})


# ---------------------------------------------------------------- nothing is kept alive


def test_no_tensor_is_kept_alive(mesh: DeviceMesh) -> None:
    plain, local = torch.zeros(3), torch.zeros(2, 2)
    kept = structure({"plain": plain, "sharded": dtensor(mesh, local, Shard(0)), "list": [torch.zeros(1)]})
    alive = [weakref.ref(plain), weakref.ref(local)]
    del plain, local
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    assert set(kept) == {"plain", "sharded", "list.0"}


# ---------------------------------------------------------------- what changed


def test_added_removed_and_changed_keys_are_named() -> None:
    old = structure({"same": torch.zeros(1), "gone": 1, "grown": torch.zeros(1)})
    new = structure({"same": torch.zeros(1), "grown": torch.zeros(2), "new": 1})
    assert set(changed_keys(old, new)) == {"gone", "grown", "new"}
    assert changed_keys(old, old) == ()


def test_nothing_has_changed_where_nothing_was_known() -> None:
    assert changed_keys(None, structure({"a": 1})) == ()


def test_not_all_of_many_changed_keys_are_named() -> None:
    new = structure({f"k{index}": 1 for index in range(100)})
    assert len(changed_keys({}, new)) == MAX_CHANGED_KEYS


# ---------------------------------------------------------------- planners


class MyPlanner(DefaultSavePlanner):
    """A user's planner."""


class ForeignPlanner(SavePlanner):
    """Shares nothing with the default one."""

    def set_up_planner(self, *args: Any, **options: Any) -> None: ...
    def create_local_plan(self) -> Any: ...
    def create_global_plan(self, all_plans: Any) -> Any: ...
    def finish_plan(self, new_plan: Any) -> Any: ...
    def resolve_data(self, write_item: Any) -> Any: ...


def set_up(planner: DefaultSavePlanner) -> DefaultSavePlanner:
    planner.set_up_planner({})
    return planner


def test_stock_planners_are_known_by_their_options() -> None:
    keys = [
        planner_key(DefaultSavePlanner()),
        planner_key(DefaultSavePlanner(flatten_state_dict=False)),
        planner_key(DefaultSavePlanner(flatten_sharded_tensors=False)),
        planner_key(DefaultSavePlanner(dedup_save_to_lowest_rank=True)),
    ]
    assert len(set(keys)) == 4
    assert planner_key(DefaultSavePlanner()) == keys[0]


def test_a_users_planner_is_known_by_identity() -> None:
    one, other = set_up(MyPlanner()), set_up(MyPlanner())
    assert planner_key(one) == planner_key(one)
    assert planner_key(one) != planner_key(other)
    assert planner_key(one) != planner_key(DefaultSavePlanner())


def test_a_planner_that_shows_no_state_dict_is_not_known() -> None:
    assert planner_key(ForeignPlanner()) is None
