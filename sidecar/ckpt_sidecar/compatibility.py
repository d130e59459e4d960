"""Which torch may write for which: the ``.metadata`` of a newer torch may be unreadable by an older one."""

from __future__ import annotations

import re


def torch_mismatch(sidecar: str, trainer: str) -> str | None:
    """Why a sidecar with torch ``sidecar`` must not write for a trainer with torch ``trainer``, or None if it may.

    ``.metadata`` is a pickle of DCP's classes. torch 2.15 added a field to ``TensorProperties`` that older releases
    cannot unpickle; newer torch reads what older wrote. Hence: the writer's minor release must not be newer.
    """
    writer, reader = _minor(sidecar), _minor(trainer)
    if writer is None or reader is None:
        return f"cannot compare torch versions: sidecar {sidecar!r}, trainer {trainer!r}"
    if writer > reader:
        return (
            f"the sidecar has torch {sidecar}, the trainer {trainer}: a checkpoint written by the newer torch may be "
            "unreadable for the older one; run the sidecar with the trainer's Python environment"
        )
    return None


def _minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None
