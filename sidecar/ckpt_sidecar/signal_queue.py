"""Signals as a queue that one thread reads, instead of handlers that run in between.

Every watched signal is blocked for the whole life of the process, so none can be lost or interrupt anything: it waits
in the kernel until :meth:`SignalQueue.wait` takes it, with the kernel's word on who sent it.
They are never unblocked: one that arrives in the last moment must not replace the exit code.
"""

from __future__ import annotations

import os
import signal

ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})
"""Signals whose sender wants the job to end."""

FORWARDED = ENDING | {signal.SIGUSR1, signal.SIGUSR2}
"""Signals that belong to torchrun."""

_WATCHED = FORWARDED | {signal.SIGCHLD, signal.SIGIO}

_SI_KERNEL = 0x80
"""``si_code`` of a signal that no process sent (asm-generic/siginfo.h); Python's signal module has no name for it."""


class SignalQueue:
    """Owns the signals of a single-threaded process. Make it before the first child."""

    def __init__(self) -> None:
        self._mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)

    def wait(self, timeout_s: float | None) -> signal.struct_siginfo | None:
        """The next signal, or None after ``timeout_s`` seconds; None waits without a bound.

        SIGCHLD and SIGIO only mean "look again": several may have become one.
        """
        if timeout_s is None:
            return signal.sigwaitinfo(_WATCHED)
        return signal.sigtimedwait(_WATCHED, max(0.0, timeout_s))

    def restore_in_child(self) -> None:
        """``preexec_fn`` of every child: blocked signals would survive exec and make it deaf."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)


def must_forward(signo: int, si_code: int, *, session_leader: bool) -> bool:
    """Whether a signal that this process got has yet to be sent to torchrun.

    Ctrl-C and Ctrl-\\ come from the kernel to the whole foreground group, torchrun included; a second SIGINT would
    interrupt its orderly stop. A hang-up goes to the session's leader alone.
    """
    if signo not in FORWARDED:
        return False
    from_terminal = si_code == _SI_KERNEL
    return not from_terminal or (signo == signal.SIGHUP and session_leader)


def is_session_leader() -> bool:
    """Whether this process leads its session, as under ``ssh -t host ckpt-torchrun`` or as a container's first one."""
    return os.getsid(0) == os.getpid()


def signal_name(signo: int) -> str:
    """``SIGTERM``, or ``signal 35`` for one without a name."""
    try:
        return signal.Signals(signo).name
    except ValueError:
        return f"signal {signo}"
