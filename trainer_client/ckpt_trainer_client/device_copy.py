"""Copies from a CUDA device behind the training's back: a side stream, ordered after what the trainer had queued.

The sidecar never comes here: only the trainer has a CUDA context.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

logger = logging.getLogger(__name__)


def can_overlap(device: torch.device) -> bool:
    """Whether tensors of a device can be copied while the device computes; those of others are copied in the call."""
    return device.type in ("cpu", "cuda")


class SideStreams:
    """One stream for each CUDA device of some tensors. Made on the trainer's thread, entered on ``ckpt-stage``.

    The tensors must be kept until the streams were waited for: then no device memory needs to be marked as in use.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        self._queued = {device: torch.cuda.current_stream(device).record_event() for device in devices}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Copies in here run on the side streams, after all that was queued when this object was made."""
        with ExitStack() as streams:
            for device, queued in self._queued.items():
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_event(queued)
                streams.enter_context(torch.cuda.stream(stream))
            yield


def pin(region: torch.Tensor) -> bool:
    """Register the memory of a region, a flat uint8 tensor, with CUDA; returns whether it is pinned now.

    Without it copies are staged by the driver: correct, and slower.
    """
    error = torch.cuda.cudart().cudaHostRegister(region.data_ptr(), region.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(error) != 0:
        logger.warning(
            "a region of %d bytes could not be pinned (CUDA error %s): copies are slower", region.nbytes, error
        )
    return int(error) == 0


def unpin(address: int) -> None:
    """Take a registration back, before the memory is unmapped."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
