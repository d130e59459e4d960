"""The commit: shard manifests -> completeness check -> DCP ``Metadata`` -> ``.metadata`` published, last.

The metadata is built from the manifests alone, so that any process can finish a complete attempt on any later day.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ckpt_proto.attempt_files import durable_ranks
from ckpt_proto.checkpoint_layout import METADATA_NAME, attempt_of, checkpoint_id, manifest_name
from ckpt_proto.codec import MAX_MESSAGE_BYTES, decode
from ckpt_proto.errors import AlreadyCommitted, IncompleteCheckpoint, RemoteProtocolError, StorageError
from ckpt_proto.identity import SaveKey, save_key_of
from ckpt_proto.regular_file import read_regular_file
from ckpt_proto.shard_manifest import StoredManifest
from ckpt_sidecar.actions import Publish
from ckpt_sidecar.durable_fs import NotDurable, publish, remove_files, sync_dir
from ckpt_sidecar.metadata_file import read_metadata_file
from ckpt_sidecar.metadata_template import MetadataTemplates

logger = logging.getLogger(__name__)


def publish_checkpoint(
    order: Publish, *, remove_superseded: bool = True, templates: MetadataTemplates | None = None
) -> None:
    """Carry out a commit order. Publishing what is published already succeeds and changes nothing.

    ``remove_superseded``: with ``overwrite``, remove the files of every attempt before this one. Whoever finishes what
    another job left must not: it does not know whose those are. ``templates`` keeps what later saves of a plan have in
    common.

    Raises:
        IncompleteCheckpoint: a manifest or data file is missing, has a wrong size, belongs to another plan, or the
            entries do not add up to the whole state; nothing became visible.
        AlreadyCommitted: the step has been committed by another attempt and ``overwrite`` was not asked for, or by a
            later save of the same session.
    """
    directory = Path(checkpoint_id(order.directory, order.save.step))
    target = directory / METADATA_NAME
    if _is_published(target, order.save):
        _try_to_sync(directory)
        return
    _check_free(target, order)
    manifests = read_manifests(directory, order.save.save_id, order.world_size)
    check_complete(directory, manifests, order)
    content = (templates or MetadataTemplates()).pickled(manifests, str(directory))
    try:
        publish(
            target,
            content,
            overwrite=order.overwrite,
            last_look=partial(_look_once_more, directory, order),
        )
    except AlreadyCommitted:
        if not _is_published(target, order.save):
            raise
        _try_to_sync(directory)
    except NotDurable as error:
        # The new checkpoint is visible and whole, so the commit stands; the files of the old one stay for the crash
        # that would bring its .metadata back.
        logger.error("%s", error)
        return
    if order.overwrite and remove_superseded:
        _try_to_remove_superseded(directory, order.save)


def _is_published(target: Path, save: SaveKey) -> bool:
    """Whether the attempt's ``.metadata`` is there: who published it may have been killed before telling anybody."""
    return _save_id_in(target) == save.save_id


def _try_to_sync(directory: Path) -> None:
    # What is visible must never be reported as not published: the attempt's files would be removed.
    try:
        sync_dir(directory)
    except OSError as error:
        logger.error("%s has its %s, but cannot be made durable: %s", directory, METADATA_NAME, error)


def read_manifests(directory: Path, save_id: str, world_size: int) -> list[StoredManifest]:
    """The manifests of an attempt, in the order of ranks.

    Raises:
        IncompleteCheckpoint: one is missing or is not a manifest; the error names ranks.
        StorageError: one cannot be read.
    """
    manifests: list[StoredManifest] = []
    missing: list[int] = []
    for rank in range(world_size):
        path = directory / manifest_name(rank, save_id)
        try:
            frame, _ = read_regular_file(path, MAX_MESSAGE_BYTES)
        except FileNotFoundError:
            missing.append(rank)
            continue
        try:
            manifest = decode(frame)
        except RemoteProtocolError as error:
            raise IncompleteCheckpoint(f"{path} is no shard manifest: {error}") from error
        if not isinstance(manifest, StoredManifest):
            raise IncompleteCheckpoint(f"{path} is a {type(manifest).__name__}, no shard manifest")
        manifests.append(manifest)
    if missing:
        raise IncompleteCheckpoint(f"{directory}: attempt {save_id} has no shard manifest of ranks {missing[:20]}")
    return manifests


