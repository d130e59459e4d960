"""Every message, frozen and validated: a message that exists is valid.

Each docstring says who sends it, when, and what answers. ``Rank`` means the client in a trainer process, ``sidecar``
the one of its node, ``coordinator`` the sidecar on rank 0's node (on one node they are the same process).
No message carries tensor data: bytes move through regions only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ckpt_proto.coordinator_address import check_coordinator_address
from ckpt_proto.errors import FailureReport, LocalProtocolError
from ckpt_proto.identity import MAX_RANKS, MAX_STEP, SaveKey, check_job_id, check_session
from ckpt_proto.plan_items import Plan
from ckpt_proto.status import SidecarStatus as _SidecarStatus

MAX_SLOTS = 8
MAX_PATH_BYTES = 4095
"""Longest path that Linux opens (PATH_MAX, less the terminating NUL)."""
MAX_NAME_CHARS = 255
"""Longest name of a node or a torch version."""


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise LocalProtocolError(text)


@dataclass(frozen=True)
class Message:
    """Base of all messages; ``TYPES`` is the closed list that the codec accepts."""

    TYPES: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls) -> None:
        Message.TYPES[cls.__name__] = cls


# ---------------------------------------------------------------- rank -> sidecar


@dataclass(frozen=True)
class Hello(Message):
    """Rank -> sidecar, first on every connection. Answer: Welcome, Refused, or nothing until the coordinator is up.

    ``process_start_s`` tells a reused pid from the process that said Hello (seconds since boot, from the kernel).
    ``session`` is empty at first and repeated when a client connects again. ``incarnation`` is torchelastic's restart
    count. ``next_seq`` is the number of the client's next save, ``in_flight`` the numbers of those whose end it does
    not know: what is neither has ended, whatever a restarted sidecar finds of it. ``coordinator`` is the ``host:port``
    of rank 0's node for the sidecars of the others; empty if all ranks are on one node. ``degrades``: without a sidecar
    the rank still has its shards written, and waits for the commit as long as for a late rank.
    """

    job_id: str
    rank: int
    world_size: int
    pid: int
    process_start_s: float
    node: str
    incarnation: int
    session: str
    torch_version: str
    directory: str
    slots: int
    stage_timeout_s: float
    next_seq: int = 0
    in_flight: tuple[int, ...] = ()
    coordinator: str = ""
    degrades: bool = False

    def __post_init__(self) -> None:
        check_job_id(self.job_id)
        _check(0 < self.world_size <= MAX_RANKS, f"world size {self.world_size} is outside 1 .. {MAX_RANKS}")
        _check(0 <= self.rank < self.world_size, f"rank {self.rank} is outside 0 .. {self.world_size - 1}")
        _check(self.pid > 0, f"pid {self.pid} is not a process")
        _check(self.incarnation >= 0, f"incarnation {self.incarnation} is negative")
        _check(1 <= self.slots <= MAX_SLOTS, f"{self.slots} slots per rank; 1 to {MAX_SLOTS} are possible")
        bounded = 0 < self.stage_timeout_s < math.inf
        _check(bounded, f"stage timeout {self.stage_timeout_s} s is not a positive number of seconds")
        # All of them come back in refusals, failures and every status.
        nbytes, nchars = len(self.directory.encode(errors="replace")), max(len(self.node), len(self.torch_version))
        _check(nbytes <= MAX_PATH_BYTES, f"checkpoint directory has {nbytes} bytes; {MAX_PATH_BYTES} are possible")
        _check(nchars <= MAX_NAME_CHARS, f"node or torch version has {nchars} characters, more than {MAX_NAME_CHARS}")
        _check(self.directory.startswith("/"), f"checkpoint directory {self.directory!r} is not an absolute path")
        _check("\0" not in self.directory, "checkpoint directory has a NUL character")
        try:
            check_coordinator_address(self.coordinator)
        except ValueError as error:
            raise LocalProtocolError(str(error)) from error
        if self.session:
            check_session(self.session)


@dataclass(frozen=True)
class Heartbeat(Message):
    """Rank -> sidecar, every second. Answer: Pong.

    ``step_s`` is how long training's steps took on average that have ended since the one before; 0 if none has, or if
    nobody tells the client of steps.
    """

    step_s: float = 0.0


@dataclass(frozen=True)
class Goodbye(Message):
    """Rank -> sidecar, last: this client closes in good order. Answer: Farewell."""


@dataclass(frozen=True)
class ProposePlan(Message):
    """Rank -> coordinator: the local plan of a state dict whose structure is not cached. Answer: FinalPlan or Aborted.

    ``byte_digests`` are 8-byte digests of this rank's BYTES items in order, to notice values that differ between ranks
    under one key. ``changed_keys`` names what differs from this rank's cached structure (at most 20).
    """

    save: SaveKey
    items: Plan
    byte_digests: tuple[bytes, ...]
    changed_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class GlobalPlan(Message):
    """Rank 0 -> coordinator, answer to MakeGlobalPlan: one final plan per rank, de-duplicated and balanced."""

    save: SaveKey
    plans: tuple[Plan, ...]


@dataclass(frozen=True)
class SubmitShard(Message):
    """Rank -> sidecar: the region in ``slot`` is sealed; from now on it belongs to the sidecar.

    The same bytes are the region's seal (its control page), so a sidecar that starts later knows as much.
    ``byte_lengths`` are the lengths in bytes of the entries behind the fixed part, in plan order.
    Answers: ShardPersisted, SlotFreed, and Committed or Aborted.
    """

    save: SaveKey
    rank: int
    plan_id: str
    slot: int
    generation: int
    byte_lengths: tuple[int, ...]
    overwrite: bool = False

    def __post_init__(self) -> None:
        _check(0 <= self.slot < MAX_SLOTS, f"slot {self.slot} is outside 0 .. {MAX_SLOTS - 1}")
        _check(all(length >= 0 for length in self.byte_lengths), "an entry has a negative length")


@dataclass(frozen=True)
class Resubmit(Message):
    """Rank -> sidecar, after it was welcomed again: this was handed over, and its end is not known here.

    The sidecar may have it, may have ended it, or may be a new one that never saw it: it looks for the seal, then for
    the shard manifest. Answers: as to the SubmitShard.
    """

    submit: SubmitShard


@dataclass(frozen=True)
class GrowRegion(Message):
    """Rank -> sidecar: the byte entries of this save need ``byte_capacity`` bytes. Answer: RegionReady,
    RegionRefused."""

    plan_id: str
    slot: int
    byte_capacity: int

    def __post_init__(self) -> None:
        _check(0 <= self.slot < MAX_SLOTS, f"slot {self.slot} is outside 0 .. {MAX_SLOTS - 1}")
        _check(0 <= self.byte_capacity < 2**50, f"byte capacity {self.byte_capacity} is out of bounds")


@dataclass(frozen=True)
class ReportSkip(Message):
    """Rank -> coordinator: this rank had no free slot and its policy is ``skip``. Every rank gets Aborted(skipped)."""

    save: SaveKey
    reason: str


@dataclass(frozen=True)
class ReportFailure(Message):
    """Rank -> coordinator: ``save()`` failed on this rank before its region was sealed. Every rank gets Aborted.

    ``replan``: it may not have the plan of the others, so all are to plan anew.
    """

    save: SaveKey
    failure: FailureReport
    replan: bool = False


@dataclass(frozen=True)
class DecideCommit(Message):
    """Rank 0 -> coordinator, answer to AskCommit: publish, or a veto with the reason."""

    save: SaveKey
    accept: bool
    reason: str = ""


@dataclass(frozen=True)
class AskRestoreStep(Message):
    """Rank -> coordinator: which step do all ranks restore? ``ask`` counts the rank's asks. Answer: RestoreStep.

    ``session`` is the rank's own, so that one that is late is not told about the directory of the next session.
    """

    ask: int
    session: str = ""


# ---------------------------------------------------------------- sidecar -> rank


@dataclass(frozen=True)
class Welcome(Message):
    """Sidecar -> rank, answer to Hello. ``committed_steps`` are the steps in the directory that can be restored.

    A second one tells that the sidecar, or the coordinator, was restarted or the connection renewed: the rank says
    again what has no answer yet. ``plan_id`` is the plan that the sidecar has for this rank, empty if it has none.
    ``pid`` is of the client that said Hello: the rank may have been restarted since, and the answer is not for the
    next one.
    """

    session: str
    sidecar_id: str
    node: str
    torch_version: str
    committed_steps: tuple[int, ...]
    plan_id: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Refused(Message):
    """Sidecar -> rank, answer to Hello: this client cannot be served; the client raises the failure.

    ``pid`` is of the client that said Hello, if the coordinator answers.
    """

    failure: FailureReport
    pid: int = 0


@dataclass(frozen=True)
class Pong(Message):
    """Sidecar -> rank, answer to Heartbeat. ``known`` is False if the sidecar wants a Hello (it was restarted)."""

    sidecar_id: str
    known: bool


@dataclass(frozen=True)
class Farewell(Message):
    """Sidecar -> rank, answer to Goodbye: everything this client sent before has been taken in."""


@dataclass(frozen=True)
class MakeGlobalPlan(Message):
    """Coordinator -> rank 0: every rank's local plan is here. Answer: GlobalPlan or ReportFailure."""

    save: SaveKey
    plans: tuple[Plan, ...]


