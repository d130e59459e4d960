"""The action runner: every action that takes time ends in its event, errors too, and its threads end with it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt_proto import region as region_files
from ckpt_proto.checkpoint_layout import METADATA_NAME, data_file_name
from ckpt_proto.codec import encode
from ckpt_proto.messages import SubmitShard
from ckpt_proto.plan_items import Plan
from ckpt_proto.region import Seal, region_path, seal_path
from ckpt_sidecar import shard_writer, torch_work
from ckpt_sidecar.action_runner import ActionRunner
from ckpt_sidecar.actions import (
    Action,
    CancelShard,
    FindCommit,
    OpenDirectory,
    PrepareRegion,
    Publish,
    RemoveShardFiles,
    ToRank,
    Withdraw,
    WriteShard,
)
from ckpt_sidecar.data_file import DataFile
from ckpt_sidecar.durable_fs import remove_files
from ckpt_sidecar.events import (
    DirectoryOpened,
    DirectoryRefused,
    Event,
    Published,
    PublishFailed,
    RegionFailed,
    RegionPrepared,
    ShardBroken,
    ShardDurable,
    ShardStarted,
    WithdrawFailed,
    Withdrawn,
)
from ckpt_sidecar.throttle import Throttle
from testkit.plans import PLAN_ID, SESSION, bytes_item, save_key, tensor_item, write_order
from testkit.tables import hello

ITEMS: Plan = (tensor_item("w", (1000,)), bytes_item("step"))
LENGTHS = (100,)
PATIENCE_S = 30.0


class Posted:
    """A thread-safe list of events that can be waited on."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[Event]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.events) >= count, PATIENCE_S), self.events
            return list(self.events)


@pytest.fixture
def posted() -> Posted:
    return Posted()


@pytest.fixture
def regions(tmp_path: Path) -> Path:
    directory = tmp_path / "regions"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def runner(regions: Path, posted: Posted) -> Iterator[ActionRunner]:
    running = ActionRunner(regions, 2, Throttle(None), posted)
    running.start()
    yield running
    running.close()


def prepare(slot: int = 0, items: Plan = ITEMS, plan_id: str = PLAN_ID, byte_capacity: int = 4096) -> PrepareRegion:
    return PrepareRegion(0, slot, 1, plan_id, items, byte_capacity, hello(session=SESSION), save_key())


def staged(runner: ActionRunner, posted: Posted, checkpoints: Path) -> WriteShard:
    """A prepared and filled region and the order to write it; the events so far are forgotten."""
    runner.run(prepare())
    [event] = posted.wait_for(1)
    assert isinstance(event, RegionPrepared)
    posted.events.clear()
    with open(event.ready.path, "r+b") as file:
        file.seek(event.ready.payload_offsets[0])
        file.write(b"w" * 4000)
    return write_order(checkpoints, ITEMS, LENGTHS)


def files_in(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.glob("step-5/*"))


# ---------------------------------------------------------------- regions


def test_a_region_is_prepared(runner: ActionRunner, posted: Posted, regions: Path) -> None:
    runner.run(prepare(slot=1))
    [event] = posted.wait_for(1)
    assert isinstance(event, RegionPrepared)
    ready = event.ready
    path = region_path(regions, 0, 1)
    assert (event.rank, ready.slot, ready.plan_id, ready.generation, ready.path) == (0, 1, PLAN_ID, 1, str(path))
    assert path.stat().st_size == ready.region_bytes == ready.byte_offset + ready.byte_capacity
    assert ready.byte_capacity >= 4096
    assert len(ready.payload_offsets) == 1
    assert path.read_bytes()[:4] == b"PK\x03\x04"


def test_preparing_breaks_the_seal(runner: ActionRunner, posted: Posted, regions: Path) -> None:
    path = region_path(regions, 0, 0)
    seal = Seal(seal_path(path))
    seal.set(encode(SubmitShard(save_key(), 0, PLAN_ID, 0, 1, ())))
    assert seal.read() is not None
    runner.run(prepare())
    posted.wait_for(1)
    assert seal.read() is None
    seal.close()


