"""One node's decisions: events in, actions out, compared as values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_proto.lifecycles import RegionState, ShardState
from ckpt_proto.messages import (
    Aborted,
    AskCommit,
    AskRestoreStep,
    Committed,
    DecideCommit,
    Farewell,
    FinalPlan,
    GlobalPlan,
    Goodbye,
    GrowRegion,
    Heartbeat,
    Message,
    Pong,
    RankLeft,
    Refused,
    RegionReady,
    RegionRefused,
    ReportFailure,
    ReportSkip,
    ShardPersisted,
    ShardStaged,
    SlotFreed,
    Welcome,
)
from ckpt_proto.plan_items import Plan
from ckpt_sidecar.actions import (
    Action,
    BreakSeal,
    CancelShard,
    PrepareRegion,
    RemoveShardFiles,
    Send,
    ToCoordinator,
    WriteShard,
)
from ckpt_sidecar.events import (
    UNKNOWN_PID,
    FromRank,
    RankDied,
    RegionFailed,
    RegionPrepared,
    ShardBroken,
    ShardDurable,
    ShardStarted,
    Tick,
)
from ckpt_sidecar.rank_record import FIRST_BYTE_CAPACITY
from ckpt_sidecar.shard_job import MAX_ENDED_JOBS
from testkit.tables import (
    DIRECTORY,
    FAILURE,
    ITEMS,
    JOB,
    PLAN_ID,
    SESSION,
    SIDECAR_ID,
    TORCH,
    WEIGHT,
    Node,
    hello,
    key,
    of_type,
    propose,
    ready_for,
)

PEER = Node.peer(0)
OLD, NEW = key(), key(session="0000000b")
UNKNOWN = [Send(b"stranger", Pong(SIDECAR_ID, known=False))]


@pytest.fixture
def node() -> Node:
    """A node whose rank 0 is welcome and has two regions ready for the plan."""
    return Node().welcomed().planned()


def refused_as(actions: list[Action]) -> str:
    """Kind of the one refusal in ``actions``."""
    ((message,),) = [[send.message for send in of_type(actions, Send)]]
    assert isinstance(message, Refused)
    return message.failure.kind


def prepares(
    slot: int,
    generation: int,
    plan_id: str,
    items: Plan,
    byte_capacity: int,
    planned_by: SaveKey = OLD,
    **owner: Any,
) -> PrepareRegion:
    """The order to prepare a region of rank 0, whose client's Hello differs by ``owner`` from the usual one."""
    who = hello(0, 2, **{"session": planned_by.session, **owner})
    return PrepareRegion(0, slot, generation, plan_id, items, byte_capacity, who, planned_by)


def freed(slot: int, generation: int, seq: int = 0) -> Send:
    return Send(PEER, SlotFreed(slot, generation, seq))


LET_GO: list[Action] = [BreakSeal(0, 0), freed(0, 1)]
"""A job in slot 0 has ended. The seal is broken before anything that may take time, and before the rank may fill the
region again: a sidecar that starts later must not take what lies there for a staged shard."""


# ---------------------------------------------------------------- handshake


def test_a_hello_goes_to_the_coordinator_and_is_not_answered_yet() -> None:
    assert Node().says(0, hello()) == [ToCoordinator(0, hello())]


def test_the_welcome_gets_this_sidecars_name_node_and_torch() -> None:
    node = Node()
    node.says(0, hello())
    sent = node.hears(0, Welcome(SESSION, "", "elsewhere", "", (100,)))
    assert sent == [Send(PEER, Welcome(SESSION, SIDECAR_ID, "node-a", TORCH, (100,)))]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"job_id": "other"}, "WrongJob"),
        ({"torch_version": "2.12.1"}, "TorchMismatch"),
        ({"torch_version": "none"}, "TorchMismatch"),
    ],
    ids=str,
)
def test_a_client_that_cannot_be_served_is_refused(changes: dict[str, Any], kind: str) -> None:
    node = Node()
    assert refused_as(node.says(0, hello(**changes))) == kind
    assert node.table.ranks == {}


def test_a_refusal_is_attributed_to_rank_and_node() -> None:
    (send,) = of_type(Node().says(0, hello(job_id="other")), Send)
    assert isinstance(send.message, Refused)
    assert (send.message.failure.rank, send.message.failure.node) == (0, "node-a")
    assert JOB in send.message.failure.message
    assert "other" in send.message.failure.message


def test_a_client_that_lies_about_its_pid_is_refused() -> None:
    actions = Node().do(FromRank(PEER, 4711, hello()))
    assert refused_as(actions) == "WrongProcess"


