"""A coordinator on another node that is silent: storage is asked in its place, and nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_proto.messages import Aborted, Committed
from ckpt_sidecar.actions import Action, FindCommit, RemoveShardFiles, Send
from ckpt_sidecar.events import CommitLookedFor, CoordinatorSilent, ShardBroken, ShardStarted
from ckpt_sidecar.unheard import LOOKS
from testkit.tables import DIRECTORY, FAILURE, SESSION, STAGE_TIMEOUT_S, Node, key, of_type

SAVE = key()
LOOK = FindCommit(0, SAVE, DIRECTORY)
COMMITTED = Send(Node.peer(0), Committed(SAVE, f"{DIRECTORY}/step-{SAVE.step}"))
SILENT = CoordinatorSilent("node-b:29400", frozenset({SESSION}), silent_s=60.0, patience_s=120.0)
LOOK_AGAIN_S = SILENT.patience_s / LOOKS
LOST = replace(SILENT, silent_s=120.0)


@pytest.fixture
def node() -> Node:
    """A node whose rank 0 has a durable shard of a save."""
    node = Node().welcomed().planned()
    node.durable(SAVE)
    return node


def aborts(actions: list[Action]) -> list[Aborted]:
    return [sent.message for sent in of_type(actions, Send) if isinstance(sent.message, Aborted)]


def test_a_commit_that_is_found_on_storage_is_told_once(node: Node) -> None:
    assert node.do(SILENT) == [LOOK]
    assert node.do(CommitLookedFor(0, SAVE, is_published=True)) == [COMMITTED]
    node.now_s += LOOK_AGAIN_S
    assert node.do(LOST) == []
    assert node.do(CommitLookedFor(0, SAVE, is_published=True)) == []


def test_storage_is_looked_at_again_but_never_twice_at_once(node: Node) -> None:
    assert node.do(SILENT) == [LOOK]
    node.now_s += LOOK_AGAIN_S
    assert node.do(SILENT) == []
    assert node.do(CommitLookedFor(0, SAVE, is_published=False)) == []
    assert node.do(SILENT) == [LOOK]
    assert node.do(CommitLookedFor(0, SAVE, is_published=False)) == []
    assert node.do(SILENT) == []


def test_who_has_waited_for_long_enough_is_told_that_the_end_is_in_doubt(node: Node) -> None:
    actions = node.do(LOST)
    (told,) = aborts(actions)
    (failure,) = told.failures
    assert (failure.kind, failure.rank, failure.node) == ("CoordinatorLost", 0, "node-a")
    assert "node-b:29400 was not heard of for 120 s" in failure.message
    assert f"step {SAVE.step}" in failure.message
    assert told.files_stay
    assert not of_type(actions, RemoveShardFiles)
    node.now_s += LOOK_AGAIN_S
    assert node.do(LOST) == []


def test_ranks_that_may_be_without_a_sidecar_are_waited_for_as_long_as_late_ones() -> None:
    """Rank 0 may be one of them: then it commits by itself, and there is no coordinator."""
    node = Node().welcomed(degrades=True).planned()
    node.durable(SAVE)
    assert node.do(LOST) == [LOOK]
    assert len(aborts(node.do(replace(LOST, silent_s=STAGE_TIMEOUT_S)))) == 1


def test_what_was_in_doubt_may_be_committed_yet(node: Node) -> None:
    node.do(LOST)
    assert node.do(CommitLookedFor(0, SAVE, is_published=True)) == [COMMITTED]


def test_what_was_in_doubt_is_removed_when_the_coordinator_gives_it_up_after_all(node: Node) -> None:
    node.do(LOST)
    assert RemoveShardFiles(0, SAVE, DIRECTORY) in node.hears(0, Aborted(SAVE, (FAILURE,)))


def test_a_shard_that_is_still_being_written_is_not_looked_for(node: Node) -> None:
    other = key(1)
    node.writing(other, slot=1)
    assert node.do(SILENT) == [LOOK]
    assert [told.save for told in aborts(node.do(LOST))] == [SAVE, other]


def test_the_failure_of_this_node_is_told_as_it_is(node: Node) -> None:
    other = key(1)
    node.submitted(other, slot=1)
    node.do(ShardStarted(0, other))
    node.do(ShardBroken(0, other, FAILURE, False))
    failures = {told.save: told.failures[0] for told in aborts(node.do(LOST))}
    assert failures[other] == FAILURE.at(0, "node-a")


def test_sessions_of_another_coordinator_are_not_concerned(node: Node) -> None:
    assert node.do(replace(LOST, sessions=frozenset({"0000000b"}))) == []


def test_a_job_that_is_forgotten_meanwhile_is_nobodys(node: Node) -> None:
    assert node.do(CommitLookedFor(0, key(7), is_published=True)) == []
