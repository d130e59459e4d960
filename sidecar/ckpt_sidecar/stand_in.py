"""What is done in place of a sidecar that nobody can start: one thing, by a process that holds the job's lock.

A client whose policy is ``degraded`` starts it; it serves nobody and never runs beside a sidecar of the job. It leaves
what a sidecar would leave: a durable shard and then a broken seal, or ``.metadata``, so that one that is started later
goes on from there. The seal is broken under the lock, because the rank fills the region again: a sidecar that has found
it sealed would let go of it only later, under the rank's hands.
"""

from __future__ import annotations

import importlib.metadata
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckpt_proto.attempt_files import is_named_in_metadata
from ckpt_proto.checkpoint_layout import checkpoint_id, manifest_name
from ckpt_proto.errors import CheckpointError, FailureReport, IncompleteCheckpoint, report_of
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import SubmitShard
from ckpt_proto.region import region_path
from ckpt_sidecar.actions import Publish, WriteShard
from ckpt_sidecar.adoption import adopted_writes
from ckpt_sidecar.durable_fs import remove_files
from ckpt_sidecar.events import FoundRegion
from ckpt_sidecar.job_lock import JobLock, JobLockTaken
from ckpt_sidecar.ledger import durable_shard
from ckpt_sidecar.leftovers import break_seal, find_regions, read_seal
from ckpt_sidecar.progress import Progress
from ckpt_sidecar.throttle import Throttle

