"""``CheckpointClient``: what a training script uses. Wires the parts, does no work of its own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner

from ckpt_proto.checkpoint_layout import checkpoint_id
from ckpt_trainer_client.callback_thread import CALLBACKS, DECISIONS
from ckpt_trainer_client.commit_hooks import PostCommitHook, PreCommitHook
from ckpt_trainer_client.config import ClientConfig
from ckpt_trainer_client.connection import Connection
from ckpt_trainer_client.errors import ClientClosed, NoCheckpoint
from ckpt_trainer_client.guard import Guard
from ckpt_trainer_client.preparation import Preparation
from ckpt_trainer_client.restore import committed_steps, is_committed, load_step
from ckpt_trainer_client.save_handle import SaveHandle
from ckpt_trainer_client.saver import Saver

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)


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
        overlap: the default of ``save(overlap=)``; ``copy_first``: shell patterns of keys that are copied in the call
            all the same; ``check_overlap``: find every tensor that changes while it is copied, at the price of a second
            copy in the call (also ``CKPT_SIDECAR_CHECK_OVERLAP=1``). In-place operations are found without it.

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
        overlap: bool | None = None,
        copy_first: Sequence[str] = (),
        check_overlap: bool | None = None,
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
            overlap=overlap,
            copy_first=tuple(copy_first),
            check_overlap=check_overlap,
        )
        self._planner = planner
        self._pid = os.getpid()
        self._closed = False
        self._guard = Guard()
        self._connection = Connection(self._config, tuple(pre_commit), tuple(post_commit))
        self._connection.open(torch.__version__)
        self._saver = Saver(self._config, self._connection, self._guard.buffers)

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
        overlap: bool | None = None,
    ) -> SaveHandle:
        """Stage this rank's part of ``state_dict`` and return; the sidecars do the rest. Called on every rank, in
        order.

        When it returns, the tensors may change; with ``overlap``, when ``before_optimizer_step()`` returns. A save that
        fails does not raise here unless ``blocking``: training goes on, and the handle tells.

        Args:
            state_dict: whatever DCP accepts: nested dicts and lists of tensors, DTensors and other values, or objects
                with ``state_dict()`` at the top level.
            step: the training step, not negative; names the checkpoint.
            overwrite: allow the step to be committed already; it is replaced atomically.
            blocking: return only when committed (the same format and bytes); raises what ``handle.result()`` raises.
            per_rank: state of this rank alone (random state, data loader), kept apart from other ranks'.
            planner: a planner for this save only.
            overlap: copy most tensors after returning, behind forward and backward; None means what the client was
                told. They must not change before :meth:`before_optimizer_step`, which :meth:`guard` calls; what
                forward changes is copied in the call: small tensors, running statistics, and ``copy_first``. Until
                one of the two has been called once, and with ``blocking``, everything is copied in the call.

        Raises:
            UnsupportedLeaf, PlanningError: the state dict cannot be saved; the text names key and type.
            AlreadyCommitted: the step is committed and ``overwrite`` is False.
            ValueError, TypeError: an argument is out of bounds.
            ClientClosed: after ``close()``, or in a forked child.
        """
        self._check_usable()
        wanted = (self._config.overlap if overlap is None else overlap) and not blocking
        handle = self._saver.save(
            (state_dict, per_rank),
            step,
            overwrite=overwrite,
            overlap=wanted and self._guard.allows_overlap(),
            planner=planner or self._planner,
        )
        if blocking:
            handle.result()
        self._connection.steps.pass_over()
        return handle

    def before_optimizer_step(self) -> None:
        """Wait until the tensors of the last save may change: what is left of its copy. Called on every rank before
        every optimizer step, and before anything else that changes what is saved with ``overlap``.

        Costs nothing when nothing is being copied. ``handle.wait_s`` of the save says how long was waited. The time
        between two calls tells the sidecar whether what it writes slows training.
        """
        self._guard.set()
        if os.getpid() == self._pid:  # in a forked child nothing is copied
            self._saver.wait_copied()
            self._connection.steps.tick()

    def guard(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None) -> None:
        """Call :meth:`before_optimizer_step` at every ``optimizer.step()`` from now on. The client is not kept alive.

        Args:
            optimizer: what changes the tensors that are saved; call it for each, if there are several.
            model: its buffers are copied before ``save()`` returns, because forward may change them.
        """
        self._check_usable()
        self._guard.hook(optimizer, self.before_optimizer_step)
        if model is not None:
            self._guard.watch(model)

    def prepare(
        self,
        state_dict: Mapping[str, Any],
        *,
        per_rank: dict[str, Any] | None = None,
        planner: SavePlanner | None = None,
    ) -> Preparation:
        """Plan, and have the regions made and touched, in the background: the first ``save()`` is a later one then.

        Called on every rank, in order with the saves, with a state dict as it will be saved; its values do not matter.
        The next ``save()`` waits for it. One that fails is logged, and the first save does what it did not.

        Raises:
            UnsupportedLeaf, PlanningError: the state dict cannot be saved; the text names key and type.
            ClientClosed: after ``close()``, or in a forked child.
        """
        self._check_usable()
        return self._saver.prepare((state_dict, per_rank), planner or self._planner)

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
        self._saver.wait_copied()
        load_step(state_dict, self._config.directory, chosen, per_rank, self._config.rank)
        return chosen

    # ------------------------------------------------------------ end

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save is in flight, failed or not.

        Raises:
            TimeoutError: one still is after ``timeout`` seconds; the text names it and who is late.
        """
        self._check_usable()
        self._saver.wait_copied()
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
            self._saver.wait_copied()
            self._connection.wait_idle(self._config.close_timeout_s if timeout is None else timeout)
        finally:
            self._shut()
        last = self._saver.last
        if last is not None and last.is_unobserved_failure:
            error = last.error()
            assert error is not None
            raise error

    def _shut(self) -> None:
        self._closed = True
        with ExitStack() as ending:  # in this order, each even if the one before has failed
            ending.callback(self._saver.close)
            ending.callback(self._connection.close)
            ending.callback(self._saver.settle)

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
