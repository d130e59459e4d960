"""The sidecar takes what training leaves over: niceness and I/O priority of its process."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

IO_PRIORITY_LEVEL = 7
AUTOGROUP = Path("/proc/self/autogroup")


def lower_priority(nice: int) -> None:
    """Lower the priority of this process and of the threads it will start.

    I/O goes to the lowest level of the best-effort class: the idle class would starve for ever beside a trainer that
    keeps a disk busy with its data loading, and then checkpoints are late without bound. Schedulers that ignore
    ionice (``none``, most NVMe) are not affected. A container that forbids it costs a warning, not the sidecar.
    """
    try:
        os.nice(nice)
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, value=IO_PRIORITY_LEVEL)
    except (OSError, psutil.Error) as error:
        logger.warning("cannot lower the sidecar's priority: %s", error)
    if os.getsid(0) == os.getpid():
        lower_autogroup(nice)


def lower_autogroup(nice: int, autogroup: Path = AUTOGROUP) -> None:
    """Lower the priority of this process's session.

    Where the kernel groups tasks by session (``sched_autogroup_enabled``), niceness only counts inside a session, and
    ours is another one than the trainers': without this the sidecar would get as much CPU as all of them.
    Only for a leader of its session: another's session would be slowed with it.
    """
    if not autogroup.exists():
        return
    try:
        autogroup.write_text(str(nice))
    except OSError as error:
        logger.debug("cannot lower the priority of the sidecar's session: %s", error)
