"""What a sidecar takes over from an earlier one: records, regions, writes, and whom it tells what."""

from __future__ import annotations

import pytest

from ckpt_proto.lifecycles import RegionState
from ckpt_proto.messages import FinalPlan, Heartbeat, Pong, RankLeft, ShardStaged, SlotFreed, Welcome
from ckpt_sidecar.actions import BreakSeal, OpenDirectory, PrepareRegion, Send, ToCoordinator, WriteShard
from ckpt_sidecar.adoption import adopted_records, adopted_writes, whole
from ckpt_sidecar.events import DirectoryOpened, FoundRegion, RegionsFound, ShardDurable, ShardStarted, Tick
from testkit.regions_found import found, journal, sealed_in
from testkit.tables import DIRECTORY, ITEMS, SESSION, SIDECAR_ID, TORCH, Coordinator, Node, hello, key, of_type

LATER = "0000000b"
GENERATION = 1000


def states(regions: list[FoundRegion], rank: int = 0) -> list[tuple[RegionState, int, bool]]:
    """(state, generation, whether it can be filled) of each slot of a rank's record."""
    record = adopted_records(regions, GENERATION)[rank]
    return [(slot.state, slot.generation, slot.ready is not None) for slot in record.slots]


# ---------------------------------------------------------------- what is whole


def test_a_region_is_whole_if_its_seal_is_of_the_layout_that_its_journal_describes() -> None:
    assert whole(found(journal(), key(3)))
    assert not whole(found(journal()))


@pytest.mark.parametrize(
    "changes", [{"rank": 1}, {"plan_id": "another"}, {"slot": 1}, {"generation": 6}], ids=lambda changes: str(*changes)
)
def test_a_seal_of_another_layout_is_of_no_use(changes: dict[str, object]) -> None:
    """The region was prepared anew after it was sealed: written by this plan, its bytes would be garbage."""
    region = found(journal(), key(3), **changes)
    assert not whole(region)
    assert adopted_writes([region], TORCH) == []
    assert states([region])[0][0] is RegionState.FREE


# ---------------------------------------------------------------- records


def test_a_living_rank_keeps_its_plan_its_session_and_its_regions() -> None:
    regions = [found(journal(slot=0), key(3)), found(journal(slot=1, generation=9))]
    record = adopted_records(regions, GENERATION)[0]
    assert (record.alive, record.session, record.peer) == (True, SESSION, b"")
    assert record.plan == FinalPlan(key(), journal().ready.plan_id, ITEMS)
    assert states(regions) == [(RegionState.SEALED, 7, True), (RegionState.FREE, 9, True)]


def test_a_dead_rank_leaves_its_regions_but_no_plan() -> None:
    regions = [found(journal(slot=0), key(3), alive=False), found(journal(slot=1), alive=False)]
    record = adopted_records(regions, GENERATION)[0]
    assert (record.alive, record.plan) == (False, None)
    assert [state for state, _, _ in states(regions)] == [RegionState.SEALED, RegionState.FREE]


def test_a_slot_without_a_region_begins_behind_every_generation_that_was_given_out() -> None:
    assert states([found(journal(slot=1))]) == [(RegionState.FREE, GENERATION, False), (RegionState.FREE, 7, True)]
    assert states([found(journal(slot=0))]) == [(RegionState.FREE, 7, True), (RegionState.FREE, GENERATION, False)]


def test_what_the_client_said_of_its_saves_long_ago_is_not_taken_for_what_it_knows_now() -> None:
    record = adopted_records([found(journal(next_seq=1, in_flight=(0,)))], GENERATION)[0]
    assert (record.hello.next_seq, record.hello.in_flight) == (0, ())


def test_the_newest_process_of_a_rank_has_it_with_the_regions_of_both() -> None:
    """An elastic restart, and then the sidecar died: one region is still the dead process's."""
    old = found(journal(slot=1), key(3), alive=False)
    new = found(journal(slot=0, planned_by=key(session=LATER), pid=77, process_start_s=60.0))
    for regions in ([old, new], [new, old]):
        record = adopted_records(regions, GENERATION)[0]
        assert (record.hello.pid, record.session, record.alive) == (77, LATER, True)
        assert [state for state, _, _ in states(regions)] == [RegionState.FREE, RegionState.SEALED]


