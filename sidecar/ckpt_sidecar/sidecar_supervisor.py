"""Keeps the sidecar alive while torchrun runs, and has it finish its writes afterwards."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from ckpt_sidecar.sidecar_process import RestartBackoff, SidecarProcess, describe_exit
from ckpt_sidecar.signal_queue import SignalQueue, signal_name

REPORT_EVERY_S = 5.0
STOP_TIMEOUT_S = 10.0
"""How long a sidecar that was told to end now may take until it is killed, in seconds."""

_ENDS_DRAIN = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
_EXIT_HINTS = {
    2: " (it does not accept its options)",
    4: " (another sidecar serves this job on this node)",
}


class SidecarSupervisor:
    """Restarts, drains and stops one :class:`SidecarProcess`.

    Args:
        sidecar: started at least once before :meth:`look` or :meth:`drain`.
        signals: what every wait here waits on.
        ask_pending: asks the sidecar what it is still writing; one line for a person.
    """

    def __init__(self, sidecar: SidecarProcess, signals: SignalQueue, ask_pending: Callable[[], str]) -> None:
        self._sidecar = sidecar
        self._signals = signals
        self._ask_pending = ask_pending
        self._backoff = RestartBackoff()
        self._restart_due_s: float | None = None
        self._announce = False
        self._asked = False
        self._revived = False

    def look(self) -> float | None:
        """Do what is due: report a death, restart. Returns the seconds until something is due, None if nothing is."""
        code = self._sidecar.exit_code()
        if code is None:
            if self._announce and self._sidecar.is_ready():
                say(f"the sidecar serves again (pid {self._sidecar.pid})")
                self._announce = False
            return None
        if self._restart_due_s is None:
            self._schedule_restart(f"the sidecar {describe_exit(code)}{_EXIT_HINTS.get(code, '')}")
        assert self._restart_due_s is not None
        left_s = self._restart_due_s - time.monotonic()
        return left_s if left_s > 0 else self._restart()

    def drain(self, timeout_s: float, ready_timeout_s: float) -> bool:
        """Have the sidecar finish and end. True if everything it had is durable. It is gone in either case.

        One that crashes meanwhile, or had crashed just before, is started again: it takes over what lies in shared
        memory and finishes it.
        """
        deadline_s = time.monotonic() + timeout_s
        report_due_s = time.monotonic() + REPORT_EVERY_S
        self._asked = self._revived = False
        if self._restart_due_s is not None:
            self._restart_due_s = time.monotonic()
        while (durable := self._drain_step()) is None:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                return self._give_up(f"the sidecar has not finished within {timeout_s:g} s")
            if not self._asked and self._restart_due_s is None and self._sidecar.alive_s() > ready_timeout_s:
                return self._give_up(f"the sidecar does not serve after {ready_timeout_s:g} s")
            if now_s >= report_due_s:
                say(f"waiting up to {deadline_s - now_s:.0f} s more for the sidecar: {self._ask_pending()}")
                report_due_s = time.monotonic() + REPORT_EVERY_S
            info = self._signals.wait(min(deadline_s, report_due_s, self._restart_due_s or deadline_s) - now_s)
            if info is not None and info.si_signo in _ENDS_DRAIN:
                return self._give_up(f"got {signal_name(info.si_signo)} while the sidecar was finishing")
        return durable

    def stop(self) -> None:
        """End the sidecar now: SIGTERM, and SIGKILL if it is still there after :data:`STOP_TIMEOUT_S`."""
        self._sidecar.terminate()
        if not self._wait_end(STOP_TIMEOUT_S):
            say(f"the sidecar does not end within {STOP_TIMEOUT_S:g} s: killing it (pid {self._sidecar.pid})")
            self._sidecar.kill()
            self._wait_end(STOP_TIMEOUT_S)

    def _drain_step(self) -> bool | None:
        """Ask for the end, or revive. None while it is under way; then whether the sidecar ended as asked."""
        code = self._sidecar.exit_code()
        if code is None:
            if not self._asked and self._sidecar.is_ready():
                self._sidecar.terminate()
                self._asked = True
            return None
        if code >= 0 and (self._asked or self._revived):
            return self._report_end(code)
        self._asked = False
        self.look()
        return None

    def _schedule_restart(self, why: str) -> None:
        delay_s = self._backoff.delay_after(self._sidecar.alive_s())
        say(f"{why}; starting it again in {delay_s:g} s")
        self._restart_due_s = time.monotonic() + delay_s

    def _restart(self) -> float | None:
        try:
            self._sidecar.start()
        except OSError as error:
            self._schedule_restart(f"the sidecar could not be started: {error}")
            return self.look()
        self._restart_due_s = None
        self._announce = self._revived = True
        return None

    def _report_end(self, code: int) -> bool:
        if code != 0:
            say(f"the sidecar could not finish: it {describe_exit(code)}{_EXIT_HINTS.get(code, '')}")
        return code == 0

    def _give_up(self, why: str) -> bool:
        say(f"{why}: ending it. Not durable: {self._ask_pending()}")
        self.stop()
        return False

    def _wait_end(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self._sidecar.exit_code() is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._signals.wait(left_s)
        return True


def say(text: str) -> None:
    """One message on stderr. A terminal that is gone is no reason to stop."""
    with suppress(OSError):
        os.write(2, f"ckpt-torchrun: {text}\n".encode(errors="replace"))
