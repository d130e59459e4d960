"""The user's part in a commit: hooks that may veto before it, hooks that are told after it."""

from __future__ import annotations

import logging
from collections.abc import Callable

PreCommitHook = Callable[[int, str], object]
"""``hook(step, checkpoint_id)`` on rank 0, when all data files are durable and ``.metadata`` is not published yet.
Raising or returning False vetoes the commit."""

PostCommitHook = Callable[[int, str], object]
"""``hook(step, checkpoint_id)`` on every rank, after the commit. What it raises is logged, the checkpoint stands."""

logger = logging.getLogger(__name__)


class CommitHooks:
    """Pre-commit hooks run on the thread ``ckpt-decide``, post-commit hooks on ``ckpt-callbacks``."""

    def __init__(self, pre: tuple[PreCommitHook, ...], post: tuple[PostCommitHook, ...]) -> None:
        self._pre = pre
        self._post = post

    @property
    def has_pre(self) -> bool:
        """Whether somebody wants to be asked before a commit."""
        return bool(self._pre)

    def veto(self, step: int, checkpoint_id: str) -> str | None:
        """Why the commit must not be made, or None."""
        for hook in self._pre:
            try:
                answer = hook(step, checkpoint_id)
                if _is_no(answer):
                    return f"{_name(hook)} returned {answer!r}"
            except BaseException as error:
                logger.warning("pre-commit hook %s refused step %d", _name(hook), step, exc_info=True)
                return f"{_name(hook)} raised {type(error).__name__}: {error}"
        return None

    def tell(self, step: int, checkpoint_id: str) -> None:
        """Run the post-commit hooks."""
        for hook in self._post:
            try:
                hook(step, checkpoint_id)
            except BaseException:
                logger.exception("post-commit hook %s failed for step %d", _name(hook), step)


def _is_no(answer: object) -> bool:
    """False, or an array's or tensor's false; not 0, "" or None, which a hook may return for other reasons."""
    return answer is False or (hasattr(answer, "dtype") and not bool(answer))


def _name(hook: Callable[..., object]) -> str:
    return getattr(hook, "__qualname__", repr(hook))
