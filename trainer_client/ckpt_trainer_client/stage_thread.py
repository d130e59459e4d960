"""The thread ``ckpt-stage``: copies behind the training's back, and prepares."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

STAGE = "ckpt-stage"


class StageThread:
    """One thing at a time. Started when first needed; ended by :meth:`close`, or after its work when the interpreter
    ends: a copy under way is finished then, and the save with it."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    def start(self, work: Callable[[], None]) -> bool:
        """Have ``work``, which must not raise, done; returns whether it will be: not when the interpreter is ending."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=STAGE)
        try:
            self._executor.submit(work)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Wait for the work under way and end the thread."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None
