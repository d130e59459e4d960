"""Ranks that write without a sidecar, on a node that does not answer: storage says what they have made durable."""

from __future__ import annotations

import pytest

from ckpt_proto.messages import Aborted, AskCommit, Committed, DecideCommit
from ckpt_sidecar.actions import Action, ListShards, Publish
from ckpt_sidecar.attempt import LIST_SILENT_S
from ckpt_sidecar.attempt_watch import NODE_GRACE_S
from ckpt_sidecar.events import ListedShard, NodeSilent, Published, ShardsListed, Tick
from testkit.tables import DIRECTORY, PLAN_ID, STAGE_TIMEOUT_S, Coordinator, key, of_type, told

SAVE = key()
WHERE = f"{DIRECTORY}/step-{SAVE.step}"


def silent(coordinator: Coordinator, after_s: float) -> list[Action]:
    """Node 1 has not been heard of for a minute, and time has passed."""
    coordinator.now_s += after_s
    return [*coordinator.do(NodeSilent("node-1", (1,), 60.0)), *coordinator.do(Tick())]


def listed(coordinator: Coordinator, *ranks: int) -> list[Action]:
    return coordinator.do(ShardsListed(SAVE, tuple(ListedShard(rank, PLAN_ID, False) for rank in ranks), False))


@pytest.fixture
def coordinator() -> Coordinator:
    """Two ranks that degrade have planned a save; that of rank 0 is durable."""
    coordinator = Coordinator().joined(2, degrades=True)
    coordinator.planned(SAVE)
    coordinator.staged(SAVE, 0)
    coordinator.persisted(SAVE, 0)
    return coordinator


def test_who_degrades_is_known_of_the_session(coordinator: Coordinator) -> None:
    members, token = coordinator.table._members, SAVE.session
    assert members.degrade(token, [0, 1])
    assert members.degrade(token, [1])
    assert not members.degrade(token, [1, 2])
    assert not members.degrade("ffffffff", [1])
    coordinator.says_hello(1, 2, node="node-1", session=token, next_seq=1, in_flight=(0,))
    assert not members.degrade(token, [0, 1])


def test_ranks_that_wait_for_a_sidecar_are_given_up_with_their_node() -> None:
    coordinator = Coordinator().joined(2)
    coordinator.planned(SAVE)
    coordinator.staged(SAVE, 0)
    coordinator.persisted(SAVE, 0)
    assert of_type(silent(coordinator, NODE_GRACE_S), ListShards)
    listed(coordinator)
    [aborted] = told(silent(coordinator, 1.0), 0)
    assert isinstance(aborted, Aborted)
    assert aborted.failures[0].kind == "NodeLost"


def test_what_ranks_without_a_sidecar_have_written_is_committed(coordinator: Coordinator) -> None:
    assert silent(coordinator, NODE_GRACE_S) == []
    [look] = silent(coordinator, LIST_SILENT_S)
    assert look == ListShards(SAVE, DIRECTORY, 2, (1,))
    assert listed(coordinator) == []
    [look] = silent(coordinator, LIST_SILENT_S)
    assert isinstance(look, ListShards)
    assert told(listed(coordinator, 1), 0) == [AskCommit(SAVE, WHERE)]
    assert of_type(coordinator.at(0, DecideCommit(SAVE, True)), Publish)
    assert told(coordinator.do(Published(SAVE)), 1) == [Committed(SAVE, WHERE)]


def test_they_have_as_long_as_a_late_rank(coordinator: Coordinator) -> None:
    for _ in range(int(STAGE_TIMEOUT_S // 60)):
        for action in silent(coordinator, 60.0):
            assert isinstance(action, ListShards), action
            listed(coordinator)
    [aborted] = told(silent(coordinator, 1.0), 0)
    assert isinstance(aborted, Aborted)
    assert [(failure.kind, failure.rank) for failure in aborted.failures] == [("RankLate", 1)]


def test_one_that_had_staged_before_its_node_fell_silent_has_no_longer(coordinator: Coordinator) -> None:
    coordinator.staged(SAVE, 1)
    assert silent(coordinator, NODE_GRACE_S) == []
    assert of_type(silent(coordinator, STAGE_TIMEOUT_S), ListShards)
    listed(coordinator)
    [aborted] = told(silent(coordinator, 1.0), 0)
    assert isinstance(aborted, Aborted)
    assert [(failure.kind, failure.rank) for failure in aborted.failures] == [("NodeLost", 1)]