def test_of_two_plans_of_one_process_the_later_is_its_plan() -> None:
    """It was planning anew when the sidecar died: one slot is prepared for the new plan, one not yet."""
    old, new = found(journal(slot=0)), found(journal(slot=1, planned_by=key(4)))
    for regions in ([old, new], [new, old]):
        plan = adopted_records(regions, GENERATION)[0].plan
        assert plan is not None
        assert plan.plan_id == f"{SESSION}-p5"


def test_ranks_are_kept_apart() -> None:
    records = adopted_records([found(journal(0)), found(journal(1), alive=False)], GENERATION)
    assert {rank: record.alive for rank, record in records.items()} == {0: True, 1: False}


# ---------------------------------------------------------------- writes


def test_everything_that_is_sealed_is_written_in_the_order_of_the_saves() -> None:
    early, late = journal(slot=1), journal(slot=0)
    regions = [found(late, key(4)), found(early, key(3)), found(journal(1))]
    writes = adopted_writes(regions, TORCH)
    assert [write.submit.save for write in writes] == [key(3), key(4)]
    assert writes[0] == WriteShard(sealed_in(early, key(3)), ITEMS, DIRECTORY, 2, TORCH, early.ready)


def test_what_an_earlier_process_has_sealed_is_written_first() -> None:
    old = found(journal(slot=1), key(9), alive=False)
    new = found(journal(slot=0, planned_by=key(session=LATER), pid=77, process_start_s=60.0), key(1, session=LATER))
    assert [write.submit.save.session for write in adopted_writes([new, old], TORCH)] == [SESSION, LATER]


# ---------------------------------------------------------------- dead jobs


# ---------------------------------------------------------------- the node that adopts


def adopting(*regions: FoundRegion) -> tuple[Node, list[object]]:
    node = Node()
    return node, list(node.do(RegionsFound(tuple(regions))))


REASON = "its process had ended when the sidecar was started again"


def test_the_coordinator_is_told_who_has_died_who_there_is_and_what_is_staged_in_this_order() -> None:
    zero, one = journal(0), journal(1)
    _, actions = adopting(found(zero, key(3)), found(one, key(3), alive=False))
    assert actions == [
        ToCoordinator(1, RankLeft(1, REASON, SESSION, DIRECTORY)),
        ToCoordinator(0, hello(0, 2, session=SESSION)),
        WriteShard(sealed_in(zero, key(3)), ITEMS, DIRECTORY, 2, TORCH, zero.ready),
        ToCoordinator(0, ShardStaged(key(3), 0, zero.ready.plan_id, False, 2, DIRECTORY)),
        WriteShard(sealed_in(one, key(3)), ITEMS, DIRECTORY, 2, TORCH, one.ready),
        ToCoordinator(1, ShardStaged(key(3), 1, one.ready.plan_id, False, 2, DIRECTORY)),
    ]


def test_the_dead_are_not_announced_but_for_where_they_saved() -> None:
    """Announced, their session would be spared by the look through the directory, as if it were in flight."""
    _, actions = adopting(*(found(journal(rank), alive=False) for rank in (0, 1)))
    assert actions == [ToCoordinator(rank, RankLeft(rank, REASON, SESSION, DIRECTORY)) for rank in (0, 1)]


def test_a_coordinator_has_finished_what_a_session_of_the_dead_made_durable() -> None:
    coordinator = Coordinator()
    for rank in (0, 1):
        assert coordinator.at(rank, RankLeft(rank, REASON, "0000beef", DIRECTORY)) == []
    assert coordinator.table.is_busy
    assert coordinator.do(Tick()) == [OpenDirectory(DIRECTORY, ())]
    assert coordinator.table.is_busy
    assert coordinator.do(DirectoryOpened(DIRECTORY, (100,))) == []
    assert not coordinator.table.is_busy
    assert coordinator.do(Tick()) == []


