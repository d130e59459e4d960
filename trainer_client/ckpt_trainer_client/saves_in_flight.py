"""The saves whose end is not known yet, and how what arrives about them resolves their handles.

Thread rule: any thread may call; the handles themselves are resolved on ``ckpt-callbacks``, never by the caller.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey, step_text
from ckpt_trainer_client.callback_thread import CallbackThread
from ckpt_trainer_client.save_handle import SaveHandle

MAX_KEPT = 64
"""Saves that have failed, remembered for whoever makes sure of it; far more than one sidecar can leave half removed."""


class SavesInFlight:
    """From ``save()`` to committed or failed."""

    def __init__(self, callbacks: CallbackThread) -> None:
        self._callbacks = callbacks
        self._lock = threading.Lock()
        self._handles: dict[SaveKey, SaveHandle] = {}
        self._given_up: deque[SaveKey] = deque(maxlen=MAX_KEPT)

    def expect(self, save: SaveKey, handle: SaveHandle) -> None:
        """From now on, what arrives about ``save`` resolves ``handle``."""
        with self._lock:
            self._handles[save] = handle

    def pending(self) -> list[SaveKey]:
        """The saves in flight."""
        with self._lock:
            return list(self._handles)

    def staged(self, save: SaveKey) -> None:
        """This rank's region is sealed; said before it is submitted, so that it is told first."""
        with self._lock:
            handle = self._handles.get(save)
        if handle is not None:
            self._callbacks.submit(handle._set_staged)

    def persisted(self, save: SaveKey) -> None:
        """This rank's data file is durable."""
        with self._lock:
            handle = self._handles.get(save)
        if handle is not None:
            self._callbacks.submit(handle._set_persisted)

    def committed(self, save: SaveKey, checkpoint_id: str) -> bool:
        """The step can be restored; returns whether that was not known before."""
        handle = self._take(save)
        if handle is not None:
            self._callbacks.submit(partial(handle._set_committed, checkpoint_id))
        return handle is not None

    def failed(self, save: SaveKey, failures: Sequence[FailureReport], *, skipped: bool = False) -> None:
        """The save was given up."""
        handle = self._take(save)
        if handle is not None:
            with self._lock:
                self._given_up.append(save)
            self._callbacks.submit(partial(handle._fail, failures, skipped=skipped))

    def given_up(self) -> list[SaveKey]:
        """The last saves whose handles were told that they have failed."""
        with self._lock:
            return list(self._given_up)

    def _take(self, save: SaveKey) -> SaveHandle | None:
        with self._lock:
            return self._handles.pop(save, None)

    def wait_idle(self, timeout_s: float | None, who_is_late: Callable[[SaveKey], str]) -> None:
        """Wait until every expected save has ended and its handle says so.

        Raises:
            TimeoutError: one has not; the text names it and who is late.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            handles = list(self._handles.values())
        for handle in handles:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                handle.committed.exception(left_s)
            except FutureTimeout:
                late = who_is_late(handle._save)
                raise TimeoutError(f"{step_text(handle.step)} is still in flight after {timeout_s} s: {late}") from None
        told = threading.Event()
        self._callbacks.submit(told.set)  # what has arrived is resolved on that thread, perhaps not yet
        if not told.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"a callback or hook of an earlier save has not returned within {timeout_s} s")
