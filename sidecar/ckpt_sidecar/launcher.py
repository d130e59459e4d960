"""``ckpt-torchrun``: a sidecar around a torchrun.

    ckpt-torchrun [options] -- <torchrun's arguments>

The sidecar is started first and in its own session; torchrun then runs in this process's group and terminal, as if it
had been called directly; at the end the sidecar finishes its writes and the exit code is torchrun's. One thread, no
handlers: all there is to wait for arrives in a :class:`~ckpt_sidecar.signal_queue.SignalQueue`. Imports no torch.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_proto.errors import CheckpointError
from ckpt_proto.process import sidecar_environment
from ckpt_proto.runtime_dir import lock_owner, runtime_dir
from ckpt_sidecar.launch_options import LaunchOptions, UsageError, parse_command_line
from ckpt_sidecar.sidecar_process import SidecarProcess, describe_exit
from ckpt_sidecar.sidecar_supervisor import SidecarSupervisor, say
from ckpt_sidecar.signal_queue import (
    ENDING,
    FORWARDED,
    SignalQueue,
    is_session_leader,
    must_forward,
    signal_name,
)

EXIT_USAGE = 2
EXIT_NO_SIDECAR = 3
EXIT_NOT_DRAINED = 76
"""torchrun succeeded, but a staged checkpoint did not become durable. Neither torchrun nor a shell uses this code."""

PREDECESSOR_POLL_S = 1.0
_STATUS_TIMEOUT_S = 1.0
_SIDECAR_USAGE_EXIT = 2
_SIDECAR_TAKEN_EXIT = 4


@dataclass(frozen=True)
class Commands:
    """The programs that are launched; tests put stand-ins here."""

    sidecar: tuple[str, ...] = (sys.executable, "-m", "ckpt_sidecar")
    torchrun: tuple[str, ...] = (sys.executable, "-m", "torch.distributed.run")


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code; the module's documentation and ``--help`` list them."""
    try:
        options = parse_command_line(
            sys.argv[1:] if argv is None else argv, os.environ, lambda: f"job-{secrets.token_hex(6)}"
        )
    except UsageError as error:
        say(str(error))
        return EXIT_USAGE
    launch = Launch(options, Commands(), os.environ, lambda: ask_pending(options), lambda: is_draining(options))
    return launch.run()


def ask_pending(options: LaunchOptions) -> str:
    """What the sidecar is still writing, or why that cannot be said; one line, within about a second."""
    from ckpt_sidecar.status_query import ask_status
    from ckpt_sidecar.status_view import describe_pending

    try:
        return describe_pending(ask_status(options.shm_root, options.job_id, _STATUS_TIMEOUT_S))
    except Exception as error:  # noqa: BLE001 - a line for a person must never end a drain
        return f"unknown ({error})"


def is_draining(options: LaunchOptions) -> bool:
    """Whether the sidecar that serves the job now takes no new clients; False if it does not say."""
    from ckpt_sidecar.status_query import ask_status

    try:
        return ask_status(options.shm_root, options.job_id, _STATUS_TIMEOUT_S).draining
    except CheckpointError:
        return lock_owner(runtime_dir(options.shm_root, options.job_id)) is None  # it has just ended


