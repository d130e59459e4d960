"""What the files of an attempt say to whoever only looks: which ranks are durable, and whether it is committed.

Names only: a data file is durable before its manifest has its name, so no manifest is opened here. Torch-free, so that
a client can look without a sidecar.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ckpt_proto.checkpoint_layout import METADATA_NAME, attempt_of, manifest_name
from ckpt_proto.errors import StorageError
from ckpt_proto.regular_file import read_regular_file

MAX_METADATA_BYTES = 1 << 30
"""Largest ``.metadata`` that is read; 1,024 ranks x 2,000 items make about 300 MiB."""


def is_named_in_metadata(path: Path, save_id: str) -> bool:
    """Whether a step's ``.metadata`` has the name of an attempt anywhere in it. False if there is none.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        content, _ = read_regular_file(path / METADATA_NAME, MAX_METADATA_BYTES)
    except FileNotFoundError:
        return False
    return re.search(re.escape(save_id.encode()) + rb"(?![0-9])", content) is not None


def durable_ranks(path: Path, save_id: str) -> frozenset[int]:
    """The ranks whose shard manifest of an attempt lies in a step's directory.

    Raises:
        StorageError: the directory cannot be read.
    """
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    found = {attempt_of(name): name for name in names if name.endswith(".manifest")}
    return frozenset(of[0] for of, name in found.items() if of is not None and name == manifest_name(of[0], save_id))
