"""When writing is slowed for the trainers' sake, how far, and when not any more."""

from __future__ import annotations

import math

import pytest

from ckpt_sidecar.politeness import ECHO_S, QUIET_SAMPLES, SLOWEST_BYTES_PER_S, Politeness, Writing

GB = 1 << 30
QUIET_S = 0.1
RATE = 400 << 20


class Node:
    """A controller, and the second-by-second life of a node whose writes move ``RATE`` bytes, or what it may."""

    def __init__(self, within_s: float = 30.0) -> None:
        self.controller = Politeness(within_s)
        self.now_s = 100.0
        self.written = 0
        self.left = 0
        self.cap: float | None = None

    def quiet(self, seconds: int = QUIET_SAMPLES, ranks: tuple[int, ...] = (0,)) -> Node:
        for _ in range(seconds):
            self.second(QUIET_S, ranks)
        return self

    def second(self, step_s: float | None, ranks: tuple[int, ...] = (0,), *, crowded: bool = False) -> float | None:
        self.now_s += 1.0
        moved = min(self.left, int(RATE if self.cap is None else min(RATE, self.cap)))
        self.written += moved
        self.left -= moved
        for rank in ranks:
            if step_s is not None:
                self.controller.hear(rank, step_s, self.now_s)
        self.cap = self.controller.look(Writing(self.now_s, self.written, self.left, crowded))
        return self.cap

    def begin(self, nbytes: int = 10 * GB) -> Node:
        self.left += nbytes
        assert self.second(None) is None
        return self


def test_a_write_that_nobody_feels_is_not_slowed() -> None:
    node = Node().quiet().begin()
    assert [node.second(QUIET_S * 1.05) for _ in range(5)] == [None] * 5
    assert node.controller.slowdown == pytest.approx(1.05)


def test_slow_steps_halve_it_again_and_again() -> None:
    node = Node(within_s=600.0).quiet().begin()
    assert [node.second(QUIET_S * 1.5) for _ in range(3)] == [RATE / 2, RATE / 4, RATE / 8]


def test_it_grows_back_when_steps_are_as_ever_and_is_let_go_at_last() -> None:
    node = Node(within_s=600.0).quiet().begin()
    node.second(QUIET_S * 2)
    grown = [node.second(QUIET_S) for _ in range(4)]
    assert grown[:3] == [RATE / 2 * 1.25, RATE / 2 * 1.25**2, RATE / 2 * 1.25**3]
    assert grown[3] is None


def test_however_slow_the_steps_it_ends_within_its_bound() -> None:
    node = Node(within_s=30.0).quiet().begin(4 * GB)
    begun_s = node.now_s
    while node.left:
        node.second(QUIET_S * 10)
    assert node.now_s - begun_s <= 31.0


def test_when_the_bound_has_passed_it_goes_at_full_speed() -> None:
    node = Node(within_s=3.0).quiet().begin()
    caps = [node.second(QUIET_S * 10) for _ in range(5)]
    assert caps[-2:] == [None, None]


def test_a_small_rest_is_not_slowed_without_end() -> None:
    node = Node(within_s=600.0).quiet().begin(2 * GB)
    for _ in range(10):
        node.second(QUIET_S * 3)
    assert node.cap == SLOWEST_BYTES_PER_S


def test_a_bound_of_nothing_never_slows() -> None:
    node = Node(within_s=0.0).quiet().begin()
    assert [node.second(QUIET_S * 3) for _ in range(5)] == [None] * 5


def test_a_rank_without_a_free_region_is_not_kept_waiting_for_the_sake_of_politeness() -> None:
    node = Node().quiet().begin()
    assert node.second(QUIET_S * 3) is not None
    assert node.second(QUIET_S * 3, crowded=True) is None


def test_without_knowing_what_steps_take_nothing_is_slowed() -> None:
    node = Node().quiet(QUIET_SAMPLES - 1).begin()
    assert [node.second(9.0) for _ in range(3)] == [None] * 3
    assert node.controller.slowdown is None


def test_no_news_is_no_reason_to_change() -> None:
    node = Node(within_s=600.0).quiet().begin()
    cap = node.second(QUIET_S * 2)
    assert [node.second(None), node.second(None)] == [cap, cap]


def test_one_slow_rank_among_many_is_its_own_affair() -> None:
    ranks = (0, 1, 2)
    node = Node().quiet(ranks=ranks).begin()
    node.controller.hear(0, QUIET_S * 9, node.now_s)
    assert node.second(QUIET_S, ranks=(1, 2)) is None
    assert node.second(QUIET_S * 2, ranks=(1, 2)) is not None


def test_steps_reported_just_after_a_write_do_not_count_as_quiet() -> None:
    node = Node().quiet().begin(RATE)
    node.second(QUIET_S * 2)
    assert node.left == 0
    node.controller.hear(0, QUIET_S * 5, node.now_s + ECHO_S / 2)
    node.now_s += ECHO_S
    node.begin()
    node.second(QUIET_S * 2)
    assert node.controller.slowdown == pytest.approx(2.0)


def test_each_write_begins_at_full_speed() -> None:
    node = Node().quiet().begin(2 * GB)
    while node.left:
        node.second(QUIET_S * 2)
    assert node.second(QUIET_S) is None
    node.begin()
    assert node.second(None) is None


def test_a_write_that_moved_nothing_is_not_slowed_further() -> None:
    node = Node().quiet().begin()
    node.controller.hear(0, QUIET_S * 3, node.now_s)
    still = Writing(node.now_s + 1.0, node.written, node.left, crowded=False)
    assert node.controller.look(still) is None


def test_a_rank_that_is_gone_says_nothing_any_more() -> None:
    node = Node().quiet().begin()
    node.second(QUIET_S * 3)
    node.controller.keep_only([])
    assert node.controller.slowdown is None


@pytest.mark.parametrize("step_s", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_what_is_no_duration_is_not_taken(step_s: float) -> None:
    node = Node()
    for _ in range(QUIET_SAMPLES):
        node.controller.hear(0, step_s, node.now_s)
    node.begin()
    node.second(1.0)
    assert node.controller.slowdown is None
