"""Errors that both sides know, and the form in which an error travels.

An error is raised where it is found, translated once at a border, and travels as a :class:`FailureReport`.
``LocalProtocolError`` means this side broke a rule, ``RemoteProtocolError`` the other side did.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

UNKNOWN_RANK = -1
"""Rank of a failure that belongs to no rank (the sidecar itself, the storage)."""


class CheckpointError(Exception):
    """Root of every error this project raises on purpose."""


class LocalProtocolError(CheckpointError):
    """This side tried something the protocol or a lifecycle does not allow. Nothing was changed."""


class RemoteProtocolError(CheckpointError):
    """The other side sent something the protocol does not allow. The message was dropped, nothing was changed."""


class SidecarUnreachable(CheckpointError):
    """No sidecar answered on this node within the bound that the message names."""


class RegionError(CheckpointError):
    """A shared-memory region could not be made, attached or trusted."""


class NotEnoughSharedMemory(RegionError):
    """``/dev/shm`` has less room than the regions need; the message names both numbers in bytes."""


class StorageError(CheckpointError):
    """A checkpoint file could not be written, read or published."""


class AlreadyCommitted(StorageError):
    """The step has a ``.metadata`` already and the save was not asked to overwrite it."""


class IncompleteCheckpoint(StorageError):
    """The files of an attempt do not add up to the planned checkpoint, so it was not published."""


@dataclass(frozen=True)
class FailureReport:
    """One failure as it travels: between processes, into handles, ``status`` and logs.

    ``kind`` is the class name of the error where it was found; ``message`` names the thing, the numbers and where;
    ``hint`` is the next step for a person; ``rank`` is :data:`UNKNOWN_RANK` if the failure belongs to no rank.
    """

    kind: str
    message: str
    hint: str = ""
    rank: int = UNKNOWN_RANK
    node: str = ""

    def __str__(self) -> str:
        """One line for a person."""
        where = f"rank {self.rank}" if self.rank != UNKNOWN_RANK else "sidecar"
        if self.node:
            where += f" on {self.node}"
        hint = f" — {self.hint}" if self.hint else ""
        return f"{where}: {self.message} [{self.kind}]{hint}"

    def at(self, rank: int, node: str = "") -> FailureReport:
        """The same failure, attributed to a rank."""
        return replace(self, rank=rank, node=node or self.node)


def report_of(error: BaseException, *, hint: str = "") -> FailureReport:
    """The report of an exception: its class name and text; chained causes are appended to the text."""
    message = str(error) or repr(error)
    cause = error.__cause__
    while cause is not None:
        message += f"; caused by {type(cause).__name__}: {cause}"
        cause = cause.__cause__
    return FailureReport(kind=type(error).__name__, message=message, hint=hint)
