"""The shard writer: a sealed region becomes a durable data file and then its manifest, or an error and no manifest."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ckpt_proto.codec import decode
from ckpt_proto.errors import CheckpointError, StorageError
from ckpt_proto.plan_items import Plan
from ckpt_proto.shard_manifest import StoredManifest
from ckpt_sidecar import durable_fs, shard_writer
from ckpt_sidecar.data_file import DataFile
from ckpt_sidecar.dcp_layout import ShardLayout, lay_out
from ckpt_sidecar.progress import Progress
from ckpt_sidecar.shard_writer import WINDOWS_IN_FLIGHT, ShardCancelled, ShardWriter
from ckpt_sidecar.throttle import Throttle
from testkit.plans import bytes_item, fill_at_random, persist_attempt, region_of, tensor_item, write_order

ITEMS: Plan = (
    tensor_item("w", (40, 100)),
    bytes_item("step"),
    tensor_item("b", (300,), "bfloat16"),
    bytes_item("name"),
)
CONTENTS = [b"s" * 700, b"n" * 3000]
LENGTHS = (700, 3000)
WINDOW = 8192
NAME = "__0_0a1b2c3d-0"


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_writer, "WINDOW_BYTES", WINDOW)


@pytest.fixture
def io() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture
def region() -> Iterator[tuple[ShardLayout, mmap.mmap]]:
    layout = lay_out(ITEMS)
    with region_of(layout, sum(LENGTHS)) as mapping:
        fill_at_random(layout, mapping, CONTENTS)
        yield layout, mapping


class FakeClock:
    """Goes on by one at each look."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def write(
    tmp_path: Path, region: tuple[ShardLayout, mmap.mmap], io: Executor, throttle: Throttle | None = None
) -> tuple[int, Progress]:
    progress = Progress()
    writer = ShardWriter(io, throttle or Throttle(None), FakeClock())
    return writer.write(write_order(tmp_path, ITEMS, LENGTHS, overwrite=True), *region, progress), progress


def manifests_in(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "step-5").glob("*manifest*"))


# ---------------------------------------------------------------- a whole region


def test_the_file_is_the_region(tmp_path: Path, region: tuple[ShardLayout, mmap.mmap], io: Executor) -> None:
    layout, mapping = region
    nbytes, _ = write(tmp_path, region, io)
    assert nbytes == layout.file_bytes(LENGTHS)
    assert nbytes > 2 * WINDOW
    assert (tmp_path / "step-5" / f"{NAME}.distcp").read_bytes() == mapping[:nbytes]
    assert sorted(path.name for path in (tmp_path / "step-5").iterdir()) == [f"{NAME}.distcp", f"{NAME}.manifest"]


def test_the_manifest_says_what_lies_where(tmp_path: Path, region: tuple[ShardLayout, mmap.mmap], io: Executor) -> None:
    layout, _ = region
    nbytes, _ = write(tmp_path, region, io)
    manifest = decode((tmp_path / "step-5" / f"{NAME}.manifest").read_bytes())
    assert isinstance(manifest, StoredManifest)
    order = write_order(tmp_path, ITEMS, LENGTHS, overwrite=True)
    assert (manifest.save, manifest.rank, manifest.world_size) == (order.submit.save, 0, 1)
    assert (manifest.plan_id, manifest.overwrite) == (order.submit.plan_id, True)
    assert (manifest.file_name, manifest.file_bytes) == (f"{NAME}.distcp", nbytes)
    assert manifest.torch_version == torch.__version__

    content = (tmp_path / "step-5" / f"{NAME}.distcp").read_bytes()
    assert tuple(entry.item for entry in manifest.whole().entries) == ITEMS
    tensors = [entry for entry in manifest.whole().entries if entry.item.is_framed]
    values = [entry for entry in manifest.whole().entries if not entry.item.is_framed]
    for framed, entry in zip(layout.framed, tensors, strict=True):
        (tmp_path / "one").write_bytes(content[entry.offset_bytes : entry.offset_bytes + entry.length_bytes])
        loaded = torch.load(tmp_path / "one", weights_only=True)
        payload = content[framed.payload_offset : framed.payload_end]
        assert bytes(loaded.untyped_storage()) == payload
        assert entry.crc32 == zlib.crc32(payload)
    for expected, entry in zip(CONTENTS, values, strict=True):
        assert content[entry.offset_bytes : entry.offset_bytes + entry.length_bytes] == expected
        assert entry.crc32 == zlib.crc32(expected)
    assert values[-1].offset_bytes + values[-1].length_bytes == nbytes


