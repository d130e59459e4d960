"""Opening a checkpoint directory: made, tried and looked through; what cannot be used is refused with the reason."""

from __future__ import annotations

import errno
import os
import re
import time
from pathlib import Path

import pytest

from ckpt_proto.errors import StorageError
from ckpt_sidecar.checkpoint_dir import open_directory
from ckpt_sidecar.recovery import recover_directory


def commit(path: Path) -> None:
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(b"")


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_a_missing_directory_is_made_and_has_no_steps(tmp_path: Path) -> None:
    assert open_directory(str(tmp_path / "a" / "b")) == ()
    assert names(tmp_path / "a" / "b") == []


def test_committed_steps_are_found_in_numeric_order(tmp_path: Path) -> None:
    for step in (300, 20, 1000, 0):
        commit(tmp_path / f"step-{step}")
    assert open_directory(str(tmp_path)) == (0, 20, 300, 1000)


def test_what_is_not_a_committed_step_is_passed_over(tmp_path: Path) -> None:
    commit(tmp_path / "step-7")
    (tmp_path / "step-8").mkdir()  # begun, not committed
    (tmp_path / "step-8" / "__0_0a1b2c3d-0.distcp").write_bytes(b"")
    for name in ("step-07", "step-", "step--1", "epoch-1", "step-9.bak", "STEP-1"):
        commit(tmp_path / name)
    (tmp_path / "notes.txt").write_bytes(b"")
    before = names(tmp_path)
    assert open_directory(str(tmp_path)) == (7,)
    assert names(tmp_path) == before


def test_a_link_to_a_committed_step_counts(tmp_path: Path) -> None:
    commit(tmp_path / "elsewhere")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "step-5").symlink_to(tmp_path / "elsewhere")
    assert open_directory(str(tmp_path / "runs")) == (5,)


def test_a_file_is_no_checkpoint_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=re.escape(f"checkpoint directory {tmp_path / 'file'} cannot be used")):
        open_directory(str(tmp_path / "file"))


def test_a_checkpoint_is_no_checkpoint_directory(tmp_path: Path) -> None:
    commit(tmp_path / "step-5")
    with pytest.raises(StorageError, match=r"is itself a checkpoint .*the directory above"):
        open_directory(str(tmp_path / "step-5"))
    assert names(tmp_path / "step-5") == [".metadata"]


def test_a_file_with_the_name_of_a_step_is_refused(tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / f"other-{index}").mkdir()
    (tmp_path / "step-3").write_bytes(b"precious")
    with pytest.raises(StorageError, match=re.escape(f"{tmp_path / 'step-3'} is no directory")):
        open_directory(str(tmp_path))
    assert (tmp_path / "step-3").read_bytes() == b"precious"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.open

    def refuse(path: Path, flags: int, *args: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match=re.escape(os.strerror(code))):
        open_directory(str(tmp_path))
    assert names(tmp_path) == []


def test_a_full_directory_is_refused_and_the_probe_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageError, match="full"):
        open_directory(str(tmp_path))
    assert names(tmp_path) == []


def test_a_probe_that_a_recovery_has_taken_for_old_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def removed_meanwhile(fd: int, data: bytes) -> int:
        recover_directory(tmp_path, reap_older_than_s=0.0, now_s=time.time() + 1.0)
        return real(fd, data)

    monkeypatch.setattr(os, "write", removed_meanwhile)
    assert open_directory(str(tmp_path)) == ()
    assert names(tmp_path) == []


def test_a_directory_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(path: Path) -> None:
        raise OSError(errno.EIO, "no luck")

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="no luck"):
        patch.setattr(os, "scandir", unreadable)
        patch.setattr(os, "listdir", unreadable)
        open_directory(str(tmp_path))


def test_two_sidecars_with_the_same_pid_may_open_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In containers on two nodes both are pid 1."""
    real, probes = os.write, 0

    def open_another_meanwhile(fd: int, data: bytes) -> int:
        nonlocal probes
        probes += 1
        if probes == 1:
            assert open_directory(str(tmp_path)) == ()
        return real(fd, data)

    monkeypatch.setattr(os, "write", open_another_meanwhile)
    assert open_directory(str(tmp_path)) == ()
    assert probes == 2
    assert names(tmp_path) == []
