"""Runs what the tables ask for on named threads; every action that takes time ends in an event.

| thread        | does                                                   | ends        |
|---------------|--------------------------------------------------------|-------------|
| `ckpt-layout` | imports torch, prepares regions                        | close(), join |
| `ckpt-write`  | one shard each: CRCs, windows, manifest                | close(), join |
| `ckpt-io`     | single windows of a data file                          | close(), join |
| `ckpt-commit` | opens directories, publishes `.metadata`, removes files | close(), join |

Hand-over rule: a region is prepared only while its slot is free and written only while it is sealed, and the job table
never lets both be under way, so the region's mapping needs no lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_proto.identity import SaveKey
from ckpt_proto.region import region_path, seal_path
from ckpt_proto.region_journal import journal_path
from ckpt_sidecar.actions import (
    Action,
    BreakSeal,
    CancelShard,
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
    Event,
    RegionFailed,
    RegionPrepared,
    ShardBroken,
    ShardDurable,
    ShardStalled,
    ShardStarted,
)
from ckpt_sidecar.leftovers import break_seal
from ckpt_sidecar.passing_errors import may_pass
from ckpt_sidecar.progress import Progress
from ckpt_sidecar.storage_work import REAP_OLDER_THAN_S, StorageWork, logged
from ckpt_sidecar.throttle import Throttle
from ckpt_sidecar.write_cost import WriteCost

if TYPE_CHECKING:
    from ckpt_sidecar.torch_work import Region

logger = logging.getLogger(__name__)


class ActionRunner:
    """Owner of all worker threads. ``post`` is called from them with events and must be thread-safe.

    Args:
        runtime_dir: where the regions lie.
        writers: shards that are written at the same time.
        throttle: the bandwidth cap shared by them.
        cost: counts what they use.
        reap_older_than_s: files of attempts that can never be committed are removed if untouched for so long.
    """

    def __init__(
        self,
        runtime_dir: Path,
        writers: int,
        throttle: Throttle,
        post: Callable[[Event], None],
        *,
        reap_older_than_s: float = REAP_OLDER_THAN_S,
        cost: WriteCost | None = None,
    ) -> None:
        self._runtime_dir = runtime_dir
        self._throttle = throttle
        self._post = post
        self._writers = writers
        self._cost = cost or WriteCost()
        self._regions: dict[tuple[int, int], Region] = {}
        self.progress: dict[tuple[int, SaveKey], Progress] = {}
        self.torch_ready = False
        self._closing = threading.Event()
        self._storage = StorageWork(runtime_dir, post, self._closing, reap_older_than_s)

    def start(self) -> None:
        """Start the threads; torch is imported on ``ckpt-layout`` at once, so that the first save finds it warm."""
        self._layout = ThreadPoolExecutor(1, thread_name_prefix="ckpt-layout")
        self._write = ThreadPoolExecutor(self._writers, thread_name_prefix="ckpt-write")
        self._io = ThreadPoolExecutor(2 * self._writers, thread_name_prefix="ckpt-io")
        self._commit = ThreadPoolExecutor(1, thread_name_prefix="ckpt-commit")
        self._submit(self._layout, self._warm_up)

    def close(self) -> None:
        """Let every job that was begun end, drop those that were not, join the threads, let go of the regions."""
        self._closing.set()
        self._write.shutdown(wait=False, cancel_futures=True)  # what ends now must not let the next one begin
        for key in list(self.progress):
            self._cancel(*key)
        for executor in (self._layout, self._write, self._io, self._commit):
            executor.shutdown(wait=True, cancel_futures=True)
        for region in self._regions.values():
            region.mapping.close()
        self._regions.clear()

    def run(self, action: Action) -> None:
        """Begin an action; returns at once. Called from the daemon's main thread only."""
        match action:
            case PrepareRegion():
                self._submit(self._layout, self._prepare, action)
            case RemoveRegions():
                self._submit(self._layout, self._remove_regions, action)
            case WriteShard():
                self.progress[action.submit.rank, action.submit.save] = Progress(moved_s=time.monotonic())
                self._submit(self._write, self._write_shard, action)
            case CancelShard(rank=rank, save=save):
                self._cancel(rank, save)
            case BreakSeal(rank=rank, slot=slot):
                break_seal(self._runtime_dir, rank, slot)
            case (
                RemoveShardFiles()
                | FindShard()
                | FindCommit()
                | ListShards()
                | OpenDirectory()
                | Publish()
                | Withdraw()
            ):
                self._submit(self._commit, self._storage.run, action)
            case _:
                raise AssertionError(f"nobody runs {action}")

    def stalled(self, now_s: float, longer_than_s: float) -> list[Event]:
        """Writes that have made no progress for so long."""
        return [
            ShardStalled(rank, save, progress.written_bytes, progress.total_bytes, now_s - progress.moved_s)
            for (rank, save), progress in list(self.progress.items())
            if progress.total_bytes and now_s - progress.moved_s > longer_than_s
        ]

    def _submit(self, executor: ThreadPoolExecutor, work: Callable[..., None], *args: Any) -> None:
        executor.submit(work, *args).add_done_callback(_report_bug)

    def _warm_up(self) -> None:
        import ckpt_sidecar.torch_work  # noqa: F401

        self.torch_ready = True

    def _prepare(self, order: PrepareRegion) -> None:
        key = (order.rank, order.slot)
        try:
            from ckpt_sidecar.torch_work import prepare_region

            self._regions[key], ready = prepare_region(self._runtime_dir, order, self._regions.get(key))
        except Exception as error:  # noqa: BLE001 - every failure must become an event
            region = self._regions.pop(key, None)
            if region is not None:
                region.mapping.close()
            self._post(RegionFailed(order.rank, order.slot, order.plan_id, logged(error, f"region {key}")))
            return
        self._post(RegionPrepared(order.rank, ready))

    def _remove_regions(self, order: RemoveRegions) -> None:
        for slot in range(order.slots):
            region = self._regions.pop((order.rank, slot), None)
            if region is not None:
                region.mapping.close()
            path = region_path(self._runtime_dir, order.rank, slot)
            for file in (seal_path(path), journal_path(path), path):
                file.unlink(missing_ok=True)

    def _write_shard(self, action: WriteShard) -> None:
        rank, save = action.submit.rank, action.submit.save
        self._post(ShardStarted(rank, save))
        try:
            progress = self.progress[rank, save]
            progress.cancelled.wait(action.delay_s)
            progress.moved_s = time.monotonic()  # it may have waited long for a writer
            region = self._region_of(action)
            from ckpt_sidecar.torch_work import ShardWriter

            writer = ShardWriter(self._io, self._throttle, time.monotonic, self._cost)
            nbytes = writer.write(action, region.layout, region.mapping, progress)
        except Exception as error:  # noqa: BLE001 - every failure must become an event
            failure = logged(error, f"shard of rank {rank}, step {save.step}")
            self.progress.pop((rank, save), None)  # before it is told: the next try may begin at once, with its own
            self._post(ShardBroken(rank, save, failure, may_pass(error)))
            return
        self.progress.pop((rank, save), None)
        self._post(ShardDurable(rank, save, nbytes))

    def _region_of(self, action: WriteShard) -> Region:
        """The region to write; one that an earlier sidecar has prepared is attached first."""
        key = (action.submit.rank, action.submit.slot)
        region = self._regions.get(key)
        if region is None or region.plan_id != action.submit.plan_id:
            from ckpt_sidecar.torch_work import adopt_region

            region = self._regions[key] = adopt_region(self._runtime_dir, action, region)
        return region

    def _cancel(self, rank: int, save: SaveKey) -> None:
        progress = self.progress.get((rank, save))
        if progress is not None:
            progress.cancelled.set()


def _report_bug(future: Future[None]) -> None:
    """Every expected error has become an event; what arrives here is a bug and must not vanish in a future."""
    if not future.cancelled() and future.exception() is not None:
        logger.critical("a worker thread failed: this is a bug", exc_info=future.exception())
