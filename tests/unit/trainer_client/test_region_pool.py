"""The slots of a rank: who may fill one, how long that waits, and what ends a wait early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from ckpt_proto.errors import FailureReport, NotEnoughSharedMemory, RegionError
from ckpt_proto.messages import RegionReady, RegionRefused
from ckpt_trainer_client.errors import CheckpointFailed, RegionsExhausted, SaveSkipped
from ckpt_trainer_client.region_pool import PREPARE_TIMEOUT_S, RegionPool, RegionRequest

PLAN = "0a1b2c3d-p1"
PATIENCE_S = 30.0


class FakeClock:
    """Goes on only when a wait has been asked for and there is nobody who could end it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class ToldCondition(threading.Condition):
    """Says when somebody begins to wait. Whoever then takes the lock is certain that they do."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Semaphore(0)
        self.clock: FakeClock | None = None

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.release()
        if self.clock is not None:  # nobody else is there: time goes by
            assert timeout is not None
            self.clock.now_s += max(timeout, 0.0)
            return False
        return super().wait(PATIENCE_S)


@dataclass
class Sidecar:
    """The pool, and what it has asked the sidecar for."""

    pool: RegionPool
    told: ToldCondition
    clock: FakeClock
    asked: list[tuple[int, int]] = field(default_factory=list)
    sealed: list[int] = field(default_factory=list)
    given_up: CheckpointFailed | None = None
    saves: int = 0

    def request(self, policy: str = "wait", step: int = 5, timeout_s: float = 60.0, plan: str = PLAN) -> RegionRequest:
        seq = self.saves = self.saves + 1
        return RegionRequest(
            plan, step, policy, timeout_s, seq, self.check, lambda slot, capacity: self.asked.append((slot, capacity))
        )

    def check(self) -> None:
        if self.given_up is not None:
            raise self.given_up

    def seal(self, index: int) -> None:
        """What is filled in is whole."""
        request = RegionRequest(PLAN, 5, "wait", 60.0, 0, self.check, lambda *asked: self.asked.append(asked))
        self.pool.seal(index, request, lambda: self.sealed.append(index), lambda: self.sealed.remove(index))

    def fill_all(self) -> list[RegionReady]:
        """Every slot is ready, taken and sealed."""
        taken = []
        for index in range(len(self.pool._slots)):
            self.pool.on_ready(ready(index))
            taken.append(self.pool.acquire(self.request(step=index)))
            self.seal(index)
        return taken


def ready(slot: int = 0, generation: int = 1, plan: str = PLAN, capacity: int = 4096) -> RegionReady:
    return RegionReady(plan, slot, generation, f"/dev/shm/slot-{slot}", 8192, (), 0, capacity)


def refused(slot: int = 0, plan: str = PLAN, kind: str = "NotEnoughSharedMemory") -> RegionRefused:
    return RegionRefused(plan, slot, FailureReport(kind, "100 bytes free, 8192 needed"))


def sidecar_of(slots: int) -> Sidecar:
    clock, told = FakeClock(), ToldCondition()
    pool = RegionPool(slots, clock)
    pool._changed = told
    return Sidecar(pool, told, clock)


@pytest.fixture
def two() -> Sidecar:
    return sidecar_of(2)


@pytest.fixture
def one() -> Sidecar:
    return sidecar_of(1)


@pytest.fixture
def trainer() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def alone(sidecar: Sidecar) -> Sidecar:
    """From now on a wait is never ended by anybody, so it times out at once by the clock."""
    sidecar.told.clock = sidecar.clock
    return sidecar


def waiting(
    sidecar: Sidecar, trainer: ThreadPoolExecutor, call: Callable[[], RegionReady] | None = None
) -> Future[RegionReady]:
    """A thread that waits for a region; returns when it does."""
    future = trainer.submit(call or (lambda: sidecar.pool.acquire(sidecar.request())))
    assert sidecar.told.waits.acquire(timeout=PATIENCE_S)
    return future


# ---------------------------------------------------------------- a free slot


def test_a_prepared_slot_is_taken_at_once(two: Sidecar) -> None:
    two.pool.on_ready(ready(1))
    assert two.pool.acquire(two.request()) == ready(1)
    two.pool.on_ready(ready(0))
    assert two.pool.acquire(two.request()) == ready(0)
    assert two.asked == []


def test_a_slot_prepared_for_another_plan_is_not_taken(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    one.pool.on_ready(ready(plan="0a1b2c3d-p2"))
    future = waiting(one, trainer)
    one.pool.on_ready(ready(generation=2))
    assert future.result(PATIENCE_S) == ready(generation=2)


def test_a_slot_is_waited_for_until_it_is_prepared(two: Sidecar, trainer: ThreadPoolExecutor) -> None:
    future = waiting(two, trainer)
    two.pool.on_ready(ready(1))
    assert future.result(PATIENCE_S) == ready(1)


def test_what_was_discarded_is_free_again(one: Sidecar) -> None:
    one.pool.on_ready(ready())
    taken = one.pool.acquire(one.request())
    one.pool.discard(0)
    assert one.pool.acquire(one.request()) == taken


def test_a_freed_slot_is_taken_with_the_region_it_has(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    [taken] = one.fill_all()
    future = waiting(one, trainer)
    one.pool.on_freed(0, taken.generation, 1)
    assert future.result(PATIENCE_S) == taken


def test_a_slot_that_is_prepared_anew_instead_of_freed_is_free(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    one.fill_all()
    future = waiting(one, trainer)
    one.pool.on_ready(ready(generation=2))
    assert future.result(PATIENCE_S) == ready(generation=2)


@pytest.mark.parametrize("generation", [0, 2, 7])
def test_freed_of_another_generation_is_ignored(one: Sidecar, generation: int) -> None:
    one.fill_all()
    one.pool.on_freed(0, generation, 1)
    assert one.pool.all_busy


def test_freed_is_ignored_while_the_rank_fills_or_the_slot_is_free(one: Sidecar) -> None:
    one.pool.on_freed(0, 1, 1)
    one.pool.on_ready(ready())
    one.pool.on_freed(0, 1, 1)
    one.pool.acquire(one.request())
    one.pool.on_freed(0, 1, 1)
    one.seal(0)  # it was being filled all the time
    assert one.pool.all_busy


def test_freed_of_an_earlier_save_does_not_free_what_was_sealed_since(one: Sidecar) -> None:
    """A restarted sidecar may say again that it has let go of a slot, which its rank has filled once more meanwhile."""
    one.fill_all()
    one.pool.on_freed(0, 1, 1)
    one.pool.acquire(one.request())
    one.seal(0)
    one.pool.on_freed(0, 1, 1)
    assert one.pool.all_busy
    one.pool.on_freed(0, 1, 2)
    assert not one.pool.all_busy


def test_a_region_that_is_said_again_changes_nothing(one: Sidecar) -> None:
    """Not who has it: a restarted sidecar says which regions it has found, and this rank may be at it."""
    one.pool.on_ready(ready())
    one.pool.acquire(one.request())
    one.pool.on_ready(ready())
    one.seal(0)
    one.pool.on_ready(ready())
    assert one.pool.all_busy


def test_a_slot_is_held_for_the_save_that_it_was_sealed_for(two: Sidecar) -> None:
    assert not two.pool.holds(0, -1)  # never used
    two.pool.on_ready(ready(0))
    two.pool.acquire(two.request())
    assert not two.pool.holds(0, 1)  # still being filled
    two.seal(0)
    assert two.pool.holds(0, 1)
    assert not two.pool.holds(0, 2)
    assert not two.pool.holds(1, 1)
    two.pool.on_freed(0, 1, 1)
    assert not two.pool.holds(0, 1)


def test_only_what_is_being_filled_is_sealed_or_discarded(one: Sidecar) -> None:
    one.pool.on_ready(ready())
    with pytest.raises(RegionError, match="slot 0"):
        one.seal(0)
    one.pool.acquire(one.request())
    one.seal(0)
    with pytest.raises(RegionError, match="slot 0"):
        one.seal(0)
    one.pool.discard(0)
    assert one.pool.all_busy


def test_messages_for_slots_of_an_earlier_client_are_ignored(one: Sidecar) -> None:
    """The rank's client before this one may have had more."""
    one.pool.on_ready(ready(3))
    one.pool.on_refused(refused(3))
    one.pool.on_freed(3, 1, 1)
    one.pool.on_ready(ready(0))
    assert one.pool.acquire(one.request()) == ready(0)


