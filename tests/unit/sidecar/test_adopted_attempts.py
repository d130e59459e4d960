"""Saves that are older than the coordinator: taken up from what ranks, sidecars and storage say, and ended."""

from __future__ import annotations

import pytest

from ckpt_proto.lifecycles import CheckpointState
from ckpt_proto.messages import (
    Aborted,
    AskCommit,
    AskRestoreStep,
    Committed,
    DecideCommit,
    FinalPlan,
    GlobalPlan,
    RankLeft,
    ReportFailure,
    RestoreStep,
    ShardPersisted,
    ShardStaged,
)
from ckpt_sidecar.actions import Action, ListShards, OpenDirectory, Publish, ToRank, Withdraw
from ckpt_sidecar.attempt import DECIDE_TIMEOUT_S, LIST_ADOPTED_S, RETURN_S
from ckpt_sidecar.attempt_end import AGAIN_S
from ckpt_sidecar.attempt_watch import PLAN_LOST_S
from ckpt_sidecar.events import DirectoryOpened, ListedShard, Published, PublishFailed, ShardsListed, Tick
from testkit.tables import DIRECTORY, FAILURE, ITEMS, PLAN_ID, Coordinator, hello, key, of_type, propose, told

OLD = "abcdef01"
SAVE = key(3, step=300, session=OLD)
PLAN = f"{OLD}-p1"
WHERE = f"{DIRECTORY}/step-300"
PUBLISH = Publish(SAVE, DIRECTORY, 2, PLAN, (), overwrite=False)
ASK = ToRank(0, AskCommit(SAVE, WHERE))


def staged(rank: int, *, overwrite: bool = False) -> ShardStaged:
    """What the sidecar of a rank says of a region that it has found sealed."""
    return ShardStaged(SAVE, rank, PLAN, overwrite, 2, DIRECTORY)


@pytest.fixture
def coordinator() -> Coordinator:
    """One that was started a moment ago and knows nothing."""
    return Coordinator()


def back(coordinator: Coordinator, rank: int, **changes: object) -> list[Action]:
    """A rank of the old session says Hello, with the save in flight unless ``changes`` say otherwise."""
    known = {"session": OLD, "next_seq": SAVE.seq + 1, "in_flight": (SAVE.seq,), **changes}
    return coordinator.says_hello(rank, 2, **known)


def aborts(actions: list[Action]) -> dict[int, Aborted]:
    """The aborts among ``actions``, by rank."""
    return {action.rank: action.message for action in of_type(actions, ToRank) if isinstance(action.message, Aborted)}


def state(coordinator: Coordinator) -> CheckpointState:
    return coordinator.table.attempts[OLD, SAVE.seq].state


def listed(coordinator: Coordinator, *ranks: int, published: bool = False) -> list[Action]:
    """Storage has durable shards of these ranks; ``published``: and the ``.metadata`` of the save."""
    return coordinator.do(ShardsListed(SAVE, tuple(ListedShard(rank, PLAN, False) for rank in ranks), published))


def given_up(coordinator: Coordinator, actions: list[Action]) -> dict[int, Aborted]:
    """The aborts that follow. Storage is looked at first: it may have been published, and nobody told."""
    assert of_type(actions, ListShards)
    assert aborts(actions) == {}
    actions = listed(coordinator)
    return aborts(coordinator.withdrawn(actions) if of_type(actions, Withdraw) else actions)


# ---------------------------------------------------------------- everybody lives


def test_a_save_goes_on_where_the_earlier_coordinator_left_it(coordinator: Coordinator) -> None:
    for rank in (0, 1):
        back(coordinator, rank)
        assert coordinator.at(rank, staged(rank)) == []
    assert coordinator.at(1, ShardPersisted(SAVE, 1, 8)) == []
    assert coordinator.at(0, ShardPersisted(SAVE, 0, 8)) == [ASK]
    assert coordinator.at(0, DecideCommit(SAVE, True)) == [PUBLISH]


