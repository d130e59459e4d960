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
from pathlib import Path

from ckpt_proto.checkpoint_layout import checkpoint_id
from ckpt_proto.errors import FailureReport, StorageError
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import SubmitShard
from ckpt_proto.region import region_path
from ckpt_trainer_client.callback_thread import STAND_IN, CallbackThread
from ckpt_trainer_client.config import ClientConfig
from ckpt_trainer_client.degraded_decisions import (
    GIVE_UP_S,
    SETTLE_S,
    Ledger,
    Move,
    Progress,
    given_up_by_first,
    hung,
    late,
    next_move,
    region_gone,
)
from ckpt_trainer_client.degraded_ledger import LedgerView
from ckpt_trainer_client.saves_of_client import SavesOfClient
from ckpt_trainer_client.seal_look import is_sealed
from ckpt_trainer_client.stand_in_process import KILL_S, StandInProcess, StandInReport

WRITE_AGAIN_S = 5.0
"""How long after one that failed the next stand-in is started to write or to publish."""

FINAL = ("AlreadyCommitted", "IncompleteCheckpoint")
"""Failures of publishing that no other try can mend."""

logger = logging.getLogger(__name__)


class DegradedSaves:
    """Owner of the thread ``ckpt-stand-in``. ``begin``, ``end`` and ``wake`` return at once; any thread may call."""

    def __init__(
        self,
        config: ClientConfig,
        saves: SavesOfClient,
        process: StandInProcess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._saves = saves
        self._clock = clock
        self._thread = CallbackThread(STAND_IN)
        self._process = process or StandInProcess(config)
        self._view = LedgerView(config.directory, config.rank, config.world_size)
        self._active = threading.Event()
        self._queued = threading.Event()
        self._open: dict[SaveKey, Progress] = {}
        self._trouble = ""
        self._not_before_s = 0.0
        self._in_flight_then = False  # whether what is taken in next was in flight when the sidecar was lost
        self._taken_back: set[SaveKey] = set()
        self._step_since_s: float | None = None  # when what the thread does now was begun; None if nothing

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
            self._thread.submit(self._begin_anew)
        self._saves.serve(why)
        self._fail_if_hung()
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

    def _fail_if_hung(self) -> None:
        """A storage that hangs holds the thread up, and no handle may wait for it for ever. Called by the link."""
        since_s, now_s = self._step_since_s, self._clock()
        if since_s is None or now_s - since_s <= self._config.stage_timeout_s + 2 * KILL_S:
            return
        for save in self._saves.pending():
            self._saves.failed(save, [hung(save.step, now_s - since_s).at(self._config.rank, self._config.node)])

    # ------------------------------------------------------------ on the thread ckpt-stand-in

    def _begin_anew(self) -> None:
        self._open.clear()
        self._taken_back.clear()
        self._in_flight_then = True

    def _round(self) -> None:
        """Take back what has failed, write what is not durable, then see how each save stands."""
        self._queued.clear()
        try:
            for work in (self._take_back, self._write_sealed, self._settle_all):
                try:
                    work()
                except Exception:  # the bounds of the saves are kept by what comes after
                    logger.exception("the client's own part without a sidecar has failed")
        finally:
            self._step_since_s = None

    def _step(self) -> None:
        """Something begins that a storage may hold up."""
        self._step_since_s = self._clock()

    def _take_back(self) -> None:
        """A save that this rank was told has failed must not be committed by ranks that were not."""
        for save in self._saves.given_up():
            if save in self._taken_back or not self._may_start():
                continue
            self._step()
            try:
                is_done = not self._view.has_own(save) or self._process.withdraw(save, GIVE_UP_S).is_done
            except OSError as error:
                logger.warning("step %d has failed, but its shard cannot be looked for: %s", save.step, error)
                is_done = False
            if is_done:
                self._taken_back.add(save)
            else:
                self._not_before_s = self._clock() + WRITE_AGAIN_S

    def _write_sealed(self) -> None:
        session, next_seq = self._saves.session(), self._saves.next_seq()  # before what is pending
        pending = set(self._saves.pending())
        submits = [submit for submit in self._saves.submits() if submit.save in pending or self._saves.holds(submit)]
        self._take_in([submit.save for submit in submits if submit.save in pending])
        if any(map(self._must_be_written, submits)) and self._may_start():
            self._step()
            seqs = sorted(save.seq for save in pending)
            self._take(self._process.write(session, next_seq, seqs, self._config.stage_timeout_s), "write")
        for submit in submits:
            if submit.save in self._open and not self._region(submit).exists():
                self._lost_its_region(submit)
            if self._saves.holds(submit) and not is_sealed(self._region(submit)):
                self._saves.freed(submit)

    def _settle_all(self) -> None:
        steps: set[int] = set()
        for save in list(self._open):
            if save not in self._saves.pending():
                del self._open[save]  # it has ended elsewhere
            elif self._active.is_set() and save.step not in steps:  # attempts at one step end in their order
                self._settle(save)
            steps.add(save.step)

    def _take_in(self, saves: Sequence[SaveKey]) -> None:
        now_s, known, bound_s = self._clock(), self._open, self._config.stage_timeout_s
        settle_s = SETTLE_S if self._in_flight_then else 0.0
        self._in_flight_then = False
        self._open = {save: known.get(save) or Progress(now_s, bound_s, settle_s) for save in saves}
        self._view.keep_only(saves)

    def _may_start(self) -> bool:
        return self._active.is_set() and self._clock() >= self._not_before_s

    def _must_be_written(self, submit: SubmitShard) -> bool:
        return self._saves.holds(submit) and is_sealed(self._region(submit))

    def _region(self, submit: SubmitShard) -> Path:
        return region_path(self._config.runtime_dir, submit.rank, submit.slot)

    def _lost_its_region(self, submit: SubmitShard) -> None:
        """Its region has been removed: unless it is durable, it never will be."""
        self._step()
        progress = self._open[submit.save]
        ledger = self._view.look(submit.save)
        if not (progress.failures or ledger.trouble or ledger.published or self._config.rank in ledger.durable):
            failed = region_gone(submit.save.step, str(self._region(submit)))
            progress.failures = tuple(each.at(self._config.rank, self._config.node) for each in failed)

    def _take(self, report: StandInReport, work: str) -> bool:
        """Remember what went wrong; whether all was done."""
        self._trouble = "" if report.is_done else f"{work}: {report}"
        if not report.is_done:
            self._not_before_s = self._clock() + WRITE_AGAIN_S
            logger.warning("without a sidecar: %s", self._trouble)
        return report.is_done

    # ------------------------------------------------------------ how a save stands

    def _settle(self, save: SaveKey) -> None:
        self._step()
        progress, ledger, now_s = self._open[save], self._view.look(save), self._clock()
        if self._config.rank in ledger.durable:
            self._saves.persisted(save)
        progress.seen_first = progress.seen_first or 0 in ledger.durable
        if progress.complete_s is None and len(ledger.durable) == self._config.world_size:
            progress.complete_s = now_s
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
                self._saves.failed(save, progress.failures_told())

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
            missing = self._view.missing(save)
        except StorageError as error:
            ledger = Ledger(False, frozenset(), str(error))
        return late(save.step, missing, ledger, now_s - progress.since_s, self._trouble)

    def _publish(self, save: SaveKey, progress: Progress) -> None:
        if save not in self._saves.pending():
            return  # it was failed, in doubt, while the storage hung
        self._step()
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
        self._step()
        report = self._process.withdraw(save, GIVE_UP_S)
        if report.is_done:
            ledger = self._view.look(save)
            if not ledger.trouble and self._config.rank not in ledger.durable:  # or it was committed just then
                progress.withdrawn_s = self._clock()
                self._settle(save)
        elif not report.met_a_sidecar:
            logger.warning("step %d fails, but its shard cannot be taken back yet: %s", save.step, report)

    def _where(self, save: SaveKey) -> str:
        return checkpoint_id(self._config.directory, save.step)
