"""The sidecar's socket under attack by processes of its own user, and by another user.

A healthy client goes on saving meanwhile and every save commits; the sidecar answers its probe, does not grow, and ends
in good order, which the fixture of the file's sidecar checks.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ckpt_proto.codec import decode, encode
from ckpt_proto.messages import AskStatus, Refused
from ckpt_proto.process import process_start_s
from ckpt_proto.runtime_dir import socket_path
from ckpt_trainer_client import CheckpointClient
from testkit.attackers import ATTACKS, begun, connected, dealer, hello, message_frame, shake_hands, stop
from testkit.mutations import seeds
from testkit.outcomes import Outcome, Outcomes
from testkit.ranks import RankStarter, RunningRanks
from testkit.rogue_rank import rogue_rank
from testkit.sidecars import Sidecar
from testkit.waiting import LIMIT_S, wait_until

ATTACKERS = 2
GROWTH_BYTES = 256 << 20
"""How much the sidecar may grow under attack: bounded queues, whatever comes. The largest messages are those of
``garbage``: 2 MiB in every 26, and a thousand may wait on each of the two connections when the sidecar gets no
processor: 160 MiB, to which comes the garbage of allocators."""
SPARE_DESCRIPTORS = 20

SAVES = [3, pytest.param(150, marks=pytest.mark.faults)]


@dataclass(frozen=True)
class Size:
    """What a process has of the machine."""

    own_bytes: int
    descriptors: int


def size_of(pid: int) -> Size:
    """What it has now. Not what it maps of files: a forked process finds its libraries there page by page."""
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return Size((resident - shared) * resource.getpagesize(), len(os.listdir(f"/proc/{pid}/fd")))


def probe() -> str:
    """What ``ckpt-sidecar health`` says; it must call the sidecar healthy."""
    command = [sys.executable, "-m", "ckpt_sidecar", "health", "--timeout-s", f"{LIMIT_S:g}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def under_attack(
    attack: Callable[[str, str, int], int], sidecar: Sidecar, folder: Path, ranks: RankStarter, row: Outcome
) -> Iterator[None]:
    """While this lasts ``ATTACKERS`` processes are at it; each must have attacked, and found nothing to complain of.
    How often they did is counted as runs."""
    folder.mkdir()
    runs = [ranks.start(attack, 1, str(sidecar.directory), str(folder), seed) for seed in range(ATTACKERS)]
    try:
        wait_until(lambda: len(begun(folder)) == ATTACKERS or any(map(has_ended, runs)), "the attackers have begun")
        yield
    finally:
        stop(folder)
        attacks = [run.results()[0] for run in runs]
    row.runs += sum(attacks)
    assert min(attacks) > 0


def has_ended(run: RunningRanks) -> bool:
    """Whether an attacker has ended before it was told to: it has found something."""
    return process_start_s(run.pids[0]) is None


@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_healthy_client_goes_on_saving(
    tmp_path: Path,
    sidecar: Sidecar,
    ranks: RankStarter,
    outcomes: Outcomes,
    attack: Callable[[str, str, int], int],
    saves: int,
) -> None:
    group = outcomes.run("the socket attacked while a client saves", runs=0, unit="attacks")
    with CheckpointClient(tmp_path / "checkpoints") as client, group as outcome:
        client.save({"x": torch.zeros(1_000)}, step=0).result(LIMIT_S)
        before = size_of(sidecar.pid)
        largest = before.own_bytes
        with under_attack(attack, sidecar, tmp_path / "attackers", ranks, outcome):
            for step in range(1, saves + 1):
                client.save({"x": torch.full((1_000,), float(step))}, step=step).result(LIMIT_S)
                outcome.committed += 1
                largest = max(largest, size_of(sidecar.pid).own_bytes)
                if step % 10 == 1:
                    assert f"step {step}" in probe()
        assert client.steps() == list(range(saves + 1))
        target = {"x": torch.zeros(1_000)}
        client.load(target, saves)
        assert bool((target["x"] == saves).all())
    assert largest - before.own_bytes < GROWTH_BYTES
    wait_until(
        lambda: size_of(sidecar.pid).descriptors <= before.descriptors + SPARE_DESCRIPTORS, "connections are closed"
    )
    assert not (Path("/tmp/never-made")).exists()


# ---------------------------------------------------------------- a rank that breaks every rule


@pytest.mark.parametrize("lives", [3, pytest.param(60, marks=pytest.mark.faults)])
def test_a_rank_that_breaks_every_rule_harms_nobody_after_it(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter, outcomes: Outcomes, lives: int
) -> None:
    with outcomes.run("a rank that breaks every rule, again and again", runs=0, unit="lives") as row:
        row.committed += save_and_load(tmp_path / "before", sidecar)  # torch is imported, the first regions are made
        before = size_of(sidecar.pid)
        for seed in seeds(lives):
            row.runs += 1
            rogue = ranks.start(rogue_rank, 1, str(sidecar.directory), str(tmp_path / "rogue"), seed)
            assert rogue.exit_codes()[0] == (-signal.SIGKILL if seed % 3 == 1 else 0), f"seed {seed}: {rogue.text(0)}"
            if seed % 3 != 1:
                rogue.result_of(0)
            if seed % 10 == 0:
                row.committed += save_and_load(tmp_path / f"good-{seed}", sidecar)
        # A commit also makes history of what the rogues staged and could not be told about: the sidecar's exit code.
        row.committed += save_and_load(tmp_path / "after", sidecar)
    assert size_of(sidecar.pid).own_bytes - before.own_bytes < GROWTH_BYTES


def save_and_load(directory: Path, sidecar: Sidecar) -> int:
    """A client in a directory of its own: what it saves is what it loads, and the probe is content. How many saves."""
    with CheckpointClient(directory) as client:
        for step in (1, 2):
            client.save({"x": torch.full((1_000,), float(step))}, step=step).result(LIMIT_S)
        target = {"x": torch.zeros(1_000)}
        client.load(target, 2)
        assert bool((target["x"] == 2).all())
        assert "step 2" in probe()
        return len(client.steps())


# ---------------------------------------------------------------- limits


def test_more_connections_than_the_usual_limit_of_descriptors_do_not_end_the_sidecar(
    start_sidecar: Callable[..., Sidecar],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        sidecar = start_sidecar(as_command=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    held = [connected(str(sidecar.directory)) for _ in range(600)]
    try:
        wait_until(lambda: size_of(sidecar.pid).descriptors >= 600, "all connections are there")
        assert sidecar.status().pid == sidecar.pid
    finally:
        for connection in held:
            connection.close()


# ---------------------------------------------------------------- another user

NOBODY = 65_534


def as_another_user(look: Callable[[], str]) -> str:
    """What a child process of another user says; skips where this process may not change users."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(writer, look().encode())
        except BaseException as error:  # noqa: BLE001 - the parent asserts what it was
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def talk(directory: str) -> str:
    """Greet like a client, ask for the status, and say what comes back before the sidecar hangs up."""
    with connected(directory) as connection:
        shake_hands(connection)
        connection.sendall(message_frame(encode(AskStatus())))
        heard = b""
        while b"Status" not in heard and (part := connection.recv(4096)):
            heard += part
    return f"heard {heard!r}"