def test_a_plan_of_nothing_has_an_empty_file_and_a_manifest(tmp_path: Path, io: Executor) -> None:
    with region_of(lay_out(())) as mapping:
        nbytes = ShardWriter(io, Throttle(None), FakeClock()).write(
            write_order(tmp_path, ()), lay_out(()), mapping, Progress()
        )
    assert nbytes == 0
    assert (tmp_path / "step-5" / f"{NAME}.distcp").stat().st_size == 0
    assert len(manifests_in(tmp_path)) == 1


def test_progress_follows_the_windows_that_have_landed(
    tmp_path: Path, region: tuple[ShardLayout, mmap.mmap], io: Executor
) -> None:
    nbytes, progress = write(tmp_path, region, io)
    assert (progress.total_bytes, progress.written_bytes) == (nbytes, nbytes)
    assert progress.moved_s == 100.0 + -(-nbytes // WINDOW)


class Recorder(ThreadPoolExecutor):
    """Counts the windows that have been begun and not been waited for."""

    def __init__(self) -> None:
        super().__init__(4)
        self.futures: list[Future[object]] = []

    def submit(self, *args: object, **options: object) -> Future[object]:  # type: ignore[override]
        future = super().submit(*args, **options)  # type: ignore[arg-type]
        self.futures.append(future)
        return future


def test_few_windows_are_in_flight(
    tmp_path: Path, region: tuple[ShardLayout, mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window's CRCs are final when it is handed over, and at most two are under way."""
    with Recorder() as io:
        begun = []

        class CountingThrottle(Throttle):
            def delay_s(self, nbytes: int) -> float:
                begun.append(sum(not future.done() for future in io.futures))
                return super().delay_s(nbytes)

        write(tmp_path, region, io, CountingThrottle(None))
    assert len(begun) == len(io.futures) == -(-region[0].file_bytes(LENGTHS) // WINDOW)
    assert max(begun) < WINDOWS_IN_FLIGHT


class Inline(Executor):
    """Writes each window at the moment it is handed over."""

    def submit(self, call: Callable[..., object], *args: object) -> Future[object]:  # type: ignore[override]
        future: Future[object] = Future()
        future.set_result(call(*args))
        return future


def test_a_window_is_final_when_it_is_handed_over(tmp_path: Path, region: tuple[ShardLayout, mmap.mmap]) -> None:
    """CRCs that were put into the region afterwards would be missing in the file."""
    nbytes, _ = write(tmp_path, region, Inline())
    assert (tmp_path / "step-5" / f"{NAME}.distcp").read_bytes() == region[1][:nbytes]


def test_the_data_is_durable_before_the_manifest_has_a_name(
    tmp_path: Path, region: tuple[ShardLayout, mmap.mmap], io: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{fd}")).suffix or "directory")
        real_fsync(fd)

    def replace(source: Path, target: Path) -> None:
        order.append(f"named {Path(target).suffix}")
        real_replace(source, target)

    (tmp_path / "step-5").mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write(tmp_path, region, io)
    assert order == [".distcp", "directory", ".tmp", "named .manifest", "directory"]


# ---------------------------------------------------------------- cancelled


def test_a_cancelled_shard_is_not_begun(tmp_path: Path, region: tuple[ShardLayout, mmap.mmap], io: Executor) -> None:
    progress = Progress()
    progress.cancelled.set()
    with pytest.raises(ShardCancelled, match=f"stopped at 0 of {region[0].file_bytes(LENGTHS)} bytes"):
        ShardWriter(io, Throttle(None), FakeClock()).write(write_order(tmp_path, ITEMS, LENGTHS), *region, progress)
    assert manifests_in(tmp_path) == []
    assert progress.written_bytes == 0


class CancelsAt(Throttle):
    """Sets the event when so many windows have been asked for."""

    def __init__(self, progress: Progress, windows: int) -> None:
        super().__init__(None)
        self._progress, self._left = progress, windows

    def delay_s(self, nbytes: int) -> float:
        if self._left == 0:
            self._progress.cancelled.set()
        self._left -= 1
        return 3600.0 if self._progress.cancelled.is_set() else 0.0


def test_a_shard_is_cancelled_between_windows_and_does_not_sit_out_the_throttle(
    tmp_path: Path, region: tuple[ShardLayout, mmap.mmap], io: Executor
) -> None:
    progress = Progress()
    writer = ShardWriter(io, CancelsAt(progress, 2), FakeClock())
    with pytest.raises(ShardCancelled, match=f"stopped at {2 * WINDOW} of"):
        writer.write(write_order(tmp_path, ITEMS, LENGTHS), *region, progress)
    assert manifests_in(tmp_path) == []
    region[1].close()  # nothing holds the region any more


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("bad_window", [0, 1, 2])
def test_an_error_in_an_io_thread_surfaces(
    tmp_path: Path,
    region: tuple[ShardLayout, mmap.mmap],
    io: Executor,
    monkeypatch: pytest.MonkeyPatch,
    bad_window: int,
) -> None:
    real = DataFile.write_at

    def write_at(self: DataFile, view: memoryview, offset: int) -> None:
        if offset == bad_window * WINDOW:
            raise StorageError(f"no luck at {offset}")
        real(self, view, offset)

    monkeypatch.setattr(DataFile, "write_at", write_at)
    with pytest.raises(StorageError, match=f"no luck at {bad_window * WINDOW}"):
        write(tmp_path, region, io)
    assert manifests_in(tmp_path) == []
    region[1].close()


class Awaited(Future[object]):
    """Lets its window go on only when somebody waits for it after another has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for = threading.Event()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.waited_for.set()
        return super().exception(timeout)


class OneThreadEach(Executor):
    """A thread for each window and a future that knows who waits for it."""

    def __init__(self) -> None:
        self.futures: list[Awaited] = []
        self.threads: list[threading.Thread] = []

    def submit(self, call: Callable[..., object], *args: object) -> Future[object]:  # type: ignore[override]
        future = Awaited()

        def run() -> None:
            try:
                future.set_result(call(*args))
            except StorageError as error:
                future.set_exception(error)

        self.futures.append(future)
        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()
        return future


def test_windows_in_flight_are_waited_for_before_an_error_is_told(
    tmp_path: Path, region: tuple[ShardLayout, mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is closed and the region given back after it: nobody may still be writing."""
    io = OneThreadEach()
    real = DataFile.write_at

    def write_at(self: DataFile, view: memoryview, offset: int) -> None:
        if offset == 0:
            raise StorageError("no luck at 0")
        assert io.futures[offset // WINDOW].waited_for.wait(30)
        real(self, view, offset)

    monkeypatch.setattr(DataFile, "write_at", write_at)
    with pytest.raises(StorageError, match="no luck at 0"):
        write(tmp_path, region, io)
    assert len(io.futures) == WINDOWS_IN_FLIGHT
    assert all(future.done() for future in io.futures)
    for thread in io.threads:
        thread.join()


@pytest.mark.parametrize("call", ["fsync", "ftruncate", "posix_fallocate"])
def test_a_data_file_that_is_not_durable_gets_no_manifest(
    tmp_path: Path,
    region: tuple[ShardLayout, mmap.mmap],
    io: Executor,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    (tmp_path / "step-5").mkdir()

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "no luck")

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="no luck"):
        patch.setattr(os, call, fail)
        write(tmp_path, region, io)
    assert manifests_in(tmp_path) == []


def test_a_manifest_that_cannot_be_written_is_an_error(
    tmp_path: Path, region: tuple[ShardLayout, mmap.mmap], io: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, target: Path) -> None:
        raise OSError(errno.EROFS, "read-only by now")

    monkeypatch.setattr(durable_fs.os, "replace", fail)
    with pytest.raises((OSError, StorageError), match="read-only by now"):
        write(tmp_path, region, io)
    assert manifests_in(tmp_path) == []


def test_a_directory_that_another_attempts_clean_up_removes_is_made_again(
    tmp_path: Path, region: tuple[ShardLayout, mmap.mmap], io: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = shard_writer.make_dirs, []

    def make_dirs_and_lose(path: Path) -> None:
        real(path)
        if not removed:
            path.rmdir()
            removed.append(path)

    monkeypatch.setattr(shard_writer, "make_dirs", make_dirs_and_lose)
    nbytes, _ = write(tmp_path, region, io)
    assert removed
    assert (tmp_path / "step-5" / f"{NAME}.distcp").stat().st_size == nbytes


def test_a_directory_that_cannot_be_made_is_an_error(
    tmp_path: Path, region: tuple[ShardLayout, mmap.mmap], io: Executor
) -> None:
    (tmp_path / "step-5").write_bytes(b"a file")
    with pytest.raises((OSError, StorageError)):
        write(tmp_path, region, io)


def test_a_region_shorter_than_the_file_is_refused(tmp_path: Path, io: Executor) -> None:
    """A slice of memory beyond its end is cut without a word: the file would end in zeros."""
    layout = lay_out(ITEMS)
    with region_of(layout) as mapping:
        order = write_order(tmp_path, ITEMS, (700, len(mapping)))
        with pytest.raises((CheckpointError, ValueError)):
            ShardWriter(io, Throttle(None), FakeClock()).write(order, layout, mapping, Progress())
    assert manifests_in(tmp_path) == []


def test_several_ranks_write_side_by_side(tmp_path: Path) -> None:
    persist_attempt(tmp_path, [{"a": torch.ones(3), "rank": rank} for rank in range(3)])
    names = sorted(path.name for path in (tmp_path / "step-5").iterdir())
    assert names == sorted(f"__{rank}_0a1b2c3d-0.{kind}" for rank in range(3) for kind in ("distcp", "manifest"))
