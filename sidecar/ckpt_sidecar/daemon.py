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
import time
from collections import deque
from collections.abc import Iterable

from ckpt_proto.messages import AskStatus, Goodbye, Heartbeat, Hello, Message, Status
from ckpt_proto.node_name import node_name
from ckpt_proto.process import process_start_s
from ckpt_proto.status import SidecarStatus
from ckpt_sidecar.action_runner import ActionRunner
from ckpt_sidecar.actions import Action, Send, ToCoordinator, ToRank
from ckpt_sidecar.checkpoint_table import COORDINATOR_EVENTS, CheckpointTable
from ckpt_sidecar.config import SidecarConfig
from ckpt_sidecar.coordination import Coordination
from ckpt_sidecar.delivery import Local
from ckpt_sidecar.events import (
    CoordinatorUp,
    Event,
    FromRank,
    RegionsFound,
    Tick,
)
from ckpt_sidecar.job_lock import JobLock
from ckpt_sidecar.job_table import JobTable
from ckpt_sidecar.leftovers import find_regions
from ckpt_sidecar.manners import Manners
from ckpt_sidecar.orphans import OrphanSweep
from ckpt_sidecar.rank_watch import RankWatch
from ckpt_sidecar.server import Server
from ckpt_sidecar.status_report import Identity, build_status

TICK_S = 1.0
OTHERS_S = 30.0
"""How long a sidecar that has nothing else to do waits for other nodes to take what it said and to say how saves ended.
What is durable is in the ledger all the same."""

EXIT_OK = 0
EXIT_ABORTED = 1

logger = logging.getLogger(__name__)


