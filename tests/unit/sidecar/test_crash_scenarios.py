"""What sidecars, coordinators and ranks that were killed leave to those that come after them, one scenario each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_proto.errors import FailureReport
from ckpt_proto.messages import (
    Aborted,
    Committed,
    FinalPlan,
    GrowRegion,
    RankLeft,
    Refused,
    ReportFailure,
    ShardPersisted,
    ShardStaged,
    SubmitShard,
    Welcome,
)
from ckpt_sidecar.actions import BreakSeal, ListShards, PrepareRegion, Send, ToCoordinator, WriteShard
from ckpt_sidecar.events import FromRank, ListedShard, RankDied, RegionPrepared, ShardBroken, ShardMissing, ShardsListed
from testkit.tables import (
    DIRECTORY,
    FAILURE,
    ITEMS,
    PLAN_ID,
    SESSION,
    Coordinator,
    Node,
    hello,
    key,
    of_type,
    propose,
    ready_for,
    told,
)

SAVE = key()
NEW_SESSION = "0000000b"


@pytest.fixture
def node() -> Node:
    """A rank with a plan."""
    return Node().welcomed().planned()


def said(node: Node) -> list[object]:
    """What a coordinator that knows nothing hears of a node."""
    return [action.message for action in of_type(node.table.say_again(), ToCoordinator)]


# ---------------------------------------------------------------- a coordinator that knows nothing


def test_a_new_coordinator_hears_who_is_here_and_what_is_staged(node: Node) -> None:
    node.durable(SAVE)
    node.submitted(key(1), slot=1)
    staged = [ShardStaged(save, 0, PLAN_ID, False, 2, DIRECTORY) for save in (SAVE, key(1))]
    here = hello(0, 2, session=SESSION)
    assert said(node) == [here, staged[0], ShardPersisted(SAVE, 0, 4096), staged[1]]


def test_a_new_coordinator_does_not_hear_of_saves_whose_end_is_known(node: Node) -> None:
    node.durable(SAVE)
    node.submitted(key(1), slot=1)
    node.hears(0, Committed(SAVE, "x"))
    node.hears(0, Aborted(key(1), ()))
    assert [type(message).__name__ for message in said(node)] == ["Hello"]


def test_a_new_coordinator_hears_of_a_write_that_failed(node: Node) -> None:
    node.writing(SAVE).do(ShardBroken(0, SAVE, FAILURE))
    assert ReportFailure(SAVE, FAILURE.at(0, "node-a")) in said(node)


def test_a_new_coordinator_hears_of_the_dead_and_of_earlier_clients_that_have_left_shards(node: Node) -> None:
    node.submitted(SAVE)
    node.do(RankDied(0, 1000, "killed"))
    gone = RankLeft(0, "its process had ended before the coordinator was started again", SESSION)
    assert said(node)[0] == gone
    node.says(0, hello(0, 2, pid=77, incarnation=1))
    assert said(node)[0] == gone
    assert [type(message).__name__ for message in said(node)[1:]] == ["Hello", "ShardStaged"]


def test_a_new_coordinator_hears_which_saves_have_ended_for_a_rank(node: Node) -> None:
    node.hears(0, Aborted(key(2), ()))
    node.hears(0, Committed(key(1), "x"))
    assert said(node) == [hello(0, 2, session=SESSION, next_seq=3, in_flight=(0,))]


# ---------------------------------------------------------------- regions


def test_a_refused_client_has_no_region_prepared_for_ever() -> None:
    node = Node().welcomed()
    (order, _) = of_type(node.hears(0, FinalPlan(SAVE, PLAN_ID, ITEMS)), PrepareRegion)
    node.hears(0, Refused(FAILURE))
    assert node.do(RegionPrepared(0, ready_for(order))) == []


def test_a_client_that_was_refused_and_comes_back_keeps_the_regions_that_it_knows(node: Node) -> None:
    ready = node.table.ranks[0].slots[0].ready
    node.hears(0, Refused(FAILURE))
    node.says(0, hello(0, 2, session=SESSION), peer=b"new")
    actions = node.hears(0, Welcome(SESSION, "", "", "", ()))
    assert of_type(actions, PrepareRegion) == []
    assert Send(b"new", ready) in actions  # type: ignore[arg-type]


def test_what_a_client_had_sealed_when_it_was_refused_counts_when_it_has_died(node: Node) -> None:
    submit = node.submit(SAVE)
    node.hears(0, Refused(FAILURE))
    assert node.table.living_ranks == [0]
    # As its sidecar does with the seals of the dead.
    assert of_type(node.do(FromRank(node.table.ranks[0].peer, 1000, submit)), WriteShard)
    (left,) = of_type(node.do(RankDied(0, 1000, "killed")), ToCoordinator)
    assert left.message == RankLeft(0, "killed", SESSION)


def test_a_submission_that_is_refused_leaves_no_seal_for_the_next_sidecar(node: Node) -> None:
    actions = node.says(0, node.submit(SAVE, plan_id="p9"))
    assert BreakSeal(0, 0) in actions
    assert actions.index(BreakSeal(0, 0)) < actions.index(of_type(actions, Send)[0])


def test_what_an_ended_session_has_sealed_and_nobody_has_taken_is_not_kept(node: Node) -> None:
    node.submitted(SAVE, slot=1)
    broken = of_type(node.hears(0, Welcome(NEW_SESSION, "", "", "", ())), BreakSeal)
    assert broken == [BreakSeal(0, 0)]


def test_what_an_earlier_client_has_sealed_and_nobody_has_taken_is_not_kept(node: Node) -> None:
    node.submitted(SAVE, slot=1)
    node.do(RankDied(0, 1000, "killed"))
    assert of_type(node.says(0, hello(0, 2, pid=77, incarnation=1)), BreakSeal) == [BreakSeal(0, 0)]


def test_room_that_is_asked_for_while_the_region_is_prepared_is_not_forgotten() -> None:
    node = Node().welcomed()
    (order, _) = of_type(node.hears(0, FinalPlan(SAVE, PLAN_ID, ITEMS)), PrepareRegion)
    assert node.says(0, GrowRegion(PLAN_ID, 0, 1 << 20)) == []
    (again,) = node.do(RegionPrepared(0, ready_for(order)))
    assert again == replace(order, generation=2, byte_capacity=1 << 20)
    assert node.do(RegionPrepared(0, ready_for(again))) == [Send(node.peer(0), ready_for(again))]


def test_a_slot_is_not_given_back_while_another_region_is_prepared_in_it() -> None:
    node = Node().welcomed()
    submit = SubmitShard(SAVE, 0, PLAN_ID, 0, 7, (10,))
    node.says(0, FinalPlan(SAVE, PLAN_ID, ITEMS))
    actions = node.do(ShardMissing(submit, FAILURE))
    assert of_type(actions, Send) == []
    assert [type(action.message) for action in of_type(actions, ToCoordinator)] == [ReportFailure]


# ---------------------------------------------------------------- who belongs to a session


@pytest.mark.parametrize("answer", [Welcome(SESSION, "", "", "", (), pid=1000), Refused(FAILURE, pid=1000)])
def test_the_answer_to_the_hello_of_an_earlier_client_is_not_for_the_next(answer: Welcome | Refused) -> None:
    node = Node()
    node.says(0, hello(0, 2))
    node.do(RankDied(0, 1000, "killed"))
    node.says(0, hello(0, 2, pid=77))
    assert node.hears(0, answer) == []
    assert node.table.ranks[0].session == ""


def test_a_member_that_comes_back_stays_although_another_rank_has_left_meanwhile() -> None:
    two = Coordinator().joined(2)
    two.table.session.leave(1, "killed")  # type: ignore[union-attr]
    (welcome,) = told(two.says_hello(0, 2, session=SESSION, node="node-0"), 0)
    assert isinstance(welcome, Welcome)
    assert welcome.session == SESSION


def test_a_new_process_of_a_member_whose_death_nobody_could_tell_begins_a_session() -> None:
    two = Coordinator().joined(2)
    two.staged(SAVE, 0)
    actions = two.says_hello(1, 2, pid=77, node="node-1")
    (aborted,) = told(actions, 0)
    (_, welcome) = told(actions, 1)
    assert isinstance(aborted, Aborted)
    assert aborted.failures[0].kind == "RankLost"
    assert isinstance(welcome, Welcome)
    assert welcome.session == NEW_SESSION


@pytest.mark.parametrize(("in_flight", "session"), [((0,), "000000ff"), ((), SESSION)])
def test_a_new_client_joins_a_session_that_was_taken_up_only_if_no_save_has_ended_in_it(
    in_flight: tuple[int, ...], session: str
) -> None:
    coordinator = Coordinator()
    coordinator.says_hello(0, 2, session="000000ff", next_seq=1, in_flight=in_flight)
    welcome = told(coordinator.says_hello(1, 2), 1)[-1]
    assert isinstance(welcome, Welcome)
    assert welcome.session == session


# ---------------------------------------------------------------- storage is the ledger


def taken_up(*staged: int) -> Coordinator:
    """A coordinator that is new to a session of two ranks, in which some have staged a save."""
    coordinator = Coordinator()
    for rank in range(2):
        coordinator.says_hello(rank, 2, session="000000ff", node=f"node-{rank}", next_seq=1, in_flight=(0,))
    coordinator.staged(OLD_SAVE, *staged)
    return coordinator


OLD_SAVE = key(session="000000ff")


def test_an_attempt_that_was_published_before_we_lived_is_committed_whatever_is_said_of_it() -> None:
    coordinator = taken_up(0, 1)
    actions = coordinator.at(1, ReportFailure(OLD_SAVE, FailureReport("SidecarLost", "no sidecar ran")))
    assert actions == [ListShards(OLD_SAVE, DIRECTORY, 2, (0, 1))]
    actions = coordinator.do(ShardsListed(OLD_SAVE, (), published=True))
    assert [type(message) for rank in range(2) for message in told(actions, rank)] == [Committed, Committed]


def test_an_attempt_that_was_taken_up_and_failed_is_aborted_once_storage_says_that_it_is_not_published() -> None:
    coordinator = taken_up(0, 1)
    failed = ReportFailure(OLD_SAVE, FailureReport("SidecarLost", "no sidecar ran"))
    coordinator.at(1, failed)
    assert coordinator.at(1, failed) == []
    assert coordinator.at(0, ShardPersisted(OLD_SAVE, 0, 1)) == []
    shards = tuple(ListedShard(rank, PLAN_ID, overwrite=False) for rank in range(2))
    actions = coordinator.withdrawn(coordinator.do(ShardsListed(OLD_SAVE, shards)))
    assert [type(message) for rank in range(2) for message in told(actions, rank)] == [Aborted, Aborted]


def test_an_attempt_that_is_still_being_planned_needs_no_look_at_storage_to_be_aborted() -> None:
    coordinator = taken_up()
    coordinator.at(0, propose(OLD_SAVE))
    actions = coordinator.at(1, ReportFailure(OLD_SAVE, FAILURE))
    assert of_type(actions, ListShards) == []
    assert isinstance(told(actions, 0)[0], Aborted)


def test_an_attempt_that_a_rank_knows_to_have_ended_is_given_up_although_all_its_shards_are_durable() -> None:
    coordinator = taken_up(0, 1)
    coordinator.says_hello(1, 2, session="000000ff", node="node-1", next_seq=1)
    actions = coordinator.persisted(OLD_SAVE, 0, 1)
    assert actions == [ListShards(OLD_SAVE, DIRECTORY, 2, ())]
    actions = coordinator.withdrawn(coordinator.do(ShardsListed(OLD_SAVE, ())))
    (aborted,) = told(actions, 0)
    assert isinstance(aborted, Aborted)
    assert [(failure.kind, failure.rank) for failure in aborted.failures] == [("SaveEnded", 1)]
