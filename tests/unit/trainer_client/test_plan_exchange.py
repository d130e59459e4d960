"""Agreeing on a plan: what is sent, what is waited for, and what ends it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import Aborted, FinalPlan, GlobalPlan, MakeGlobalPlan, Message, ProposePlan, ReportFailure
from ckpt_trainer_client import plan_exchange
from ckpt_trainer_client.errors import CheckpointFailed, PlanningError, SaveSkipped, UnsupportedLeaf
from ckpt_trainer_client.plan_exchange import PlanExchange
from ckpt_trainer_client.planning import PlanningState, SavePlanned
from testkit.plans import PLAN_ID, RowShard, save_key, states_of_ranks

SAVE = save_key(seq=3)
REPORT = FailureReport("RankLost", "it is gone", rank=1)
PATIENCE_S = 30.0


class Coordinator:
    """Answers what a rank sends, on the rank's own thread: no time passes."""

    def __init__(self, answer: Callable[[PlanExchange, Message], None] = lambda exchange, message: None) -> None:
        self.sent: list[Message] = []
        self.exchange = PlanExchange(self._send, 60.0)
        self._answer = answer

    def _send(self, message: Message) -> None:
        self.sent.append(message)
        self._answer(self.exchange, message)

    def exchange_for(self, state: PlanningState, save: SaveKey = SAVE, changed: tuple[str, ...] = ()) -> SavePlanned:
        return self.exchange.exchange(save, state, changed)


def alone(exchange: PlanExchange, message: Message) -> None:
    """A coordinator in a world of one rank."""
    match message:
        case ProposePlan(save=save, items=items):
            exchange.on_message(MakeGlobalPlan(save, (items,)))
        case GlobalPlan(save=save, plans=plans):
            exchange.on_message(FinalPlan(save, PLAN_ID, plans[0], ("mind the gap",)))


def state_of(state_dict: dict[str, Any]) -> PlanningState:
    return PlanningState(state_dict, None, is_coordinator=True)


# ---------------------------------------------------------------- agreement