def test_a_sidecar_speaks_for_its_ranks_before_they_have_said_hello(coordinator: Coordinator) -> None:
    """A sealed region is staged, whoever is there: world size and directory come with it."""
    assert coordinator.at(0, staged(0)) == []
    assert coordinator.at(1, staged(1)) == []
    coordinator.persisted(SAVE, 0, 1)
    assert state(coordinator) is CheckpointState.COMPLETE
    attempt = coordinator.table.attempts[OLD, SAVE.seq]
    assert (attempt.world_size, attempt.directory, attempt.adopted) == (2, DIRECTORY, True)


def test_rank_0_is_asked_when_it_comes_back(coordinator: Coordinator) -> None:
    for rank in (0, 1):
        coordinator.at(rank, staged(rank))
    coordinator.persisted(SAVE, 0, 1)
    assert ASK in back(coordinator, 0)
    assert ASK not in back(coordinator, 1)


def test_a_save_that_is_being_planned_is_planned_on(coordinator: Coordinator) -> None:
    for rank in (0, 1):
        back(coordinator, rank)
        coordinator.at(rank, propose(SAVE))
    assert coordinator.table.attempts[OLD, SAVE.seq].planned


def test_a_plan_of_an_adopted_session_never_has_the_name_of_an_earlier_one(coordinator: Coordinator) -> None:
    for rank in (0, 1):
        back(coordinator, rank)
    (final, _) = coordinator.planned(SAVE)
    assert isinstance(final, ToRank)
    assert final.message.plan_id == f"{OLD}-p{SAVE.seq + 1}"  # type: ignore[attr-defined]


def test_a_rank_whose_plan_was_lost_while_another_has_staged_by_it_is_told_so(coordinator: Coordinator) -> None:
    """Rank 0, which may say the plan again, is waited for; not until the stage timeout."""
    for rank in (0, 1):
        back(coordinator, rank)
    mine = f"{OLD}-p{SAVE.seq + 1}"
    coordinator.at(1, ShardStaged(SAVE, 1, mine, False, 2, DIRECTORY))
    assert coordinator.at(0, propose(SAVE)) == []
    coordinator.now_s += PLAN_LOST_S
    told_ranks = aborts(coordinator.do(Tick()))
    assert sorted(told_ranks) == [0, 1]
    assert told_ranks[0].replan
    assert (told_ranks[0].failures[0].kind, told_ranks[0].failures[0].rank) == ("PlanLost", 0)


def test_nobody_needs_the_plan_of_a_save_that_is_committed(coordinator: Coordinator) -> None:
    """A new process of rank 0 asks to plan what its predecessor has persisted, as storage says."""
    mine = f"{OLD}-p{SAVE.seq + 1}"
    for rank in (0, 1):
        back(coordinator, rank)
    coordinator.at(0, propose(SAVE))
    coordinator.at(1, ShardStaged(SAVE, 1, mine, False, 2, DIRECTORY))
    coordinator.persisted(SAVE, 1)
    coordinator.do(ShardsListed(SAVE, (ListedShard(0, mine, False),), published=False))
    assert of_type(coordinator.at(0, DecideCommit(SAVE, True)), Publish)
    coordinator.do(Published(SAVE))
    coordinator.now_s += PLAN_LOST_S
    assert coordinator.do(Tick()) == []
    assert state(coordinator) is CheckpointState.COMMITTED


def test_nobody_opens_a_save_of_a_session_that_this_coordinator_has_begun_and_seen_end(
    coordinator: Coordinator,
) -> None:
    coordinator.joined(2)
    coordinator.at(1, RankLeft(1, "killed"))
    coordinator.says_hello(1, 2, pid=77)
    late = key(5)
    (answer,) = told(coordinator.at(0, ShardStaged(late, 0, PLAN_ID, False, 2, DIRECTORY)), 0)
    assert isinstance(answer, Aborted)
    assert answer.failures[0].kind == "SessionEnded"


def test_the_directory_is_opened_without_touching_what_is_in_flight(coordinator: Coordinator) -> None:
    assert coordinator.at(0, hello(0, 2, session=OLD)) == [OpenDirectory(DIRECTORY, (OLD,))]


