"""When a client starts a sidecar, and when it says that there is none, or none that answers."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_proto.errors import FailureReport
from ckpt_proto.runtime_dir import lock_path, make_private_dir
from ckpt_trainer_client.config import ClientConfig
from ckpt_trainer_client.sidecar_watch import SILENT_S, SidecarWatch

BOUND_S = 120.0


class Client:
    """What the watch has told and asked of the client; ``start`` does what it wanted done."""

    def __init__(self, config: ClientConfig) -> None:
        self.lost: list[FailureReport] = []
        self.served = 0
        self.starts: list[Callable[[], None]] = []
        self.watch = SidecarWatch(config, self.starts.append, self.lost.append, self._on_served)

    def _on_served(self) -> None:
        self.served += 1

    def beat(self, silent_s: float) -> None:
        """A beat at a time when the silence began at 1000 s."""
        self.watch.beat(silent_s, 1000.0 + silent_s)


@pytest.fixture
def config(tmp_path: Path) -> ClientConfig:
    made = ClientConfig("/data/run", "job", 3, 8, 3, 0, tmp_path, "node-a", connect_timeout_s=BOUND_S)
    make_private_dir(made.runtime_dir)
    return made


@pytest.fixture
def client(config: ClientConfig) -> Client:
    return Client(config)


@pytest.fixture
def lock(config: ClientConfig) -> Iterator[None]:
    """A process that lives, this one, holds the job's lock."""
    fd = os.open(lock_path(config.runtime_dir), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.pwrite(fd, b"4711\n", 0)
    yield
    os.close(fd)


def test_a_short_silence_is_none(client: Client) -> None:
    client.beat(SILENT_S / 2)
    assert (client.lost, client.starts) == ([], [])


def test_a_sidecar_that_has_died_is_replaced_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(
        "ckpt_trainer_client.sidecar_watch.start_sidecar", lambda job_id, shm_root, timeout_s: started.append(job_id)
    )
    for silent_s in (SILENT_S, SILENT_S + 1):
        client.beat(silent_s)
    (start,) = client.starts
    start()
    assert started == ["job"]
    client.beat(SILENT_S + 2)  # that one has died too
    assert len(client.starts) == 2
    assert client.lost == []


def test_one_that_could_not_be_started_is_tried_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(job_id: str, shm_root: Path, timeout_s: float) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr("ckpt_trainer_client.sidecar_watch.start_sidecar", fails)
    client.beat(SILENT_S)
    with pytest.raises(OSError, match="no more processes"):
        client.starts[0]()
    client.beat(SILENT_S)
    assert len(client.starts) == 2


def test_nobody_is_started_by_a_client_that_closes_or_is_supervised(config: ClientConfig) -> None:
    closing, supervised = Client(config), Client(replace(config, supervised=True))
    closing.watch.stop()
    for client in (closing, supervised):
        client.beat(SILENT_S)
        assert client.starts == []


def test_after_the_bound_what_needs_a_sidecar_fails_at_every_beat(client: Client) -> None:
    client.beat(BOUND_S)
    assert client.lost == []
    for silent_s in (BOUND_S + 1, BOUND_S + 2):
        client.beat(silent_s)
    assert [failure.kind for failure in client.lost] == ["SidecarLost"] * 2
    assert client.lost[1].message == f"no sidecar ran for {BOUND_S + 2:.0f} s"
    assert (client.lost[0].rank, client.lost[0].node) == (3, "node-a")


@pytest.mark.usefixtures("lock")
def test_one_that_holds_the_lock_and_does_not_answer_is_named(client: Client) -> None:
    client.beat(SILENT_S)
    client.beat(SILENT_S + BOUND_S)
    assert client.lost == []
    client.beat(SILENT_S + BOUND_S + 1)
    (failure,) = client.lost
    assert failure.kind == "SidecarSilent"
    assert "the sidecar (pid 4711) has not answered for 121 s" in failure.message
    assert client.starts == []


def test_one_that_was_started_after_a_long_silence_is_not_to_blame_for_it(client: Client, config: ClientConfig) -> None:
    client.beat(BOUND_S + 1)
    assert [failure.kind for failure in client.lost] == ["SidecarLost"]
    fd = os.open(lock_path(config.runtime_dir), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        client.beat(BOUND_S + 2)
        assert len(client.lost) == 1
        client.beat(2 * BOUND_S + 3)
        assert [failure.kind for failure in client.lost] == ["SidecarLost", "SidecarSilent"]
    finally:
        os.close(fd)


def test_an_answer_after_the_bound_is_told_once(client: Client) -> None:
    client.watch.heard()
    assert client.served == 0
    client.beat(BOUND_S + 1)
    client.watch.heard()
    client.watch.heard()
    assert client.served == 1
