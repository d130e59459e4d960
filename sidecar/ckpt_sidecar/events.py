"""What can happen in a sidecar: data only.

Events go into a table, actions (``actions.py``) come out. ``JobTable`` (one node's regions and shard jobs) and
``CheckpointTable`` (the coordinator's attempts) meet only through ``ToCoordinator`` and ``ToRank``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import Message, RegionReady, SubmitShard
from ckpt_proto.region_journal import RegionJournal

UNKNOWN_PID = 0
"""What the kernel says of a peer in another pid namespace (a trainer in another container)."""


@dataclass(frozen=True)
class Event:
    """Base of everything that happens."""


@dataclass(frozen=True)
class FromRank(Event):
    """A message of a client on this node; ``peer`` is its ZeroMQ identity, ``pid`` what the kernel says it is."""

    peer: bytes
    pid: int
    message: Message


@dataclass(frozen=True)
class FromCoordinator(Event):
    """A message of the coordinator for a rank on this node."""

    rank: int
    message: Message


@dataclass(frozen=True)
class AtCoordinator(Event):
    """A message of a rank, or about a rank, at the coordinator."""

    rank: int
    message: Message


@dataclass(frozen=True)
class RankDied(Event):
    """The process of a rank on this node is gone without a Goodbye."""

    rank: int
    pid: int
    reason: str


@dataclass(frozen=True)
class FoundRegion:
    """A region that an earlier sidecar of this job has left: ``alive`` is whether the process of its rank lives,
    ``sealed`` what is whole in it."""

    journal: RegionJournal
    alive: bool
    sealed: SubmitShard | None


@dataclass(frozen=True)
class RegionsFound(Event):
    """Once, before anything else: what an earlier sidecar of this job has left."""

    regions: tuple[FoundRegion, ...]


@dataclass(frozen=True)
class RegionPrepared(Event):
    """A region is reserved, touched and framed."""

    rank: int
    ready: RegionReady


@dataclass(frozen=True)
class RegionFailed(Event):
    """A region could not be prepared."""

    rank: int
    slot: int
    plan_id: str
    failure: FailureReport


@dataclass(frozen=True)
class ShardStarted(Event):
    """A writer has taken the job."""

    rank: int
    save: SaveKey


@dataclass(frozen=True)
class ShardDurable(Event):
    """Data file and manifest of the job are durable."""

    rank: int
    save: SaveKey
    nbytes: int


@dataclass(frozen=True)
class ShardBroken(Event):
    """The try ended without a durable file: an error, or it was cancelled. ``may_pass``: another try could succeed."""

    rank: int
    save: SaveKey
    failure: FailureReport
    may_pass: bool = False


@dataclass(frozen=True)
class ShardStalled(Event):
    """The job has written ``written_bytes`` of ``total_bytes`` and nothing for ``idle_s`` seconds: the storage hangs.

    Its writer may be caught in the kernel for long; it still ends the job one day.
    """

    rank: int
    save: SaveKey
    written_bytes: int
    total_bytes: int
    idle_s: float


@dataclass(frozen=True)
class ShardSealed(Event):
    """What was looked for is sealed in its region: nobody has written it yet."""

    submit: SubmitShard


@dataclass(frozen=True)
class ShardFound(Event):
    """What was looked for is on storage, durable, with its manifest."""

    submit: SubmitShard
    directory: str
    nbytes: int


@dataclass(frozen=True)
class ShardMissing(Event):
    """What was looked for is neither sealed nor on storage."""

    submit: SubmitShard
    failure: FailureReport


@dataclass(frozen=True)
class CommitLookedFor(Event):
    """Whether an attempt is published; also not if the storage cannot be read."""

    rank: int
    save: SaveKey
    is_published: bool


@dataclass(frozen=True)
class ListedShard:
    """A durable shard of an attempt, as its manifest on storage says."""

    rank: int
    plan_id: str
    overwrite: bool


@dataclass(frozen=True)
class ShardsListed(Event):
    """The durable shards of an attempt among those looked for: storage is the ledger. ``published``: so is its
    ``.metadata``, the attempt is committed."""

    save: SaveKey
    shards: tuple[ListedShard, ...]
    published: bool = False


@dataclass(frozen=True)
class DirectoryOpened(Event):
    """The checkpoint directory exists and is writable; ``steps`` are the committed ones in it."""

    directory: str
    steps: tuple[int, ...]


@dataclass(frozen=True)
class DirectoryRefused(Event):
    """The checkpoint directory cannot be used."""

    directory: str
    failure: FailureReport


@dataclass(frozen=True)
class Published(Event):
    """``.metadata`` of the attempt is durable under its final name."""

    save: SaveKey


@dataclass(frozen=True)
class PublishFailed(Event):
    """The attempt could not be published; nothing became visible. ``may_pass``: another try could succeed."""

    save: SaveKey
    failure: FailureReport
    may_pass: bool = False


@dataclass(frozen=True)
class Withdrawn(Event):
    """An attempt lacks rank 0's manifest for good, so nobody will ever find it complete; or it is ``published``, and
    was left alone."""

    save: SaveKey
    published: bool = False


@dataclass(frozen=True)
class WithdrawFailed(Event):
    """Rank 0's manifest could not be removed. ``may_pass``: another try could succeed."""

    save: SaveKey
    failure: FailureReport
    may_pass: bool = False


@dataclass(frozen=True)
class CoordinatorUp(Event):
    """A coordinator on another node can be talked to and knows nothing of this node: say everything."""


@dataclass(frozen=True)
class CoordinatorRefuses(Event):
    """The sidecar at the coordinator's address is of another job, or does not let this one in."""

    failure: FailureReport


@dataclass(frozen=True)
class CoordinatorSilent(Event):
    """The coordinator of these sessions, on another node, was not heard of for ``silent_s``, longer than the bound.

    ``patience_s`` is how long it may be silent before ranks are told that the end of their saves is in doubt.
    """

    address: str
    sessions: frozenset[str]
    silent_s: float
    patience_s: float


@dataclass(frozen=True)
class NodeSilent(Event):
    """The sidecar of another node, where these ranks live, was not heard of for longer than the bound."""

    node: str
    ranks: tuple[int, ...]
    silent_s: float


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed; sent about once a second."""
