"""Names of things: job, save attempt, node. All are validated, because they become paths and log lines."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from ckpt_proto.errors import LocalProtocolError

MAX_STEP = 2**63 - 1
PREPARE_STEP = MAX_STEP
"""The step of an attempt that only makes plan and regions ready and is given up then; no checkpoint has it."""

MAX_RANKS = 1 << 20
_JOB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_SESSION = re.compile(r"[0-9a-f]{8}")


def check_job_id(job_id: str) -> str:
    """Return ``job_id`` if it may name a directory.

    Raises:
        LocalProtocolError: it is empty, longer than 64 characters or has a character outside ``[A-Za-z0-9._-]``.
    """
    if not _JOB_ID.fullmatch(job_id):
        raise LocalProtocolError(
            f"job id {job_id[:80]!r} is not 1 to 64 characters of A-Z a-z 0-9 . _ - that begin with none of . and -"
        )
    return job_id


def job_id_from(text: str) -> str:
    """A valid job id made from any text: kept if it is one, else cleaned and told apart by a hash."""
    if _JOB_ID.fullmatch(text):
        return text
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-")[-48:].strip(".-") or "job"
    return f"{cleaned}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def step_text(step: int) -> str:
    """What a text calls the saving of a step."""
    return "the preparation" if step == PREPARE_STEP else f"step {step}"


def check_session(session: str) -> str:
    """Return ``session`` if it is eight hexadecimal digits, else raise :class:`LocalProtocolError`."""
    if not _SESSION.fullmatch(session):
        raise LocalProtocolError(f"session {session[:40]!r} is not eight hexadecimal digits")
    return session


@dataclass(frozen=True)
class SaveKey:
    """Which attempt to save which step.

    Attributes:
        session: eight hex digits drawn by the coordinator for one set of living ranks; a restart gets a new one, so a
            late message of an earlier life matches nothing.
        seq: how many times this rank had called ``save()`` before in its life. Every rank counts every call,
            also failed ones, so the ranks agree on it without talking.
        step: the training step of the checkpoint.
    """

    session: str
    seq: int
    step: int

    def __post_init__(self) -> None:
        check_session(self.session)
        if not 0 <= self.seq < 2**31:
            raise LocalProtocolError(f"save number {self.seq} is outside 0 .. 2^31-1")
        if not 0 <= self.step <= MAX_STEP:
            raise LocalProtocolError(f"step {self.step} is outside 0 .. 2^63-1")

    @property
    def is_preparation(self) -> bool:
        """Whether nothing is saved by this attempt."""
        return self.step == PREPARE_STEP

    @property
    def save_id(self) -> str:
        """The attempt's name in file names and messages, such as ``9f3ac1d2-3``."""
        return f"{self.session}-{self.seq}"


def save_key_of(save_id: str, step: int) -> SaveKey | None:
    """The attempt called ``save_id`` at ``step``, or None if no attempt has that name."""
    session, _, seq = save_id.partition("-")
    try:
        key = SaveKey(session, int(seq), step)
    except (LocalProtocolError, ValueError):
        return None
    return key if key.save_id == save_id else None
