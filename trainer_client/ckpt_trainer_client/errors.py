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
from ckpt_proto.identity import step_text

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
    "TensorChanged",
    "UnsupportedLeaf",
]


class CheckpointFailed(CheckpointError):
    """A save did not end in a committed checkpoint. Training may go on; the previous checkpoint stands.

    ``failures`` maps a rank (-1 for the sidecar or the storage) to what went wrong there.
    """

    def __init__(self, step: int, failures: Sequence[FailureReport]) -> None:
        self.step = step
        self.failures = {failure.rank: failure for failure in failures}
        super().__init__(f"{step_text(step)} was not saved: " + "; ".join(map(str, failures)))


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


class TensorChanged(CheckpointError):
    """Tensors were changed in place while they were copied behind the training's back; ``keys`` names them."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        named = ", ".join(self.keys[:20]) + (f" and {len(self.keys) - 20} more" if len(self.keys) > 20 else "")
        super().__init__(
            f"{named} changed while being copied: call before_optimizer_step() before whatever changes them, or name "
            "them in copy_first; the next save copies them before it returns"
        )


class LoadFailed(CheckpointError):
    """A committed checkpoint could not be loaded into the state dict: a key or a shape differs, or it is damaged."""


class NoCheckpoint(CheckpointError):
    """There is no committed checkpoint to load, or what the path names is not one."""