def test_who_asks_for_a_step_waits_for_an_adopted_save_of_an_earlier_life(coordinator: Coordinator) -> None:
    coordinator.at(0, staged(0))
    coordinator.at(1, staged(1))
    for rank in (0, 1):
        coordinator.at(rank, RankLeft(rank, "killed", OLD))
        coordinator.says_hello(rank, 2, (100,), incarnation=1)
    assert coordinator.at(0, AskRestoreStep(0)) == []
    assert coordinator.persisted(SAVE, 0, 1) == [PUBLISH]
    assert coordinator.do(Published(SAVE))[-1] == ToRank(0, RestoreStep(0, 300))


# ---------------------------------------------------------------- storage is the ledger


def test_storage_is_looked_at_when_ranks_are_silent(coordinator: Coordinator) -> None:
    coordinator.at(0, staged(0))
    coordinator.now_s += LIST_ADOPTED_S / 2
    assert coordinator.do(Tick()) == []
    coordinator.now_s += LIST_ADOPTED_S
    order = ListShards(SAVE, DIRECTORY, 2, (0, 1))
    assert coordinator.do(Tick()) == [order]
    assert coordinator.do(Tick()) == []  # not before it was patient again
    coordinator.now_s += LIST_ADOPTED_S
    assert coordinator.do(Tick()) == [order]


def test_what_is_durable_counts_although_nobody_has_told(coordinator: Coordinator) -> None:
    """Rank 1's sidecar had told the coordinator that died, and breaks no seal twice."""
    back(coordinator, 0)
    coordinator.at(0, staged(0))
    coordinator.at(0, ShardPersisted(SAVE, 0, 8))
    assert listed(coordinator, 1) == [ASK]


def test_everything_may_be_found_on_storage(coordinator: Coordinator) -> None:
    coordinator.at(0, staged(0))
    listed(coordinator, 0, 1)
    assert state(coordinator) is CheckpointState.COMPLETE


def test_what_is_listed_twice_or_after_the_end_changes_nothing(coordinator: Coordinator) -> None:
    back(coordinator, 0)
    coordinator.at(0, staged(0))
    assert listed(coordinator, 0, 1) == [ASK]
    assert listed(coordinator, 0, 1) == []
    coordinator.at(0, DecideCommit(SAVE, True))
    coordinator.do(Published(SAVE))
    assert listed(coordinator, 0, 1) == []


def test_a_list_of_a_save_that_is_not_known_is_ignored(coordinator: Coordinator) -> None:
    assert listed(coordinator, 0, 1) == []


def test_a_plan_that_was_lost_on_the_way_to_a_rank_is_said_again_by_rank_0(coordinator: Coordinator) -> None:
    for rank in (0, 1):
        back(coordinator, rank)
    mine = f"{OLD}-p{SAVE.seq + 1}"
    coordinator.at(0, ShardStaged(SAVE, 0, mine, False, 2, DIRECTORY))
    coordinator.at(1, propose(SAVE))
    (plan,) = of_type(coordinator.at(0, GlobalPlan(SAVE, (ITEMS, ITEMS))), ToRank)
    assert plan == ToRank(1, FinalPlan(SAVE, mine, ITEMS))


@pytest.mark.parametrize("is_said_first", [True, False])
def test_a_client_that_is_new_to_the_save_gets_no_plan_that_another_of_its_rank_had(
    coordinator: Coordinator, is_said_first: bool
) -> None:
    """Two clients of one rank must not stage one save."""
    back(coordinator, 0)
    back(coordinator, 1, next_seq=SAVE.seq, in_flight=())
    mine = f"{OLD}-p{SAVE.seq + 1}"
    coordinator.at(0, ShardStaged(SAVE, 0, mine, False, 2, DIRECTORY))
    if is_said_first:
        coordinator.at(0, GlobalPlan(SAVE, (ITEMS, ITEMS)))
    failures = given_up(coordinator, coordinator.at(1, propose(SAVE)))[0].failures
    assert [(failure.kind, failure.rank) for failure in failures] == [("PlanLost", 1)]


