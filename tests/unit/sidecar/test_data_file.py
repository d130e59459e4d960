"""A data file: direct or through the cache, the same bytes, the exact size, durable; every refusal has its numbers."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckpt_proto.errors import StorageError
from ckpt_proto.region import round_to_pages
from ckpt_sidecar.data_file import ALIGNMENT_BYTES, DataFile

SIZES = [0, 1, 4095, 4096, 4097, 3 * 4096 + 1234, (1 << 20) + 17]
WINDOW = 4 * ALIGNMENT_BYTES
PATIENCE_S = 30.0
real_open, real_pwrite = os.open, os.pwrite


def patch_pwrite(monkeypatch: pytest.MonkeyPatch, call: Callable[[int, memoryview, int], int]) -> None:
    """Like the real one, ``call`` must leave no frame in a traceback that holds the memory to be written."""

    def pwrite(fd: int, data: memoryview | None, offset: int) -> int:
        assert data is not None
        try:
            return call(fd, data, offset)
        except OSError as error:
            failure = error.with_traceback(None)
        data = None
        raise failure

    monkeypatch.setattr(os, "pwrite", pwrite)


def refuse_direct_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_without_direct(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", open_without_direct)


def refuse_direct_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that takes O_DIRECT at open and refuses it at the first write."""

    def pwrite_buffered_only(fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct write here")
        return real_pwrite(fd, data, offset)

    patch_pwrite(monkeypatch, pwrite_buffered_only)


MODES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "direct": lambda monkeypatch: None,
    "direct refused at open": refuse_direct_open,
    "direct refused at the first write": refuse_direct_write,
}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    MODES[request.param](monkeypatch)
    return str(request.param)


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    """Two MiB of page-aligned random bytes."""
    with mmap.mmap(-1, 2 << 20) as mapping:
        mapping[:] = random.Random(1).randbytes(len(mapping))
        yield mapping


def write_all(file: DataFile, memory: mmap.mmap, nbytes: int) -> None:
    """As the shard writer does: window by window, whole pages where the file is direct."""
    with memoryview(memory) as view:
        for start in range(0, nbytes, WINDOW):
            stop = min(start + WINDOW, nbytes)
            with view[start : round_to_pages(stop) if file.is_direct else stop] as window:
                file.write_at(window, start)


def write_file(path: Path, memory: mmap.mmap, nbytes: int) -> None:
    file = DataFile(path, nbytes)
    try:
        write_all(file, memory, nbytes)
        file.finish()
    finally:
        file.close()


@pytest.mark.parametrize("nbytes", SIZES)
def test_the_file_has_the_bytes_and_the_exact_size(tmp_path: Path, memory: mmap.mmap, mode: str, nbytes: int) -> None:
    write_file(tmp_path / "data", memory, nbytes)
    assert (tmp_path / "data").stat().st_size == nbytes
    assert (tmp_path / "data").read_bytes() == memory[:nbytes]


@pytest.mark.usefixtures("mode")
def test_what_the_file_held_before_is_gone(tmp_path: Path, memory: mmap.mmap) -> None:
    (tmp_path / "data").write_bytes(b"x" * 100_000)
    write_file(tmp_path / "data", memory, 5000)
    assert (tmp_path / "data").read_bytes() == memory[:5000]


def test_refusing_direct_io_at_open_means_buffered_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct_open(monkeypatch)
    file = DataFile(tmp_path / "data", 10)
    assert not file.is_direct
    file.close()