# ---------------------------------------------------------------- no slot is free


def test_waiting_is_bounded_and_names_the_steps_that_hold_the_slots(two: Sidecar) -> None:
    two.fill_all()
    alone(two)
    with pytest.raises(
        RegionsExhausted, match=r"for step 9 within 60 s: slot 0 sealed \(step 0\), slot 1 sealed \(step 1\)"
    ):
        two.pool.acquire(two.request(step=9))
    assert two.clock.now_s == 60.0


def test_a_region_that_is_never_prepared_is_no_back_pressure(two: Sidecar) -> None:
    """The bound of the policy is for slots that are being written; making the first region may take longer."""
    alone(two)
    with pytest.raises(
        RegionError, match=f"no region for step 5 within {PREPARE_TIMEOUT_S:g} s: slot 0 free, slot 1 free"
    ):
        two.pool.acquire(two.request(timeout_s=1.0))
    assert two.clock.now_s == PREPARE_TIMEOUT_S


def test_a_wait_that_is_interrupted_in_vain_does_not_begin_anew(one: Sidecar) -> None:
    """The bound is on the whole wait and not on each part of it."""
    one.fill_all()
    waits: list[float | None] = []

    def wait(timeout: float | None = None) -> bool:
        waits.append(timeout)
        one.clock.now_s += 25.0
        return timeout is not None and timeout > 0

    one.told.wait = wait  # type: ignore[method-assign]
    with pytest.raises(RegionsExhausted):
        one.pool.acquire(one.request())
    assert waits[:3] == [60.0, 35.0, 10.0]
    assert waits[3] is not None
    assert waits[3] <= 0
    assert len(waits) == 4