@dataclass(frozen=True)
class FinalPlan(Message):
    """Coordinator -> each rank, through its sidecar, which lays the region out: what this rank writes.

    ``warnings`` are sentences for the log, such as keys whose values differ between ranks. A rank sends it back to a
    restarted sidecar that does not have it.
    """

    save: SaveKey
    plan_id: str
    items: Plan
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RegionReady(Message):
    """Sidecar -> rank: the region of ``slot`` is reserved, touched and framed for ``plan_id``; the rank may fill it.

    ``payload_offsets`` has one offset in bytes per framed item of the final plan, in plan order. The byte entries
    follow each other from ``byte_offset`` on, at most ``byte_capacity`` bytes together.
    """

    plan_id: str
    slot: int
    generation: int
    path: str
    region_bytes: int
    payload_offsets: tuple[int, ...]
    byte_offset: int
    byte_capacity: int


@dataclass(frozen=True)
class RegionRefused(Message):
    """Sidecar -> rank: the region of ``slot`` could not be made (no room in shared memory, for one)."""

    plan_id: str
    slot: int
    failure: FailureReport


@dataclass(frozen=True)
class SlotFreed(Message):
    """Sidecar -> rank: the sidecar has let go of the slot; the rank may fill it again.

    ``seq`` is the number of the save that held it: a slot that the rank has sealed for another one since stays sealed.
    """

    slot: int
    generation: int
    seq: int = -1


