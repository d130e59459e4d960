"""Finding tensors that were changed while they were being copied behind the training's back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from ckpt_trainer_client.errors import TensorChanged
from ckpt_trainer_client.filling import Filling


class ChangeWatch(Protocol):
    """Knows what the tensors were when ``save()`` returned."""

    def changed(self, places: Iterable[int]) -> list[int]:
        """Which of these, copied meanwhile, are not what they were."""


class VersionWatch:
    """By torch's version counters: a few nanoseconds for each tensor.

    A counter counts in-place operations, whoever does them; not those on ``tensor.data``, nor those of fused
    optimizers. That of a DTensor counts and that of its local tensor does not, so the state dict's leaves are watched.
    """

    def __init__(self, leaves: Mapping[int, torch.Tensor]) -> None:
        self._leaves = {place: (leaf, _version(leaf)) for place, leaf in leaves.items()}

    def changed(self, places: Iterable[int]) -> list[int]:
        """See :class:`ChangeWatch`."""
        watched = ((place, *self._leaves[place]) for place in places)
        return [place for place, leaf, version in watched if _version(leaf) != version]


class ByteWatch:
    """By comparing with a copy made in the call: finds every change, and costs what it is to find. For debugging."""

    def __init__(self, filling: Filling, places: Iterable[int]) -> None:
        self._filling = filling
        with torch.inference_mode(mode=False), torch.no_grad():
            self._before = {place: _bytes(_copy_of(filling.tensors[place])) for place in places}

    def changed(self, places: Iterable[int]) -> list[int]:
        """See :class:`ChangeWatch`."""
        targets = self._filling.targets
        return [place for place in places if not torch.equal(_bytes(targets[place]), self._before[place])]


def raise_if_changed(watch: ChangeWatch, places: Sequence[int], name: Callable[[int], str]) -> None:
    """Raise if one of the tensors just copied is not what it was in the call.

    Raises:
        TensorChanged: with the keys.
    """
    keys = tuple(name(place) for place in watch.changed(places))
    if keys:
        raise TensorChanged(keys)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
