"""The sidecar takes what training leaves over: niceness and I/O priority of its process."""

from __future__ import annotations

import logging
import os

import psutil

logger = logging.getLogger(__name__)

IO_PRIORITY_LEVEL = 7


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
