"""What can happen in a sidecar and what can be asked of it: data only.

Events go into a table, actions come out; an action that takes time ends in an event again. ``JobTable`` (one node's
regions and shard jobs) and ``CheckpointTable`` (the coordinator's attempts) meet only through ``ToCoordinator`` and
``ToRank``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import Hello, Message, RegionReady, SubmitShard
from ckpt_proto.plan_items import Plan
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
    """Lay out, reserve and frame a region, and write its journal. Ends in RegionPrepared or RegionFailed.

    ``owner`` is the rank's Hello with its session, ``planned_by`` the save whose planning made the plan.
    """

    rank: int
    slot: int
    generation: int
    plan_id: str
    items: Plan
    byte_capacity: int
    owner: Hello
    planned_by: SaveKey
    other_namespace: bool = False


@dataclass(frozen=True)
class RemoveRegions(Action):
    """Give the shared memory of a rank back: no rank of that number is left in the job."""

    rank: int
    slots: int


@dataclass(frozen=True)
class WriteShard(Action):
    """Write a sealed region. Ends in ShardDurable or ShardBroken, after ShardStarted.

    A shard that is durable already is not written again. ``ready`` says how the region is laid out. The write begins
    after ``delay_s``: an earlier try has failed.
    """

    submit: SubmitShard
    items: Plan
    directory: str
    world_size: int
    torch_version: str
    ready: RegionReady
    delay_s: float = 0.0


@dataclass(frozen=True)
class FindShard(Action):
    """Look whether a submission is still sealed, or on storage. Ends in ShardSealed, ShardFound or ShardMissing."""

    submit: SubmitShard
    directory: str


@dataclass(frozen=True)
class FindCommit(Action):
    """Look whether an attempt that a rank has a durable shard of is published. Ends in CommitLookedFor."""

    rank: int
    save: SaveKey
    directory: str


@dataclass(frozen=True)
class ListShards(Action):
    """Look on storage which of these ranks' shards of an attempt are durable, and whether it is published. Ends in
    ShardsListed, or in nothing if the storage cannot be read."""

    save: SaveKey
    directory: str
    world_size: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class CancelShard(Action):
    """Stop writing a job soon; it still ends in ShardDurable or ShardBroken."""

    rank: int
    save: SaveKey


@dataclass(frozen=True)
class BreakSeal(Action):
    """The region of a slot holds nothing that is wanted any more. Done before the next action."""

    rank: int
    slot: int


@dataclass(frozen=True)
class RemoveShardFiles(Action):
    """Remove the data file and manifest of a rank in an attempt that will not be committed."""

    rank: int
    save: SaveKey
    directory: str


@dataclass(frozen=True)
class OpenDirectory(Action):
    """Make and check a checkpoint directory, finish what an earlier job left. Ends in DirectoryOpened or
    DirectoryRefused.

    Attempts of the sessions in ``spare`` are not touched: they are in flight. Nor are those whose save id is in it: the
    coordinator has them in hand.
    """

    directory: str
    spare: tuple[str, ...] = ()


@dataclass(frozen=True)
class Publish(Action):
    """Check that the attempt is complete and publish its ``.metadata``. Ends in Published or PublishFailed.

    ``entry_counts`` has the number of planned entries of each rank, or is empty if the plan was made before this
    coordinator lived. It begins after ``delay_s``: an earlier try has failed.
    """

    save: SaveKey
    directory: str
    world_size: int
    plan_id: str
    entry_counts: tuple[int, ...]
    overwrite: bool
    delay_s: float = 0.0


@dataclass(frozen=True)
class Withdraw(Action):
    """Remove rank 0's manifest of an attempt that is complete and given up. Ends in Withdrawn or WithdrawFailed. It
    begins after ``delay_s``: an earlier try has failed."""

    save: SaveKey
    directory: str
    delay_s: float = 0.0
