"""Both tables wired as the daemon wires them: whole stories of ranks, sidecar and workers, and any order of them.

The first part tells stories; the last lets hypothesis mix ranks that come, save, skip, fail, reconnect, leave, die and
are restarted with workers that succeed and fail, and looks for an order that breaks a promise.
"""

from __future__ import annotations

from unittest import TestCase

import pytest
from hypothesis import HealthCheck, Phase, settings

from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import (
    Aborted,
    AskRestoreStep,
    Committed,
    DecideCommit,
    GrowRegion,
    RegionReady,
    ReportFailure,
    ReportSkip,
    RestoreStep,
    SlotFreed,
)
from ckpt_sidecar.actions import CancelShard, Publish, RemoveShardFiles, WriteShard
from ckpt_sidecar.events import PublishFailed, ShardBroken, ShardDurable, ShardStarted
from testkit.any_order import AnyOrder, EveryoneIsAnswered
from testkit.tables import (
    DIRECTORY,
    FAILURE,
    SESSION,
    STAGE_TIMEOUT_S,
    World,
    hello,
    key,
    propose,
)

SAVE = key()
WHERE = f"{DIRECTORY}/step-100"


@pytest.fixture(params=[1, 2, 3], ids="{} ranks".format)
def world(request: pytest.FixtureRequest) -> World:
    """Connected ranks that have planned their first save."""
    world = World(request.param).connect_all()
    world.plan(SAVE)
    for rank in range(world.world_size):
        world.read(rank)
    return world


@pytest.fixture
def two() -> World:
    """Two connected ranks that have planned their first save."""
    world = World(2).connect_all()
    world.plan(SAVE)
    world.read(0)
    world.read(1)
    return world


def submit_all(world: World, save: SaveKey, slot: int = 0) -> None:
    for rank in range(world.world_size):
        world.submit(rank, save, slot)


def ends_of(world: World, rank: int) -> list[tuple[str, SaveKey]]:
    """Which saves have ended for a rank, and how."""
    return [(type(m).__name__, m.save) for m in world.read(rank) if isinstance(m, (Committed, Aborted))]


# ---------------------------------------------------------------- stories


def test_a_first_save_from_hello_to_commit_as_a_rank_hears_it() -> None:
    world = World(2).connect_all()
    world.plan(SAVE)
    submit_all(world, SAVE)
    world.written()
    world.says(0, DecideCommit(SAVE, True))
    world.published()
    heard = [type(message).__name__ for message in world.read(0)]
    assert heard == [
        "Welcome",
        "MakeGlobalPlan",
        "FinalPlan",
        "RegionReady",
        "RegionReady",
        "ShardPersisted",
        "SlotFreed",
        "AskCommit",
        "Committed",
    ]
    assert [name for name in heard if name not in ("MakeGlobalPlan", "AskCommit")] == [
        type(message).__name__ for message in world.read(1)
    ]


def test_a_later_save_needs_one_message_of_each_rank_and_the_decision(world: World) -> None:
    submit_all(world, key(1))
    world.written()
    world.says(0, DecideCommit(key(1), True))
    world.published()
    for rank in range(world.world_size):
        assert ends_of(world, rank) == [("Committed", key(1))]


def test_saves_alternate_between_two_slots_without_waiting_for_each_other(two: World) -> None:
    submit_all(two, SAVE, slot=0)
    submit_all(two, key(1), slot=1)
    two.written()
    for save in (SAVE, key(1)):
        two.says(0, DecideCommit(save, True))
    two.published()
    assert ends_of(two, 1) == [("Committed", SAVE), ("Committed", key(1))]


def test_a_job_that_dies_right_after_staging_is_committed_and_the_next_life_restores_it(world: World) -> None:
    submit_all(world, SAVE)
    for rank in range(world.world_size):
        world.dies(rank)
    world.written()
    world.published()
    world.connect_all(incarnation=1)
    world.says(0, AskRestoreStep(0))
    assert RestoreStep(0, 100) in world.read(0)


