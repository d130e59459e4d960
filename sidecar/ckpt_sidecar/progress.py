"""How far one shard job is. Torch-free, because ``status`` reads it on the main thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class Progress:
    """Written by the job's writer and I/O threads, read by ``status``; ``moved_s`` is when bytes moved last (monotonic
    seconds)."""

    total_bytes: int = 0
    written_bytes: int = 0
    moved_s: float = 0.0
    cancelled: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def advance(self, nbytes: int, now_s: float) -> None:
        """``nbytes`` more are written. Thread-safe: several windows land at the same time."""
        with self._lock:
            self.written_bytes += nbytes
            self.moved_s = now_s
