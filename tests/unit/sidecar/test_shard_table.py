"""The shard jobs of a node: tried again, told again, looked for, lost."""

from __future__ import annotations

import pytest

from ckpt_proto.lifecycles import RegionState, ShardState
from ckpt_proto.messages import (
    Aborted,
    Committed,
    ReportFailure,
    Resubmit,
    ShardPersisted,
    ShardStaged,
    SlotFreed,
    SubmitShard,
)
from ckpt_sidecar.actions import (
    Action,
    BreakSeal,
    CancelShard,
    FindShard,
    RemoveShardFiles,
    Send,
    ToCoordinator,
    WriteShard,
)
from ckpt_sidecar.events import RankDied, ShardBroken, ShardDurable, ShardFound, ShardMissing, ShardSealed, ShardStarted
from ckpt_sidecar.shard_job import MAX_ENDED_JOBS
from testkit.tables import DIRECTORY, FAILURE, PLAN_ID, SESSION, Node, key, of_type

PEER = Node.peer(0)
SAVE = key()
RETRY_S = 30.0
PERSISTED = ShardPersisted(SAVE, 0, 4096)
STAGED = ShardStaged(SAVE, 0, PLAN_ID, False, 2, DIRECTORY)
FREED = Send(PEER, SlotFreed(0, 1, SAVE.seq))
LET_GO: list[Action] = [BreakSeal(0, 0), FREED]


@pytest.fixture
def node() -> Node:
    """A node whose rank 0 is welcome and has two regions ready for the plan."""
    return Node().welcomed().planned()


def state(node: Node) -> ShardState:
    return node.table.jobs[0, SAVE].state


def fails(node: Node, *, may_pass: bool = True) -> list[Action]:
    """The write that is under way breaks."""
    node.do(ShardStarted(0, SAVE))
    return node.do(ShardBroken(0, SAVE, FAILURE, may_pass))


GIVEN_UP: list[Action] = [
    *LET_GO,
    RemoveShardFiles(0, SAVE, DIRECTORY),
    ToCoordinator(0, ReportFailure(SAVE, FAILURE.at(0, "node-a"))),
]


# ---------------------------------------------------------------- tried again


def test_a_write_that_fails_by_an_error_that_may_pass_is_ordered_again_and_nobody_is_told(node: Node) -> None:
    (first,) = of_type(node.says(0, node.submit(SAVE)), WriteShard)
    (again,) = fails(node)
    assert isinstance(again, WriteShard)
    assert again.delay_s > 0
    assert (again.submit, again.items, again.ready) == (first.submit, first.items, first.ready)
    assert state(node) is ShardState.QUEUED
    assert node.table.ranks[0].slots[0].state is RegionState.SEALED
    assert node.table.is_busy


def test_a_write_that_succeeds_at_last_is_as_good_as_any(node: Node) -> None:
    node.submitted(SAVE)
    fails(node)
    node.do(ShardStarted(0, SAVE))
    assert node.do(ShardDurable(0, SAVE, 4096)) == [Send(PEER, PERSISTED), *LET_GO, ToCoordinator(0, PERSISTED)]


def test_it_is_given_up_when_it_has_failed_for_long_enough(node: Node) -> None:
    node.submitted(SAVE)
    actions = fails(node)
    tries = 1
    while of_type(actions, WriteShard):
        assert node.now_s <= RETRY_S
        node.now_s += of_type(actions, WriteShard)[0].delay_s
        actions = fails(node)
        tries += 1
    assert actions == GIVEN_UP
    assert tries > 3
    assert state(node) is ShardState.FAILED
    assert not node.table.is_busy


def test_an_error_that_does_not_pass_is_the_end_at_once(node: Node) -> None:
    node.submitted(SAVE)
    assert fails(node, may_pass=False) == GIVEN_UP


def test_an_error_that_does_not_pass_ends_the_retries_too(node: Node) -> None:
    node.submitted(SAVE)
    fails(node)
    assert fails(node, may_pass=False) == GIVEN_UP


@pytest.mark.parametrize("waits", [False, True], ids=["while it writes", "while it waits for its next try"])
def test_an_abort_ends_the_retries(node: Node, waits: bool) -> None:
    node.submitted(SAVE)
    if waits:
        fails(node)
    else:
        node.do(ShardStarted(0, SAVE))
    assert CancelShard(0, SAVE) in node.hears(0, Aborted(SAVE, (FAILURE,)))
    assert fails(node) == [*LET_GO, RemoveShardFiles(0, SAVE, DIRECTORY)]
    assert state(node) is ShardState.CANCELLED


def test_the_write_of_a_dead_rank_is_tried_again_too(node: Node) -> None:
    node.submitted(SAVE)
    node.do(RankDied(0, 1000, "killed"))
    assert of_type(fails(node), WriteShard)


# ---------------------------------------------------------------- said again


def again(node: Node, submit: SubmitShard) -> list[Action]:
    return node.says(0, Resubmit(submit))


def test_a_job_under_way_is_told_to_the_coordinator_again(node: Node) -> None:
    submit = node.submit(SAVE)
    node.says(0, submit)
    assert again(node, submit) == [ToCoordinator(0, STAGED)]
    node.do(ShardStarted(0, SAVE))
    assert again(node, submit) == [ToCoordinator(0, STAGED)]


def test_a_durable_job_is_told_to_everybody_again(node: Node) -> None:
    submit = node.submit(SAVE)
    node.durable(SAVE)
    assert again(node, submit) == [
        FREED,
        ToCoordinator(0, STAGED),
        Send(PEER, PERSISTED),
        ToCoordinator(0, PERSISTED),
    ]


