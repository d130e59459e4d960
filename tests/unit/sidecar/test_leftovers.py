"""What lies in a job's directory after a sidecar has died: what can be used is found, the rest is removed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_proto.codec import encode
from ckpt_proto.messages import Heartbeat, SubmitShard
from ckpt_proto.region import Seal, region_path, seal_path
from ckpt_proto.region_journal import RegionJournal, journal_path, write_journal
from ckpt_sidecar.events import FoundRegion
from ckpt_sidecar.leftovers import break_seal, find_regions, read_seal
from testkit.regions_found import REGION_BYTES, found, journal, sealed_in
from testkit.tables import hello, key

START_S = hello().process_start_s


def lay(directory: Path, of: RegionJournal, sealed: SubmitShard | None = None) -> Path:
    """A region with its journal and seal, as ``prepare_region`` and a rank leave them."""
    region = region_path(directory, of.owner.rank, of.ready.slot)
    region.write_bytes(b"\0" * REGION_BYTES)
    region.chmod(0o600)
    write_journal(region, of)
    set_seal(region, encode(sealed) if sealed is not None else None)
    return region


def set_seal(region: Path, record: bytes | None) -> None:
    seal = Seal(seal_path(region))
    try:
        seal.reserve(512)
        seal.clear()
        if record is not None:
            seal.set(record)
    finally:
        seal.close()


def living(*pids: int) -> Callable[[int], float | None]:
    """When these processes, and no others, were started."""
    return lambda pid: START_S if pid in pids else None


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# ---------------------------------------------------------------- seals


def test_a_seal_is_read(tmp_path: Path) -> None:
    of = journal()
    region = lay(tmp_path, of, sealed_in(of, key(3)))
    assert read_seal(region) == sealed_in(of, key(3))


def test_a_broken_seal_and_none_are_nothing(tmp_path: Path) -> None:
    region = lay(tmp_path, journal())
    assert read_seal(region) is None
    seal_path(region).unlink()
    assert read_seal(region) is None
    assert not seal_path(region).exists()  # looking has not made one


def test_a_seal_of_half_a_record_is_nothing(tmp_path: Path) -> None:
    of = journal()
    region = lay(tmp_path, of, sealed_in(of, key()))
    path = seal_path(region)
    os.truncate(path, 20)
    assert read_seal(region) is None


@pytest.mark.parametrize("record", [b"\xc1", b"", encode(Heartbeat())[:-1]], ids=["garbage", "empty", "torn"])
def test_a_seal_that_is_no_message_is_nothing_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, record: bytes
) -> None:
    region = lay(tmp_path, journal())
    set_seal(region, record)
    with caplog.at_level(logging.WARNING):
        assert read_seal(region) is None
    assert str(seal_path(region)) in caplog.text


def test_a_seal_with_another_message_is_nothing(tmp_path: Path) -> None:
    region = lay(tmp_path, journal())
    set_seal(region, encode(Heartbeat()))
    assert read_seal(region) is None


def test_a_seal_that_others_may_change_is_not_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    of = journal()
    region = lay(tmp_path, of, sealed_in(of, key()))
    seal_path(region).chmod(0o666)
    with caplog.at_level(logging.WARNING):
        assert read_seal(region) is None
    assert "is not a private file" in caplog.text


def test_a_seal_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    of = journal()
    region = lay(tmp_path, of, sealed_in(of, key()))
    path = seal_path(region)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert read_seal(region) is None


def test_breaking_a_seal_leaves_nothing_whole(tmp_path: Path) -> None:
    of = journal(rank=1, slot=1)
    region = lay(tmp_path, of, sealed_in(of, key()))
    break_seal(tmp_path, 1, 1)
    assert read_seal(region) is None
    break_seal(tmp_path, 1, 1)
    break_seal(tmp_path, 1, 0)  # there is none, and none is made
    assert not seal_path(region_path(tmp_path, 1, 0)).exists()


# ---------------------------------------------------------------- regions


def test_an_empty_directory_has_no_region(tmp_path: Path) -> None:
    assert find_regions(tmp_path) == ()


def test_regions_are_found_with_what_is_sealed_and_who_lives(tmp_path: Path) -> None:
    zero, one = journal(0, 0), journal(1, 1)
    lay(tmp_path, zero, sealed_in(zero, key(2)))
    lay(tmp_path, one)
    assert find_regions(tmp_path, living(1001)) == (found(zero, key(2), alive=False), found(one, alive=True))
    assert len(names(tmp_path)) == 6


def test_a_reused_pid_is_not_the_owner(tmp_path: Path) -> None:
    lay(tmp_path, journal())
    (region,) = find_regions(tmp_path, lambda pid: START_S + 1)
    assert not region.alive


def test_an_owner_in_another_pid_namespace_is_taken_to_live(tmp_path: Path) -> None:
    """Its pid says nothing here; its heartbeats will, or their absence."""
    lay(tmp_path, journal(other_namespace=True))
    (region,) = find_regions(tmp_path, living())
    assert region.alive


def test_this_process_is_found_to_live(tmp_path: Path) -> None:
    from ckpt_proto.process import process_start_s

    start_s = process_start_s(os.getpid())
    assert start_s is not None
    lay(tmp_path, journal(pid=os.getpid(), process_start_s=start_s))
    lay(tmp_path, journal(1, pid=os.getpid(), process_start_s=start_s + 100))
    assert [region.alive for region in find_regions(tmp_path)] == [True, False]


def test_files_that_are_not_ours_stay(tmp_path: Path) -> None:
    for name in ("sidecar.lock", "sidecar.sock", "sidecar.log", "notes"):
        (tmp_path / name).touch()
    assert find_regions(tmp_path) == ()
    assert names(tmp_path) == ["notes", "sidecar.lock", "sidecar.log", "sidecar.sock"]


def test_what_a_death_in_the_middle_has_left_is_removed(tmp_path: Path) -> None:
    of = journal()
    lay(tmp_path, of)
    (tmp_path / "rank-0.slot-0.journal.tmp").touch()
    (tmp_path / "rank-3.slot-0.seal").touch()
    (tmp_path / "rank-4.slot-0.journal").touch()
    assert len(find_regions(tmp_path, living(1000))) == 1
    assert names(tmp_path) == ["rank-0.slot-0.journal", "rank-0.slot-0.region", "rank-0.slot-0.seal"]


def no_journal(region: Path) -> None:
    journal_path(region).unlink()


def torn_journal(region: Path) -> None:
    path = journal_path(region)
    path.write_bytes(path.read_bytes()[:-5])


def linked_journal(region: Path) -> None:
    path = journal_path(region)
    path.rename(region.parent / "aside")
    path.symlink_to(region.parent / "aside")


def journal_of_another_slot(region: Path) -> None:
    write_journal(region, journal(slot=1, directory=region.parent))


def journal_of_another_rank(region: Path) -> None:
    write_journal(region, journal(rank=1, directory=region.parent))


def shorter_than_its_journal_says(region: Path) -> None:
    os.truncate(region, REGION_BYTES - 4096)


def linked_region(region: Path) -> None:
    region.unlink()
    region.symlink_to(region.parent / "nowhere")


BROKEN = [
    linked_region,
    no_journal,
    torn_journal,
    linked_journal,
    journal_of_another_slot,
    journal_of_another_rank,
    shorter_than_its_journal_says,
]


@pytest.mark.parametrize("spoil", BROKEN, ids=lambda spoil: spoil.__name__)
def test_a_region_that_nobody_can_use_is_removed_and_no_other(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    bad, good = journal(directory=tmp_path), journal(1, 1, directory=tmp_path)
    region = lay(tmp_path, bad, sealed_in(bad, key()))
    lay(tmp_path, good, sealed_in(good, key()))
    spoil(region)
    assert find_regions(tmp_path, living(1000, 1001)) == (found(good, key()),)
    left = [name for name in names(tmp_path) if name != "aside"]
    assert left == ["rank-1.slot-1.journal", "rank-1.slot-1.region", "rank-1.slot-1.seal"]


def test_a_region_that_is_larger_than_its_journal_says_is_good(tmp_path: Path) -> None:
    """It was made for a larger plan and keeps its pages."""
    region = lay(tmp_path, journal())
    os.truncate(region, 2 * REGION_BYTES)
    assert find_regions(tmp_path, living(1000)) == (FoundRegion(journal(), True, None),)


def test_looking_twice_finds_the_same(tmp_path: Path) -> None:
    of = journal()
    lay(tmp_path, of, sealed_in(of, key()))
    assert find_regions(tmp_path, living()) == find_regions(tmp_path, living())