def _look_once_more(directory: Path, order: Publish) -> None:
    _check_still_there(directory, order)
    if order.overwrite:
        _check_free(directory / METADATA_NAME, order)


def _check_free(target: Path, order: Publish) -> None:
    """Whether the attempt may have the name: free, or to be overwritten, but never by an earlier save of one session,
    which a coordinator may take up when another process has committed the later one from the directory.

    Raises:
        AlreadyCommitted: it may not.
    """
    if not target.exists():
        return
    save, text = order.save, f"step {order.save.step} is committed already in {target.parent}"
    if not order.overwrite:
        raise AlreadyCommitted(text)
    by = save_key_of(_save_id_in(target), save.step)
    if by is not None and by.session == save.session and by.seq > save.seq:
        raise AlreadyCommitted(f"{text} by a later save, {by.save_id}")


def _save_id_in(target: Path) -> str:
    """The save id in a ``.metadata``; empty if there is none, or none that can be read."""
    try:
        return read_metadata_file(target).save_id
    except FileNotFoundError:
        return ""
    except StorageError as error:
        logger.warning("taken for somebody else's: %s", error)
        return ""


def _check_still_there(directory: Path, order: Publish) -> None:
    """Somebody who takes the attempt for given up removes manifests first, and looks for the commit before data files.

    Raises:
        IncompleteCheckpoint: a manifest has gone since it was read.
        StorageError: the directory cannot be read.
    """
    durable = durable_ranks(directory, order.save.save_id)
    gone = [rank for rank in range(order.world_size) if rank not in durable]
    if gone:
        text = f"{directory}: the shard manifests of ranks {gone[:20]} were removed while attempt "
        raise IncompleteCheckpoint(f"{text}{order.save.save_id} was published")


def check_complete(directory: Path, manifests: Sequence[StoredManifest], order: Publish) -> None:
    """Every rank has the manifest of this attempt, as many entries as planned, and a file of its recorded size.

    Raises:
        IncompleteCheckpoint: it is not so; the error names rank, file and numbers.
    """
    for rank, manifest in enumerate(manifests):
        said = (manifest.rank, manifest.save, manifest.world_size, manifest.plan_id)
        if said != (rank, order.save, order.world_size, order.plan_id):
            raise IncompleteCheckpoint(f"manifest of rank {rank} in {directory} belongs to another save: {said}")
        if order.entry_counts and manifest.entry_count != order.entry_counts[rank]:
            raise IncompleteCheckpoint(
                f"rank {rank} wrote {manifest.entry_count} entries, {order.entry_counts[rank]} were planned"
            )
        path = directory / manifest.file_name
        size = _size_of(path)
        if size != manifest.file_bytes:
            raise IncompleteCheckpoint(f"{path} has {size} bytes, its manifest says {manifest.file_bytes}")


def _size_of(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def _try_to_remove_superseded(directory: Path, save: SaveKey) -> None:
    # What cannot be removed is garbage that nothing refers to; the commit stands.
    try:
        _remove_superseded(directory, save)
    except OSError as error:
        logger.warning("files of older attempts are left in %s: %s", directory, error)


def _remove_superseded(directory: Path, save: SaveKey) -> None:
    """Remove the files of attempts before this one; a later attempt of the same session may be under way and stays."""
    superseded: list[Path] = []
    for path in directory.iterdir():
        attempt = attempt_of(path.name)
        if attempt is None:
            continue
        session, _, seq = attempt[1].partition("-")
        if session != save.session or int(seq) < save.seq:
            superseded.append(path)
    remove_files(superseded)