def test_a_restarted_job_restores_the_save_that_its_earlier_life_had_staged(world: World) -> None:
    """The restart is faster than the storage: the answer must wait for the staged save, not tell an older step."""
    submit_all(world, SAVE)
    for rank in range(world.world_size):
        world.dies(rank)
    world.connect_all(incarnation=1)
    for rank in range(world.world_size):
        world.says(rank, AskRestoreStep(0))
    world.written()
    world.published()
    for rank in range(world.world_size):
        assert [m.step for m in world.read(rank) if isinstance(m, RestoreStep)] == [100]


def test_a_restarted_job_does_not_wait_for_a_save_that_cannot_complete(two: World) -> None:
    two.submit(0, SAVE)
    two.dies(0)
    two.dies(1)
    two.connect_all(incarnation=1)
    two.says(0, AskRestoreStep(0))
    assert RestoreStep(0, None) in two.read(0)


def test_a_broken_write_on_one_rank_fails_the_save_everywhere_and_leaves_no_file(two: World) -> None:
    submit_all(two, SAVE)
    two.written(0)
    (order,) = two.take(WriteShard, 1)
    two.at_node(ShardStarted(1, SAVE))
    two.at_node(ShardBroken(1, SAVE, FAILURE))
    assert order.submit.save == SAVE
    assert ends_of(two, 0) == ends_of(two, 1) == [("Aborted", SAVE)]
    assert {(order.rank, order.save) for order in two.take(RemoveShardFiles)} == {(0, SAVE), (1, SAVE)}
    assert not two.node.table.is_busy
    assert not two.coordinator.table.is_busy


def test_a_veto_leaves_no_file_and_the_slots_are_free(two: World) -> None:
    submit_all(two, SAVE)
    two.written()
    two.says(0, DecideCommit(SAVE, False, "no"))
    assert two.take(RemoveShardFiles) == ends_of(two, 1) == []
    two.withdrawn()
    assert {order.rank for order in two.take(RemoveShardFiles)} == {0, 1}
    assert ends_of(two, 1) == [("Aborted", SAVE)]
    submit_all(two, key(1))
    assert len(two.take(WriteShard)) == 2


def test_a_commit_that_fails_leaves_no_file(two: World) -> None:
    submit_all(two, SAVE)
    two.written()
    two.says(0, DecideCommit(SAVE, True))
    two.take(Publish)
    two.at_coordinator(PublishFailed(SAVE, FAILURE))
    two.withdrawn()
    assert {order.rank for order in two.take(RemoveShardFiles)} == {0, 1}
    assert ends_of(two, 0) == ends_of(two, 1) == [("Aborted", SAVE)]


def test_a_skip_on_one_rank_cancels_what_the_others_have_staged(two: World) -> None:
    two.submit(0, SAVE)
    two.says(1, ReportSkip(SAVE, "no free region"))
    assert two.take(CancelShard) == [CancelShard(0, SAVE)]
    assert ends_of(two, 0) == [("Aborted", SAVE)]


def test_a_rank_that_stages_after_the_skip_is_told_and_its_write_is_stopped(two: World) -> None:
    two.says(1, ReportSkip(SAVE, "no free region"))
    two.submit(0, SAVE)
    assert two.take(CancelShard) == [CancelShard(0, SAVE)]
    two.take(WriteShard)
    two.at_node(ShardStarted(0, SAVE))
    two.at_node(ShardBroken(0, SAVE, FAILURE))
    assert SlotFreed(0, 1, SAVE.seq) in two.read(0)


def test_a_structure_that_changed_everywhere_is_planned_anew_while_the_old_save_is_written(two: World) -> None:
    submit_all(two, SAVE)
    two.plan(key(1))
    assert [m.slot for m in two.read(0) if isinstance(m, RegionReady)] == []
    two.says(0, GrowRegion(f"{SESSION}-p2", 1, 0))
    two.prepared()
    assert [m.slot for m in two.read(0) if isinstance(m, RegionReady)] == [1]
    two.written()
    two.prepared()
    heard = two.read(0)
    assert [m.slot for m in heard if isinstance(m, RegionReady)] == [0]
    assert [m for m in heard if isinstance(m, SlotFreed)] == []


