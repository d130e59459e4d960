"""What writing costs in CPU time: counted on the threads that do it, so that importing torch does not count."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class WriteCost:
    """CPU seconds and bytes of all shards of a sidecar. Thread-safe.

    ``per_gb`` is CPU seconds per 1e9 bytes written, CRCs and the kernel's part included; None before the first byte.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cpu_s = 0.0
        self._nbytes = 0

    @contextmanager
    def measured(self, nbytes: int = 0) -> Iterator[None]:
        """Count what the calling thread uses in the block, and ``nbytes`` written by it."""
        before_s = time.thread_time()
        try:
            yield
        finally:
            used_s = time.thread_time() - before_s
            with self._lock:
                self._cpu_s += used_s
                self._nbytes += nbytes

    @property
    def per_gb(self) -> float | None:
        """CPU seconds per 1e9 bytes."""
        with self._lock:
            return self._cpu_s / self._nbytes * 1e9 if self._nbytes else None