def test_a_rank_that_is_gone_and_left_nothing_durable_ends_the_save(coordinator: Coordinator) -> None:
    back(coordinator, 0)
    coordinator.at(0, staged(0))
    assert coordinator.at(1, RankLeft(1, "killed", OLD)) == [ListShards(SAVE, DIRECTORY, 2, (0, 1))]
    failures = given_up(coordinator, listed(coordinator))[0].failures
    assert [(failure.kind, failure.rank) for failure in failures] == [("RankLost", 1)]
    assert "killed" in failures[0].message


def test_a_rank_that_is_gone_and_has_left_a_durable_shard_does_not(coordinator: Coordinator) -> None:
    back(coordinator, 0)
    coordinator.at(0, staged(0))
    coordinator.at(1, RankLeft(1, "killed", OLD))
    assert listed(coordinator, 1) == []
    assert coordinator.at(0, ShardPersisted(SAVE, 0, 8)) == [ASK]


def test_a_storage_that_cannot_be_read_is_no_proof_that_nothing_is_there(coordinator: Coordinator) -> None:
    coordinator.at(0, staged(0))
    coordinator.at(1, RankLeft(1, "killed", OLD))  # looked at, and nothing was heard of it
    assert state(coordinator) is CheckpointState.OPEN
    coordinator.now_s += 2 * LIST_ADOPTED_S
    assert of_type(coordinator.do(Tick()), ListShards)


def test_a_rank_that_knows_how_the_save_has_ended_will_not_stage_it(coordinator: Coordinator) -> None:
    """The earlier coordinator had told it, and died before it told the others: so do they hear it."""
    back(coordinator, 0)
    coordinator.at(0, staged(0))
    back(coordinator, 1, in_flight=())
    failures = aborts(listed(coordinator))[0].failures
    assert [failure.rank for failure in failures] == [1]
    assert "was told by an earlier coordinator how the save has ended" in failures[0].message


@pytest.mark.parametrize(
    "known", [{"in_flight": (SAVE.seq,)}, {"next_seq": SAVE.seq, "in_flight": ()}], ids=["in flight", "not begun"]
)
def test_a_rank_that_may_still_stage_is_waited_for(coordinator: Coordinator, known: dict[str, object]) -> None:
    back(coordinator, 0)
    coordinator.at(0, staged(0))
    back(coordinator, 1, **known)
    assert listed(coordinator) == []
    assert coordinator.at(1, staged(1)) == []
    assert state(coordinator) is CheckpointState.OPEN


def test_a_rank_that_has_not_come_back_yet_is_waited_for(coordinator: Coordinator) -> None:
    back(coordinator, 0)
    coordinator.at(0, staged(0))
    assert listed(coordinator) == []


def test_a_failure_of_a_rank_ends_an_adopted_save_like_any_other(coordinator: Coordinator) -> None:
    back(coordinator, 0)
    coordinator.at(0, staged(0))
    back(coordinator, 1)
    assert sorted(given_up(coordinator, coordinator.at(1, ReportFailure(SAVE, FAILURE)))) == [0, 1]


def test_a_save_that_was_published_is_committed_whatever_a_rank_says(coordinator: Coordinator) -> None:
    back(coordinator, 0)
    coordinator.at(0, staged(0))
    back(coordinator, 1)
    coordinator.at(1, ReportFailure(SAVE, FAILURE))
    ends = [action.message for action in of_type(listed(coordinator, published=True), ToRank)]
    assert ends == [Committed(SAVE, WHERE)] * 2


# ---------------------------------------------------------------- rank 0 comes back, or does not


def complete(coordinator: Coordinator) -> None:
    for rank in (0, 1):
        coordinator.at(rank, staged(rank))
    coordinator.persisted(SAVE, 0, 1)


