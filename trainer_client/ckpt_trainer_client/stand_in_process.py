"""``ckpt-sidecar stand-in`` as a child process: started, waited for within a bound, ended if it is wanted no more."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckpt_proto.identity import SaveKey
from ckpt_proto.process import sidecar_environment
from ckpt_proto.runtime_dir import log_path
from ckpt_trainer_client.config import ClientConfig

POLL_S = 0.1
"""How often is looked whether the client closes while a stand-in runs: a child has no wake-up that does both."""

KILL_S = 10.0
"""How long a killed stand-in may take to be gone; a storage may hold it."""

EXIT_LOCK_TAKEN = 4

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StandInReport:
    """``code``: the exit code, None if it was ended from here; ``failures``: kind and text of what it could not do."""

    code: int | None
    failures: tuple[tuple[str, str], ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether everything was done."""
        return self.code == 0

    @property
    def met_a_sidecar(self) -> bool:
        """Whether the job's lock was taken: by a sidecar, or by a stand-in that does not end."""
        return self.code == EXIT_LOCK_TAKEN

    def __str__(self) -> str:
        """One line for a person."""
        if self.failures:
            return "; ".join(f"{text} [{kind}]" for kind, text in self.failures)
        if self.met_a_sidecar:
            return "the job's lock was taken"
        return "the stand-in was ended" if self.code is None else f"the stand-in ended with exit code {self.code}"


class StandInProcess:
    """One at a time, for one client; everything but :meth:`stop` is called on the thread ``ckpt-stand-in``."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._stopped = threading.Event()

    def write(self, session: str, next_seq: int, pending: Sequence[int], timeout_s: float) -> StandInReport:
        """Write what is sealed for the saves ``pending`` of this rank, and by ranks of this node that have died.

        What is sealed for another save before ``next_seq`` has ended, and is taken back.
        """
        numbers = ["--pending", *map(str, pending)] if pending else []
        return self._run("write", ["--session", session, "--next-seq", str(next_seq), *numbers], timeout_s)

    def publish(self, save: SaveKey, timeout_s: float) -> StandInReport:
        """Commit a complete attempt."""
        return self._run("publish", self._about(save), timeout_s)

    def withdraw(self, save: SaveKey, timeout_s: float) -> StandInReport:
        """Take this rank's part of an attempt back, unless it is committed."""
        return self._run("withdraw", self._about(save), timeout_s)

    def stop(self) -> None:
        """End the one that runs, and run no more. Any thread."""
        self._stopped.set()

    def _about(self, save: SaveKey) -> list[str]:
        return ["--directory", self._config.directory, "--save", save.save_id, "--step", str(save.step)]

    def _run(self, work: str, arguments: Sequence[str], timeout_s: float) -> StandInReport:
        if self._stopped.is_set():
            return StandInReport(None)
        config = self._config
        command = [sys.executable, "-m", "ckpt_sidecar", "stand-in", work, "--job-id", config.job_id]
        command += ["--shm-root", str(config.shm_root), "--rank", str(config.rank), *arguments]
        try:
            process = self._start(command)
        except OSError as error:
            return StandInReport(None, ((type(error).__name__, f"the stand-in cannot be started: {error}"),))
        code, output = self._await(process, time.monotonic() + timeout_s)
        report = StandInReport(code, tuple(_failures_in(output)))
        logger.debug("stand-in %s: %s", work, report)
        return report

    def _start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        with self._log() as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # a launcher that kills the rank's group does not cut a write short
                env=sidecar_environment(),
                cwd="/",
            )

    @contextmanager
    def _log(self) -> Iterator[int]:
        """The job's log; nothing if the job's directory is gone."""
        path = log_path(self._config.runtime_dir)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(path, flags, 0o600)
        except FileNotFoundError:
            fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def _await(self, process: subprocess.Popen[str], deadline_s: float) -> tuple[int | None, str]:
        while not self._stopped.is_set() and time.monotonic() < deadline_s:
            try:
                output, _ = process.communicate(timeout=POLL_S)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                continue
        process.kill()
        try:
            process.communicate(timeout=KILL_S)
        except subprocess.TimeoutExpired:
            logger.error("the stand-in (pid %d) has not ended %.0f s after it was killed", process.pid, KILL_S)
        return None, ""


def _failures_in(output: str) -> Iterator[tuple[str, str]]:
    for line in output.splitlines():
        try:
            said: Any = json.loads(line)
        except ValueError:
            logger.warning("a stand-in has said %r", line[:200])
            continue
        if isinstance(said, dict) and said.get("kind"):
            yield str(said["kind"]), str(said.get("message", ""))
