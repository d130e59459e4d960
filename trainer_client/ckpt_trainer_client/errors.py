"""Errors that a training script meets."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_proto.errors import (
    AlreadyCommitted,
    CheckpointError,
    FailureReport,
    RegionError,
    SidecarUnreachable,
    StorageError,
)

__all__ = [
    "AlreadyCommitted",
    "CheckpointError",
    "CheckpointFailed",
    "ClientClosed",
    "LoadFailed",
    "NoCheckpoint",
    "PlanningError",
    "RegionError",
    "RegionsExhausted",
    "SaveSkipped",
    "SidecarRefused",
    "SidecarUnreachable",
    "StorageError",
    "UnsupportedLeaf",
]


class CheckpointFailed(CheckpointError):
    """A save did not end in a committed checkpoint. Training may go on; the previous checkpoint stands.

    ``failures`` maps a rank (-1 for the sidecar or the storage) to what went wrong there.
    """

    def __init__(self, step: int, failures: Sequence[FailureReport]) -> None:
        self.step = step
        self.failures = {failure.rank: failure for failure in failures}
        super().__init__(f"step {step} was not saved: " + "; ".join(map(str, failures)))


class SaveSkipped(CheckpointFailed):
    """Every slot of some rank was still being persisted and the back-pressure policy is ``skip``."""


class RegionsExhausted(CheckpointError):
    """No slot became free within the bound of the back-pressure policy ``wait``."""


class SidecarRefused(CheckpointError):
    """The sidecar will not serve this client; ``failure`` says why."""

    def __init__(self, failure: FailureReport) -> None:
        self.failure = failure
        super().__init__(str(failure))


class ClientClosed(CheckpointError):
    """The client was closed, or belongs to the process that this one was forked from."""


class PlanningError(CheckpointError):
    """The planner made a plan that cannot be carried out by a sidecar."""


class UnsupportedLeaf(CheckpointError):
    """A value of the state dict cannot be saved; the text names its key and type."""


class LoadFailed(CheckpointError):
    """A committed checkpoint could not be loaded into the state dict: a key or a shape differs, or it is damaged."""


class NoCheckpoint(CheckpointError):
    """There is no committed checkpoint to load, or what the path names is not one."""
