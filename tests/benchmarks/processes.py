"""CPU time and memory of every process of a run, the sidecar and what a peer has spawned included."""

import os
from pathlib import Path

MARK = "CKPT_BENCH_RUN"
"""Environment variable that all processes of a run inherit."""

_TICKS = os.sysconf("SC_CLK_TCK")


def marked_pids(run: str) -> list[int]:
    """Living processes of a run."""
    wanted, found = f"{MARK}={run}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue  # gone meanwhile, or another user's
    return found


def cpu_s(run: str) -> float:
    """User and system CPU seconds of all processes of a run, of their ended children too."""
    total = 0
    for pid in marked_pids(run):
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15]))
    return total / _TICKS


def pss_bytes(run: str) -> int:
    """Proportional set size of all processes of a run: shared pages count once."""
    total = 0
    for pid in marked_pids(run):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total
