"""``recover_directory`` in the simulation: the real plan for what lies on its storage, carried out in steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpt_proto.checkpoint_layout import data_file_name, manifest_name
from ckpt_proto.errors import AlreadyCommitted, CheckpointError, IncompleteCheckpoint
from ckpt_proto.identity import SaveKey
from ckpt_sidecar.actions import Publish
from ckpt_sidecar.recovery_plan import (
    Decision,
    Fate,
    FoundAttempt,
    FoundCommit,
    FoundFile,
    FoundManifest,
    FoundStep,
    Policy,
    plan_step,
)
from ckpt_sidecar.storage_work import REAP_OLDER_THAN_S
from testkit.simulator import workers
from testkit.simulator.storage import Shard, Storage
from testkit.tables import DIRECTORY, TORCH

if TYPE_CHECKING:
    from testkit.simulator.node import SimNode

Work = Iterator[None]


def recover(node: SimNode, spare: frozenset[str]) -> Work:
    """``recovery.recover_directory``: one step after the other; trouble with one does not stop the others."""
    storage = node.world.storage
    policy = Policy(REAP_OLDER_THAN_S, node.world.now_s, spare)
    for step in sorted({save.step for _, save in [*storage.files, *storage.manifests]}):
        found = survey(storage, step)
        yield
        try:
            yield from _recover_step(node, found, policy)
        except CheckpointError:
            yield


def _recover_step(node: SimNode, found: FoundStep, policy: Policy) -> Work:
    refused: dict[str, str] = {}
    while True:
        plan = plan_step(found, policy, refused)
        if plan.publish is None:
            break
        attempt = plan.publish.attempt
        first = attempt.manifests[0]
        order = Publish(attempt.save, DIRECTORY, first.world_size, first.plan_id, (), plan.overwrite)
        try:
            yield from workers.publish_steps(node, order, remove_superseded=False)
            break
        except AlreadyCommitted:
            return
        except IncompleteCheckpoint as error:
            refused[attempt.save.save_id] = str(error)
    for decision in plan.others:
        if decision.fate is Fate.REAP:
            yield from _reap(node, decision)


def _reap(node: SimNode, decision: Decision) -> Work:
    storage, save = node.world.storage, decision.attempt.save
    if _files_of(storage, save) != decision.attempt.files or storage.metadata.get(save.step) == save:
        return
    for part in ("manifest", "data"):
        for shard in [shard for shard in [*storage.manifests, *storage.files] if shard[1] == save]:
            storage.remove(shard, part)
            yield


def survey(storage: Storage, step: int) -> FoundStep:
    """``step_survey.survey_step``."""
    saves = sorted({save for _, save in [*storage.files, *storage.manifests] if save.step == step}, key=str)
    attempts = tuple(FoundAttempt(save, _files_of(storage, save), _manifests_of(storage, save)) for save in saves)
    by, commit = storage.metadata.get(step), None
    if by is not None:
        names = frozenset(file.name for file in _files_of(storage, by) if file.name.endswith(".distcp"))
        commit = FoundCommit(by.save_id, names, storage.published_s[by])
    return FoundStep(step, 0.0, attempts=attempts, commit=commit)


def _files_of(storage: Storage, save: SaveKey) -> tuple[FoundFile, ...]:
    names: dict[Shard, list[tuple[str, int]]] = defaultdict(list)
    for shard, file in storage.files.items():
        names[shard].append((data_file_name(shard[0], shard[1].save_id), workers.SHARD_BYTES if file.whole else 1))
    for shard in storage.manifests:
        names[shard].append((manifest_name(shard[0], shard[1].save_id), 1))
    return tuple(
        FoundFile(name, nbytes, storage.changed_s[shard], storage.changed_s[shard])
        for shard in sorted(names, key=str)
        if shard[1] == save
        for name, nbytes in names[shard]
    )


def _manifests_of(storage: Storage, save: SaveKey) -> tuple[FoundManifest, ...]:
    return tuple(
        FoundManifest(said.rank, said.world_size, said.plan_id, workers.SHARD_BYTES, said.overwrite, TORCH)
        for (_, of), said in storage.manifests.items()
        if of == save
    )
