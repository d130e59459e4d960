"""The lock of a job: one holder, named to whoever comes second; a removed or merely looked-at file is nobody's lock."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_proto.errors import LocalProtocolError
from ckpt_proto.runtime_dir import lock_owner, lock_path, stand_in_runs
from ckpt_sidecar import job_lock
from ckpt_sidecar.job_lock import JobLock, JobLockTaken


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The job's directory; it does not exist yet."""
    return tmp_path / "user" / "job"


def test_the_holder_is_known_by_pid(directory: Path) -> None:
    lock = JobLock(directory)
    assert lock_owner(directory) == os.getpid()
    assert lock_path(directory).read_bytes() == f"{os.getpid()}\n".encode()
    lock.release()
    assert lock_owner(directory) is None


def test_directory_and_file_are_private(directory: Path) -> None:
    lock = JobLock(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(lock_path(directory).stat().st_mode) == 0o600
    lock.release()


def test_a_second_lock_is_refused_and_names_the_first(directory: Path) -> None:
    first = JobLock(directory)
    with pytest.raises(JobLockTaken, match=rf"\(pid {os.getpid()}\) already serves job job .*{lock_path(directory)}"):
        JobLock(directory)
    assert lock_owner(directory) == os.getpid()
    first.release()
    JobLock(directory).release()


def test_a_holder_that_has_not_written_its_pid_yet_is_a_holder(directory: Path) -> None:
    JobLock(directory).release()
    fd = os.open(lock_path(directory), os.O_RDWR)
    os.ftruncate(fd, 0)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(JobLockTaken, match="pid unknown"):
        JobLock(directory)
    os.close(fd)


def test_a_shorter_pid_replaces_a_longer_one(directory: Path) -> None:
    JobLock(directory).release()
    lock_path(directory).write_bytes(b"99999999999\n")
    lock = JobLock(directory)
    assert lock_owner(directory) == os.getpid()
    lock.release()


def test_two_jobs_do_not_disturb_each_other(directory: Path) -> None:
    one, other = JobLock(directory), JobLock(directory.with_name("other"))
    one.release()
    other.release()


# ---------------------------------------------------------------- races


def first_time(action: Callable[[], object], then: Callable[..., object]) -> Callable[..., object]:
    """``then``, but ``action`` comes before its first call."""
    left = [action]

    def call(*args: object, **options: object) -> object:
        if left:
            left.pop()()
        return then(*args, **options)

    return call


def test_a_lock_file_that_was_removed_after_it_was_opened_is_no_lock(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last owner removes the directory and only then lets go."""
    monkeypatch.setattr(fcntl, "flock", first_time(lambda: os.unlink(lock_path(directory)), fcntl.flock))
    lock = JobLock(directory)
    assert lock_owner(directory) == os.getpid()
    lock.release()


def test_a_lock_file_that_was_replaced_after_it_was_opened_is_no_lock(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace() -> None:
        os.unlink(lock_path(directory))
        lock_path(directory).touch(0o600)

    monkeypatch.setattr(fcntl, "flock", first_time(replace, fcntl.flock))
    lock = JobLock(directory)
    with pytest.raises(JobLockTaken):
        JobLock(directory)
    lock.release()


def test_a_directory_that_was_removed_under_it_is_made_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", first_time(directory.rmdir, os.open))
    lock = JobLock(directory)
    assert lock_owner(directory) == os.getpid()
    lock.release()


def test_a_probe_that_looks_at_the_lock_does_not_take_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``status`` and waiting clients hold a shared lock for a moment; a sidecar that starts then must not give up."""
    JobLock(directory).release()
    probe = os.open(lock_path(directory), os.O_RDWR)
    fcntl.flock(probe, fcntl.LOCK_SH)
    real, refused = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        try:
            real(fd, operation)
        except BlockingIOError:
            refused.append(operation)
            real(probe, fcntl.LOCK_UN)
            raise

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = JobLock(directory)
    assert refused == [fcntl.LOCK_EX | fcntl.LOCK_NB]
    assert lock_owner(directory) == os.getpid()
    lock.release()
    os.close(probe)


# ---------------------------------------------------------------- what cannot be trusted


def test_a_link_in_the_place_of_the_lock_is_not_followed(directory: Path, tmp_path: Path) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o700)
    directory.parent.chmod(0o700)
    (tmp_path / "target").write_bytes(b"precious")
    lock_path(directory).symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match=lock_path(directory).name):
        JobLock(directory)
    assert (tmp_path / "target").read_bytes() == b"precious"


def test_a_directory_that_others_may_enter_is_refused(directory: Path) -> None:
    directory.mkdir(parents=True)
    directory.parent.chmod(0o755)
    with pytest.raises(LocalProtocolError, match="not a private directory"):
        JobLock(directory)


# ---------------------------------------------------------------- stand-ins


class FakeTime:
    """In place of the module ``time``: sleeping lets it go by, and does what is to be done meanwhile."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.now_s = 0.0
        self._meanwhile = meanwhile

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self._meanwhile()


@pytest.mark.parametrize("stand_in", [False, True])
def test_a_stand_in_is_waited_for(directory: Path, monkeypatch: pytest.MonkeyPatch, stand_in: bool) -> None:
    first = JobLock(directory, stand_in=True)
    time = FakeTime(first_time(first.release, lambda: None))
    monkeypatch.setattr(job_lock, "time", time)
    lock = JobLock(directory, stand_in=stand_in)
    assert stand_in_runs(directory) is stand_in
    assert lock_owner(directory) == (None if stand_in else os.getpid())
    assert 0.0 < time.now_s < 1.0
    lock.release()


def test_a_stand_in_that_does_not_end_is_not_waited_for_for_ever(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = JobLock(directory, stand_in=True)
    time = FakeTime()
    monkeypatch.setattr(job_lock, "time", time)
    with pytest.raises(JobLockTaken, match="a stand-in for the sidecar of job job still holds"):
        JobLock(directory, patience_s=5.0)
    assert 5.0 <= time.now_s < 6.0
    first.release()


def test_a_stand_in_does_not_wait_for_a_sidecar(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = JobLock(directory)
    time = FakeTime()
    monkeypatch.setattr(job_lock, "time", time)
    with pytest.raises(JobLockTaken, match="already serves"):
        JobLock(directory, stand_in=True, patience_s=30.0)
    assert time.now_s < 1.0
    first.release()


@pytest.mark.parametrize("before", [b"99999\n", b""])
def test_what_the_last_holder_has_left_in_it_does_not_make_a_stand_in_a_sidecar(
    directory: Path, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    """Between taking the lock and writing into it."""
    first = JobLock(directory, stand_in=True)
    lock_path(directory).write_bytes(before)
    steps = [lambda: lock_path(directory).write_bytes(b"stand-in 5\n"), first.release]
    monkeypatch.setattr(job_lock, "time", FakeTime(lambda: steps.pop(0)() if steps else None))
    lock = JobLock(directory)
    assert lock_owner(directory) == os.getpid()
    lock.release()
