"""The coordinator's decisions: events in, actions out, compared as values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_proto.errors import FailureReport
from ckpt_proto.lifecycles import CheckpointState
from ckpt_proto.messages import (
    Aborted,
    AskCommit,
    AskRestoreStep,
    Committed,
    DecideCommit,
    FinalPlan,
    GlobalPlan,
    MakeGlobalPlan,
    Message,
    RankLeft,
    Refused,
    ReportFailure,
    ReportSkip,
    RestoreStep,
    ShardPersisted,
    ShardStaged,
    Welcome,
)
from ckpt_proto.plan_items import PlanItem
from ckpt_sidecar.actions import Action, ListShards, OpenDirectory, Publish, ToRank, Withdraw
from ckpt_sidecar.attempt_end import AGAIN_S
from ckpt_sidecar.checkpoint_table import DECIDE_TIMEOUT_S, MAX_ENDED_ATTEMPTS, PERSIST_TIMEOUT_S
from ckpt_sidecar.events import (
    AtCoordinator,
    DirectoryOpened,
    DirectoryRefused,
    Published,
    PublishFailed,
    ShardsListed,
    Tick,
    WithdrawFailed,
    Withdrawn,
)
from testkit.tables import (
    DIRECTORY,
    FAILURE,
    ITEMS,
    PLAN_ID,
    RNG,
    SESSION,
    STAGE_TIMEOUT_S,
    WEIGHT,
    Coordinator,
    hello,
    key,
    of_type,
    propose,
    told,
)

SAVE = key()
STALL_S = 600.0
WHERE = f"{DIRECTORY}/step-100"
PUBLISH = Publish(SAVE, DIRECTORY, 2, PLAN_ID, (), overwrite=False)


@pytest.fixture
def two() -> Coordinator:
    """A coordinator that has welcomed two ranks."""
    return Coordinator().joined(2)


def aborts(actions: list[Action], save: Any = SAVE) -> dict[int, Aborted]:
    """The aborts of ``save`` among ``actions``, by rank."""
    found = {}
    for action in of_type(actions, ToRank):
        if isinstance(action.message, Aborted) and action.message.save == save:
            found[action.rank] = action.message
    return found


def the_failure(actions: list[Action], world_size: int = 2) -> FailureReport:
    """The one failure that every rank is told, with nothing else being asked for."""
    told_ranks = aborts(actions)
    assert sorted(told_ranks) == list(range(world_size))
    assert len(actions) == world_size
    assert len({message.failures for message in told_ranks.values()}) == 1
    (failure,) = told_ranks[0].failures
    return failure


def state_of(coordinator: Coordinator, save: Any = SAVE) -> CheckpointState:
    return coordinator.table.attempts[save.session, save.seq].state


# ---------------------------------------------------------------- joining


def test_the_first_hello_opens_the_directory_and_is_welcomed_with_its_steps() -> None:
    coordinator = Coordinator()
    assert coordinator.at(0, hello(0, 2)) == [OpenDirectory(DIRECTORY)]
    opened = coordinator.do(DirectoryOpened(DIRECTORY, (200, 100)))
    assert opened == [ToRank(0, Welcome(SESSION, "", "node-a", "", (100, 200), pid=1000))]


def test_hellos_that_come_while_the_directory_is_opened_wait_for_it() -> None:
    coordinator = Coordinator()
    coordinator.at(0, hello(0, 2))
    assert coordinator.at(1, hello(1, 2)) == []
    opened = coordinator.do(DirectoryOpened(DIRECTORY, ()))
    assert [(action.rank, action.message.session) for action in of_type(opened, ToRank)] == [(0, SESSION), (1, SESSION)]  # type: ignore[attr-defined]


def test_a_later_rank_is_welcomed_at_once() -> None:
    coordinator = Coordinator()
    coordinator.says_hello(0, 2, (100,))
    assert coordinator.at(1, hello(1, 2)) == [ToRank(1, Welcome(SESSION, "", "node-a", "", (100,), pid=1001))]


def test_a_directory_that_cannot_be_used_is_told_to_everybody_who_waits() -> None:
    coordinator = Coordinator()
    coordinator.at(0, hello(0, 2))
    coordinator.at(1, hello(1, 2))
    refused = [ToRank(rank, Refused(FAILURE, pid=1000 + rank)) for rank in range(2)]
    assert coordinator.do(DirectoryRefused(DIRECTORY, FAILURE)) == refused
    assert coordinator.at(0, hello(0, 2)) == [OpenDirectory(DIRECTORY)]


def test_a_rank_that_left_while_it_waited_is_not_welcomed() -> None:
    coordinator = Coordinator()
    coordinator.at(0, hello(0, 2))
    coordinator.at(1, hello(1, 2))
    assert coordinator.at(0, RankLeft(0, "killed")) == []
    assert [action.rank for action in of_type(coordinator.do(DirectoryOpened(DIRECTORY, ())), ToRank)] == [1]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"world_size": 3}, "WorldSizeDiffers"),
        ({"directory": "/elsewhere"}, "DirectoryDiffers"),
        ({"session": "ffffffff"}, "StaleSession"),
    ],
    ids=str,
)
def test_a_rank_that_does_not_fit_the_others_is_refused(changes: dict[str, Any], kind: str) -> None:
    coordinator = Coordinator()
    coordinator.says_hello(0, 2)
    ((message,),) = [told(coordinator.says_hello(1, **{"world_size": 2, **changes}), 1)]
    assert isinstance(message, Refused)
    assert message.failure.kind == kind


def test_a_rank_of_an_earlier_restart_is_refused() -> None:
    coordinator = Coordinator()
    coordinator.says_hello(0, 2, incarnation=1)
    (message,) = told(coordinator.says_hello(1, 2, incarnation=0), 1)
    assert isinstance(message, Refused)
    assert message.failure.kind == "StaleIncarnation"


def test_a_directory_is_not_made_for_a_rank_that_is_refused_anyway() -> None:
    coordinator = Coordinator()
    coordinator.says_hello(0, 2)
    assert of_type(coordinator.at(1, hello(1, 2, directory="/typo")), OpenDirectory) == []


def test_two_ranks_that_disagree_at_the_very_start_are_told_so() -> None:
    coordinator = Coordinator()
    coordinator.at(0, hello(0, 2))
    coordinator.at(1, hello(1, 2, directory="/elsewhere"))
    coordinator.do(DirectoryOpened(DIRECTORY, ()))
    (message,) = told(coordinator.do(DirectoryOpened("/elsewhere", ())), 1)
    assert isinstance(message, Refused)
    assert message.failure.kind == "DirectoryDiffers"


# ---------------------------------------------------------------- lives


def test_after_a_rank_has_left_the_next_hello_begins_a_session_and_looks_at_the_directory_anew(
    two: Coordinator,
) -> None:
    two.at(1, RankLeft(1, "killed"))
    assert two.at(1, hello(1, 2, pid=77)) == [OpenDirectory(DIRECTORY)]
    (welcome,) = told(two.do(DirectoryOpened(DIRECTORY, (100,))), 1)
    assert isinstance(welcome, Welcome)
    assert (welcome.session, welcome.committed_steps) == ("0000000b", (100,))


def test_a_later_restart_ends_the_session_and_every_save_that_was_not_staged(two: Coordinator) -> None:
    two.staged(SAVE, 0)
    actions = two.says_hello(0, 2, incarnation=1)
    assert aborts(actions)[0].failures[0].kind == "RankLost"
    assert two.table.session is not None
    assert two.table.session.token == "0000000b"


def test_a_restarted_coordinator_takes_its_ranks_back_under_their_session() -> None:
    coordinator = Coordinator()
    coordinator.says_hello(0, 2, session="abcdef01")
    (welcome,) = told(coordinator.says_hello(1, 2, session="abcdef01"), 1)
    assert isinstance(welcome, Welcome)
    assert welcome.session == "abcdef01"


def test_a_session_that_has_ended_never_comes_back(two: Coordinator) -> None:
    """A rank that was taken for dead reconnects with its old token: the saves of the old session must stay apart."""
    two.committed(SAVE, 2)
    two.at(1, RankLeft(1, "no heartbeat"))
    (welcome,) = told(two.says_hello(1, 2, session=SESSION), 1)
    assert isinstance(welcome, Welcome)
    assert welcome.session != SESSION


def test_a_new_process_is_never_told_that_a_save_of_an_old_one_is_its_own(two: Coordinator) -> None:
    two.committed(SAVE, 2)
    two.at(1, RankLeft(1, "no heartbeat"))
    two.says_hello(1, 2, session=SESSION)
    two.says_hello(0, 2, pid=77)
    assert two.table.session is not None
    fresh = key(0, step=500, session=two.table.session.token)
    assert [message for message in told(two.at(0, propose(fresh)), 0) if isinstance(message, Committed)] == []


def test_a_client_that_reconnects_to_a_living_coordinator_stays_in_its_session(two: Coordinator) -> None:
    (welcome,) = told(two.says_hello(1, 2, session=SESSION), 1)
    assert isinstance(welcome, Welcome)
    assert welcome.session == SESSION
    assert two.table.session is not None
    assert not two.table.session.closed


@pytest.mark.parametrize(
    "message",
    [propose(SAVE), ShardStaged(SAVE, 1, PLAN_ID)],
    ids=lambda message: type(message).__name__,
)
def test_a_save_of_a_session_that_has_ended_is_aborted_and_not_left_without_an_answer(
    two: Coordinator, message: Message
) -> None:
    """Rank 0 was restarted alone; rank 1 lives on in the old session and would wait for ever."""
    two.at(0, RankLeft(0, "killed"))
    two.says_hello(0, 2, pid=77)
    assert [answer.save for answer in told(two.at(1, message), 1) if isinstance(answer, Aborted)] == [SAVE]


def test_a_save_that_begins_after_a_rank_has_left_fails_at_once(two: Coordinator) -> None:
    """It can never be complete: waiting for the stage timeout would hold the trainer up for minutes at every save."""
    two.at(1, RankLeft(1, "its process has ended"))
    failures = aborts(two.at(0, propose(SAVE)))[0].failures
    assert "rank 1 on node-1" in failures[0].message


def test_a_rank_that_leaves_twice_leaves_once(two: Coordinator) -> None:
    two.staged(SAVE, 0)
    assert two.at(1, RankLeft(1, "killed")) != []
    assert two.at(1, RankLeft(1, "killed")) == []
    assert Coordinator().at(0, RankLeft(0, "killed")) == []


# ---------------------------------------------------------------- which step to restore


def test_every_rank_is_told_the_same_step_also_if_another_is_committed_between_their_asks() -> None:
    coordinator = Coordinator().joined(2, (50,))
    assert coordinator.at(0, AskRestoreStep(0)) == [ToRank(0, RestoreStep(0, 50))]
    coordinator.committed(SAVE, 2)
    assert coordinator.at(1, AskRestoreStep(0)) == [ToRank(1, RestoreStep(0, 50))]
    assert coordinator.at(1, AskRestoreStep(1)) == [ToRank(1, RestoreStep(1, 100))]
    assert coordinator.at(0, AskRestoreStep(1)) == [ToRank(0, RestoreStep(1, 100))]


def test_an_empty_directory_has_no_step_to_restore(two: Coordinator) -> None:
    assert two.at(0, AskRestoreStep(0)) == [ToRank(0, RestoreStep(0, None))]


def test_the_newest_step_is_chosen_not_the_one_committed_last() -> None:
    coordinator = Coordinator().joined(1, (300,))
    coordinator.committed(SAVE, 1)
    assert coordinator.at(0, AskRestoreStep(0)) == [ToRank(0, RestoreStep(0, 300))]


def test_who_asks_while_an_earlier_life_is_being_saved_is_answered_when_that_has_ended() -> None:
    coordinator = Coordinator().joined(2, (50,))
    coordinator.staged(SAVE, 0, 1)
    for rank in (0, 1):
        coordinator.says_hello(rank, 2, (50,), incarnation=1)
        assert coordinator.at(rank, AskRestoreStep(0)) == []
    assert coordinator.persisted(SAVE, 0, 1) == [PUBLISH]
    answers = [ToRank(0, RestoreStep(0, 100)), ToRank(1, RestoreStep(0, 100))]
    assert coordinator.do(Published(SAVE))[-2:] == answers


def test_who_asks_while_an_earlier_life_is_being_saved_is_answered_also_if_that_fails() -> None:
    coordinator = Coordinator().joined(2, (50,))
    coordinator.staged(SAVE, 0, 1)
    for rank in (0, 1):
        coordinator.says_hello(rank, 2, (50,), incarnation=1)
    coordinator.at(1, AskRestoreStep(0))
    actions = coordinator.at(0, ReportFailure(SAVE, FAILURE))
    assert actions[-1] == ToRank(1, RestoreStep(0, 50))


def test_a_rank_that_left_while_it_waited_for_a_step_is_not_answered() -> None:
    coordinator = Coordinator().joined(2)
    coordinator.staged(SAVE, 0, 1)
    for rank in (0, 1):
        coordinator.says_hello(rank, 2, incarnation=1)
        coordinator.at(rank, AskRestoreStep(0))
    coordinator.at(1, RankLeft(1, "killed"))
    coordinator.persisted(SAVE, 0, 1)
    answers = [action for action in coordinator.do(Published(SAVE)) if RestoreStep(0, 100) in vars(action).values()]
    assert answers == [ToRank(0, RestoreStep(0, 100))]


def test_who_asks_before_anybody_was_welcomed_gets_no_answer() -> None:
    assert Coordinator().at(0, AskRestoreStep(0)) == []


# ---------------------------------------------------------------- plan exchange


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_plans_of_all_ranks_go_to_rank_0_in_order_and_come_back_as_one_plan(world_size: int) -> None:
    coordinator = Coordinator().joined(world_size)
    mine = [(replace(WEIGHT, fqn=f"w{rank}"),) for rank in range(world_size)]
    for rank in reversed(range(1, world_size)):
        assert coordinator.at(rank, propose(SAVE, mine[rank])) == []
    assert coordinator.at(0, propose(SAVE, mine[0])) == [ToRank(0, MakeGlobalPlan(SAVE, tuple(mine)))]
    final = coordinator.at(0, GlobalPlan(SAVE, tuple(mine)))
    assert final == [ToRank(rank, FinalPlan(SAVE, PLAN_ID, mine[rank])) for rank in range(world_size)]


def test_a_second_plan_gets_another_name(two: Coordinator) -> None:
    two.planned(SAVE)
    (final,) = told(two.planned(key(1)), 0)
    assert isinstance(final, FinalPlan)
    assert final.plan_id == f"{SESSION}-p2"


def test_values_that_differ_between_ranks_are_warned_about_on_every_rank(two: Coordinator) -> None:
    two.at(0, propose(SAVE, digest=b"11111111"))
    two.at(1, propose(SAVE, digest=b"22222222"))
    final = two.at(0, GlobalPlan(SAVE, (ITEMS, ())))
    for rank in (0, 1):
        (message,) = told(final, rank)
        assert isinstance(message, FinalPlan)
        assert "rng" in message.warnings[0]


def test_the_opaque_mark_survives_the_planner_which_cannot_carry_it(two: Coordinator) -> None:
    two.at(0, propose(SAVE, (replace(WEIGHT, opaque=True), RNG)))
    two.at(1, propose(SAVE, (WEIGHT,)))
    final = two.at(0, GlobalPlan(SAVE, ((WEIGHT, RNG), (WEIGHT,))))
    assert [item.opaque for item in told(final, 0)[0].items] == [True, False]  # type: ignore[attr-defined]
    assert [item.opaque for item in told(final, 1)[0].items] == [False]  # type: ignore[attr-defined]


def test_doubled_proposals_and_plans_change_nothing_and_are_answered_as_before(two: Coordinator) -> None:
    """A rank that was welcomed again proposes once more: its answer may have been lost with the connection."""
    order = ToRank(0, MakeGlobalPlan(SAVE, (ITEMS, ITEMS)))
    two.at(0, propose(SAVE))
    assert two.at(0, propose(SAVE)) == []
    assert two.at(1, propose(SAVE)) == [order]
    assert two.at(1, propose(SAVE)) == []
    assert two.at(0, propose(SAVE)) == [order]
    final = two.at(0, GlobalPlan(SAVE, (ITEMS, ITEMS)))
    assert final == [ToRank(rank, FinalPlan(SAVE, PLAN_ID, ITEMS)) for rank in (0, 1)]
    assert two.at(0, GlobalPlan(SAVE, (ITEMS, ITEMS))) == []
    assert [two.at(rank, propose(SAVE)) for rank in (0, 1)] == [[final[0]], [final[1]]]
    two.staged(SAVE, 0, 1)
    assert two.at(1, propose(SAVE)) == []


def test_a_proposal_of_a_rank_that_has_staged_since_is_late_and_changes_nothing(two: Coordinator) -> None:
    two.staged(SAVE, 1)
    assert two.at(1, propose(SAVE)) == []
    assert state_of(two) is CheckpointState.OPEN


def test_only_rank_0_plans_and_only_when_it_was_asked(two: Coordinator) -> None:
    two.at(0, propose(SAVE))
    assert two.at(0, GlobalPlan(SAVE, (ITEMS, ITEMS))) == []
    two.at(1, propose(SAVE))
    assert two.at(1, GlobalPlan(SAVE, (ITEMS, ITEMS))) == []
    assert two.at(0, GlobalPlan(SAVE, (ITEMS, ITEMS))) != []


@pytest.mark.parametrize("plans", [(), (ITEMS,), (ITEMS,) * 3], ids=["none", "too few", "too many"])
def test_a_wrong_number_of_plans_fails_the_save(two: Coordinator, plans: tuple[tuple[PlanItem, ...], ...]) -> None:
    two.at(0, propose(SAVE))
    two.at(1, propose(SAVE))
    failure = the_failure(two.at(0, GlobalPlan(SAVE, plans)))
    assert (failure.kind, failure.rank, failure.node) == ("PlanningError", 0, "node-0")
    assert f"{len(plans)} plans for 2 ranks" in failure.message


def test_the_number_of_planned_entries_is_checked_at_the_commit_of_every_save_of_the_plan(two: Coordinator) -> None:
    two.planned(SAVE, [ITEMS, (WEIGHT,)])
    two.complete(SAVE, 2)
    expected = replace(PUBLISH, entry_counts=(2, 1))
    assert two.at(0, DecideCommit(SAVE, True)) == [expected]
    two.complete(key(1), 2)
    assert two.at(0, DecideCommit(key(1), True)) == [replace(expected, save=key(1))]


# ---------------------------------------------------------------- ranks that disagree


@pytest.mark.parametrize("staged_first", [False, True])
def test_a_structure_that_changed_on_one_rank_only_fails_the_save_and_all_plan_anew(
    two: Coordinator, staged_first: bool
) -> None:
    proposal = propose(SAVE, changed=["head.bias", "head.weight"])
    events = [AtCoordinator(1, ShardStaged(SAVE, 1, PLAN_ID)), AtCoordinator(0, proposal)]
    first, second = events if staged_first else reversed(events)
    assert two.do(first) == []
    actions = two.do(second)
    failure = the_failure(actions)
    assert (failure.kind, failure.rank, failure.node) == ("StructureDiffers", 0, "node-0")
    assert "keys: head.bias, head.weight" in failure.message
    assert "ranks [1] has not" in failure.message
    assert all(message.replan for message in aborts(actions).values())


def test_tensors_of_one_key_that_contradict_each_other_fail_the_save_before_it_is_planned(two: Coordinator) -> None:
    two.at(0, propose(SAVE))
    failure = the_failure(two.at(1, propose(SAVE, (replace(WEIGHT, dtype="bfloat16"), RNG))))
    assert (failure.kind, failure.rank) == ("StateDiffers", 1)


def test_every_rank_that_changed_is_named() -> None:
    coordinator = Coordinator().joined(3)
    coordinator.at(2, propose(SAVE, changed=["b"]))
    coordinator.at(0, propose(SAVE))
    failures = aborts(coordinator.staged(SAVE, 1))[1].failures
    assert [failure.rank for failure in failures] == [0, 2]
    assert "none was cached before" in failures[0].message


def test_a_rank_that_stages_an_older_plan_than_the_one_just_made_fails_the_save(two: Coordinator) -> None:
    two.planned(SAVE)
    assert the_failure(two.staged(SAVE, 0, plan_id="old")).kind == "PlanDiffers"


def test_ranks_that_stage_different_plans_plan_anew(two: Coordinator) -> None:
    two.staged(SAVE, 0, plan_id="p1")
    actions = two.staged(SAVE, 1, plan_id="p2")
    failure = the_failure(actions)
    assert (failure.kind, failure.rank) == ("PlanDiffers", 1)
    assert "p2" in failure.message
    assert "p1" in failure.message
    assert aborts(actions)[0].replan


def test_ranks_that_save_different_steps_under_one_number_are_both_named(two: Coordinator) -> None:
    two.at(0, propose(SAVE))
    actions = two.at(1, propose(key(0, step=101)))
    assert aborts(actions)[0].failures[0].kind == "StepsDiffer"
    assert "step 101 on rank 1 and of step 100 on rank 0" in aborts(actions)[0].failures[0].message


def test_of_differing_steps_every_rank_is_told_the_end_of_its_own(two: Coordinator) -> None:
    other = key(0, step=101)
    two.at(0, propose(SAVE))
    actions = two.at(1, propose(other))
    assert list(aborts(actions, SAVE)) == [0]
    assert list(aborts(actions, other)) == [1]


def test_ranks_that_disagree_on_overwriting_fail_the_save(two: Coordinator) -> None:
    two.staged(SAVE, 0, overwrite=True)
    failure = the_failure(two.staged(SAVE, 1))
    assert failure.kind == "OverwriteDiffers"
    assert "rank 1 called save() with overwrite=False, other ranks with True" in failure.message


def test_the_order_to_overwrite_reaches_the_commit(two: Coordinator) -> None:
    two.staged(SAVE, 0, 1, overwrite=True)
    two.persisted(SAVE, 0, 1)
    assert two.at(0, DecideCommit(SAVE, True)) == [replace(PUBLISH, overwrite=True)]


# ---------------------------------------------------------------- skip and failure


def test_a_skip_on_one_rank_skips_the_save_on_all_and_is_no_failure(two: Coordinator) -> None:
    two.staged(SAVE, 0)
    actions = two.at(1, ReportSkip(SAVE, "no free region"))
    failure = the_failure(actions)
    assert (failure.kind, failure.message, failure.rank) == ("SaveSkipped", "no free region", 1)
    assert all(message.skipped and not message.replan for message in aborts(actions).values())
    assert (two.table.counters.skipped, two.table.counters.failed) == (1, 0)
    assert two.table.counters.consecutive_failures == 0


def test_a_rank_that_comes_after_the_skip_is_told(two: Coordinator) -> None:
    two.at(1, ReportSkip(SAVE, "no free region"))
    (answer,) = told(two.staged(SAVE, 0), 0)
    assert isinstance(answer, Aborted)
    assert answer.skipped


def test_a_failure_on_one_rank_fails_the_save_on_all(two: Coordinator) -> None:
    actions = two.at(1, ReportFailure(SAVE, FAILURE))
    assert the_failure(actions) == FAILURE.at(1, "node-1")
    assert not any(message.skipped for message in aborts(actions).values())
    assert (two.table.counters.failed, two.table.counters.consecutive_failures) == (1, 1)


def test_a_rank_that_comes_after_the_failure_is_told_the_failure(two: Coordinator) -> None:
    two.at(1, ReportFailure(SAVE, FAILURE))
    for message in (propose(SAVE), ShardStaged(SAVE, 0, PLAN_ID), ReportFailure(SAVE, FAILURE)):
        assert two.at(0, message) == [ToRank(0, Aborted(SAVE, (FAILURE.at(1, "node-1"),)))]
    assert two.table.counters.failed == 1


def test_a_rank_that_comes_after_the_order_to_plan_anew_is_told_that_too(two: Coordinator) -> None:
    two.staged(SAVE, 1)
    two.at(0, propose(SAVE))
    (answer,) = told(two.staged(SAVE, 0), 0)
    assert isinstance(answer, Aborted)
    assert answer.replan


def test_a_failed_save_does_not_stop_the_next(two: Coordinator) -> None:
    two.at(1, ReportFailure(SAVE, FAILURE))
    committed = two.committed(key(1), 2)
    assert of_type(committed, ToRank)[0].message == Committed(key(1), f"{DIRECTORY}/step-200")
    assert two.table.counters.consecutive_failures == 0


def test_two_saves_may_be_open_at_once_and_end_in_any_order(two: Coordinator) -> None:
    two.staged(SAVE, 0, 1)
    two.staged(key(1), 0, 1)
    two.persisted(key(1), 0, 1)
    assert of_type(two.at(0, DecideCommit(key(1), True)), Publish)
    two.do(Published(key(1)))
    two.persisted(SAVE, 0, 1)
    assert of_type(two.at(0, DecideCommit(SAVE, True)), Publish)
    assert two.table.counters.last_committed_step == 200


# ---------------------------------------------------------------- commit


def test_when_every_rank_has_persisted_rank_0_is_asked_once(two: Coordinator) -> None:
    two.staged(SAVE, 0, 1)
    assert two.persisted(SAVE, 1) == []
    assert two.persisted(SAVE, 0) == [ToRank(0, AskCommit(SAVE, WHERE))]
    assert two.persisted(SAVE, 0, 1) == []
    assert state_of(two) is CheckpointState.COMPLETE


def test_ranks_may_persist_before_others_have_staged(two: Coordinator) -> None:
    two.staged(SAVE, 0)
    two.persisted(SAVE, 0)
    two.staged(SAVE, 1)
    assert two.persisted(SAVE, 1) == [ToRank(0, AskCommit(SAVE, WHERE))]


def test_rank_0_orders_the_commit_and_every_rank_is_told_when_it_is_done(two: Coordinator) -> None:
    two.complete(SAVE, 2)
    assert two.at(0, DecideCommit(SAVE, True)) == [PUBLISH]
    assert two.do(Published(SAVE)) == [ToRank(0, Committed(SAVE, WHERE)), ToRank(1, Committed(SAVE, WHERE))]
    assert two.table.steps[DIRECTORY] == {100}
    assert not two.table.is_busy


def test_a_commit_is_counted_with_its_time(two: Coordinator) -> None:
    two.now_s = 7.0
    two.committed(SAVE, 2)
    counters = two.table.counters
    assert (counters.committed, counters.last_committed_step, counters.last_committed_s) == (1, 100, 7.0)


def test_a_doubled_order_publishes_once(two: Coordinator) -> None:
    two.complete(SAVE, 2)
    assert two.at(0, DecideCommit(SAVE, True)) == [PUBLISH]
    assert two.at(0, DecideCommit(SAVE, True)) == []
    assert two.at(0, DecideCommit(SAVE, False, "too late")) == []


def test_an_order_before_everybody_has_persisted_or_of_another_rank_is_ignored(two: Coordinator) -> None:
    two.staged(SAVE, 0, 1)
    two.persisted(SAVE, 0)
    assert two.at(0, DecideCommit(SAVE, True)) == []
    two.persisted(SAVE, 1)
    assert two.at(1, DecideCommit(SAVE, True)) == []
    assert two.at(0, DecideCommit(SAVE, True)) == [PUBLISH]


def test_a_veto_fails_the_save_with_its_reason(two: Coordinator) -> None:
    two.complete(SAVE, 2)
    failure = the_failure(two.withdrawn(two.at(0, DecideCommit(SAVE, False, "loss is NaN"))))
    assert (failure.kind, failure.rank) == ("CommitVetoed", 0)
    assert "step 100: loss is NaN" in failure.message


def test_a_commit_that_fails_is_told_to_every_rank(two: Coordinator) -> None:
    two.complete(SAVE, 2)
    two.at(0, DecideCommit(SAVE, True))
    assert the_failure(two.withdrawn(two.do(PublishFailed(SAVE, FAILURE)))) == FAILURE
    assert state_of(two) is CheckpointState.ABORTED
    assert two.table.steps[DIRECTORY] == set()


@pytest.mark.parametrize(
    "message",
    [
        ReportFailure(SAVE, FAILURE),
        ReportSkip(SAVE, "full"),
        propose(SAVE),
        ShardStaged(SAVE, 1, "other", overwrite=True),
        ShardPersisted(SAVE, 1, 1),
        RankLeft(1, "killed"),
        RankLeft(0, "killed"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_nothing_stops_a_commit_that_is_being_published(two: Coordinator, message: Message) -> None:
    """A client that reconnects reports its saves in flight as failed; the storage has the last word all the same."""
    two.complete(SAVE, 2)
    two.at(0, DecideCommit(SAVE, True))
    rank = message.rank if isinstance(message, RankLeft) else 1
    assert aborts(two.at(rank, message)) == {}
    assert [action.rank for action in of_type(two.do(Published(SAVE)), ToRank)] == [0, 1]
    assert state_of(two) is CheckpointState.COMMITTED


def test_only_a_storage_that_does_not_answer_stops_a_commit_that_is_being_published(two: Coordinator) -> None:
    two.complete(SAVE, 2)
    two.at(0, DecideCommit(SAVE, True))
    two.now_s = STALL_S
    assert two.do(Tick()) == []
    two.now_s += 1
    actions = two.do(Tick())
    failure = the_failure(actions)
    assert failure.kind == "PublishStalled"
    assert "step 100 is durable but not published: the storage has not answered for 601 s (/data/run/step-100)" in str(
        failure
    )
    assert all(action.message.files_stay for action in of_type(actions, ToRank))
    assert two.do(Tick()) == []


def test_a_commit_that_appears_after_all_is_told(two: Coordinator) -> None:
    two.complete(SAVE, 2)
    two.at(0, DecideCommit(SAVE, True))
    two.now_s = STALL_S + 1
    two.do(Tick())
    assert two.do(Published(SAVE)) == [ToRank(rank, Committed(SAVE, "/data/run/step-100")) for rank in (0, 1)]
    assert two.table.steps[DIRECTORY] == {100}
    assert two.table.counters.last_committed_step == 100


def test_a_commit_that_fails_after_all_changes_nothing_and_the_next_one_is_tried(two: Coordinator) -> None:
    two.complete(SAVE, 2)
    two.at(0, DecideCommit(SAVE, True))
    two.now_s = STALL_S + 1
    two.do(Tick())
    assert two.do(PublishFailed(SAVE, FAILURE)) == []
    assert of_type(two.committed(key(1), 2), ToRank)


# ---------------------------------------------------------------- withdrawn before anybody is told


@pytest.fixture
def refused(two: Coordinator) -> Coordinator:
    """Complete on storage, and refused by rank 0."""
    two.complete(SAVE, 2)
    assert two.at(0, DecideCommit(SAVE, False, "loss is NaN")) == [Withdraw(SAVE, DIRECTORY)]
    return two


def test_nothing_changes_a_veto_while_it_is_made_durable(refused: Coordinator) -> None:
    refused.now_s += 1
    for message in (DecideCommit(SAVE, True), ShardPersisted(SAVE, 1, 1), RankLeft(0, "killed"), RankLeft(1, "killed")):
        assert refused.at(message.rank if isinstance(message, RankLeft) else 0, message) == []
    assert refused.do(Tick()) == refused.do(ShardsListed(SAVE, ())) == []
    assert the_failure(refused.do(Withdrawn(SAVE))).kind == "CommitVetoed"
    assert refused.do(Withdrawn(SAVE)) == []


def test_what_cannot_be_withdrawn_is_tried_again_and_then_told_with_what_may_come_of_it(refused: Coordinator) -> None:
    tries = 0
    while of_type(actions := refused.do(WithdrawFailed(SAVE, FAILURE, may_pass=True)), Withdraw):
        refused.now_s += AGAIN_S
        tries += 1
    assert tries * AGAIN_S == 30.0
    told_ranks = aborts(actions)
    assert sorted(told_ranks) == [0, 1]
    vetoed, doubt = told_ranks[1].failures
    assert (vetoed.kind, doubt.kind) == ("CommitVetoed", "NotWithdrawn")
    assert "is still complete on storage: no room on /data" in doubt.message
    assert told_ranks[1].files_stay  # or a commit of them that has begun somewhere would be torn


def test_a_storage_that_hangs_does_not_hold_a_veto_back_for_ever(refused: Coordinator) -> None:
    refused.now_s += STALL_S
    assert refused.do(Tick()) == []
    refused.now_s += 1
    told_ranks = aborts(refused.do(Tick()))
    assert sorted(told_ranks) == [0, 1]
    assert "is still complete on storage: the storage has not answered for 601 s" in told_ranks[0].failures[1].message
    assert refused.do(Withdrawn(SAVE)) == []


def test_what_is_found_published_when_it_is_to_be_withdrawn_is_committed(refused: Coordinator) -> None:
    actions = refused.do(Withdrawn(SAVE, published=True))
    assert actions == [ToRank(rank, Committed(SAVE, "/data/run/step-100")) for rank in (0, 1)]


def test_a_late_message_about_a_committed_save_is_answered_with_the_commit(two: Coordinator) -> None:
    two.committed(SAVE, 2)
    assert two.at(1, ShardStaged(SAVE, 1, PLAN_ID)) == [ToRank(1, Committed(SAVE, WHERE))]
    assert two.at(0, ReportFailure(SAVE, FAILURE)) == [ToRank(0, Committed(SAVE, WHERE))]
    assert state_of(two) is CheckpointState.COMMITTED


# ---------------------------------------------------------------- a rank dies


@pytest.mark.parametrize("reason", ["killed", ""], ids=["death", "goodbye"])
@pytest.mark.parametrize("proposed", [False, True])
def test_a_rank_that_leaves_before_it_has_staged_fails_the_save(two: Coordinator, reason: str, proposed: bool) -> None:
    if proposed:
        two.at(0, propose(SAVE))
        two.at(1, propose(SAVE))
    else:
        two.staged(SAVE, 0)
    failure = the_failure(two.at(1, RankLeft(1, reason)))
    assert (failure.kind, failure.rank, failure.node) == ("RankLost", 1, "node-1")
    assert "rank 1 on node-1 left before it had staged step 100" in failure.message
    assert (reason or "it closed its client") in failure.message


def test_a_rank_that_dies_after_it_has_staged_fails_nothing(two: Coordinator) -> None:
    two.staged(SAVE, 0, 1)
    assert two.at(1, RankLeft(1, "killed")) == []
    assert two.persisted(SAVE, 0, 1) == [ToRank(0, AskCommit(SAVE, WHERE))]


def test_a_rank_that_dies_fails_only_the_saves_that_it_had_not_staged(two: Coordinator) -> None:
    two.staged(SAVE, 0, 1)
    two.staged(key(1), 0)
    actions = two.at(1, RankLeft(1, "killed"))
    assert aborts(actions) == {}
    assert sorted(aborts(actions, key(1))) == [0, 1]
    assert two.table.is_busy


def test_if_rank_0_died_before_it_was_asked_the_coordinator_commits_alone(two: Coordinator) -> None:
    two.staged(SAVE, 0, 1)
    two.at(0, RankLeft(0, "killed"))
    assert two.persisted(SAVE, 0, 1) == [PUBLISH]
    assert two.do(Published(SAVE)) == [ToRank(0, Committed(SAVE, WHERE)), ToRank(1, Committed(SAVE, WHERE))]


def test_if_rank_0_dies_after_it_was_asked_the_coordinator_commits_alone(two: Coordinator) -> None:
    two.complete(SAVE, 2)
    assert two.at(0, RankLeft(0, "killed")) == [PUBLISH]
    assert two.at(0, RankLeft(0, "killed")) == []


def test_if_every_rank_dies_after_staging_the_save_is_committed_once(two: Coordinator) -> None:
    two.staged(SAVE, 0, 1)
    two.at(0, RankLeft(0, "killed"))
    two.at(1, RankLeft(1, "killed"))
    assert two.persisted(SAVE, 1, 0) == [PUBLISH]


def test_a_restarted_job_leaves_the_staged_save_of_its_earlier_life_alone(two: Coordinator) -> None:
    two.staged(SAVE, 0, 1)
    two.says_hello(0, 2, incarnation=1)
    two.says_hello(1, 2, incarnation=1)
    assert two.persisted(SAVE, 0, 1) == [PUBLISH]


def test_a_save_that_waits_for_rank_0s_decision_is_committed_when_the_job_restarts(two: Coordinator) -> None:
    two.complete(SAVE, 2)
    assert PUBLISH in two.says_hello(1, 2, incarnation=1)


def test_an_earlier_lifes_save_gives_way_to_the_same_step_of_the_restarted_job(two: Coordinator) -> None:
    two.staged(SAVE, 0, 1)
    two.says_hello(0, 2, incarnation=1)
    two.says_hello(1, 2, incarnation=1)
    two.staged(key(0, session="0000000b"), 0)
    failure = the_failure(two.withdrawn(two.persisted(SAVE, 0, 1)))
    assert failure.kind == "Superseded"
    assert "step 100" in failure.message


def test_an_earlier_lifes_save_does_not_give_way_to_one_that_has_failed(two: Coordinator) -> None:
    two.staged(SAVE, 0, 1)
    two.says_hello(0, 2, incarnation=1)
    two.says_hello(1, 2, incarnation=1)
    two.at(0, ReportFailure(key(0, session="0000000b"), FAILURE))
    assert two.persisted(SAVE, 0, 1) == [PUBLISH]


def test_a_veto_before_the_death_stands(two: Coordinator) -> None:
    two.complete(SAVE, 2)
    two.at(0, DecideCommit(SAVE, False, "no"))
    assert two.at(0, RankLeft(0, "killed")) == []


# ---------------------------------------------------------------- lateness


def test_a_rank_that_does_not_stage_in_time_is_named_with_its_node() -> None:
    coordinator = Coordinator().joined(3)
    coordinator.staged(SAVE, 1)
    coordinator.now_s = STAGE_TIMEOUT_S
    assert coordinator.do(Tick()) == [ListShards(SAVE, DIRECTORY, 3, (0, 1, 2))]
    coordinator.now_s = STAGE_TIMEOUT_S + 1
    actions = coordinator.do(Tick())
    failures = aborts(actions)[1].failures
    assert [(failure.kind, failure.rank, failure.node) for failure in failures] == [
        ("RankLate", 0, "node-0"),
        ("RankLate", 2, "node-2"),
    ]
    assert failures[1].message == "rank 2 on node-2 has not staged step 100 after 601 s"
    assert sorted(aborts(actions)) == [0, 1, 2]
    assert coordinator.do(Tick()) == []


def test_the_stage_timeout_is_the_one_that_the_ranks_asked_for() -> None:
    coordinator = Coordinator().joined(2, stage_timeout_s=5.0)
    coordinator.at(0, propose(SAVE))
    coordinator.now_s = 6.0
    assert sorted(aborts(coordinator.do(Tick()))) == [0, 1]


def test_the_stage_timeout_runs_from_each_saves_own_beginning(two: Coordinator) -> None:
    two.staged(SAVE, 0)
    two.now_s = STAGE_TIMEOUT_S
    two.staged(key(1), 0)
    two.now_s = STAGE_TIMEOUT_S + 1
    actions = two.do(Tick())
    assert sorted(aborts(actions)) == [0, 1]
    assert aborts(actions, key(1)) == {}


def test_staged_shards_may_take_long_to_become_durable_but_not_for_ever(two: Coordinator) -> None:
    two.staged(SAVE, 0, 1)
    two.persisted(SAVE, 0)
    two.now_s = PERSIST_TIMEOUT_S
    assert two.do(Tick()) == [ListShards(SAVE, DIRECTORY, 2, (1,))]
    two.now_s += 1
    failure = the_failure(two.do(Tick()))
    assert (failure.kind, failure.rank) == ("RankLate", 1)
    assert "rank 1 on node-1 has not persisted step 100" in failure.message


def test_rank_0_may_not_think_about_a_commit_for_ever(two: Coordinator) -> None:
    two.complete(SAVE, 2)
    two.now_s = DECIDE_TIMEOUT_S
    assert two.do(Tick()) == []
    two.now_s += 1
    failure = the_failure(two.withdrawn(two.do(Tick())))
    assert "rank 0 on node-0 has not decided on the commit of step 100" in failure.message
    assert two.at(0, DecideCommit(SAVE, True)) == [ToRank(0, Aborted(SAVE, (failure,)))]


# ---------------------------------------------------------------- stray messages and bounds


@pytest.mark.parametrize(
    "message",
    [DecideCommit(SAVE, True), GlobalPlan(SAVE, (ITEMS, ITEMS)), ShardPersisted(SAVE, 1, 1)],
    ids=lambda message: type(message).__name__,
)
def test_a_message_out_of_order_asks_for_nothing(two: Coordinator, message: Message) -> None:
    assert two.at(0, message) == []


def test_a_message_without_a_save_is_ignored(two: Coordinator) -> None:
    assert two.at(0, Welcome(SESSION, "", "", "", ())) == []


def test_ended_saves_are_forgotten_but_no_open_one(two: Coordinator) -> None:
    two.staged(SAVE, 0)
    for seq in range(1, MAX_ENDED_ATTEMPTS + 20):
        two.at(0, ReportFailure(key(seq), FAILURE))
    assert len(two.table.attempts) <= MAX_ENDED_ATTEMPTS + 2
    assert state_of(two) is CheckpointState.OPEN


def test_a_save_that_was_forgotten_is_not_begun_again_by_a_late_message(two: Coordinator) -> None:
    two.committed(SAVE, 2)
    for seq in range(1, MAX_ENDED_ATTEMPTS + 20):
        two.at(0, ReportFailure(key(seq), FAILURE))
    assert (SESSION, 0) not in two.table.attempts
    two.at(0, ReportFailure(SAVE, FAILURE))
    two.at(0, DecideCommit(SAVE, True))
    assert (SESSION, 0) not in two.table.attempts


def test_the_story_of_a_save_tells_its_end_with_times(two: Coordinator) -> None:
    two.now_s = 1.0
    two.staged(SAVE, 0)
    two.now_s = 3.5
    two.at(1, ReportFailure(SAVE, FAILURE))
    story = two.table.attempts[SESSION, 0].story
    assert story == [
        "+0.000s rank 0 staged",
        "+2.500s aborted: rank 1 on node-1: no room on /data [StorageError]",
    ]


def test_a_long_story_keeps_its_beginning_and_its_end() -> None:
    coordinator = Coordinator().joined(60)
    coordinator.staged(SAVE, *range(60))
    story = coordinator.table.attempts[SESSION, 0].story
    assert len(story) == 40
    assert "rank 0 staged" in story[0]
    assert "rank 59 staged" in story[-1]


def test_a_rank_is_late_when_it_has_not_staged_or_persisted(two: Coordinator) -> None:
    two.staged(SAVE, 1)
    attempt = two.table.attempts[SESSION, 0]
    assert (attempt.unstaged_ranks, attempt.unpersisted_ranks) == ([0], [0, 1])
    two.staged(SAVE, 0)
    two.persisted(SAVE, 0)
    assert (attempt.unstaged_ranks, attempt.unpersisted_ranks) == ([], [1])


def test_rank_0_that_reconnects_is_asked_again_whether_to_commit(two: Coordinator) -> None:
    """The first question may have been lost with its connection; without another the save would end in a time-out."""
    two.complete(SAVE, 2)
    again = told(two.says_hello(0, 2, session=SESSION), 0)
    assert AskCommit(SAVE, f"{DIRECTORY}/step-100") in again
    assert AskCommit not in [type(message) for message in told(two.says_hello(1, 2, session=SESSION), 0)]


def test_rank_0_that_reconnects_is_not_asked_about_what_is_being_published(two: Coordinator) -> None:
    two.complete(SAVE, 2)
    two.at(0, DecideCommit(SAVE, True))
    assert AskCommit not in [type(message) for message in told(two.says_hello(0, 2, session=SESSION), 0)]


def test_a_failure_of_an_earlier_life_is_not_put_on_a_node_of_this_one(two: Coordinator) -> None:
    two.staged(SAVE, 0, 1)
    two.at(0, RankLeft(0, "killed"))
    two.at(1, RankLeft(1, "killed"))
    two.says_hello(0, 2, node="another-node")
    (answer, *_) = [action.message for action in two.at(1, ReportFailure(SAVE, FAILURE)) if isinstance(action, ToRank)]
    assert isinstance(answer, Aborted)
    assert answer.failures[0].node == ""


def test_a_rank_that_waits_for_the_plans_of_others_is_not_the_late_one(two: Coordinator) -> None:
    two.at(0, propose(SAVE))
    two.now_s += STAGE_TIMEOUT_S + 1
    (failure,) = aborts(two.do(Tick()))[0].failures
    assert failure.message.startswith("rank 1 on node-1 has not staged step 100")


def test_who_looks_through_the_directory_keeps_away_from_what_is_in_hand(two: Coordinator) -> None:
    """An elastic restart opens the directory anew while an attempt of the life before is being published, or has been
    given up while its files are still there."""
    two.committed(SAVE, 2)
    two.complete(key(1), 2)
    two.staged(key(2), 0, 1)
    two.at(0, ReportFailure(key(2), FAILURE))
    (order,) = of_type(two.at(0, hello(0, 2, pid=77, incarnation=1)), OpenDirectory)
    assert order.spare == (key(1).save_id, key(2).save_id)