def test_a_client_in_another_pid_namespace_is_believed_and_marked() -> None:
    node = Node()
    assert node.do(FromRank(PEER, UNKNOWN_PID, hello())) == [ToCoordinator(0, hello())]
    assert node.table.ranks[0].other_namespace


def test_an_older_torch_in_the_sidecar_is_fine() -> None:
    assert Node("2.9.0").says(0, hello()) == [ToCoordinator(0, hello())]


def test_a_rank_that_another_living_process_has_is_taken_and_both_pids_are_named() -> None:
    node = Node().welcomed()
    (send,) = of_type(node.says(0, hello(0, 2, pid=77), peer=b"other"), Send)
    assert isinstance(send.message, Refused)
    assert send.message.failure.kind == "RankTaken"
    assert "1000" in send.message.failure.message
    assert "77" in send.message.failure.message
    assert node.table.ranks[0].hello.pid == 1000


def test_a_reused_pid_is_not_taken_for_the_process_that_had_it() -> None:
    node = Node().welcomed()
    assert refused_as(node.says(0, hello(0, 2, process_start_s=99.0), peer=b"other")) == "RankTaken"


def test_a_second_client_in_one_process_is_refused_while_the_first_is_open() -> None:
    node = Node().welcomed()
    assert refused_as(node.says(0, hello(0, 2), peer=b"second")) == "RankTaken"
    node.says(0, Goodbye())
    assert of_type(node.says(0, hello(0, 2), peer=b"second"), ToCoordinator) == [ToCoordinator(0, hello(0, 2))]


def test_the_successor_of_a_dead_rank_is_served() -> None:
    node = Node().welcomed()
    node.do(RankDied(0, 1000, "killed"))
    successor = hello(0, 2, pid=77, incarnation=1)
    assert of_type(node.says(0, successor, peer=b"new"), ToCoordinator) == [ToCoordinator(0, successor)]


def test_a_client_that_reconnects_with_its_session_is_served_on_the_new_connection() -> None:
    node = Node().welcomed()
    again = hello(0, 2, session=SESSION)
    assert node.says(0, again, peer=b"new") == [ToCoordinator(0, again)]
    assert node.says(0, Heartbeat(), peer=b"new") == [Send(b"new", Pong(SIDECAR_ID, known=True))]
    assert node.says(0, Heartbeat()) == [Send(PEER, Pong(SIDECAR_ID, known=False))]


def test_a_draining_sidecar_takes_no_new_client_but_knows_its_old_ones() -> None:
    node = Node().welcomed()
    node.table.draining = True
    assert refused_as(node.says(1, hello(1, 2))) == "SidecarDraining"
    assert of_type(node.says(0, hello(0, 2, session=SESSION), peer=b"new"), ToCoordinator)


def test_a_client_that_the_coordinator_refuses_is_told_and_forgotten() -> None:
    node = Node()
    node.says(0, hello())
    assert node.hears(0, Refused(FAILURE)) == [Send(PEER, Refused(FAILURE))]
    assert node.table.living_ranks == []
    assert node.says(0, Heartbeat()) == [Send(PEER, Pong(SIDECAR_ID, known=False))]
    assert of_type(node.says(0, hello(pid=77), peer=b"second try"), ToCoordinator)


# ---------------------------------------------------------------- heartbeats and strangers


def test_a_heartbeat_is_answered_with_whether_the_client_is_known() -> None:
    node = Node().welcomed()
    assert node.says(0, Heartbeat()) == [Send(PEER, Pong(SIDECAR_ID, known=True))]
    assert node.says(0, Heartbeat(), peer=b"stranger") == UNKNOWN


@pytest.mark.parametrize(
    "message",
    [propose(OLD), Node().welcomed().planned().submit(OLD), ReportSkip(OLD, "full"), AskRestoreStep(0)],
    ids=lambda message: type(message).__name__,
)
def test_a_client_that_is_not_known_is_asked_for_a_hello(message: Message) -> None:
    node = Node().welcomed().planned()
    assert node.says(0, message, peer=b"stranger") == UNKNOWN
    assert node.table.jobs == {}


