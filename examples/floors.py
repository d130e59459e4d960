"""What no save can beat on this machine: one warm copy of the bytes, and one raw durable write of them.

Figures of a virtual disk vary by a factor of two from minute to minute: measure the floor in the same
run as the thing compared with it, repeat, and quote ratios of medians.
"""

import errno
import mmap
import os
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

WRITE_BYTES = 32 << 20
"""Bytes per write call, one in flight: 8 MiB, or 2 or 4 in flight, were not faster (512 MB, medians of 7)."""


class RankFloor:
    """The floors of one rank's bytes: a touched `/dev/shm` mapping to copy into and to write from."""

    def __init__(self, tensors: Sequence[Tensor], directory: Path) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors)
        self._path = directory / f"floor-{uuid.uuid4().hex}.raw"
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            os.posix_fallocate(file.fileno(), 0, _page_up(self.nbytes))
            self._mapping = mmap.mmap(file.fileno(), _page_up(self.nbytes))
        self._places = self._lay_out()
        self.copy_s()

    def _lay_out(self) -> list[Tensor]:
        """A place of each tensor's own dtype: a copy of the same bytes as uint8 takes 1.3 times as long."""
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        parts = whole[: self.nbytes].split([tensor.nbytes for tensor in self._tensors])
        return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, self._tensors, strict=True)]

    def copy_s(self) -> float:
        """Seconds to copy the tensors, from private memory to the mapping."""
        start = time.perf_counter()
        for place, tensor in zip(self._places, self._tensors, strict=True):
            place.copy_(tensor)
        return time.perf_counter() - start

    def write_s(self) -> float:
        """Seconds until the mapping's bytes are durable in a new file: past the page cache, then fsync."""
        start = time.perf_counter()
        fd = _create_direct(self._path)
        try:
            self._write_all(fd)
            os.fsync(fd)
            return time.perf_counter() - start
        finally:
            os.close(fd)
            self._path.unlink()

    def read_s(self) -> float:
        """Seconds to read as many bytes from the disk into the mapping, past the page cache."""
        fd = _create_direct(self._path)
        try:
            self._write_all(fd)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        fd = _open_direct(self._path)
        try:
            start = time.perf_counter()
            with memoryview(self._mapping) as view:
                for offset in range(0, len(view), WRITE_BYTES):
                    with view[offset : offset + WRITE_BYTES] as part:
                        if os.preadv(fd, [part], offset) != len(part):
                            raise OSError("short read of the floor")
            return time.perf_counter() - start
        finally:
            os.close(fd)
            self._path.unlink()

    def _write_all(self, fd: int) -> None:
        os.posix_fallocate(fd, 0, len(self._mapping))
        with memoryview(self._mapping) as view:
            for offset in range(0, len(view), WRITE_BYTES):
                with view[offset : offset + WRITE_BYTES] as part:
                    written = os.pwrite(fd, part, offset)
                    if written != len(part):
                        raise OSError(f"short write of the floor: {written} of {len(part)} bytes")

    def close(self) -> None:
        """Give the mapping back; the object is of no use afterwards."""
        self._places = []
        self._mapping.close()


@dataclass(frozen=True)
class Floors:
    """Medians over the repeats, each of the slowest rank, in seconds."""

    copy_s: float
    write_s: float


def measure_floors(rank_nbytes: Sequence[int], directory: Path, repeats: int = 3) -> Floors:
    """Floors of ranks that copy, then write, at the same time: a thread stands for a rank.

    Threads will do, because copies and writes release the interpreter lock.
    """
    torch.set_num_threads(1)
    barrier = threading.Barrier(len(rank_nbytes), timeout=120)

    def measure(nbytes: int) -> list[tuple[float, float]]:
        with closing(RankFloor([torch.ones(nbytes // 4)], directory)) as floor:
            return [_together(barrier, floor) for _ in range(repeats)]

    with ThreadPoolExecutor(len(rank_nbytes)) as pool:
        repeats_by_rank = list(pool.map(measure, rank_nbytes))
    slowest = [tuple(map(max, zip(*ranks, strict=True))) for ranks in zip(*repeats_by_rank, strict=True)]
    copies, writes = zip(*slowest, strict=True)
    return Floors(statistics.median(copies), statistics.median(writes))


def _together(barrier: threading.Barrier, floor: RankFloor) -> tuple[float, float]:
    barrier.wait()
    copy_s = floor.copy_s()
    barrier.wait()
    return copy_s, floor.write_s()


def _create_direct(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)  # the kernel creates the file before the file system refuses O_DIRECT
    return os.open(path, flags, 0o600)


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, os.O_RDONLY)


def _page_up(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