class Launch:
    """One run of the wrapper, from the sidecar's start to its end. Blocks signals from construction on.

    Args:
        options: what to do.
        commands: the two programs.
        environ: the environment that both get, plus what they need.
        ask_pending: one line saying what the sidecar is still writing.
        is_draining: whether the sidecar that serves the job now is about to end.
    """

    def __init__(
        self,
        options: LaunchOptions,
        commands: Commands,
        environ: Mapping[str, str],
        ask_pending: Callable[[], str],
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._options = options
        self._torchrun_command = (*commands.torchrun, *options.torchrun_args)
        self._torchrun_environ = torchrun_environ(options, environ)
        self._signals = SignalQueue()
        self._held: list[int] = []
        self._ask_pending = ask_pending
        self._is_draining = is_draining
        self._patience_ends_s: float | None = None
        self._sidecar = SidecarProcess(
            sidecar_command(options, commands),
            sidecar_environment(environ),
            options.log_file,
            self._signals.restore_in_child,
        )
        self._supervisor = SidecarSupervisor(self._sidecar, self._signals, ask_pending)

    def run(self) -> int:
        """Launch, wait, drain. Returns the exit code of the wrapper."""
        refused = self._bring_up_sidecar()
        if refused is not None:
            return refused
        try:
            code = self._run_torchrun()
        except BaseException:
            self._sidecar.terminate()  # in its own session nobody else would: it drains alone
            raise
        drained = self._supervisor.drain(self._options.drain_timeout_s, self._options.ready_timeout_s)
        return final_exit_code(code, drained=drained)

    def _bring_up_sidecar(self) -> int | None:
        """Start the sidecar and wait until it serves; otherwise the exit code with which to give up."""
        try:
            self._sidecar.start()
        except OSError as error:
            say(f"the sidecar could not be started, so torchrun is not: {error}")
            return EXIT_NO_SIDECAR
        while not self._sidecar.is_ready():
            code = self._sidecar.exit_code()
            if code is None:
                left_s = self._options.ready_timeout_s - self._sidecar.alive_s()
                if left_s <= 0:
                    say(f"the sidecar does not serve after {self._options.ready_timeout_s:g} s: not starting torchrun")
                    self._supervisor.stop()
                    return EXIT_NO_SIDECAR
            elif code == _SIDECAR_TAKEN_EXIT and self._predecessor_finishes():
                left_s = PREDECESSOR_POLL_S
            else:
                say(start_failure(code, self._sidecar.log_tail(), self._options))
                return EXIT_USAGE if code == _SIDECAR_USAGE_EXIT else EXIT_NO_SIDECAR
            ended_by = self._wait_before_torchrun(left_s)
            if ended_by is not None:
                return 128 + ended_by
            if code is not None:
                self._sidecar.start()
        return None

    def _wait_before_torchrun(self, timeout_s: float) -> int | None:
        """Wait for something to happen; the signal's number if it ends the wrapper."""
        info = self._signals.wait(timeout_s)
        if info is not None and info.si_signo in ENDING:
            say(f"got {signal_name(info.si_signo)} before torchrun was started: not starting it")
            if self._sidecar.exit_code() is None:
                self._supervisor.stop()
            return int(info.si_signo)
        if info is not None and info.si_signo in FORWARDED:
            self._held.append(info.si_signo)
        return None

    def _predecessor_finishes(self) -> bool:
        """Whether the sidecar of an earlier start of the job is still writing what that had staged: this start resumes
        from it, so it is waited for, as long as for a drain."""
        now_s = time.monotonic()
        if self._patience_ends_s is None:
            self._patience_ends_s = now_s + self._options.drain_timeout_s
        if now_s > self._patience_ends_s or not self._is_draining():
            return False
        say(f"the sidecar of an earlier start of job {self._options.job_id} still writes: {self._ask_pending()}")
        return True

    def _run_torchrun(self) -> int:
        """Run torchrun to its end, pass signals on, keep a sidecar alive meanwhile. Returns a shell's exit code."""
        torchrun = subprocess.Popen(
            self._torchrun_command,
            env=self._torchrun_environ,
            preexec_fn=self._signals.restore_in_child,  # noqa: PLW1509 - this process has one thread
        )
        for signo in self._held:
            torchrun.send_signal(signo)
        session_leader = is_session_leader()
        while (code := torchrun.poll()) is None:
            info = self._signals.wait(self._supervisor.look())
            if info is not None and must_forward(info.si_signo, info.si_code, session_leader=session_leader):
                torchrun.send_signal(info.si_signo)
        return shell_exit_code(code)


def sidecar_command(options: LaunchOptions, commands: Commands) -> tuple[str, ...]:
    """The sidecar's command line, but for ``--ready-fd``."""
    verbose = ("--verbose",) if options.verbose else ()
    return (*commands.sidecar, *verbose, "run", *run_arguments(options))


def run_arguments(options: LaunchOptions) -> tuple[str, ...]:
    """What ``ckpt-sidecar run`` is told about this job."""
    return ("--job-id", options.job_id, "--shm-root", options.shm_root, *options.sidecar_args)


def torchrun_environ(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """torchrun's environment, and so the ranks': which sidecar is theirs, and that they need not start one."""
    return {
        **environ,
        "CKPT_SIDECAR_JOB_ID": options.job_id,
        "CKPT_SIDECAR_SHM_ROOT": options.shm_root,
        "CKPT_SIDECAR_SUPERVISED": "1",
    }


def start_failure(code: int, log_tail: str, options: LaunchOptions) -> str:
    """Why there is no sidecar, and what to do about it."""
    lines = [f"the sidecar {describe_exit(code)} before it served, so torchrun is not started"]
    if code == _SIDECAR_USAGE_EXIT:
        lines.append(f"it does not accept its options: {' '.join(run_arguments(options))}")
    if code == _SIDECAR_TAKEN_EXIT:
        lines.append(
            f"another sidecar serves job {options.job_id} on this node: let it finish, or give another --job-id"
        )
    if log_tail:
        lines.append(f"the end of {options.log_file}:\n{log_tail}")
    return "\n".join(lines)


def shell_exit_code(returncode: int) -> int:
    """A child's return code as a shell tells it: 128+N for death by signal N."""
    return 128 - returncode if returncode < 0 else returncode


def final_exit_code(torchrun_code: int, *, drained: bool) -> int:
    """torchrun's exit code; :data:`EXIT_NOT_DRAINED` if only the drain failed."""
    return EXIT_NOT_DRAINED if torchrun_code == 0 and not drained else torchrun_code


if __name__ == "__main__":
    sys.exit(main())
