"""What is to become of what dead jobs left in one step's directory: found files in, one plan out. Pure.

An attempt is *complete* when the manifests of all its ranks agree and every data file has the size that its manifest
says. It is *superseded* when it is complete and another attempt is the checkpoint, or will be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from types import MappingProxyType

from ckpt_proto.checkpoint_layout import attempt_of, data_file_name, target_of
from ckpt_proto.identity import SaveKey, save_key_of

SHOWN_RANKS = 20


@dataclass(frozen=True)
class FoundFile:
    """A file as it was seen. ``changed_s`` is the later of its times of change, ``modified_s`` that of its content,
    both in seconds since the epoch."""

    name: str
    nbytes: int
    changed_s: float
    modified_s: float


@dataclass(frozen=True)
class FoundManifest:
    """What a shard manifest says, without its entries. It is of the rank, attempt and data file that its name says."""

    rank: int
    world_size: int
    plan_id: str
    file_bytes: int
    overwrite: bool
    torch_version: str


@dataclass(frozen=True)
class FoundAttempt:
    """The data files and manifests of one attempt. ``damage`` says why it cannot be judged, if so."""

    save: SaveKey
    files: tuple[FoundFile, ...]
    manifests: tuple[FoundManifest, ...] = ()
    damage: str = ""

    @property
    def nbytes(self) -> int:
        """Size of all its files."""
        return sum(file.nbytes for file in self.files)

    @property
    def manifested_s(self) -> float:
        """When its newest manifest was written, in seconds since the epoch."""
        return max((file.modified_s for file in self.files if file.name.endswith(".manifest")), default=0.0)


@dataclass(frozen=True)
class FoundCommit:
    """The step's ``.metadata``: DCP's save id, the data files it refers to, when it was written."""

    save_id: str
    files: frozenset[str]
    modified_s: float


@dataclass(frozen=True)
class FoundStep:
    """One step's directory. ``temporaries`` are what killed writers left; what is not ours by name is not told, but
    ``is_empty`` counts it."""

    step: int
    changed_s: float
    is_empty: bool = False
    attempts: tuple[FoundAttempt, ...] = ()
    temporaries: tuple[FoundFile, ...] = ()
    commit: FoundCommit | None = None


@dataclass(frozen=True)
class Policy:
    """``spare``: sessions of living jobs, and save ids of attempts that a coordinator has in hand. What nothing has
    changed for ``reap_older_than_s`` seconds before ``now_s`` (since the epoch) is garbage, unless it can be finished.
    """

    reap_older_than_s: float
    now_s: float
    spare: frozenset[str] = frozenset()

    def spares(self, save: SaveKey) -> bool:
        """Whether somebody else has an attempt in hand."""
        return is_spared(save.save_id, self.spare)

    def age_s(self, files: Sequence[FoundFile]) -> float:
        """For how long none of them has changed."""
        return self.now_s - max(file.changed_s for file in files)

    def is_garbage(self, files: Sequence[FoundFile]) -> bool:
        """Whether none of them has changed for so long that nobody is still at it."""
        return self.age_s(files) >= self.reap_older_than_s


def is_spared(save_id: str, spare: frozenset[str]) -> bool:
    """Whether an attempt, or its whole session, is named in ``spare``."""
    return save_id in spare or save_id.partition("-")[0] in spare


class Fate(Enum):
    """What is to become of an attempt."""

    PUBLISH = "publish"
    REAP = "reap"
    LEAVE = "leave"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Decision:
    """The fate of an attempt and why. A problem is left for a person to look at."""

    attempt: FoundAttempt
    fate: Fate
    reason: str


@dataclass(frozen=True)
class StepPlan:
    """What to do, in this order: everything after ``publish`` supposes that it has succeeded.

    ``overwrite``: what is published replaces a ``.metadata`` that is there. ``remove_empty``: the step's directory has
    been empty for long.
    """

    publish: Decision | None = None
    overwrite: bool = False
    others: tuple[Decision, ...] = ()
    temporaries: tuple[FoundFile, ...] = ()
    remove_empty: bool = False


def plan_step(found: FoundStep, policy: Policy, refused: Mapping[str, str] = MappingProxyType({})) -> StepPlan:
    """What to do about a step. ``refused``: save ids that could not be published although their files are complete, and
    why."""
    standing = [attempt for attempt in found.attempts if _is_committed(attempt, found.commit)]
    judged = [attempt for attempt in found.attempts if attempt not in standing]
    free = [attempt for attempt in judged if not policy.spares(attempt.save)]
    sound = [attempt for attempt in free if not attempt.damage and attempt.save.save_id not in refused]
    able = [attempt for attempt in sound if not what_lacks(attempt) and _may_stand(attempt, found)]
    # A living job that is saving this step would find it committed by somebody else.
    winner = max(able, key=_newness_among(able), default=None) if len(free) == len(judged) else None
    return StepPlan(
        publish=Decision(winner, Fate.PUBLISH, _why_published(found.commit)) if winner else None,
        overwrite=found.commit is not None,
        others=tuple(
            _decide(attempt, found.commit, policy, refused, able, winner) for attempt in judged if attempt is not winner
        )
        + tuple(_if_garbage(each, _superseded(found.commit, winner), policy) for each in standing if winner),
        temporaries=tuple(file for file in found.temporaries if _is_stray(file, policy)),
        remove_empty=found.is_empty and policy.now_s - found.changed_s >= policy.reap_older_than_s,
    )


def _is_committed(attempt: FoundAttempt, commit: FoundCommit | None) -> bool:
    """Whether ``.metadata`` is of this attempt, or refers to one of its files for whatever reason."""
    if commit is None:
        return False
    return attempt.save.save_id == commit.save_id or any(file.name in commit.files for file in attempt.files)


def what_lacks(attempt: FoundAttempt) -> str:
    """What the files of an attempt lack to be a checkpoint, by their numbers and sizes; empty if they are complete."""
    if not attempt.manifests:
        return "no shard manifest"
    said = {(manifest.world_size, manifest.plan_id, manifest.overwrite) for manifest in attempt.manifests}
    if len(said) > 1:
        return f"its shard manifests disagree about world size, plan or overwrite: {sorted(said)[:3]}"
    world_size = attempt.manifests[0].world_size
    there = {manifest.rank for manifest in attempt.manifests}
    if len(there) < world_size:
        missing = list(islice((rank for rank in range(world_size) if rank not in there), SHOWN_RANKS))
        return f"no shard manifest of ranks {missing} of {world_size}"
    return _wrong_size(attempt)


def _wrong_size(attempt: FoundAttempt) -> str:
    sizes = {file.name: file.nbytes for file in attempt.files}
    for manifest in attempt.manifests:
        name = data_file_name(manifest.rank, attempt.save.save_id)
        if sizes.get(name) != manifest.file_bytes:
            return f"{name} has {sizes.get(name)} bytes, its manifest says {manifest.file_bytes}"
    return ""


def _may_stand(attempt: FoundAttempt, found: FoundStep) -> bool:
    """Whether a complete attempt may become the step's checkpoint, in place of the one that is committed if so."""
    commit = found.commit
    if commit is None:
        return True
    by = save_key_of(commit.save_id, found.step)
    if by is None or not all(manifest.overwrite for manifest in attempt.manifests):
        return False
    if by.session == attempt.save.session:
        return attempt.save.seq > by.seq
    committed = [each.manifested_s for each in found.attempts if _is_committed(each, commit)]
    return attempt.manifested_s > max([commit.modified_s, *committed])


