"""The three lifecycles, walked exhaustively: what a table lists is legal, all else raises and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from enum import Enum
from typing import Any

import pytest

from ckpt_proto.errors import LocalProtocolError
from ckpt_proto.lifecycles import (
    CHECKPOINT,
    LIFECYCLES,
    REGION,
    SHARD,
    CheckpointEvent,
    CheckpointState,
    RegionEvent,
    RegionState,
    ShardEvent,
    ShardState,
    diagram,
    is_terminal,
    walk,
)

EVENTS: dict[str, type[Enum]] = {"region": RegionEvent, "shard job": ShardEvent, "checkpoint": CheckpointEvent}
STATES: dict[str, type[Enum]] = {"region": RegionState, "shard job": ShardState, "checkpoint": CheckpointState}

LEGAL = {
    ("region", "free", "fill", "filling"),
    ("region", "free", "owner died", "orphaned"),
    ("region", "filling", "seal", "sealed"),
    ("region", "filling", "discard", "free"),
    ("region", "filling", "owner died", "orphaned"),
    ("region", "sealed", "release", "free"),
    ("region", "sealed", "owner died", "orphaned"),
    ("region", "orphaned", "adopt", "sealed"),
    ("region", "orphaned", "reap", "free"),
    ("shard job", "queued", "start", "writing"),
    ("shard job", "queued", "cancel", "cancelled"),
    ("shard job", "writing", "durable", "persisted"),
    ("shard job", "writing", "fail", "failed"),
    ("shard job", "writing", "retry", "queued"),
    ("shard job", "writing", "cancel", "cancelled"),
    ("checkpoint", "open", "all persisted", "complete"),
    ("checkpoint", "open", "abort", "aborted"),
    ("checkpoint", "complete", "publish", "committed"),
    ("checkpoint", "complete", "abort", "aborted"),
    ("checkpoint", "committed", "expire", "expired"),
}
"""Written down a second time on purpose: a change of a lifecycle has to be made in two places, knowingly."""


def steps() -> Iterator[tuple[str, str, str, str]]:
    for name, table in LIFECYCLES.items():
        for state, row in table.items():
            for event, after in row.items():
                yield name, state.value, event.value, after.value


def test_the_tables_list_exactly_the_legal_steps() -> None:
    assert set(steps()) == LEGAL


@pytest.mark.parametrize("name", LIFECYCLES)
def test_a_table_has_a_row_for_every_state(name: str) -> None:
    assert set(LIFECYCLES[name]) == set(STATES[name])


@pytest.mark.parametrize("name", LIFECYCLES)
def test_every_event_is_legal_somewhere_and_every_state_can_be_reached(name: str) -> None:
    table = LIFECYCLES[name]
    assert {event for row in table.values() for event in row} == set(EVENTS[name])
    reached = [next(iter(table))]
    for state in reached:
        reached += [after for after in table[state].values() if after not in reached]
    assert set(reached) == set(STATES[name])


@pytest.mark.parametrize("name", LIFECYCLES)
def test_every_state_meets_every_event(name: str) -> None:
    table = LIFECYCLES[name]
    before = deepcopy(table)
    for state in STATES[name]:
        for event in EVENTS[name]:
            expected = {after for n, s, e, after in LEGAL if (n, s, e) == (name, state.value, event.value)}
            if expected:
                assert walk(table, state, event).value in expected
                continue
            with pytest.raises(LocalProtocolError, match=f"'{state.value}' cannot take '{event.value}'"):
                walk(table, state, event)
    assert table == before


@pytest.mark.parametrize(
    ("table", "terminal"),
    [
        (REGION, set()),
        (SHARD, {ShardState.PERSISTED, ShardState.FAILED, ShardState.CANCELLED}),
        (CHECKPOINT, {CheckpointState.ABORTED, CheckpointState.EXPIRED}),
    ],
    ids=["region", "shard job", "checkpoint"],
)
def test_terminal_states(table: Any, terminal: set[Enum]) -> None:
    assert {state for state in table if is_terminal(table, state)} == terminal


def test_an_error_names_which_lifecycle_it_was() -> None:
    with pytest.raises(LocalProtocolError, match="a RegionState that is 'free' cannot take 'seal'"):
        walk(REGION, RegionState.FREE, RegionEvent.SEAL)


def test_a_sealed_region_is_never_filled() -> None:
    assert RegionEvent.FILL not in REGION[RegionState.SEALED]
    assert {event for event, after in REGION[RegionState.SEALED].items() if after is RegionState.FREE} == {
        RegionEvent.RELEASE
    }


def test_a_checkpoint_is_published_only_when_complete() -> None:
    assert [state for state, row in CHECKPOINT.items() if CheckpointEvent.PUBLISH in row] == [CheckpointState.COMPLETE]


# ---------------------------------------------------------------- diagrams


@pytest.mark.parametrize("name", LIFECYCLES)
def test_a_diagram_has_one_arrow_per_step_and_ends_at_terminal_states(name: str) -> None:
    table = LIFECYCLES[name]
    arrows = [f"    {s.name} --> {after.name}: {e.value}" for s, row in table.items() for e, after in row.items()]
    ends = [f"    {state.name} --> [*]" for state in table if is_terminal(table, state)]
    first = f"    [*] --> {next(iter(table)).name}"
    lines = diagram(name).splitlines()
    assert lines[:3] == ["```mermaid", "stateDiagram-v2", first]
    assert lines[-1] == "```"
    assert sorted(lines[3:-1]) == sorted(arrows + ends)


def test_the_diagram_of_the_shard_job() -> None:
    assert diagram("shard job") == "\n".join(
        [
            "```mermaid",
            "stateDiagram-v2",
            "    [*] --> QUEUED",
            "    QUEUED --> WRITING: start",
            "    QUEUED --> CANCELLED: cancel",
            "    WRITING --> PERSISTED: durable",
            "    WRITING --> FAILED: fail",
            "    WRITING --> QUEUED: retry",
            "    WRITING --> CANCELLED: cancel",
            "    PERSISTED --> [*]",
            "    FAILED --> [*]",
            "    CANCELLED --> [*]",
            "```",
        ]
    )
