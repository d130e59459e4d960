"""The lock that makes a sidecar the only one of its job on its node.

It is taken before the socket is bound: a second bind on an ipc path succeeds and silently steals the endpoint.
``flock`` goes with the process, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from ckpt_proto.errors import CheckpointError
from ckpt_proto.runtime_dir import STAND_IN, lock_owner, lock_path, make_private_dir, stand_in_runs

PROBE_PATIENCE_S = 1.0
PROBE_POLL_S = 0.001

STAND_IN_PATIENCE_S = 30.0
STAND_IN_POLL_S = 0.02
"""How long, and how often, whoever wants the lock looks whether a stand-in has ended: a lock has no wake-up."""


WRITING_S = 0.05
"""A lock that has just been taken has its last holder's text for a moment: taking it and writing are two steps. What
still looks like a sidecar's after so long is one's."""


class JobLockTaken(CheckpointError):
    """Another living sidecar serves this job on this node, or a stand-in does not end."""


class JobLock:
    """Held from construction to :meth:`release`; by a sidecar, or by a ``stand_in`` for one.

    A stand-in that holds it is waited for, at most ``patience_s`` seconds; a sidecar is not.

    Raises:
        JobLockTaken: somebody else holds it; the text names its pid.
    """

    def __init__(self, directory: Path, *, stand_in: bool = False, patience_s: float = STAND_IN_PATIENCE_S) -> None:
        self._path = lock_path(directory)
        self._owned_s: float | None = None  # since when a sidecar seems to hold it
        self._fd = self._take(directory, patience_s)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{STAND_IN + ' ' if stand_in else ''}{os.getpid()}\n".encode(), 0)

    def _take(self, directory: Path, patience_s: float) -> int:
        started_s = time.monotonic()
        while True:
            make_private_dir(directory)
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:
                continue  # its last owner has just removed the directory
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                self._wait(directory, time.monotonic() - started_s, patience_s)
                continue
            if self._is_current(fd):
                return fd
            os.close(fd)  # locked a file that its last owner has removed since: take the new one

    def _wait(self, directory: Path, waited_s: float, patience_s: float) -> None:
        """Sleep for a moment if the lock may soon be free: a probe holds a shared one, or a stand-in ends.

        Raises:
            JobLockTaken: it will not be, or not in time.
        """
        if stand_in_runs(directory):
            self._owned_s = None
            if waited_s < patience_s:
                time.sleep(STAND_IN_POLL_S)
                return
            raise JobLockTaken(f"a stand-in for the sidecar of job {directory.name} still holds {self._path}")
        owner = lock_owner(directory)
        if owner is None:
            self._owned_s, bound_s = None, max(PROBE_PATIENCE_S, patience_s)
        else:
            self._owned_s = waited_s if self._owned_s is None else self._owned_s
            bound_s = self._owned_s + WRITING_S
        if waited_s < bound_s:
            time.sleep(PROBE_POLL_S)
            return
        raise JobLockTaken(
            f"a sidecar (pid {owner or 'unknown'}) already serves job {directory.name} on this node: it holds "
            f"{self._path}"
        )

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give the lock up; the file stays."""
        os.close(self._fd)
