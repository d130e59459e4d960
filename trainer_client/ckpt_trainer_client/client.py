"""``CheckpointClient``: what a training script uses. Wires the parts, does no work of its own."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner

from ckpt_proto.checkpoint_layout import checkpoint_id
from ckpt_proto.errors import AlreadyCommitted, FailureReport, NotEnoughSharedMemory, RegionError, report_of
from ckpt_proto.identity import MAX_STEP, SaveKey
from ckpt_proto.messages import ReportFailure, ReportSkip
from ckpt_trainer_client.callback_thread import CALLBACKS, DECISIONS
from ckpt_trainer_client.commit_hooks import PostCommitHook, PreCommitHook
from ckpt_trainer_client.config import ClientConfig
from ckpt_trainer_client.connection import Connection
from ckpt_trainer_client.errors import (
    CheckpointFailed,
    ClientClosed,
    NoCheckpoint,
    PlanningError,
    RegionsExhausted,
    SaveSkipped,
    UnsupportedLeaf,
)
from ckpt_trainer_client.planning import PlanningState
from ckpt_trainer_client.restore import committed_steps, is_committed, load_step, with_per_rank
from ckpt_trainer_client.save_handle import SaveHandle
from ckpt_trainer_client.stager import Stager

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

_BAD_INPUT = (UnsupportedLeaf, PlanningError, AlreadyCommitted, ValueError, TypeError)
"""Errors of the caller: raised by ``save()`` on the rank that has them. All others end in the handle."""


class CheckpointClient:
    """Saves and restores checkpoints of one training job through the sidecar of this node.

    Make one per rank, on every rank, with the same directory; rank and world size come from torchrun's environment. A
    process group is not needed and never used for saving. If no sidecar serves the job on this node one is started.

    Args:
        directory: gets one ``step-N`` directory per checkpoint, each readable by ``torch.distributed.checkpoint.load``.
        slots: regions of this rank in shared memory, each as large as this rank's part of the state.
        backpressure: when every slot is still being persisted, ``"wait"`` (at most ``backpressure_timeout_s``
            seconds) or ``"skip"`` the save on every rank.
        stage_timeout_s: how far apart in seconds the ranks may call ``save()``.
        connect_timeout_s: how long in seconds to wait for a sidecar, at the start and when it has died later.
        no_sidecar: what becomes of saves when that has passed later: ``"error"``, they fail; ``"degraded"``, this
            client has them written and committed without a sidecar: slowly, and only with the structure of the save
            before. The same on every rank.
        pre_commit, post_commit: hooks ``(step, checkpoint_id)``: on rank 0 before a commit (raise or return False to
            veto), on every rank after it. They run on a thread of the client.
        planner: a DCP ``SavePlanner`` for every save; a ``DefaultSavePlanner`` if None.

    Raises:
        SidecarUnreachable: no sidecar could be started or answered in time.
        SidecarRefused: the directory cannot be used, the ranks disagree on it or on the world size, the versions do not
            fit, or the rank has a client already. The text says which and what to do.
        ValueError: an argument is out of bounds.

    Thread rule: every method is for the thread that trains, except those of the handles. The client does not work
    in a forked child.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        slots: int | None = None,
        backpressure: str | None = None,
        backpressure_timeout_s: float | None = None,
        stage_timeout_s: float | None = None,
        connect_timeout_s: float | None = None,
        close_timeout_s: float | None = None,
        no_sidecar: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        job_id: str | None = None,
        pre_commit: Sequence[PreCommitHook] = (),
        post_commit: Sequence[PostCommitHook] = (),
        planner: SavePlanner | None = None,
    ) -> None:
        self._config = ClientConfig.from_env(
            directory,
            slots=slots,
            backpressure=backpressure,
            backpressure_timeout_s=backpressure_timeout_s,
            stage_timeout_s=stage_timeout_s,
            connect_timeout_s=connect_timeout_s,
            close_timeout_s=close_timeout_s,
            no_sidecar=no_sidecar,
            rank=rank,
            world_size=world_size,
            job_id=job_id,
        )
        self._planner = planner
        self._pid = os.getpid()
        self._closed = False
        self._seq = 0
        self._last: SaveHandle | None = None
        self._connection = Connection(self._config, tuple(pre_commit), tuple(post_commit))
        self._connection.open(torch.__version__)
        self._stager = Stager(self._config, self._connection)

    # ------------------------------------------------------------ save

    def save(
        self,
        state_dict: Mapping[str, Any],
        *,
        step: int,
        overwrite: bool = False,
        blocking: bool = False,
        per_rank: dict[str, Any] | None = None,
        planner: SavePlanner | None = None,
    ) -> SaveHandle:
        """Stage this rank's part of ``state_dict`` and return; the sidecars do the rest. Called on every rank, in
        order.

        When it returns, the tensors may change. A save that fails does not raise here unless ``blocking``: training
        goes on, and the handle tells.

        Args:
            state_dict: whatever DCP accepts: nested dicts and lists of tensors, DTensors and other values, or objects
                with ``state_dict()`` at the top level.
            step: the training step, not negative; names the checkpoint.
            overwrite: allow the step to be committed already; it is replaced atomically.
            blocking: return only when committed (the same format and bytes); raises what ``handle.result()`` raises.
            per_rank: state of this rank alone (random state, data loader), kept apart from other ranks'.
            planner: a planner for this save only.

        Raises:
            UnsupportedLeaf, PlanningError: the state dict cannot be saved; the text names key and type.
            AlreadyCommitted: the step is committed and ``overwrite`` is False.
            ValueError, TypeError: an argument is out of bounds.
            ClientClosed: after ``close()``, or in a forked child.
        """
        self._check_usable()
        started_s = time.monotonic()
        handle = self._begin(step)
        save = handle._save
        state: PlanningState | None = None
        try:
            self._check_step(save, overwrite)
            if self._config.backpressure == "skip" and self._connection.pool.all_busy:
                raise SaveSkipped(step, [FailureReport("SaveSkipped", "every region is still being persisted")])
            whole = with_per_rank(dict(state_dict), per_rank, self._config.rank)
            state = PlanningState(whole, planner or self._planner, is_coordinator=self._config.rank == 0)
            self._stager.stage(save, state, overwrite=overwrite)
            handle._set_staged()
        except _BAD_INPUT as error:
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
        if blocking:
            handle.result()
        return handle

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
        save = SaveKey(session, seq, step)
        handle = SaveHandle(save, self._connection.questions.who_is_late)
        self._connection.saves.expect(save, handle)
        self._connection.next_seq = self._seq  # after it is expected: what is neither expected nor to come has ended
        self._last = handle
        return handle

    def _check_step(self, save: SaveKey, overwrite: bool) -> None:
        self._connection.exchange.raise_if_aborted(save)
        known = self._connection.committed_steps
        if not overwrite and save.step in known:
            if not is_committed(self._config.directory, save.step):
                known.discard(save.step)  # somebody has removed it since
                return
            raise AlreadyCommitted(
                f"step {save.step} is committed already in {self.checkpoint_id(save.step)}: pass overwrite=True to "
                "replace it"
            )

    def _give_up(self, handle: SaveHandle, error: BaseException) -> None:
        """This rank's part has failed: tell the others, resolve the handle."""
        save = handle._save
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
        logger.warning("step %d was not saved: %s", save.step, "; ".join(map(str, failures)))
        self._connection.saves.failed(save, failures, skipped=skipped)

    # ------------------------------------------------------------ look and restore

    def latest(self) -> int | None:
        """The newest committed step, the same on every rank if every rank asks equally often; None if there is none.

        Raises:
            SidecarUnreachable: the coordinator does not answer.
        """
        self._check_usable()
        step = self._connection.questions.ask_restore_step(self._connection.session)
        if step is not None and not is_committed(self._config.directory, step):
            logger.warning("step %d has been removed from %s since it was committed", step, self._config.directory)
            step = max(self.steps(), default=None)
        return step

    def steps(self) -> list[int]:
        """The committed steps in the directory now, ascending."""
        return committed_steps(self._config.directory)

    def checkpoint_id(self, step: int) -> str:
        """Where a step lives: the ``checkpoint_id`` for ``torch.distributed.checkpoint.load``."""
        return checkpoint_id(self._config.directory, step)

    def load(
        self, state_dict: dict[str, Any], step: int | None = None, *, per_rank: dict[str, Any] | None = None
    ) -> int:
        """Load a committed checkpoint into ``state_dict`` in place, with ``dcp.load``, and return its step.

        Called on every rank. ``step`` None means the newest, the same on every rank. If a process group is initialised
        DCP uses it, as always on load; saving never does.

        Raises:
            NoCheckpoint: there is none, or ``step`` is not committed.
        """
        self._check_usable()
        chosen = self.latest() if step is None else step
        if chosen is None:
            raise NoCheckpoint(f"there is no committed checkpoint in {self._config.directory}")
        load_step(state_dict, self._config.directory, chosen, per_rank, self._config.rank)
        return chosen

    # ------------------------------------------------------------ end

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save is in flight, failed or not.

        Raises:
            TimeoutError: one still is after ``timeout`` seconds; the text names it and who is late.
        """
        self._check_usable()
        self._connection.wait_idle(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Wait for the saves in flight (at most ``timeout``, or ``close_timeout_s``), say goodbye, end the threads.

        Idempotent. What is staged is completed by the sidecar also if this times out or is never called.

        Raises:
            CheckpointFailed: the last save failed and its handle has told nobody.
            TimeoutError: a save is still in flight; the client is closed all the same.
        """
        if self._closed or os.getpid() != self._pid:
            return
        try:
            self._connection.wait_idle(self._config.close_timeout_s if timeout is None else timeout)
        finally:
            self._shut()
        if self._last is not None and self._last.is_unobserved_failure:
            error = self._last.error()
            assert error is not None
            raise error

    def _shut(self) -> None:
        self._closed = True
        try:
            self._connection.close()
        finally:
            self._stager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._closed and os.getpid() == self._pid:
            # Another error is under way, perhaps on this rank only: waiting for saves that need the other ranks could
            # hold up the whole job. What is staged is completed by the sidecar.
            self._shut()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ClientClosed(f"this client belongs to process {self._pid}, this is its forked child {os.getpid()}")
        if self._closed:
            raise ClientClosed("the client has been closed")
        if threading.current_thread().name in (CALLBACKS, DECISIONS):
            raise ClientClosed("a callback or hook of a save must not call the client: it would wait for itself")


def _problem_of_step(step: object) -> Exception | None:
    if isinstance(step, bool) or not isinstance(step, int):
        return TypeError(f"step is a {type(step).__name__}, expected an int")
    return None if 0 <= step <= MAX_STEP else ValueError(f"step {step} is outside 0 .. 2^63-1")
