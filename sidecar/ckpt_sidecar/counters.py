"""What a coordinator counts for ``status``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """How saves have ended since this coordinator began; ``last_committed_s`` in the table's clock (seconds)."""

    committed: int = 0
    failed: int = 0
    skipped: int = 0
    consecutive_failures: int = 0
    last_committed_step: int | None = None
    last_committed_s: float | None = None

    def count_aborted(self, *, skipped: bool) -> None:
        """A save was given up, or skipped by the back-pressure policy."""
        if skipped:
            self.skipped += 1
        else:
            self.failed += 1
            self.consecutive_failures += 1

    def count_committed(self, step: int, now_s: float) -> None:
        """A save was committed."""
        self.committed += 1
        self.consecutive_failures = 0
        self.last_committed_step = step
        self.last_committed_s = now_s
