"""What the script has promised for copies behind its back: that it waits before it changes tensors, and what forward
changes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)


class Guard:
    """One client's. Keeps neither optimizers nor models alive."""

    def __init__(self) -> None:
        self._is_set = False
        self._has_warned = False
        self._models: list[weakref.ref[torch.nn.Module]] = []

    def set(self) -> None:
        """The script waits, or has a hook that does."""
        self._is_set = True

    def hook(self, optimizer: torch.optim.Optimizer, wait: Callable[[], None]) -> None:
        """Call the method ``wait`` before each step of ``optimizer``, while its object lives."""
        method = weakref.WeakMethod(wait)

        def before_step(*_: object) -> None:
            if (alive := method()) is not None:
                alive()

        optimizer.register_step_pre_hook(before_step)
        self.set()

    def watch(self, model: torch.nn.Module) -> None:
        """The buffers of ``model`` may be changed by its forward pass."""
        self._models.append(weakref.ref(model))

    def allows_overlap(self) -> bool:
        """Whether a copy will be waited for; says once, in the log, that it cannot be known yet."""
        if not self._is_set and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "overlap is on, but neither guard(optimizer) nor before_optimizer_step() has been called: until "
                "one is, save() copies everything before it returns"
            )
        return self._is_set

    def buffers(self) -> frozenset[int]:
        """Addresses of the storages of the watched models' buffers, as they are now."""
        models = [model for model in (reference() for reference in self._models) if model is not None]
        return frozenset(_address(buffer) for model in models for buffer in model.buffers())


def _address(buffer: torch.Tensor) -> int:
    local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
    return local.untyped_storage().data_ptr()
