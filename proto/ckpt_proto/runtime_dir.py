"""The private directory of one job on one node: lock, socket, regions, log.

<shm root>/ckpt-sidecar-<uid>/<job id>/sidecar.lock    held by flock while a sidecar or stand-in lives; has its pid
                                      sidecar.sock    ZeroMQ ipc endpoint, bound after the lock is held
                                      sidecar.log     of a sidecar that a client started, and of stand-ins
                                      rank-0.slot-0.region, .seal
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from ckpt_proto.errors import LocalProtocolError
from ckpt_proto.identity import check_job_id

DEFAULT_SHM_ROOT = "/dev/shm"
STAND_IN = "stand-in"
"""Before the pid in the lock of a process that only stands in for a sidecar."""
MAX_SOCKET_PATH_BYTES = 107
"""Length of ``sun_path`` on Linux, less the closing NUL; libzmq truncates a longer one silently."""


def user_dir(shm_root: str | Path) -> Path:
    """Where this user's job directories lie."""
    return Path(shm_root) / f"ckpt-sidecar-{os.geteuid()}"


def runtime_dir(shm_root: str | Path, job_id: str) -> Path:
    """The directory of one job; nothing is made.

    Raises:
        LocalProtocolError: the job id is not valid or the socket's path would be too long for the kernel.
    """
    path = user_dir(shm_root) / check_job_id(job_id)
    if len(os.fsencode(socket_path(path))) > MAX_SOCKET_PATH_BYTES:
        raise LocalProtocolError(
            f"the socket path {socket_path(path)} is longer than {MAX_SOCKET_PATH_BYTES} bytes: "
            "use a shorter job id or shared-memory root"
        )
    return path


def socket_path(directory: Path) -> Path:
    """The socket's file."""
    return directory / "sidecar.sock"


def endpoint(directory: Path) -> str:
    """The socket as a ZeroMQ address."""
    return f"ipc://{socket_path(directory)}"


def lock_path(directory: Path) -> Path:
    """The lock file; it holds the pid of the sidecar that has it, or ``stand-in`` and a pid."""
    return directory / "sidecar.lock"


def log_path(directory: Path) -> Path:
    """Where a sidecar that a client started writes its log."""
    return directory / "sidecar.log"


def make_private_dir(path: Path) -> None:
    """Make ``path`` and its parent, mode 0700, and refuse what somebody else has put there.

    Raises:
        LocalProtocolError: one of them exists and is a link, is not a directory, or others may enter it.
    """
    for directory in (path.parent, path):
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            pass
        found = os.lstat(directory)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise LocalProtocolError(
                f"{directory} is not a private directory of user {os.geteuid()} "
                f"(owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}): remove it or choose another --shm-root"
            )


def lock_owner(directory: Path) -> int | None:
    """Pid of the sidecar that holds the lock in ``directory``, 0 if it has not said; None if none does."""
    text = _lock_text(directory)
    if text is None or text.startswith(STAND_IN):
        return None
    return int(text) if text.isdigit() else 0


def stand_in_runs(directory: Path) -> bool:
    """Whether a stand-in holds the lock: a process that does one thing in place of a sidecar and serves nobody."""
    text = _lock_text(directory)
    return text is not None and text.startswith(STAND_IN)


def _lock_text(directory: Path) -> str | None:
    """What the holder of the lock has written into it; None if nobody holds it."""
    try:
        fd = os.open(lock_path(directory), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 32, 0).decode("ascii", "replace").strip()
    finally:
        os.close(fd)
    return None


def job_dirs(shm_root: str | Path) -> list[Path]:
    """Every job directory of this user under ``shm_root``, sorted by name."""
    try:
        return sorted(path for path in user_dir(shm_root).iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
