"""The sidecar process: builds everything in start order, runs the loop, stops in reverse. Knows all parts.

Stop order: no new clients are taken; what is under way ends; the socket goes; worker threads are joined;
regions and directory are removed; the lock goes last.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import secrets
import shutil
import signal
import socket
import time
from collections import deque

from ckpt_proto.codec import decode
from ckpt_proto.errors import RegionError, RemoteProtocolError
from ckpt_proto.messages import AskStatus, Heartbeat, Hello, Message, Status, SubmitShard
from ckpt_proto.process import process_start_s
from ckpt_proto.region import Seal, region_path, seal_path
from ckpt_sidecar.action_runner import ActionRunner
from ckpt_sidecar.checkpoint_table import CheckpointTable
from ckpt_sidecar.config import SidecarConfig
from ckpt_sidecar.events import (
    Action,
    AtCoordinator,
    DirectoryOpened,
    DirectoryRefused,
    Event,
    FromCoordinator,
    FromRank,
    Published,
    PublishFailed,
    RankDied,
    Send,
    Tick,
    ToCoordinator,
    ToRank,
)
from ckpt_sidecar.job_lock import JobLock
from ckpt_sidecar.job_table import JobTable
from ckpt_sidecar.priority import lower_priority
from ckpt_sidecar.rank_record import RankRecord
from ckpt_sidecar.server import Server
from ckpt_sidecar.status_report import Identity, build_status
from ckpt_sidecar.throttle import Throttle

TICK_S = 1.0
SILENT_S = 30.0
"""Without a heartbeat for so long a rank does not hold up a drain any more, and one in another pid namespace, which
cannot be looked up, counts as dead."""

EXIT_OK = 0
EXIT_ABORTED = 1

logger = logging.getLogger(__name__)

_FOR_COORDINATOR = (AtCoordinator, DirectoryOpened, DirectoryRefused, Published, PublishFailed)


class Daemon:
    """One sidecar, from lock to exit.

    Raises:
        JobLockTaken: another one serves this job on this node.
    """

    def __init__(self, config: SidecarConfig) -> None:
        self._config = config
        self._directory = config.runtime_dir
        self._lock = JobLock(self._directory)
        self._remove_leftovers()
        torch_version = importlib.metadata.version("torch")
        self._identity = Identity(secrets.token_hex(8), socket.gethostname(), torch_version, time.monotonic())
        self._jobs = JobTable(config.job_id, self._identity.sidecar_id, self._identity.node, torch_version)
        self._checkpoints = CheckpointTable(lambda: secrets.token_hex(4))
        self._posted: deque[Event] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        throttle = Throttle(config.max_write_bytes_per_s)
        self._runner = ActionRunner(self._directory, config.writers, throttle, self._post)
        self._server = Server(self._directory)
        self._server.wake_by(self._wake_fd)
        self._heard_s: dict[int, float] = {}
        self._terms = 0
        self._supervisor_start_s = process_start_s(config.supervisor_pid) if config.supervisor_pid else None
        self._next_tick_s = time.monotonic()
        self._idle_since_s = time.monotonic()

    def run(self) -> int:
        """Serve until told to stop.

        Returns:
            The exit code: 0 after a complete drain; 1 if it was cut short, or if what a rank had staged could not be
            saved and no rank was left to be told.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        lower_priority(self._config.nice)
        self._runner.start()
        self._say_ready()
        logger.info("sidecar %s serves job %s in %s", self._identity.sidecar_id, self._config.job_id, self._directory)
        while not self._should_stop():
            self._server.wait(self._next_tick_s - time.monotonic())
            self._take_everything()
        return self._stop()

    # ------------------------------------------------------------ loop

    def _take_everything(self) -> None:
        now_s = time.monotonic()
        for peer, pid, message in self._server.receive():
            self._take_message(peer, pid, message, now_s)
        self._clear_wake()
        while self._posted:
            self._handle(self._posted.popleft(), now_s)
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            self._look_for_the_dead(now_s)
            self._look_for_the_supervisor()
            self._perform(self._checkpoints.handle(Tick(), now_s), now_s)

    def _clear_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass  # nobody has woken the loop

    def _take_message(self, peer: bytes, pid: int, message: Message, now_s: float) -> None:
        if isinstance(message, AskStatus):
            status = build_status(self._config, self._identity, self._jobs, self._checkpoints, self._runner, now_s)
            self._server.send(peer, Status(status))
            return
        if isinstance(message, Heartbeat):
            self._hear(peer, now_s)
        else:
            logger.debug("from %s: %s", peer.hex(), type(message).__name__)
        if isinstance(message, Hello):
            self._look_for_the_dead(now_s)  # a restarted rank may say Hello before its old process was missed
        self._handle(FromRank(peer, pid, message), now_s)
        if isinstance(message, Hello):
            self._hear(peer, now_s)

    def _hear(self, peer: bytes, now_s: float) -> None:
        for rank, record in self._jobs.ranks.items():
            if record.peer == peer:
                self._heard_s[rank] = now_s

    def _connected_ranks(self, now_s: float) -> list[int]:
        """Living ranks whose client lives too: a trainer may have dropped its client without a Goodbye."""
        return [rank for rank in self._jobs.living_ranks if now_s - self._heard_s.get(rank, now_s) < SILENT_S]

    def _handle(self, event: Event, now_s: float) -> None:
        table = self._checkpoints if isinstance(event, _FOR_COORDINATOR) else self._jobs
        self._perform(table.handle(event, now_s), now_s)

    def _perform(self, actions: list[Action], now_s: float) -> None:
        for action in actions:
            match action:
                case Send(peer=peer, message=message):
                    self._server.send(peer, message)
                case ToCoordinator(rank=rank, message=message):
                    self._handle(AtCoordinator(rank, message), now_s)
                case ToRank(rank=rank, message=message):
                    self._handle(FromCoordinator(rank, message), now_s)
                case _:
                    self._runner.run(action)

    def _post(self, event: Event) -> None:
        """Called from worker threads: hand an event to the loop."""
        self._posted.append(event)
        os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------ life and death

    def _look_for_the_dead(self, now_s: float) -> None:
        for rank in self._jobs.living_ranks:
            record = self._jobs.ranks[rank]
            reason = self._why_dead(rank, record, now_s)
            if reason is None:
                continue
            logger.warning("rank %d is gone: %s", rank, reason)
            for submit in self._sealed_by(rank, record):
                self._handle(FromRank(record.peer, record.hello.pid, submit), now_s)
            self._handle(RankDied(rank, record.hello.pid, reason), now_s)

    def _look_for_the_supervisor(self) -> None:
        pid = self._config.supervisor_pid
        if pid is not None and not self._terms and process_start_s(pid) != self._supervisor_start_s:
            logger.warning("the supervisor (pid %d) is gone: draining, as on SIGTERM", pid)
            self._terms = 1

    def _why_dead(self, rank: int, record: RankRecord, now_s: float) -> str | None:
        pid = record.hello.pid
        start_s = process_start_s(pid)
        if start_s == record.hello.process_start_s:
            return None
        silent_s = now_s - self._heard_s.setdefault(rank, now_s)
        if record.other_namespace:
            return f"no heartbeat for {silent_s:.0f} s" if silent_s > SILENT_S else None
        return f"its process {pid} has ended"

    def _sealed_by(self, rank: int, record: RankRecord) -> list[SubmitShard]:
        """What the dead rank had sealed: its last message may have died with it, the seal in shared memory has not."""
        submits: list[SubmitShard] = []
        for slot in range(len(record.slots)):
            path = seal_path(region_path(self._directory, rank, slot))
            if not path.exists():
                continue
            try:
                seal = Seal(path)
                try:
                    content = seal.read()
                finally:
                    seal.close()
                message = decode(content) if content is not None else None
            except (RegionError, RemoteProtocolError) as error:
                logger.warning("the seal %s cannot be read: %s", path, error)
                continue
            if isinstance(message, SubmitShard) and (rank, message.save) not in self._jobs.jobs:
                submits.append(message)
        return submits

    # ------------------------------------------------------------ stopping

    def _on_signal(self, number: int, frame: object) -> None:
        self._terms += 1
        os.eventfd_write(self._wake_fd, 1)

    def _should_stop(self) -> bool:
        if self._terms >= 2:
            return True
        if self._terms and not self._jobs.draining:
            self._jobs.draining = True
            logger.info("draining: no new clients; %d ranks still connected", len(self._jobs.living_ranks))
        if self._posted or self._jobs.is_busy or self._checkpoints.is_busy or self._connected_ranks(time.monotonic()):
            self._idle_since_s = time.monotonic()
            return False
        if self._jobs.draining:
            return True
        limit_s = self._config.idle_exit_s
        if limit_s is None:
            return False
        if self._jobs.ended_in_order:
            return True
        return time.monotonic() - self._idle_since_s > limit_s

    def _stop(self) -> int:
        cut_short = self._jobs.is_busy or self._checkpoints.is_busy
        logger.info("stopping %s", "with work under way: it is lost" if cut_short else "after a complete drain")
        for save, why in self._jobs.lost.items():
            logger.error("step %d was staged but could not be saved, and no rank was left to tell: %s", save.step, why)
        self._server.close()
        self._runner.close()
        os.close(self._wake_fd)
        shutil.rmtree(self._directory)
        try:
            self._directory.parent.rmdir()
        except OSError:
            pass  # another job of this user has its directory there
        self._lock.release()
        return EXIT_ABORTED if cut_short or self._jobs.lost else EXIT_OK

    def _remove_leftovers(self) -> None:
        """Regions and socket of a sidecar that died; nobody else can use them while this one holds the lock."""
        for path in self._directory.iterdir():
            if path.suffix in (".region", ".seal", ".sock"):
                path.unlink()

    def _say_ready(self) -> None:
        if self._config.ready_fd is not None:
            os.write(self._config.ready_fd, b"READY\n")
            os.close(self._config.ready_fd)
