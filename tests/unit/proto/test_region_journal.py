"""The journal beside a region: written whole or not at all, and never trusted when it is read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from ckpt_proto.codec import encode
from ckpt_proto.errors import NotEnoughSharedMemory, RegionError
from ckpt_proto.messages import Heartbeat
from ckpt_proto.region import region_path, seal_path
from ckpt_proto.region_journal import journal_path, read_journal, remove_journal, write_journal
from testkit.regions_found import journal
from testkit.tables import key


@pytest.fixture
def region(tmp_path: Path) -> Path:
    return region_path(tmp_path, 0, 1)


def names(region: Path) -> list[str]:
    return sorted(path.name for path in region.parent.iterdir())


def test_what_was_written_is_read(region: Path) -> None:
    content = journal(slot=1, directory=region.parent, other_namespace=True)
    write_journal(region, content)
    assert read_journal(region) == content
    assert names(region) == ["rank-0.slot-1.journal"]


def test_it_lies_beside_the_region_and_is_private(region: Path) -> None:
    before = os.umask(0)
    try:
        write_journal(region, journal())
    finally:
        os.umask(before)
    path = journal_path(region)
    assert path.parent == region.parent
    assert len({path, region, seal_path(region)}) == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_later_one_replaces_it(region: Path) -> None:
    write_journal(region, journal())
    write_journal(region, journal(planned_by=key(4)))
    assert read_journal(region) == journal(planned_by=key(4))


def test_a_region_without_one_has_none(region: Path) -> None:
    assert read_journal(region) is None
    write_journal(region, journal())
    remove_journal(region)
    assert read_journal(region) is None
    remove_journal(region)  # there is none to remove


@pytest.mark.parametrize("kept", [0, 1, 10, -1])
def test_a_torn_one_is_no_journal(region: Path, kept: int) -> None:
    write_journal(region, journal())
    path = journal_path(region)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(RegionError, match=f"{path} is no journal"):
        read_journal(region)


def test_another_message_is_no_journal(region: Path) -> None:
    journal_path(region).write_bytes(encode(Heartbeat()))
    with pytest.raises(RegionError, match="is a Heartbeat, no journal"):
        read_journal(region)


def test_a_link_is_not_followed(region: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_journal(elsewhere / region.name, journal())
    journal_path(region).symlink_to(journal_path(elsewhere / region.name))
    with pytest.raises(RegionError, match="cannot open the journal"):
        read_journal(region)


def test_nothing_is_written_through_a_link(region: Path, tmp_path: Path) -> None:
    target = tmp_path / "somebody-elses"
    target.write_bytes(b"precious")
    journal_path(region).with_suffix(".journal.tmp").symlink_to(target)
    with pytest.raises(RegionError, match="cannot write the journal"):
        write_journal(region, journal())
    assert target.read_bytes() == b"precious"
    assert read_journal(region) is None


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, NotEnoughSharedMemory), (errno.EIO, RegionError)])
def test_one_that_cannot_be_written_leaves_the_old_one_and_no_half(
    region: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    write_journal(region, journal())

    def refuse(fd: int, content: bytes) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        with pytest.raises(kind, match=r"cannot write the journal .*-1.journal of \d+ bytes") as raised:
            write_journal(region, journal(planned_by=key(4)))
    assert type(raised.value) is kind
    assert read_journal(region) == journal()
    assert names(region) == ["rank-0.slot-1.journal"]


def test_a_write_that_takes_only_a_part_is_continued(region: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, content: write(fd, content[:7]))
        write_journal(region, journal())
    assert read_journal(region) == journal()
