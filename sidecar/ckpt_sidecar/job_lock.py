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
from ckpt_proto.runtime_dir import lock_owner, lock_path, make_private_dir

PROBE_PATIENCE_S = 1.0


class JobLockTaken(CheckpointError):
    """Another living sidecar serves this job on this node."""


class JobLock:
    """Held from construction to :meth:`release`.

    Raises:
        JobLockTaken: somebody else holds it; the text names its pid.
    """

    def __init__(self, directory: Path) -> None:
        self._path = lock_path(directory)
        self._fd = self._take(directory)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _take(self, directory: Path) -> int:
        deadline = time.monotonic() + PROBE_PATIENCE_S
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
                if lock_owner(directory) is None and time.monotonic() < deadline:
                    time.sleep(0.001)  # only looked at: a probe holds a shared lock for a moment, which has no wake-up
                    continue
                raise JobLockTaken(
                    f"a sidecar (pid {lock_owner(directory) or 'unknown'}) already serves job {directory.name} on this "
                    f"node: it holds {self._path}"
                ) from None
            if self._is_current(fd):
                return fd
            os.close(fd)  # locked a file that its last owner has removed since: take the new one

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give the lock up; the file stays."""
        os.close(self._fd)
