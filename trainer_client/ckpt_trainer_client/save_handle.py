"""The handle of one save: three facts, three futures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_trainer_client.errors import CheckpointFailed, SaveSkipped


class SaveHandle:
    """What is known of one ``save()``.

    Attributes:
        staged: the region holds the bytes; the tensors may change now. Resolved before ``save()`` returns, with
            ``overlap`` before ``before_optimizer_step()`` returns.
        persisted: this rank's data file is durable.
        committed: ``.metadata`` is published, the step can be restored; its result is the checkpoint's path.
        step: the step saved.
        stall_s: seconds that ``save()`` took; wait_s: seconds waited later for the rest of an overlapped copy.

    Each future resolves on every rank, on success and on failure; a failure is a
    :class:`~ckpt_trainer_client.errors.CheckpointFailed` with the failures of the ranks. ``persisted`` and
    ``committed`` resolve on the thread ``ckpt-callbacks``, so their callbacks may be slow but must not wait for
    another save. The handle holds no tensor.
    """

    def __init__(self, save: SaveKey, who_is_late: Callable[[SaveKey], str]) -> None:
        self.step = save.step
        self.staged: Future[None] = Future()
        self.persisted: Future[None] = Future()
        self.committed: Future[str] = Future()
        self.stall_s: float | None = None
        self.wait_s = 0.0
        self.staged_at_s: float | None = None
        self.persisted_at_s: float | None = None
        self.committed_at_s: float | None = None
        self._save = save
        self._who_is_late = who_is_late
        self._called_s = time.monotonic()
        self._failures: tuple[FailureReport, ...] = ()
        self._skipped = False
        self._observed = False
        for future in (self.staged, self.persisted, self.committed):
            # A running future cannot be cancelled: asyncio.wait_for that gives up must not take the fact away.
            future.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> str:
        """Wait until the checkpoint is committed and return its path.

        Raises:
            CheckpointFailed: it will not be; SaveSkipped if it was skipped.
            TimeoutError: neither is known after ``timeout`` seconds; the text names who is late.
        """
        # exception() and not result(): a future that raises keeps the frames of its caller, and so its tensors.
        try:
            failed = self.committed.exception(timeout) is not None
        except FutureTimeout:
            late = self._who_is_late(self._save)
            raise TimeoutError(f"step {self.step} is not committed after {timeout} s: {late}") from None
        if not failed:
            return self.committed.result()
        self._observed = True
        raise self._exception()

    def __await__(self) -> Generator[Any, None, str]:
        return self._awaited().__await__()

    async def _awaited(self) -> str:
        try:
            return await asyncio.wrap_future(self.committed)
        except CheckpointFailed:
            self._observed = True
        raise self._exception()

    def done(self) -> bool:
        """Whether it is known if the checkpoint is committed."""
        return self.committed.done()

    def error(self) -> CheckpointFailed | None:
        """Why the save failed, or None if it has not failed (yet). Counts as having been told."""
        if not self._failures:
            return None
        self._observed = True
        return self._exception()

    @property
    def skipped(self) -> bool:
        """Whether the save was skipped by the back-pressure policy."""
        return self._skipped

    @property
    def is_unobserved_failure(self) -> bool:
        """Whether the save failed and nobody has been told."""
        return bool(self._failures) and not self._observed

    def __repr__(self) -> str:
        facts = [name for name in ("staged", "persisted", "committed") if _succeeded(getattr(self, name))]
        told = "failed" if self._failures else " ".join(facts) or "not staged"
        return f"<SaveHandle step {self.step} ({self._save.save_id}): {told}>"

    # ------------------------------------------------------------ used by the client only

    def _seconds(self) -> float:
        return time.monotonic() - self._called_s

    def _set_staged(self) -> None:
        if self.staged_at_s is None:
            self.staged_at_s = self._seconds()
        _settle(self.staged, None)

    def _set_persisted(self) -> None:
        if self.persisted_at_s is None:
            self.persisted_at_s = self._seconds()
        _settle(self.persisted, None)

    def _set_committed(self, checkpoint_id: str) -> None:
        self._set_persisted()
        self.committed_at_s = self._seconds()
        _settle(self.committed, checkpoint_id)

    def _fail(self, failures: Sequence[FailureReport], *, skipped: bool = False) -> None:
        if self.committed.done() or self._failures:
            return
        self._failures = tuple(failures)
        self._skipped = skipped
        for future in (self.staged, self.persisted, self.committed):
            _settle(future, self._exception())

    def _exception(self) -> CheckpointFailed:
        return (SaveSkipped if self._skipped else CheckpointFailed)(self.step, self._failures)


def _settle(future: Future[Any], outcome: object) -> None:
    """Resolve a future unless another thread has done so already: the first outcome stands."""
    try:
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        pass  # staged on the trainer's thread and failed on ckpt-callbacks can meet


def _succeeded(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None
