"""Looking through one step's directory: what lies there by name, size and time, and what the manifests say.

Nothing is changed, no link is followed, and nothing that is read is believed before it has been checked. Torch-free.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ckpt_proto.attempt_files import MAX_METADATA_BYTES
from ckpt_proto.checkpoint_layout import METADATA_NAME, attempt_of, data_file_name, manifest_name, target_of
from ckpt_proto.codec import MAX_MESSAGE_BYTES, decode
from ckpt_proto.errors import RemoteProtocolError, StorageError
from ckpt_proto.identity import SaveKey, save_key_of
from ckpt_proto.regular_file import read_regular_file
from ckpt_proto.shard_manifest import StoredManifest
from ckpt_sidecar.metadata_file import parse_metadata
from ckpt_sidecar.recovery_plan import FoundAttempt, FoundCommit, FoundFile, FoundManifest, FoundStep, is_spared


def survey_step(path: Path, step: int, spare: frozenset[str] = frozenset()) -> FoundStep:
    """What lies in the directory of ``step``. Manifests of ``spare`` sessions and attempts are not read.

    Raises:
        OSError: the directory cannot be read.
        StorageError: its ``.metadata`` cannot be read or is not what DCP writes: nobody can say what it refers to.
    """
    changed_s = _changed_s(os.lstat(path))
    names = os.listdir(path)
    members = _members(names, step)
    commit = None
    if METADATA_NAME in names and (members := _if_not_all_named(path, members)):
        commit = _read_commit(path)
    attempts = [_survey_attempt(path, save, ranks, spare, commit) for save, ranks in sorted(members.items(), key=str)]
    return FoundStep(
        step=step,
        changed_s=changed_s,
        is_empty=not names,
        attempts=tuple(attempt for attempt in attempts if attempt.files or attempt.damage),
        temporaries=found_files(path, [name for name in names if target_of(name) is not None]),
        commit=commit,
    )


def attempt_files(path: Path, save: SaveKey) -> tuple[FoundFile, ...]:
    """The data files and manifests of an attempt, as they are now."""
    names = (name for name in os.listdir(path) if (of := attempt_of(name)) is not None and of[1] == save.save_id)
    return found_files(path, names)


def found_files(path: Path, names: Iterable[str]) -> tuple[FoundFile, ...]:
    """Those of ``names`` that are regular files, in order of their names."""
    found = []
    for name in sorted(names):
        try:
            stats = os.lstat(path / name)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(stats.st_mode):
            found.append(FoundFile(name, stats.st_size, _changed_s(stats), stats.st_mtime))
    return tuple(found)


def _changed_s(stats: os.stat_result) -> float:
    # A copy that keeps the times of the content is as new as the copying.
    return max(stats.st_mtime, stats.st_ctime)


def _members(names: Iterable[str], step: int) -> dict[SaveKey, list[tuple[str, int]]]:
    """The files of each attempt by name, with the rank that is in it."""
    members: dict[SaveKey, list[tuple[str, int]]] = {}
    for name in names:
        of = attempt_of(name)
        save = save_key_of(of[1], step) if of else None
        if of is not None and save is not None:
            members.setdefault(save, []).append((name, of[0]))
    return members


def _if_not_all_named(
    path: Path, members: dict[SaveKey, list[tuple[str, int]]]
) -> dict[SaveKey, list[tuple[str, int]]]:
    """``members``, or nothing if ``.metadata`` refers to a data file of every one.

    That is the usual committed step, of which nothing more has to be read: no manifest, no size, no pickle.
    """
    try:
        content, _ = read_regular_file(path / METADATA_NAME, MAX_METADATA_BYTES)
    except FileNotFoundError:
        return members
    return {} if all(f"_{save.save_id}.distcp".encode() in content for save in members) else members


def _read_commit(path: Path) -> FoundCommit | None:
    try:
        content, stats = read_regular_file(path / METADATA_NAME, MAX_METADATA_BYTES)
    except FileNotFoundError:
        return None
    said = parse_metadata(content, str(path / METADATA_NAME))
    return FoundCommit(said.save_id, said.files, stats.st_mtime)


def _survey_attempt(
    path: Path, save: SaveKey, members: list[tuple[str, int]], spare: frozenset[str], commit: FoundCommit | None
) -> FoundAttempt:
    attempt = FoundAttempt(save, found_files(path, (name for name, _ in members)))
    if is_spared(save.save_id, spare) or (commit is not None and commit.save_id == save.save_id):
        return attempt
    try:
        manifests = [
            _read_manifest(path / name, rank, save)
            for name, rank in sorted(members)
            if name == manifest_name(rank, save.save_id)
        ]
        _check_regular(path, [name for name, _ in members])
    except FileNotFoundError:
        return attempt  # somebody is removing it, so it is not complete
    except StorageError as error:
        return replace(attempt, damage=str(error))
    return replace(attempt, manifests=tuple(manifests))


def _check_regular(path: Path, names: Iterable[str]) -> None:
    for name in names:
        if not stat.S_ISREG(os.lstat(path / name).st_mode):
            raise StorageError(f"{path / name} is no regular file")


def _read_manifest(path: Path, rank: int, save: SaveKey) -> FoundManifest:
    frame, _ = read_regular_file(path, MAX_MESSAGE_BYTES)
    try:
        manifest = decode(frame)
    except RemoteProtocolError as error:
        raise StorageError(f"{path} is no shard manifest that can be read here: {error}") from error
    if not isinstance(manifest, StoredManifest):
        raise StorageError(f"{path} is a {type(manifest).__name__}, no shard manifest")
    said = (manifest.rank, manifest.save, manifest.file_name)
    if said != (rank, save, data_file_name(rank, save.save_id)):
        raise StorageError(
            f"{path} is the manifest of rank {manifest.rank}, step {manifest.save.step}, attempt "
            f"{manifest.save.save_id}, file {manifest.file_name[:80]!r}: not of the file that it lies beside"
        )
    return FoundManifest(
        rank,
        manifest.world_size,
        manifest.plan_id,
        manifest.file_bytes,
        manifest.overwrite,
        manifest.torch_version,
    )
