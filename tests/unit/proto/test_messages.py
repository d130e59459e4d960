"""A message that exists is valid: what the constructors refuse, with which words."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from ckpt_proto.errors import CheckpointError, FailureReport, LocalProtocolError, report_of
from ckpt_proto.identity import MAX_RANKS, MAX_STEP
from ckpt_proto.messages import MAX_SLOTS, GrowRegion, Hello, Message, RestoreStep, SubmitShard
from testkit.protocol_values import EXAMPLES, SAVE

HELLO = next(example for example in EXAMPLES if isinstance(example, Hello))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"job_id": "../x"}, "job id"),
        ({"world_size": 0, "rank": 0}, "world size 0 is outside 1"),
        ({"world_size": MAX_RANKS + 1}, "world size"),
        ({"rank": -1}, "rank -1 is outside 0 .. 1"),
        ({"rank": 2}, "rank 2 is outside 0 .. 1"),
        ({"pid": 0}, "pid 0"),
        ({"pid": -1}, "pid -1"),
        ({"incarnation": -1}, "incarnation -1"),
        ({"slots": 0}, "0 slots"),
        ({"slots": MAX_SLOTS + 1}, "9 slots per rank"),
        ({"stage_timeout_s": 0.0}, "stage timeout"),
        ({"stage_timeout_s": float("nan")}, "stage timeout"),
        ({"directory": "relative"}, "not an absolute path"),
        ({"directory": ""}, "not an absolute path"),
        ({"directory": "/a\0b"}, "NUL"),
        ({"directory": "/" + "é" * 2048}, "has 4097 bytes; 4095 are possible"),
        ({"node": "n" * 256}, "256 characters"),
        ({"torch_version": "2" * 256}, "256 characters"),
        ({"session": "xyz"}, "eight hexadecimal digits"),
    ],
    ids=str,
)
def test_a_hello_out_of_bounds_cannot_be_made(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LocalProtocolError, match=words):
        dataclasses.replace(HELLO, **changes)


def test_a_stage_timeout_without_end_is_refused_because_every_wait_is_bounded() -> None:
    with pytest.raises(LocalProtocolError, match="stage timeout"):
        dataclasses.replace(HELLO, stage_timeout_s=float("inf"))


def test_the_bounds_of_a_hello_belong_to_it() -> None:
    changes: dict[str, Any] = {"rank": MAX_RANKS - 1, "world_size": MAX_RANKS, "slots": MAX_SLOTS, "session": "0" * 8}
    assert dataclasses.replace(HELLO, **changes).rank == MAX_RANKS - 1


@pytest.mark.parametrize("slot", [-1, MAX_SLOTS])
def test_a_slot_that_no_rank_can_have_is_refused(slot: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"slot {slot} is outside"):
        SubmitShard(SAVE, 0, "p1", slot, 1, ())
    with pytest.raises(LocalProtocolError, match=f"slot {slot} is outside"):
        GrowRegion("p1", slot, 1)


def test_an_entry_of_negative_length_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="negative length"):
        SubmitShard(SAVE, 0, "p1", 0, 1, (1, -1))


@pytest.mark.parametrize("capacity", [-1, 2**50])
def test_a_region_is_not_grown_beyond_reason(capacity: int) -> None:
    with pytest.raises(LocalProtocolError, match="out of bounds"):
        GrowRegion("p1", 0, capacity)


@pytest.mark.parametrize("step", [-1, MAX_STEP + 1])
def test_a_restore_step_out_of_bounds_cannot_be_made(step: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"step {step}"):
        RestoreStep(0, step)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_is_frozen_and_says_who_sends_it(message: Message) -> None:
    assert type(message).__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert len(inspect.getdoc(type(message)) or "") > 40


# ---------------------------------------------------------------- failures as they travel


def test_a_failure_reads_as_one_line_with_rank_node_kind_and_hint() -> None:
    failure = FailureReport("StorageError", "no room", hint="make room").at(5, "node-b")
    assert str(failure) == "rank 5 on node-b: no room [StorageError] — make room"


def test_a_failure_of_no_rank_is_the_sidecars() -> None:
    assert str(FailureReport("StorageError", "no room")) == "sidecar: no room [StorageError]"


def test_attributing_a_failure_keeps_the_node_that_is_known() -> None:
    assert FailureReport("X", "x", node="node-a").at(1).node == "node-a"
    assert FailureReport("X", "x", node="node-a").at(1, "node-b").node == "node-b"


def test_the_report_of_an_error_tells_its_causes() -> None:
    error = CheckpointError("outer")
    error.__cause__ = OSError("inner")
    assert report_of(error, hint="do this") == FailureReport(
        "CheckpointError", "outer; caused by OSError: inner", "do this"
    )


def test_the_report_of_an_error_without_text_shows_its_class() -> None:
    assert report_of(KeyError()).message == "KeyError()"
