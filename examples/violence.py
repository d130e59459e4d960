"""Killing parts of a run with SIGKILL, as a machine, a scheduler or the kernel does when memory runs out."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from leftovers import processes_of

POLL_S = 0.005


def wait_for(what: str, look: Callable[[], bool], timeout_s: float) -> None:
    """Return when `look` says so.

    Raises:
        TimeoutError: it has not; `what` names it.
    """
    deadline = time.monotonic() + timeout_s
    while not look():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        time.sleep(POLL_S)


def has_staged(log: Path, step: int) -> bool:
    """Whether rank 0 of the trainer has written down that it has staged a step."""
    if not log.exists():
        return False
    lines = log.read_text().splitlines()
    return any(json.loads(line).get("staged_step") == step for line in lines if line.endswith("}"))


def kill_processes(mark: str, *words: str) -> list[int]:
    """SIGKILL every process of a run whose command line holds one of `words`; returns their pids."""
    killed = []
    for process in processes_of(mark):
        pid, _, command = process.partition(" ")
        if any(word in command for word in words):
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has ended by itself
            killed.append(int(pid))
    return killed
