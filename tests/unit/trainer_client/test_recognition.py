"""Recognising a state dict: a shortcut that never takes one for another, and that finds the leaves that DCP finds."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from enum import Enum
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckpt_trainer_client.planning import PlanningState
from ckpt_trainer_client.recognition import Recognition
from testkit.plans import RowShard
from testkit.states import nested_state


def seen(state: dict[str, Any]) -> PlanningState:
    """A state as the first save of it sees it."""
    return PlanningState(state, None, is_coordinator=True)


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """As DCP flattens it."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    return planner.state_dict


def recognition(state: dict[str, Any]) -> Recognition:
    structure = seen(state).structure
    assert structure is not None
    made = Recognition.of(state, flat(state), structure)
    assert made is not None
    return made


def assert_same_leaves(known: Recognition, state: dict[str, Any]) -> None:
    leaves = known.leaves(state)
    assert leaves is not None
    expected = flat(state)
    assert known.fqns == tuple(expected)
    assert all(one is other for one, other in zip(leaves, expected.values(), strict=True))


def base() -> dict[str, Any]:
    return {
        "model": OrderedDict(w=torch.zeros(3, 4), b=torch.zeros(3)),
        "list": [torch.zeros(2), {"deep": [torch.zeros(1), 3]}],
        "plain list": [1, [2, "x"]],
        "empty": {},
        "tuple": (torch.zeros(1),),
        "step": 1,
        "name": "a",
    }


LIKE: dict[str, Any] = {
    "other numbers": lambda s: s["model"]["w"].fill_(7),
    "another tensor": lambda s: s["model"].update(w=torch.ones(4, 3).t()),
    "another value": lambda s: s.update(step=2.5, name=None),
    "a longer list without tensors": lambda s: s["plain list"].append([3]),
    "another tuple": lambda s: s.update(tuple=(torch.ones(5), 1)),
}


@pytest.mark.parametrize("what", LIKE)
def test_what_changes_from_step_to_step_is_recognised(what: str) -> None:
    known, state = recognition(base()), base()
    LIKE[what](state)
    assert_same_leaves(known, state)


class Named(str, Enum):
    """Equal to a string, and called otherwise."""

    STEP = "step"


OTHER: dict[str, Any] = {
    "another dtype": lambda s: s["model"].update(w=torch.zeros(3, 4, dtype=torch.bfloat16)),
    "another shape": lambda s: s["model"].update(w=torch.zeros(4, 3)),
    "requires grad": lambda s: s["model"]["w"].requires_grad_(),
    "a parameter": lambda s: s["model"].update(w=torch.nn.Parameter(torch.zeros(3, 4), requires_grad=False)),
    "another layout": lambda s: s["model"].update(w=torch.zeros(3, 4).to_sparse()),
    "no data": lambda s: s["model"].update(w=torch.zeros(3, 4, device="meta")),
    "a tensor that knows its shards": lambda s: s["model"].update(w=RowShard.of(torch.zeros(3, 4), 0, 6)),
    "a lazy parameter": lambda s: s["model"].update(w=torch.nn.UninitializedParameter()),
    "a value became a lazy parameter": lambda s: s.update(step=torch.nn.UninitializedParameter()),
    "a value became a tensor": lambda s: s.update(step=torch.tensor(1)),
    "a value became a mapping": lambda s: s.update(step={"a": 1}),
    "a value became an empty mapping": lambda s: s.update(step={}),
    "a value became a list with a tensor": lambda s: s.update(step=[torch.zeros(1)]),
    "a tensor in a list that had none": lambda s: s["plain list"][1].append(torch.zeros(1)),
    "a mapping in a list that had none": lambda s: s["plain list"].append({}),
    "no tensor in a list that had some": lambda s: s["list"][1]["deep"].__setitem__(0, 1),
    "something in what was empty": lambda s: s["empty"].update(a=1),
    "a key more": lambda s: s["model"].update(extra=torch.zeros(1)),
    "a key less": lambda s: s["model"].pop("b"),
    "another name": lambda s: s["model"].update(v=s["model"].pop("b")),
    "another order": lambda s: s["model"].move_to_end("w"),
    "a key that is only equal": lambda s: s.update({Named.STEP: s.pop("step"), "name": s.pop("name")}),
    "another mapping": lambda s: s.update(model=dict(s["model"])),
    "a mapping instead of a list": lambda s: s["list"][1].update(deep={"0": torch.zeros(1), "1": 3}),
    "a longer list": lambda s: s["list"].append(torch.zeros(2)),
}


@pytest.mark.parametrize("what", OTHER)
def test_what_may_be_planned_otherwise_is_not_recognised(what: str) -> None:
    known, state = recognition(base()), base()
    OTHER[what](state)
    assert known.leaves(state) is None


TENSORS = st.builds(
    lambda size, double: torch.zeros(size, dtype=torch.float64 if double else torch.float32),
    st.integers(0, 2),
    st.booleans(),
)
LEAVES = TENSORS | st.none() | st.integers(0, 1) | st.tuples(st.integers(0, 1))
KEYS = st.sampled_from(["a", "b", 1])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2), max_leaves=6
)
STATES = st.dictionaries(st.sampled_from(["a", "b"]), VALUES, max_size=2)


@given(STATES, STATES)
def test_any_state_is_recognised_as_itself_and_as_nothing_with_another_structure(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    known = recognition(one)
    assert_same_leaves(known, one)
    if known.leaves(other) is not None:
        assert_same_leaves(known, other)
        assert seen(other).structure == seen(one).structure


def test_the_zoo_is_recognised() -> None:
    assert_same_leaves(recognition(nested_state(1)), nested_state(2))


def test_no_tensor_is_kept_alive() -> None:
    state = {"a": torch.zeros(3), "list": [torch.zeros(1)]}
    alive = [weakref.ref(state["a"]), weakref.ref(state["list"][0])]
    known = recognition(state)
    del state
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    assert known.fqns == ("a", "list.0")
