"""Saves while no sidecar runs and nobody can start one: this client has them written and committed by stand-ins.

A stand-in is a short-lived process that holds the job's lock, so it never runs beside a sidecar. What it leaves is what
a sidecar leaves, so one that comes back goes on with every save that has not ended here. The ranks agree through the
ledger: see ``degraded_decisions``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_proto.attempt_files import durable_ranks, is_named_in_metadata
from ckpt_proto.checkpoint_layout import METADATA_NAME, checkpoint_id, manifest_name
from ckpt_proto.errors import FailureReport, RegionError, StorageError
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import DecideCommit, SubmitShard
from ckpt_proto.region import Seal, region_path, seal_path
from ckpt_trainer_client.callback_thread import STAND_IN, CallbackThread
from ckpt_trainer_client.config import ClientConfig
from ckpt_trainer_client.degraded_decisions import Ledger, Move, Progress, given_up_by_first, late, next_move
from ckpt_trainer_client.stand_in_process import StandInProcess, StandInReport

WRITE_AGAIN_S = 5.0
"""How long after one that failed the next stand-in is started to write or to publish."""

FINAL = ("AlreadyCommitted", "IncompleteCheckpoint")
"""Failures of publishing that no other try can mend."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavesOfClient:
    """What is asked and told of the client's saves, on the thread ``ckpt-stand-in`` but for ``serve``.

    Attributes:
        session: the client's session.
        pending: the saves whose end is not known.
        submits: what has been handed over, in the order of the saves.
        holds: whether a slot is sealed for a save number.
        freed: the slot of a submission may be filled again.
        persisted, committed, failed: what a handle is told.
        decision: that of rank 0's pre-commit hooks; None while they run.
        serve: tells who waits for a sidecar that there is none, or, by None, that there is one again.
    """

    session: Callable[[], str]
    pending: Callable[[], list[SaveKey]]
    submits: Callable[[], list[SubmitShard]]
    holds: Callable[[SubmitShard], bool]
    freed: Callable[[SubmitShard], None]
    persisted: Callable[[SaveKey], None]
    committed: Callable[[SaveKey], None]
    failed: Callable[[SaveKey, Sequence[FailureReport]], None]
    decision: Callable[[SaveKey, str], DecideCommit | None]
    serve: Callable[[FailureReport | None], None]


