"""Waiting for a condition with a bound: the only place of the tests that sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 90.0
"""Longest wait of any test. Far more than ever needed: it is reached only when something is broken."""

POLL_S = 0.01

T = TypeVar("T")


def wait_until(look: Callable[[], T], what: str, timeout_s: float = LIMIT_S) -> T:
    """The first true result of ``look``; fails with ``what`` and the last result after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what} (last seen: {found!r})")
        time.sleep(POLL_S)
    return found


def last_of(look: Callable[[], T], timeout_s: float) -> T:
    """The first false result of ``look``, or what it still returns after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while (found := look()) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return found
