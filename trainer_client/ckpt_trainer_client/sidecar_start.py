"""Making sure that a sidecar runs on this node, started by the first client if nobody else did."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from ckpt_proto.errors import SidecarUnreachable
from ckpt_proto.process import sidecar_environment
from ckpt_proto.runtime_dir import lock_owner
from ckpt_trainer_client.config import ClientConfig

POLL_S = 0.05

IDLE_EXIT_S = 60.0
"""How long a sidecar that a client started waits for a restarted job after its ranks have died."""


def sidecar_runs(directory: Path) -> bool:
    """Whether a living sidecar holds the job's lock."""
    return lock_owner(directory) is not None


def start_sidecar(job_id: str, shm_root: Path, timeout_s: float) -> None:
    """Start a sidecar unless one runs. Any number of clients may do so at once: the lock lets one win.

    ``ckpt-sidecar start`` is a process between: the sidecar is not our child, so it is no zombie when it exits and
    not in the process tree that a launcher kills.

    Raises:
        SidecarUnreachable: it could not be started; the text says why and where its log is.
    """
    command = [sys.executable, "-m", "ckpt_sidecar", "start", "--job-id", job_id, "--shm-root", str(shm_root)]
    command += ["--idle-exit-s", str(IDLE_EXIT_S)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd="/",
            env=sidecar_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SidecarUnreachable(f"{' '.join(command)} has not ended within {timeout_s:.0f} s") from None
    if done.returncode != 0:
        raise SidecarUnreachable(
            f"no sidecar could be started for job {job_id} (exit code {done.returncode}): {done.stderr.strip()[-2000:]}"
        )


def ensure_sidecar(config: ClientConfig, deadline: float) -> None:
    """Return when a sidecar holds the job's lock: one that runs, one that is started here, or one that somebody else
    is about to start (``config.supervised``). ``deadline`` is in ``time.monotonic()`` seconds.

    Raises:
        SidecarUnreachable: it did not come about in time.
    """
    if sidecar_runs(config.runtime_dir):
        return
    if not config.supervised:
        start_sidecar(config.job_id, config.shm_root, max(1.0, deadline - time.monotonic()))
        return
    while not sidecar_runs(config.runtime_dir):
        time.sleep(POLL_S)  # a lock that somebody else will take has no wake-up
        if time.monotonic() > deadline:
            raise SidecarUnreachable(
                f"nobody has started a sidecar for job {config.job_id} on {config.node} within "
                f"{config.connect_timeout_s:.0f} s, although CKPT_SIDECAR_SUPERVISED says that somebody would"
            )