def test_the_slot_of_a_job_that_has_failed_is_given_back_again(node: Node) -> None:
    submit = node.submit(SAVE)
    node.says(0, submit)
    fails(node, may_pass=False)
    assert again(node, submit) == [FREED, ToCoordinator(0, STAGED)]


def test_the_slot_of_a_job_that_is_forgotten_is_given_back(node: Node) -> None:
    submit = node.submit(SAVE)
    node.durable(SAVE)
    for seq in range(1, MAX_ENDED_JOBS + 3):
        node.durable(key(seq))
    assert again(node, submit) == [FREED]


def test_what_is_not_known_is_looked_for(node: Node) -> None:
    submit = node.submit(SAVE)
    assert again(node, submit) == [FindShard(submit, DIRECTORY)]
    assert node.table.jobs == {}


def test_a_rank_cannot_ask_for_another_ranks_shard_or_one_of_another_session(node: Node) -> None:
    assert again(node, SubmitShard(SAVE, 1, PLAN_ID, 0, 1, (10,))) == []
    assert again(node, SubmitShard(key(session="0000000b"), 0, PLAN_ID, 0, 1, (10,))) == []


# ---------------------------------------------------------------- looked for


def test_what_is_still_sealed_is_written(node: Node) -> None:
    submit = node.submit(SAVE)
    actions = node.do(ShardSealed(submit))
    assert [order.submit for order in of_type(actions, WriteShard)] == [submit]
    assert ToCoordinator(0, STAGED) in actions


def test_what_is_found_on_storage_counts_as_written_by_this_sidecar(node: Node) -> None:
    submit = node.submit(SAVE)
    assert node.do(ShardFound(submit, DIRECTORY, 4096)) == [
        FREED,
        ToCoordinator(0, STAGED),
        Send(PEER, PERSISTED),
        ToCoordinator(0, PERSISTED),
    ]
    assert state(node) is ShardState.PERSISTED
    assert node.hears(0, Aborted(SAVE, (FAILURE,)))[-1] == RemoveShardFiles(0, SAVE, DIRECTORY)


def test_what_is_nowhere_fails_the_save_and_gives_the_slot_back(node: Node) -> None:
    submit = node.submit(SAVE)
    assert node.do(ShardMissing(submit, FAILURE)) == [
        FREED,
        ToCoordinator(0, ReportFailure(SAVE, FAILURE.at(0, "node-a"))),
    ]
    assert node.table.jobs == {}


@pytest.mark.parametrize("kind", ["sealed", "found", "missing"])
def test_what_has_come_meanwhile_is_not_begun_twice(node: Node, kind: str) -> None:
    submit = node.submit(SAVE)
    node.says(0, submit)
    events = {
        "sealed": ShardSealed(submit),
        "found": ShardFound(submit, DIRECTORY, 1),
        "missing": ShardMissing(submit, FAILURE),
    }
    assert node.do(events[kind]) == []
    assert state(node) is ShardState.QUEUED


@pytest.mark.parametrize("kind", ["sealed", "found", "missing"])
def test_an_answer_for_a_rank_that_has_a_successor_is_nobodys(node: Node, kind: str) -> None:
    submit = node.submit(SAVE)
    node.do(RankDied(0, 1000, "killed"))
    node.welcomed(0, "0000000b", pid=77, incarnation=1)
    events = {
        "sealed": ShardSealed(submit),
        "found": ShardFound(submit, DIRECTORY, 1),
        "missing": ShardMissing(submit, FAILURE),
    }
    assert node.do(events[kind]) == []
    assert node.table.jobs == {}


# ---------------------------------------------------------------- what a coordinator must hear once more


def test_jobs_are_said_again_until_the_end_of_their_save_was_heard(node: Node) -> None:
    node.durable(SAVE)
    node.submitted(key(1), slot=1)
    said = node.table.shards.say_again()
    assert said == [
        ToCoordinator(0, STAGED),
        ToCoordinator(0, PERSISTED),
        ToCoordinator(0, ShardStaged(key(1), 0, PLAN_ID, False, 2, DIRECTORY)),
    ]
    node.hears(0, Committed(SAVE, "/x"))
    assert node.table.shards.say_again() == said[2:]


def test_of_a_job_that_has_failed_the_failure_is_said_again(node: Node) -> None:
    node.submitted(SAVE)
    fails(node, may_pass=False)
    assert node.table.shards.say_again() == [ToCoordinator(0, ReportFailure(SAVE, FAILURE.at(0, "node-a")))]


# ---------------------------------------------------------------- lost


def test_a_staged_save_that_failed_is_lost_only_if_nobody_was_there_to_be_told(node: Node) -> None:
    node.writing(SAVE)
    node.hears(0, Aborted(SAVE, (FAILURE,)))
    assert node.table.shards.lost == {}
    node.writing(key(1), slot=1)
    node.do(RankDied(0, 1000, "killed"))
    node.hears(0, Aborted(key(1), (FAILURE,)))
    assert list(node.table.shards.lost) == [key(1)]
    assert "no room on /data" in node.table.shards.lost[key(1)]


def test_a_skipped_save_is_not_lost(node: Node) -> None:
    node.writing(SAVE)
    node.do(RankDied(0, 1000, "killed"))
    node.hears(0, Aborted(SAVE, (FAILURE,), skipped=True))
    assert node.table.shards.lost == {}


def test_a_save_that_this_node_had_no_part_in_is_not_lost_here(node: Node) -> None:
    node.do(RankDied(0, 1000, "killed"))
    node.hears(0, Aborted(key(9, session=SESSION), (FAILURE,)))
    assert node.table.shards.lost == {}
