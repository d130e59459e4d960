"""CPU seconds for each GB written, counted where it is spent."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt_sidecar.write_cost import WriteCost


@pytest.fixture
def thread_time(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What ``time.thread_time()`` will say, in order."""
    times: list[float] = []
    monkeypatch.setattr(time, "thread_time", lambda: times.pop(0))
    return times


def test_nothing_written_has_no_price() -> None:
    assert WriteCost().per_gb is None


def test_the_price_is_that_of_all_threads_for_all_bytes(thread_time: list[float]) -> None:
    thread_time += [10.0, 10.25, 3.0, 3.5]
    cost = WriteCost()
    with cost.measured():
        pass
    with cost.measured(500_000_000):
        pass
    assert cost.per_gb == pytest.approx(1.5)


def test_work_that_failed_is_counted(thread_time: list[float]) -> None:
    thread_time += [0.0, 2.0]
    cost = WriteCost()
    with pytest.raises(OSError, match="full"), cost.measured(1_000_000_000):
        raise OSError("full")
    assert cost.per_gb == pytest.approx(2.0)


def test_waiting_costs_nothing_and_work_something() -> None:
    cost = WriteCost()

    def work() -> None:
        with cost.measured(1000):
            sum(range(200_000))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(8)]:
            done.result()
    busy = cost.per_gb
    assert busy is not None
    assert busy > 0
