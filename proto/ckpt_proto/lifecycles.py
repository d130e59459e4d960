"""The three lifecycles, as tables: region, shard job, checkpoint.

Rules of this file: every legal change of state stands here and nowhere else; the tables do not know which side of the
socket they are on; an event that a table does not list raises and changes nothing. The diagrams in ``PROTOCOL.md`` are
generated from these tables (``python -m ckpt_proto.lifecycles``), and a test keeps them equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from ckpt_proto.errors import LocalProtocolError


class RegionState(Enum):
    """Who may touch a region: the rank in FREE and FILLING, the sidecar in SEALED and ORPHANED."""

    FREE = "free"
    FILLING = "filling"
    SEALED = "sealed"
    ORPHANED = "orphaned"


class RegionEvent(Enum):
    """What happens to a region."""

    FILL = "fill"
    DISCARD = "discard"
    SEAL = "seal"
    RELEASE = "release"
    OWNER_DIED = "owner died"
    ADOPT = "adopt"
    REAP = "reap"


class ShardState(Enum):
    """One rank's part of one attempt, in the sidecar of its node."""

    QUEUED = "queued"
    WRITING = "writing"
    PERSISTED = "persisted"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ShardEvent(Enum):
    """What happens to a shard job."""

    START = "start"
    RETRY = "retry"
    DURABLE = "durable"
    FAIL = "fail"
    CANCEL = "cancel"


class CheckpointState(Enum):
    """One attempt to save one step, in the coordinator."""

    OPEN = "open"
    COMPLETE = "complete"
    COMMITTED = "committed"
    ABORTED = "aborted"
    EXPIRED = "expired"


class CheckpointEvent(Enum):
    """What happens to a checkpoint attempt."""

    ALL_PERSISTED = "all persisted"
    PUBLISH = "publish"
    ABORT = "abort"
    EXPIRE = "expire"


S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
Table = Mapping[S, Mapping[E, S]]

REGION: Table[RegionState, RegionEvent] = {
    RegionState.FREE: {RegionEvent.FILL: RegionState.FILLING, RegionEvent.OWNER_DIED: RegionState.ORPHANED},
    RegionState.FILLING: {
        RegionEvent.SEAL: RegionState.SEALED,
        RegionEvent.DISCARD: RegionState.FREE,
        RegionEvent.OWNER_DIED: RegionState.ORPHANED,
    },
    RegionState.SEALED: {RegionEvent.RELEASE: RegionState.FREE, RegionEvent.OWNER_DIED: RegionState.ORPHANED},
    RegionState.ORPHANED: {RegionEvent.ADOPT: RegionState.SEALED, RegionEvent.REAP: RegionState.FREE},
}

SHARD: Table[ShardState, ShardEvent] = {
    ShardState.QUEUED: {ShardEvent.START: ShardState.WRITING, ShardEvent.CANCEL: ShardState.CANCELLED},
    ShardState.WRITING: {
        ShardEvent.DURABLE: ShardState.PERSISTED,
        ShardEvent.FAIL: ShardState.FAILED,
        ShardEvent.RETRY: ShardState.QUEUED,
        ShardEvent.CANCEL: ShardState.CANCELLED,
    },
    ShardState.PERSISTED: {},
    ShardState.FAILED: {},
    ShardState.CANCELLED: {},
}

CHECKPOINT: Table[CheckpointState, CheckpointEvent] = {
    CheckpointState.OPEN: {
        CheckpointEvent.ALL_PERSISTED: CheckpointState.COMPLETE,
        CheckpointEvent.ABORT: CheckpointState.ABORTED,
    },
    CheckpointState.COMPLETE: {
        CheckpointEvent.PUBLISH: CheckpointState.COMMITTED,
        CheckpointEvent.ABORT: CheckpointState.ABORTED,
    },
    CheckpointState.COMMITTED: {CheckpointEvent.EXPIRE: CheckpointState.EXPIRED},
    CheckpointState.ABORTED: {},
    CheckpointState.EXPIRED: {},
}

LIFECYCLES: Mapping[str, Table] = {"region": REGION, "shard job": SHARD, "checkpoint": CHECKPOINT}  # type: ignore[type-arg]


def walk(table: Table[S, E], state: S, event: E) -> S:
    """The state after ``event``.

    Raises:
        LocalProtocolError: the table has no such step from ``state``.
    """
    after = table[state].get(event)
    if after is None:
        raise LocalProtocolError(f"a {type(state).__name__} that is {state.value!r} cannot take {event.value!r}")
    return after


def is_terminal(table: Table[S, E], state: S) -> bool:
    """Whether no event leads out of ``state``."""
    return not table[state]


def diagram(name: str) -> str:
    """One lifecycle as a Mermaid state diagram, in the order of its table."""
    table = LIFECYCLES[name]
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(table)).name}"]
    for state, steps in table.items():
        lines += [f"    {state.name} --> {after.name}: {event.value}" for event, after in steps.items()]
        if not steps:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join([*lines, "```"])


if __name__ == "__main__":
    for lifecycle in LIFECYCLES:
        print(f"### {lifecycle}\n\n{diagram(lifecycle)}\n")