@dataclass(frozen=True)
class ShardPersisted(Message):
    """Sidecar -> its rank and -> coordinator: the rank's data file and shard manifest are durable."""

    save: SaveKey
    rank: int
    nbytes: int


@dataclass(frozen=True)
class AskCommit(Message):
    """Coordinator -> rank 0: all ranks have persisted; run the pre-commit hooks. Answer: DecideCommit."""

    save: SaveKey
    checkpoint_id: str


@dataclass(frozen=True)
class Committed(Message):
    """Coordinator -> every rank: ``.metadata`` is durable under its final name; the step can be restored."""

    save: SaveKey
    checkpoint_id: str


@dataclass(frozen=True)
class Aborted(Message):
    """Coordinator -> every rank: the attempt is given up. ``replan``: forget the cached plan, every rank plans anew.
    ``files_stay``: storage does not answer, and the attempt may still appear; then it is whole."""

    save: SaveKey
    failures: tuple[FailureReport, ...]
    skipped: bool = False
    replan: bool = False
    files_stay: bool = False


@dataclass(frozen=True)
class RestoreStep(Message):
    """Coordinator -> rank, answer to AskRestoreStep: the same step for every rank, or None if there is none."""

    ask: int
    step: int | None

    def __post_init__(self) -> None:
        _check(self.step is None or 0 <= self.step <= MAX_STEP, f"step {self.step} is out of bounds")


# ---------------------------------------------------------------- sidecar -> coordinator


@dataclass(frozen=True)
class ShardStaged(Message):
    """Sidecar -> coordinator: the rank's region is sealed, its write has been queued.

    ``world_size`` and ``directory`` are for a coordinator that was restarted since and does not know the session.
    """

    save: SaveKey
    rank: int
    plan_id: str
    overwrite: bool = False
    world_size: int = 0
    directory: str = ""


@dataclass(frozen=True)
class RankLeft(Message):
    """Sidecar -> coordinator: the rank's client is gone: it said Goodbye (``reason`` empty) or died.

    ``session`` is the one it was in, for a coordinator that was restarted since; empty if it had none yet.
    ``directory`` is given if the rank was dead when its sidecar started: what it had persisted may want a commit.
    """

    rank: int
    reason: str = ""
    session: str = ""
    directory: str = ""


# ---------------------------------------------------------------- health


@dataclass(frozen=True)
class AskStatus(Message):
    """Anyone of the same user -> sidecar. Answer: Status. Needs no Hello."""


@dataclass(frozen=True)
class Status(Message):
    """Sidecar -> asker: everything the health commands show."""

    status: _SidecarStatus