def test_a_structure_that_changed_on_one_rank_is_planned_anew_at_the_next_save(two: World) -> None:
    two.submit(0, key(1))
    two.says(1, propose(key(1), changed=["head.bias"]))
    assert any(isinstance(m, Aborted) and m.replan for m in two.read(0))
    two.take(WriteShard)
    two.at_node(ShardStarted(0, key(1)))
    two.at_node(ShardBroken(0, key(1), FAILURE))
    two.plan(key(2))
    submit_all(two, key(2))
    two.written()
    two.says(0, DecideCommit(key(2), True))
    two.published()
    assert ("Committed", key(2)) in ends_of(two, 0)


def test_a_staged_save_survives_the_death_of_rank_0_at_every_moment(two: World) -> None:
    for seq, moment in enumerate(["staged", "persisted", "asked"]):
        world = World(2).connect_all()
        world.plan(SAVE)
        submit_all(world, SAVE)
        if moment == "staged":
            world.dies(0)
        world.written(0)
        if moment == "persisted":
            world.dies(0)
        world.written(1)
        if moment == "asked":
            world.dies(0)
        world.published()
        assert ("Committed", SAVE) in ends_of(world, 1), (seq, moment)


def test_a_late_rank_is_named_after_the_stage_timeout(two: World) -> None:
    two.submit(0, SAVE)
    two.passes(STAGE_TIMEOUT_S + 1)
    (aborted,) = [m for m in two.read(0) if isinstance(m, Aborted)]
    assert aborted.failures[0].message == "rank 1 on node-a has not staged step 100 after 601 s"


def test_a_survivor_of_a_death_is_not_left_without_an_answer(two: World) -> None:
    """Rank 1 is restarted alone and begins a new session; rank 0 lives on and saves under the cached plan."""
    two.dies(1)
    two.connect(1)
    two.opened()
    two.submit(0, key(1))
    assert ("Aborted", key(1)) in ends_of(two, 0)


def test_ranks_that_open_their_clients_twice_at_their_own_pace_end_up_together() -> None:
    """Each rank opens a client to look for a step, closes it, and opens the one it trains with."""
    world = World(2).connect_all()
    for rank in (0, 1):
        world.leaves(rank)
        world.connect(rank)
        world.opened()
    save = key(session=world.node.table.ranks[0].session)
    assert world.node.table.ranks[1].session == save.session
    world.plan(save)
    submit_all(world, save)
    world.written()
    world.says(0, DecideCommit(save, True))
    world.published()
    assert ends_of(world, 0) == ends_of(world, 1) == [("Committed", save)]


def test_a_death_that_is_noticed_after_the_restart_does_not_end_the_new_session(two: World) -> None:
    two.dies(0)
    two.connect(0, incarnation=1)
    two.opened()
    two.dies(1)
    two.connect(1, incarnation=1)
    two.opened()
    assert two.node.table.ranks[0].session == two.node.table.ranks[1].session


def test_a_client_that_reconnects_while_its_save_is_published_does_not_take_the_commit_back(two: World) -> None:
    submit_all(two, SAVE)
    two.written()
    two.says(0, DecideCommit(SAVE, True))
    two.says(1, hello(1, 2, session=SESSION, pid=two.node.table.ranks[1].hello.pid))
    two.says(1, ReportFailure(SAVE, FAILURE))
    two.published()
    assert ends_of(two, 0) == [("Committed", SAVE)]
    assert two.take(RemoveShardFiles) == []


def test_the_files_of_a_committed_save_are_never_removed_by_an_old_seal(two: World) -> None:
    """The seal of a slot that is seldom used outlives its job's memory; at the rank's death it is read once more."""
    old = two.node.submit(SAVE, 1, slot=1)
    two.submit(0, SAVE)
    two.says(1, old)
    two.written()
    two.says(0, DecideCommit(SAVE, True))
    two.published()
    for seq in range(1, 200):
        submit_all(two, key(seq))
        two.written()
        two.says(0, DecideCommit(key(seq), True))
        two.published()
    two.says(1, old)
    two.dies(1)
    two.written()
    two.passes(STAGE_TIMEOUT_S + 1)
    assert two.take(RemoveShardFiles) == []


