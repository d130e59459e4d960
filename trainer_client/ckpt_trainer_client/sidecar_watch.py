"""Whether the sidecar is there. Asked by the link's thread, once a second and at every message; no lock is held."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ckpt_proto.errors import FailureReport
from ckpt_proto.runtime_dir import lock_owner
from ckpt_trainer_client.config import ClientConfig
from ckpt_trainer_client.sidecar_start import start_sidecar

SILENT_S = 3.0
"""No answer to heartbeats for so long, and nobody holding the job's lock: the sidecar is dead."""

SIDECAR_LOST = "SidecarLost"
SIDECAR_SILENT = "SidecarSilent"
"""Kinds of failures: no sidecar holds the job's lock; one does, and does not answer, so that no other replaces it."""

logger = logging.getLogger(__name__)


class SidecarWatch:
    """Has a dead sidecar replaced, and says when there has been none, or none that answers, for too long.

    Args:
        config: the client's; ``connect_timeout_s`` is the bound.
        run: has something done on another thread; starting a sidecar takes seconds.
        on_lost: called at every beat while the bound has passed, with the failure of what needs a sidecar.
        on_served: called when the sidecar answers again.
    """

    def __init__(
        self,
        config: ClientConfig,
        run: Callable[[Callable[[], None]], None],
        on_lost: Callable[[FailureReport], None],
        on_served: Callable[[], None],
    ) -> None:
        self._config = config
        self._run = run
        self._on_lost = on_lost
        self._on_served = on_served
        self._lost = False
        self._starting = False
        self._stopped = False
        self._owner: int | None = None
        self._owner_s = 0.0

    def stop(self) -> None:
        """From now on no sidecar is started: the client closes."""
        self._stopped = True

    def heard(self) -> None:
        """Something has come from the sidecar."""
        if self._lost:
            self._lost = False
            self._on_served()

    def beat(self, silent_s: float, now_s: float) -> None:
        """A second has passed; ``silent_s`` is for how long the oldest heartbeat without an answer is waiting."""
        if silent_s < SILENT_S:
            return
        owner = lock_owner(self._config.runtime_dir)
        if owner != self._owner:
            self._owner, self._owner_s = owner, now_s
        if owner is not None:
            silent_s = min(silent_s, now_s - self._owner_s)  # one that has just been started is not to blame
        if silent_s > self._config.connect_timeout_s:
            self._lost = True
            self._on_lost(self._failure(silent_s, owner))
        if owner is None and not (self._starting or self._stopped or self._config.supervised):
            self._starting = True
            self._run(self._restart)

    def _failure(self, silent_s: float, owner: int | None) -> FailureReport:
        rank, node = self._config.rank, self._config.node
        if owner is None:
            return FailureReport(
                SIDECAR_LOST, f"no sidecar ran for {silent_s:.0f} s", "see the sidecar's log", rank, node
            )
        text = f"the sidecar (pid {owner or 'unknown'}) has not answered for {silent_s:.0f} s, and holds the job's lock"
        hint = "is it stopped, or does it hang? see its log; when it is ended another takes over what is staged"
        return FailureReport(SIDECAR_SILENT, text, hint, rank, node)

    def _restart(self) -> None:
        try:
            logger.warning("the sidecar of job %s has died: starting another", self._config.job_id)
            start_sidecar(self._config.job_id, self._config.shm_root, self._config.connect_timeout_s)
        finally:
            self._starting = False