def _newness_among(attempts: Sequence[FoundAttempt]) -> Callable[[FoundAttempt], tuple[float, str, int]]:
    """Clocks order sessions; within one, the order of the saves is known."""
    newest: dict[str, float] = {}
    for attempt in attempts:
        session = attempt.save.session
        newest[session] = max(newest.get(session, 0.0), attempt.manifested_s)
    return lambda attempt: (newest[attempt.save.session], attempt.save.session, attempt.save.seq)


def _why_published(commit: FoundCommit | None) -> str:
    return "complete" if commit is None else f"complete, published over attempt {commit.save_id} as ordered (overwrite)"


def _decide(
    attempt: FoundAttempt,
    commit: FoundCommit | None,
    policy: Policy,
    refused: Mapping[str, str],
    able: Sequence[FoundAttempt],
    winner: FoundAttempt | None,
) -> Decision:
    save_id = attempt.save.save_id
    if policy.spares(attempt.save):
        return Decision(attempt, Fate.LEAVE, "in flight: its job lives")
    if attempt.damage or save_id in refused:
        return Decision(attempt, Fate.PROBLEM, attempt.damage or refused[save_id])
    if winner is None and attempt in able:
        return Decision(attempt, Fate.LEAVE, "complete, but a living job is saving this step")
    lack = what_lacks(attempt)
    return _if_garbage(attempt, f"incomplete: {lack}" if lack else _superseded(commit, winner), policy)


def _if_garbage(attempt: FoundAttempt, reason: str, policy: Policy) -> Decision:
    if policy.is_garbage(attempt.files):
        return Decision(attempt, Fate.REAP, reason)
    return Decision(attempt, Fate.LEAVE, f"{reason}; last changed {max(0.0, policy.age_s(attempt.files)):.0f} s ago")


def _superseded(commit: FoundCommit | None, winner: FoundAttempt | None) -> str:
    if winner is not None:
        return f"superseded by attempt {winner.save.save_id}"
    if commit is None or save_key_of(commit.save_id, 0) is None:
        return "superseded: another program has saved this step"
    return f"superseded by attempt {commit.save_id}"


def _is_stray(temporary: FoundFile, policy: Policy) -> bool:
    owner = attempt_of(target_of(temporary.name) or "")
    spared = owner is not None and is_spared(owner[1], policy.spare)
    return not spared and policy.is_garbage([temporary])