def test_refusing_direct_io_at_a_write_is_said_once(
    tmp_path: Path, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = DataFile(tmp_path / "data", 3 * WINDOW)
    file.is_direct = True  # also where /tmp refuses it
    patch_pwrite(monkeypatch, first_fails(OSError(errno.EINVAL, "refused"), os.pwrite))
    write_all(file, memory, 3 * WINDOW)
    assert not file.is_direct
    file.finish()
    file.close()
    assert [record.message for record in caplog.records] == [
        f"{tmp_path} refuses direct I/O ([Errno {errno.EINVAL}] refused): writing through the page cache"
    ]


def first_fails(error: OSError, then: Callable[..., int]) -> Callable[..., int]:
    left = [error]

    def call(*args: object) -> int:
        if left:
            raise left.pop()
        return then(*args)

    return call


def test_two_windows_may_be_refused_at_the_same_moment(
    tmp_path: Path, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are under way when the first finds out; the second finds out when the file is direct no more."""
    both, fallen_back = threading.Barrier(2), threading.Event()
    calls: list[int] = []

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if calls.count(offset) > 1:
            fallen_back.set()
            return real_pwrite(fd, data, offset)
        both.wait(PATIENCE_S)
        if offset:
            assert fallen_back.wait(PATIENCE_S)
        raise OSError(errno.EINVAL, "refused")

    file = DataFile(tmp_path / "data", 2 * WINDOW)
    file.is_direct = True
    patch_pwrite(monkeypatch, pwrite)
    with (
        memoryview(memory) as view,
        view[:WINDOW] as one,
        view[WINDOW : 2 * WINDOW] as two,
        ThreadPoolExecutor(2) as io,
    ):
        writes = [io.submit(file.write_at, one, 0), io.submit(file.write_at, two, WINDOW)]
        for write in writes:
            write.result(PATIENCE_S)
    file.finish()
    file.close()
    assert (tmp_path / "data").read_bytes() == memory[: 2 * WINDOW]


@pytest.mark.parametrize("piece", [ALIGNMENT_BYTES, 1000])
@pytest.mark.usefixtures("mode")
def test_short_writes_are_continued(
    tmp_path: Path, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """A piece that is no whole page ends direct I/O: the rest cannot be aligned any more."""
    write = os.pwrite
    patch_pwrite(monkeypatch, lambda fd, data, offset: write(fd, data[:piece], offset))
    write_file(tmp_path / "data", memory, 2 * WINDOW + 123)
    assert (tmp_path / "data").read_bytes() == memory[: 2 * WINDOW + 123]


# ---------------------------------------------------------------- refusals


def fails(code: int) -> Callable[..., int]:
    def call(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_is_found_before_the_first_byte_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fails(code))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=3, f_frsize=4096))
    path = tmp_path / "data"
    expected = f"no room for {path}: 123456 bytes needed, 12288 free ([Errno {code}]"
    with pytest.raises(StorageError, match=re.escape(expected)) as raised:
        DataFile(path, 123456)
    assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_cannot_preallocate_is_used_all_the_same(
    tmp_path: Path, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fails(code))
    write_file(tmp_path / "data", memory, 10_000)
    assert (tmp_path / "data").read_bytes() == memory[:10_000]


def test_the_whole_length_is_preallocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, nbytes: asked.append((offset, nbytes)))
    DataFile(tmp_path / "data", 123_457).close()
    DataFile(tmp_path / "empty", 0).close()
    assert asked == [(0, 123_457)]


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failing_write_says_where(
    tmp_path: Path, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = tmp_path / "data"
    file = DataFile(path, 2 * WINDOW)
    was_direct = file.is_direct
    with memoryview(memory) as view, view[WINDOW : 2 * WINDOW] as window:
        patch_pwrite(monkeypatch, fails(code))
        with pytest.raises(StorageError, match=re.escape(f"writing {path} at {WINDOW} failed: [Errno {code}]")):
            file.write_at(window, WINDOW)
    assert file.is_direct == was_direct
    file.close()


@pytest.mark.usefixtures("mode")
def test_a_write_that_is_refused_without_direct_io_too_is_an_error(
    tmp_path: Path, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = DataFile(tmp_path / "data", WINDOW)
    patch_pwrite(monkeypatch, fails(errno.EINVAL))
    with memoryview(memory) as view, view[:WINDOW] as window, pytest.raises(StorageError, match="at 0 failed"):
        file.write_at(window, 0)
    file.close()


def test_a_buffered_file_has_nothing_to_fall_back_to(
    tmp_path: Path, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_direct_open(monkeypatch)
    file, calls = DataFile(tmp_path / "data", WINDOW), []

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        raise OSError(errno.EINVAL, "refused")

    patch_pwrite(monkeypatch, pwrite)
    with memoryview(memory) as view, view[:WINDOW] as window, pytest.raises(StorageError, match="at 0 failed"):
        file.write_at(window, 0)
    file.close()
    assert calls == [0]
    assert caplog.records == []


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("call", ["ftruncate", "fsync", "fstat"])
def test_a_file_that_cannot_be_made_durable_is_an_error(
    tmp_path: Path, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "data"
    file = DataFile(path, 5000)
    write_all(file, memory, 5000)
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="durable failed") as raised:
        patch.setattr(os, call, fails(errno.EIO))
        file.finish()
    file.close()
    assert str(raised.value).startswith(f"making {path} durable failed: [Errno {errno.EIO}]")


def test_a_file_of_a_wrong_size_is_an_error(tmp_path: Path, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data"
    file = DataFile(path, 5000)
    write_all(file, memory, 5000)
    monkeypatch.setattr(os, "ftruncate", lambda fd, nbytes: os.truncate(path, 4999))
    with pytest.raises(StorageError, match=re.escape(f"{path} has 4999 bytes after fsync, expected 5000")):
        file.finish()
    file.close()


@pytest.mark.usefixtures("mode")
def test_it_is_cut_then_synced_and_the_whole_machine_is_not(
    tmp_path: Path, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def recorded(name: str) -> None:
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args: (calls.append(name), real(*args))[1])

    recorded("ftruncate")
    recorded("fsync")
    monkeypatch.setattr(os, "sync", lambda: calls.append("sync"))
    write_file(tmp_path / "data", memory, 5000)
    assert calls == ["ftruncate", "fsync"]


def test_a_file_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "data"
    with pytest.raises(StorageError, match=f"cannot create {path}") as raised:
        DataFile(path, 10)
    assert isinstance(raised.value.__cause__, FileNotFoundError)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "data").symlink_to(tmp_path / "target")
    with pytest.raises(StorageError, match="cannot create"):
        DataFile(tmp_path / "data", 10)
    assert (tmp_path / "target").read_bytes() == b"precious"


def test_an_error_of_open_other_than_no_direct_io_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        opened.append(flags)
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match="read-only"):
        DataFile(tmp_path / "data", 10)
    assert len(opened) == 1
