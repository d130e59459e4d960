"""A region: one file in shared memory that is the exact image of a data file, and the seal beside it.

Who does what: the sidecar creates, reserves and removes regions; a rank attaches to one and fills it; a region
belongs to its rank until the rank seals it, then to the sidecar until it says SlotFreed.

Plain named files, not ``multiprocessing.shared_memory``: its resource tracker unlinks a segment when an unrelated
process that only attached exits, and a region must outlive its trainer. They lie in a directory of mode 0700, have mode
0600, and are opened without following links.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import zlib
from pathlib import Path

from ckpt_proto.errors import NotEnoughSharedMemory, RegionError

PAGE_BYTES = 4096
_SEAL = struct.Struct("<8sII")
_SEAL_MAGIC = b"CKPTSEAL"
_NOTHING = b"\0" * _SEAL.size
_MAX_SEAL_BYTES = 64 << 20


def region_path(runtime_dir: Path, rank: int, slot: int) -> Path:
    """Where the region of a rank's slot lies."""
    return runtime_dir / f"rank-{rank}.slot-{slot}.region"


def seal_path(region: Path) -> Path:
    """Where the seal (control page) of a region lies."""
    return region.with_suffix(".seal")


def round_to_pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages, at least one."""
    return max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES


def free_bytes(directory: Path) -> int:
    """Bytes that the file system of ``directory`` can still take."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def reserve(path: Path, nbytes: int) -> None:
    """Make ``path`` a region of at least ``nbytes``, every page allocated. Sidecar only.

    An existing region is grown in place and keeps its pages: a page that was touched once is 8 to 16 times faster to
    fill than a new one. It is never shrunk.

    Raises:
        NotEnoughSharedMemory: the file system has too little room; checked before and, against races, by ``fallocate``,
            so that nobody meets SIGBUS later. The text names needed and free bytes.
        RegionError: the path is not a plain file of this user.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = _open_checked(path, flags)
    try:
        have = os.fstat(fd).st_size
        if have >= nbytes:
            return
        needed = round_to_pages(nbytes) - have
        if needed > free_bytes(path.parent):
            raise _no_room(path, needed)
        _fallocate(fd, path, have, needed)
    except BaseException:
        if os.fstat(fd).st_size == 0:
            os.unlink(path)
        raise
    finally:
        os.close(fd)
    _touch(path, have + needed)


def _fallocate(fd: int, path: Path, start: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, start, nbytes)
    except OSError as error:
        os.ftruncate(fd, start)
        if error.errno == errno.ENOSPC:
            raise _no_room(path, nbytes) from error
        raise RegionError(f"cannot reserve {nbytes} bytes for {path}: {error}") from error


def _touch(path: Path, nbytes: int) -> None:
    # fallocate has allocated the pages, but the kernel clears each one at its first fault: a populated mapping that is
    # dropped at once takes those faults here, in the sidecar, and not in the trainer.
    attach(path, nbytes).close()


def _no_room(path: Path, needed: int) -> NotEnoughSharedMemory:
    return NotEnoughSharedMemory(
        f"{path.parent} has {free_bytes(path.parent)} bytes free, the region {path.name} needs {needed} more: "
        "enlarge that file system (in a container: --shm-size, or an emptyDir with medium Memory), or use slots=1"
    )


def attach(path: Path, nbytes: int) -> mmap.mmap:
    """Map ``nbytes`` of a region for reading and writing, page tables filled in, not inherited by forked children.

    Raises:
        RegionError: the region is missing, smaller than ``nbytes``, or not a plain file of this user.
    """
    fd = _open_checked(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        have = os.fstat(fd).st_size
        if have < nbytes:
            raise RegionError(f"region {path} has {have} bytes, {nbytes} are needed")
        mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def _open_checked(path: Path, flags: int) -> int:
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise RegionError(f"cannot open region {path}: {error}") from error
    stat = os.fstat(fd)
    if stat.st_uid != os.geteuid() or (stat.st_mode & 0o170000) != 0o100000 or stat.st_mode & 0o077:
        os.close(fd)
        raise RegionError(
            f"{path} is not a private file of user {os.geteuid()}: owner {stat.st_uid}, mode {stat.st_mode:o}"
        )
    return fd


class Seal:
    """The control page of one region: a checksummed record that is there exactly while the region is whole.

    A rank breaks the seal before it touches the region and sets it after the last byte, so whoever finds the region
    later can tell a whole one from a torn one. ``record`` is the encoded SubmitShard.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = _open_checked(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC)

    def reserve(self, record_bytes: int) -> None:
        """Make sure that a record of this length fits, whatever happens to the rest of shared memory.

        Raises:
            NotEnoughSharedMemory: it does not.
        """
        nbytes = _SEAL.size + record_bytes
        if os.fstat(self._fd).st_size < nbytes:
            _fallocate(self._fd, self._path, 0, nbytes)

    def set(self, record: bytes) -> None:
        """Declare the region whole. The record is stored before the header that makes it count.

        Raises:
            NotEnoughSharedMemory: there is no room for the record; the region counts as torn.
        """
        self.reserve(len(record))
        os.pwrite(self._fd, record, _SEAL.size)
        os.pwrite(self._fd, _SEAL.pack(_SEAL_MAGIC, len(record), zlib.crc32(record)), 0)

    def clear(self) -> None:
        """Declare the region torn; called before its first byte changes."""
        os.pwrite(self._fd, _NOTHING, 0)

    def read(self) -> bytes | None:
        """The record of a whole region, or None if there is no valid seal."""
        header = os.pread(self._fd, _SEAL.size, 0)
        if len(header) != _SEAL.size:
            return None
        magic, length, crc = _SEAL.unpack(header)
        # A length is believed only as far as the file goes: reading allocates what it is told to read.
        if magic != _SEAL_MAGIC or length > min(_MAX_SEAL_BYTES, os.fstat(self._fd).st_size - _SEAL.size):
            return None
        record = os.pread(self._fd, length, _SEAL.size)
        return record if len(record) == length and zlib.crc32(record) == crc else None

    def close(self) -> None:
        """Close the descriptor; the file stays."""
        os.close(self._fd)
