"""The key of a job: who may have read it, and who is let in with it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from ckpt_sidecar.__main__ import main
from ckpt_sidecar.peer_keys import ZAP_DOMAIN, PeerKeyError, keys_for, read_keys, write_new_keys, zap_answer

OTHER_USER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file to another user")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """A good key file."""
    write_new_keys(tmp_path / "peer.key")
    return tmp_path / "peer.key"


# ---------------------------------------------------------------- the file


def test_a_key_is_read_back_as_it_was_drawn(tmp_path: Path) -> None:
    keys = write_new_keys(tmp_path / "peer.key")
    assert read_keys(tmp_path / "peer.key") == keys
    assert zmq.curve_public(keys.secret) == keys.public


def test_two_keys_are_never_the_same(tmp_path: Path) -> None:
    assert write_new_keys(tmp_path / "a").secret != write_new_keys(tmp_path / "b").secret


def test_a_new_file_is_readable_by_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_new_keys(tmp_path / "peer.key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "peer.key").stat().st_mode) == 0o600


def test_a_key_is_never_overwritten(key_file: Path) -> None:
    before = key_file.read_bytes()
    with pytest.raises(PeerKeyError, match="exists and is not overwritten"):
        write_new_keys(key_file)
    assert key_file.read_bytes() == before


def test_a_key_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PeerKeyError):
        write_new_keys(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_the_secret_is_in_no_repr(key_file: Path) -> None:
    keys = read_keys(key_file)
    assert keys.secret.decode() not in repr(keys)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_the_owner_alone_is_trusted(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    assert read_keys(key_file)


@pytest.mark.parametrize("mode", [0o604, 0o606, 0o620, 0o660, 0o644, 0o700, 0o4600])
def test_a_file_that_others_have_access_to_is_not(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(PeerKeyError, match=f"mode {mode:04o}.*chmod 0600"):
        read_keys(key_file)


@needs_root
def test_the_file_of_another_user_is_not(key_file: Path) -> None:
    os.chown(key_file, OTHER_USER, -1)
    with pytest.raises(PeerKeyError, match=f"belongs to user {OTHER_USER}"):
        read_keys(key_file)


@needs_root
def test_the_group_may_read_a_file_of_root_as_kubernetes_makes_it(key_file: Path) -> None:
    key_file.chmod(0o440)
    assert read_keys(key_file)


@needs_root
def test_the_group_may_not_read_a_file_of_the_user(key_file: Path) -> None:
    key_file.chmod(0o440)
    os.chown(key_file, OTHER_USER, -1)
    key_file.parent.chmod(0o755)
    os.seteuid(OTHER_USER)
    try:
        with pytest.raises(PeerKeyError):
            read_keys(key_file)
    finally:
        os.seteuid(0)


def test_a_secret_of_kubernetes_is_a_link_below_its_own_directory(key_file: Path) -> None:
    volume = key_file.parent
    (volume / "..2026_01_01").mkdir()
    key_file.rename(volume / "..2026_01_01" / "peer.key")
    (volume / "..data").symlink_to("..2026_01_01")
    key_file.symlink_to("..data/peer.key")
    assert read_keys(key_file)


def test_a_link_to_elsewhere_is_not_followed(key_file: Path) -> None:
    (key_file.parent / "mine").mkdir()
    link = key_file.parent / "mine" / "peer.key"
    link.symlink_to(key_file)
    with pytest.raises(PeerKeyError, match="outside its own directory"):
        read_keys(link)


def test_the_directory_may_be_a_link(key_file: Path) -> None:
    link = key_file.parent / "keys"
    link.symlink_to(key_file.parent)
    assert read_keys(link / "peer.key")


def test_a_file_that_is_not_there_a_directory_and_a_pipe_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "loop").symlink_to("loop")
    for name, why in (
        ("none", "No such file"),
        (".", "no regular file"),
        ("pipe", "no regular file"),
        ("loop", "symbolic links"),
    ):
        with pytest.raises(PeerKeyError, match=why):
            read_keys(tmp_path / name)


@pytest.mark.parametrize(
    "content", ["", "# only a comment\n", "short\n", "x" * 39, "~" * 40, "a" * 40 + "\n" + "b" * 40]
)
def test_a_file_without_a_key_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "peer.key"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(PeerKeyError, match="holds no key"):
        read_keys(path)


# ---------------------------------------------------------------- whether one is needed


def test_on_loopback_no_key_is_needed() -> None:
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1"):
        assert keys_for(address, None, insecure=False) is None


def test_beyond_loopback_there_is_a_key_or_nothing(key_file: Path) -> None:
    with pytest.raises(PeerKeyError, match=r"node-a:1 .*keygen.*--peer-key-file.*COORDINATOR=local.*--peer-insecure"):
        keys_for("node-a:1", None, insecure=False)
    assert keys_for("node-a:1", key_file, insecure=False) == read_keys(key_file)
    assert keys_for("node-a:1", None, insecure=True) is None


def test_a_key_that_was_named_is_used_even_where_none_is_needed(key_file: Path) -> None:
    assert keys_for("127.0.0.1:1", key_file, insecure=True) == read_keys(key_file)
    with pytest.raises(PeerKeyError):
        keys_for("127.0.0.1:1", key_file.parent / "none", insecure=True)


# ---------------------------------------------------------------- at the door


def request(**changes: bytes) -> list[bytes]:
    """A ZAP request with the key ``credential``."""
    values = {
        "version": b"1.0",
        "request_id": b"17",
        "domain": ZAP_DOMAIN,
        "address": b"::ffff:10.0.0.2",
        "identity": b"",
        "mechanism": b"CURVE",
        **changes,
    }
    return list(values.values())


def test_who_has_the_key_is_let_in(key_file: Path) -> None:
    public = read_keys(key_file).public
    answer, refusal = zap_answer(request(credential=z85.decode(public)), public)
    assert (answer[:3], refusal) == ([b"1.0", b"17", b"200"], "")


@pytest.mark.parametrize(
    "changes",
    [
        {"credential": b"x" * 32},
        {"credential": b""},
        {"mechanism": b"NULL"},
        {"mechanism": b"PLAIN", "credential": b"user", "more": b"password"},
        {"domain": b"other"},
        {"version": b"2.0"},
    ],
    ids=str,
)
def test_everybody_else_is_refused_with_the_address_in_the_log(key_file: Path, changes: dict[str, bytes]) -> None:
    public = read_keys(key_file).public
    answer, refusal = zap_answer(request(**{"credential": z85.decode(public), **changes}), public)
    assert answer[:3] == [b"1.0", b"17", b"400"]
    assert refusal.startswith("10.0.0.2: ")


@pytest.mark.parametrize("frames", range(7))
def test_a_request_that_is_cut_short_is_refused(key_file: Path, frames: int) -> None:
    public = read_keys(key_file).public
    answer, refusal = zap_answer(request(credential=b"")[:frames], public)
    assert answer[2] == b"400"
    assert refusal


# ---------------------------------------------------------------- the command


def test_keygen_makes_a_file_that_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "peer.key"
    assert main(["keygen", str(path)]) == 0
    keys = read_keys(path)
    said = capsys.readouterr().out
    assert keys.public.decode() in said
    assert keys.secret.decode() not in said


def test_keygen_overwrites_nothing_and_says_so(key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = key_file.read_bytes()
    assert main(["keygen", str(key_file)]) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err
    assert key_file.read_bytes() == before


def test_keygen_names_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", str(tmp_path / "none" / "peer.key")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
