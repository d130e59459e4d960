"""What storage says of this rank's saves while no sidecar runs.

Looked at on the thread ``ckpt-stand-in`` only: a storage that hangs holds up nobody else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ckpt_proto.attempt_files import durable_ranks, is_named_in_metadata
from ckpt_proto.checkpoint_layout import METADATA_NAME, checkpoint_id, manifest_name
from ckpt_proto.errors import StorageError
from ckpt_proto.identity import SaveKey
from ckpt_trainer_client.degraded_decisions import Ledger


class LedgerView:
    """Looks at the attempts of one rank in one checkpoint directory."""

    def __init__(self, directory: str, rank: int, world_size: int) -> None:
        self._directory = directory
        self._rank = rank
        self._world_size = world_size
        self._looked: dict[SaveKey, tuple[int, int, int]] = {}

    def keep_only(self, saves: Iterable[SaveKey]) -> None:
        """Forget what was seen of other saves."""
        kept = set(saves)
        self._looked = {save: seen for save, seen in self._looked.items() if save in kept}

    def look(self, save: SaveKey) -> Ledger:
        """How a save stands: rank 0 looks for every rank's shard, another for its own and that of rank 0."""
        path = self._path(save)
        try:
            published = self._is_published(path, save)
            if self._rank == 0:
                return Ledger(published, durable_ranks(path, save.save_id))
            ranks = [rank for rank in (0, self._rank) if (path / manifest_name(rank, save.save_id)).exists()]
            return Ledger(published, frozenset(ranks))
        except (OSError, StorageError) as error:
            return Ledger(False, frozenset(), str(error))

    def missing(self, save: SaveKey) -> list[int]:
        """The ranks that have no durable shard of a save.

        Raises:
            StorageError: the storage cannot be read.
        """
        durable = durable_ranks(self._path(save), save.save_id)
        return [rank for rank in range(self._world_size) if rank not in durable]

    def has_own(self, save: SaveKey) -> bool:
        """Whether this rank's shard of a save is durable.

        Raises:
            OSError: the storage cannot be read.
        """
        return (self._path(save) / manifest_name(self._rank, save.save_id)).exists()

    def _path(self, save: SaveKey) -> Path:
        return Path(checkpoint_id(self._directory, save.step))

    def _is_published(self, path: Path, save: SaveKey) -> bool:
        """Looked into only if it has changed: the ``.metadata`` of an older attempt may be large.

        Who publishes takes ``.metadata`` away again if the directory cannot be made durable. So it counts when the
        directory is durable and it is still there.
        """
        seen = _identity(path)
        if seen is None or self._looked.get(save) == seen:
            return False
        if not is_named_in_metadata(path, save.save_id):
            self._looked[save] = seen
            return False
        _sync(path)
        return _identity(path) == seen


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = (path / METADATA_NAME).stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
