"""A bandwidth cap shared by all writers of a sidecar."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BLOCK_BYTES = 4096
SMALLEST_WINDOW_BYTES = 16 * BLOCK_BYTES


class Throttle:
    """A token bucket over bytes; ``bytes_per_s`` of None means no cap. Thread-safe.

    A writer takes before it writes and waits outside the lock, so one waiting writer does not hold another. What
    :meth:`slow_to` sets holds beside the cap given here: the lower of the two.
    """

    def __init__(self, bytes_per_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._given = bytes_per_s
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at_s = clock()

    @property
    def bytes_per_s(self) -> float | None:
        """The cap that holds now."""
        return self._bytes_per_s

    def slow_to(self, bytes_per_s: float | None) -> None:
        """Write no faster than this from the next window on; None: as fast as the given cap allows."""
        caps = [cap for cap in (self._given, bytes_per_s) if cap is not None]
        self._bytes_per_s = min(caps, default=None)

    def window_bytes(self, largest: int) -> int:
        """How much to write at once, whole blocks: about a second's worth, so that a capped write keeps moving."""
        cap = self._bytes_per_s
        if cap is None:
            return largest
        return max(SMALLEST_WINDOW_BYTES, min(largest, int(cap) // BLOCK_BYTES * BLOCK_BYTES))

    def delay_s(self, nbytes: int) -> float:
        """Book ``nbytes`` and return how long to wait before writing them."""
        cap = self._bytes_per_s
        if cap is None:
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(now, self._free_at_s)
            self._free_at_s = start + nbytes / cap
            return start - now