IO_THREADS = 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What became of one shard or attempt; ``nbytes`` is of the data file, ``failure`` why nothing came of it."""

    did: str
    rank: int
    save: SaveKey
    nbytes: int = 0
    failure: FailureReport | None = None


@dataclass(frozen=True)
class Client:
    """For whom a stand-in writes: a rank, and the numbers of its saves in ``session`` whose end it does not know.

    ``next_seq`` was the number of its next save when it asked: it has gone on saving since.
    """

    rank: int
    session: str
    next_seq: int
    pending: frozenset[int]

    def wants(self, submit: SubmitShard) -> bool:
        """Whether what is sealed for the rank is a save of this client that has not ended."""
        return submit.save.session == self.session and submit.save.seq in self.pending

    def knows_the_end(self, submit: SubmitShard) -> bool:
        """Whether what is sealed for the rank is a save of which this client, or an earlier one, was told the end."""
        return submit.save.session != self.session or (
            submit.save.seq < self.next_seq and submit.save.seq not in self.pending
        )


@contextmanager
def holding_the_lock(directory: Path, wait_s: float, *, needs_regions: bool = True) -> Iterator[None]:
    """The job's lock, for which other stand-ins are waited for at most ``wait_s`` seconds.

    Raises:
        JobLockTaken: a sidecar serves the job (again), another stand-in does not end, or, if regions are needed, a
            sidecar has ended in good order since and has removed the job's directory.
    """
    if needs_regions and not directory.is_dir():
        raise JobLockTaken(f"{directory} is gone: a sidecar has ended there in good order")
    lock = JobLock(directory, stand_in=True, patience_s=wait_s)
    try:
        yield
    finally:
        lock.release()


# ---------------------------------------------------------------- shards


def write_shards(directory: Path, client: Client, throttle: Throttle) -> list[Outcome]:
    """Write what is sealed and not durable yet: the client's saves, and those of ranks that have died.

    What another living rank has sealed is its own stand-in's work: only its client knows whether that save has ended.
    What this client has sealed for a save that has ended must not be committed by anybody: it is withdrawn.
    Called while the job's lock is held. Imports torch.
    """
    regions = find_regions(directory)
    outcomes = [_let_go(directory, region, client) for region in regions if _has_ended(region, client)]
    wanted = [region for region in regions if _is_wanted(region, client)]
    with ThreadPoolExecutor(IO_THREADS, thread_name_prefix="ckpt-io") as io:
        orders = adopted_writes(wanted, importlib.metadata.version("torch"))
        outcomes += [_write(directory, order, io, throttle) for order in orders]
    return outcomes


def _is_own(region: FoundRegion, client: Client) -> bool:
    """Whether the client itself has sealed it, perhaps in an earlier session; not an earlier process of its rank."""
    sealed = region.sealed
    return sealed is not None and sealed.rank == client.rank and (region.alive or sealed.save.session == client.session)


def _is_wanted(region: FoundRegion, client: Client) -> bool:
    if region.sealed is None:
        return False
    return client.wants(region.sealed) if _is_own(region, client) else not region.alive


def _has_ended(region: FoundRegion, client: Client) -> bool:
    return region.sealed is not None and _is_own(region, client) and client.knows_the_end(region.sealed)


def _let_go(directory: Path, region: FoundRegion, client: Client) -> Outcome:
    assert region.sealed is not None
    return withdraw_shard(directory, region.journal.owner.directory, client.rank, region.sealed.save)


def _write(directory: Path, order: WriteShard, io: ThreadPoolExecutor, throttle: Throttle) -> Outcome:
    from ckpt_sidecar.torch_work import ShardWriter, adopt_region

    submit = order.submit
    try:
        region = adopt_region(directory, order, None)
        try:
            writer = ShardWriter(io, throttle, time.monotonic)
            nbytes = writer.write(order, region.layout, region.mapping, Progress())
        finally:
            region.mapping.close()
        break_seal(directory, submit.rank, submit.slot)
    except (CheckpointError, OSError) as error:
        logger.warning("step %d of rank %d: %s", submit.save.step, submit.rank, error)
        return Outcome("write", submit.rank, submit.save, failure=report_of(error))
    logger.info("step %d of rank %d is durable: %d bytes", submit.save.step, submit.rank, nbytes)
    return Outcome("write", submit.rank, submit.save, nbytes)


def withdraw_shard(directory: Path, where: str, rank: int, save: SaveKey) -> Outcome:
    """Take a rank's part of an attempt back, so that nobody can commit it any more; unless it is committed.

    The seal goes in any case, since the region is not needed for what is committed, and before the manifest, or who
    is killed in between would leave a shard that the next sidecar writes again. The data file stays, for a commit
    that was under way; the next start in ``where`` removes it when it is old.
    Called while the job's lock is held.
    """
    step_directory = Path(checkpoint_id(where, save.step))
    try:
        is_committed = is_named_in_metadata(step_directory, save.save_id)
        for slot in _slots_of(directory, rank, save):
            break_seal(directory, rank, slot)
        if not is_committed:
            remove_files([step_directory / manifest_name(rank, save.save_id)])
    except (CheckpointError, OSError) as error:
        logger.warning("step %d of rank %d: %s", save.step, rank, error)
        return Outcome("withdraw", rank, save, failure=report_of(error))
    logger.info("step %d of rank %d is %s", save.step, rank, "committed" if is_committed else "withdrawn")
    return Outcome("withdraw", rank, save)


def _slots_of(directory: Path, rank: int, save: SaveKey) -> Iterable[int]:
    for path in sorted(directory.glob(f"rank-{rank}.slot-*.region")):
        sealed = read_seal(path)
        if sealed is not None and sealed.save == save and region_path(directory, rank, sealed.slot) == path:
            yield sealed.slot


# ---------------------------------------------------------------- commit


def publish_attempt(where: str, save: SaveKey, publish: Callable[[Publish], None] | None = None) -> Outcome:
    """Publish a complete attempt for rank 0; one that is published already is a success. Imports torch.

    Called while the job's lock is held. ``publish`` carries the order out; by default ``publish_checkpoint``.
    """
    try:
        first = durable_shard(where, 0, save)
        if first is None:
            raise IncompleteCheckpoint(f"rank 0 has no durable shard of attempt {save.save_id} in {where}")
        order = Publish(save, where, first.world_size, first.plan_id, (), first.overwrite)
        (publish or _publish)(order)
    except (CheckpointError, OSError) as error:
        logger.warning("step %d: %s", save.step, error)
        return Outcome("publish", 0, save, failure=report_of(error))
    logger.info("step %d is published", save.step)
    return Outcome("publish", 0, save)


def _publish(order: Publish) -> None:
    from ckpt_sidecar.torch_work import publish_checkpoint

    publish_checkpoint(order)
