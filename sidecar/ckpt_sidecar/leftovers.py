"""What lies in the job's directory in shared memory when nobody tells: seals of ranks that died, regions of a sidecar
that did. Called on the daemon's main thread; torch-free."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from ckpt_proto.codec import decode
from ckpt_proto.errors import RegionError, RemoteProtocolError
from ckpt_proto.messages import SubmitShard
from ckpt_proto.process import process_start_s
from ckpt_proto.region import Seal, region_path, seal_path
from ckpt_proto.region_journal import RegionJournal, journal_path, read_journal
from ckpt_sidecar.events import FoundRegion

logger = logging.getLogger(__name__)


def read_seal(region: Path) -> SubmitShard | None:
    """What is whole in a region; None if nothing is, or the seal cannot be read, which is logged."""
    path = seal_path(region)
    if not path.exists():
        return None
    try:
        seal = Seal(path)
        try:
            content = seal.read()
        finally:
            seal.close()
        message = decode(content) if content is not None else None
    except (RegionError, RemoteProtocolError) as error:
        logger.warning("the seal %s cannot be read: %s", path, error)
        return None
    return message if isinstance(message, SubmitShard) else None


def break_seal(directory: Path, rank: int, slot: int) -> None:
    """The region holds nothing that is wanted: a sidecar that starts later must not take it for a staged shard."""
    path = seal_path(region_path(directory, rank, slot))
    if path.exists():
        seal = Seal(path)
        try:
            seal.clear()
        finally:
            seal.close()


def find_regions(directory: Path, start_s: Callable[[int], float | None] = process_start_s) -> tuple[FoundRegion, ...]:
    """The regions that an earlier sidecar has left. What cannot be used by anybody is removed.

    Only the owner of the job's lock may call this.
    """
    found = []
    for path in sorted(directory.glob("*.region")):
        journal = _journal_of(path)
        if journal is None:
            path.unlink()
            seal_path(path).unlink(missing_ok=True)
            journal_path(path).unlink(missing_ok=True)
            continue
        owner = journal.owner
        lives = journal.other_namespace or start_s(owner.pid) == owner.process_start_s
        found.append(FoundRegion(journal, lives, read_seal(path)))
    for stray in _strays(directory):
        stray.unlink()
    return tuple(found)


def _journal_of(region: Path) -> RegionJournal | None:
    try:
        journal = read_journal(region)
    except RegionError as error:
        logger.warning("region %s is of no use: %s", region, error)
        return None
    if journal is None:
        return None
    ready = journal.ready
    here = region_path(region.parent, journal.owner.rank, ready.slot)
    if here != region or ready.region_bytes > region.lstat().st_size:
        logger.warning("region %s is of no use: its journal is of %s, %d bytes", region, here, ready.region_bytes)
        return None
    return journal


def _strays(directory: Path) -> Iterator[Path]:
    """Files of a life that ended in the middle of something."""
    yield from directory.glob("*.tmp")
    for suffix in ("seal", "journal"):
        for path in directory.glob(f"*.{suffix}"):
            if not path.with_suffix(".region").exists():
                yield path
