"""The handle of a save: three facts, each known exactly once; a failure is told and holds nothing of who asked."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_trainer_client.errors import CheckpointFailed, SaveSkipped
from ckpt_trainer_client.save_handle import SaveHandle
from testkit.plans import save_key

LATE = "rank 5 on node-b has not staged"
REPORTS = [
    FailureReport("RankLost", "it is gone", rank=1, node="node-b"),
    FailureReport("StorageError", "no room: 9 bytes needed, 1 free"),
]
WHERE = "/checkpoints/step-5"


@pytest.fixture
def handle() -> SaveHandle:
    return SaveHandle(save_key(), lambda save: LATE)


def outcomes(handle: SaveHandle) -> dict[str, list[Future[Any]]]:
    """Everything the three futures ever tell, as it is told."""
    told: dict[str, list[Future[Any]]] = {"staged": [], "persisted": [], "committed": []}
    for name, seen in told.items():
        getattr(handle, name).add_done_callback(seen.append)
    return told


def counts(told: dict[str, list[Future[Any]]]) -> tuple[int, int, int]:
    return len(told["staged"]), len(told["persisted"]), len(told["committed"])


# ---------------------------------------------------------------- success


def test_each_fact_resolves_once_and_in_its_time(handle: SaveHandle) -> None:
    told = outcomes(handle)
    assert counts(told) == (0, 0, 0)
    handle._set_staged()
    assert counts(told) == (1, 0, 0)
    handle._set_persisted()
    assert counts(told) == (1, 1, 0)
    assert not handle.done()
    handle._set_committed(WHERE)
    assert counts(told) == (1, 1, 1)
    assert handle.done()
    assert (handle.staged.result(0), handle.persisted.result(0), handle.committed.result(0)) == (None, None, WHERE)
    assert handle.result() == handle.result(0) == WHERE
    assert handle.error() is None
    assert not handle.skipped
    assert not handle.is_unobserved_failure


def test_what_is_said_twice_is_taken_once(handle: SaveHandle) -> None:
    told = outcomes(handle)
    for _ in range(2):
        handle._set_staged()
        handle._set_persisted()
        handle._set_committed(WHERE)
    handle._fail(REPORTS)
    assert counts(told) == (1, 1, 1)
    assert handle.result() == WHERE
    assert handle.error() is None


def test_a_commit_says_that_the_shard_is_durable_too(handle: SaveHandle) -> None:
    """ShardPersisted may have been lost with the connection."""
    handle._set_staged()
    handle._set_committed(WHERE)
    assert handle.persisted.result(0) is None


def test_seconds_since_the_call_are_kept(handle: SaveHandle) -> None:
    assert (handle.staged_at_s, handle.persisted_at_s, handle.committed_at_s, handle.stall_s) == (None,) * 4
    handle._set_staged()
    handle._set_persisted()
    handle._set_committed(WHERE)
    assert handle.staged_at_s is not None
    assert handle.persisted_at_s is not None
    assert handle.committed_at_s is not None
    assert 0 <= handle.staged_at_s <= handle.persisted_at_s <= handle.committed_at_s
    before = handle.persisted_at_s
    handle._set_persisted()
    assert handle.persisted_at_s == before


# ---------------------------------------------------------------- failure


@pytest.mark.parametrize("known", [0, 1, 2])
def test_a_failure_resolves_what_was_not_known_yet(handle: SaveHandle, known: int) -> None:
    told = outcomes(handle)
    for fact in [handle._set_staged, handle._set_persisted][:known]:
        fact()
    handle._fail(REPORTS)
    assert counts(told) == (1, 1, 1)
    failed = [isinstance(future.exception(0), CheckpointFailed) for [future] in told.values()]
    assert failed == [known < 1, known < 2, True]
    handle._fail([FailureReport("Other", "later")])
    handle._set_committed(WHERE)
    handle._set_persisted()
    handle._set_staged()
    assert counts(told) == (1, 1, 1)
    assert "later" not in str(handle.error())


def test_a_failure_names_every_rank(handle: SaveHandle) -> None:
    handle._fail(REPORTS)
    with pytest.raises(CheckpointFailed) as raised:
        handle.result()
    error = raised.value
    assert error.step == 5
    assert error.failures == {1: REPORTS[0], -1: REPORTS[1]}
    assert str(error) == (
        "step 5 was not saved: rank 1 on node-b: it is gone [RankLost]; "
        "sidecar: no room: 9 bytes needed, 1 free [StorageError]"
    )


def test_a_skipped_save_is_a_failure_of_its_own_kind(handle: SaveHandle) -> None:
    handle._fail(REPORTS[:1], skipped=True)
    assert handle.skipped
    with pytest.raises(SaveSkipped):
        handle.result()
    assert isinstance(handle.committed.exception(0), SaveSkipped)
    assert isinstance(handle.error(), SaveSkipped)


def observed_by_nobody(handle: SaveHandle) -> None:
    handle.done()
    repr(handle)


async def awaited(handle: SaveHandle) -> None:
    await handle


OBSERVERS: dict[str, tuple[Callable[[SaveHandle], object], bool]] = {
    "nobody": (observed_by_nobody, False),
    "result": (lambda handle: handle.result(), True),
    "error": (lambda handle: handle.error(), True),
    "await": (lambda handle: asyncio.run(awaited(handle)), True),
}


@pytest.mark.parametrize("by", OBSERVERS)
def test_a_failure_is_unobserved_until_somebody_has_been_told(handle: SaveHandle, by: str) -> None:
    observe, told = OBSERVERS[by]
    assert not handle.is_unobserved_failure
    handle._fail(REPORTS)
    assert handle.is_unobserved_failure
    try:
        observe(handle)
    except CheckpointFailed:
        assert told
    assert handle.is_unobserved_failure is not told


def test_asking_for_an_error_that_is_not_there_yet_observes_nothing(handle: SaveHandle) -> None:
    assert handle.error() is None
    handle._fail(REPORTS)
    assert handle.is_unobserved_failure


# ---------------------------------------------------------------- waiting


def test_a_time_out_names_who_is_late() -> None:
    asked: list[SaveKey] = []
    handle = SaveHandle(save_key(), lambda save: asked.append(save) or LATE)  # type: ignore[func-returns-value]
    with pytest.raises(TimeoutError, match=f"step 5 is not committed after 0.001 s: {LATE}") as raised:
        handle.result(0.001)
    assert asked == [save_key()]
    assert raised.value.__suppress_context__
    assert not handle.is_unobserved_failure


def test_after_a_time_out_the_result_is_still_to_be_had(handle: SaveHandle) -> None:
    with pytest.raises(TimeoutError):
        handle.result(0)
    handle._set_committed(WHERE)
    assert handle.result(0) == WHERE


def test_a_commit_that_comes_with_the_time_out_is_no_failure() -> None:
    """It becomes known while it is being found out who is late."""
    handle = SaveHandle(save_key(), lambda save: handle._set_committed(WHERE) or LATE)  # type: ignore[func-returns-value]
    try:
        assert handle.result(0) == WHERE
    except TimeoutError:
        assert handle.result(0) == WHERE


def test_a_waiting_thread_gets_the_result(handle: SaveHandle) -> None:
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(handle.result(30)))
    thread.start()
    handle._set_committed(WHERE)
    thread.join(30)
    assert results == [WHERE]


def test_it_can_be_awaited_again_and_again(handle: SaveHandle) -> None:
    async def both() -> tuple[str, str, str]:
        asyncio.get_running_loop().call_soon(handle._set_committed, WHERE)
        first, second = await asyncio.gather(waits(), waits())
        return first, second, await handle

    async def waits() -> str:
        return await handle

    assert asyncio.run(both()) == (WHERE, WHERE, WHERE)


def test_a_failure_is_raised_in_each_await(handle: SaveHandle) -> None:
    async def both() -> list[object]:
        asyncio.get_running_loop().call_soon(lambda: handle._fail(REPORTS))
        return await asyncio.gather(waits(), waits(), return_exceptions=True)

    async def waits() -> str:
        return await handle

    one, other = asyncio.run(both())
    assert isinstance(one, CheckpointFailed)
    assert isinstance(other, CheckpointFailed)
    assert one is not other


# ---------------------------------------------------------------- nobody can take a fact away


def test_giving_up_an_await_does_not_cancel_the_fact(handle: SaveHandle) -> None:
    async def impatient() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle, 0.001)

    told = outcomes(handle)
    asyncio.run(impatient())
    assert not handle.done()
    handle._set_committed(WHERE)
    assert handle.result(0) == WHERE
    assert counts(told) == (0, 1, 1)


def test_the_futures_cannot_be_cancelled(handle: SaveHandle) -> None:
    for future in (handle.staged, handle.persisted, handle.committed):
        assert not future.cancel()
        assert not future.cancelled()


class Meeting(Future[Any]):
    """A future of which another thread resolves first whenever this one looks or acts."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._meanwhile = [meanwhile]

    def _meet(self) -> None:
        if self._meanwhile:
            other = threading.Thread(target=self._meanwhile.pop())
            other.start()
            other.join(1)  # it may have to wait for us instead

    def done(self) -> bool:
        known = super().done()
        self._meet()
        return known

    def set_result(self, result: Any) -> None:
        self._meet()
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        self._meet()
        super().set_exception(exception)