def test_skip_does_not_wait(two: Sidecar) -> None:
    two.fill_all()
    with pytest.raises(SaveSkipped, match="no free region: slot 0 sealed"):
        two.pool.acquire(two.request("skip", step=9))
    assert two.told.waits.acquire(blocking=False) is False


def test_skip_waits_for_a_slot_that_is_being_prepared(two: Sidecar, trainer: ThreadPoolExecutor) -> None:
    """No slot has ever been used: this is the first save, and not back-pressure."""
    future = waiting(two, trainer, lambda: two.pool.acquire(two.request("skip")))
    two.pool.on_ready(ready(0))
    assert future.result(PATIENCE_S) == ready(0)


def test_skip_takes_the_slot_that_is_free(two: Sidecar) -> None:
    two.fill_all()
    two.pool.on_freed(1, 1, 2)
    assert two.pool.acquire(two.request("skip")) == ready(1)


def test_busy_means_that_every_slot_is_with_the_sidecar(two: Sidecar) -> None:
    assert not two.pool.all_busy
    two.pool.on_ready(ready(0))
    two.pool.on_ready(ready(1))
    two.pool.acquire(two.request())
    two.seal(0)
    assert not two.pool.all_busy
    two.pool.acquire(two.request())
    assert not two.pool.all_busy
    two.seal(1)
    assert two.pool.all_busy


# ---------------------------------------------------------------- refused


