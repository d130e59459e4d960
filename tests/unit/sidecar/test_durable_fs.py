"""Making things durable: file first, then its directory; on failure nothing is left and nothing is touched."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_proto.errors import AlreadyCommitted, StorageError
from ckpt_sidecar.durable_fs import NotDurable, make_dirs, publish, remove_files, sync_dir, write_file

WRITERS: dict[str, Callable[[Path, bytes], None]] = {
    "write_file": write_file,
    "publish": lambda path, content: publish(path, content, overwrite=False),
    "publish over": lambda path, content: publish(path, content, overwrite=True),
}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Callable[[Path, bytes], None]:
    return WRITERS[request.param]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the file system, in order; descriptors by the name of their file."""
    made: list[str] = []

    def by_name(call: str, describe: Callable[..., str]) -> None:
        real = getattr(os, call)

        def recorded(*args: object, **options: object) -> object:
            made.append(f"{call} {describe(*args)}")
            return real(*args, **options)

        monkeypatch.setattr(os, call, recorded)

    by_name("fsync", lambda fd: kind_of(os.readlink(f"/proc/self/fd/{fd}")))
    by_name("replace", lambda source, target: Path(target).name)
    by_name("link", lambda source, target: Path(target).name)
    by_name("unlink", kind_of)
    monkeypatch.setattr(os, "sync", lambda: made.append("sync"))
    return made


def kind_of(path: str | Path) -> str:
    return "temporary" if str(path).endswith(".tmp") else Path(path).name


def fail(monkeypatch: pytest.MonkeyPatch, call: str, when: Callable[..., bool] = lambda *args: True) -> None:
    real = getattr(os, call)

    def maybe(*args: object, **options: object) -> object:
        if when(*args):
            raise OSError(errno.EIO, f"{call} failed")
        return real(*args, **options)

    monkeypatch.setattr(os, call, maybe)


# ---------------------------------------------------------------- success


