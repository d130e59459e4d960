"""The thread of futures and hooks: in order, one after another, and nothing ends it but close."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
from torch.distributed.checkpoint import CheckpointException

from ckpt_trainer_client.callback_thread import CallbackThread

PATIENCE_S = 30.0


@pytest.fixture
def callbacks() -> Iterator[CallbackThread]:
    thread = CallbackThread()
    thread.start()
    yield thread
    thread.close(PATIENCE_S)


def wait_for_what_was_given(callbacks: CallbackThread) -> None:
    reached = threading.Event()
    callbacks.submit(reached.set)
    assert reached.wait(PATIENCE_S)


def test_work_runs_in_order_on_one_thread(callbacks: CallbackThread) -> None:
    seen: list[tuple[int, str]] = []
    for number in range(100):
        callbacks.submit(lambda number=number: seen.append((number, threading.current_thread().name)))
    wait_for_what_was_given(callbacks)
    assert seen == [(number, "ckpt-callbacks") for number in range(100)]


def raises(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    "error",
    [ValueError("bad"), CheckpointException("dcp.load failed", {}), SystemExit(1), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
def test_what_work_raises_is_logged_and_the_next_work_runs(
    callbacks: CallbackThread, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """Every future of every later save depends on this thread."""
    callbacks.submit(raises(error))
    wait_for_what_was_given(callbacks)
    assert "a callback of the checkpoint client failed" in caplog.text
    assert type(error).__name__ in caplog.text


def test_work_may_give_work(callbacks: CallbackThread) -> None:
    seen: list[str] = []
    done = threading.Event()

    def first() -> None:
        callbacks.submit(lambda: (seen.append("second"), done.set()))
        seen.append("first")

    callbacks.submit(first)
    assert done.wait(PATIENCE_S)
    assert seen == ["first", "second"]


def test_slow_work_holds_up_nobody_who_gives_more(callbacks: CallbackThread) -> None:
    go_on = threading.Event()
    callbacks.submit(lambda: go_on.wait(PATIENCE_S) and None)
    for _ in range(1000):
        callbacks.submit(lambda: None)
    go_on.set()


def test_close_runs_what_was_given_before() -> None:
    callbacks, seen = CallbackThread(), []
    callbacks.start()
    for number in range(10):
        callbacks.submit(lambda number=number: seen.append(number))
    callbacks.close(PATIENCE_S)
    assert seen == [*range(10)]


def test_close_is_bounded_and_says_what_it_waits_for() -> None:
    callbacks, go_on = CallbackThread(), threading.Event()
    callbacks.start()
    callbacks.submit(lambda: go_on.wait(PATIENCE_S) and None)
    with pytest.raises(TimeoutError, match="has not returned within 0 s"):
        callbacks.close(0.001)
    go_on.set()
    callbacks.close(PATIENCE_S)


def test_the_thread_does_not_keep_a_process_alive(callbacks: CallbackThread) -> None:
    [thread] = [thread for thread in threading.enumerate() if thread.name == "ckpt-callbacks"]
    assert thread.daemon


def test_finished_work_is_let_go_of_before_there_is_more(callbacks: CallbackThread) -> None:
    class Holder:
        """Something large that a callback refers to."""

        def __call__(self) -> None: ...

    holder, gone = Holder(), threading.Event()
    weakref.finalize(holder, gone.set)
    callbacks.submit(holder)
    del holder
    assert gone.wait(PATIENCE_S)
