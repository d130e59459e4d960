"""On which cores the sidecar runs: away from those that ranks are pinned to, on given ones, or where it was started."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress

AWAY = "away"
INHERIT = "inherit"

logger = logging.getLogger(__name__)


def parse_cores(text: str) -> frozenset[int]:
    """The cores in a list as taskset and cpusets write it: ``0-3,8``.

    Raises:
        ValueError: it is no such list, or names a core that this machine does not have.
    """
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = [first, last] if dash else [first]
        if not all(number.isascii() and number.isdigit() and len(number) < 6 for number in numbers):
            raise ValueError(f"{text!r} is no list of cores, such as 0-3,8")
        found = range(int(first), int(numbers[-1]) + 1)
        if not found:
            raise ValueError(f"{part!r} in {text!r} ends before it begins")
        cores.update(found)
    configured = os.sysconf("SC_NPROCESSORS_CONF")
    if max(cores) >= configured:
        raise ValueError(f"{text!r} names core {max(cores)}, this machine has 0 to {configured - 1}")
    return frozenset(cores)


def cores_away_from(ranks: Iterable[frozenset[int]], own: frozenset[int]) -> frozenset[int]:
    """Those of ``own`` that no rank is pinned to; all of ``own`` if ranks may use every one of them."""
    taken: frozenset[int] = frozenset().union(*ranks)
    return own - taken or own


class Affinity:
    """Keeps all threads of this process on the right cores. Called on the daemon's main thread.

    Args:
        wanted: ``away``, ``inherit`` or a list of cores. ``away`` chooses among the cores that the process was started
            with: wider is not known to be ours.
        cores_of: the cores of a process.
    """

    def __init__(
        self,
        wanted: str,
        cores_of: Callable[[int], set[int]] = os.sched_getaffinity,
        apply: Callable[[frozenset[int]], None] | None = None,
    ) -> None:
        self._wanted = wanted
        self._cores_of = cores_of
        self._apply = apply or _move_all_threads
        self._own = frozenset(cores_of(0))
        self.cores = self._own

    def begin(self) -> None:
        """Go to the cores of a given list."""
        if self._wanted not in (AWAY, INHERIT):
            self._go_to(parse_cores(self._wanted))

    def avoid(self, pids: Iterable[int]) -> None:
        """With ``away``: leave the cores that these ranks are pinned to now."""
        if self._wanted != AWAY:
            return
        pinned = []
        for pid in pids:
            with suppress(OSError):  # it has ended: its death is noticed elsewhere
                pinned.append(frozenset(self._cores_of(pid)))
        self._go_to(cores_away_from(pinned, self._own))

    def _go_to(self, cores: frozenset[int]) -> None:
        if cores == self.cores:
            return
        try:
            self._apply(cores)
        except OSError as error:
            logger.warning("cannot move the sidecar to cores %s: %s", sorted(cores), error)
            self._wanted = INHERIT  # a container that forbids it will not allow it a second later
            return
        logger.info("running on cores %s", sorted(cores))
        self.cores = cores


def _move_all_threads(cores: frozenset[int]) -> None:
    os.sched_setaffinity(0, cores)  # threads that begin from now on inherit it
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)
