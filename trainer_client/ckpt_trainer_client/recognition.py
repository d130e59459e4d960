"""Recognising the state dict of the save before, so that nothing is planned, flattened or looked up again.

Flattening and comparing as DCP does costs tens of microseconds for each tensor. What has the same containers, keys and
kinds of leaves flattens the same way, so only that is compared, in loops that run in C. It is a shortcut: what is not
recognised goes the long way, and nothing is recognised that would be planned otherwise. No tensor is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from ckpt_trainer_client.structure import Structure, leaf_structure

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types, exactly these, whose tensors are saved whole and as they are."""

_traits = attrgetter("shape", "dtype", "layout", "requires_grad", "is_meta")

PART = 4096
"""Leaves looked at in one go: what is made for them fits a processor's cache."""


class _Container(NamedTuple):
    """A mapping or a list. ``keys`` is empty for a list; ``children`` has None for a leaf, and is empty if all are."""

    kind: type
    keys: tuple[Any, ...]
    key_kinds: tuple[type, ...]
    size: int
    children: tuple[_Container | None, ...]


class Recognition:
    """The containers of one state dict and its leaves, in the order of flattening. Made by :meth:`of`."""

    def __init__(self, root: _Container, structure: Structure, plain: Sequence[int]) -> None:
        self._root = root
        self.fqns = tuple(structure)
        self._plain = tuple(plain)
        taken = set(plain)
        self._others = tuple(
            (place, fqn, tuple(structure[fqn][1:])) for place, fqn in enumerate(self.fqns) if place not in taken
        )
        self._traits = [(*structure[self.fqns[place]][2:], False) for place in plain]
        self._kinds = [structure[self.fqns[place]][1] for place in plain]
        self._pick_plain = picker(plain)

    @classmethod
    def of(cls, state_dict: Mapping[str, Any], flat: Mapping[str, Any], structure: Structure) -> Recognition | None:
        """What recognises ``state_dict`` again, or None if it was flattened otherwise than into its leaves in order."""
        leaves: list[Any] = []
        root = _container(state_dict, leaves)
        if len(leaves) != len(flat) or any(one is not other for one, other in zip(leaves, flat.values(), strict=True)):
            return None
        return cls(root, structure, [place for place, leaf in enumerate(leaves) if type(leaf) in PLAIN])

    def leaves(self, state_dict: Mapping[str, Any]) -> list[Any] | None:
        """The leaves of ``state_dict`` in the order of ``fqns``, or None if it is not recognised."""
        leaves: list[Any] = []
        if not _collect(self._root, state_dict, leaves):
            return None
        plain = self._pick_plain(leaves)
        if list(map(type, plain)) != self._kinds:
            return None
        for start in range(0, len(plain), PART):
            if list(map(_traits, plain[start : start + PART])) != self._traits[start : start + PART]:
                return None
        known = all(_is_like(leaves[place], fqn, structure) for place, fqn, structure in self._others)
        return leaves if known else None

    def picker_of(self, fqns: Sequence[str]) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
        """What takes the plain leaves of some keys, in this order, out of ``leaves``; None if one is not plain."""
        places = {self.fqns[place]: place for place in self._plain}
        found = [places[fqn] for fqn in fqns if fqn in places]
        return picker(found) if len(found) == len(fqns) else None


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the elements at some places, in C."""
    if len(places) < 2:  # itemgetter makes no tuple then
        return lambda sequence: tuple(sequence[place] for place in places)
    return itemgetter(*places)


def _container(value: Any, leaves: list[Any]) -> _Container:
    """By DCP's rule (``torch.distributed.checkpoint._traverse``): mappings are gone into, and lists with a tensor or a
    mapping in them; everything else is a leaf."""
    is_mapping = isinstance(value, Mapping)
    keys = tuple(value) if is_mapping else ()
    children: list[_Container | None] = []
    for child in value.values() if is_mapping else value:
        if isinstance(child, Mapping) or (isinstance(child, list) and not _is_terminal(child)):
            children.append(_container(child, leaves))
        else:
            leaves.append(child)
            children.append(None)
    only_leaves = all(child is None for child in children)
    return _Container(type(value), keys, tuple(map(type, keys)), len(children), () if only_leaves else tuple(children))


def _collect(container: _Container, value: Any, leaves: list[Any]) -> bool:
    kind = type(value)
    if kind is not container.kind or len(value) != container.size:
        return False
    inside: Iterable[Any] = value
    if isinstance(value, Mapping):
        if tuple(value) != container.keys or tuple(map(type, value)) != container.key_kinds:
            return False
        inside = value.values()
    if not container.children:
        leaves.extend(inside)
        return True
    for child, known in zip(inside, container.children, strict=True):
        if known is None:
            leaves.append(child)
        elif not _collect(known, child, leaves):
            return False
    return True


def _is_like(leaf: Any, fqn: str, structure: tuple[Any, ...]) -> bool:
    if isinstance(leaf, Mapping) or (isinstance(leaf, list) and not _is_terminal(leaf)):
        return False
    try:
        return leaf_structure(fqn, leaf) == structure
    except Exception:  # noqa: BLE001 - what has no structure is not recognised: the long way says what is wrong with it
        return False


def _is_terminal(value: list[Any]) -> bool:
    """Whether DCP keeps a list whole: nothing in it, however deep in lists, is a tensor or a mapping."""
    return not any(
        isinstance(entry, (Mapping, torch.Tensor)) or (isinstance(entry, list) and not _is_terminal(entry))
        for entry in value
    )
