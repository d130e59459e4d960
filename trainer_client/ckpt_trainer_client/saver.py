"""What a call of ``save()`` or ``prepare()`` does on this rank, from its number to the handle."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner

from ckpt_proto.checkpoint_layout import checkpoint_id
from ckpt_proto.errors import AlreadyCommitted, FailureReport, NotEnoughSharedMemory, RegionError, report_of
from ckpt_proto.identity import PREPARE_STEP, SaveKey
from ckpt_proto.messages import ReportFailure, ReportSkip
from ckpt_trainer_client.change_watch import ByteWatch, ChangeWatch, VersionWatch
from ckpt_trainer_client.config import ClientConfig
from ckpt_trainer_client.connection import Connection
from ckpt_trainer_client.copy_order import IN_CALL_BYTES, CopyOrder, Source, batches
from ckpt_trainer_client.device_copy import can_overlap
from ckpt_trainer_client.errors import (
    CheckpointFailed,
    PlanningError,
    RegionsExhausted,
    SaveSkipped,
    TensorChanged,
    UnsupportedLeaf,
)
from ckpt_trainer_client.filling import Filling
from ckpt_trainer_client.hidden_copy import HiddenCopy
from ckpt_trainer_client.planning import PlanningState
from ckpt_trainer_client.preparation import Preparation
from ckpt_trainer_client.restore import is_committed, with_per_rank
from ckpt_trainer_client.save_handle import SaveHandle
from ckpt_trainer_client.stage_thread import StageThread
from ckpt_trainer_client.stager import Stager

logger = logging.getLogger(__name__)

BAD_INPUT = (UnsupportedLeaf, PlanningError, AlreadyCommitted, ValueError, TypeError)
"""Errors of the caller: raised by ``save()`` on the rank that has them. All others end in the handle."""

Given = tuple[Mapping[str, Any], dict[str, Any] | None]
"""What the user saves: a state dict, and state of this rank alone."""

NOWHERE = -1
"""Address of tensors whose device cannot copy behind the training's back."""