def test_a_region_is_grown_in_place(runner: ActionRunner, posted: Posted, regions: Path) -> None:
    runner.run(prepare())
    posted.wait_for(1)
    inode = region_path(regions, 0, 0).stat().st_ino
    runner.run(prepare(byte_capacity=1 << 20))
    runner.run(prepare(items=(tensor_item("w", (2000,)), bytes_item("b")), plan_id="0a1b2c3d-p2"))
    first, grown, other = posted.wait_for(3)
    assert isinstance(first, RegionPrepared)
    assert isinstance(grown, RegionPrepared)
    assert isinstance(other, RegionPrepared)
    assert grown.ready.byte_capacity >= 1 << 20
    assert grown.ready.byte_offset == first.ready.byte_offset < other.ready.byte_offset
    assert region_path(regions, 0, 0).stat().st_ino == inode


def test_a_region_without_room_fails_with_the_numbers(
    runner: ActionRunner, posted: Posted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_files, "free_bytes", lambda directory: 100)
    runner.run(prepare())
    [event] = posted.wait_for(1)
    assert isinstance(event, RegionFailed)
    assert (event.rank, event.slot, event.plan_id) == (0, 0, PLAN_ID)
    assert event.failure.kind == "NotEnoughSharedMemory"
    assert "100 bytes free" in event.failure.message


