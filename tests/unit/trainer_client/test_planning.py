"""Planning through DCP's planner: what stock DCP would do, for any number of ranks, with no process group in sight."""

from __future__ import annotations

import gc
import io
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ckpt_proto.plan_items import Plan
from ckpt_trainer_client.errors import PlanningError, UnsupportedLeaf
from ckpt_trainer_client.planning import PlanningState
from ckpt_trainer_client.staging import sources
from ckpt_trainer_client.wire_plan import from_wire
from testkit.plans import PLAN_ID, RowShard, our_plans, states_of_ranks, stock_plans
from testkit.states import nested_state, tensor_zoo


def state_of(state_dict: dict[str, Any], planner: Any = None) -> PlanningState:
    return PlanningState(state_dict, planner, is_coordinator=True)


def plan_alone(state: PlanningState) -> Any:
    """The whole way of a plan in a world of one rank."""
    [final] = state.global_plan([state.local_plan()[0]])
    return state.finish(PLAN_ID, final)


class ToLowestRank(DefaultSavePlanner):
    """Another decision about who saves what."""

    def __init__(self) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)


class NotFlattened(DefaultSavePlanner):
    """Keeps no paths."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)


# ---------------------------------------------------------------- equal to stock


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("planner", [DefaultSavePlanner, ToLowestRank, NotFlattened])
def test_plans_are_those_of_the_planner_alone(planner: type[DefaultSavePlanner], world_size: int) -> None:
    states = states_of_ranks(world_size)
    stock = stock_plans(states, planner)
    seen = [PlanningState(state, planner(), is_coordinator=rank == 0) for rank, state in enumerate(states)]
    proposals = [state.local_plan()[0] for state in seen]
    assert [from_wire(plan) for plan in proposals] == stock.local
    final = seen[0].global_plan(proposals)
    assert [from_wire(plan).items for plan in final] == [plan.items for plan in stock.final]
    hints = [[item.index.index for item in from_wire(plan).items] for plan in final]
    assert hints == [[item.index.index for item in plan.items] for plan in stock.final]
    for state, plan, expected in zip(seen, final, stock.final, strict=True):
        planned = state.finish(PLAN_ID, plan)
        assert [*(item for item, _ in planned.framed), *planned.others] == sorted(
            expected.items, key=lambda item: item.type is WriteItemType.BYTE_IO
        )
        assert planned.items == plan


def test_the_default_planner_is_dcps_own() -> None:
    states = states_of_ranks(2)
    ours = our_plans(states)
    assert [[item.fqn for item in plan.items] for _, plan in ours] == [
        [item.index.fqn for item in plan.items] for plan in stock_plans(states).final
    ]


def test_every_item_of_the_final_plan_has_its_path() -> None:
    """Also where the rank that saves it is not the one whose mapping DCP would keep."""
    for state, plan in our_plans(states_of_ranks(3)):
        mappings = state.planner.mappings
        assert all(item.path == mappings[item.fqn] for item in plan.items)


def test_what_a_rank_resolves_is_what_its_planner_resolves() -> None:
    state = state_of(tensor_zoo(5))
    planned = plan_alone(state)
    for item, record in planned.framed:
        tensor = state.resolve_tensor(item)
        assert tuple(tensor.shape) == record.sizes
        assert str(tensor.dtype) == f"torch.{record.dtype}"
        assert not tensor.requires_grad
    assert len(planned.framed) == len(planned.items)


def test_values_are_serialised_as_dcp_does() -> None:
    state = state_of({"a": [1, "x"], "b": None, "c": {"d": (1, 2)}})
    planned = plan_alone(state)
    for item in planned.others:
        assert torch.load(io.BytesIO(state.resolve_bytes(item)), weights_only=False) in ([1, "x"], None, (1, 2))
    assert len(planned.others) == 3


def test_an_object_with_a_state_dict_stands_for_what_that_returns() -> None:
    model = torch.nn.Linear(2, 3)
    assert state_of({"m": model}).local_plan()[0] == state_of({"m": model.state_dict()}).local_plan()[0]


# ---------------------------------------------------------------- digests


def digests_of(state_dict: dict[str, Any]) -> dict[str, bytes]:
    items, digests = state_of(state_dict).local_plan()
    return dict(zip((item.fqn for item in items if item.kind == "bytes"), digests, strict=True))


def test_digests_tell_values_apart_and_equal_ones_not() -> None:
    one = digests_of({"t": torch.ones(2), "seed": 1, "name": "x"})
    other = digests_of({"t": torch.zeros(2), "seed": 2, "name": "x"})
    assert set(one) == {"seed", "name"}
    assert one["name"] == other["name"]
    assert one["seed"] != other["seed"]
    assert {len(digest) for digest in one.values()} == {8}


# ---------------------------------------------------------------- opaque


class Marked(torch.Tensor):
    """A tensor of another class."""


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated")
def test_what_is_no_plain_dense_tensor_is_opaque() -> None:
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    state = state_of({"q": quantised, "m": torch.ones(3).as_subclass(Marked), "p": torch.nn.Parameter(torch.ones(3))})
    items, digests = state.local_plan()
    assert {item.fqn: item.opaque for item in items} == {"q": True, "m": True, "p": False}
    assert digests == ()
    loaded = torch.load(io.BytesIO(state.resolve_bytes(item_of(state, "q"))), weights_only=True)
    assert torch.equal(loaded.int_repr(), quantised.int_repr())


def item_of(state: PlanningState, fqn: str) -> WriteItem:
    return next(item for item in state.planner.create_local_plan().items if item.index.fqn == fqn)


def test_a_shard_of_a_tensor_with_its_own_protocol_is_framed() -> None:
    [item] = state_of({"w": RowShard.of(torch.ones(2, 3), 4, 6)}).local_plan()[0]
    assert (item.is_framed, item.offsets, item.sizes, item.global_sizes) == (True, (4, 0), (2, 3), (6, 3))


# ---------------------------------------------------------------- the cached plan


def test_a_plan_fits_the_same_structure_only() -> None:
    planned = plan_alone(state_of(nested_state(1)))
    assert state_of(nested_state(2)).fits(planned)
    assert not state_of(nested_state(1)).fits(None)
    assert not state_of({**nested_state(1), "extra": 1}).fits(planned)


def test_changed_nesting_does_not_fit_the_cached_plan() -> None:
    planned = plan_alone(state_of({"a": {"b": torch.ones(2)}}))
    assert not state_of({"a.b": torch.ones(2)}).fits(planned)
    assert not state_of({"a": [torch.ones(2)]}).fits(plan_alone(state_of({"a": {"0": torch.ones(2)}})))


def test_another_planner_does_not_fit_the_cached_plan() -> None:
    planned = plan_alone(state_of({"a": torch.ones(2)}))
    assert state_of({"a": torch.ones(2)}, DefaultSavePlanner()).fits(planned)
    assert not state_of({"a": torch.ones(2)}, DefaultSavePlanner(dedup_save_to_lowest_rank=True)).fits(planned)
    assert not state_of({"a": torch.ones(2)}, ToLowestRank()).fits(planned)


def test_the_same_planner_object_fits_again() -> None:
    planner = ToLowestRank()
    planned = plan_alone(state_of({"a": torch.ones(2)}, planner))
    assert state_of({"a": torch.zeros(2)}, planner).fits(planned)
    assert planned.owner is planner


def test_a_plan_without_a_known_structure_is_never_used_again() -> None:
    class Secretive(DefaultSavePlanner):
        """Shows no state dict."""

        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            self.hidden, self.state_dict = self.state_dict, None

        def create_local_plan(self) -> SavePlan:
            self.state_dict = self.hidden
            return super().create_local_plan()

    planner = Secretive()
    state = state_of({"a": 1}, planner)
    planned = plan_alone(state)
    assert not state.fits(planned)
    assert not state_of({"a": 1}, planner).fits(planned)


def test_a_tensor_that_is_not_what_was_planned_is_not_copied() -> None:
    """A structure cannot lie about it, a planner that resolves something else can."""

    class Halving(DefaultSavePlanner):
        """Resolves another dtype than it has planned."""

        def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
            return object.half()

    state = state_of({"w": torch.ones(2, 3)}, Halving())
    with pytest.raises(PlanningError, match=r"w is torch.float16\[2, 3\], planned was torch.float32\[2, 3\]"):
        sources(state, plan_alone(state))


def test_an_opaque_tensor_without_data_is_refused_when_it_is_serialised() -> None:
    state = state_of({"w": torch.ones(2)})
    [item] = state.planner.create_local_plan().items
    state.planner.state_dict = {"w": torch.ones(2, device="meta")}
    with pytest.raises(UnsupportedLeaf, match="meta device"):
        state.resolve_bytes(item)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("value", "kind"),
    [(lambda: None, "builtins.function"), (threading.Lock(), "_thread.lock"), ((i for i in ()), "builtins.generator")],
    ids=["function", "lock", "generator"],
)
def test_a_value_that_cannot_be_saved_is_named_with_its_type(value: object, kind: str) -> None:
    with pytest.raises(UnsupportedLeaf, match=rf"optim\.hook is a {kind} and cannot be saved"):
        state_of({"optim": {"hook": value}}).local_plan()


def test_a_tensor_without_data_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedLeaf, match=r"model\.w is a tensor on the meta device"):
        state_of({"model": {"w": torch.empty(3, device="meta")}}).local_plan()


@pytest.mark.parametrize("sparse", [torch.eye(3).to_sparse()], ids=["coo"])
def test_a_sparse_tensor_is_refused_by_name(sparse: torch.Tensor) -> None:
    """``dcp.save`` refuses it too; what ``dcp.load`` makes of one is empty."""
    with pytest.raises(UnsupportedLeaf, match=r"model\.w .*sparse"):
        state_of({"model": {"w": sparse}}).local_plan()


def test_a_tensor_item_that_resolves_to_no_tensor_is_refused() -> None:
    class Confused(DefaultSavePlanner):
        """Resolves bytes for everything."""

        def resolve_data(self, write_item: WriteItem) -> Any:
            return io.BytesIO(b"")

    with pytest.raises(UnsupportedLeaf, match="w: the planner resolved a BytesIO, expected a tensor"):
        state_of({"w": torch.ones(1)}, Confused()).local_plan()


def test_names_that_collide_are_refused() -> None:
    with pytest.raises(ValueError, match="duplicated flatten key"):
        state_of({"a": {"b": 1}, "a.b": 2})


class Rewriting(DefaultSavePlanner):
    """Lets a test change what the planner says."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self._changes = changes

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return self._changes.get("local", lambda plan: plan)(plan)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return self._changes.get("whole", lambda plans, metadata: (plans, metadata))(
            *super().create_global_plan(all_plans)
        )

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return self._changes.get("finish", lambda plan: plan)(super().finish_plan(new_plan))