def test_rank_0_is_given_time_to_come_back_and_then_the_coordinator_commits_alone(coordinator: Coordinator) -> None:
    complete(coordinator)
    coordinator.now_s += RETURN_S / 2
    assert coordinator.do(Tick()) == []
    coordinator.now_s += RETURN_S
    assert coordinator.do(Tick()) == [PUBLISH]
    assert coordinator.do(Tick()) == []


def test_rank_0_that_is_known_to_be_dead_is_not_waited_for(coordinator: Coordinator) -> None:
    for rank in (0, 1):
        coordinator.at(rank, staged(rank))
    coordinator.at(0, RankLeft(0, "killed", OLD))
    assert coordinator.persisted(SAVE, 0, 1) == [PUBLISH]


def test_rank_0_that_dies_after_all_have_persisted_is_not_waited_for(coordinator: Coordinator) -> None:
    complete(coordinator)
    assert coordinator.at(0, RankLeft(0, "killed", OLD)) == [PUBLISH]


def test_rank_0_that_has_come_back_may_think_as_long_as_any(coordinator: Coordinator) -> None:
    complete(coordinator)
    back(coordinator, 0)
    coordinator.now_s += 2 * RETURN_S
    assert coordinator.do(Tick()) == []
    coordinator.now_s += DECIDE_TIMEOUT_S
    assert sorted(given_up(coordinator, coordinator.do(Tick()))) == [0, 1]


def test_a_veto_of_rank_0_that_has_come_back_stands(coordinator: Coordinator) -> None:
    complete(coordinator)
    back(coordinator, 0)
    failures = given_up(coordinator, coordinator.at(0, DecideCommit(SAVE, False, "loss is NaN")))[1].failures
    assert failures[0].kind == "CommitVetoed"


# ---------------------------------------------------------------- publishing again


def fail_to_publish(coordinator: Coordinator, *, may_pass: bool = True) -> list[Action]:
    return coordinator.do(PublishFailed(SAVE, FAILURE, may_pass))


@pytest.fixture
def publishing(coordinator: Coordinator) -> Coordinator:
    complete(coordinator)
    back(coordinator, 0)
    assert coordinator.at(0, DecideCommit(SAVE, True)) == [PUBLISH]
    return coordinator


def test_publishing_that_fails_by_an_error_that_may_pass_is_tried_again_later(publishing: Coordinator) -> None:
    (order,) = fail_to_publish(publishing)
    assert isinstance(order, Publish)
    assert (order.save, order.delay_s) == (SAVE, AGAIN_S)
    assert state(publishing) is CheckpointState.COMPLETE
    publishing.do(Published(SAVE))
    assert state(publishing) is CheckpointState.COMMITTED


def test_publishing_is_given_up_after_a_while(publishing: Coordinator) -> None:
    tries = 0
    while of_type(actions := fail_to_publish(publishing), Publish):
        publishing.now_s += AGAIN_S
        tries += 1
    assert tries * AGAIN_S == 30.0
    assert given_up(publishing, actions)[1].failures == (FAILURE,)


def test_publishing_that_fails_for_good_is_given_up_at_once(publishing: Coordinator) -> None:
    assert sorted(given_up(publishing, fail_to_publish(publishing, may_pass=False))) == [0, 1]


def test_an_earlier_save_of_the_step_that_cannot_be_published_yet_holds_up_the_later_one(
    publishing: Coordinator,
) -> None:
    later = key(4, step=300, session=OLD)
    fail_to_publish(publishing)
    for rank in (0, 1):
        publishing.at(rank, ShardStaged(later, rank, PLAN, True, 2, DIRECTORY))
    publishing.persisted(later, 0, 1)
    assert publishing.at(0, DecideCommit(later, True)) == []
    assert [order.save for order in of_type(publishing.do(Published(SAVE)), Publish)] == [later]


def test_a_directory_that_is_opened_for_nobody_tells_its_steps(coordinator: Coordinator) -> None:
    """A dead job was finished at the start, before any rank came."""
    assert coordinator.do(DirectoryOpened(DIRECTORY, (100, 300))) == []
    assert coordinator.table.steps[DIRECTORY] == {100, 300}
