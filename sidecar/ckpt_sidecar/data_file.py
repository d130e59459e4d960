"""A data file while it is being written: preallocated, direct where the file system allows it, buffered elsewhere.

Direct I/O takes the pages of the region as they are: no copy into the page cache, a quarter of the CPU time, and the
trainer's own cached files stay cached. Where a file system refuses it (tmpfs before Linux 6.6, some network and
overlay mounts) the same windows are written through the cache and pushed out as they come, so that the final fsync
finds little left to do.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
from pathlib import Path

from ckpt_proto.errors import StorageError

ALIGNMENT_BYTES = 4096
_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None, use_errno=True)

logger = logging.getLogger(__name__)


class DataFile:
    """A new file of ``nbytes``. ``write_at`` may be called from several threads; everything else from one.

    Raises:
        StorageError: the file system has no room for ``nbytes`` (found before the first byte is written), or refuses
        the file.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._nbytes = nbytes
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd, self.is_direct = _open_direct(path, flags)
        except OSError as error:
            raise StorageError(f"cannot create {path}: {error}") from error
        try:
            self._preallocate()
        except BaseException:
            self.close()
            raise

    def _preallocate(self) -> None:
        if self._nbytes == 0:
            return
        try:
            os.posix_fallocate(self._fd, 0, self._nbytes)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                return
            stat = os.statvfs(self._path.parent)
            free = stat.f_bavail * stat.f_frsize
            raise StorageError(
                f"no room for {self._path}: {self._nbytes} bytes needed, {free} free ({error})"
            ) from error

    def write_at(self, view: memoryview, offset: int) -> None:
        """Write ``view`` at ``offset``. In direct mode both are multiples of 4096 and the memory is page-aligned."""
        position = 0
        fell_back = not self.is_direct
        while position < len(view):
            try:
                written = os.pwrite(self._fd, view[position:], offset + position)
            except OSError as error:
                if error.errno == errno.EINVAL and not fell_back:
                    fell_back = True
                    self._fall_back(error)
                    continue
                raise StorageError(f"writing {self._path} at {offset + position} failed: {error}") from error
            position += written
        if not self.is_direct:
            self._push_out(offset, len(view))

    def _fall_back(self, error: OSError) -> None:
        if self.is_direct:
            logger.warning("%s refuses direct I/O (%s): writing through the page cache", self._path.parent, error)
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.is_direct = False

    def _push_out(self, offset: int, nbytes: int) -> None:
        # Only starts the write-back of these pages; an error is not lost, fsync reports it.
        _libc.sync_file_range(
            self._fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE)
        )

    def finish(self) -> None:
        """Cut the file to its length and make it durable.

        Raises:
            StorageError: the file system reports an error, also one of an earlier write, or a wrong size.
        """
        try:
            os.ftruncate(self._fd, self._nbytes)
            os.fsync(self._fd)
            size = os.fstat(self._fd).st_size
        except OSError as error:
            raise StorageError(f"making {self._path} durable failed: {error}") from error
        if size != self._nbytes:
            raise StorageError(f"{self._path} has {size} bytes after fsync, expected {self._nbytes}")
        if not self.is_direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


def _open_direct(path: Path, flags: int) -> tuple[int, bool]:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o666), False
