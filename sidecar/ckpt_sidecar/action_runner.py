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
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_proto.checkpoint_layout import checkpoint_id, data_file_name, manifest_name
from ckpt_proto.errors import FailureReport, report_of
from ckpt_proto.identity import SaveKey
from ckpt_sidecar.checkpoint_dir import open_directory
from ckpt_sidecar.durable_fs import remove_files
from ckpt_sidecar.events import (
    Action,
    CancelShard,
    DirectoryOpened,
    DirectoryRefused,
    Event,
    OpenDirectory,
    PrepareRegion,
    Publish,
    Published,
    PublishFailed,
    RegionFailed,
    RegionPrepared,
    RemoveShardFiles,
    ShardBroken,
    ShardDurable,
    ShardStarted,
    WriteShard,
)
from ckpt_sidecar.progress import Progress
from ckpt_sidecar.throttle import Throttle

if TYPE_CHECKING:
    from ckpt_sidecar.torch_work import Region

logger = logging.getLogger(__name__)


class ActionRunner:
    """Owner of all worker threads. ``post`` is called from them with events and must be thread-safe.

    Args:
        runtime_dir: where the regions lie.
        writers: shards that are written at the same time.
        throttle: the bandwidth cap shared by them.
    """

    def __init__(self, runtime_dir: Path, writers: int, throttle: Throttle, post: Callable[[Event], None]) -> None:
        self._runtime_dir = runtime_dir
        self._throttle = throttle
        self._post = post
        self._writers = writers
        self._regions: dict[tuple[int, int], Region] = {}
        self.progress: dict[tuple[int, SaveKey], Progress] = {}
        self.torch_ready = False

    def start(self) -> None:
        """Start the threads; torch is imported on ``ckpt-layout`` at once, so that the first save finds it warm."""
        self._layout = ThreadPoolExecutor(1, thread_name_prefix="ckpt-layout")
        self._write = ThreadPoolExecutor(self._writers, thread_name_prefix="ckpt-write")
        self._io = ThreadPoolExecutor(2 * self._writers, thread_name_prefix="ckpt-io")
        self._commit = ThreadPoolExecutor(1, thread_name_prefix="ckpt-commit")
        self._submit(self._layout, self._warm_up)

    def close(self) -> None:
        """Let every job that was begun end, drop those that were not, join the threads, let go of the regions."""
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
            case WriteShard():
                self.progress[action.submit.rank, action.submit.save] = Progress(moved_s=time.monotonic())
                self._submit(self._write, self._write_shard, action)
            case CancelShard(rank=rank, save=save):
                self._cancel(rank, save)
            case RemoveShardFiles():
                self._submit(self._commit, self._remove, action)
            case OpenDirectory(directory=directory):
                self._submit(self._commit, self._open, directory)
            case Publish():
                self._submit(self._commit, self._publish, action)
            case _:
                raise AssertionError(f"nobody runs {action}")

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
            self._post(RegionFailed(order.rank, order.slot, order.plan_id, _logged(error, f"region {key}")))
            return
        self._post(RegionPrepared(order.rank, ready))

    def _write_shard(self, action: WriteShard) -> None:
        rank, save = action.submit.rank, action.submit.save
        self._post(ShardStarted(rank, save))
        try:
            progress = self.progress[rank, save]
            progress.moved_s = time.monotonic()  # it may have waited long for a writer
            region = self._regions[rank, action.submit.slot]
            from ckpt_sidecar.torch_work import ShardWriter

            writer = ShardWriter(self._io, self._throttle, time.monotonic)
            nbytes = writer.write(action, region.layout, region.mapping, progress)
        except Exception as error:  # noqa: BLE001 - every failure must become an event
            failure = _logged(error, f"shard of rank {rank}, step {save.step}")
            self._post(ShardBroken(rank, save, failure))
            return
        finally:
            self.progress.pop((rank, save), None)
        self._post(ShardDurable(rank, save, nbytes))

    def _cancel(self, rank: int, save: SaveKey) -> None:
        progress = self.progress.get((rank, save))
        if progress is not None:
            progress.cancelled.set()

    def _remove(self, order: RemoveShardFiles) -> None:
        directory = Path(checkpoint_id(order.directory, order.save.step))
        names = (manifest_name(order.rank, order.save.save_id), data_file_name(order.rank, order.save.save_id))
        try:
            remove_files([directory / name for name in names])
            if directory.is_dir() and not any(directory.iterdir()):
                directory.rmdir()
        except OSError as error:
            _logged(error, f"removing what is left of step {order.save.step}")

    def _open(self, directory: str) -> None:
        try:
            steps = open_directory(directory)
        except Exception as error:  # noqa: BLE001 - every failure must become an event
            self._post(DirectoryRefused(directory, _logged(error, directory)))
            return
        self._post(DirectoryOpened(directory, steps))

    def _publish(self, order: Publish) -> None:
        try:
            from ckpt_sidecar.torch_work import publish_checkpoint

            publish_checkpoint(order)
        except Exception as error:  # noqa: BLE001 - every failure must become an event
            self._post(PublishFailed(order.save, _logged(error, f"publishing step {order.save.step}")))
            return
        self._post(Published(order.save))


def _logged(error: Exception, what: str) -> FailureReport:
    logger.warning("%s: %s: %s", what, type(error).__name__, error, exc_info=logger.isEnabledFor(logging.DEBUG))
    return report_of(error)


def _report_bug(future: Future[None]) -> None:
    """Every expected error has become an event; what arrives here is a bug and must not vanish in a future."""
    if not future.cancelled() and future.exception() is not None:
        logger.critical("a worker thread failed: this is a bug", exc_info=future.exception())
