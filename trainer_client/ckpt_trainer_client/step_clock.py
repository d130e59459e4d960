"""How long training's steps take, so that the sidecar can notice that it slows them."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepClock:
    """Ticked on the thread that trains, read on the link's: no lock, one tuple changes hands.

    Only the average counts, and only beside what it was before: a script with two optimizers ticks twice a step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._ticked_s: float | None = None
        self._sums = (0, 0.0)
        self._taken = (0, 0.0)

    def tick(self) -> None:
        """A step is about to end."""
        now_s = self._clock()
        if self._ticked_s is not None:
            count, total_s = self._sums
            self._sums = (count + 1, total_s + now_s - self._ticked_s)
        self._ticked_s = now_s

    def pass_over(self) -> None:
        """The step under way does not count: it has a save in it."""
        self._ticked_s = None

    def take(self) -> float:
        """The average in seconds of the steps since it was taken last; 0 if none has ended."""
        sums, taken = self._sums, self._taken
        self._taken = sums
        count = sums[0] - taken[0]
        return (sums[1] - taken[1]) / count if count else 0.0
