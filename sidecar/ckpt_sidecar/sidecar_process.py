"""The sidecar as a child process: start it, learn that it serves, learn that it ended.

Nothing here waits. The owner waits on a :class:`~ckpt_sidecar.signal_queue.SignalQueue`: SIGCHLD says that a child
ended, SIGIO that the ready pipe has something to read.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ckpt_sidecar.signal_queue import signal_name

FIRST_RESTART_DELAY_S = 0.5
LONGEST_RESTART_DELAY_S = 30.0
HEALTHY_AFTER_S = 60.0
_TAIL_LINES = 20
_TAIL_BYTES = 8192


class RestartBackoff:
    """How long to wait before the next start: twice as long each time, from the beginning after a minute of life."""

    def __init__(self) -> None:
        self._next_s = FIRST_RESTART_DELAY_S

    def delay_after(self, alive_s: float) -> float:
        """Seconds until the next start of a sidecar that has lived for ``alive_s`` seconds."""
        if alive_s >= HEALTHY_AFTER_S:
            self._next_s = FIRST_RESTART_DELAY_S
        delay_s = self._next_s
        self._next_s = min(2 * delay_s, LONGEST_RESTART_DELAY_S)
        return delay_s


class SidecarProcess:
    """One sidecar at a time, in its own session, so that whatever kills the ranks' process groups misses it.

    Args:
        command: the sidecar's command; ``--supervisor-pid`` (a sidecar whose owner is killed drains and goes) and
            ``--ready-fd N`` are added.
        environ: the whole environment of the child.
        log_file: its stdout and stderr are appended there; None: both go to this process's stderr.
        preexec: runs in the child between fork and exec.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], log_file: Path | None, preexec: Callable[[], None]
    ) -> None:
        self._command = tuple(command)
        self._environ = dict(environ)
        self._log_file = log_file
        self._preexec = preexec
        self._log_start_bytes = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_fd: int | None = None
        self._ready = False
        self._started_s = 0.0

    @property
    def pid(self) -> int:
        """Process id of the sidecar started last."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start a sidecar; the one before must have ended.

        Raises:
            OSError: the log file cannot be opened or the kernel has no room for a process.
        """
        self._close_ready_fd()
        output_fd = self._open_output()
        read_fd, write_fd = os.pipe()
        try:
            _announce_with_sigio(read_fd)
            self._process = subprocess.Popen(
                [*self._command, "--supervisor-pid", str(os.getpid()), "--ready-fd", str(write_fd)],
                stdin=subprocess.DEVNULL,
                stdout=output_fd,
                stderr=output_fd,
                env=self._environ,
                cwd="/",  # a module in the training script's folder must not shadow one of ours, nor a mount be held
                pass_fds=(write_fd,),
                start_new_session=True,
                preexec_fn=self._preexec,  # noqa: PLW1509 - the launcher has one thread
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
            os.close(output_fd)
        self._ready_fd, self._ready, self._started_s = read_fd, False, time.monotonic()

    def is_ready(self) -> bool:
        """Whether the sidecar has said that its socket serves."""
        if self._ready_fd is not None:
            with suppress(BlockingIOError):
                # One short line in one write: a pipe never splits it.
                self._ready = os.read(self._ready_fd, 64).startswith(b"READY\n")
                self._close_ready_fd()
        return self._ready

    def exit_code(self) -> int | None:
        """None while it lives; then its exit code, or minus the number of the signal that killed it."""
        assert self._process is not None
        return self._process.poll()

    def alive_s(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self._started_s

    def terminate(self) -> None:
        """SIGTERM: drain and end. The second one: end now."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL. What is sealed in shared memory stays there."""
        self._send(signal.SIGKILL)

    def log_tail(self) -> str:
        """The last lines that this sidecar wrote to its log file; empty if it writes to stderr."""
        if self._log_file is None:
            return ""
        with self._log_file.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start_bytes, end - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def _open_output(self) -> int:
        if self._log_file is None:
            return os.dup(2)
        fd = os.open(self._log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._log_start_bytes = os.fstat(fd).st_size
        return fd

    def _send(self, signo: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(signo)  # looks first whether it has ended, so never hits a reused pid

    def _close_ready_fd(self) -> None:
        if self._ready_fd is not None:
            os.close(self._ready_fd)
            self._ready_fd = None


def describe_exit(code: int) -> str:
    """How a child ended, for a person: ``code`` as :meth:`SidecarProcess.exit_code` gives it."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"


def _announce_with_sigio(fd: int) -> None:
    """Have the kernel send SIGIO when ``fd`` becomes readable: one wait for signals then covers the pipe as well."""
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK | os.O_ASYNC)