def test_a_refusal_ends_the_wait_with_its_numbers(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    future = waiting(one, trainer)
    assert one.asked == [(0, 0)]
    one.pool.on_refused(refused())
    with pytest.raises(NotEnoughSharedMemory, match="100 bytes free, 8192 needed"):
        future.result(PATIENCE_S)


def test_another_kind_of_refusal_is_a_region_error(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    one.pool.on_refused(refused(kind="FrameError"))
    future = waiting(one, trainer)
    one.pool.on_refused(refused(kind="FrameError"))
    with pytest.raises(RegionError, match="FrameError") as raised:
        future.result(PATIENCE_S)
    assert type(raised.value) is RegionError


def test_one_refused_slot_is_not_the_end_of_the_others(two: Sidecar, trainer: ThreadPoolExecutor) -> None:
    two.pool.on_refused(refused(1))
    two.pool.on_ready(ready(0))
    assert two.pool.acquire(two.request()) == ready(0)
    two.seal(0)
    future = waiting(two, trainer)
    two.pool.on_refused(refused(1))
    two.pool.on_freed(0, 1, 1)
    assert future.result(PATIENCE_S) == ready(0)


def test_a_refusal_of_an_earlier_plan_does_not_count(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    one.pool.on_refused(refused(plan="0a1b2c3d-p0"))
    future = waiting(one, trainer)
    assert one.asked == [(0, 0)]
    one.pool.on_ready(ready())
    assert future.result(PATIENCE_S) == ready()


def test_a_later_save_asks_for_the_refused_slot_again(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    """The room in shared memory may be there by now: one refusal is not the end of all saves."""
    one.pool.on_refused(refused())
    future = waiting(one, trainer)
    assert [slot for slot, _ in one.asked] == [0]
    one.pool.on_ready(ready())
    assert future.result(PATIENCE_S) == ready()


def refuse_and_fail(sidecar: Sidecar, trainer: ThreadPoolExecutor, step: int) -> None:
    future = waiting(sidecar, trainer, lambda: sidecar.pool.acquire(sidecar.request(step=step)))
    sidecar.pool.on_refused(refused())
    with pytest.raises(NotEnoughSharedMemory):
        future.result(PATIENCE_S)


def test_each_save_asks_once(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    one.pool.on_refused(refused())
    for step in (5, 6, 7):
        refuse_and_fail(one, trainer, step)
    assert [slot for slot, _ in one.asked] == [0, 0, 0]


def test_the_same_step_tried_again_asks_again(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    one.pool.on_refused(refused())
    refuse_and_fail(one, trainer, 5)
    refuse_and_fail(one, trainer, 5)
    assert [slot for slot, _ in one.asked] == [0, 0]


def test_skip_does_not_wait_for_a_slot_that_is_refused(two: Sidecar, trainer: ThreadPoolExecutor) -> None:
    two.pool.on_refused(refused(1))
    two.pool.on_ready(ready(0))
    two.pool.acquire(two.request(step=1))
    two.seal(0)
    assert two.pool.all_busy
    future = waiting(two, trainer, lambda: two.pool.acquire(two.request("skip")))
    two.pool.on_refused(refused(1))
    with pytest.raises(SaveSkipped):
        future.result(PATIENCE_S)


# ---------------------------------------------------------------- growing


def take(sidecar: Sidecar) -> RegionReady:
    sidecar.pool.on_ready(ready())
    return sidecar.pool.acquire(sidecar.request())


def test_a_slot_is_grown_while_it_stays_taken(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    taken = take(one)
    future = waiting(one, trainer, lambda: one.pool.grow(taken, one.request(), 9000))
    assert one.asked == [(0, 9000)]
    one.pool.on_ready(ready(generation=2, capacity=9000))
    assert future.result(PATIENCE_S) == ready(generation=2, capacity=9000)
    one.seal(0)  # still this rank's


def test_an_answer_that_comes_at_once_is_not_missed(one: Sidecar) -> None:
    taken = take(one)
    grown = ready(generation=2, capacity=9000)
    request = RegionRequest(PLAN, 5, "wait", 60.0, 1, lambda: None, lambda slot, capacity: one.pool.on_ready(grown))
    assert one.pool.grow(taken, request, 9000) == grown


def test_a_slot_that_cannot_be_grown_says_why(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    taken = take(one)
    future = waiting(one, trainer, lambda: one.pool.grow(taken, one.request(), 9000))
    one.pool.on_refused(refused())
    with pytest.raises(NotEnoughSharedMemory, match="100 bytes free"):
        future.result(PATIENCE_S)
    one.pool.discard(0)


def test_growing_is_bounded(one: Sidecar) -> None:
    taken = take(alone(one))
    with pytest.raises(RegionError, match=rf"for step 5 was not grown .*9000.* within {PREPARE_TIMEOUT_S:g} s"):
        one.pool.grow(taken, one.request(), 9000)
    assert one.clock.now_s == PREPARE_TIMEOUT_S


def test_a_restarted_sidecar_is_asked_to_grow_once_more(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    """The request may have died with the sidecar that it was sent to."""
    taken = take(one)
    future = waiting(one, trainer, lambda: one.pool.grow(taken, one.request(), 9000))
    one.pool.resume()
    assert one.told.waits.acquire(timeout=PATIENCE_S)
    asked = list(one.asked)
    assert len(asked) > 1
    assert set(asked) == {(0, 9000)}
    one.pool.wake()  # nothing was restarted
    assert one.told.waits.acquire(timeout=PATIENCE_S)
    assert one.asked == asked
    one.pool.on_ready(ready(generation=2, capacity=9000))
    assert future.result(PATIENCE_S).generation == 2


# ---------------------------------------------------------------- what ends a wait early


def test_a_broken_link_ends_every_wait(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    one.fill_all()
    future = waiting(one, trainer)
    one.pool.interrupt("the link is broken")
    with pytest.raises(RegionError, match="the link is broken"):
        future.result(PATIENCE_S)
    with pytest.raises(RegionError, match="the link is broken"):
        one.pool.acquire(one.request())
    one.pool.interrupt("")
    one.pool.on_freed(0, 1, 1)
    assert one.pool.acquire(one.request()) == ready()


def test_a_broken_link_ends_growing(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    taken = take(one)
    future = waiting(one, trainer, lambda: one.pool.grow(taken, one.request(), 9000))
    one.pool.interrupt("the link is broken")
    with pytest.raises(RegionError, match="the link is broken"):
        future.result(PATIENCE_S)


def give_up(sidecar: Sidecar) -> None:
    sidecar.given_up = CheckpointFailed(5, [FailureReport("RankLost", "rank 1 is gone", rank=1)])
    sidecar.pool.wake()


def test_an_attempt_that_is_given_up_ends_its_wait(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    one.fill_all()
    future = waiting(one, trainer)
    give_up(one)
    with pytest.raises(CheckpointFailed, match="rank 1 is gone"):
        future.result(PATIENCE_S)


def test_an_attempt_that_is_given_up_ends_its_growing(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    taken = take(one)
    future = waiting(one, trainer, lambda: one.pool.grow(taken, one.request(), 9000))
    give_up(one)
    with pytest.raises(CheckpointFailed, match="rank 1 is gone"):
        future.result(PATIENCE_S)


def test_an_attempt_that_was_given_up_takes_no_slot(one: Sidecar) -> None:
    one.pool.on_ready(ready())
    give_up(one)
    with pytest.raises(CheckpointFailed):
        one.pool.acquire(one.request())
    one.given_up = None
    assert one.pool.acquire(one.request()) == ready()


# ---------------------------------------------------------------- another sidecar


def test_after_a_reset_no_region_is_known(two: Sidecar, trainer: ThreadPoolExecutor) -> None:
    two.fill_all()
    two.pool.reset()
    assert not two.pool.all_busy
    future = waiting(two, trainer)
    two.pool.on_freed(0, 1, 1)  # of the old life
    two.pool.on_ready(ready(1))
    assert future.result(PATIENCE_S) == ready(1)


def test_after_a_reset_growing_is_given_up(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    taken = take(one)
    future = waiting(one, trainer, lambda: one.pool.grow(taken, one.request(), 9000))
    one.pool.reset()
    give_up(one)
    with pytest.raises(CheckpointFailed):
        future.result(PATIENCE_S)


def test_discarding_after_a_reset_does_nothing(one: Sidecar) -> None:
    """The error that made the trainer discard is the one to be told, and not this."""
    take(one)
    one.pool.reset()
    one.pool.discard(0)
    one.pool.on_ready(ready())
    assert one.pool.acquire(one.request()) == ready()


def test_what_is_prepared_for_another_plan_is_asked_for_once(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    """The sidecar leaves it alone until then; a sidecar that was restarted may have lost the question."""
    one.pool.on_ready(ready())
    future = waiting(one, trainer, lambda: one.pool.acquire(one.request(plan="p2")))
    assert one.asked == [(0, 0)]
    one.pool.wake()
    assert one.told.waits.acquire(timeout=PATIENCE_S)
    assert one.asked == [(0, 0)]
    one.pool.resume()
    assert one.told.waits.acquire(timeout=PATIENCE_S)
    one.pool.on_ready(ready(generation=2, plan="p2"))
    assert future.result(PATIENCE_S).generation == 2
    assert one.asked == [(0, 0), (0, 0)]


def test_a_region_that_only_an_earlier_client_of_the_rank_knew_is_asked_for(
    one: Sidecar, trainer: ThreadPoolExecutor
) -> None:
    """The sidecar holds it for ready, and tells this client nothing by itself."""
    future = waiting(one, trainer)
    assert one.asked == [(0, 0)]
    one.pool.on_ready(ready(generation=2))
    assert future.result(PATIENCE_S).generation == 2


def test_what_is_being_persisted_for_another_plan_is_not_asked_for(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    """It is the sidecar's, which prepares it anew when it has been written."""
    one.fill_all()
    future = waiting(one, trainer, lambda: one.pool.acquire(one.request(plan="p2")))
    one.pool.on_ready(ready(generation=2, plan="p2"))
    assert future.result(PATIENCE_S).generation == 2
    assert one.asked == []


def test_a_save_that_was_given_up_is_not_sealed(one: Sidecar) -> None:
    take(one)
    one.given_up = CheckpointFailed(5, [FailureReport("RankLate", "late")])
    with pytest.raises(CheckpointFailed):
        one.seal(0)
    assert one.sealed == []
    one.pool.discard(0)
    assert not one.pool.all_busy


def test_the_seal_of_a_save_that_is_given_up_later_is_broken_once(two: Sidecar) -> None:
    """Its slot stays the sidecar's: it may be reading it."""
    two.fill_all()
    two.pool.break_seal(1)
    two.pool.break_seal(1)
    assert two.sealed == [1]
    assert two.pool.all_busy
    two.pool.on_freed(0, 1, 1)
    two.pool.break_seal(1)
    assert two.sealed == [1]


def test_what_is_filled_anew_is_not_broken_for_the_save_before(one: Sidecar) -> None:
    one.fill_all()
    one.pool.on_freed(0, 1, 1)
    take(one)
    one.pool.break_seal(1)
    one.seal(0)
    assert one.sealed == [0, 0]


def test_sealing_after_a_reset_is_refused(one: Sidecar) -> None:
    """What was filled in belongs to a file that nobody has any more."""
    take(one)
    one.pool.reset()
    with pytest.raises(RegionError, match="the sidecar was restarted while slot 0 was being filled"):
        one.seal(0)


# ---------------------------------------------------------------- no sidecar

NO_SIDECAR = FailureReport("SidecarLost", "no sidecar ran for 120 s", "see the sidecar's log", 0, "node-a")


def test_without_a_sidecar_a_prepared_region_is_filled_again(two: Sidecar, trainer: ThreadPoolExecutor) -> None:
    two.fill_all()
    two.pool.serve(NO_SIDECAR)
    future = waiting(two, trainer)
    two.pool.on_freed(1, 1, 2)
    assert future.result(PATIENCE_S).slot == 1


def test_without_a_sidecar_no_region_is_waited_for_that_nobody_will_prepare(two: Sidecar) -> None:
    two.pool.serve(NO_SIDECAR)
    with pytest.raises(
        CheckpointFailed, match="step 5 cannot be saved without a sidecar: no region is prepared"
    ) as why:
        alone(two).pool.acquire(two.request())
    assert why.value.failures[0].kind == "SidecarLost"
    assert two.clock.now_s == 0.0


def test_without_a_sidecar_regions_of_another_plan_are_of_no_use(two: Sidecar) -> None:
    two.fill_all()
    two.pool.serve(NO_SIDECAR)
    with pytest.raises(CheckpointFailed, match="no region is prepared for its plan"):
        alone(two).pool.acquire(two.request(plan="0a1b2c3d-p2"))
    assert two.clock.now_s == 0.0


def test_a_save_that_waits_for_its_first_region_fails_when_the_sidecar_is_lost(
    one: Sidecar, trainer: ThreadPoolExecutor
) -> None:
    future = waiting(one, trainer)
    one.pool.serve(NO_SIDECAR)
    with pytest.raises(CheckpointFailed, match="no sidecar ran for 120 s"):
        future.result(PATIENCE_S)


def test_without_a_sidecar_no_region_grows(one: Sidecar) -> None:
    one.pool.on_ready(ready())
    request = one.request()
    taken = one.pool.acquire(request)
    one.pool.serve(NO_SIDECAR)
    with pytest.raises(CheckpointFailed, match="its byte entries need 9999 bytes, more than the region has room for"):
        alone(one).pool.grow(taken, request, 9999)
    assert one.asked == []
    assert one.clock.now_s == 0.0


def test_a_slot_without_a_region_counts_as_busy_when_nobody_prepares_one(two: Sidecar) -> None:
    two.pool.on_ready(ready(0))
    two.pool.acquire(two.request())
    two.seal(0)
    assert not two.pool.all_busy
    two.pool.serve(NO_SIDECAR)
    assert two.pool.all_busy
    with pytest.raises(SaveSkipped):
        alone(two).pool.acquire(two.request("skip"))


def test_when_there_is_a_sidecar_again_a_region_is_waited_for(one: Sidecar, trainer: ThreadPoolExecutor) -> None:
    one.pool.serve(NO_SIDECAR)
    one.pool.serve(None)
    future = waiting(one, trainer)
    one.pool.on_ready(ready())
    assert future.result(PATIENCE_S) == ready()
