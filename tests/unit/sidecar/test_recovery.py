"""Recovery on real files: what is complete can be loaded, what never will be is gone, what is not ours is untouched."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_proto.checkpoint_layout import METADATA_NAME, data_file_name, manifest_name
from ckpt_proto.codec import encode
from ckpt_proto.errors import StorageError
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import Heartbeat
from ckpt_proto.shard_manifest import StoredManifest
from ckpt_sidecar import durable_fs, recovery, step_survey
from ckpt_sidecar.actions import Publish
from ckpt_sidecar.commit import publish_checkpoint, read_manifests
from ckpt_sidecar.recover_command import describe_report
from ckpt_sidecar.recovery import Finding, RecoveryReport, recover_directory
from testkit.leaks import files_below
from testkit.plans import persist_attempt, save_key, states_of_ranks

LATER_S = 10_000.0
THEIRS = "ffffffff"


def recover(root: Path, *, later_s: float = 0.0, **options: Any) -> RecoveryReport:
    """Recovery ``later_s`` seconds after the files were made; garbage is what is an hour old."""
    now_s = max(os.lstat(path).st_ctime for path in (root, *root.rglob("*"))) + later_s
    return recover_directory(root, reap_older_than_s=3600.0, now_s=now_s, **options)


def persist(root: Path, value: float, save: SaveKey, world_size: int = 2, **options: Any) -> Publish:
    return persist_attempt(
        root, [{"a": torch.full((3,), value), f"rank-{r}": r} for r in range(world_size)], save, **options
    )


def value_in(root: Path, step: int) -> float:
    target = {"a": torch.zeros(3)}
    dcp.load(target, checkpoint_id=root / f"step-{step}")
    assert len(set(target["a"].tolist())) == 1
    return float(target["a"][0])


def set_times(root: Path, order: Publish, at_s: float) -> None:
    for path in (root / f"step-{order.save.step}").glob(f"*{order.save.save_id}*"):
        os.utime(path, (at_s, at_s))


def without_manifest(root: Path, save: SaveKey, rank: int = 1) -> Publish:
    order = persist(root, 9.0, save)
    (root / f"step-{save.step}" / manifest_name(rank, save.save_id)).unlink()
    return order


def contents(root: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def reasons(findings: tuple[Finding, ...]) -> dict[tuple[int, str], str]:
    return {(finding.step, finding.save_id): finding.reason for finding in findings}


# ---------------------------------------------------------------- complete attempts


def test_a_complete_attempt_is_committed_and_loads(tmp_path: Path) -> None:
    order = persist_attempt(tmp_path, states_of_ranks(3))
    nbytes = sum(path.stat().st_size for path in (tmp_path / "step-5").iterdir())
    report = recover(tmp_path)
    assert report == RecoveryReport(str(tmp_path), committed=(Finding(5, order.save.save_id, nbytes, "complete"),))
    target: dict[str, Any] = {"model": {"weight": torch.zeros(7, 4)}, "rank-2": {"seed": 0}, "step": 0}
    dcp.load(target, checkpoint_id=tmp_path / "step-5")
    assert torch.equal(target["model"]["weight"], torch.arange(28, dtype=torch.float32).reshape(7, 4))
    assert (target["rank-2"]["seed"], target["step"]) == (2, 5)


def test_every_step_is_looked_through_and_the_second_run_has_nothing_to_do(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        persist(tmp_path, step, save_key(step))
    publish_checkpoint(persist(tmp_path, 1.0, save_key(1)))
    report = recover(tmp_path, later_s=LATER_S)
    assert [finding.step for finding in report.committed] == [3, 20, 100]
    assert [value_in(tmp_path, step) for step in (1, 3, 20, 100)] == [1.0, 3.0, 20.0, 100.0]
    before = contents(tmp_path)
    assert recover(tmp_path, later_s=LATER_S) == RecoveryReport(str(tmp_path))
    assert contents(tmp_path) == before


def test_the_newest_of_several_is_committed_and_the_others_go_when_they_are_old(tmp_path: Path) -> None:
    for seq, session in ((0, "0a1b2c3d"), (1, "0a1b2c3d"), (7, THEIRS)):
        order = persist(tmp_path, float(seq), save_key(seq=seq, session=session))
        set_times(tmp_path, order, 1000.0 if session == THEIRS else 2000.0 - seq)
    report = recover(tmp_path)
    assert [finding.save_id for finding in report.committed] == ["0a1b2c3d-1"]
    assert set(reasons(report.left)) == {(5, "0a1b2c3d-0"), (5, "ffffffff-7")}
    assert all(finding.reason.startswith("superseded by attempt 0a1b2c3d-1; last changed") for finding in report.left)
    report = recover(tmp_path, later_s=LATER_S)
    assert reasons(report.reaped) == dict.fromkeys(
        [(5, "0a1b2c3d-0"), (5, "ffffffff-7")], "superseded by attempt 0a1b2c3d-1"
    )
    assert value_in(tmp_path, 5) == 1.0
    assert len(files_below(tmp_path / "step-5")) == 5


def test_an_ordered_overwrite_is_finished_and_takes_the_old_files_along(tmp_path: Path) -> None:
    publish_checkpoint(persist(tmp_path, 1.0, save_key(seq=1)))
    persist(tmp_path, 2.0, save_key(seq=2), overwrite=True)
    report = recover(tmp_path, later_s=LATER_S)
    assert reasons(report.committed) == {
        (5, "0a1b2c3d-2"): "complete, published over attempt 0a1b2c3d-1 as ordered (overwrite)"
    }
    assert reasons(report.reaped) == {(5, "0a1b2c3d-1"): "superseded by attempt 0a1b2c3d-2"}
    assert value_in(tmp_path, 5) == 2.0
    assert len(files_below(tmp_path / "step-5")) == 5


def test_files_of_the_replaced_checkpoint_stay_while_a_crash_could_bring_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = persist(tmp_path, 1.0, save_key(seq=1))
    publish_checkpoint(old)
    persist(tmp_path, 2.0, save_key(seq=2), overwrite=True)
    before = set(files_below(tmp_path))

    def no_sync(path: Path) -> None:
        raise OSError(5, "no luck")

    monkeypatch.setattr("ckpt_sidecar.recovery.sync_dir", no_sync)
    report = recover(tmp_path, later_s=LATER_S)
    assert "no luck" in reasons(report.problems)[5, ""]
    assert report.reaped == ()
    assert set(files_below(tmp_path)) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_attempt_older_than_the_checkpoint_is_superseded(tmp_path: Path, overwrite: bool) -> None:
    old = persist(tmp_path, 1.0, save_key(session=THEIRS), overwrite=overwrite)
    set_times(tmp_path, old, 1000.0)
    publish_checkpoint(persist(tmp_path, 2.0, save_key()))
    report = recover(tmp_path, later_s=LATER_S)
    assert (report.committed, set(reasons(report.reaped))) == ((), {(5, "ffffffff-0")})
    assert value_in(tmp_path, 5) == 2.0


def test_a_step_that_stock_dcp_has_saved_is_never_touched(tmp_path: Path) -> None:
    dcp.save({"a": torch.full((3,), 7.0)}, checkpoint_id=tmp_path / "step-5")
    theirs = contents(tmp_path)
    persist(tmp_path, 1.0, save_key(), overwrite=True)
    report = recover(tmp_path, later_s=LATER_S)
    assert reasons(report.reaped) == {(5, "0a1b2c3d-0"): "superseded: another program has saved this step"}
    assert contents(tmp_path) == theirs
    assert value_in(tmp_path, 5) == 7.0


def test_a_finished_overwrite_by_a_living_save_would_have_been_the_same(tmp_path: Path) -> None:
    """Killed after the new ``.metadata`` and before the old files were removed."""
    publish_checkpoint(persist(tmp_path, 1.0, save_key(seq=1)))
    publish_checkpoint(persist(tmp_path, 2.0, save_key(seq=2), overwrite=True), remove_superseded=False)
    report = recover(tmp_path, later_s=LATER_S)
    assert (report.committed, set(reasons(report.reaped))) == ((), {(5, "0a1b2c3d-1")})
    assert value_in(tmp_path, 5) == 2.0


@pytest.mark.parametrize("removed", range(4))
@pytest.mark.parametrize("ours", [True, False], ids=["the same job", "another job"])
def test_what_a_killed_overwrite_has_not_removed_yet_goes_when_it_is_old(
    tmp_path: Path, removed: int, ours: bool
) -> None:
    """Killed before any of the old files was removed, or in the middle of them, which have no order."""
    old = persist(tmp_path, 1.0, save_key(seq=1) if ours else save_key(seq=9, session=THEIRS), overwrite=True)
    publish_checkpoint(old)
    publish_checkpoint(persist(tmp_path, 2.0, save_key(seq=2), overwrite=True), remove_superseded=False)
    for path in sorted((tmp_path / "step-5").glob(f"*{old.save.save_id}.*"))[:removed]:
        path.unlink()
    before = contents(tmp_path)
    report = recover(tmp_path)
    assert (report.committed, report.reaped, set(reasons(report.left))) == ((), (), {(5, old.save.save_id)})
    assert contents(tmp_path) == before
    report = recover(tmp_path, later_s=LATER_S)
    assert (report.committed, set(reasons(report.reaped))) == ((), {(5, old.save.save_id)})
    assert len(files_below(tmp_path / "step-5")) == 5
    assert value_in(tmp_path, 5) == 2.0


def test_an_attempt_whose_name_begins_like_that_of_the_checkpoint_is_another(tmp_path: Path) -> None:
    persist(tmp_path, 1.0, save_key(seq=1))
    publish_checkpoint(persist(tmp_path, 2.0, save_key(seq=12)))
    report = recover(tmp_path, later_s=LATER_S)
    assert reasons(report.reaped) == {(5, "0a1b2c3d-1"): "superseded by attempt 0a1b2c3d-12"}
    assert value_in(tmp_path, 5) == 2.0


def test_of_a_step_that_is_in_order_nothing_is_unpickled_and_no_manifest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_checkpoint(persist(tmp_path, 1.0, save_key()))
    read: list[str] = []
    real = step_survey.read_regular_file
    monkeypatch.setattr(
        step_survey, "read_regular_file", lambda path, limit: read.append(path.name) or real(path, limit)
    )
    monkeypatch.setattr(step_survey, "parse_metadata", lambda *args: read.append("unpickled"))
    assert recover(tmp_path) == RecoveryReport(str(tmp_path))
    assert read == [METADATA_NAME]


def test_a_newer_torch_that_publishes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    persist(tmp_path, 1.0, save_key())
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.1.0")
    [finding] = recover(tmp_path).committed
    assert f"older torch may be unable to read it (the sidecar has torch 99.1.0, the trainer {torch.__version__}" in (
        finding.reason
    )


# ---------------------------------------------------------------- what can never be one


def test_an_incomplete_attempt_is_left_while_young_and_removed_when_old(tmp_path: Path) -> None:
    without_manifest(tmp_path, save_key())
    before = contents(tmp_path)
    report = recover(tmp_path)
    assert reasons(report.left) == {
        (5, "0a1b2c3d-0"): "incomplete: no shard manifest of ranks [1] of 2; last changed 0 s ago"
    }
    assert contents(tmp_path) == before
    report = recover(tmp_path, later_s=LATER_S)
    assert reasons(report.reaped) == {(5, "0a1b2c3d-0"): "incomplete: no shard manifest of ranks [1] of 2"}
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("change", [-1, 1])
def test_a_data_file_of_another_size_makes_it_incomplete(tmp_path: Path, change: int) -> None:
    order = persist(tmp_path, 1.0, save_key())
    path = tmp_path / "step-5" / data_file_name(1, order.save.save_id)
    size = path.stat().st_size
    os.truncate(path, size + change)
    report = recover(tmp_path)
    assert f"{path.name} has {size + change} bytes, its manifest says {size}" in report.left[0].reason
    assert report.committed == ()


def test_an_attempt_loses_its_manifests_durably_before_any_data_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_manifest(tmp_path, save_key())
    done: list[str] = []
    unlink, sync = os.unlink, durable_fs.sync_dir
    monkeypatch.setattr(os, "unlink", lambda path: (done.append(Path(path).suffix), unlink(path)))
    monkeypatch.setattr(durable_fs, "sync_dir", lambda path: (done.append("sync"), sync(path)))
    recover(tmp_path, later_s=LATER_S)
    assert done == [".manifest", "sync", ".distcp", ".distcp", "sync"]


def test_temporary_files_and_empty_directories_go_when_they_are_old(tmp_path: Path) -> None:
    publish_checkpoint(persist(tmp_path, 1.0, save_key(1)))
    done = contents(tmp_path)
    (tmp_path / "step-1" / ".metadata.01234567.tmp").write_bytes(b"torn")
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "__0_0a1b2c3d-0.manifest.01234567.tmp").write_bytes(b"torn")
    before = contents(tmp_path)
    report = recover(tmp_path)
    found = [
        Finding(1, "", 4, "temporary file .metadata.01234567.tmp"),
        Finding(2, "", 0, "empty directory"),
        Finding(3, "", 4, "temporary file __0_0a1b2c3d-0.manifest.01234567.tmp"),
    ]
    assert report == RecoveryReport(str(tmp_path), left=tuple(found))
    assert contents(tmp_path) == before
    assert recover(tmp_path, later_s=LATER_S) == RecoveryReport(str(tmp_path), reaped=tuple(found))
    assert contents(tmp_path) == done


def test_what_a_sidecar_tried_the_directory_with_goes_when_it_is_old(tmp_path: Path) -> None:
    publish_checkpoint(persist(tmp_path, 1.0, save_key(1)))
    done = contents(tmp_path)
    probe = tmp_path / ".ckpt-sidecar-probe.01234567"
    probe.write_bytes(b"probe")
    found = Finding(None, "", 5, f"temporary file {probe.name}")
    assert recover(tmp_path) == RecoveryReport(str(tmp_path), left=(found,))
    would_be = recover(tmp_path, later_s=LATER_S, dry_run=True)
    assert probe.exists()
    assert re.search(rf"would remove  - +- +5 B +temporary file {probe.name}", describe_report(would_be, dry_run=True))
    assert recover(tmp_path, later_s=LATER_S) == would_be == RecoveryReport(str(tmp_path), reaped=(found,))
    assert contents(tmp_path) == done


def test_what_only_looks_like_a_probe_stays(tmp_path: Path) -> None:
    (tmp_path / ".ckpt-sidecar-probe.0123456").write_bytes(b"precious")
    (tmp_path / ".ckpt-sidecar-probe.76543210").mkdir()
    (tmp_path / ".ckpt-sidecar-probe.01234567").symlink_to(tmp_path / ".ckpt-sidecar-probe.0123456")
    before = files_below(tmp_path)
    assert recover(tmp_path, later_s=LATER_S) == RecoveryReport(str(tmp_path))
    assert files_below(tmp_path) == before


def test_what_is_not_ours_by_name_stays_and_so_does_its_directory(tmp_path: Path) -> None:
    without_manifest(tmp_path, save_key())
    foreign = [
        "step-5/notes.txt", "step-5/__0_0.distcp", "step-5/.metadata.tmp", "step-5/__0_0a1b2c3d-0.distcp.bak",
        "step-5/__0_0a1b2c3d-01.distcp", "step-05/__0_0a1b2c3d-0.distcp", "epoch-5/__0_0a1b2c3d-0.distcp",
        "step-5.old/.metadata.01234567.tmp", "step-6/mine/__0_0a1b2c3d-0.distcp",
    ]  # fmt: skip
    for name in foreign:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"precious")
    report = recover(tmp_path, later_s=LATER_S)
    assert set(reasons(report.reaped)) == {(5, "0a1b2c3d-0")}
    assert {name for name in files_below(tmp_path) if (tmp_path / name).is_file()} == set(foreign)


# ---------------------------------------------------------------- living jobs, others at the same time


def test_a_living_jobs_attempts_are_left_alone(tmp_path: Path) -> None:
    persist(tmp_path, 1.0, save_key(1, session=THEIRS))
    without_manifest(tmp_path, save_key(2, session=THEIRS))
    (tmp_path / "step-2" / "__1_ffffffff-0.manifest.01234567.tmp").write_bytes(b"being written")
    persist(tmp_path, 1.0, save_key(1))
    persist(tmp_path, 3.0, save_key(3))
    before = {name: content for name, content in contents(tmp_path).items() if "step-3" not in name}
    report = recover(tmp_path, later_s=LATER_S, spare=frozenset({THEIRS}))
    assert [finding.step for finding in report.committed] == [3]
    assert report.reaped == ()
    assert {name: content for name, content in contents(tmp_path).items() if "step-3" not in name} == before


def test_single_attempts_that_a_coordinator_has_in_hand_are_left_alone(tmp_path: Path) -> None:
    in_hand, left = save_key(1, 1, THEIRS), save_key(2, 2, THEIRS)
    for save in (in_hand, left):
        persist(tmp_path, 1.0, save)
    report = recover(tmp_path, later_s=LATER_S, spare=frozenset({in_hand.save_id}))
    assert [finding.step for finding in report.committed] == [2]
    assert [finding.reason for finding in report.left] == ["in flight: its job lives"]


def test_an_attempt_that_changes_while_it_is_looked_at_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = without_manifest(tmp_path, save_key())
    real = step_survey.attempt_files

    def changed_meanwhile(path: Path, save: SaveKey) -> Any:
        with open(path / data_file_name(1, order.save.save_id), "ab") as file:
            file.write(b"more")
        return real(path, save)

    monkeypatch.setattr("ckpt_sidecar.recovery.attempt_files", changed_meanwhile)
    report = recover(tmp_path, later_s=LATER_S)
    assert "changed while it was looked at" in reasons(report.left)[5, "0a1b2c3d-0"]
    assert (tmp_path / "step-5" / data_file_name(1, order.save.save_id)).exists()


def test_an_attempt_that_is_committed_while_it_is_removed_keeps_its_data_and_is_reported_as_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = without_manifest(tmp_path, save_key()).save
    step = tmp_path / "step-5"
    real = recovery.remove_files

    def publish_meanwhile(paths: list[Path]) -> None:
        real(paths)
        (step / METADATA_NAME).write_bytes(save.save_id.encode())

    monkeypatch.setattr("ckpt_sidecar.recovery.remove_files", publish_meanwhile)
    report = recover(tmp_path, later_s=LATER_S)
    assert report.reaped == ()
    assert "committed meanwhile" in reasons(report.left)[5, save.save_id]
    assert list(step.glob("*.distcp"))


def test_an_attempt_that_is_committed_while_it_is_looked_at_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = persist(tmp_path, 1.0, save_key())
    manifest = tmp_path / "step-5" / manifest_name(1, order.save.save_id)
    manifest.rename(tmp_path / "kept")
    real = step_survey.attempt_files

    def committed_meanwhile(path: Path, save: SaveKey) -> Any:
        seen = real(path, save)
        (tmp_path / "kept").rename(manifest)
        publish_checkpoint(order)
        return seen

    monkeypatch.setattr("ckpt_sidecar.recovery.attempt_files", committed_meanwhile)
    report = recover(tmp_path, later_s=LATER_S)
    assert reasons(report.left) == {(5, "0a1b2c3d-0"): "has been committed meanwhile"}
    assert value_in(tmp_path, 5) == 1.0


def test_somebody_who_commits_another_attempt_first_wins(tmp_path: Path) -> None:
    first, _ = persist(tmp_path, 1.0, save_key(seq=1)), persist(tmp_path, 2.0, save_key(seq=2))

    def publish_late(order: Publish) -> None:
        publish_checkpoint(first)
        publish_checkpoint(order)

    report = recover(tmp_path, later_s=LATER_S, publish=publish_late)
    assert "another attempt has been committed meanwhile" in reasons(report.left)[5, "0a1b2c3d-2"]
    assert (report.committed, report.problems) == ((), ())
    assert value_in(tmp_path, 5) == 1.0


def test_two_recoveries_at_once_do_no_harm(tmp_path: Path) -> None:
    persist(tmp_path, 1.0, save_key(1))
    without_manifest(tmp_path, save_key(2))

    def publish_late(order: Publish) -> None:
        assert len(recover(tmp_path, later_s=LATER_S).committed) == 1
        publish_checkpoint(order)

    report = recover(tmp_path, later_s=LATER_S, publish=publish_late)
    assert [finding.step for finding in report.committed] == [1]
    assert report.problems == ()
    assert value_in(tmp_path, 1) == 1.0
    assert not (tmp_path / "step-2").exists()


# ---------------------------------------------------------------- broken and hostile steps


def test_an_attempt_whose_items_do_not_add_up_gives_way_to_the_one_before(tmp_path: Path) -> None:
    persist(tmp_path, 1.0, save_key(seq=1))
    bad = persist(tmp_path, 2.0, save_key(seq=2))
    rewrite(tmp_path, bad, 0, lambda manifest: replace(manifest, entries=manifest.entries * 2))
    report = recover(tmp_path, later_s=LATER_S)
    assert "cannot be published: " in reasons(report.problems)[5, "0a1b2c3d-2"]
    assert "is stored twice" in reasons(report.problems)[5, "0a1b2c3d-2"]
    assert set(reasons(report.committed)) == {(5, "0a1b2c3d-1")}
    assert value_in(tmp_path, 5) == 1.0


@pytest.mark.parametrize("error", [OSError(28, "full"), StorageError("cannot be made durable")])
def test_a_storage_that_fails_to_publish_is_a_problem_of_that_step_and_nothing_else_is_done_there(
    tmp_path: Path, error: Exception
) -> None:
    persist(tmp_path, 1.0, save_key(5, seq=1))
    persist(tmp_path, 2.0, save_key(5, seq=2))
    without_manifest(tmp_path, save_key(5, seq=3))
    persist(tmp_path, 6.0, save_key(6))
    before = {name: content for name, content in contents(tmp_path).items() if "step-5" in name}

    def publish(order: Publish) -> None:
        if order.save.step == 5:
            raise error
        publish_checkpoint(order)

    report = recover(tmp_path, later_s=LATER_S, publish=publish)
    assert f"attempt 0a1b2c3d-2 cannot be published now: {error}" in reasons(report.problems)[5, ""]
    assert {name: content for name, content in contents(tmp_path).items() if "step-5" in name} == before
    assert value_in(tmp_path, 6) == 6.0


def rewrite(root: Path, order: Publish, rank: int, change: Callable[[Any], Any]) -> None:
    directory = root / f"step-{order.save.step}"
    stored = read_manifests(directory, order.save.save_id, order.world_size)[rank]
    changed = StoredManifest.of(change(stored.whole()))
    (directory / manifest_name(rank, order.save.save_id)).write_bytes(encode(changed))


BAD_MANIFESTS: dict[str, Callable[[Path, Publish], Any]] = {
    "torn": lambda path, order: path.write_bytes(path.read_bytes()[:-7]),
    "empty": lambda path, order: path.write_bytes(b""),
    "another message": lambda path, order: path.write_bytes(encode(Heartbeat())),
    "another release": lambda path, order: path.write_bytes(encode(Heartbeat(), version=99)),
    "a pickle": lambda path, order: path.write_bytes(pickle.dumps(os.system)),
    "huge lengths": lambda path, order: path.write_bytes(b"\x93\x01\xdb\xff\xff\xff\xff"),
    "a giant": lambda path, order: os.truncate(path, 1 << 40),
    "a link": lambda path, order: (path.rename(path.parent.parent / "elsewhere"), path.symlink_to("../elsewhere")),
    "a pipe": lambda path, order: (path.unlink(), os.mkfifo(path)),
    "a directory": lambda path, order: (path.unlink(), path.mkdir()),
    "another file": lambda path, order: rewrite(
        path.parent.parent, order, 1, lambda manifest: replace(manifest, file_name="notes.txt")
    ),
    "another rank's file": lambda path, order: shutil.copy(path.with_name(manifest_name(0, order.save.save_id)), path),
    "another step": lambda path, order: rewrite(
        path.parent.parent, order, 1, lambda manifest: replace(manifest, save=save_key(step=6))
    ),
}


@pytest.mark.parametrize("what", BAD_MANIFESTS)
def test_a_bad_manifest_is_named_and_nothing_beside_it_is_touched(tmp_path: Path, what: str) -> None:
    persist(tmp_path, 4.0, save_key(4))
    order = persist(tmp_path, 5.0, save_key(5))
    persist(tmp_path, 6.0, save_key(6))
    path = tmp_path / "step-5" / manifest_name(1, order.save.save_id)
    BAD_MANIFESTS[what](path, order)
    before = sorted(os.listdir(tmp_path / "step-5"))
    report = recover(tmp_path, later_s=LATER_S)
    assert set(reasons(report.problems)) == {(5, "0a1b2c3d-0")}
    assert str(path) in report.problems[0].reason
    assert sorted(os.listdir(tmp_path / "step-5")) == before
    assert [value_in(tmp_path, step) for step in (4, 6)] == [4.0, 6.0]


def test_a_manifest_that_promises_more_than_there_is_makes_it_incomplete(tmp_path: Path) -> None:
    order = persist(tmp_path, 5.0, save_key())
    for rank in range(2):
        rewrite(tmp_path, order, rank, lambda manifest: replace(manifest, world_size=1 << 20))
    [finding] = recover(tmp_path).left
    assert finding.reason.startswith("incomplete: no shard manifest of ranks [2, 3, 4,")
    rewrite(tmp_path, order, 0, lambda manifest: replace(manifest, world_size=2, file_bytes=1 << 62))
    rewrite(tmp_path, order, 1, lambda manifest: replace(manifest, world_size=2))
    [finding] = recover(tmp_path).left
    assert finding.reason.startswith(f"incomplete: {data_file_name(0, '0a1b2c3d-0')} has ")


def test_a_manifest_of_a_dtype_that_torch_has_not_is_a_problem(tmp_path: Path) -> None:
    order = persist(tmp_path, 5.0, save_key(), world_size=1)

    def changed(manifest: Any) -> Any:
        return replace(
            manifest,
            entries=tuple(
                replace(e, item=replace(e.item, dtype="load")) if e.item.dtype else e for e in manifest.entries
            ),
        )

    rewrite(tmp_path, order, 0, changed)
    report = recover(tmp_path, later_s=LATER_S)
    assert "no dtype 'load'" in reasons(report.problems)[5, "0a1b2c3d-0"]
    assert not (tmp_path / "step-5" / METADATA_NAME).exists()


def test_a_data_file_that_is_a_link_is_a_problem(tmp_path: Path) -> None:
    order = persist(tmp_path, 5.0, save_key())
    path = tmp_path / "step-5" / data_file_name(1, order.save.save_id)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    report = recover(tmp_path, later_s=LATER_S)
    assert reasons(report.problems) == {(5, "0a1b2c3d-0"): f"{path} is no regular file"}
    assert path.is_symlink()
    assert (tmp_path / "elsewhere").exists()


class _Runs:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("what", ["hostile", "torn", "link", "directory"])
def test_a_metadata_that_nobody_can_read_makes_the_step_untouchable(tmp_path: Path, what: str) -> None:
    without_manifest(tmp_path, save_key())
    persist(tmp_path, 1.0, save_key(seq=1))
    path = tmp_path / "step-5" / METADATA_NAME
    if what == "link":
        path.symlink_to("/etc/hostname")
    elif what == "directory":
        path.mkdir()
    else:
        path.write_bytes(pickle.dumps(_Runs(tmp_path / "made")) if what == "hostile" else b"\x80\x04torn")
    before = sorted(os.listdir(tmp_path / "step-5"))
    report = recover(tmp_path, later_s=LATER_S)
    assert str(path) in reasons(report.problems)[5, ""]
    assert (report.committed, report.reaped) == ((), ())
    assert sorted(os.listdir(tmp_path / "step-5")) == before
    assert not (tmp_path / "made").exists()


def test_links_and_files_with_the_name_of_a_step_are_not_entered(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    without_manifest(elsewhere, save_key())
    root.mkdir()
    (root / "step-5").symlink_to(elsewhere / "step-5")
    (root / "step-6").symlink_to("nowhere")
    (root / "step-7").write_bytes(b"precious")
    before = contents(elsewhere)
    report = recover(root, later_s=LATER_S)
    assert reasons(report.left) == {
        (step, ""): f"{root / f'step-{step}'} is a symbolic link: not followed" for step in (5, 6)
    }
    assert "is no directory but has the name of a checkpoint" in reasons(report.problems)[7, ""]
    assert contents(elsewhere) == before
    assert sorted(os.listdir(root)) == ["step-5", "step-6", "step-7"]


@pytest.mark.parametrize("call", ["listdir", "unlink"])
def test_a_step_that_may_not_be_read_or_changed_is_a_problem_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    without_manifest(tmp_path, save_key(5))
    persist(tmp_path, 6.0, save_key(6))
    before = {name for name in files_below(tmp_path) if "step-5" in name}
    real = getattr(os, call)

    def refuse(path: Any, *args: Any) -> Any:
        if "step-5" in str(path):
            raise PermissionError(13, "not yours", str(path))
        return real(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        now_s = os.stat(tmp_path).st_ctime + LATER_S
        report = recover_directory(tmp_path, reap_older_than_s=3600.0, now_s=now_s)
    assert "not yours" in reasons(report.problems)[5, ""]
    assert {name for name in files_below(tmp_path) if "step-5" in name} == before
    assert value_in(tmp_path, 6) == 6.0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_without_permission_is_a_problem(tmp_path: Path) -> None:
    without_manifest(tmp_path, save_key(5))
    now_s = os.stat(tmp_path).st_ctime + LATER_S
    (tmp_path / "step-5").chmod(0)
    try:
        report = recover_directory(tmp_path, reap_older_than_s=3600.0, now_s=now_s)
    finally:
        (tmp_path / "step-5").chmod(0o700)
    assert "Permission denied" in reasons(report.problems)[5, ""]


# ---------------------------------------------------------------- what is asked of it


def test_a_dry_run_says_what_a_real_one_does_and_changes_nothing(tmp_path: Path) -> None:
    persist(tmp_path, 1.0, save_key(1, seq=1))
    persist(tmp_path, 2.0, save_key(1, seq=2))
    publish_checkpoint(persist(tmp_path, 1.0, save_key(2, seq=1)))
    persist(tmp_path, 2.0, save_key(2, seq=2), overwrite=True)
    without_manifest(tmp_path, save_key(3))
    (tmp_path / "step-3" / ".metadata.01234567.tmp").write_bytes(b"torn")
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-5").write_bytes(b"")
    before = contents(tmp_path)
    said = recover(tmp_path, later_s=LATER_S, dry_run=True)
    assert contents(tmp_path) == before
    assert said == recover(tmp_path, later_s=LATER_S)
    assert (len(said.committed), len(said.reaped), len(said.problems)) == (2, 5, 1)


def test_what_is_no_checkpoint_directory_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    without_manifest(tmp_path, save_key(5))
    publish_checkpoint(persist(tmp_path, 1.0, save_key(6)))
    before = contents(tmp_path)
    for name, complaint in (
        ("missing", "no checkpoint directory"),
        ("file", "no checkpoint directory"),
        ("step-5", "itself one step of a checkpoint .it holds __0_0a1b2c3d-0.distcp."),
        ("step-6", "itself one step of a checkpoint .it holds .metadata."),
    ):
        with pytest.raises(StorageError, match=f"{tmp_path / name} is {complaint}"):
            recover_directory(tmp_path / name, reap_older_than_s=0.0, now_s=1e12)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_an_age_that_is_none_is_refused(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(ValueError, match="reap_older_than_s"):
        recover_directory(tmp_path, reap_older_than_s=seconds, now_s=0.0)


def test_torch_is_imported_only_to_publish(tmp_path: Path) -> None:
    publish_checkpoint(persist(tmp_path, 1.0, save_key(1)))
    without_manifest(tmp_path, save_key(2))
    code = (
        "import json, sys; from ckpt_sidecar.recovery import recover_directory; "
        "report = recover_directory(sys.argv[1], reap_older_than_s=0.0, now_s=1e12); "
        "print(json.dumps([len(report.reaped), 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [1, False]
