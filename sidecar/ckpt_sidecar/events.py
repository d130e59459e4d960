"""What can happen in a sidecar and what can be asked of it: data only.

Events go into a table, actions come out; an action that takes time ends in an event again. ``JobTable`` (one node's
regions and shard jobs) and ``CheckpointTable`` (the coordinator's attempts) meet only through ``ToCoordinator`` and
``ToRank``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import Message, RegionReady, SubmitShard
from ckpt_proto.plan_items import Plan

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
    """The job ended without a durable file: an error, or it was cancelled."""

    rank: int
    save: SaveKey
    failure: FailureReport


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
    """The attempt could not be published; nothing became visible."""

    save: SaveKey
    failure: FailureReport


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed; sent about once a second."""


@dataclass(frozen=True)
class Action:
    """Base of everything that can be asked."""


@dataclass(frozen=True)
class Send(Action):
    """Send to a client of this node."""

    peer: bytes
    message: Message


@dataclass(frozen=True)
class ToCoordinator(Action):
    """Hand a rank's message to the coordinator."""

    rank: int
    message: Message


@dataclass(frozen=True)
class ToRank(Action):
    """Coordinator: hand a message to a rank, through the sidecar of its node."""

    rank: int
    message: Message


@dataclass(frozen=True)
class PrepareRegion(Action):
    """Lay out, reserve and frame a region. Ends in RegionPrepared or RegionFailed."""

    rank: int
    slot: int
    generation: int
    plan_id: str
    items: Plan
    byte_capacity: int


@dataclass(frozen=True)
class WriteShard(Action):
    """Write a sealed region. Ends in ShardDurable or ShardBroken, after ShardStarted."""

    submit: SubmitShard
    items: Plan
    directory: str
    world_size: int
    torch_version: str


@dataclass(frozen=True)
class CancelShard(Action):
    """Stop writing a job soon; it still ends in ShardDurable or ShardBroken."""

    rank: int
    save: SaveKey


@dataclass(frozen=True)
class RemoveShardFiles(Action):
    """Remove the data file and manifest of a rank in an attempt that will not be committed."""

    rank: int
    save: SaveKey
    directory: str


@dataclass(frozen=True)
class OpenDirectory(Action):
    """Make and check a checkpoint directory. Ends in DirectoryOpened or DirectoryRefused."""

    directory: str


@dataclass(frozen=True)
class Publish(Action):
    """Check that the attempt is complete and publish its ``.metadata``. Ends in Published or PublishFailed.

    ``entry_counts`` has the number of planned entries of each rank, or is empty if the plan was made before this
    coordinator lived.
    """

    save: SaveKey
    directory: str
    world_size: int
    plan_id: str
    entry_counts: tuple[int, ...]
    overwrite: bool
