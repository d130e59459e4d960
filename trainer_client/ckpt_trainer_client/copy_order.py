"""Which tensors are copied while ``save()`` runs and which behind the training's back. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

IN_CALL_BYTES: Final = 16 << 10
"""Tensors up to this size are copied in the call: that costs microseconds, and step counters, running statistics and
other small things that a forward pass may change are among them."""

BATCH_BYTES: Final = 32 << 20
"""About so much is copied at a time behind the training's back: a save that was given up ends after one batch."""

CHANGED_BY_FORWARD: Final = ("running_mean", "running_var", "num_batches_tracked")
"""Last parts of keys of what the forward pass of torch's norm layers changes in place."""


class Source(NamedTuple):
    """What decides about a tensor: its key, how large it is, and where its storage begins, if it is not small."""

    fqn: str
    nbytes: int
    address: int = 0


class CopyOrder:
    """Decides by what the user named, what is known to change in forward, and what was found changed before.

    Args:
        patterns: shell patterns of keys to copy in the call, as in ``fnmatch``.
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = tuple(patterns)
        self._found: set[str] = set()

    def learn(self, fqns: Iterable[str]) -> None:
        """These were changed while they were copied: from the next save on they are copied in the call."""
        self._found.update(fqns)

    def split(self, sources: Sequence[Source], buffers: frozenset[int] = frozenset()) -> tuple[list[int], list[int]]:
        """Places of the tensors to copy in the call, and of those to copy later, each ascending.

        Args:
            sources: one for each tensor.
            buffers: addresses of storages that a forward pass may change.
        """
        first: list[int] = []
        later: list[int] = []
        for place, source in enumerate(sources):
            (first if self._is_first(source, buffers) else later).append(place)
        return first, later

    def _is_first(self, source: Source, buffers: frozenset[int]) -> bool:
        return (
            source.nbytes <= IN_CALL_BYTES
            or source.address in buffers
            or source.fqn in self._found
            or source.fqn.rpartition(".")[2] in CHANGED_BY_FORWARD
            or any(fnmatch.fnmatchcase(source.fqn, pattern) for pattern in self._patterns)
        )


def batches(places: Sequence[int], sources: Sequence[Source]) -> list[list[int]]:
    """``places`` in runs of about :data:`BATCH_BYTES`, in order."""
    runs: list[list[int]] = []
    room = 0
    for place in places:
        if room <= 0:
            runs.append([])
            room = BATCH_BYTES
        runs[-1].append(place)
        room -= sources[place].nbytes
    return runs
