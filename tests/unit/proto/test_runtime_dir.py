"""The private directory of a job: where things lie, what is refused, who holds the lock."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt_proto.errors import LocalProtocolError
from ckpt_proto.runtime_dir import (
    MAX_SOCKET_PATH_BYTES,
    endpoint,
    job_dirs,
    lock_owner,
    lock_path,
    log_path,
    make_private_dir,
    runtime_dir,
    socket_path,
    stand_in_runs,
    user_dir,
)


@contextmanager
def locked(path: Path, content: bytes, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.write(fd, content)
        fcntl.flock(fd, kind)
        yield
    finally:
        os.close(fd)


# ---------------------------------------------------------------- names


def test_a_job_lies_below_its_user_and_nothing_is_made(tmp_path: Path) -> None:
    directory = runtime_dir("/s", "job-1")
    assert directory == Path(f"/s/ckpt-sidecar-{os.geteuid()}/job-1")
    assert user_dir("/s") == directory.parent
    assert runtime_dir(str(tmp_path)[:40], "j").exists() is False


def test_what_lies_in_it() -> None:
    directory = Path("/s/u/j")
    assert endpoint(directory) == "ipc:///s/u/j/sidecar.sock"
    assert {path.name for path in (socket_path(directory), lock_path(directory), log_path(directory))} == {
        "sidecar.sock",
        "sidecar.lock",
        "sidecar.log",
    }


@pytest.mark.parametrize("job_id", ["", "..", "a/b", ".x"])
def test_a_job_id_never_leads_out_of_the_users_directory(job_id: str) -> None:
    with pytest.raises(LocalProtocolError, match="job id"):
        runtime_dir("/dev/shm", job_id)


def test_a_socket_path_that_the_kernel_would_cut_is_refused() -> None:
    fixed = len(os.fsencode(socket_path(runtime_dir("/", "j")))) - len("j")
    room = MAX_SOCKET_PATH_BYTES - fixed
    root = "/" + "r" * (room - 3)
    assert len(os.fsencode(socket_path(runtime_dir(root, "jj")))) <= MAX_SOCKET_PATH_BYTES
    with pytest.raises(LocalProtocolError, match=f"longer than {MAX_SOCKET_PATH_BYTES} bytes"):
        runtime_dir(root, "j" * 60)


def test_the_length_of_a_socket_path_is_counted_in_bytes() -> None:
    with pytest.raises(LocalProtocolError, match="longer than"):
        runtime_dir("/" + "é" * 40, "job")


# ---------------------------------------------------------------- making it


def test_directory_and_parent_are_private_and_making_them_again_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "user" / "job"
    make_private_dir(path)
    make_private_dir(path)
    assert [oct(each.stat().st_mode & 0o777) for each in (path.parent, path)] == ["0o700", "0o700"]


@pytest.mark.parametrize("mode", [0o701, 0o750, 0o777])
@pytest.mark.parametrize("which", ["user", "job"])
def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path, which: str, mode: int) -> None:
    path = tmp_path / "user" / "job"
    make_private_dir(path)
    (path if which == "job" else path.parent).chmod(mode)
    with pytest.raises(LocalProtocolError, match=f"mode {mode:o}.*choose another --shm-root"):
        make_private_dir(path)


@pytest.mark.parametrize("which", ["user", "job"])
def test_a_link_in_place_of_a_directory_is_refused(tmp_path: Path, which: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    path = tmp_path / "user" / "job"
    if which == "job":
        path.parent.mkdir(mode=0o700)
    (path if which == "job" else path.parent).symlink_to(elsewhere)
    with pytest.raises(LocalProtocolError, match="not a private directory"):
        make_private_dir(path)


def test_a_file_in_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir(mode=0o700)
    (tmp_path / "user" / "job").touch(mode=0o600)
    with pytest.raises(LocalProtocolError, match="not a private directory"):
        make_private_dir(tmp_path / "user" / "job")


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_private_dir(tmp_path / "user" / "job")
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(LocalProtocolError, match=f"of user {mine + 1} .owner {mine}"):
        make_private_dir(tmp_path / "user" / "job")


# ---------------------------------------------------------------- who holds the lock


def test_nobody_holds_a_lock_that_does_not_exist_or_is_free(tmp_path: Path) -> None:
    assert lock_owner(tmp_path) is None
    lock_path(tmp_path).write_text("1234\n")
    assert lock_owner(tmp_path) is None


def test_the_holder_of_a_lock_is_named(tmp_path: Path) -> None:
    with locked(lock_path(tmp_path), b"1234\n"):
        assert lock_owner(tmp_path) == 1234
    assert lock_owner(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"nonsense", b"-5\n", b"\xff\xfe"])
def test_a_holder_that_has_not_written_its_pid_is_held_by_pid_zero(tmp_path: Path, content: bytes) -> None:
    with locked(lock_path(tmp_path), content):
        assert lock_owner(tmp_path) == 0


def test_two_that_look_at_once_do_not_take_each_other_for_the_holder(tmp_path: Path) -> None:
    with locked(lock_path(tmp_path), b"1234\n", fcntl.LOCK_SH):
        assert lock_owner(tmp_path) is None


def test_a_stand_in_that_holds_the_lock_is_no_sidecar(tmp_path: Path) -> None:
    with locked(lock_path(tmp_path), b"stand-in 1234\n"):
        assert lock_owner(tmp_path) is None
        assert stand_in_runs(tmp_path)
    assert not stand_in_runs(tmp_path)


@pytest.mark.parametrize("content", [b"1234\n", b"", b"nonsense"])
def test_who_does_not_say_so_is_no_stand_in(tmp_path: Path, content: bytes) -> None:
    assert not stand_in_runs(tmp_path)
    with locked(lock_path(tmp_path), content):
        assert not stand_in_runs(tmp_path)


# ---------------------------------------------------------------- every job


def test_the_jobs_of_a_user_are_listed_by_name(tmp_path: Path) -> None:
    assert job_dirs(tmp_path) == []
    for name in ("b", "a"):
        make_private_dir(user_dir(tmp_path) / name)
    (user_dir(tmp_path) / "file").touch()
    assert [path.name for path in job_dirs(tmp_path)] == ["a", "b"]
