"""The thread on which futures resolve and user hooks run, so that slow ones never hold up the socket."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


CALLBACKS = "ckpt-callbacks"
DECISIONS = "ckpt-decide"
STAND_IN = "ckpt-stand-in"


class CallbackThread:
    """Runs what it is given, in order. Ended by :meth:`close`, after everything given before.

    `ckpt-callbacks` resolves futures and runs post-commit hooks; `ckpt-decide` runs pre-commit hooks, if there are any,
    so that a commit does not wait for somebody's slow callback; `ckpt-stand-in` has what is staged written while there
    is no sidecar, if that is wanted.
    """

    def __init__(self, name: str = CALLBACKS) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the thread. It is a daemon thread: a trainer that forgets ``close()`` must still be able to exit."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work`` after what was given before. Thread-safe."""
        self._work.put(work)

    def close(self, timeout_s: float) -> None:
        """Run what is left and end the thread.

        Raises:
            TimeoutError: a callback has not returned within ``timeout_s``.
        """
        self._work.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"a callback or hook of a save has not returned within {timeout_s:.0f} s")

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException:
                logger.exception("a callback of the checkpoint client failed")
            del work
