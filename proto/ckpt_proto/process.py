"""Which process a pid means: a pid alone is reused, a pid and its start time are not."""

from __future__ import annotations

import os


def process_start_s(pid: int) -> float | None:
    """When ``pid`` was started, in seconds since boot, or None if there is no such living process.

    A zombie counts as gone. Read from ``/proc/<pid>/stat``, fields 3 and 22 (proc(5)).
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
