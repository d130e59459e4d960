"""The sidecar's work on storage besides writing shards: open directories, look for what is durable, publish, remove.

It is done on the thread ``ckpt-commit``; what was asked for ends in an event. Torch is imported only to publish.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_proto.attempt_files import is_named_in_metadata
from ckpt_proto.checkpoint_layout import checkpoint_id, data_file_name, manifest_name
from ckpt_proto.errors import FailureReport, StorageError, report_of
from ckpt_proto.region import region_path
from ckpt_proto.shard_manifest import StoredManifest
from ckpt_sidecar.actions import FindCommit, FindShard, ListShards, OpenDirectory, Publish, RemoveShardFiles, Withdraw
from ckpt_sidecar.checkpoint_dir import committed_steps, open_directory
from ckpt_sidecar.durable_fs import remove_files
from ckpt_sidecar.events import (
    CommitLookedFor,
    DirectoryOpened,
    DirectoryRefused,
    Event,
    Published,
    PublishFailed,
    ShardFound,
    ShardMissing,
    ShardSealed,
    ShardsListed,
    WithdrawFailed,
    Withdrawn,
)
from ckpt_sidecar.ledger import durable_shard, is_published, list_shards
from ckpt_sidecar.leftovers import read_seal
from ckpt_sidecar.orphans import await_finishing_jobs
from ckpt_sidecar.passing_errors import may_pass
from ckpt_sidecar.recovery import recover_directory

if TYPE_CHECKING:
    from ckpt_sidecar.metadata_template import MetadataTemplates

REAP_OLDER_THAN_S = 3600.0
"""Longer than any rank or node may be silent in the middle of writing."""

LOOKS = 10
LOOK_AGAIN_S = 1.0
"""How often, and how far apart, a shard is looked for on a storage that fails."""

logger = logging.getLogger(__name__)

StorageOrder = RemoveShardFiles | FindShard | FindCommit | ListShards | OpenDirectory | Publish | Withdraw


class StorageWork:
    """``post`` gets the events; ``closing`` ends waits; files of attempts that can never be committed are removed if
    untouched for ``reap_older_than_s``."""

    def __init__(
        self, runtime_dir: Path, post: Callable[[Event], None], closing: threading.Event, reap_older_than_s: float
    ) -> None:
        self._runtime_dir = runtime_dir
        self._shm_root = runtime_dir.parent.parent
        self._post = post
        self._closing = closing
        self._reap_older_than_s = reap_older_than_s
        self._templates: MetadataTemplates | None = None

    def run(self, order: StorageOrder) -> None:
        """Carry an order out."""
        match order:
            case RemoveShardFiles():
                self._remove(order)
            case FindShard():
                self._find(order)
            case FindCommit():
                self._find_commit(order)
            case ListShards():
                self._list(order)
            case OpenDirectory():
                self._open(order)
            case Publish():
                self._publish(order)
            case Withdraw():
                self._withdraw(order)

    def _find(self, order: FindShard) -> None:
        submit = order.submit
        if read_seal(region_path(self._runtime_dir, submit.rank, submit.slot)) == submit:
            self._post(ShardSealed(submit))
            return
        try:
            manifest = self._patiently(lambda: durable_shard(order.directory, submit.rank, submit.save))
        except StorageError as error:
            self._post(ShardMissing(submit, logged(error, f"looking for step {submit.save.step}")))
            return
        if manifest is not None:
            self._post(ShardFound(submit, order.directory, manifest.file_bytes))
            return
        text = f"step {submit.save.step} of rank {submit.rank} is neither in shared memory nor in {order.directory}"
        hint = "did something remove the files below the shared-memory root?"
        self._post(ShardMissing(submit, FailureReport("ShardLost", text, hint)))

    def _patiently(self, look: Callable[[], StoredManifest | None]) -> StoredManifest | None:
        """Look again while the storage fails by an error that may pass: not to see a shard would cost a whole save."""
        for _ in range(LOOKS - 1):
            try:
                return look()
            except StorageError as error:
                if not may_pass(error) or self._closing.wait(LOOK_AGAIN_S):
                    raise
        return look()

    def _find_commit(self, order: FindCommit) -> None:
        try:
            published = is_published(order.directory, order.save)
        except StorageError as error:
            logged(error, f"looking whether step {order.save.step} is committed")
            published = False
        self._post(CommitLookedFor(order.rank, order.save, published))

    def _list(self, order: ListShards) -> None:
        try:
            found = list_shards(order)
            published = is_published(order.directory, order.save)
        except StorageError as error:
            # Not the same as nothing found, by which ranks that are gone would be taken to have left nothing.
            logged(error, f"looking for shards of step {order.save.step}")
            return
        self._post(ShardsListed(order.save, found, published))

    def _remove(self, order: RemoveShardFiles) -> None:
        directory = Path(checkpoint_id(order.directory, order.save.step))
        save_id = order.save.save_id
        try:
            for name in (manifest_name(order.rank, save_id), data_file_name(order.rank, save_id)):
                # Looked at anew: who publishes looks for the manifests last, so one of the two sees the other.
                if is_named_in_metadata(directory, save_id):
                    logger.error("step %d is committed by attempt %s: its files stay", order.save.step, save_id)
                    return
                remove_files([directory / name])
            if directory.is_dir() and not any(directory.iterdir()):
                directory.rmdir()
        except (OSError, StorageError) as error:
            logged(error, f"removing what is left of step {order.save.step}")

    def _open(self, order: OpenDirectory) -> None:
        directory = order.directory
        try:
            open_directory(directory)
            await_finishing_jobs(self._shm_root, self._runtime_dir, directory, self._closing.wait)
            self._recover(order)
            steps = committed_steps(Path(directory))
        except Exception as error:  # noqa: BLE001 - every failure must become an event
            self._post(DirectoryRefused(directory, logged(error, directory)))
            return
        self._post(DirectoryOpened(directory, steps))

    def _recover(self, order: OpenDirectory) -> None:
        """Finish what dead jobs left in the directory; nothing of it can stop a job from starting."""
        report = recover_directory(
            order.directory,
            spare=frozenset(order.spare),
            reap_older_than_s=self._reap_older_than_s,
            now_s=time.time(),
        )
        for problem in report.problems:
            logger.warning("step %s in %s: %s", problem.step, order.directory, problem.reason)

    def _publish(self, order: Publish) -> None:
        self._closing.wait(order.delay_s)
        try:
            from ckpt_sidecar.torch_work import MetadataTemplates, publish_checkpoint

            if self._templates is None:
                self._templates = MetadataTemplates()
            publish_checkpoint(order, templates=self._templates)
        except Exception as error:  # noqa: BLE001 - every failure must become an event
            failure = logged(error, f"publishing step {order.save.step}")
            self._post(PublishFailed(order.save, failure, may_pass(error)))
            return
        self._post(Published(order.save))

    def _withdraw(self, order: Withdraw) -> None:
        """Make a complete attempt incomplete. Its other files are removed by the nodes that wrote them."""
        self._closing.wait(order.delay_s)
        save, directory = order.save, Path(checkpoint_id(order.directory, order.save.step))
        try:
            is_published = is_named_in_metadata(directory, save.save_id)
            if not is_published:
                remove_files([directory / manifest_name(0, save.save_id)])
        except (OSError, StorageError) as error:
            failure = logged(error, f"withdrawing step {save.step}")
            self._post(WithdrawFailed(save, failure, may_pass(error)))
            return
        self._post(Withdrawn(save, is_published))


def logged(error: Exception, what: str) -> FailureReport:
    """The report of an error that is logged and becomes an event."""
    logger.warning("%s: %s: %s", what, type(error).__name__, error, exc_info=logger.isEnabledFor(logging.DEBUG))
    return report_of(error)
