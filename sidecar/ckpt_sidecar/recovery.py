"""Finishing what dead jobs left on storage: complete attempts are committed, what can never be one is removed.

Everything that this needs lies in the directory: who finds a complete attempt can commit it on any later day. Killed at
any moment, the next run finishes: publishing is one atomic act that may be repeated, and an attempt loses its manifests
durably before it loses its first data file, so that what is partly removed is never taken for complete. Torch is
imported only if there is something to publish.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_proto.attempt_files import is_named_in_metadata
from ckpt_proto.checkpoint_layout import METADATA_NAME, attempt_of, is_probe, step_of
from ckpt_proto.errors import AlreadyCommitted, IncompleteCheckpoint, StorageError
from ckpt_sidecar.actions import Publish
from ckpt_sidecar.compatibility import torch_mismatch
from ckpt_sidecar.durable_fs import remove_files, sync_dir
from ckpt_sidecar.recovery_plan import Decision, Fate, FoundAttempt, FoundFile, FoundStep, Policy, StepPlan, plan_step
from ckpt_sidecar.step_survey import attempt_files, found_files, survey_step

logger = logging.getLogger(__name__)

PublishCheckpoint = Callable[[Publish], None]


@dataclass(frozen=True)
class Finding:
    """One thing that was left behind, and what became of it. ``step`` is None where it is of no step, ``save_id`` empty
    where it is of no attempt; ``nbytes`` is the size of its files in bytes."""

    step: int | None
    save_id: str
    nbytes: int
    reason: str


@dataclass(frozen=True)
class RecoveryReport:
    """What became of everything that dead jobs left in ``directory``. Steps that are in order are not in it.

    Attributes:
        committed: attempts whose ``.metadata`` is published now.
        reaped: attempts, temporary files and empty directories that were removed.
        left: what may still be somebody's work, or must not be touched.
        problems: what a person should look at; nothing of it was changed.
    """

    directory: str
    committed: tuple[Finding, ...] = ()
    reaped: tuple[Finding, ...] = ()
    left: tuple[Finding, ...] = ()
    problems: tuple[Finding, ...] = ()


def recover_directory(
    directory: str | Path,
    *,
    spare: frozenset[str] = frozenset(),
    reap_older_than_s: float,
    now_s: float,
    publish: PublishCheckpoint | None = None,
    dry_run: bool = False,
) -> RecoveryReport:
    """Look through every step of a checkpoint directory, and finish or remove what dead jobs left there.

    Called before a job's first save, and by ``ckpt-sidecar recover``. One broken step does not stop the others.

    Args:
        spare: sessions whose attempts are in flight in a living job, and save ids of attempts that a coordinator has in
            hand: they are left alone entirely.
        reap_older_than_s: what can never become a checkpoint is removed if nothing in it has changed for so long.
        now_s: the time, in seconds since the epoch.
        publish: carries out the commit order; by default ``publish_checkpoint``, which imports torch.
        dry_run: report what would be done, change nothing.

    Raises:
        StorageError: the directory is missing, is no directory, is itself a step, or cannot be read; nothing was done.
        ValueError: ``reap_older_than_s`` is no number of seconds.
    """
    if not (math.isfinite(reap_older_than_s) and reap_older_than_s >= 0):
        raise ValueError(f"reap_older_than_s is {reap_older_than_s}, expected a number of seconds from 0 on")
    root = Path(directory)
    names = _names_in(root)
    recovery = _Recovery(root, Policy(reap_older_than_s, now_s, spare), publish or _publish, dry_run=dry_run)
    for step, name in sorted((step, name) for name in names if (step := step_of(name)) is not None):
        recovery.recover_step(root / name, step)
    recovery.reap_probes(found_files(root, filter(is_probe, names)))
    return recovery.report()


def _names_in(root: Path) -> list[str]:
    try:
        names = os.listdir(root)
    except OSError as error:
        raise StorageError(f"{root} is no checkpoint directory that can be used: {error}") from error
    own = sorted(name for name in names if name == METADATA_NAME or attempt_of(name) is not None)
    if own:
        raise StorageError(
            f"{root} is itself one step of a checkpoint (it holds {own[0]}): give the directory above it"
        )
    return names


def _publish(order: Publish) -> None:
    from ckpt_sidecar.commit import publish_checkpoint

    publish_checkpoint(order, remove_superseded=False)


class _Recovery:
    """One run over one directory."""

    def __init__(self, root: Path, policy: Policy, publish: PublishCheckpoint, *, dry_run: bool) -> None:
        self._root = root
        self._policy = policy
        self._publish = publish
        self._dry_run = dry_run
        self._committed: list[Finding] = []
        self._reaped: list[Finding] = []
        self._left: list[Finding] = []
        self._problems: list[Finding] = []

    def report(self) -> RecoveryReport:
        """What has been done so far."""
        lists = (self._committed, self._reaped, self._left, self._problems)
        return RecoveryReport(str(self._root), *map(tuple, lists))

    def recover_step(self, path: Path, step: int) -> None:
        """Finish one step; whatever goes wrong is reported, not raised."""
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                self._left.append(Finding(step, "", 0, f"{path} is a symbolic link: not followed"))
            elif not stat.S_ISDIR(mode):
                raise StorageError(f"{path} is no directory but has the name of a checkpoint: move it away")
            else:
                self._recover(path, survey_step(path, step, self._policy.spare))
        except FileNotFoundError as error:
            self._left.append(Finding(step, "", 0, f"somebody else removes it: {error}"))
        except Exception as error:  # one broken step must not stop the others
            logger.warning("step %d: %s", step, error, exc_info=logger.isEnabledFor(logging.DEBUG))
            self._problems.append(Finding(step, "", 0, str(error) or repr(error)))

    def reap_probes(self, probes: Sequence[FoundFile]) -> None:
        """Remove what sidecars left that were killed while they tried whether the directory can be written."""
        for probe in probes:
            said = Finding(None, "", probe.nbytes, f"temporary file {probe.name}")
            if not self._policy.is_garbage([probe]):
                self._left.append(said)
                continue
            try:
                if not self._dry_run:
                    remove_files([self._root / probe.name])
                self._reaped.append(said)
            except OSError as error:
                self._problems.append(replace(said, reason=f"{said.reason} cannot be removed: {error}"))

    def _recover(self, path: Path, found: FoundStep) -> None:
        refused: dict[str, str] = {}
        while True:
            plan = plan_step(found, self._policy, refused)
            if plan.publish is None:
                break
            attempt = plan.publish.attempt
            try:
                self._commit(path, plan.publish, overwrite=plan.overwrite)
                break
            except AlreadyCommitted as error:
                self._left.append(_finding(attempt, f"another attempt has been committed meanwhile: {error}"))
                return
            except (OSError, StorageError) as error:
                if not isinstance(error, IncompleteCheckpoint):
                    raise StorageError(f"attempt {attempt.save.save_id} cannot be published now: {error}") from error
                refused[attempt.save.save_id] = f"cannot be published: {error}"
            except Exception as error:  # noqa: BLE001 - its manifests say something that no commit was made for
                refused[attempt.save.save_id] = f"cannot be published: {type(error).__name__}: {error}"
        self._carry_out(path, found, plan)

    def _commit(self, path: Path, decision: Decision, *, overwrite: bool) -> None:
        attempt, first = decision.attempt, decision.attempt.manifests[0]
        if not self._dry_run:
            self._publish(Publish(attempt.save, str(self._root), first.world_size, first.plan_id, (), overwrite))
            # Until the new .metadata is durable, a crash may bring back the old one, which needs its files.
            sync_dir(path)
            logger.info(
                "step %d: attempt %s was left complete and is committed", attempt.save.step, attempt.save.save_id
            )
        mismatch = torch_mismatch(importlib.metadata.version("torch"), first.torch_version)
        warning = f"; an older torch may be unable to read it ({mismatch})" if mismatch else ""
        self._committed.append(_finding(attempt, decision.reason + warning))

    def _carry_out(self, path: Path, found: FoundStep, plan: StepPlan) -> None:
        for decision in plan.others:
            if decision.fate is Fate.REAP:
                self._reap(path, decision)
            else:
                kind = self._problems if decision.fate is Fate.PROBLEM else self._left
                kind.append(_finding(decision.attempt, decision.reason))
        for file in found.temporaries:
            if file in plan.temporaries:
                self._reap_temporary(path, found.step, file)
            else:
                self._left.append(Finding(found.step, "", file.nbytes, f"temporary file {file.name}"))
        if found.is_empty:
            is_gone = plan.remove_empty and self._remove_if_empty(path)
            (self._reaped if is_gone else self._left).append(Finding(found.step, "", 0, "empty directory"))

    def _reap(self, path: Path, decision: Decision) -> None:
        attempt = decision.attempt
        if attempt_files(path, attempt.save) != attempt.files:
            self._left.append(_finding(attempt, f"{decision.reason}; changed while it was looked at"))
            return
        if not self._dry_run and not self._remove(path, attempt):
            self._left.append(_finding(attempt, "has been committed meanwhile"))
            return
        self._reaped.append(_finding(attempt, decision.reason))

    def _remove(self, path: Path, attempt: FoundAttempt) -> bool:
        """Remove what an attempt has left, manifests first; False, and data files stay, if it has been committed."""
        names = [file.name for file in attempt.files]
        for kind in (".manifest", ".distcp"):
            if is_named_in_metadata(path, attempt.save.save_id):
                return False
            remove_files([path / name for name in names if name.endswith(kind)])
        self._remove_if_empty(path)
        logger.info("step %d: files of attempt %s removed", attempt.save.step, attempt.save.save_id)
        return True

    def _reap_temporary(self, path: Path, step: int, file: FoundFile) -> None:
        if found_files(path, [file.name]) != (file,):
            return
        if not self._dry_run:
            remove_files([path / file.name])
            self._remove_if_empty(path)
        self._reaped.append(Finding(step, "", file.nbytes, f"temporary file {file.name}"))

    def _remove_if_empty(self, path: Path) -> bool:
        """Remove a step's directory unless something is in it; whether it is (or would be) gone."""
        if self._dry_run:
            return not os.listdir(path)
        if os.listdir(path):
            return False
        try:
            path.rmdir()
        except OSError as error:
            # A save of this step has just begun.
            logger.info("%s stays: %s", path, error)
            return False
        sync_dir(path.parent)
        return True


def _finding(attempt: FoundAttempt, reason: str) -> Finding:
    return Finding(attempt.save.step, attempt.save.save_id, attempt.nbytes, reason)