class Saver:
    """Numbers this rank's calls and carries them out.

    Thread rule: called on the trainer's thread. A hidden copy and a preparation run on ``ckpt-stage``, one at a time;
    whatever they use is used here only after they were waited for.

    Args:
        buffers: addresses of the storages that a forward pass may change, as they are now.
    """

    def __init__(self, config: ClientConfig, connection: Connection, buffers: Callable[[], frozenset[int]]) -> None:
        self._config = config
        self._connection = connection
        self._stager = Stager(config, connection)
        self._order = CopyOrder(config.copy_first)
        self._buffers = buffers
        self._thread = StageThread()
        self._copy: HiddenCopy | None = None
        self._preparation: Preparation | None = None
        self._small: tuple[object, bool] = (None, False)
        self._seq = 0
        self.last: SaveHandle | None = None

    # ------------------------------------------------------------ a save

    def save(
        self, given: Given, step: int, *, overwrite: bool, overlap: bool, planner: SavePlanner | None
    ) -> SaveHandle:
        """Stage what was given and return; with ``overlap`` most of it is copied after that.

        Raises:
            UnsupportedLeaf, PlanningError, AlreadyCommitted, ValueError, TypeError: as the client's ``save()`` says.
        """
        started_s = time.monotonic()
        self.wait_prepared()
        self.wait_copied()
        self.last = handle = self._begin(step)
        state: PlanningState | None = None
        try:
            self._check(handle._save, overwrite)
            state = self._planning_state(given, planner)
            self._stage(handle, state, overwrite=overwrite, overlap=overlap)
        except BAD_INPUT as error:
            self._give_up(handle, error)
            handle._observed = True  # told right here
            raise
        except Exception as error:  # noqa: BLE001 - a save that fails must not stop training
            self._give_up(handle, error)
        except BaseException as error:
            self._give_up(handle, error)
            raise
        finally:
            if state is not None:
                state.release()
            handle.stall_s = time.monotonic() - started_s
        return handle

    def _planning_state(self, given: Given, planner: SavePlanner | None) -> PlanningState:
        state_dict, per_rank = given
        whole = with_per_rank(dict(state_dict), per_rank, self._config.rank)
        return self._stager.planning_state(whole, planner)

    def _begin(self, step: int) -> SaveHandle:
        session, seq = self._connection.session, self._seq
        self._seq += 1
        problem = _problem_of_step(step)
        if problem is not None:
            # Every rank counts every call, so the ranks that called with a good step must hear of this one.
            failure = report_of(problem).at(self._config.rank, self._config.node)
            self._connection.report(ReportFailure(SaveKey(session, seq, 0), failure))
            self._connection.next_seq = self._seq
            raise problem
        return self._expect(SaveKey(session, seq, step))

    def _expect(self, save: SaveKey) -> SaveHandle:
        handle = SaveHandle(save, self._connection.questions.who_is_late)
        self._connection.saves.expect(save, handle)
        self._connection.next_seq = self._seq  # after it is expected: what is neither expected nor to come has ended
        return handle

    def _check(self, save: SaveKey, overwrite: bool) -> None:
        self._connection.exchange.raise_if_aborted(save)
        known = self._connection.committed_steps
        if not overwrite and save.step in known:
            if is_committed(self._config.directory, save.step):
                where = checkpoint_id(self._config.directory, save.step)
                raise AlreadyCommitted(
                    f"step {save.step} is committed already in {where}: pass overwrite=True to replace it"
                )
            known.discard(save.step)  # somebody has removed it since
        if self._config.backpressure == "skip" and self._connection.pool.all_busy:
            raise SaveSkipped(save.step, [FailureReport("SaveSkipped", "every region is still being persisted")])

    # ------------------------------------------------------------ copies

    def _stage(self, handle: SaveHandle, state: PlanningState, *, overwrite: bool, overlap: bool) -> None:
        filling = self._stager.begin(handle._save, state, overwrite=overwrite)
        try:
            hidden = self._copy_first(handle, state, filling) if overlap else None
            if hidden is None:
                filling.copy()
                self._hand_over(handle, filling)
        except BaseException:
            filling.discard()
            raise
        if hidden is None:
            handle._set_staged()
        else:
            self._copy_behind(hidden)

    def _copy_behind(self, copy: HiddenCopy) -> None:
        """From here on the filling is the copy's, whatever happens."""
        self._copy = copy
        try:
            started = self._thread.start(copy.run)
        except BaseException:  # an interrupt, before or after it was started
            copy.call_off()
            raise
        if not started:  # the interpreter is ending: there is no training to hide behind
            copy.run()

    def _copy_first(self, handle: SaveHandle, state: PlanningState, filling: Filling) -> HiddenCopy | None:
        """Copy what must be copied now; returns the copy of the rest. None if there is none: then nothing is copied."""
        if self._is_all_small(filling):
            return None
        sources = [_source(item.fqn, tensor) for item, tensor in zip(filling.items, filling.tensors, strict=True)]
        first, later = self._order.split(sources, self._buffers() | {NOWHERE})
        if not later:
            return None
        watch: ChangeWatch
        if self._config.check_overlap:
            watch = ByteWatch(filling, later)
        else:
            watch = VersionWatch(
                {place: state.leaf(filling.items[place].fqn, filling.tensors[place]) for place in later}
            )
        copy = HiddenCopy(handle, filling, batches(later, sources), watch, self._hand_over, self._give_up)
        filling.copy(first)
        return copy

    def _is_all_small(self, filling: Filling) -> bool:
        """Whether everything is copied in the call anyway. Looked at once for each plan: a job of many small tensors
        would pay for it at every save."""
        items, small = self._small
        if items is not filling.items:
            small = all(tensor.nbytes <= IN_CALL_BYTES for tensor in filling.tensors)
            self._small = (filling.items, small)
        return small

    def _hand_over(self, handle: SaveHandle, filling: Filling) -> None:
        submit = filling.seal()
        self._connection.saves.staged(handle._save)
        self._connection.submit(submit)

    def wait_copied(self) -> None:
        """Wait until no tensor is being copied."""
        if self._copy is not None:
            self._copy.wait()
            self._copy = None  # not before: an interrupt may end the wait

    def _give_up(self, handle: SaveHandle, error: BaseException) -> None:
        """This rank's part has failed: tell the others, resolve the handle. On either thread."""
        save = handle._save
        if isinstance(error, TensorChanged):
            self._order.learn(error.keys)
        if isinstance(error, SaveSkipped):
            failures = [failure.at(self._config.rank, self._config.node) for failure in error.failures.values()]
            skipped = True
            self._connection.report(ReportSkip(save, failures[0].message))
        elif isinstance(error, CheckpointFailed):
            failures, skipped = list(error.failures.values()), False
            self._connection.report(ReportFailure(save, failures[0]))
        else:
            report = report_of(error).at(self._config.rank, self._config.node)
            failures, skipped = [report], False
            has_no_region = isinstance(error, RegionError) and not isinstance(error, NotEnoughSharedMemory)
            self._connection.report(ReportFailure(save, report, replan=has_no_region))
            if not isinstance(error, RegionsExhausted):
                logger.debug("save of step %d failed", save.step, exc_info=error)
        what = "nothing was prepared" if save.step == PREPARE_STEP else f"step {save.step} was not saved"
        logger.warning("%s: %s", what, "; ".join(map(str, failures)))
        self._connection.saves.failed(save, failures, skipped=skipped)

    # ------------------------------------------------------------ preparing

    def prepare(self, given: Given, planner: SavePlanner | None) -> Preparation:
        """Plan and make the regions on ``ckpt-stage``, as an attempt that every rank gives up when it is ready.

        Raises:
            UnsupportedLeaf, PlanningError: the state dict cannot be saved.
        """
        self.wait_prepared()
        self.wait_copied()
        save = SaveKey(self._connection.session, self._seq, PREPARE_STEP)
        self._seq += 1
        handle = self._expect(save)
        try:
            state = self._planning_state(given, planner)
        except BaseException as error:
            self._give_up(handle, error)
            raise
        preparation = Preparation(save, partial(self._prepare, handle), state)
        if self._thread.start(preparation.run):
            self._preparation = preparation
        else:
            preparation.run()
        return preparation

    def _prepare(self, handle: SaveHandle, state: PlanningState) -> None:
        try:
            self._stager.prepare(handle._save, state)
        except BaseException as error:
            self._give_up(handle, error)
            raise
        self._connection.report(ReportSkip(handle._save, "this rank is prepared"))

    def wait_prepared(self) -> None:
        """Wait until no preparation runs; what came of it is told by itself."""
        preparation, self._preparation = self._preparation, None
        if preparation is not None:
            preparation.wait()

    # ------------------------------------------------------------ end

    def settle(self) -> None:
        """Finish the copy under way and give a preparation up: from here on nothing is staged or said."""
        self.wait_copied()
        if self._preparation is not None and not self._preparation.done():
            self._stager.give_up_preparing(self._preparation.save)
        self._thread.close()

    def close(self) -> None:
        """Let go of plan and regions, when nothing that arrives can ask for them any more."""
        self._stager.close()


def _source(fqn: str, tensor: torch.Tensor) -> Source:
    nbytes = tensor.nbytes
    if nbytes <= IN_CALL_BYTES:
        return Source(fqn, nbytes)
    return Source(fqn, nbytes, tensor.untyped_storage().data_ptr() if can_overlap(tensor.device) else NOWHERE)


def _problem_of_step(step: object) -> Exception | None:
    if isinstance(step, bool) or not isinstance(step, int):
        return TypeError(f"step is a {type(step).__name__}, expected an int")
    return None if 0 <= step < PREPARE_STEP else ValueError(f"step {step} is outside 0 .. 2^63-2")