def test_a_new_file_has_its_content_and_nothing_lies_beside_it(
    tmp_path: Path, write: Callable[[Path, bytes], None]
) -> None:
    write(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_empty_file_is_a_file(tmp_path: Path, write: Callable[[Path, bytes], None]) -> None:
    write(tmp_path / "file", b"")
    assert (tmp_path / "file").read_bytes() == b""


def test_short_writes_are_continued(
    tmp_path: Path, write: Callable[[Path, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    write(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_a_file_is_synced_then_named_then_its_directory_is_synced(tmp_path: Path, calls: list[str]) -> None:
    write_file(tmp_path / "file", b"content")
    assert calls == ["fsync temporary", "replace file", f"fsync {tmp_path.name}"]


def test_publishing_syncs_the_same_way_and_takes_the_temporary_name_away(tmp_path: Path, calls: list[str]) -> None:
    publish(tmp_path / "file", b"content", overwrite=False)
    assert calls == ["fsync temporary", "link file", "unlink temporary", f"fsync {tmp_path.name}"]


def test_publishing_over_a_file_replaces_it_atomically(tmp_path: Path, calls: list[str]) -> None:
    publish(tmp_path / "file", b"content", overwrite=True)
    assert [call for call in calls if not call.startswith("unlink")] == [
        "fsync temporary",
        "replace file",
        f"fsync {tmp_path.name}",
    ]


def test_an_existing_file_is_replaced_on_request(tmp_path: Path) -> None:
    for content in (b"a longer first content", b"second"):
        write_file(tmp_path / "file", content)
        publish(tmp_path / "other", content, overwrite=True)
    assert (tmp_path / "file").read_bytes() == (tmp_path / "other").read_bytes() == b"second"


def test_an_existing_file_is_refused_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"first")
    with pytest.raises(AlreadyCommitted, match=re.escape(f"{path} exists already")):
        publish(path, b"second", overwrite=False)
    assert path.read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_crash_left_of_the_temporary_file_is_in_nobodys_way(
    tmp_path: Path, write: Callable[[Path, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between giving a file its name and taking the temporary one away, a process leaves one file two names."""
    with monkeypatch.context() as patch:
        fail(patch, "unlink")
        publish(tmp_path / "file", b"a torn and much longer content", overwrite=False)
    [left] = tmp_path.glob("*.tmp")
    assert os.path.samefile(left, tmp_path / "file")
    with monkeypatch.context() as patch, pytest.raises((OSError, StorageError)):
        fail(patch, "write")
        write(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"a torn and much longer content"
    publish(tmp_path / "file", b"content", overwrite=True)
    assert (tmp_path / "file").read_bytes() == b"content"
    assert left.read_bytes() == b"a torn and much longer content"


# ---------------------------------------------------------------- failure


@pytest.mark.parametrize("old", [None, b"old content"])
@pytest.mark.parametrize("call", ["write", "fsync", "replace", "link"])
def test_a_failure_before_the_name_appears_leaves_everything_as_it_was(
    tmp_path: Path,
    write: Callable[[Path, bytes], None],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    old: bytes | None,
) -> None:
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)
    fail(monkeypatch, call)
    fail(monkeypatch, {"replace": "link", "link": "replace"}.get(call, call))  # whichever this writer uses
    with pytest.raises((OSError, StorageError), match="failed"):
        write(path, b"new content")
    assert [found.read_bytes() for found in tmp_path.iterdir()] == ([] if old is None else [old])


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_failure_names_the_file(
    tmp_path: Path, write: Callable[[Path, bytes], None], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The kernel's error of a descriptor does not."""
    fail(monkeypatch, call)
    with pytest.raises((OSError, StorageError), match=re.escape(str(tmp_path / "file"))):
        write(tmp_path / "file", b"content")


def is_directory(fd: int) -> bool:
    return os.path.isdir(f"/proc/self/fd/{fd}")


def test_a_directory_that_cannot_be_synced_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, "fsync", is_directory)
    with pytest.raises((OSError, StorageError), match="fsync failed"):
        write_file(tmp_path / "file", b"content")
    with pytest.raises(OSError, match="fsync failed"):
        sync_dir(tmp_path)


def test_a_publication_that_cannot_be_made_durable_is_not_left_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gets the error removes the data files: a name that stayed would be a checkpoint without them."""
    fail(monkeypatch, "fsync", is_directory)
    with pytest.raises((OSError, StorageError), match="fsync failed"):
        publish(tmp_path / "file", b"content", overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_a_replacement_that_cannot_be_made_durable_says_that_it_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"old")
    fail(monkeypatch, "fsync", is_directory)
    with pytest.raises(NotDurable, match=re.escape(f"{tmp_path / 'file'} was replaced, but")):
        publish(tmp_path / "file", b"new", overwrite=True)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_temporary_name_that_cannot_be_removed_does_not_undo_the_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "unlink")
    publish(tmp_path / "file", b"content", overwrite=False)
    assert (tmp_path / "file").read_bytes() == b"content"


def no_hard_links(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def link(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_can_be_published_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    no_hard_links(monkeypatch, code)
    publish(tmp_path / "file", b"first", overwrite=False)
    with pytest.raises(AlreadyCommitted, match="exists already"):
        publish(tmp_path / "file", b"second", overwrite=False)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"first"]


def test_a_missing_directory_is_an_error(tmp_path: Path, write: Callable[[Path, bytes], None]) -> None:
    with pytest.raises((OSError, StorageError), match="missing"):
        write(tmp_path / "missing" / "file", b"content")


# ---------------------------------------------------------------- directories


def test_missing_parents_are_made_and_each_is_durable_in_its_own(tmp_path: Path, calls: list[str]) -> None:
    make_dirs(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert calls == [f"fsync {tmp_path.name}", "fsync a", "fsync b"]


def test_a_directory_that_is_there_is_left_alone(tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / "a").mkdir()
    make_dirs(tmp_path / "a")
    assert calls == []


def test_somebody_else_may_make_the_directory_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.mkdir

    def late(path: Path, mode: int = 0o777) -> None:
        real(path, mode)
        real(path, mode)

    monkeypatch.setattr(os, "mkdir", late)
    make_dirs(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_file_in_the_place_of_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(FileExistsError):
        make_dirs(tmp_path / "a")
    with pytest.raises(OSError, match="a"):
        make_dirs(tmp_path / "a" / "b")
    assert (tmp_path / "a").read_bytes() == b""


# ---------------------------------------------------------------- removal


def test_files_are_removed_durably_and_missing_ones_do_not_matter(tmp_path: Path, calls: list[str]) -> None:
    for name in ("one", "two", "stays"):
        (tmp_path / name).write_bytes(b"")
    remove_files([tmp_path / "one", tmp_path / "never was", tmp_path / "two"])
    assert [path.name for path in tmp_path.iterdir()] == ["stays"]
    assert calls == ["unlink one", "unlink never was", "unlink two", f"fsync {tmp_path.name}"]


def test_every_directory_that_lost_a_file_is_synced_once(tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    remove_files([tmp_path / "a" / "x", tmp_path / "b" / "y", tmp_path / "a" / "z"])
    assert sorted(calls[3:]) == ["fsync a", "fsync b"]


def test_nothing_happens_where_the_directory_is_gone_too(tmp_path: Path) -> None:
    remove_files([tmp_path / "gone" / "file"])
    remove_files([])
