"""Regions and seals in a temporary directory: room, privacy, growth, and telling a whole region from a torn one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_proto import region
from ckpt_proto.errors import NotEnoughSharedMemory, RegionError
from ckpt_proto.region import PAGE_BYTES, Seal, attach, region_path, reserve, round_to_pages, seal_path
from testkit.protocol_values import REPEATABLE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return region_path(tmp_path, 3, 1)


@pytest.fixture
def seal(path: Path) -> Iterator[Seal]:
    opened = Seal(seal_path(path))
    yield opened
    opened.close()


def fill(path: Path, content: bytes) -> None:
    mapping = attach(path, len(content))
    mapping[:] = content
    mapping.close()


# ---------------------------------------------------------------- names and sizes


def test_every_rank_and_slot_has_its_own_region_with_its_seal_beside_it(tmp_path: Path, path: Path) -> None:
    paths = {region_path(tmp_path, rank, slot) for rank in range(12) for slot in range(8)}
    assert len(paths | {seal_path(each) for each in paths}) == 2 * 12 * 8
    assert seal_path(path) == tmp_path / "rank-3.slot-1.seal"


@pytest.mark.parametrize(("nbytes", "pages"), [(0, 1), (1, 1), (4096, 1), (4097, 2), (8192, 2)])
def test_sizes_are_rounded_up_to_whole_pages_and_at_least_one(nbytes: int, pages: int) -> None:
    assert round_to_pages(nbytes) == pages * PAGE_BYTES


# ---------------------------------------------------------------- reserve and attach


def test_a_reserved_region_is_private_whole_pages_long_and_allocated(path: Path) -> None:
    reserve(path, 5000)
    found = path.stat()
    assert (found.st_size, found.st_mode & 0o777) == (8192, 0o600)
    assert found.st_blocks * 512 >= 8192


def test_what_one_side_writes_the_other_sees(path: Path) -> None:
    reserve(path, PAGE_BYTES)
    trainer, sidecar = attach(path, PAGE_BYTES), attach(path, PAGE_BYTES)
    trainer[:5] = b"bytes"
    assert sidecar[:5] == b"bytes"
    trainer.close()
    sidecar.close()


def test_a_region_may_be_attached_in_part(path: Path) -> None:
    reserve(path, 3 * PAGE_BYTES)
    mapping = attach(path, PAGE_BYTES)
    assert len(mapping) == PAGE_BYTES
    mapping.close()


def test_growth_keeps_what_is_in_the_region_and_the_new_part_is_zero(path: Path) -> None:
    reserve(path, PAGE_BYTES)
    inode = path.stat().st_ino
    fill(path, b"a" * PAGE_BYTES)
    reserve(path, 3 * PAGE_BYTES)
    assert path.read_bytes() == b"a" * PAGE_BYTES + b"\0" * 2 * PAGE_BYTES
    assert path.stat().st_ino == inode


def test_a_mapping_from_before_the_growth_stays_valid(path: Path) -> None:
    reserve(path, PAGE_BYTES)
    old = attach(path, PAGE_BYTES)
    reserve(path, 2 * PAGE_BYTES)
    old[:3] = b"old"
    assert path.read_bytes()[:3] == b"old"
    old.close()


@pytest.mark.parametrize("nbytes", [0, 1, PAGE_BYTES, 2 * PAGE_BYTES])
def test_a_region_is_never_shrunk_and_keeps_its_content(path: Path, nbytes: int) -> None:
    reserve(path, 2 * PAGE_BYTES)
    fill(path, b"b" * 2 * PAGE_BYTES)
    reserve(path, nbytes)
    assert path.read_bytes() == b"b" * 2 * PAGE_BYTES


def test_a_missing_region_cannot_be_attached(path: Path) -> None:
    with pytest.raises(RegionError, match="cannot open region"):
        attach(path, PAGE_BYTES)


def test_a_region_that_is_too_small_cannot_be_attached_and_both_sizes_are_named(path: Path) -> None:
    reserve(path, PAGE_BYTES)
    with pytest.raises(RegionError, match="has 4096 bytes, 4097 are needed"):
        attach(path, PAGE_BYTES + 1)


# ---------------------------------------------------------------- room


def test_too_little_room_is_found_before_anything_is_made_and_both_numbers_are_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region, "free_bytes", lambda directory: 10_000)
    with pytest.raises(NotEnoughSharedMemory, match=r"10000 bytes free, .*needs 20480 more.*enlarge that file system"):
        reserve(path, 20_000)
    assert not path.exists()


def test_growing_needs_only_the_difference(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(path, 2 * PAGE_BYTES)
    monkeypatch.setattr(region, "free_bytes", lambda directory: PAGE_BYTES)
    reserve(path, 3 * PAGE_BYTES)
    with pytest.raises(NotEnoughSharedMemory, match="4096 bytes free, .*needs 8192 more"):
        reserve(path, 5 * PAGE_BYTES)
    assert path.stat().st_size == 3 * PAGE_BYTES


@pytest.mark.parametrize("had", [0, 1], ids=["new region", "existing region"])
def test_room_that_is_lost_in_a_race_leaves_the_region_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch, had: int
) -> None:
    if had:
        reserve(path, PAGE_BYTES)
        fill(path, b"c" * PAGE_BYTES)

    def full(fd: int, offset: int, nbytes: int) -> None:
        os.ftruncate(fd, offset + nbytes)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NotEnoughSharedMemory, match=r"bytes free, .*needs \d+ more"):
        reserve(path, 4 * PAGE_BYTES)
    assert path.exists() == bool(had)
    assert not had or path.read_bytes() == b"c" * PAGE_BYTES


def test_another_failure_to_reserve_is_told_with_its_cause(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(RegionError, match="cannot reserve 4096 bytes .*Input/output error") as raised:
        reserve(path, PAGE_BYTES)
    assert not isinstance(raised.value, NotEnoughSharedMemory)


# ---------------------------------------------------------------- privacy


def ways_to_open(path: Path) -> list[Callable[[], object]]:
    """Each way to open a region or seal, not run yet."""
    return [lambda: reserve(path, PAGE_BYTES), lambda: attach(path, PAGE_BYTES), lambda: Seal(path)]


@pytest.mark.parametrize("way", [0, 1, 2], ids=["reserve", "attach", "seal"])
@pytest.mark.parametrize("mode", [0o644, 0o620, 0o601])
def test_a_file_that_others_may_touch_is_refused(path: Path, mode: int, way: int) -> None:
    path.write_bytes(b"\0" * PAGE_BYTES)
    path.chmod(mode)
    with pytest.raises(RegionError, match=f"not a private file of user {os.geteuid()}.*mode 100{mode:o}"):
        ways_to_open(path)[way]()


@pytest.mark.parametrize("way", [0, 1, 2], ids=["reserve", "attach", "seal"])
def test_a_link_is_not_followed(path: Path, tmp_path: Path, way: int) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"p" * PAGE_BYTES)
    target.chmod(0o600)
    path.symlink_to(target)
    with pytest.raises(RegionError, match="cannot open region"):
        ways_to_open(path)[way]()
    assert target.read_bytes() == b"p" * PAGE_BYTES


@pytest.mark.parametrize("way", [0, 1, 2], ids=["reserve", "attach", "seal"])
@pytest.mark.parametrize("kind", ["directory", "fifo"])
def test_something_that_is_no_file_is_refused(path: Path, kind: str, way: int) -> None:
    if kind == "directory":
        path.mkdir(mode=0o700)
    else:
        os.mkfifo(path, 0o600)
    with pytest.raises(RegionError):
        ways_to_open(path)[way]()


def test_a_file_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(path, PAGE_BYTES)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(RegionError, match=f"of user {mine + 1}: owner {mine}"):
        attach(path, PAGE_BYTES)


# ---------------------------------------------------------------- seals


def test_a_new_seal_is_broken_and_private(seal: Seal, path: Path) -> None:
    assert seal.read() is None
    assert seal_path(path).stat().st_mode & 0o777 == 0o600


@REPEATABLE
@given(records=st.lists(st.binary(max_size=200), max_size=4))
def test_a_seal_holds_the_last_record_and_breaking_it_takes_it_back(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes]
) -> None:
    seal = Seal(tmp_path_factory.mktemp("seal") / "x.seal")
    for record in records:
        seal.set(record)
        assert seal.read() == record
        seal.clear()
        assert seal.read() is None
    seal.close()


def test_a_seal_is_seen_by_whoever_opens_it_later(seal: Seal, path: Path) -> None:
    seal.set(b"record")
    other = Seal(seal_path(path))
    assert other.read() == b"record"
    other.clear()
    assert seal.read() is None
    other.close()


def test_a_shorter_record_replaces_a_longer_one(seal: Seal) -> None:
    seal.set(b"a long record")
    seal.set(b"short")
    assert seal.read() == b"short"


def test_a_seal_that_is_cut_anywhere_counts_as_broken(seal: Seal, path: Path) -> None:
    seal.set(b"the record")
    whole = seal_path(path).read_bytes()
    for length in range(len(whole)):
        seal_path(path).write_bytes(whole[:length])
        assert seal.read() is None


def test_a_seal_with_any_bit_flipped_counts_as_broken(seal: Seal, path: Path) -> None:
    seal.set(b"the record")
    whole = seal_path(path).read_bytes()
    for position in range(len(whole) * 8):
        flipped = bytearray(whole)
        flipped[position // 8] ^= 1 << position % 8
        seal_path(path).write_bytes(flipped)
        assert seal.read() is None


def test_a_crash_between_record_and_header_counts_as_broken(
    seal: Seal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that dies inside ``set`` of its second save: the new record is there, the header is still the old one."""
    seal.set(b"first record")
    real, calls = os.pwrite, []

    def dying(fd: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", dying)
    with pytest.raises(KeyboardInterrupt):
        seal.set(b"other record")
    assert seal.read() is None


def test_a_header_that_promises_a_huge_record_counts_as_broken(seal: Seal, path: Path) -> None:
    seal_path(path).write_bytes(b"CKPTSEAL" + b"\xff" * 8)
    assert seal.read() is None