def test_the_look_for_what_the_dead_left_spares_who_lives() -> None:
    coordinator = Coordinator()
    coordinator.at(1, RankLeft(1, REASON, "0000beef", DIRECTORY))
    coordinator.at(0, hello(0, 2, session="0000beef"))
    assert OpenDirectory(DIRECTORY, ("0000beef",)) in coordinator.do(Tick())


def test_a_rank_that_was_seen_to_die_has_nobody_look() -> None:
    coordinator = Coordinator().joined(2)
    coordinator.at(1, RankLeft(1, "killed", SESSION))
    assert of_type(coordinator.do(Tick()), OpenDirectory) == []


def test_an_adopted_client_is_asked_for_a_hello_and_finds_its_plan_and_regions() -> None:
    of = journal(world_size=1)
    node, _ = adopting(found(of))
    assert node.says(0, Heartbeat()) == [Send(Node.peer(0), Pong(SIDECAR_ID, known=False))]
    again = hello(0, 1, session=SESSION, next_seq=2, in_flight=(1,))
    assert node.says(0, again) == [ToCoordinator(0, again)]
    sent = [send.message for send in of_type(node.hears(0, Welcome(SESSION, "", "", "", ())), Send)]
    assert sent == [Welcome(SESSION, SIDECAR_ID, "node-a", TORCH, (), of.ready.plan_id), of.ready]


def test_a_slot_that_had_no_region_yet_is_prepared_for_the_adopted_plan() -> None:
    node, _ = adopting(found(journal(world_size=1)))
    node.says(0, hello(0, 1, session=SESSION))
    (order,) = of_type(node.hears(0, Welcome(SESSION, "", "", "", ())), PrepareRegion)
    assert (order.slot, order.plan_id, order.planned_by) == (1, journal().ready.plan_id, key())


def test_an_adopted_shard_is_written_told_and_its_slot_freed() -> None:
    of = journal(world_size=1)
    node, _ = adopting(found(of, key(3)))
    node.says(0, hello(0, 1, session=SESSION, next_seq=4, in_flight=(3,)))
    node.do(ShardStarted(0, key(3)))
    actions = node.do(ShardDurable(0, key(3), 100))
    assert actions.index(BreakSeal(0, 0)) < actions.index(Send(Node.peer(0), SlotFreed(0, 7, 3)))
    assert node.table.ranks[0].slots[0].state is RegionState.FREE


def test_an_adopted_shard_whose_client_knows_that_its_save_has_failed_is_given_up() -> None:
    """The earlier sidecar had told it so and died before it broke the seal."""
    node, _ = adopting(found(journal(world_size=1), key(3)))
    told = of_type(node.says(0, hello(0, 1, session=SESSION, next_seq=4)), ToCoordinator)
    assert [(type(action.message).__name__, getattr(action.message, "save", None)) for action in told] == [
        ("Hello", None),
        ("ReportFailure", key(3)),
    ]


def test_nothing_found_is_nothing_done() -> None:
    node, actions = adopting()
    assert actions == []
    assert node.table.ranks == {}
    assert not node.table.is_busy


def test_a_region_prepared_before_its_rank_was_welcomed_stays_the_ranks_own() -> None:
    """Its journal had no session once. A client that comes back goes on filling the regions that it knows."""
    own = journal(0, session="")
    node, _ = adopting(found(own))
    node.says(0, hello(0, 2, session=SESSION, next_seq=1))
    welcomed = node.hears(0, Welcome(SESSION, "", "", "", ()))
    brought = node.says(0, FinalPlan(key(), own.ready.plan_id, ITEMS))
    assert [order.slot for order in of_type([*welcomed, *brought], PrepareRegion)] == [1]
    assert Send(Node.peer(0), own.ready) in brought


def test_a_journal_names_the_session_that_the_client_says_until_it_is_welcomed() -> None:
    node = Node()
    node.says(0, hello(0, 2, session=SESSION, slots=1))
    (order,) = of_type(node.hears(0, FinalPlan(key(), "p1", ITEMS)), PrepareRegion)
    assert order.owner is not None
    assert order.owner.session == SESSION
