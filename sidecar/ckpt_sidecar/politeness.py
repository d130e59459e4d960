"""When to write slower, because training has become slower: decided from how long the trainers' steps take. Pure.

What may be written per second is halved while steps are slow, and grows by a quarter while they are not. Pressure-stall
figures (PSI) would be there without a trainer's help, but they count the sidecar's own waiting as pressure.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median, median_low

TOLERANCE = 0.1
"""Steps that take so much longer while something is written are slow. Less than that is noise of most machines."""

QUIET_SAMPLES = 3
KEPT_SAMPLES = 32
"""How many heartbeats with nothing written it takes to know what a step takes, and how many are remembered."""

ECHO_S = 2.0
"""A heartbeat within so long of a write may tell of steps beside it."""

SLOWEST_BYTES_PER_S = 16.0 * (1 << 20)
"""Never slower, however small what is left: below it regions are only kept longer."""


@dataclass(frozen=True)
class Writing:
    """What a look sees. ``left_bytes`` of all shards under way; ``crowded``: a living rank has no free region, so the
    next save would wait for what is being written."""

    now_s: float
    written_bytes: int
    left_bytes: int
    crowded: bool


@dataclass
class _Steps:
    quiet: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    beside: float | None = None

    @property
    def slowdown(self) -> float | None:
        if self.beside is None or len(self.quiet) < QUIET_SAMPLES:
            return None
        return self.beside / median(self.quiet)


class Politeness:
    """The controller of one sidecar. Times are of any one clock, in seconds.

    Args:
        within_s: a write is slowed only as far as it still ends within so many seconds of its beginning; 0: never.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._ranks: dict[int, _Steps] = {}
        self._cap: float | None = None
        self._begun_s: float | None = None
        self._fastest = 0.0
        self._last: Writing | None = None
        self._busy_s = -math.inf
        self._news = False

    def hear(self, rank: int, step_s: float, now_s: float) -> None:
        """The steps of ``rank`` since its last heartbeat took ``step_s`` on average; anything but a positive finite
        number is not known."""
        if not 0 < step_s < math.inf:
            return
        steps = self._ranks.setdefault(rank, _Steps())
        if self._begun_s is not None or now_s - self._busy_s < ECHO_S:
            steps.beside = step_s
            self._news = True
        else:
            steps.quiet.append(step_s)

    def keep_only(self, ranks: list[int]) -> None:
        """Forget ranks that are gone: a new one in their place may take other steps."""
        for rank in self._ranks.keys() - set(ranks):
            del self._ranks[rank]

    @property
    def slowdown(self) -> float | None:
        """How many times longer steps take beside a write than without: the middle rank's; None while not known."""
        known = [steps.slowdown for steps in self._ranks.values()]
        found = [slowdown for slowdown in known if slowdown is not None]
        return median_low(found) if found else None

    def look(self, writing: Writing) -> float | None:
        """Called about once a second.

        Returns:
            How many bytes may be written per second from now on; None: as many as can be.
        """
        before, self._last = self._last, writing
        if not writing.left_bytes:
            self._end(writing.now_s)
            return None
        if self._begun_s is None or before is None:
            self._begin(writing.now_s)
            return None
        rate = (writing.written_bytes - before.written_bytes) / max(writing.now_s - before.now_s, 1e-3)
        self._fastest = max(self._fastest, rate)
        if self._news:
            self._news = False
            self._adapt(rate)
        return self._bounded(writing)

    def _begin(self, now_s: float) -> None:
        self._begun_s, self._cap, self._fastest, self._news = now_s, None, 0.0, False
        for steps in self._ranks.values():
            steps.beside = None

    def _end(self, now_s: float) -> None:
        if self._begun_s is not None:
            self._busy_s, self._begun_s, self._cap = now_s, None, None

    def _adapt(self, rate: float) -> None:
        slowdown = self.slowdown
        if slowdown is None:
            return
        if slowdown > 1 + TOLERANCE:
            pace = min(rate, self._cap) if self._cap is not None else rate
            if pace > 0:  # nothing moved: waiting for the disk is not made polite by waiting longer
                self._cap = max(pace / 2, SLOWEST_BYTES_PER_S)
        elif self._cap is not None:
            self._cap *= 1.25
            if self._cap > self._fastest:
                self._cap = None

    def _bounded(self, writing: Writing) -> float | None:
        assert self._begun_s is not None
        left_s = self._begun_s + self._within_s - writing.now_s
        if self._cap is None or writing.crowded or left_s <= 0:
            return None
        return max(self._cap, writing.left_bytes / left_s)