def test_staged_and_failed_may_meet(handle: SaveHandle) -> None:
    """The trainer stages while the coordinator's abort arrives on the other thread."""
    handle.staged = Meeting(handle._set_staged)
    handle._fail(REPORTS)
    assert handle.staged.exception(0) is None
    with pytest.raises(CheckpointFailed):
        handle.result(0)
    assert isinstance(handle.persisted.exception(0), CheckpointFailed)


def test_failed_and_staged_may_meet(handle: SaveHandle) -> None:
    handle.staged = Meeting(lambda: handle._fail(REPORTS))
    handle._set_staged()
    with pytest.raises(CheckpointFailed):
        handle.result(0)
    assert isinstance(handle.persisted.exception(0), CheckpointFailed)


# ---------------------------------------------------------------- nothing is held


class Tensors:
    """What a training loop has in its frame."""


def asks(handle: SaveHandle) -> weakref.ref[Tensors]:
    tensors = Tensors()
    with pytest.raises(CheckpointFailed):
        handle.result()
    return weakref.ref(tensors)


async def awaits(handle: SaveHandle) -> weakref.ref[Tensors]:
    tensors = Tensors()
    with pytest.raises(CheckpointFailed):
        await handle
    return weakref.ref(tensors)


def test_a_kept_handle_holds_no_frame_of_whom_it_told(handle: SaveHandle) -> None:
    handle._fail(REPORTS)
    asked = asks(handle)
    awaited = asyncio.run(awaits(handle))
    gc.collect()
    assert asked() is None
    assert awaited() is None
    assert handle.done()


