"""The trainer's side of ckpt-sidecar: ``CheckpointClient`` and what it hands out."""

from ckpt_trainer_client.client import CheckpointClient
from ckpt_trainer_client.errors import (
    AlreadyCommitted,
    CheckpointError,
    CheckpointFailed,
    ClientClosed,
    LoadFailed,
    NoCheckpoint,
    PlanningError,
    RegionError,
    RegionsExhausted,
    SaveSkipped,
    SidecarRefused,
    SidecarUnreachable,
    StorageError,
    TensorChanged,
    UnsupportedLeaf,
)
from ckpt_trainer_client.preparation import Preparation
from ckpt_trainer_client.save_handle import SaveHandle

__all__ = [
    "AlreadyCommitted",
    "CheckpointClient",
    "CheckpointError",
    "CheckpointFailed",
    "ClientClosed",
    "LoadFailed",
    "NoCheckpoint",
    "PlanningError",
    "Preparation",
    "RegionError",
    "RegionsExhausted",
    "SaveHandle",
    "SaveSkipped",
    "SidecarRefused",
    "SidecarUnreachable",
    "StorageError",
    "TensorChanged",
    "UnsupportedLeaf",
]