@pytest.mark.parametrize("data", [["a"], "a", 7])
def test_planner_data_that_is_no_mapping_is_refused(data: object) -> None:
    planner = Rewriting(local=lambda plan: replace(plan, planner_data=data))
    with pytest.raises(PlanningError, match=f"planner_data is a {type(data).__name__}"):
        state_of({"a": torch.ones(1)}, planner).local_plan()


def test_planner_data_of_the_metadata_that_is_no_mapping_is_refused() -> None:
    planner = Rewriting(whole=lambda plans, metadata: (plans, replace(metadata, planner_data=["a"])))
    with pytest.raises(PlanningError, match="planner_data is a list"):
        plan_alone(state_of({"a": torch.ones(1)}, planner))


def test_plans_that_do_not_fit_together_are_refused() -> None:
    states = [{"w": RowShard.of(torch.ones(2, 3), first_row, 5)} for first_row in (0, 2)]
    with pytest.raises(PlanningError, match="w: the ranks have 12 of its 15 elements"):
        our_plans(states)


def add_key(plans: list[SavePlan], metadata: Metadata) -> tuple[list[SavePlan], Metadata]:
    metadata.state_dict_metadata["ghost"] = BytesStorageMetadata()
    return plans, metadata


def drop_item(plans: list[SavePlan], metadata: Metadata) -> tuple[list[SavePlan], Metadata]:
    return [replace(plan, items=plan.items[1:]) for plan in plans], metadata


