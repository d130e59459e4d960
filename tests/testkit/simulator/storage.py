"""The simulated storage: data files, manifests and ``.metadata`` of one checkpoint directory, with its troubles."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_proto.errors import StorageError
from ckpt_proto.identity import SaveKey

if TYPE_CHECKING:
    from testkit.simulator.promises import Promises

Shard = tuple[int, SaveKey]
"""A rank's part of an attempt."""

Value = tuple[int, int]
"""What a rank has filled in: its rank and a number that no other fill has."""


@dataclass
class DataFile:
    """The two halves of a data file; ``whole`` once it is durable."""

    first: Value | None = None
    second: Value | None = None
    whole: bool = False


@dataclass(frozen=True)
class Manifest:
    """What matters of a shard manifest."""

    rank: int
    world_size: int
    plan_id: str
    overwrite: bool
    entries: int


class Storage:
    """What survives everything. ``trouble`` is empty, ``passes``, ``stays`` (errors) or ``hangs``."""

    def __init__(self, promises: Promises, now: Callable[[], float]) -> None:
        self.promises = promises
        self.now = now
        self.files: dict[Shard, DataFile] = {}
        self.manifests: dict[Shard, Manifest] = {}
        self.metadata: dict[int, SaveKey] = {}
        self.changed_s: dict[Shard, float] = {}
        self.published_s: dict[SaveKey, float] = {}
        self.trouble = ""
        self._changes = 0

    def _clock(self) -> float:
        """The time of a change: no two are alike."""
        self._changes += 1
        return self.now() + 1e-6 * self._changes

    def touch(self, save: SaveKey) -> None:
        """One access on behalf of a save.

        Raises:
            StorageError: as the trouble of now says.
        """
        if self.trouble not in ("passes", "stays"):
            return
        passes = self.trouble == "passes"
        number = errno.EIO if passes else errno.EROFS
        self.promises.trouble(save, self.now(), passes=passes)
        raise StorageError("the storage fails") from OSError(number, "simulated")

    def steps(self) -> tuple[int, ...]:
        """The committed steps."""
        return tuple(sorted(self.metadata))

    def durable(self, shard: Shard) -> Manifest | None:
        """The manifest of a shard whose data file is there."""
        file = self.files.get(shard)
        return self.manifests.get(shard) if file is not None and file.whole else None

    def create(self, shard: Shard) -> DataFile:
        """A new data file, over one that may be there."""
        self.promises.files_change(shard, self)
        file = self.files[shard] = DataFile()
        self.changed_s[shard] = self._clock()
        return file

    def describe(self, shard: Shard, manifest: Manifest) -> None:
        """The manifest of a data file that is durable."""
        self.manifests[shard] = manifest
        self.changed_s[shard] = self._clock()
        self.promises.was_durable.add(shard)

    def remove(self, shard: Shard, part: str) -> None:
        """Remove the ``manifest`` or the ``data`` of a shard."""
        there = self.manifests if part == "manifest" else self.files
        if shard in there:
            self.promises.files_change(shard, self)
            del there[shard]

    def publish(self, save: SaveKey) -> None:
        """``.metadata`` of an attempt gets its name."""
        before = self.metadata.get(save.step)
        self.metadata[save.step] = save
        self.published_s[save] = self._clock()
        self.promises.published_now(save, before, self)

    def superseded_by(self, save: SaveKey) -> list[Shard]:
        """The shards of attempts before this one, as the commit with ``overwrite`` removes them."""
        there = [*self.manifests, *(shard for shard in self.files if shard not in self.manifests)]
        return [
            (rank, other)
            for rank, other in there
            if other.step == save.step and (other.session != save.session or other.seq < save.seq)
        ]
