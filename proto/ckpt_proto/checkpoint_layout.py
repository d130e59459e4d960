"""Names on storage: step directories, data files, manifests, ``.metadata``.

    <directory>/step-300/__0_9f3ac1d2-3.distcp       rank 0's data file of attempt 9f3ac1d2-3
                         __0_9f3ac1d2-3.manifest     its shard manifest
                         .metadata                   the table of contents; its presence is the commit
                         .metadata.5be1c09a.tmp      a manifest or .metadata before it has its name
                .ckpt-sidecar-probe.5be1c09a         for a moment: whether the directory can be written

Data files carry the attempt in their name, so a second attempt at a step never touches the bytes of the first.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from ckpt_proto.identity import MAX_STEP

METADATA_NAME = ".metadata"
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")
_TEMPORARY = re.compile(r"(.+)\.[0-9a-f]{8}\.tmp")
_PROBE = re.compile(r"\.ckpt-sidecar-probe\.[0-9a-f]{8}")
_FILE = re.compile(r"__(0|[1-9][0-9]{0,6})_([0-9a-f]{8}-[0-9]{1,10})\.(distcp|manifest)")


def step_name(step: int) -> str:
    """Name of a step's directory."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """The step of a directory name, or None if it is not one of ours."""
    match = _STEP.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and step <= MAX_STEP else None


def checkpoint_id(directory: str, step: int) -> str:
    """Where a step lives; the ``checkpoint_id`` to give to ``torch.distributed.checkpoint.load``."""
    return str(PurePosixPath(directory) / step_name(step))


def data_file_name(rank: int, save_id: str) -> str:
    """Name of a rank's data file in one attempt."""
    return f"__{rank}_{save_id}.distcp"


def manifest_name(rank: int, save_id: str) -> str:
    """Name of the shard manifest beside a data file."""
    return f"__{rank}_{save_id}.manifest"


def attempt_of(name: str) -> tuple[int, str] | None:
    """``(rank, save_id)`` of a data file or manifest name, or None if it is not one of ours."""
    match = _FILE.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def temporary_name(name: str, token: str) -> str:
    """Name of the file in which ``name`` is written before it gets its own; ``token`` is eight hex digits."""
    return f"{name}.{token}.tmp"


def target_of(name: str) -> str | None:
    """The name that a temporary file of ours would have got, or None if it is no such file."""
    match = _TEMPORARY.fullmatch(name)
    if match is None or not (match[1] == METADATA_NAME or attempt_of(match[1])):
        return None
    return match[1]


def probe_name(token: str) -> str:
    """Name of the file by which it is tried whether a directory can be written; ``token`` is eight hex digits."""
    return f".ckpt-sidecar-probe.{token}"


def is_probe(name: str) -> bool:
    """Whether a file has such a name."""
    return _PROBE.fullmatch(name) is not None