def test_two_saves_of_one_step_are_published_in_their_order(two: World) -> None:
    """Publishing the later one removes the files of earlier ones, which must not wait for their own commit then."""
    first, second = key(1, step=7), key(2, step=7)
    submit_all(two, first, slot=0)
    submit_all(two, second, slot=1)
    (early, late) = two.take(WriteShard, 0), two.take(WriteShard, 1)
    for order in (early[1], late[1]):
        two.at_node(ShardStarted(order.submit.rank, second))
        two.at_node(ShardDurable(order.submit.rank, second, 1))
    two.says(0, DecideCommit(second, True))
    assert two.take(Publish) == []
    for order in (early[0], late[0]):
        two.at_node(ShardStarted(order.submit.rank, first))
        two.at_node(ShardDurable(order.submit.rank, first, 1))
    two.says(0, DecideCommit(first, True))
    assert [order.save for order in two.orders if isinstance(order, Publish)] == [first]
    two.published()
    assert [order.save for order in two.orders if isinstance(order, Publish)] == [second]


def test_a_save_of_one_step_does_not_wait_for_an_earlier_one_that_failed(two: World) -> None:
    first, second = key(1, step=7), key(2, step=7)
    submit_all(two, first, slot=0)
    submit_all(two, second, slot=1)
    for order in [order for order in two.take(WriteShard) if order.submit.save == second]:
        two.at_node(ShardStarted(order.submit.rank, second))
        two.at_node(ShardDurable(order.submit.rank, second, 1))
    two.says(0, DecideCommit(second, True))
    two.at_node(ShardStarted(1, first))
    two.at_node(ShardBroken(1, first, FAILURE))
    assert [order.save for order in two.orders if isinstance(order, Publish)] == [second]


def test_a_staged_save_that_fails_when_nobody_is_left_is_remembered(two: World) -> None:
    submit_all(two, SAVE)
    two.dies(0)
    two.dies(1)
    two.take(WriteShard)
    two.at_node(ShardStarted(0, SAVE))
    two.at_node(ShardBroken(0, SAVE, FAILURE))
    assert list(two.node.table.shards.lost) == [SAVE]


def test_a_later_commit_makes_a_lost_save_history(two: World) -> None:
    submit_all(two, SAVE)
    two.dies(0)
    two.dies(1)
    two.take(WriteShard)
    two.at_node(ShardStarted(0, SAVE))
    two.at_node(ShardBroken(0, SAVE, FAILURE))
    two.connect_all(incarnation=1)
    assert two.coordinator.table.session is not None
    later = key(0, step=900, session=two.coordinator.table.session.token)
    two.plan(later)
    two.at_node(ShardStarted(1, SAVE))
    two.at_node(ShardBroken(1, SAVE, FAILURE))
    two.prepared()
    submit_all(two, later)
    two.written()
    two.says(0, DecideCommit(later, True))
    two.published()
    assert two.node.table.shards.lost == {}


def test_a_failed_save_that_its_ranks_were_told_of_is_not_lost(two: World) -> None:
    submit_all(two, SAVE)
    two.take(WriteShard)
    two.at_node(ShardStarted(0, SAVE))
    two.at_node(ShardBroken(0, SAVE, FAILURE))
    assert two.node.table.shards.lost == {}


# ---------------------------------------------------------------- any order


ORDERS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=250,
    stateful_step_count=60,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
)


def as_test(machine: type[AnyOrder]) -> type[TestCase]:
    """The machine as a test of its own."""
    case: type[TestCase] = machine.TestCase
    case.settings = ORDERS  # type: ignore[attr-defined]
    return case


TestAnyOrder = as_test(AnyOrder)
TestEveryoneIsAnswered = as_test(EveryoneIsAnswered)
