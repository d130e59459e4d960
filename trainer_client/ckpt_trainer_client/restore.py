"""Finding and loading committed checkpoints, through stock DCP."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from ckpt_proto.checkpoint_layout import METADATA_NAME, checkpoint_id, step_of
from ckpt_trainer_client.errors import LoadFailed, NoCheckpoint

PER_RANK_KEY = "per_rank"
SHOWN_KEYS = 5

logger = logging.getLogger(__name__)


def committed_steps(directory: str) -> list[int]:
    """The steps under ``directory`` that have a ``.metadata``, ascending; empty if the directory does not exist."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    steps = [step for step in map(step_of, names) if step is not None]
    return sorted(step for step in steps if is_committed(directory, step))


def is_committed(directory: str, step: int) -> bool:
    """Whether the step has a ``.metadata`` now."""
    return (Path(checkpoint_id(directory, step)) / METADATA_NAME).exists()


def load_step(
    state_dict: dict[str, Any], directory: str, step: int, per_rank: dict[str, Any] | None = None, rank: int = 0
) -> None:
    """Load a committed step into ``state_dict`` (and ``per_rank``) in place: ``dcp.load`` on the step's directory.

    Raises:
        NoCheckpoint: the step is not committed; the text names the committed ones.
        LoadFailed: it does not fit the state dict, or cannot be read; the text has the first rank's reason.
    """
    where = checkpoint_id(directory, step)
    if not is_committed(directory, step):
        known = committed_steps(directory)
        what = "exists but was never committed" if Path(where).exists() else "does not exist"
        raise NoCheckpoint(f"{where} {what}; committed steps in {directory}: {known or 'none'}")
    whole = with_per_rank(state_dict, per_rank, rank)
    planner = DefaultLoadPlanner()
    with warnings.catch_warnings():
        # Loading in one process without a process group is meant, not an oversight.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            load(whole, checkpoint_id=where, planner=planner)
        except CheckpointException as error:
            # It derives from BaseException, so a trainer's `except Exception` would miss it.
            raise LoadFailed(f"{where} could not be loaded: {_first_cause(error)}") from error
    _warn_of_leftovers(planner, where)
    # dcp.load assigns what is no tensor to the dict that it was given.
    state_dict.update((key, whole[key]) for key in state_dict)


def _warn_of_leftovers(planner: DefaultLoadPlanner, where: str) -> None:
    """DCP loads what the state dict asks for. Asking for less is legal, but often an optimizer without its state."""
    assert planner.metadata is not None
    left = [
        key
        for key in planner.metadata.state_dict_metadata
        if key not in planner.state_dict and not key.startswith(f"{PER_RANK_KEY}.")
    ]
    if left:
        named = ", ".join(left[:SHOWN_KEYS]) + (", ..." if len(left) > SHOWN_KEYS else "")
        logger.warning("%s has %d keys that were not asked for and so not loaded: %s", where, len(left), named)


def _first_cause(error: CheckpointException) -> str:
    for rank, (cause, _) in sorted(error.failures.items()):
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return str(error)


def with_per_rank(state_dict: dict[str, Any], per_rank: dict[str, Any] | None, rank: int) -> dict[str, Any]:
    """``state_dict`` and, under a name of this rank only, what belongs to it alone.

    Raises:
        ValueError: the state dict has the reserved key already.
    """
    if per_rank is None:
        return state_dict
    if PER_RANK_KEY in state_dict:
        raise ValueError(
            f"the state dict has a key {PER_RANK_KEY!r}, which is where per_rank= state is kept: rename it"
        )
    return {**state_dict, PER_RANK_KEY: {f"rank-{rank}": per_rank}}
