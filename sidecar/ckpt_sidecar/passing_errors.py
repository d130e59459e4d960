"""Which errors of a storage may pass by themselves, so that another try is worth it. Pure."""

from __future__ import annotations

import errno
from typing import Final

PASSING: Final = frozenset(
    {
        errno.EIO,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EREMOTEIO,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
    }
)
"""A full disk is among them: retention or another job may make room. Rights, names and read-only mounts are not."""


def may_pass(error: BaseException) -> bool:
    """Whether an error, or one that caused it, is of a kind that may pass."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in PASSING:
            return True
        cause = cause.__cause__
    return False
