"""Sidecars that are forked with torch imported: one begins in a tenth of a second instead of two."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckpt_proto.process import process_start_s
from testkit.kill_points import KillOrder
from testkit.nodes import READY, serve
from testkit.ranks import RankStarter, RunningRanks
from testkit.sidecars import STOP_LIMIT_S, Sidecar
from testkit.waiting import LIMIT_S, wait_until

_LIVES = itertools.count(1)


class ForkedSidecar(Sidecar):
    """One sidecar after another of one job, each a child of the ranks' zygote; each may be told where to die.

    It has the zygote's limits, umask and environment, not those of the test. ``program`` is what runs in the process,
    :func:`serve` or what calls it, and ``told`` what it gets besides.
    """

    def __init__(
        self,
        starter: RankStarter,
        shm_root: Path,
        log: Path,
        job_id: str = "job",
        *,
        program: Callable[..., int] = serve,
        told: Sequence[Any] = (),
        **options: Any,
    ) -> None:
        self._starter = starter
        self._program, self._told = program, told
        self._running: RunningRanks | None = None
        self._code = 0
        super().__init__(shm_root, log, job_id, **options)

    def start(self, order: KillOrder | None = None) -> None:
        """Start it (again), perhaps to die at a point, and wait until it serves."""
        ready = self.log.with_name(f"ready-{next(_LIVES)}")
        arguments = ["--verbose", "run", "--job-id", self.job_id, "--shm-root", str(self.shm_root), *self._flags]
        environment = {"CUDA_VISIBLE_DEVICES": ""}
        given = (arguments, str(ready), {}, order, *self._told)
        self._running = self._starter.start(self._program, 1, *given, environment=environment, log=self.log)
        wait_until(lambda: self._has_ended() or (ready.exists() and ready.read_text() == READY), "the sidecar serves")
        # One that was ordered to die may have done so already.
        assert order is not None or not self._has_ended(), f"the sidecar did not become ready:\n{self.story()}"
        ready.unlink(missing_ok=True)

    def _has_ended(self) -> bool:
        return process_start_s(self.pid) is None

    @property
    def pid(self) -> int:
        """The process of the one that serves now."""
        assert self._running is not None, "the sidecar has ended"
        return self._running.pids[0]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.await_death()

    def await_death(self) -> None:
        """Wait until it has been killed, by itself or another."""
        assert self.wait() == -signal.SIGKILL, self.log.read_text()[-4000:]

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        """Wait until it has ended; its exit code."""
        assert self._running is not None, "the sidecar has ended"
        running, self._running = self._running, None
        [code] = running.exit_codes(timeout_s)
        self._code = code or int(running.result_of(0))
        return self._code

    def stop(self) -> int:
        """SIGTERM, wait for the drain, return the exit code; of one that has ended, its own."""
        if self._running is None:
            return self._code
        self.resume()
        self.terminate()
        return self.wait(STOP_LIMIT_S)

    def story(self) -> str:
        """What the one that serves now has logged, for a failure's text."""
        return self._running.text(0) if self._running is not None else ""
