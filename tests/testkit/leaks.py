"""What a test may leave behind: descriptors, threads, child processes, files in shared memory, processes elsewhere."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckpt_proto.process import process_start_s
from testkit.waiting import last_of

SETTLE_S = 30.0
"""How long what was ended may take to be gone: a daemon thread ends a moment after it was told to."""


@dataclass(frozen=True)
class Snapshot:
    """What a process has: ``descriptors`` are (number, target), ``threads`` (ident, name), ``children`` pids."""

    descriptors: frozenset[tuple[int, str]]
    threads: frozenset[tuple[int, str]]
    children: frozenset[int]


def snapshot() -> Snapshot:
    """What this process has now."""
    return Snapshot(
        frozenset(_descriptors()),
        frozenset((thread.ident or 0, thread.name) for thread in threading.enumerate()),
        frozenset(children_of(os.getpid())),
    )


def left_since(before: Snapshot, timeout_s: float = SETTLE_S) -> list[str]:
    """One line for each thing that this process has and did not have ``before``, after it was given time to settle."""
    return last_of(lambda: _new_since(before), timeout_s)


def _new_since(before: Snapshot) -> list[str]:
    now = snapshot()
    return [
        *(f"descriptor {number} -> {target}" for number, target in sorted(now.descriptors - before.descriptors)),
        *(f"thread {name}" for _, name in sorted(now.threads - before.threads)),
        *(f"child process {describe(pid)}" for pid in sorted(now.children - before.children)),
    ]


def _descriptors() -> list[tuple[int, str]]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append((int(number), os.readlink(f"/proc/self/fd/{number}")))
        except FileNotFoundError:
            continue  # the descriptor of this very listing
    return found


def children_of(pid: int) -> list[int]:
    """Children of ``pid``, zombies too: not to have waited for one is a leak as well."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
        if parent == pid:
            found.append(int(entry.name))
    return found


def processes_marked(mark: str) -> list[int]:
    """Living processes but this one that carry ``mark`` in their arguments or the environment they started with."""
    wanted, found = os.fsencode(mark), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            marked = wanted in (entry / "cmdline").read_bytes() or wanted in (entry / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended while we looked, or of another user
        if marked and int(entry.name) != os.getpid() and process_start_s(int(entry.name)) is not None:
            found.append(int(entry.name))
    return found


def processes_in_network(namespace: str) -> list[int]:
    """Living processes in a network namespace, named as in ``/proc/<pid>/ns/net``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            same = os.readlink(entry / "ns" / "net") == namespace
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended while we looked, or of another user
        if same:
            found.append(int(entry.name))
    return found


def describe(pid: int) -> str:
    """A process as text: pid and command line."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        command = ""
    return f"{pid} ({command or 'ended'})"


def files_below(root: Path) -> list[str]:
    """Everything below ``root``, relative to it; a folder that vanishes meanwhile is empty."""
    found = [os.path.join(folder, name) for folder, folders, files in os.walk(root) for name in (*folders, *files)]
    return sorted(os.path.relpath(path, root) for path in found)


def left_in(root: Path, timeout_s: float = SETTLE_S) -> list[str]:
    """What is below ``root`` or runs for it, after it was given time to settle."""

    def look() -> list[str]:
        processes = [f"process {describe(pid)}" for pid in processes_marked(str(root))]
        return processes + [f"file {name} in {root}" for name in files_below(root)]

    return last_of(look, timeout_s)


@contextmanager
def private_shm_root() -> Iterator[Path]:
    """A private directory in shared memory, which must be empty and served by nobody at the end.

    Its name is short, because the path of a socket in it must fit into 107 bytes.
    """
    root = Path(tempfile.mkdtemp(prefix="ckpt-test-", dir="/dev/shm"))
    try:
        yield root
        left = left_in(root)
    finally:
        for pid in processes_marked(str(root)):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(root)
    assert not left, f"left behind in shared memory or running: {left}"
