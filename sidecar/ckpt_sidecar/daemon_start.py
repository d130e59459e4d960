"""Starting a sidecar that outlives its starter. Torch-free.

The new process has its own session (torchelastic kills process groups), no terminal, CUDA hidden, and a log in the
job's directory. Its starter waits for READY, so that whoever comes next can connect.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ckpt_proto.errors import SidecarUnreachable
from ckpt_proto.process import sidecar_environment
from ckpt_proto.runtime_dir import log_path, make_private_dir

EXIT_LOCK_TAKEN = 4
READY_TIMEOUT_S = 60.0


def start_detached(run_arguments: Sequence[str], directory: Path, timeout_s: float = READY_TIMEOUT_S) -> int | None:
    """Start ``ckpt-sidecar run`` in its own session; return its pid, or None if the job has a sidecar already.

    Raises:
        SidecarUnreachable: it ended or was not ready within ``timeout_s``; the text ends with its last words.
    """
    make_private_dir(directory)
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "ckpt_sidecar", "run", *run_arguments, "--ready-fd", str(writer)]
    try:
        with open(log_path(directory), "ab", opener=_private) as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[writer],
                start_new_session=True,
                env=sidecar_environment(),
                cwd="/",
            )
    finally:
        os.close(writer)
    try:
        ready = _read_ready(reader, timeout_s)
    finally:
        os.close(reader)
    if ready:
        return process.pid
    if _lock_was_taken(process, timeout_s):
        return None
    raise SidecarUnreachable(
        f"the sidecar ended with exit code {process.returncode} before it was ready: {_last_words(directory)}"
    )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _read_ready(reader: int, timeout_s: float) -> bool:
    readable, _, _ = select.select([reader], [], [], timeout_s)
    return bool(readable) and os.read(reader, 16) == b"READY\n"


def _lock_was_taken(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        return process.wait(timeout=1) == EXIT_LOCK_TAKEN
    except subprocess.TimeoutExpired:
        process.terminate()
        raise SidecarUnreachable(f"the sidecar (pid {process.pid}) was not ready after {timeout_s} s") from None


def _last_words(directory: Path) -> str:
    try:
        return log_path(directory).read_text(errors="replace")[-2000:]
    except FileNotFoundError:
        return "(it left no log)"