class Daemon:
    """One sidecar, from lock to exit.

    Raises:
        JobLockTaken: another one serves this job on this node.
    """

    def __init__(self, config: SidecarConfig) -> None:
        self._config = config
        self._directory = config.runtime_dir
        self._lock = JobLock(self._directory)
        torch_version = importlib.metadata.version("torch")
        self._identity = Identity(secrets.token_hex(8), node_name(), torch_version, time.monotonic())
        self._jobs = JobTable(
            config.job_id,
            self._identity.sidecar_id,
            self._identity.node,
            torch_version,
            retry_s=config.storage_retry_s,
            generation=secrets.randbits(40),
        )
        self._checkpoints = CheckpointTable(
            lambda: secrets.token_hex(4), retry_s=config.storage_retry_s, stall_s=config.write_stall_s
        )
        self._posted: deque[Event] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._manners = Manners(config, self._jobs)
        self._runner = ActionRunner(
            self._directory,
            config.writers,
            self._manners.throttle,
            self._post,
            reap_older_than_s=config.reap_older_than_s,
            cost=self._manners.cost,
        )
        self._orphans = OrphanSweep(config.shm_root, self._directory)
        self._server = Server(self._directory)
        self._server.wake_by(self._wake_fd)
        self._coordination = Coordination(
            Local(config.job_id, self._identity.node, self._identity.sidecar_id),
            key_file=config.peer_key_file,
            insecure=config.peer_insecure,
            node_timeout_s=config.node_timeout_s,
            watch=self._server.watch,
            unwatch=self._server.unwatch,
        )
        self._watch = RankWatch(self._jobs, self._directory)
        self._terms = 0
        self._supervisor_start_s = process_start_s(config.supervisor_pid) if config.supervisor_pid else None
        self._next_tick_s = time.monotonic()
        self._idle_since_s = self._done_s = time.monotonic()

    def run(self) -> int:
        """Serve until told to stop.

        Returns:
            The exit code: 0 after a complete drain; 1 if it was cut short, or if what a rank had staged could not be
            saved and no rank was left to be told.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._manners.begin()
        self._runner.start()
        self._adopt()
        self._say_ready()
        if self._config.sweep_orphans:
            self._orphans.begin()
        logger.info("sidecar %s serves job %s in %s", self._identity.sidecar_id, self._config.job_id, self._directory)
        while not self._should_stop():
            self._server.wait(self._next_tick_s - time.monotonic())
            self._take_everything()
        return self._stop()

    def _adopt(self) -> None:
        """Take over what a sidecar of this job that died has left."""
        regions = find_regions(self._directory)
        if regions:
            sealed = sum(region.sealed is not None for region in regions)
            logger.info("taking over %d regions of an earlier sidecar, %d of them sealed", len(regions), sealed)
            for region in regions:
                self._coordination.recall(region.journal.owner)
            self._handle(RegionsFound(regions), time.monotonic())

    # ------------------------------------------------------------ loop

    def _take_everything(self) -> None:
        now_s = time.monotonic()
        for peer, pid, message in self._server.receive():
            self._take_message(peer, pid, message, now_s)
        for event in self._coordination.receive(now_s):
            if isinstance(event, CoordinatorUp):
                self._handle_all(self._watch.deaths(now_s), now_s)  # what is said of a rank now is not looked at again
            self._handle(event, now_s)
        self._clear_wake()
        while self._posted:
            self._handle(self._posted.popleft(), now_s)
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            self._handle_all(self._watch.deaths(now_s), now_s)
            self._look_for_the_supervisor()
            self._orphans.look()
            self._manners.tick(self._runner, now_s)
            self._handle_all(self._coordination.tick(now_s), now_s)
            self._handle_all(self._runner.stalled(now_s, self._config.write_stall_s), now_s)
            self._coordination.keep_only(self._coordinators_needed())
            self._perform(self._checkpoints.handle(Tick(), now_s), now_s)

    def _coordinators_needed(self) -> set[str]:
        """Where what this node knows has to be told."""
        clients = {record.hello.coordinator for record in self._jobs.ranks.values()}
        unsettled = {self._coordination.address(job.submit.rank, job.submit) for job in self._jobs.shards.unsettled}
        return clients | unsettled

    def _clear_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass  # nobody has woken the loop

    def _take_message(self, peer: bytes, pid: int, message: Message, now_s: float) -> None:
        if isinstance(message, AskStatus):
            self._server.send(peer, Status(self._status(now_s)))
            return
        if isinstance(message, Heartbeat):
            self._watch.hear(peer, now_s)
            self._manners.hear(peer, message.step_s, now_s)
        else:
            logger.debug("from %s: %s", peer.hex(), type(message).__name__)
        if isinstance(message, Hello):
            self._handle_all(
                self._watch.deaths(now_s), now_s
            )  # a restarted rank may say Hello before its old process was missed
        if isinstance(message, Goodbye):
            self._handle_all(self._watch.left_by(peer), now_s)
        self._handle(FromRank(peer, pid, message), now_s)
        if isinstance(message, Hello):
            self._watch.hear(peer, now_s)

    def _status(self, now_s: float) -> SidecarStatus:
        links, manners = self._coordination.described(), self._manners.status()
        return build_status(
            self._config, self._identity, self._jobs, self._checkpoints, self._runner, now_s, links, manners
        )

    def _handle_all(self, events: Iterable[Event], now_s: float) -> None:
        for event in events:
            self._handle(event, now_s)

    def _handle(self, event: Event, now_s: float) -> None:
        table = self._checkpoints if isinstance(event, COORDINATOR_EVENTS) else self._jobs
        self._perform(table.handle(event, now_s), now_s)

    def _perform(self, actions: list[Action], now_s: float) -> None:
        for action in actions:
            match action:
                case Send(peer=peer, message=message):
                    self._server.send(peer, message)
                case ToCoordinator(rank=rank, message=message):
                    self._handle_all(self._coordination.to_coordinator(rank, message, now_s), now_s)
                case ToRank(rank=rank, message=message):
                    self._handle_all(self._coordination.to_rank(rank, message, now_s), now_s)
                case _:
                    self._runner.run(action)

    def _post(self, event: Event) -> None:
        """Called from worker threads: hand an event to the loop."""
        self._posted.append(event)
        os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------ life and death

    def _look_for_the_supervisor(self) -> None:
        pid = self._config.supervisor_pid
        if pid is not None and not self._terms and process_start_s(pid) != self._supervisor_start_s:
            logger.warning("the supervisor (pid %d) is gone: draining, as on SIGTERM", pid)
            self._terms = 1

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
        if self._is_needed(time.monotonic()):
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

    def _is_needed(self, now_s: float) -> bool:
        """Whether something is under way, a rank is connected, or another node has not been told what it must know."""
        if self._posted or self._jobs.is_busy or self._checkpoints.is_busy or self._watch.connected_ranks(now_s):
            self._done_s = now_s
            return True
        waits = self._coordination.unacked_parcels or self._jobs.shards.unsettled
        return bool(waits) and now_s - self._done_s < OTHERS_S

    def _stop(self) -> int:
        cut_short = self._jobs.is_busy or self._checkpoints.is_busy
        logger.info("stopping %s", "with work under way" if cut_short else "after a complete drain")
        for save, why in self._jobs.shards.lost.items():
            logger.error("step %d was staged but could not be saved, and no rank was left to tell: %s", save.step, why)
        self._coordination.close()
        self._server.close()
        self._runner.close()
        os.close(self._wake_fd)
        if cut_short:
            logger.error(
                "what is staged stays in %s for the next sidecar of job %s", self._directory, self._config.job_id
            )
        else:
            self._remove_directory()
        self._lock.release()
        return EXIT_ABORTED if cut_short or self._jobs.shards.lost else EXIT_OK

    def _remove_directory(self) -> None:
        shutil.rmtree(self._directory)
        try:
            self._directory.parent.rmdir()
        except OSError:
            pass  # another job of this user has its directory there

    def _say_ready(self) -> None:
        if self._config.ready_fd is not None:
            os.write(self._config.ready_fd, b"READY\n")
            os.close(self._config.ready_fd)
