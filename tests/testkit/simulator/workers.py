"""What the sidecar's workers do, one step at a time: a crash can come between any two of them.

Each function is the body of one order, as ``action_runner`` and what it calls have it; a ``yield`` is where others may
go on, or the process may end. Orders that post an event post it last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpt_proto.errors import (
    AlreadyCommitted,
    CheckpointError,
    FailureReport,
    IncompleteCheckpoint,
    NotEnoughSharedMemory,
    RegionError,
    StorageError,
    report_of,
)
from ckpt_proto.region_journal import RegionJournal
from ckpt_sidecar.actions import (
    FindCommit,
    FindShard,
    ListShards,
    OpenDirectory,
    PrepareRegion,
    Publish,
    RemoveRegions,
    RemoveShardFiles,
    Withdraw,
    WriteShard,
)
from ckpt_sidecar.events import (
    CommitLookedFor,
    DirectoryOpened,
    DirectoryRefused,
    ListedShard,
    Published,
    PublishFailed,
    RegionFailed,
    RegionPrepared,
    ShardBroken,
    ShardDurable,
    ShardFound,
    ShardMissing,
    ShardSealed,
    ShardsListed,
    ShardStarted,
    WithdrawFailed,
    Withdrawn,
)
from ckpt_sidecar.passing_errors import may_pass
from testkit.simulator import recovery
from testkit.simulator.shared_memory import Region
from testkit.simulator.storage import Manifest
from testkit.tables import ready_for

if TYPE_CHECKING:
    from testkit.simulator.node import SimNode

Work = Iterator[None]

SHARD_BYTES = 4096


class Cancelled(CheckpointError):
    """The write was stopped."""


def prepare(node: SimNode, order: PrepareRegion) -> Work:
    """``torch_work.prepare_region``."""
    place = (order.rank, order.slot)
    region = node.shm.regions.get(place)
    if region is not None:
        region.journal = None
        yield
        region.seal = None
        yield
    if node.shm.is_full:
        node.attached.pop(place, None)
        failure = report_of(NotEnoughSharedMemory("simulated"))
        node.post(RegionFailed(order.rank, order.slot, order.plan_id, failure))
        return
    if region is None:
        region = node.shm.regions.setdefault(place, Region())
        yield
    node.world.promises.region_is_framed(node, place, region)
    region.frame()
    yield
    ready = ready_for(order)
    region.journal = RegionJournal(order.owner, order.other_namespace, order.planned_by, order.items, ready)
    yield
    node.attached[place] = (region, order.plan_id)
    node.post(RegionPrepared(order.rank, ready))


def remove_regions(node: SimNode, order: RemoveRegions) -> Work:
    """``ActionRunner._remove_regions``."""
    for slot in range(order.slots):
        place = (order.rank, slot)
        node.attached.pop(place, None)
        region = node.shm.regions.get(place)
        if region is not None:
            region.seal = None
            yield
            region.journal = None
            yield
            node.shm.regions.pop(place, None)


def write(node: SimNode, order: WriteShard) -> Work:
    """``ActionRunner._write_shard`` and ``ShardWriter.write``."""
    submit = order.submit
    shard = (submit.rank, submit.save)
    node.post(ShardStarted(*shard))
    yield
    try:
        yield from _write(node, order, _region_of(node, order))
    except CheckpointError as error:
        node.cancelled.discard(shard)
        node.post(ShardBroken(*shard, report_of(error), may_pass(error)))
        return
    node.cancelled.discard(shard)
    node.post(ShardDurable(*shard, SHARD_BYTES))


def _region_of(node: SimNode, order: WriteShard) -> Region:
    place = (order.submit.rank, order.submit.slot)
    region, plan_id = node.attached.get(place, (None, ""))
    if region is None or plan_id != order.submit.plan_id:
        region = node.shm.regions.get(place)
        if region is None:
            raise RegionError(f"the region {place} is missing")
        node.attached[place] = (region, order.submit.plan_id)
    return region


def _write(node: SimNode, order: WriteShard, region: Region) -> Work:
    submit, storage = order.submit, node.world.storage
    shard = (submit.rank, submit.save)
    storage.touch(submit.save)
    if storage.durable(shard) is not None:
        return
    file = storage.create(shard)
    yield
    storage.touch(submit.save)
    file.first = region.first
    yield
    if shard in node.cancelled:
        raise Cancelled("simulated")
    storage.touch(submit.save)
    file.second = region.second
    yield
    storage.touch(submit.save)
    file.whole = True
    yield
    storage.touch(submit.save)
    manifest = Manifest(submit.rank, order.world_size, submit.plan_id, submit.overwrite, len(order.items))
    storage.describe(shard, manifest)
    yield


def remove(node: SimNode, order: RemoveShardFiles) -> Work:
    """``ActionRunner._remove``: what cannot be removed stays."""
    storage = node.world.storage
    for part in ("manifest", "data"):
        if storage.trouble in ("passes", "stays"):
            return
        if storage.metadata.get(order.save.step) == order.save:
            node.world.promises.removal_is_refused(order.save)
            return
        storage.remove((order.rank, order.save), part)
        yield


def open_directory(node: SimNode, order: OpenDirectory) -> Work:
    """``StorageWork._open``."""
    storage = node.world.storage
    yield
    if storage.trouble in ("passes", "stays"):
        node.post(DirectoryRefused(order.directory, FailureReport("StorageError", "simulated")))
        return
    yield from recovery.recover(node, frozenset(order.spare))
    node.post(DirectoryOpened(order.directory, storage.steps()))


def find(node: SimNode, order: FindShard) -> Work:
    """``ActionRunner._find``."""
    submit, storage = order.submit, node.world.storage
    if node.shm.seal_of(submit.rank, submit.slot) == submit:
        node.post(ShardSealed(submit))
        return
    yield
    try:
        storage.touch(submit.save)
    except StorageError as error:
        node.post(ShardMissing(submit, report_of(error)))
        return
    if storage.durable((submit.rank, submit.save)) is not None:
        node.post(ShardFound(submit, order.directory, SHARD_BYTES))
        return
    node.post(ShardMissing(submit, FailureReport("ShardLost", "neither sealed nor on storage")))


def find_commit(node: SimNode, order: FindCommit) -> Work:
    """``StorageWork._find_commit``."""
    storage = node.world.storage
    yield
    readable = storage.trouble not in ("passes", "stays")
    node.post(CommitLookedFor(order.rank, order.save, readable and storage.metadata.get(order.save.step) == order.save))


def list_shards(node: SimNode, order: ListShards) -> Work:
    """``ActionRunner._list``."""
    storage, found = node.world.storage, []
    yield
    if storage.trouble in ("passes", "stays"):
        return
    for rank in order.ranks:
        manifest = storage.durable((rank, order.save))
        if manifest is not None and manifest.world_size == order.world_size:
            found.append(ListedShard(rank, manifest.plan_id, manifest.overwrite))
        yield
    node.post(ShardsListed(order.save, tuple(found), storage.metadata.get(order.save.step) == order.save))


def publish(node: SimNode, order: Publish) -> Work:
    """``commit.publish_checkpoint``."""
    try:
        yield from publish_steps(node, order, remove_superseded=True)
    except CheckpointError as error:
        node.post(PublishFailed(order.save, report_of(error), may_pass(error)))
        return
    node.post(Published(order.save))


def publish_steps(node: SimNode, order: Publish, *, remove_superseded: bool) -> Work:
    """What publishing does, one step at a time; raises what the real one raises."""
    storage, save = node.world.storage, order.save
    storage.touch(save)
    there = storage.metadata.get(save.step)
    if there == save:
        return
    _check_free(node, order)
    for rank in range(order.world_size):
        manifest = storage.durable((rank, save))
        if manifest is None:
            raise IncompleteCheckpoint(f"no shard of rank {rank}")
        if (manifest.rank, manifest.world_size, manifest.plan_id) != (rank, order.world_size, order.plan_id):
            raise IncompleteCheckpoint(f"the shard of rank {rank} belongs to another save")
        if order.entry_counts and manifest.entries != order.entry_counts[rank]:
            raise IncompleteCheckpoint(f"the shard of rank {rank} has {manifest.entries} entries")
    yield
    storage.touch(save)
    _check_free(node, order)
    if any((rank, save) not in storage.manifests for rank in range(order.world_size)):
        raise IncompleteCheckpoint("a manifest was removed meanwhile")
    storage.publish(save)
    yield
    if order.overwrite and remove_superseded:
        for shard in storage.superseded_by(save):
            for part in ("manifest", "data"):
                storage.remove(shard, part)
            yield


def _check_free(node: SimNode, order: Publish) -> None:
    there, save = node.world.storage.metadata.get(order.save.step), order.save
    if there is None:
        return
    is_later = there.session == save.session and there.seq > save.seq
    if is_later or not order.overwrite:
        node.world.promises.spoil(save, "the step is committed already")
        raise AlreadyCommitted(f"step {save.step}")


def withdraw(node: SimNode, order: Withdraw) -> Work:
    """``StorageWork._withdraw``."""
    storage, save = node.world.storage, order.save
    yield
    try:
        storage.touch(save)
    except StorageError as error:
        node.post(WithdrawFailed(save, report_of(error), may_pass(error)))
        return
    is_published = storage.metadata.get(save.step) == save
    if not is_published:
        storage.remove((0, save), "manifest")
    yield
    node.post(Withdrawn(save, is_published))
