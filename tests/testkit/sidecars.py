"""Real sidecars: ``python -m ckpt_sidecar run`` as a child of the test, ready when the test gets it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckpt_proto.messages import Message
from ckpt_proto.runtime_dir import runtime_dir
from ckpt_proto.status import SidecarStatus
from ckpt_sidecar.status_query import ask_status
from testkit.waiting import LIMIT_S, wait_until

STOP_LIMIT_S = 40.0
"""Longest drain of any test. Shorter than other waits: a client that was left open would hold up every file's end."""


class Sidecar:
    """One sidecar; everything it logs goes to ``log``. ``entry`` is how Python gets to the command line's main."""

    def __init__(
        self,
        shm_root: Path,
        log: Path,
        job_id: str = "job",
        *,
        supervised: bool = True,
        entry: Sequence[str] = ("-m", "ckpt_sidecar"),
        **options: Any,
    ) -> None:
        self.shm_root = shm_root
        self.job_id = job_id
        self.log = log
        self._supervised = supervised
        self._entry = entry
        options.setdefault("nice", 0)  # a test waits for it, and the machine may be busy with others
        self._flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        self.start()

    def start(self) -> None:
        """Start it (again) and wait until it serves."""
        reader, writer = os.pipe()
        command = [sys.executable, *self._entry, "--verbose", "run", "--job-id", self.job_id]
        command += ["--shm-root", str(self.shm_root), "--ready-fd", str(writer), *self._flags]
        try:
            with open(self.log, "ab") as log:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[writer], cwd="/"
                )
            os.close(writer)
            readable, _, _ = select.select([reader], [], [], LIMIT_S)
            if not readable or os.read(reader, 16) != b"READY\n":
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"the sidecar did not become ready:\n{self.log.read_text()}")
        finally:
            os.close(reader)

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    @property
    def environment(self) -> dict[str, str]:
        """What makes a client use this sidecar and, unless ``supervised`` is False, never start another."""
        environment = {"CKPT_SIDECAR_SHM_ROOT": str(self.shm_root), "CKPT_SIDECAR_JOB_ID": self.job_id}
        return {**environment, "CKPT_SIDECAR_SUPERVISED": "1"} if self._supervised else environment

    @property
    def directory(self) -> Path:
        """Its runtime directory in shared memory."""
        return runtime_dir(self.shm_root, self.job_id)

    @property
    def regions(self) -> list[Path]:
        """The regions that are there now."""
        return sorted(self.directory.glob("*.region"))

    def status(self) -> SidecarStatus:
        """Its answer to AskStatus."""
        return ask_status(self.shm_root, self.job_id, LIMIT_S)

    def pause(self) -> None:
        """Stop it as a debugger would: alive, holding its lock, doing nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(
            lambda: Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T", "SIGSTOP"
        )

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        os.kill(self.pid, signal.SIGCONT)

    @contextmanager
    def hanging(self, slots: int = 2) -> Iterator[None]:
        """A storage that hangs: rank 0 has ``slots`` regions to fill, and none is given back while this lasts."""
        wait_until(lambda: self.can_be_filled(slots), f"{slots} regions are free and prepared")
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def can_be_filled(self, slots: int = 2) -> bool:
        """Whether rank 0's first ``slots`` regions are prepared and its own to fill."""
        regions = self.status().ranks[0].slots[:slots]
        return all(slot.state == "free" and slot.region_bytes for slot in regions)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(LIMIT_S)

    def terminate(self) -> None:
        """SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int:
        """Wait until it has ended; its exit code."""
        return self.process.wait(LIMIT_S)

    def cut_short(self) -> None:
        """SIGTERM, and SIGTERM again once it drains: it must end although work is under way, and say so."""
        self.terminate()
        wait_until(lambda: self.status().draining, "the drain has begun")
        self.terminate()
        assert self.wait() == 1, self.log.read_text()[-4000:]

    def stop(self) -> int:
        """SIGTERM, wait for the drain, return the exit code; kill what does not end."""
        if self.process.returncode is None:
            self.resume()
            self.process.terminate()
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"the sidecar did not drain:\n{self.log.read_text()[-4000:]}") from None
        return self.process.returncode


def exchange_frames(directory: Path, frames: list[bytes], answers: int) -> list[Message | bytes]:
    """Send raw frames to the sidecar in ``directory`` and return its first ``answers`` answers."""
    import zmq

    from ckpt_proto.codec import decode
    from ckpt_proto.runtime_dir import endpoint

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVTIMEO, round(LIMIT_S * 1000))
        socket.connect(endpoint(directory))
        for frame in frames:
            socket.send(frame)
        return [decode(socket.recv()) for _ in range(answers)]
