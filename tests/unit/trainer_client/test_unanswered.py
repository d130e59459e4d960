"""What a rank says again to a sidecar that has welcomed it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import FinalPlan, MakeGlobalPlan, Message, ReportFailure, ReportSkip, Resubmit, SubmitShard
from ckpt_trainer_client.unanswered import MAX_KEPT, Unanswered

SESSION = "0a1b2c3d"
PLAN = FinalPlan(SaveKey(SESSION, 0, 100), f"{SESSION}-p1", ())
FAILURE = FailureReport("RankLost", "rank 1 is gone")


def save(seq: int) -> SaveKey:
    return SaveKey(SESSION, seq, 100 * (seq + 1))


def submit(seq: int, slot: int = 0) -> SubmitShard:
    return SubmitShard(save(seq), 0, PLAN.plan_id, slot, 1, ())


def again(
    unanswered: Unanswered, plan_id: str = PLAN.plan_id, pending: Sequence[int] = (), held: Sequence[int] = ()
) -> list[Message]:
    """What is said: ``pending`` and ``held`` are numbers of saves."""
    return unanswered.to_say_again(plan_id, [save(seq) for seq in pending], lambda slot, seq: seq in held)


@pytest.fixture
def unanswered() -> Unanswered:
    return Unanswered()


def test_nothing_was_said_and_nothing_is_said_again(unanswered: Unanswered) -> None:
    assert again(unanswered, "") == []


def test_the_plan_is_brought_to_a_sidecar_that_does_not_have_it(unanswered: Unanswered) -> None:
    unanswered.planned(PLAN)
    assert again(unanswered, "") == [PLAN]
    assert again(unanswered, "another") == [PLAN]
    assert again(unanswered, PLAN.plan_id) == []


def test_only_the_newest_plan_is_brought_and_none_that_was_given_up(unanswered: Unanswered) -> None:
    unanswered.planned(PLAN)
    newer = replace(PLAN, plan_id=f"{SESSION}-p5")
    unanswered.planned(newer)
    assert again(unanswered, "") == [newer]
    unanswered.forget_plan()
    assert again(unanswered, "") == []


def test_the_order_to_plan_is_no_plan(unanswered: Unanswered) -> None:
    unanswered.planned(MakeGlobalPlan(save(0), ()))
    assert again(unanswered, "") == []


def test_what_was_handed_over_is_said_until_its_end_is_known(unanswered: Unanswered) -> None:
    unanswered.submitted(submit(0))
    assert again(unanswered, pending=[0]) == [Resubmit(submit(0))]
    assert again(unanswered, pending=[0]) == [Resubmit(submit(0))]  # a sidecar may die more than once
    assert again(unanswered) == []
    assert again(unanswered, pending=[0]) == []  # it has ended for good


def test_a_slot_that_was_not_given_back_is_asked_for_although_its_save_has_ended(unanswered: Unanswered) -> None:
    """SlotFreed died with the sidecar: nobody would ever free the slot."""
    unanswered.submitted(submit(0))
    assert again(unanswered, held=[0]) == [Resubmit(submit(0))]
    assert again(unanswered) == []


def test_two_saves_in_flight_are_said_in_their_order(unanswered: Unanswered) -> None:
    unanswered.submitted(submit(0))
    unanswered.submitted(submit(1, slot=1))
    assert again(unanswered, pending=[0, 1]) == [Resubmit(submit(0)), Resubmit(submit(1, slot=1))]
    assert again(unanswered, pending=[1]) == [Resubmit(submit(1, slot=1))]


@pytest.mark.parametrize("report", [ReportFailure(save(0), FAILURE), ReportSkip(save(0), "full")], ids=str)
def test_a_save_that_was_given_up_is_reported_until_the_coordinator_says_so(
    unanswered: Unanswered, report: ReportFailure | ReportSkip
) -> None:
    """The handle has failed long ago here; the other ranks would wait for this one."""
    unanswered.reported(report)
    assert again(unanswered) == [report]
    unanswered.ended(save(1))
    assert again(unanswered) == [report]
    unanswered.ended(save(0))
    assert again(unanswered) == []


def test_the_end_of_a_save_is_known_by_its_number_whatever_step_it_names(unanswered: Unanswered) -> None:
    """A failed argument is reported under step 0."""
    unanswered.reported(ReportFailure(replace(save(0), step=0), FAILURE))
    unanswered.ended(save(0))
    assert again(unanswered) == []


def test_the_plan_comes_first_then_shards_then_failures(unanswered: Unanswered) -> None:
    """A shard is refused by a sidecar that has no plan."""
    unanswered.reported(ReportFailure(save(1), FAILURE))
    unanswered.submitted(submit(0))
    unanswered.planned(PLAN)
    assert [type(message) for message in again(unanswered, "", pending=[0])] == [FinalPlan, Resubmit, ReportFailure]


def test_no_more_is_kept_than_can_be_in_flight(unanswered: Unanswered) -> None:
    count = MAX_KEPT + 10
    for seq in range(count):
        unanswered.submitted(submit(seq))
        unanswered.reported(ReportFailure(save(seq), FAILURE))
    said = again(unanswered, pending=range(count))
    newest = list(range(10, count))
    assert [message.submit.save.seq for message in said if isinstance(message, Resubmit)] == newest
    assert [message.save.seq for message in said if isinstance(message, ReportFailure)] == newest
