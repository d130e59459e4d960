"""How long steps take, as a heartbeat tells it."""

from __future__ import annotations

import pytest

from ckpt_trainer_client.step_clock import StepClock


class Training:
    """A clock of steps under a clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.steps = StepClock(lambda: self.now_s)

    def step(self, seconds: float) -> None:
        self.now_s += seconds
        self.steps.tick()


def test_before_two_steps_have_ended_nothing_is_known() -> None:
    training = Training()
    assert training.steps.take() == 0.0
    training.step(1.0)
    assert training.steps.take() == 0.0


def test_the_average_of_the_steps_since_the_last_look() -> None:
    training = Training()
    for seconds in (9.0, 1.0, 3.0):
        training.step(seconds)
    assert training.steps.take() == pytest.approx(2.0)
    assert training.steps.take() == 0.0
    training.step(5.0)
    assert training.steps.take() == pytest.approx(5.0)


def test_a_step_with_a_save_in_it_does_not_count() -> None:
    training = Training()
    training.step(1.0)
    training.step(1.0)
    training.now_s += 7.0
    training.steps.pass_over()
    training.step(7.0)
    training.step(1.0)
    assert training.steps.take() == pytest.approx(1.0)
