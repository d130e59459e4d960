"""What can be asked of a sidecar: data only. An action that takes time ends in an event (``events.py``)."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import Hello, Message, RegionReady, SubmitShard
from ckpt_proto.plan_items import Plan


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
