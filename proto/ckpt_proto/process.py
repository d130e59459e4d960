"""Processes: which one a pid means, and the environment of a sidecar."""

from __future__ import annotations

import os
from collections.abc import Mapping


def process_start_s(pid: int) -> float | None:
    """When ``pid`` was started, in seconds since boot, or None if there is no such living process.

    A pid alone is reused, a pid and its start time are not. A zombie counts as gone. Read from ``/proc/<pid>/stat``,
    fields 3 and 22 (proc(5)).
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def sidecar_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``environ`` for a sidecar that is started with ``/`` as its working directory.

    CUDA is hidden: the writer must never make a context on a GPU. The entries of ``PYTHONPATH`` are made absolute.
    """
    environment = {**environ, "CUDA_VISIBLE_DEVICES": ""}
    python_path = environ.get("PYTHONPATH")
    if python_path:
        entries = [os.path.abspath(entry) for entry in python_path.split(os.pathsep) if entry]
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    return environment
