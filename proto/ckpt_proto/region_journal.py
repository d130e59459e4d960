"""The journal of a region: what a sidecar that starts later must know to write what is sealed, or to go on with it.

It lies beside the region and is written after the region is framed and before its rank is told, so a sealed region
always has one. It is one codec frame, so it is validated like a message.

    rank-0.slot-0.region      the bytes
                 .seal        there while the region is whole: the SubmitShard
                 .journal     whose it is, by which plan it is laid out
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_proto.codec import decode, encode
from ckpt_proto.errors import NotEnoughSharedMemory, RegionError, RemoteProtocolError
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import Hello, Message, RegionReady
from ckpt_proto.plan_items import Plan

MAX_JOURNAL_BYTES = 512 << 20


@dataclass(frozen=True)
class RegionJournal(Message):
    """What is known of one region.

    ``owner`` is the rank's Hello with its session filled in, ``planned_by`` the save whose planning made the plan,
    ``items`` the rank's part of it. ``other_namespace``: the kernel could not name the rank's process to the sidecar.
    """

    owner: Hello
    other_namespace: bool
    planned_by: SaveKey
    items: Plan
    ready: RegionReady


def journal_path(region: Path) -> Path:
    """Where the journal of a region lies."""
    return region.with_suffix(".journal")


def write_journal(region: Path, journal: RegionJournal) -> None:
    """Put the journal in place, whole or not at all.

    Raises:
        NotEnoughSharedMemory: there is no room for it.
        RegionError: it cannot be written for another reason.
    """
    path = journal_path(region)
    temporary = path.with_suffix(".journal.tmp")
    frame = encode(journal)
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            view = memoryview(frame)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        text = f"cannot write the journal {path} of {len(frame)} bytes: {error}"
        raise (NotEnoughSharedMemory if error.errno == errno.ENOSPC else RegionError)(text) from error


def remove_journal(region: Path) -> None:
    """From here on the region is nobody's: called before it is framed anew."""
    journal_path(region).unlink(missing_ok=True)


def read_journal(region: Path) -> RegionJournal | None:
    """The journal of a region, None if there is none.

    Raises:
        RegionError: there is one that cannot be read or is no journal.
    """
    path = journal_path(region)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RegionError(f"cannot open the journal {path}: {error}") from error
    with os.fdopen(fd, "rb") as file:
        try:
            journal = decode(file.read(MAX_JOURNAL_BYTES))
        except RemoteProtocolError as error:
            raise RegionError(f"{path} is no journal: {error}") from error
    if not isinstance(journal, RegionJournal):
        raise RegionError(f"{path} is a {type(journal).__name__}, no journal")
    return journal