@pytest.mark.parametrize(("change", "key"), [(add_key, "ghost"), (drop_item, "a")])
def test_metadata_that_does_not_follow_from_the_plans_is_refused(change: Any, key: str) -> None:
    state = state_of({"a": torch.ones(1), "b": torch.ones(2)}, Rewriting(whole=change))
    with pytest.raises(PlanningError, match=rf"does not follow from its plans for 1 keys: \['{key}'\]"):
        plan_alone(state)


def test_paths_of_keys_that_nobody_saves_are_refused() -> None:
    planner = Rewriting(whole=lambda plans, m: (plans, replace(m, planner_data={**m.planner_data, "ghost": ("g",)})))
    with pytest.raises(PlanningError, match=r"paths of keys that no rank saves: \['ghost'\]"):
        plan_alone(state_of({"a": torch.ones(1)}, planner))


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: replace(plan, items=plan.items[::-1]),
        lambda plan: replace(plan, items=plan.items[1:]),
        lambda plan: replace(plan, items=[*plan.items, WriteItem(MetadataIndex("more"), WriteItemType.BYTE_IO)]),
    ],
    ids=["reordered", "dropped", "added"],
)
def test_a_planner_that_changes_the_plan_at_the_end_is_refused(change: Any) -> None:
    state = state_of({"a": torch.ones(1), "b": 2}, Rewriting(finish=change))
    with pytest.raises(PlanningError, match=r"Rewriting\.finish_plan changed the items"):
        plan_alone(state)


def test_dcps_own_plan_cache_is_refused() -> None:
    """It is global to the process, ignores dtypes, and answers with plans of other clients."""
    with pytest.raises(PlanningError, match="enable_plan_caching"):
        state_of({"a": torch.ones(1)}, DefaultSavePlanner(enable_plan_caching=True))


# ---------------------------------------------------------------- nothing is kept alive


@pytest.mark.parametrize("planner", [None, ToLowestRank()])
def test_after_release_no_tensor_is_kept_alive(planner: Any) -> None:
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    state = state_of({"model": {"w": tensor}}, planner)
    planned = plan_alone(state)
    state.release()
    del state, tensor
    gc.collect()
    assert alive() is None
    assert planned.items


def test_an_empty_state_dict_has_an_empty_plan() -> None:
    planned = plan_alone(state_of({}))
    empty: Plan = ()
    assert (planned.items, planned.framed, planned.others) == (empty, (), ())
