"""Reading a file that somebody else may have put there: no link is followed, no pipe waited for, no size trusted."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ckpt_proto.errors import StorageError


class UnfitFile(StorageError):
    """What lies there is no regular file, or is larger than anything that would be read."""


def read_regular_file(path: Path, limit_bytes: int) -> tuple[bytes, os.stat_result]:
    """The content of a regular file of at most ``limit_bytes``, and what the kernel says of it.

    Raises:
        FileNotFoundError: it does not exist.
        UnfitFile: it is no regular file (a symbolic link neither), or is larger; the text names it.
        StorageError: it cannot be read; the text names it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise UnfitFile(f"{path} is no regular file")
            if found.st_size > limit_bytes:
                raise UnfitFile(f"{path} has {found.st_size} bytes; at most {limit_bytes} are read")
            return _read(fd, found.st_size), found
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(errno.ENOENT, "what it would lie in is no directory", str(path)) from error
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise UnfitFile(f"{path} is a symbolic link") from error
        raise StorageError(f"{path} cannot be read: {error}") from error


def _read(fd: int, nbytes: int) -> bytes:
    pieces: list[bytes] = []
    while nbytes > 0 and (piece := os.read(fd, nbytes)):
        pieces.append(piece)
        nbytes -= len(piece)
    return b"".join(pieces)
