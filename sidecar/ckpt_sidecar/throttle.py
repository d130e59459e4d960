"""A bandwidth cap shared by all writers of a sidecar."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Throttle:
    """A token bucket over bytes; ``bytes_per_s`` of None means no cap. Thread-safe.

    A writer takes before it writes and waits outside the lock, so one waiting writer does not hold another.
    """

    def __init__(self, bytes_per_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at_s = clock()

    def delay_s(self, nbytes: int) -> float:
        """Book ``nbytes`` and return how long to wait before writing them."""
        if self._bytes_per_s is None:
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(now, self._free_at_s)
            self._free_at_s = start + nbytes / self._bytes_per_s
            return start - now
