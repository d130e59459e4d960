"""Opening a checkpoint directory: it is made, tried and looked through before the first save. Torch-free."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from ckpt_proto.checkpoint_layout import METADATA_NAME, probe_name, step_of
from ckpt_proto.errors import StorageError
from ckpt_sidecar.durable_fs import make_dirs


def open_directory(directory: str) -> tuple[int, ...]:
    """Make ``directory`` if it is missing, try to write into it, and return its committed steps in order.

    Raises:
        StorageError: it cannot be made or written, is no directory, is itself a checkpoint, or holds something
            called ``step-N`` that is no directory. Nothing in it was changed.
    """
    path = Path(directory)
    try:
        make_dirs(path)
        _try_writing(path)
        return committed_steps(path)
    except OSError as error:
        raise StorageError(f"checkpoint directory {directory} cannot be used: {error}") from error


def _try_writing(path: Path) -> None:
    probe = path / probe_name(secrets.token_hex(4))
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b"probe")
    finally:
        os.close(fd)
        with suppress(FileNotFoundError):  # a recovery that takes everything for old may have removed it
            os.unlink(probe)


def committed_steps(path: Path) -> tuple[int, ...]:
    """The committed steps in a checkpoint directory, in order.

    Raises:
        StorageError: it is itself a checkpoint, or holds something called ``step-N`` that is no directory.
        OSError: it cannot be read.
    """
    if (path / METADATA_NAME).exists():
        raise StorageError(
            f"{path} is itself a checkpoint (it holds {METADATA_NAME}): give CheckpointClient the directory above it"
        )
    steps: list[int] = []
    for entry in path.iterdir():
        step = step_of(entry.name)
        if step is None:
            continue
        if not entry.is_dir():
            raise StorageError(f"{entry} is no directory but has the name of a checkpoint: move it away")
        if (entry / METADATA_NAME).exists():
            steps.append(step)
    return tuple(sorted(steps))
