"""Copying a rank's planned tensors into its region. The hot path of a save."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckpt_trainer_client.errors import PlanningError
from ckpt_trainer_client.planning import PlanningState, SavePlanned

TOGETHER = 4096
"""Tensors copied in one call: the interpreter gets a turn between two."""


def byte_entries(state: PlanningState, plan: SavePlanned) -> list[bytes]:
    """The serialised byte items and opaque tensors of the plan, in plan order.

    Done before the region is touched, because this is where a value can turn out not to be serialisable.

    Raises:
        UnsupportedLeaf: one cannot; the text names key and type.
    """
    return [state.resolve_bytes(write_item) for write_item in plan.others]


def sources(state: PlanningState, plan: SavePlanned) -> list[torch.Tensor]:
    """The tensors to copy, in plan order, where they live.

    Raises:
        PlanningError: one is not what the plan says: copying it would store other values under its shape.
    """
    if state.leaves is not None and plan.pick is not None:
        return list(plan.pick(state.leaves))  # recognised, and so what the plan says
    dtypes = {item.dtype: getattr(torch, item.dtype) for _, item in plan.framed}
    tensors = []
    for write_item, item in plan.framed:
        tensor = state.resolve_tensor(write_item)
        if tensor.shape != item.sizes or tensor.dtype is not dtypes[item.dtype]:
            raise PlanningError(
                f"{item.fqn} is {tensor.dtype}{list(tensor.shape)}, planned was torch.{item.dtype}{list(item.sizes)}"
            )
        tensors.append(tensor)
    return tensors


def copy_all(targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy ``tensors`` into ``targets``; on return the region holds the bytes and the tensors may change.

    Device tensors are copied on the calling thread's current stream, after the work that is queued there, and waited
    for.
    """
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    # A save may be called in any mode; a target made or written in inference mode could not be written outside of it.
    with torch.inference_mode(mode=False), torch.no_grad():
        for start in range(0, len(tensors), TOGETHER):
            part = slice(start, start + TOGETHER)
            torch._foreach_copy_(list(targets[part]), list(tensors[part]), non_blocking=True)
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()