def test_each_time_the_exception_is_a_new_one(handle: SaveHandle) -> None:
    handle._fail(REPORTS)
    seen = [handle.error(), handle.error(), handle.committed.exception(0), handle.persisted.exception(0)]
    for _ in range(2):
        with pytest.raises(CheckpointFailed) as raised:
            handle.result()
        seen.append(raised.value)
    assert len({id(error) for error in seen}) == len(seen)
    assert len({str(error) for error in seen}) == 1


# ---------------------------------------------------------------- for people


def test_it_says_how_far_it_is(handle: SaveHandle) -> None:
    shown = [repr(handle)]
    for fact in (handle._set_staged, handle._set_persisted, lambda: handle._set_committed(WHERE)):
        fact()
        shown.append(repr(handle))
    assert shown == [
        "<SaveHandle step 5 (0a1b2c3d-0): not staged>",
        "<SaveHandle step 5 (0a1b2c3d-0): staged>",
        "<SaveHandle step 5 (0a1b2c3d-0): staged persisted>",
        "<SaveHandle step 5 (0a1b2c3d-0): staged persisted committed>",
    ]


def test_it_says_that_it_failed(handle: SaveHandle) -> None:
    handle._set_staged()
    handle._fail(REPORTS)
    assert repr(handle) == "<SaveHandle step 5 (0a1b2c3d-0): failed>"
