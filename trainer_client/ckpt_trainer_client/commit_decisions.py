"""Rank 0's answer to the question whether to commit: the pre-commit hooks decide, once per save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import AskCommit, DecideCommit, Message
from ckpt_trainer_client.callback_thread import DECISIONS, CallbackThread
from ckpt_trainer_client.commit_hooks import CommitHooks

MAX_KEPT = 64
"""Decisions kept for a coordinator that asks again; far more than can be in flight."""


class CommitDecisions:
    """Owner of the thread ``ckpt-decide``, which runs only if there are hooks. ``send`` may be called on any thread."""

    def __init__(self, hooks: CommitHooks, send: Callable[[Message], None]) -> None:
        self._hooks = hooks
        self._send = send
        self._thread = CallbackThread(DECISIONS)
        self._lock = threading.Lock()
        self._decided: dict[SaveKey, DecideCommit | None] = {}

    def start(self) -> None:
        """Start the thread, if it is needed."""
        if self._hooks.has_pre:
            self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End the thread."""
        if self._hooks.has_pre:
            self._thread.close(timeout_s)

    def on_ask(self, message: AskCommit, *, is_open: bool) -> None:
        """Called by the link. A coordinator that was restarted asks again: it gets the answer that was given.

        ``is_open``: this rank does not know that the save has ended.
        """
        if not is_open:
            self._send(DecideCommit(message.save, False, "rank 0 knows that this save has ended"))
            return
        if not self._hooks.has_pre:
            self._send(DecideCommit(message.save, True))
            return
        with self._lock:
            is_new = message.save not in self._decided
            decided = self._decided.setdefault(message.save, None)
        if decided is not None:
            self._send(decided)
        elif is_new:
            self._thread.submit(partial(self._decide, message))

    def vetoes(self, pending: Sequence[SaveKey]) -> list[Message]:
        """Saves in flight that were refused: a coordinator that was killed may have begun to remove them."""
        with self._lock:
            decided = [self._decided.get(save) for save in pending]
        return [answer for answer in decided if answer is not None and not answer.accept]

    def decision(self, save: SaveKey, checkpoint_id: str) -> DecideCommit | None:
        """The decision on a save that no coordinator asks about; None while the hooks run. They run once per save."""
        if not self._hooks.has_pre:
            return DecideCommit(save, True)
        with self._lock:
            is_new = save not in self._decided
            decided = self._decided.setdefault(save, None)
        if is_new:
            self._thread.submit(partial(self._decide, AskCommit(save, checkpoint_id)))
        return decided

    def _decide(self, message: AskCommit) -> None:
        veto = self._hooks.veto(message.save.step, message.checkpoint_id)
        decided = DecideCommit(message.save, veto is None, veto or "")
        with self._lock:
            self._decided[message.save] = decided
            for save in list(self._decided)[:-MAX_KEPT]:
                del self._decided[save]
        self._send(decided)
