"""Questions of this rank that are answered by one message: which step to restore, and what the sidecar is doing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ckpt_proto.errors import SidecarUnreachable
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import AskRestoreStep, AskStatus, Message, RestoreStep, Status
from ckpt_proto.status import SidecarStatus

ANSWER_TIMEOUT_S = 30.0
STATUS_TIMEOUT_S = 2.0
RESTORE_TIMEOUT_S = 3600.0
"""How long the step to restore may wait for a save that an earlier life of the job staged and that is being written."""

logger = logging.getLogger(__name__)


class Questions:
    """Thread rule: the trainer's thread asks and waits, ``ckpt-link`` brings the answers; guarded by one condition."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._restore_steps: dict[int, int | None] = {}
        self._asks = 0
        self._statuses: list[SidecarStatus] = []

    def ask_restore_step(self, session: str) -> int | None:
        """The coordinator's answer to the n-th question for a step to restore.

        Raises:
            SidecarUnreachable: no answer in time.
        """
        with self._changed:
            ask = self._asks
            self._asks += 1
        self._send(AskRestoreStep(ask, session))
        with self._changed:
            if not self._changed.wait_for(lambda: ask in self._restore_steps, ANSWER_TIMEOUT_S):
                logger.info("waiting for a save that an earlier life of the job has staged")
                if not self._changed.wait_for(lambda: ask in self._restore_steps, RESTORE_TIMEOUT_S):
                    raise SidecarUnreachable(f"the coordinator has not answered within {RESTORE_TIMEOUT_S:.0f} s")
            return self._restore_steps[ask]

    def say_again(self, session: str) -> None:
        """Called by the link: the coordinator may have lost the question."""
        with self._changed:
            ask = self._asks - 1
            is_open = ask >= 0 and ask not in self._restore_steps
        if is_open:
            self._send(AskRestoreStep(ask, session))

    def who_is_late(self, save: SaveKey) -> str:
        """Whom a save waits for, from the sidecar's status; for the text of a time-out."""
        with self._changed:
            self._statuses.clear()
        self._send(AskStatus())
        with self._changed:
            if not self._changed.wait_for(lambda: self._statuses, STATUS_TIMEOUT_S):
                return "the sidecar does not answer"
            status = self._statuses.pop()
        late = [name for attempt in status.checkpoints if attempt.save_id == save.save_id for name in attempt.late]
        if late:
            return ", ".join(late)
        return "; ".join(status.links) or "the sidecar does not know this save"

    def on_answer(self, message: RestoreStep | Status) -> None:
        """An answer has come."""
        with self._changed:
            if isinstance(message, RestoreStep):
                self._restore_steps[message.ask] = message.step
            else:
                self._statuses.append(message.status)
            self._changed.notify_all()