@pytest.mark.parametrize(
    "message",
    [
        propose(OLD),
        GlobalPlan(OLD, (ITEMS,)),
        ReportSkip(OLD, "full"),
        ReportFailure(OLD, FAILURE),
        DecideCommit(OLD, True),
        AskRestoreStep(0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_is_meant_for_the_coordinator_is_handed_on(node: Node, message: Message) -> None:
    assert node.says(0, message) == [ToCoordinator(0, message)]


@pytest.mark.parametrize(
    "message",
    [
        ShardPersisted(OLD, 0, 1),
        ShardStaged(OLD, 0, PLAN_ID),
        RankLeft(1, "a lie"),
        Committed(OLD, "/x"),
        Aborted(OLD, ()),
        Welcome(SESSION, "", "", "", ()),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_client_cannot_speak_for_a_sidecar(node: Node, message: Message) -> None:
    assert of_type(node.says(0, message), ToCoordinator) == []


@pytest.mark.parametrize("event", [Tick()])
def test_an_event_that_is_not_this_tables_business_does_nothing(node: Node, event: Tick) -> None:
    assert node.do(event) == []


@pytest.mark.parametrize("message", [ReportFailure(OLD, FAILURE), ReportSkip(OLD, "full")], ids=["failure", "skip"])
def test_what_is_sealed_is_no_longer_the_clients_to_give_up(node: Node, message: Message) -> None:
    """A client that reconnects reports its saves in flight as failed; what it had sealed goes on."""
    node.writing(OLD)
    assert node.says(0, message) == []
    node.do(ShardDurable(0, OLD, 1))
    assert node.says(0, message) == []


# ---------------------------------------------------------------- leaving and dying


def test_a_goodbye_is_passed_on_before_it_is_answered() -> None:
    node = Node().welcomed()
    assert node.says(0, Goodbye()) == [ToCoordinator(0, RankLeft(0, "", SESSION)), Send(PEER, Farewell())]
    assert node.table.ended_in_order


def test_a_goodbye_of_a_client_that_is_not_known_is_answered_by_the_question_who_it_is() -> None:
    """Its sidecar was restarted a moment ago: without a Hello nobody would know whose end this is, and the rank would
    be taken for dead later. The client says both, and gets its Farewell."""
    node = Node()
    assert node.says(0, Goodbye()) == [Send(PEER, Pong(SIDECAR_ID, known=False))]
    node.says(0, hello(session=SESSION))
    assert Send(PEER, Farewell()) in node.says(0, Goodbye())
    assert node.table.ended_in_order


def test_a_death_is_passed_on_once_with_its_reason() -> None:
    node = Node().welcomed()
    death = RankDied(0, 1000, "its process has ended")
    assert node.do(death) == [ToCoordinator(0, RankLeft(0, "its process has ended", SESSION))]
    assert node.do(death) == []
    assert not node.table.ended_in_order


def test_the_death_of_an_earlier_process_does_not_end_its_successor() -> None:
    node = Node().welcomed()
    node.do(RankDied(0, 1000, "killed"))
    node.says(0, hello(0, 2, pid=77, incarnation=1))
    assert node.do(RankDied(0, 1000, "killed")) == []
    assert node.do(RankDied(5, 1000, "killed")) == []
    assert node.table.living_ranks == [0]


def test_the_job_has_ended_in_order_when_every_rank_has_said_goodbye() -> None:
    node = Node()
    assert not node.table.ended_in_order
    node.welcomed(0).welcomed(1)
    node.says(0, Goodbye())
    assert not node.table.ended_in_order
    node.says(1, Goodbye())
    assert node.table.ended_in_order


def test_a_dead_rank_is_not_sent_anything(node: Node) -> None:
    node.do(RankDied(0, 1000, "killed"))
    for message in (Committed(OLD, "/x"), Aborted(OLD, ()), AskCommit(OLD, "/x"), FinalPlan(OLD, "p9", ITEMS)):
        assert node.hears(0, message) == []
    assert node.hears(7, Committed(OLD, "/x")) == []


# ---------------------------------------------------------------- plans and regions


def test_a_final_plan_goes_to_the_rank_and_every_slot_is_prepared_for_it() -> None:
    plan = FinalPlan(OLD, PLAN_ID, ITEMS)
    assert Node().welcomed().hears(0, plan) == [
        Send(PEER, plan),
        prepares(0, 1, PLAN_ID, ITEMS, FIRST_BYTE_CAPACITY),
        prepares(1, 1, PLAN_ID, ITEMS, FIRST_BYTE_CAPACITY),
    ]


def test_a_rank_has_as_many_regions_as_it_asked_for() -> None:
    actions = Node().welcomed(slots=1).hears(0, FinalPlan(OLD, PLAN_ID, ITEMS))
    assert [order.slot for order in of_type(actions, PrepareRegion)] == [0]


def test_a_prepared_region_is_offered_to_the_rank() -> None:
    node = Node().welcomed()
    order = of_type(node.hears(0, FinalPlan(OLD, PLAN_ID, ITEMS)), PrepareRegion)[1]
    assert node.do(RegionPrepared(0, ready_for(order))) == [Send(PEER, ready_for(order))]


def test_a_region_that_cannot_be_prepared_is_refused_with_rank_and_node() -> None:
    node = Node().welcomed()
    node.hears(0, FinalPlan(OLD, PLAN_ID, ITEMS))
    refusal = RegionRefused(PLAN_ID, 1, FAILURE.at(0, "node-a"))
    assert node.do(RegionFailed(0, 1, PLAN_ID, FAILURE)) == [Send(PEER, refusal)]


def test_a_region_that_was_refused_is_tried_again_when_the_rank_asks(node: Node) -> None:
    node.hears(0, FinalPlan(key(1), "p2", ITEMS))
    node.says(0, GrowRegion("p2", 1, 0))
    node.do(RegionFailed(0, 1, "p2", FAILURE))
    assert node.says(0, GrowRegion("p2", 1, 0)) == [prepares(1, 3, "p2", ITEMS, FIRST_BYTE_CAPACITY, key(1))]


def test_the_same_plan_again_prepares_nothing_anew(node: Node) -> None:
    assert node.hears(0, FinalPlan(key(1), PLAN_ID, ITEMS)) == [Send(PEER, FinalPlan(key(1), PLAN_ID, ITEMS))]


def test_a_region_prepared_for_a_plan_that_has_changed_is_prepared_anew_and_never_offered() -> None:
    node = Node().welcomed(slots=1)
    (first,) = of_type(node.hears(0, FinalPlan(OLD, "p1", ITEMS)), PrepareRegion)
    assert of_type(node.hears(0, FinalPlan(key(1), "p2", (WEIGHT,))), PrepareRegion) == []
    second = prepares(0, 2, "p2", (WEIGHT,), FIRST_BYTE_CAPACITY, key(1), slots=1)
    assert node.do(RegionPrepared(0, ready_for(first))) == [second]
    assert node.do(RegionPrepared(0, ready_for(second))) == [Send(PEER, ready_for(second))]


def test_a_failure_to_prepare_for_a_plan_that_has_changed_is_not_the_ranks_business() -> None:
    node = Node().welcomed(slots=1)
    node.hears(0, FinalPlan(OLD, "p1", ITEMS))
    node.hears(0, FinalPlan(key(1), "p2", ITEMS))
    second = prepares(0, 2, "p2", ITEMS, FIRST_BYTE_CAPACITY, key(1), slots=1)
    assert node.do(RegionFailed(0, 0, "p1", FAILURE)) == [second]


@pytest.mark.parametrize("failed", [False, True], ids=["prepared", "failed"])
def test_a_region_prepared_for_a_rank_that_died_meanwhile_is_kept_quiet(failed: bool) -> None:
    node = Node().welcomed(slots=1)
    (order,) = of_type(node.hears(0, FinalPlan(OLD, PLAN_ID, ITEMS)), PrepareRegion)
    node.do(RankDied(0, 1000, "killed"))
    event = RegionFailed(0, 0, PLAN_ID, FAILURE) if failed else RegionPrepared(0, ready_for(order))
    assert node.do(event) == []


def test_a_successor_gets_regions_of_its_own_plan_with_higher_generations(node: Node) -> None:
    node.do(RankDied(0, 1000, "killed"))
    node.says(0, hello(0, 2, pid=77, incarnation=1))
    node.hears(0, Welcome("0000000b", "", "", "", ()))
    orders = of_type(node.hears(0, FinalPlan(NEW, "0000000b-p1", ITEMS)), PrepareRegion)
    assert [(order.slot, order.generation) for order in orders] == [(0, 2), (1, 2)]


def test_a_successor_waits_for_the_region_that_is_still_being_prepared_for_the_dead_rank() -> None:
    node = Node().welcomed(slots=1)
    (old,) = of_type(node.hears(0, FinalPlan(OLD, "p1", ITEMS)), PrepareRegion)
    node.do(RankDied(0, 1000, "killed"))
    node.says(0, hello(0, 2, pid=77, incarnation=1, slots=1))
    node.hears(0, Welcome("0000000b", "", "", "", ()))
    assert of_type(node.hears(0, FinalPlan(NEW, "p2", ITEMS)), PrepareRegion) == []
    anew = prepares(0, 2, "p2", ITEMS, FIRST_BYTE_CAPACITY, NEW, pid=77, incarnation=1, slots=1)
    assert node.do(RegionPrepared(0, ready_for(old))) == [anew]


# ---------------------------------------------------------------- growth


def test_a_region_grows_under_a_new_generation(node: Node) -> None:
    grown = prepares(1, 2, PLAN_ID, ITEMS, 1 << 20)
    assert node.says(0, GrowRegion(PLAN_ID, 1, 1 << 20)) == [grown]
    assert node.do(RegionPrepared(0, ready_for(grown))) == [Send(PEER, ready_for(grown))]


@pytest.mark.parametrize(("plan_id", "slot"), [("p9", 0), (PLAN_ID, 2)], ids=["stale plan", "unknown slot"])
def test_growth_of_what_the_rank_does_not_have_is_refused(node: Node, plan_id: str, slot: int) -> None:
    (send,) = of_type(node.says(0, GrowRegion(plan_id, slot, 1 << 20)), Send)
    assert isinstance(send.message, RegionRefused)
    assert (send.message.plan_id, send.message.slot, send.message.failure.kind) == (plan_id, slot, "StalePlan")


def test_a_doubled_request_to_grow_prepares_once(node: Node) -> None:
    node.says(0, GrowRegion(PLAN_ID, 0, 1 << 20))
    assert node.says(0, GrowRegion(PLAN_ID, 0, 1 << 20)) == []


def test_a_sealed_region_is_never_prepared(node: Node) -> None:
    node.writing(OLD)
    assert of_type(node.says(0, GrowRegion(PLAN_ID, 0, 1 << 20)), PrepareRegion) == []
    node.hears(0, FinalPlan(key(1), "p2", ITEMS))
    assert of_type(node.says(0, GrowRegion("p2", 0, 0)), PrepareRegion) == []


def test_a_region_that_is_ready_for_another_plan_is_the_clients_until_it_asks(node: Node) -> None:
    """A plan, or the whole connection, may be lost: a client that has not heard of it fills by the plan before."""
    assert of_type(node.hears(0, FinalPlan(key(1), "p2", ITEMS)), PrepareRegion) == []
    assert of_type(node.says(0, hello(0, 2, session=SESSION), b"again"), PrepareRegion) == []
    assert of_type(node.hears(0, Welcome(SESSION, "", "", "", ())), PrepareRegion) == []
    (refused,) = node.says(0, GrowRegion(PLAN_ID, 0, 0), b"again")
    assert isinstance(refused, Send)
    assert isinstance(refused.message, RegionRefused)
    (order,) = node.says(0, GrowRegion("p2", 0, 0), b"again")
    assert isinstance(order, PrepareRegion)
    assert (order.slot, order.plan_id) == (0, "p2")


def test_a_region_keeps_its_growth_over_saves(node: Node) -> None:
    node.prepare(node.says(0, GrowRegion(PLAN_ID, 0, 1 << 20)))
    assert freed(0, 2) in node.durable(OLD)


# ---------------------------------------------------------------- submission


def test_a_submitted_shard_is_written_and_the_coordinator_is_told(node: Node) -> None:
    submit = node.submit(OLD, overwrite=True)
    assert node.says(0, submit) == [
        WriteShard(submit, ITEMS, DIRECTORY, 2, TORCH, ready_for(prepares(0, 1, PLAN_ID, ITEMS, FIRST_BYTE_CAPACITY))),
        ToCoordinator(0, ShardStaged(OLD, 0, PLAN_ID, True, 2, DIRECTORY)),
    ]
    assert node.table.jobs[0, OLD].state is ShardState.QUEUED
    assert node.table.ranks[0].slots[0].state is RegionState.SEALED
    assert node.table.is_busy


def test_two_saves_may_be_in_flight_in_two_slots(node: Node) -> None:
    node.writing(OLD, slot=0).writing(key(1), slot=1)
    assert freed(1, 1, seq=1) in node.do(ShardDurable(0, key(1), 1))
    assert node.table.is_busy


@pytest.mark.parametrize("after", ["queued", "writing", "persisted", "failed"])
def test_a_doubled_submission_changes_nothing(node: Node, after: str) -> None:
    submit = node.submit(OLD)
    node.says(0, submit)
    if after != "queued":
        node.do(ShardStarted(0, OLD))
    if after == "persisted":
        node.do(ShardDurable(0, OLD, 1))
    if after == "failed":
        node.do(ShardBroken(0, OLD, FAILURE))
    assert node.says(0, submit) == []


def test_a_submission_of_long_ago_is_not_written_again(node: Node) -> None:
    """The seal of a slot that is seldom used may be that of an old save; it is read when its rank dies."""
    old = node.submit(OLD, slot=1)
    node.says(0, old)
    node.do(ShardStarted(0, OLD))
    node.do(ShardDurable(0, OLD, 1))
    for seq in range(1, MAX_ENDED_JOBS + 3):
        node.durable(key(seq))
    assert node.says(0, old) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"save": NEW}, "session 0000000b"),
        ({"rank": 1}, "rank 1"),
        ({"plan_id": "p9"}, "plan p9, which has been given up since"),
        ({"slot": 5}, "slot 5"),
        ({"generation": 7}, "(generation 1, free) was submitted as generation 7"),
        ({"byte_lengths": ()}, "0 byte entries of 0 bytes; the plan has 1"),
        ({"byte_lengths": (1, 2)}, "2 byte entries"),
        ({"byte_lengths": (FIRST_BYTE_CAPACITY + 1,)}, f"room for {FIRST_BYTE_CAPACITY} bytes"),
    ],
    ids=["session", "rank", "plan", "slot", "generation", "no entries", "too many entries", "too many bytes"],
)
def test_a_submission_that_does_not_fit_fails_the_save_and_touches_nothing(
    node: Node, changes: dict[str, Any], words: str
) -> None:
    submit = replace(node.submit(OLD), **changes)
    actions = node.says(0, submit)
    (action,) = of_type(actions, ToCoordinator)
    assert isinstance(action.message, ReportFailure)
    assert action.message.save == submit.save
    assert (action.message.failure.kind, action.message.failure.rank) == ("LocalProtocolError", 0)
    assert words in action.message.failure.message
    # A slot that was prepared anew since is offered by RegionReady, one that is not there by nothing.
    is_known = not {"slot", "generation"} & changes.keys()
    assert of_type(actions, Send) == ([freed(submit.slot, submit.generation)] if is_known else [])
    assert node.table.jobs == {}
    assert {slot.state for slot in node.table.ranks[0].slots} == {RegionState.FREE}


def test_a_slot_that_is_being_written_cannot_be_submitted_again(node: Node) -> None:
    node.writing(OLD)
    assert of_type(node.says(0, node.submit(key(1))), WriteShard) == []


def test_a_slot_that_is_being_written_is_not_given_back_with_a_refusal(node: Node) -> None:
    node.writing(OLD)
    assert of_type(node.says(0, node.submit(key(1))), Send) == []


def test_a_slot_that_is_being_prepared_cannot_be_submitted(node: Node) -> None:
    node.says(0, GrowRegion(PLAN_ID, 0, 1 << 20))
    assert of_type(node.says(0, node.submit(OLD, generation=1)), WriteShard) == []
    assert of_type(node.says(0, node.submit(OLD, generation=2)), WriteShard) == []


def test_a_slower_rank_still_submits_by_the_plan_that_others_have_given_up(node: Node) -> None:
    """It fills a region for the save before the one that was given up; the coordinator looks after who mixes plans."""
    submit = node.submit(OLD)
    node.hears(0, Aborted(key(1), (FAILURE,), replan=True))
    assert of_type(node.says(0, submit), WriteShard)


# ---------------------------------------------------------------- the end of a job


def test_a_durable_shard_is_told_to_rank_and_coordinator_and_its_slot_is_free(node: Node) -> None:
    persisted = ShardPersisted(OLD, 0, 4096)
    assert node.durable(OLD) == [Send(PEER, persisted), *LET_GO, ToCoordinator(0, persisted)]
    assert node.table.jobs[0, OLD].state is ShardState.PERSISTED
    assert not node.table.is_busy


def test_the_same_slot_can_be_used_again_under_the_same_generation(node: Node) -> None:
    node.durable(OLD)
    assert freed(0, 1, seq=1) in node.durable(key(1))


def test_a_broken_shard_loses_its_files_frees_its_slot_and_fails_the_save(node: Node) -> None:
    node.writing(OLD)
    assert node.do(ShardBroken(0, OLD, FAILURE)) == [
        *LET_GO,
        RemoveShardFiles(0, OLD, DIRECTORY),
        ToCoordinator(0, ReportFailure(OLD, FAILURE.at(0, "node-a"))),
    ]
    assert node.table.jobs[0, OLD].state is ShardState.FAILED


def test_a_shard_of_a_dead_rank_is_finished_and_reported(node: Node) -> None:
    node.writing(OLD)
    node.do(RankDied(0, 1000, "killed"))
    assert node.do(ShardDurable(0, OLD, 4096)) == [BreakSeal(0, 0), ToCoordinator(0, ShardPersisted(OLD, 0, 4096))]
    assert node.table.ranks[0].slots[0].state is RegionState.FREE


def test_what_a_dead_rank_has_saved_is_not_told_to_its_successor(node: Node) -> None:
    node.writing(OLD)
    node.do(RankDied(0, 1000, "killed"))
    node.welcomed(0, "0000000b", pid=77, incarnation=1)
    actions = node.do(ShardDurable(0, OLD, 4096))
    assert [send for send in of_type(actions, Send) if isinstance(send.message, ShardPersisted)] == []
    assert ToCoordinator(0, ShardPersisted(OLD, 0, 4096)) in actions


def test_a_successor_does_not_get_the_slot_before_the_old_shard_is_written(node: Node) -> None:
    node.writing(OLD)
    node.do(RankDied(0, 1000, "killed"))
    node.welcomed(0, "0000000b", pid=77, incarnation=1)
    orders = of_type(node.hears(0, FinalPlan(NEW, "p2", ITEMS)), PrepareRegion)
    assert [order.slot for order in orders] == [1]
    after = of_type(node.do(ShardDurable(0, OLD, 4096)), PrepareRegion)
    assert after == [prepares(0, 2, "p2", ITEMS, FIRST_BYTE_CAPACITY, NEW, pid=77, incarnation=1)]


def test_a_successor_with_fewer_slots_is_not_offered_a_region_that_was_prepared_for_its_predecessor() -> None:
    node = Node().welcomed()
    orders = of_type(node.hears(0, FinalPlan(OLD, PLAN_ID, ITEMS)), PrepareRegion)
    node.do(RankDied(0, 1000, "killed"))
    node.welcomed(0, "0000000b", pid=77, incarnation=1, slots=1)
    node.hears(0, FinalPlan(NEW, "p2", ITEMS))
    assert node.do(RegionPrepared(0, ready_for(orders[1]))) == []


@pytest.mark.parametrize("planned", [False, True], ids=["before its plan", "after its plan"])
def test_a_successor_with_fewer_slots_hears_nothing_of_those_it_does_not_have(node: Node, planned: bool) -> None:
    node.writing(OLD, slot=1)
    node.do(RankDied(0, 1000, "killed"))
    node.welcomed(0, "0000000b", pid=77, incarnation=1, slots=1)
    if planned:
        node.hears(0, FinalPlan(NEW, "p2", ITEMS))
    actions = node.do(ShardDurable(0, OLD, 4096))
    assert of_type(actions, Send) == []
    assert of_type(actions, PrepareRegion) == []


def test_a_plan_that_changed_while_a_slot_was_sealed_prepares_the_slot_instead_of_freeing_it(node: Node) -> None:
    node.writing(OLD)
    node.hears(0, FinalPlan(key(1), "p2", (WEIGHT,)))
    actions = node.do(ShardDurable(0, OLD, 4096))
    anew = prepares(0, 2, "p2", (WEIGHT,), FIRST_BYTE_CAPACITY, key(1))
    assert actions.index(BreakSeal(0, 0)) < actions.index(anew)
    assert [send for send in of_type(actions, Send) if isinstance(send.message, SlotFreed)] == []


def test_a_shard_keeps_the_directory_in_which_it_was_begun(node: Node) -> None:
    node.writing(OLD)
    node.do(RankDied(0, 1000, "killed"))
    node.welcomed(0, "0000000b", pid=77, incarnation=1, directory="/elsewhere")
    assert RemoveShardFiles(0, OLD, DIRECTORY) in node.do(ShardBroken(0, OLD, FAILURE))


# ---------------------------------------------------------------- abort


ABORTED = Aborted(OLD, (FAILURE,))


def test_an_abort_of_a_queued_shard_cancels_it(node: Node) -> None:
    node.submitted(OLD)
    assert node.hears(0, ABORTED) == [Send(PEER, ABORTED), CancelShard(0, OLD)]


@pytest.mark.parametrize("started", [False, True], ids=["queued", "writing"])
def test_a_cancelled_shard_loses_its_files_and_frees_its_slot_silently(node: Node, started: bool) -> None:
    node.submitted(OLD)
    if started:
        node.do(ShardStarted(0, OLD))
    node.hears(0, ABORTED)
    if not started:
        node.do(ShardStarted(0, OLD))
    assert node.do(ShardBroken(0, OLD, FAILURE)) == [*LET_GO, RemoveShardFiles(0, OLD, DIRECTORY)]
    assert node.table.jobs[0, OLD].state is ShardState.CANCELLED


def test_a_shard_that_was_durable_before_it_could_be_cancelled_is_removed_all_the_same(node: Node) -> None:
    node.writing(OLD)
    node.hears(0, ABORTED)
    assert node.do(ShardDurable(0, OLD, 4096)) == [*LET_GO, RemoveShardFiles(0, OLD, DIRECTORY)]


def test_an_abort_of_a_persisted_shard_removes_its_files(node: Node) -> None:
    node.durable(OLD)
    assert node.hears(0, ABORTED) == [Send(PEER, ABORTED), RemoveShardFiles(0, OLD, DIRECTORY)]


def test_an_abort_of_a_failed_shard_has_nothing_to_do(node: Node) -> None:
    node.writing(OLD).do(ShardBroken(0, OLD, FAILURE))
    assert node.hears(0, ABORTED) == [Send(PEER, ABORTED)]


def test_a_doubled_abort_is_carried_out_once(node: Node) -> None:
    node.submitted(OLD)
    node.hears(0, ABORTED)
    assert node.hears(0, ABORTED) == [Send(PEER, ABORTED)]


def test_an_abort_reaches_the_shard_of_a_dead_rank(node: Node) -> None:
    node.submitted(OLD)
    node.do(RankDied(0, 1000, "killed"))
    assert node.hears(0, ABORTED) == [CancelShard(0, OLD)]


def test_an_abort_before_the_region_was_sealed_is_passed_on(node: Node) -> None:
    assert node.hears(0, ABORTED) == [Send(PEER, ABORTED)]


@pytest.mark.parametrize("message", [Committed(OLD, "/x"), ABORTED], ids=lambda message: type(message).__name__)
def test_the_end_of_a_save_of_an_earlier_life_is_not_told_to_this_one(node: Node, message: Message) -> None:
    node.do(RankDied(0, 1000, "killed"))
    node.welcomed(0, "0000000b", pid=77, incarnation=1)
    assert of_type(node.hears(0, message), Send) == []


def test_an_abort_with_replan_takes_neither_plan_nor_regions_away(node: Node) -> None:
    node.hears(0, Aborted(OLD, (FAILURE,), replan=True))
    assert node.table.ranks[0].plan is not None
    assert of_type(node.hears(0, FinalPlan(key(1), PLAN_ID, ITEMS)), PrepareRegion) == []


def test_an_abort_without_replan_keeps_the_plan(node: Node) -> None:
    node.hears(0, ABORTED)
    assert of_type(node.says(0, node.submit(key(1))), WriteShard)


# ---------------------------------------------------------------- bounds


def test_ended_jobs_are_forgotten_but_none_that_is_under_way(node: Node) -> None:
    node.writing(OLD, slot=1)
    for seq in range(1, 2 * MAX_ENDED_JOBS):
        node.durable(key(seq))
    assert len(node.table.jobs) <= MAX_ENDED_JOBS + 2
    assert node.table.jobs[0, OLD].state is ShardState.WRITING


def test_regions_of_two_ranks_are_kept_apart() -> None:
    node = Node().welcomed(0).welcomed(1).planned(0).planned(1)
    node.writing(OLD, rank=0).writing(OLD, rank=1)
    actions = node.do(ShardDurable(1, OLD, 8))
    assert Send(Node.peer(1), SlotFreed(0, 1, 0)) in actions
    assert node.table.ranks[0].slots[0].state is RegionState.SEALED
    assert node.table.jobs[0, OLD].state is ShardState.WRITING


def test_a_failure_report_of_another_rank_is_not_mixed_up() -> None:
    node = Node().welcomed(0).welcomed(1).planned(0).planned(1)
    node.writing(OLD, rank=1)
    actions = of_type(node.do(ShardBroken(1, OLD, FailureReport("X", "x"))), ToCoordinator)
    assert actions == [ToCoordinator(1, ReportFailure(OLD, FailureReport("X", "x", rank=1, node="node-a")))]


def test_an_offered_region_is_the_one_that_was_asked_for(node: Node) -> None:
    ready = node.table.ranks[0].slots[0].ready
    assert isinstance(ready, RegionReady)
    assert (ready.plan_id, ready.slot, ready.generation) == (PLAN_ID, 0, 1)


def test_a_hello_that_is_said_twice_on_one_connection_is_one_client() -> None:
    """A client says it again when it has had no answer; libzmq may deliver the first one late, to the next sidecar."""
    node = Node()
    assert of_type(node.says(0, hello(0, 2)), ToCoordinator)
    assert node.says(0, hello(0, 2)) == []
    (refused,) = of_type(node.says(0, hello(0, 2), peer=b"another"), Send)
    assert isinstance(refused.message, Refused)
