"""Saves in flight: what arrives resolves the right handle, once, on the callback thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_trainer_client.callback_thread import CallbackThread
from ckpt_trainer_client.errors import CheckpointFailed, SaveSkipped
from ckpt_trainer_client.save_handle import SaveHandle
from ckpt_trainer_client.saves_in_flight import MAX_KEPT, SavesInFlight

FAILURE = FailureReport("StorageError", "no room", rank=1)


@pytest.fixture
def callbacks() -> Iterator[CallbackThread]:
    thread = CallbackThread()
    thread.start()
    yield thread
    thread.close(10)


def expected(saves: SavesInFlight, seq: int = 0) -> tuple[SaveKey, SaveHandle]:
    save = SaveKey("0000000a", seq, 100 + seq)
    handle = SaveHandle(save, lambda save: "rank 1 on node-b has not staged")
    saves.expect(save, handle)
    return save, handle


def idle(saves: SavesInFlight, timeout_s: float | None = 10) -> None:
    saves.wait_idle(timeout_s, lambda save: f"rank 1 has not staged step {save.step}")


def test_a_commit_resolves_its_own_handle_and_no_other(callbacks: CallbackThread) -> None:
    saves = SavesInFlight(callbacks)
    first, first_handle = expected(saves, 0)
    second, second_handle = expected(saves, 1)
    saves.committed(first, "/data/step-100")
    assert first_handle.result(10) == "/data/step-100"
    assert not second_handle.done()
    assert saves.pending() == [second]


def test_handles_resolve_on_the_callback_thread(callbacks: CallbackThread) -> None:
    saves = SavesInFlight(callbacks)
    save, handle = expected(saves)
    threads: list[str] = []
    handle.committed.add_done_callback(lambda future: threads.append(threading.current_thread().name))
    saves.committed(save, "/data/step-100")
    idle(saves)
    assert threads == ["ckpt-callbacks"]


def test_a_save_that_is_persisted_stays_in_flight(callbacks: CallbackThread) -> None:
    saves = SavesInFlight(callbacks)
    save, handle = expected(saves)
    saves.persisted(save)
    handle.persisted.result(10)
    assert saves.pending() == [save]


@pytest.mark.parametrize(("skipped", "kind"), [(False, CheckpointFailed), (True, SaveSkipped)])
def test_a_failure_ends_the_save(callbacks: CallbackThread, skipped: bool, kind: type[CheckpointFailed]) -> None:
    saves = SavesInFlight(callbacks)
    save, handle = expected(saves)
    saves.failed(save, [FAILURE], skipped=skipped)
    with pytest.raises(kind) as raised:
        handle.result(10)
    assert raised.value.failures == {1: FAILURE}
    assert saves.pending() == []


def test_what_is_said_of_an_unknown_save_changes_nothing(callbacks: CallbackThread) -> None:
    saves = SavesInFlight(callbacks)
    stranger = SaveKey("0000000b", 7, 7)
    saves.persisted(stranger)
    saves.committed(stranger, "/data/step-7")
    saves.failed(stranger, [FAILURE])
    idle(saves)


def test_idle_means_that_the_handles_say_so_too(callbacks: CallbackThread) -> None:
    saves = SavesInFlight(callbacks)
    gate = threading.Event()
    save, handle = expected(saves)
    callbacks.submit(lambda: gate.wait(10) and None)
    saves.committed(save, "/data/step-100")
    assert not handle.done()
    gate.set()
    idle(saves)
    assert handle.done()


def test_waiting_is_bounded_and_says_who_is_late(callbacks: CallbackThread) -> None:
    saves = SavesInFlight(callbacks)
    save, _ = expected(saves)
    with pytest.raises(TimeoutError, match=r"step 100 .* rank 1 has not staged step 100"):
        idle(saves, 0.05)
    saves.failed(save, [FAILURE])
    idle(saves)


def test_a_callback_that_hangs_is_not_idleness(callbacks: CallbackThread) -> None:
    saves = SavesInFlight(callbacks)
    gate = threading.Event()
    callbacks.submit(lambda: gate.wait(10) and None)
    with pytest.raises(TimeoutError, match="callback or hook"):
        idle(saves, 0.05)
    gate.set()


def test_the_last_saves_that_have_failed_are_remembered(callbacks: CallbackThread) -> None:
    saves = SavesInFlight(callbacks)
    failed = []
    for seq in range(MAX_KEPT + 2):
        save, _ = expected(saves, seq)
        failed.append(save)
        saves.failed(save, [FAILURE])
    committed, _ = expected(saves, MAX_KEPT + 2)
    saves.committed(committed, "/data/step-100")
    saves.failed(committed, [FAILURE])  # it was told already how it has ended
    assert saves.given_up() == failed[2:]
    idle(saves)
