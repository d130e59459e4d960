"""What a node is called in messages, status and errors."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

VARIABLE = "CKPT_SIDECAR_NODE"
MAX_LENGTH = 255


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """``CKPT_SIDECAR_NODE`` if that is set (in a pod the host name says little), else the host name.

    Raises:
        ValueError: the variable has a line break or is longer than 255 characters.
    """
    name = environment.get(VARIABLE) or socket.gethostname()
    if len(name) > MAX_LENGTH or not name.isprintable():
        raise ValueError(f"{VARIABLE} is {name[:80]!r}: expected at most {MAX_LENGTH} printable characters")
    return name
