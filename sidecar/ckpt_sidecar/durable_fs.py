"""The only ways this project makes something durable on a file system.

What is relied on: ``fsync`` of a file makes its bytes and size durable, ``fsync`` of a directory makes its entries
durable, ``rename`` and ``link`` within a directory are atomic. POSIX does not promise that a file that was fsynced
can be found after a crash unless its directory was fsynced too, so both are done, in that order. A disk that lies
about its cache is beyond us.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ckpt_proto.checkpoint_layout import temporary_name
from ckpt_proto.errors import AlreadyCommitted, StorageError

logger = logging.getLogger(__name__)


def make_dirs(path: Path) -> None:
    """Make ``path`` and missing parents, each durable in its parent."""
    if path.is_dir():
        return
    make_dirs(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
    sync_dir(path.parent)


def sync_dir(path: Path) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file that is durable under its name when this returns; a crash leaves no partial file there.

    An existing file is replaced. The temporary file lies beside it with a ``.tmp`` suffix and is removed on error.

    Raises:
        StorageError: it could not be written or made durable; the text names it.
    """
    temporary = _write_temporary(path, content)
    try:
        os.replace(temporary, path)
        sync_dir(path.parent)
    except OSError as error:
        _try_to_unlink(temporary)
        raise StorageError(f"{path} cannot be made durable: {error}") from error


class NotDurable(StorageError):
    """The new content is visible under its name, but a crash may still bring the old one back."""


def publish(path: Path, content: bytes, *, overwrite: bool, last_look: Callable[[], None] = lambda: None) -> None:
    """Like :func:`write_file`, but the name appears only if it was free, unless ``overwrite``.

    ``last_look`` is called when there is nothing left to do but to give the name; it raises if that must not be.

    Raises:
        AlreadyCommitted: somebody else has published ``path``; their file is untouched.
        NotDurable: with ``overwrite``: the old content has been replaced, the directory could not be made durable.
        StorageError: it could not be written or made durable; nothing is visible that was not before.
    """
    temporary = _write_temporary(path, content)
    try:
        last_look()
        if overwrite:
            os.replace(temporary, path)
        else:
            _link(temporary, path)
    except FileExistsError as error:
        text = f"{path} exists already: pass overwrite=True to save() to replace the checkpoint"
        raise AlreadyCommitted(text) from error
    except OSError as error:
        raise StorageError(f"{path} cannot be given its name: {error}") from error
    finally:
        _try_to_unlink(temporary)
    try:
        sync_dir(path.parent)
    except OSError as error:
        if overwrite:
            raise NotDurable(f"{path} was replaced, but its directory cannot be made durable: {error}") from error
        _try_to_unlink(path)
        raise StorageError(f"{path} cannot be made durable: {error}") from error


def _link(temporary: Path, path: Path) -> None:
    """Give a file its final name if that is free: atomic where the file system has hard links.

    Some have none (FUSE, CIFS, exFAT): there, between looking and renaming, another job could publish the same name.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        if path.exists():
            raise FileExistsError(path) from error
        os.replace(temporary, path)


def _try_to_unlink(path: Path) -> None:
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)
    except OSError as error:
        logger.warning("cannot remove %s: %s", path, error)


def _write_temporary(path: Path, content: bytes) -> Path:
    # A name that nobody else has: whoever was killed while publishing may have left its temporary as a second name of
    # the published file, which must not be written to, and in containers the next process has the same pid.
    temporary = path.with_name(temporary_name(path.name, secrets.token_hex(4)))
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        _try_to_unlink(temporary)
        raise StorageError(f"writing {len(content)} bytes to {path} failed: {error}") from error
    return temporary


def remove_files(paths: list[Path]) -> None:
    """Remove files that may be missing; the removal is durable when this returns."""
    for path in paths:
        with suppress(FileNotFoundError):
            os.unlink(path)
    for parent in {path.parent for path in paths}:
        if parent.is_dir():
            sync_dir(parent)
