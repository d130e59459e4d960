"""What the thread ``ckpt-stand-in`` asks and tells of the client's saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import DecideCommit, SubmitShard


@dataclass(frozen=True)
class SavesOfClient:
    """What is asked and told of the client's saves, on the thread ``ckpt-stand-in`` but for ``serve``.

    Attributes:
        session: the client's session.
        next_seq: the number of its next save; asked for before ``pending``: a save may begin meanwhile.
        pending: the saves whose end is not known.
        given_up: saves that its handles were told have failed.
        submits: what has been handed over, in the order of the saves.
        holds: whether a slot is sealed for a save number.
        freed: the slot of a submission may be filled again.
        persisted, committed, failed: what a handle is told.
        decision: that of rank 0's pre-commit hooks; None while they run.
        serve: tells who waits for a sidecar that there is none, or, by None, that there is one again.
    """

    session: Callable[[], str]
    next_seq: Callable[[], int]
    pending: Callable[[], list[SaveKey]]
    given_up: Callable[[], list[SaveKey]]
    submits: Callable[[], list[SubmitShard]]
    holds: Callable[[SubmitShard], bool]
    freed: Callable[[SubmitShard], None]
    persisted: Callable[[SaveKey], None]
    committed: Callable[[SaveKey], None]
    failed: Callable[[SaveKey, Sequence[FailureReport]], None]
    decision: Callable[[SaveKey, str], DecideCommit | None]
    serve: Callable[[FailureReport | None], None]
