"""What a run may have left on this machine: processes, and files in shared memory."""

import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.05


def shared_memory_of(job_id_prefix: str) -> list[str]:
    """What sidecars keep in `/dev/shm` for jobs whose id starts so."""
    jobs = Path("/dev/shm").glob(f"ckpt-sidecar-*/{job_id_prefix}*")
    return sorted(str(path) for job in jobs for path in (job, *job.rglob("*")))


def processes_of(mark: str) -> list[str]:
    """Living processes whose environment at start held `mark`, a whole `NAME=value`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark.encode() in (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or another user's
        if marked:
            found.append(f"{process.name} ({command})")
    return found


def until_empty(look: Callable[[], list[str]], timeout_s: float) -> list[str]:
    """The last look: empty, or what was still there after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left