def test_a_slot_that_failed_can_be_prepared_later(
    runner: ActionRunner, posted: Posted, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.run(prepare())
    posted.wait_for(1)
    with monkeypatch.context() as patch:
        patch.setattr(region_files, "free_bytes", lambda directory: 100)
        runner.run(prepare(byte_capacity=1 << 20))
        posted.wait_for(2)
    runner.run(prepare(byte_capacity=1 << 20))
    events = posted.wait_for(3)
    assert [type(event) for event in events] == [RegionPrepared, RegionFailed, RegionPrepared]


def test_an_archive_of_an_unknown_form_fails_the_region(
    runner: ActionRunner, posted: Posted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "save", lambda tensor, sink: sink.write(b"something else"))
    runner.run(prepare(items=(tensor_item("w", (991,)),)))
    [event] = posted.wait_for(1)
    assert isinstance(event, RegionFailed)
    assert event.failure.kind == "FrameError"


def test_a_file_that_cannot_be_trusted_fails_the_region(runner: ActionRunner, posted: Posted, regions: Path) -> None:
    region_path(regions, 0, 0).touch(mode=0o644)
    os.chmod(region_path(regions, 0, 0), 0o644)
    runner.run(prepare())
    [event] = posted.wait_for(1)
    assert isinstance(event, RegionFailed)
    assert event.failure.kind == "RegionError"


# ---------------------------------------------------------------- shards


def test_a_shard_is_started_and_then_durable(runner: ActionRunner, posted: Posted, checkpoints: Path) -> None:
    order = staged(runner, posted, checkpoints)
    runner.run(order)
    events = posted.wait_for(2)
    nbytes = (checkpoints / "step-5" / "__0_0a1b2c3d-0.distcp").stat().st_size
    save = order.submit.save
    assert events == [ShardStarted(0, save), ShardDurable(0, save, nbytes)]
    assert files_in(checkpoints) == ["__0_0a1b2c3d-0.distcp", "__0_0a1b2c3d-0.manifest"]
    assert runner.progress == {}


def test_progress_is_there_from_the_moment_the_job_is_queued(
    runner: ActionRunner, posted: Posted, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = staged(runner, posted, checkpoints)
    go_on = threading.Event()
    real = DataFile.finish

    def finish(self: DataFile) -> None:
        assert go_on.wait(PATIENCE_S)
        real(self)

    monkeypatch.setattr(DataFile, "finish", finish)
    runner.run(order)
    posted.wait_for(1)
    assert list(runner.progress) == [(0, order.submit.save)]
    go_on.set()
    posted.wait_for(2)
    assert runner.progress == {}


def test_a_shard_has_not_stood_still_while_it_waited_for_a_writer(
    runner: ActionRunner, posted: Posted, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health calls a write stuck by the time since its bytes moved."""
    order = staged(runner, posted, checkpoints)
    queued, go_on = threading.Event(), threading.Event()
    seen: list[float] = []
    real_create, real_post = shard_writer._create, runner._post

    def post(event: Event) -> None:
        assert queued.wait(PATIENCE_S)
        real_post(event)

    def create(path: Path, nbytes: int) -> DataFile:
        seen.append(runner.progress[0, order.submit.save].moved_s)
        go_on.set()
        return real_create(path, nbytes)

    monkeypatch.setattr(shard_writer, "_create", create)
    runner._post = post
    runner.run(order)
    runner.progress[0, order.submit.save].moved_s = long_ago = -1e9  # as if it had been queued all the time
    queued.set()
    assert go_on.wait(PATIENCE_S)
    assert seen[0] > long_ago
    posted.wait_for(2)


def test_a_shard_that_cannot_be_written_is_broken(
    runner: ActionRunner, posted: Posted, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = staged(runner, posted, checkpoints)

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    runner.run(order)
    started, broken = posted.wait_for(2)
    assert started == ShardStarted(0, order.submit.save)
    assert isinstance(broken, ShardBroken)
    assert (broken.rank, broken.save, broken.failure.kind) == (0, order.submit.save, "StorageError")
    assert "no room for" in broken.failure.message
    assert runner.progress == {}


def test_a_region_that_is_not_there_breaks_the_shard(runner: ActionRunner, posted: Posted, checkpoints: Path) -> None:
    order = write_order(checkpoints, ITEMS, LENGTHS)
    runner.run(order)
    events = posted.wait_for(2)
    assert [type(event) for event in events] == [ShardStarted, ShardBroken]
    assert runner.progress == {}


def test_a_cancelled_shard_is_broken(
    runner: ActionRunner, posted: Posted, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = staged(runner, posted, checkpoints)
    cancelled = threading.Event()
    real = shard_writer._create

    def create(path: Path, nbytes: int) -> DataFile:
        assert cancelled.wait(PATIENCE_S)
        return real(path, nbytes)

    monkeypatch.setattr(shard_writer, "_create", create)
    runner.run(order)
    runner.run(CancelShard(0, order.submit.save))
    cancelled.set()
    events = posted.wait_for(2)
    assert isinstance(events[1], ShardBroken)
    assert events[1].failure.kind == "ShardCancelled"
    assert "__0_0a1b2c3d-0.manifest" not in files_in(checkpoints)


def test_cancelling_what_has_ended_does_nothing(runner: ActionRunner, posted: Posted, checkpoints: Path) -> None:
    order = staged(runner, posted, checkpoints)
    runner.run(order)
    posted.wait_for(2)
    runner.run(CancelShard(0, order.submit.save))
    runner.run(CancelShard(7, save_key(99)))
    assert len(posted.events) == 2


# ---------------------------------------------------------------- storage


def test_a_directory_is_opened(runner: ActionRunner, posted: Posted, checkpoints: Path) -> None:
    (checkpoints / "step-3").mkdir(parents=True)
    (checkpoints / "step-3" / ".metadata").touch()
    runner.run(OpenDirectory(str(checkpoints)))
    assert posted.wait_for(1) == [DirectoryOpened(str(checkpoints), (3,))]


def test_a_directory_that_cannot_be_used_is_refused(runner: ActionRunner, posted: Posted, checkpoints: Path) -> None:
    checkpoints.touch()
    runner.run(OpenDirectory(str(checkpoints)))
    [event] = posted.wait_for(1)
    assert isinstance(event, DirectoryRefused)
    assert (event.directory, event.failure.kind) == (str(checkpoints), "StorageError")


def publish(checkpoints: Path) -> Publish:
    return Publish(save_key(), str(checkpoints), 1, PLAN_ID, (2,), False)


def test_an_attempt_is_published(runner: ActionRunner, posted: Posted, checkpoints: Path) -> None:
    runner.run(staged(runner, posted, checkpoints))
    posted.wait_for(2)
    runner.run(publish(checkpoints))
    assert posted.wait_for(3)[2] == Published(save_key())
    assert ".metadata" in files_in(checkpoints)


def test_an_attempt_that_is_not_complete_is_not_published(
    runner: ActionRunner, posted: Posted, checkpoints: Path
) -> None:
    runner.run(publish(checkpoints))
    [event] = posted.wait_for(1)
    assert isinstance(event, PublishFailed)
    assert (event.save, event.failure.kind) == (save_key(), "IncompleteCheckpoint")


def test_files_are_removed_and_the_empty_directory_too(runner: ActionRunner, posted: Posted, checkpoints: Path) -> None:
    runner.run(staged(runner, posted, checkpoints))
    posted.wait_for(2)
    runner.run(RemoveShardFiles(0, save_key(), str(checkpoints)))
    runner.run(OpenDirectory(str(checkpoints)))  # on the same thread: it comes after the removal
    posted.wait_for(3)
    assert list(checkpoints.iterdir()) == []


def test_data_files_stay_if_the_commit_appears_while_they_are_removed(
    runner: ActionRunner,
    posted: Posted,
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner.run(staged(runner, posted, checkpoints))
    posted.wait_for(2)

    def publish_meanwhile(paths: list[Path]) -> None:
        remove_files(paths)
        (checkpoints / "step-5" / METADATA_NAME).write_bytes(save_key().save_id.encode())

    monkeypatch.setattr("ckpt_sidecar.storage_work.remove_files", publish_meanwhile)
    runner.run(RemoveShardFiles(0, save_key(), str(checkpoints)))
    runner.run(FindCommit(0, save_key(), str(checkpoints)))  # on the same thread: it comes after the removal
    posted.wait_for(3)
    assert files_in(checkpoints) == [METADATA_NAME, data_file_name(0, save_key().save_id)]
    assert "its files stay" in caplog.text


def test_other_files_and_their_directory_stay(runner: ActionRunner, posted: Posted, checkpoints: Path) -> None:
    (checkpoints / "step-5").mkdir(parents=True)
    for name in ("__0_0a1b2c3d-0.distcp", "__1_0a1b2c3d-0.distcp", "__0_0a1b2c3d-1.distcp"):
        (checkpoints / "step-5" / name).touch()
    runner.run(RemoveShardFiles(0, save_key(), str(checkpoints)))
    runner.run(OpenDirectory(str(checkpoints)))
    posted.wait_for(1)
    assert files_in(checkpoints) == ["__0_0a1b2c3d-1.distcp", "__1_0a1b2c3d-0.distcp"]


def test_files_that_cannot_be_removed_are_said_and_nothing_else_happens(
    runner: ActionRunner,
    posted: Posted,
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoints.mkdir()

    def refuse(paths: list[Path]) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr("ckpt_sidecar.storage_work.remove_files", refuse)
    runner.run(RemoveShardFiles(0, save_key(), str(checkpoints)))
    runner.run(OpenDirectory(str(checkpoints)))
    assert posted.wait_for(1) == [DirectoryOpened(str(checkpoints), ())]
    assert "removing what is left of step 5" in caplog.text


# ---------------------------------------------------------------- withdrawing


def test_what_is_withdrawn_is_never_found_complete(runner: ActionRunner, posted: Posted, checkpoints: Path) -> None:
    runner.run(staged(runner, posted, checkpoints))
    posted.wait_for(2)
    runner.run(Withdraw(save_key(), str(checkpoints)))
    assert posted.wait_for(3)[2] == Withdrawn(save_key())
    assert files_in(checkpoints) == ["__0_0a1b2c3d-0.distcp"]
    runner.run(OpenDirectory(str(checkpoints)))
    assert posted.wait_for(4)[3] == DirectoryOpened(str(checkpoints), ())
    runner.run(Withdraw(save_key(), str(checkpoints)))
    assert posted.wait_for(5)[4] == Withdrawn(save_key())


def test_what_is_published_is_not_withdrawn(runner: ActionRunner, posted: Posted, checkpoints: Path) -> None:
    runner.run(staged(runner, posted, checkpoints))
    posted.wait_for(2)
    runner.run(Publish(save_key(), str(checkpoints), 1, PLAN_ID, (), overwrite=False))
    posted.wait_for(3)
    before = files_in(checkpoints)
    runner.run(Withdraw(save_key(), str(checkpoints)))
    assert posted.wait_for(4)[3] == Withdrawn(save_key(), published=True)
    assert files_in(checkpoints) == before


def test_what_cannot_be_withdrawn_is_said(
    runner: ActionRunner, posted: Posted, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(paths: list[Path]) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr("ckpt_sidecar.storage_work.remove_files", refuse)
    runner.run(Withdraw(save_key(), str(checkpoints)))
    (failed,) = posted.wait_for(1)
    assert isinstance(failed, WithdrawFailed)
    assert failed.may_pass
    assert "broken" in failed.failure.message


# ---------------------------------------------------------------- the runner itself


def test_torch_is_imported_before_the_first_region(runner: ActionRunner, posted: Posted) -> None:
    runner.run(prepare())
    posted.wait_for(1)
    assert runner.torch_ready


def test_an_action_that_nobody_runs_is_a_bug(runner: ActionRunner) -> None:
    action: Action = ToRank(0, SubmitShard(save_key(), 0, PLAN_ID, 0, 1, ()))
    with pytest.raises(AssertionError, match="nobody runs"):
        runner.run(action)


def test_a_bug_in_a_worker_is_said(
    runner: ActionRunner, posted: Posted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stopped = threading.Event()

    def stop(*args: object) -> None:
        stopped.set()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch_work, "prepare_region", stop)
        runner.run(prepare())
        assert stopped.wait(PATIENCE_S)
    runner.run(prepare(slot=1))  # on the same thread: it comes after the report
    posted.wait_for(1)
    assert "this is a bug" in caplog.text


def test_close_joins_its_threads_and_lets_go_of_the_regions(regions: Path, posted: Posted, checkpoints: Path) -> None:
    before = set(threading.enumerate())
    runner = ActionRunner(regions, 2, Throttle(None), posted)
    runner.start()
    runner.run(staged(runner, posted, checkpoints))
    posted.wait_for(2)
    names = {thread.name.rpartition("_")[0] for thread in set(threading.enumerate()) - before}
    assert {"ckpt-layout", "ckpt-write", "ckpt-io"} <= names <= {"ckpt-layout", "ckpt-write", "ckpt-io", "ckpt-commit"}
    runner.close()
    assert set(threading.enumerate()) == before
    maps = Path("/proc/self/maps").read_text()
    assert str(regions) not in maps


def test_close_stops_the_shard_being_written(
    regions: Path, posted: Posted, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Throttle):
        """Would take an hour per window."""

        def delay_s(self, nbytes: int) -> float:
            return 3600.0

    runner = ActionRunner(regions, 1, Slow(None), posted)
    runner.start()
    order = staged(runner, posted, checkpoints)
    runner.run(order)
    posted.wait_for(1)
    runner.run(write_order(checkpoints, ITEMS, LENGTHS, save=save_key(seq=1)))  # queued behind it: dropped
    runner.close()
    assert [type(event) for event in posted.events] == [ShardStarted, ShardBroken]
    assert not any(name.endswith(".manifest") for name in files_in(checkpoints))
