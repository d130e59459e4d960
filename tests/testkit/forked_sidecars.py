"""Sidecars that are forked with torch imported: one that takes over begins in a tenth of a second instead of two."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

from testkit.kill_points import KillOrder
from testkit.nodes import READY, serve
from testkit.ranks import RankStarter, RunningRanks
from testkit.sidecars import STOP_LIMIT_S, Sidecar
from testkit.waiting import wait_until


class ForkedSidecar(Sidecar):
    """One sidecar after another of one job, each a child of the ranks' zygote; each may be told where to die."""

    def __init__(self, starter: RankStarter, shm_root: Path, folder: Path, **options: Any) -> None:
        self._starter = starter
        self._folder = folder
        self._lives = itertools.count(1)
        self._running: RunningRanks | None = None
        super().__init__(shm_root, folder / "sidecar.log", **options)

    def start(self, order: KillOrder | None = None) -> None:
        """Start it (again), perhaps to die at a point, and wait until it serves."""
        ready = self._folder / f"ready-{next(self._lives)}"
        arguments = ["--verbose", "run", "--job-id", self.job_id, "--shm-root", str(self.shm_root), *self._flags]
        environment = {"CUDA_VISIBLE_DEVICES": ""}
        running = self._starter.start(serve, 1, arguments, str(ready), {}, order, environment=environment)
        self._running = running
        wait_until(lambda: ready.exists() and ready.read_text() == READY, "the sidecar serves")

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
        running = self._end()
        assert running.exit_codes() == [-signal.SIGKILL], running.text(0)

    def stop(self) -> int:
        """SIGTERM, wait for the drain, return the exit code; of one that has been killed, that of SIGKILL."""
        if self._running is None:
            return -signal.SIGKILL
        self.resume()
        os.kill(self.pid, signal.SIGTERM)
        running = self._end()
        [code] = running.exit_codes(STOP_LIMIT_S)
        return code or int(running.result_of(0))

    def _end(self) -> RunningRanks:
        assert self._running is not None, "the sidecar has ended"
        running, self._running = self._running, None
        return running

    def story(self) -> str:
        """What the one that serves now has logged, for a failure's text."""
        return self._running.text(0) if self._running is not None else ""