class DegradedSaves:
    """Owner of the thread ``ckpt-stand-in``. ``begin``, ``end`` and ``wake`` return at once; any thread may call."""

    def __init__(self, config: ClientConfig, saves: SavesOfClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._saves = saves
        self._clock = clock
        self._thread = CallbackThread(STAND_IN)
        self._process = StandInProcess(config)
        self._active = threading.Event()
        self._queued = threading.Event()
        self._open: dict[SaveKey, Progress] = {}
        self._trouble = ""
        self._not_before_s = 0.0
        self._looked: dict[SaveKey, tuple[int, int, int]] = {}

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End a stand-in that runs, and the thread. What is sealed stays for the next sidecar.

        Raises:
            TimeoutError: the thread has not ended within ``timeout_s``.
        """
        self._active.clear()
        self._process.stop()
        self._thread.close(timeout_s)

    def begin(self, why: FailureReport) -> None:
        """No sidecar has run for too long. Called by the link, at every beat."""
        if not self._active.is_set():
            logger.warning("%s: what is staged is written without one, slowly, until there is one again", why.message)
            self._active.set()
            self._thread.submit(self._open.clear)
        self._saves.serve(why)
        self.wake()

    def end(self) -> None:
        """A sidecar has answered: it finishes what has not ended here. Called by the link, at every message."""
        if self._active.is_set():
            self._active.clear()
            logger.warning("a sidecar of job %s answers again: saves are its work from now on", self._config.job_id)
            self._saves.serve(None)

    def wake(self) -> None:
        """Something may have to be done."""
        if self._active.is_set() and not self._queued.is_set():
            self._queued.set()
            self._thread.submit(self._round)

    # ------------------------------------------------------------ on the thread ckpt-stand-in

    def _round(self) -> None:
        """Write what is not durable, then see how each save stands."""
        self._queued.clear()
        pending = set(self._saves.pending())
        submits = [submit for submit in self._saves.submits() if submit.save in pending or self._saves.holds(submit)]
        self._take_in([submit.save for submit in submits if submit.save in pending])
        if any(map(self._must_be_written, submits)) and self._may_start():
            self._write(sorted(save.seq for save in pending))
        for submit in submits:
            if self._saves.holds(submit) and not self._is_sealed(submit):
                self._saves.freed(submit)
        steps: set[int] = set()
        for save in list(self._open):
            if self._active.is_set() and save.step not in steps:  # attempts at one step end in their order
                self._settle(save)
            steps.add(save.step)

    def _take_in(self, saves: Sequence[SaveKey]) -> None:
        now_s = self._clock()
        known, bound_s = self._open, self._config.stage_timeout_s
        self._open = {save: known.get(save) or Progress(now_s, bound_s) for save in saves}
        self._looked = {save: seen for save, seen in self._looked.items() if save in self._open}

    def _may_start(self) -> bool:
        return self._active.is_set() and self._clock() >= self._not_before_s

    def _must_be_written(self, submit: SubmitShard) -> bool:
        return self._saves.holds(submit) and self._is_sealed(submit)

    def _is_sealed(self, submit: SubmitShard) -> bool:
        """Whether nobody has broken the seal yet, as a stand-in does when it has made the shard durable."""
        path = seal_path(region_path(self._config.runtime_dir, submit.rank, submit.slot))
        if not path.exists():
            return False
        try:
            seal = Seal(path)
        except RegionError as error:
            logger.warning("%s", error)
            return True
        try:
            return seal.read() is not None
        finally:
            seal.close()

    def _write(self, pending: Sequence[int]) -> None:
        self._take(self._process.write(self._saves.session(), pending, self._config.stage_timeout_s), "write")

    def _take(self, report: StandInReport, work: str) -> bool:
        """Remember what went wrong; whether all was done."""
        self._trouble = "" if report.is_done else f"{work}: {report}"
        if not report.is_done:
            self._not_before_s = self._clock() + WRITE_AGAIN_S
            logger.warning("without a sidecar: %s", self._trouble)
        return report.is_done

    # ------------------------------------------------------------ how a save stands

    def _settle(self, save: SaveKey) -> None:
        progress, ledger, now_s = self._open[save], self._ledger(save), self._clock()
        if self._config.rank in ledger.durable:
            self._saves.persisted(save)
        progress.seen_first = progress.seen_first or 0 in ledger.durable
        if not progress.failures and not ledger.published:
            progress.failures = self._why_given_up(save, progress, ledger, now_s)
        match next_move(self._config.rank, self._config.world_size, progress, ledger, now_s):
            case Move.COMMITTED:
                self._end(save)
                self._saves.committed(save)
            case Move.PUBLISH if self._may_start():
                self._publish(save, progress)
            case Move.WITHDRAW:
                self._withdraw(save, progress, now_s)
            case Move.FAIL:
                self._end(save)
                self._saves.failed(save, progress.failures)

    def _end(self, save: SaveKey) -> None:
        del self._open[save]

    def _why_given_up(
        self, save: SaveKey, progress: Progress, ledger: Ledger, now_s: float
    ) -> tuple[FailureReport, ...]:
        """Empty while it is not. Asks rank 0's hooks once the attempt is complete."""
        rank, world_size = self._config.rank, self._config.world_size
        refused = given_up_by_first(rank, save.step, progress, ledger)
        if refused:
            return refused
        if progress.is_overdue(now_s):
            return self._late(save, progress, ledger, now_s)
        if rank == 0 and len(ledger.durable) == world_size and not progress.accepted:
            decided = self._saves.decision(save, self._where(save))
            progress.accepted = decided is not None and decided.accept
            if decided is not None and not decided.accept:
                text = f"a pre-commit hook refused step {save.step}: {decided.reason}"
                return (FailureReport("CommitVetoed", text).at(0, self._config.node),)
        return ()

    def _late(self, save: SaveKey, progress: Progress, ledger: Ledger, now_s: float) -> tuple[FailureReport, ...]:
        missing: list[int] = []
        try:
            durable = durable_ranks(Path(self._where(save)), save.save_id)
            missing = [rank for rank in range(self._config.world_size) if rank not in durable]
        except StorageError as error:
            ledger = Ledger(False, frozenset(), str(error))
        return late(save.step, missing, ledger, now_s - progress.since_s, self._trouble)

    def _publish(self, save: SaveKey, progress: Progress) -> None:
        report = self._process.publish(save, self._config.stage_timeout_s)
        if self._take(report, "publish"):
            self._settle(save)
        elif any(kind in FINAL for kind, _ in report.failures):
            failures = [FailureReport(kind, text).at(0, self._config.node) for kind, text in report.failures]
            progress.failures = tuple(failures)

    def _withdraw(self, save: SaveKey, progress: Progress, now_s: float) -> None:
        """Nobody may commit it any more before this rank says that it has failed."""
        if progress.giving_up_s is None:
            progress.giving_up_s = now_s
        report = self._process.withdraw(save, self._config.stage_timeout_s)
        if report.is_done:
            progress.withdrawn_s = self._clock()
            self._settle(save)
        elif not report.met_a_sidecar:
            logger.warning("step %d fails, but its shard cannot be taken back yet: %s", save.step, report)

    def _where(self, save: SaveKey) -> str:
        return checkpoint_id(self._config.directory, save.step)

    def _ledger(self, save: SaveKey) -> Ledger:
        path, rank = Path(self._where(save)), self._config.rank
        try:
            published = self._is_published(path, save)
            if rank == 0:
                return Ledger(published, durable_ranks(path, save.save_id))
            durable = [each for each in (0, rank) if (path / manifest_name(each, save.save_id)).exists()]
            return Ledger(published, frozenset(durable))
        except (OSError, StorageError) as error:
            return Ledger(False, frozenset(), str(error))

    def _is_published(self, path: Path, save: SaveKey) -> bool:
        """Looked into only if it has changed: that of an older attempt may be large."""
        try:
            found = (path / METADATA_NAME).stat()
        except FileNotFoundError:
            return False
        seen = (found.st_ino, found.st_mtime_ns, found.st_size)
        if self._looked.get(save) == seen:
            return False
        named = is_named_in_metadata(path, save.save_id)
        self._looked[save] = seen
        return named