@contextmanager
def opened(*folders: Path) -> Iterator[None]:
    """While this lasts everybody may go through ``folders``."""
    for path in folders:
        path.chmod(0o711)
    try:
        yield
    finally:
        for path in folders:
            path.chmod(0o700)


def test_another_user_finds_the_door_closed(sidecar: Sidecar) -> None:
    directory = sidecar.directory
    with opened(sidecar.shm_root):  # shared memory is everybody's on a real machine
        assert "PermissionError" in as_another_user(lambda: talk(str(directory)))
        assert "PermissionError" in as_another_user((directory / "sidecar.lock").read_text)


def test_another_user_is_not_let_in_even_if_the_door_is_open(sidecar: Sidecar) -> None:
    directory = sidecar.directory
    with opened(sidecar.shm_root, directory.parent, directory):
        socket_path(directory).chmod(0o777)
        assert "Status" in talk(str(directory))
        answer = as_another_user(lambda: talk(str(directory)))
        assert any(words in answer for words in ("hung up after b''", "BrokenPipeError", "ConnectionReset")), answer
    assert sidecar.status().pid == sidecar.pid


# ---------------------------------------------------------------- refused, and then forgotten


def test_a_client_that_was_refused_does_not_make_the_sidecar_look_degraded(
    tmp_path: Path, start_sidecar: Callable[..., Sidecar]
) -> None:
    sidecar = start_sidecar()
    with CheckpointClient(tmp_path) as client:
        client.save({"x": torch.zeros(1)}, step=1).result(LIMIT_S)
        with dealer(str(sidecar.directory)) as stray:
            stray.send(encode(hello(str(sidecar.directory), rank=1, world_size=2, torch_version=torch.__version__)))
            assert isinstance(decode(stray.recv()), Refused)
        assert [rank.rank for rank in sidecar.status().ranks] == [0]
        assert "step 1" in probe()
