"""The bandwidth cap: bytes are booked in order, and what was not used before is not saved up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ckpt_sidecar.throttle import Throttle


class FakeClock:
    """Stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_without_a_cap_nothing_ever_waits() -> None:
    throttle = Throttle(None, FakeClock())
    assert [throttle.delay_s(1 << 40) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_the_first_bytes_go_at_once_and_the_next_wait_for_them() -> None:
    throttle = Throttle(100.0, FakeClock())
    assert [throttle.delay_s(nbytes) for nbytes in (50, 200, 10)] == [0.0, 0.5, 2.5]


def test_time_that_has_passed_counts() -> None:
    clock = FakeClock()
    throttle = Throttle(100.0, clock)
    throttle.delay_s(100)
    clock.now_s += 0.75
    assert throttle.delay_s(100) == 0.25


def test_idle_time_is_not_saved_up_for_a_burst() -> None:
    clock = FakeClock()
    throttle = Throttle(100.0, clock)
    clock.now_s += 3600.0
    assert [throttle.delay_s(100), throttle.delay_s(100)] == [0.0, 1.0]


def test_a_clock_that_stands_still_is_no_reason_to_let_more_through() -> None:
    throttle = Throttle(8.0, FakeClock())
    assert [throttle.delay_s(1) for _ in range(5)] == [0.0, 0.125, 0.25, 0.375, 0.5]


def test_several_writers_share_one_cap() -> None:
    throttle = Throttle(64.0, FakeClock())
    with ThreadPoolExecutor(8) as writers:
        delays = sorted(writers.map(throttle.delay_s, [1] * 512))
    assert delays == [index / 64.0 for index in range(512)]


def test_a_window_is_about_a_seconds_worth_in_whole_blocks() -> None:
    largest = 8 << 20
    assert Throttle(None).window_bytes(largest) == largest
    assert Throttle(1e12).window_bytes(largest) == largest
    assert Throttle(1_000_000.0).window_bytes(largest) == 1_000_000 // 4096 * 4096
    assert Throttle(1.0).window_bytes(largest) == 64 << 10


def test_slowed_it_obeys_the_lower_cap_and_then_the_given_one_again() -> None:
    throttle = Throttle(100.0, FakeClock())
    throttle.slow_to(50.0)
    assert (throttle.bytes_per_s, throttle.delay_s(100), throttle.delay_s(100)) == (50.0, 0.0, 2.0)
    throttle.slow_to(1000.0)
    assert throttle.bytes_per_s == 100.0
    throttle.slow_to(None)
    assert throttle.bytes_per_s == 100.0


def test_without_a_given_cap_it_is_slowed_all_the_same_and_let_go() -> None:
    throttle = Throttle(None, FakeClock())
    throttle.slow_to(50.0)
    assert [throttle.delay_s(100), throttle.delay_s(100)] == [0.0, 2.0]
    throttle.slow_to(None)
    assert (throttle.bytes_per_s, throttle.delay_s(100)) == (None, 0.0)