def test_rank_0_proposes_makes_the_global_plan_and_gets_the_final_one(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = Coordinator(alone)
    state = state_of({"w": torch.ones(2), "step": 1})
    with caplog.at_level(logging.WARNING):
        planned = coordinator.exchange_for(state, changed=("w",))
    proposed, made = coordinator.sent
    assert isinstance(proposed, ProposePlan)
    assert (proposed.save, proposed.changed_keys, len(proposed.byte_digests)) == (SAVE, ("w",), 1)
    assert proposed.items == state.local_plan()[0]
    assert isinstance(made, GlobalPlan)
    assert planned.plan_id == PLAN_ID
    assert planned.items == made.plans[0]
    assert "mind the gap" in caplog.text


def test_another_rank_gets_what_rank_0_has_made_for_it() -> None:
    states = [PlanningState(state, None, is_coordinator=rank == 0) for rank, state in enumerate(states_of_ranks(2))]
    proposals = [state.local_plan()[0] for state in states]
    final = states[0].global_plan(proposals)

    def remote(exchange: PlanExchange, message: Message) -> None:
        if isinstance(message, ProposePlan):
            exchange.on_message(FinalPlan(message.save, PLAN_ID, final[1]))

    coordinator = Coordinator(remote)
    assert coordinator.exchange_for(states[1]).items == final[1]
    assert [type(message) for message in coordinator.sent] == [ProposePlan]


def test_messages_of_other_saves_are_not_taken() -> None:
    def confused(exchange: PlanExchange, message: Message) -> None:
        if isinstance(message, ProposePlan):
            earlier, other_life = save_key(seq=2), SaveKey("ffffffff", 3, 5)
            for save in (earlier, other_life):
                exchange.on_message(FinalPlan(save, "wrong", ()))
                exchange.on_message(MakeGlobalPlan(save, ()))
        alone(exchange, message)

    coordinator = Coordinator(confused)
    assert coordinator.exchange_for(state_of({"a": 1})).plan_id == PLAN_ID
    assert [type(message) for message in coordinator.sent] == [ProposePlan, GlobalPlan]


def test_the_next_save_is_a_new_exchange() -> None:
    coordinator = Coordinator(alone)
    for seq in range(3):
        coordinator.exchange_for(state_of({"a": 1}), save_key(seq=seq))
    assert [message.save.seq for message in coordinator.sent] == [0, 0, 1, 1, 2, 2]


# ---------------------------------------------------------------- given up


class ToldCondition(threading.Condition):
    """Says when somebody begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.release()
        return super().wait(PATIENCE_S)


def waiting(coordinator: Coordinator, trainer: ThreadPoolExecutor) -> Future[SavePlanned]:
    told = coordinator.exchange._arrived = ToldCondition()
    future = trainer.submit(coordinator.exchange_for, state_of({"a": 1}))
    assert told.waits.acquire(timeout=PATIENCE_S)
    return future


def test_an_attempt_that_is_given_up_ends_the_wait() -> None:
    coordinator = Coordinator()
    with ThreadPoolExecutor(1) as trainer:
        future = waiting(coordinator, trainer)
        coordinator.exchange.on_message(Aborted(SAVE, (REPORT,)))
        with pytest.raises(CheckpointFailed, match="it is gone") as raised:
            future.result(PATIENCE_S)
    assert raised.value.failures == {1: REPORT}


def test_the_plan_may_come_while_it_is_waited_for() -> None:
    coordinator = Coordinator()
    [final] = state_of({"a": 1}).global_plan([state_of({"a": 1}).local_plan()[0]])
    with ThreadPoolExecutor(1) as trainer:
        future = waiting(coordinator, trainer)
        coordinator.exchange.on_message(FinalPlan(SAVE, PLAN_ID, final))
        assert future.result(PATIENCE_S).items == final


def test_a_plan_counts_also_if_its_save_was_given_up_since() -> None:
    """The sidecar prepares regions for it: a next save that fills them by the plan before would be in its way."""
    [final] = state_of({"a": 1}).global_plan([state_of({"a": 1}).local_plan()[0]])

    def given_up_at_once(exchange: PlanExchange, message: Message) -> None:
        exchange.on_message(FinalPlan(SAVE, PLAN_ID, final))
        exchange.on_message(Aborted(SAVE, (REPORT,)))

    coordinator = Coordinator(given_up_at_once)
    assert coordinator.exchange_for(state_of({"a": 1})).plan_id == PLAN_ID
    with pytest.raises(CheckpointFailed, match="it is gone"):
        coordinator.exchange.raise_if_aborted(SAVE)


def test_an_attempt_that_was_given_up_before_this_rank_began_it_is_not_begun() -> None:
    coordinator = Coordinator()
    coordinator.exchange.on_message(Aborted(SAVE, (REPORT,)))
    for _ in range(2):
        with pytest.raises(CheckpointFailed, match="it is gone"):
            coordinator.exchange.raise_if_aborted(SAVE)
    with pytest.raises(CheckpointFailed):
        coordinator.exchange_for(state_of({"a": 1}))


def test_a_skipped_attempt_is_told_as_such() -> None:
    coordinator = Coordinator()
    coordinator.exchange.on_message(Aborted(SAVE, (REPORT,), skipped=True))
    with pytest.raises(SaveSkipped):
        coordinator.exchange.raise_if_aborted(SAVE)


def test_only_the_attempt_that_was_given_up_is_concerned() -> None:
    exchange = Coordinator().exchange
    exchange.on_message(Aborted(SAVE, (REPORT,)))
    exchange.raise_if_aborted(save_key(seq=2))
    exchange.raise_if_aborted(save_key(seq=4))


def test_what_was_given_up_long_ago_is_forgotten() -> None:
    exchange = Coordinator().exchange
    for seq in range(100):
        exchange.on_message(Aborted(save_key(seq=seq), (REPORT,)))
    exchange.raise_if_aborted(save_key(seq=100))
    assert exchange._aborted == {}


# ---------------------------------------------------------------- failures


def test_a_coordinator_that_does_not_answer_is_named_with_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator()
    now_s = [1000.0]

    def wait(timeout: float | None = None) -> bool:
        assert timeout is not None
        now_s[0] += max(timeout, 0.0)
        return False

    monkeypatch.setattr(plan_exchange.time, "monotonic", lambda: now_s[0])
    coordinator.exchange._arrived.wait = wait  # type: ignore[method-assign]
    bound = 60.0 + plan_exchange.GRACE_S
    with pytest.raises(CheckpointFailed, match=f"no plan for step 5 after {bound:.0f} s: the coordinator") as raised:
        coordinator.exchange_for(state_of({"a": 1}))
    assert [failure.kind for failure in raised.value.failures.values()] == ["PlanTimeout"]
    assert now_s[0] == 1000.0 + bound


def test_a_value_that_cannot_be_saved_is_found_before_anything_is_sent() -> None:
    coordinator = Coordinator(alone)
    with pytest.raises(UnsupportedLeaf, match="hook"):
        coordinator.exchange_for(state_of({"hook": lambda: None}))
    assert coordinator.sent == []


def test_a_global_plan_that_cannot_be_made_is_reported_to_all() -> None:
    shards = [{"w": RowShard.of(torch.ones(2, 3), first_row, 5)} for first_row in (0, 2)]

    def two_that_do_not_fit(exchange: PlanExchange, message: Message) -> None:
        if isinstance(message, ProposePlan):
            plans = tuple(state_of(shard).local_plan()[0] for shard in shards)
            exchange.on_message(MakeGlobalPlan(message.save, plans))

    coordinator = Coordinator(two_that_do_not_fit)
    with pytest.raises(PlanningError, match="the ranks have 12 of its 15 elements"):
        coordinator.exchange_for(state_of(shards[0]))
    _, report = coordinator.sent
    assert isinstance(report, ReportFailure)
    assert (report.save, report.failure.kind) == (SAVE, "PlanningError")


def test_a_final_plan_of_other_items_is_refused() -> None:
    other = state_of({"b": 2}).local_plan()[0]

    def wrong(exchange: PlanExchange, message: Message) -> None:
        exchange.on_message(FinalPlan(SAVE, PLAN_ID, other))

    planned = Coordinator(wrong).exchange_for(state_of({"a": 1}))
    with pytest.raises((UnsupportedLeaf, ValueError), match="b"):
        state_of({"a": 1}).resolve_bytes(planned.others[0])


# ---------------------------------------------------------------- no sidecar

NO_SIDECAR = FailureReport("SidecarLost", "no sidecar ran for 120 s", "see the sidecar's log", 1, "node-a")


def test_without_a_sidecar_a_save_that_needs_a_plan_fails_at_once_and_names_what_has_changed() -> None:
    coordinator = Coordinator(alone)
    coordinator.exchange.serve(NO_SIDECAR)
    with pytest.raises(CheckpointFailed) as raised:
        coordinator.exchange_for(state_of({"a": 1}), changed=("a", "b"))
    failure = raised.value.failures[1]
    assert failure.kind == "SidecarLost"
    assert (
        "step 5 cannot be saved without a sidecar: its state dict needs a new plan (changed: a, b)" in failure.message
    )
    assert "no sidecar ran for 120 s" in failure.message
    assert coordinator.sent == []


def test_a_save_that_waits_for_a_plan_fails_when_the_sidecar_is_lost() -> None:
    coordinator = Coordinator()
    with ThreadPoolExecutor(1) as trainer:
        future = waiting(coordinator, trainer)
        coordinator.exchange.serve(NO_SIDECAR)
        with pytest.raises(CheckpointFailed, match="cannot be saved without a sidecar"):
            future.result(PATIENCE_S)


def test_when_there_is_a_sidecar_again_plans_are_made_again() -> None:
    coordinator = Coordinator(alone)
    coordinator.exchange.serve(NO_SIDECAR)
    coordinator.exchange.serve(None)
    assert coordinator.exchange_for(state_of({"a": 1})).plan_id == PLAN_ID
