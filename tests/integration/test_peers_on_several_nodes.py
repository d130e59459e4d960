"""Sidecars' links between real network namespaces: keys, a cable that is pulled, a process that is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ckpt_proto.coordinator_address import join_address
from ckpt_sidecar.peer_keys import write_new_keys
from testkit.netns import Network, network
from testkit.peer_program import PeerProgram
from testkit.waiting import wait_until

PORT = 23456
SERVER, CLIENT, SECOND = "a" * 16, "b" * 16, "c" * 16
Start = Callable[..., PeerProgram]


@pytest.fixture
def nodes() -> Iterator[Network]:
    """Two nodes and the cables between them."""
    with network(2) as made:
        yield made


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """The job's key."""
    write_new_keys(tmp_path / "peer.key")
    return tmp_path / "peer.key"


@pytest.fixture
def start(nodes: Network, tmp_path: Path) -> Iterator[Start]:
    """Starts a server on node 0 or a client on node 1."""
    started: list[PeerProgram] = []

    def start_one(role: str, key: Path | None, life: str, host: str = "10.77.0.1") -> PeerProgram:
        on_node = partial(nodes.popen, 0 if role == "server" else 1)
        program = PeerProgram(tmp_path / f"{life}.log", role, join_address(host, PORT), key, life, on_node)
        started.append(program)
        return program

    yield start_one
    for program in started:
        if program.process.returncode is None:
            program.kill()
        print(program.log.read_text()[-2000:])


def texts(life: str, count: int) -> list[str]:
    """What a program of this life sends first."""
    return [f"{life} {number}" for number in range(1, count + 1)]


@pytest.mark.parametrize("host", ["10.77.0.1", "fd77::1"])
def test_traffic_passes_with_a_key_over_both_kinds_of_address(start: Start, key_file: Path, host: str) -> None:
    server, client = start("server", key_file, SERVER, host), start("client", key_file, CLIENT, host)
    assert server.wait_for("up") == [CLIENT]
    assert client.wait_for("up") == [SERVER]
    client.send(300)
    server.send(300)
    assert server.wait_for("got", 300) == texts(CLIENT, 300)
    assert client.wait_for("got", 300) == texts(SERVER, 300)
    assert (server.stop(), client.stop()) == (0, 0)


@pytest.mark.parametrize("silently", [False, True], ids=["at the node", "on the way"])
def test_what_is_sent_while_the_cable_is_cut_arrives_once_and_in_order(
    nodes: Network, start: Start, key_file: Path, silently: bool
) -> None:
    server, client = start("server", key_file, SERVER), start("client", key_file, CLIENT)
    server.wait_for("up")
    client.wait_for("up")
    client.send(10)
    server.wait_for("got", 10)
    nodes.cut(1, silently=silently)
    for programs in (server, client):
        programs.send(400)
        programs.wait_for("sent", 1 if programs is server else 2)
    both_see_silence(server, client)
    assert len(server.lines("got")) == 10
    nodes.heal(1)
    client.send(10)
    assert server.wait_for("got", 420) == texts(CLIENT, 420)
    assert client.wait_for("got", 400) == texts(SERVER, 400)
    assert (len(server.lines("up")), len(client.lines("up"))) == (1, 1)


def both_see_silence(server: PeerProgram, client: PeerProgram) -> None:
    """Wait until each has noticed that the other says nothing."""
    for program in (server, client):
        said = len(program.lines("silent"))
        for seen in range(said, said + 500):
            if float(program.wait_for("silent", seen + 1)[seen].split()[1]) > 2.0:
                break
        else:
            raise AssertionError(f"no silence seen: {program.lines('silent')[-3:]}")


def test_a_connection_that_the_kernel_has_given_up_is_made_again(nodes: Network, start: Start, key_file: Path) -> None:
    server, client = start("server", key_file, SERVER), start("client", key_file, CLIENT)
    client.wait_for("up")
    server.wait_for("up")
    nodes.cut(1, silently=True)
    if "ESTAB" not in nodes.run(0, ["ss", "--kill", "dport", ">=", "0"]):
        pytest.skip("this kernel ends no connection on demand (CONFIG_INET_DIAG_DESTROY)")
    client.send(50)
    client.wait_for("sent")
    nodes.heal(1)
    assert server.wait_for("got", 50) == texts(CLIENT, 50)


@pytest.mark.parametrize("who", ["server", "client"])
def test_a_killed_and_restarted_peer_is_noticed_and_gets_nothing_of_the_old_one(
    start: Start, key_file: Path, who: str
) -> None:
    lives = {"server": SERVER, "client": CLIENT}
    programs = {role: start(role, key_file, life) for role, life in lives.items()}
    for program in programs.values():
        program.wait_for("up")
    stays = programs["client" if who == "server" else "server"]
    stays.send(5)
    programs[who].wait_for("got", 5)
    programs[who].kill()
    stays.send(5)
    stays.wait_for("sent", 2)
    again = start(who, key_file, SECOND)
    assert stays.wait_for("up", 2) == [lives[who], SECOND]
    again.wait_for("up")
    stays.send(5)
    assert again.wait_for("got", 5) == texts(stays.life, 15)[10:]


def test_who_has_no_key_or_another_is_refused_by_address(start: Start, key_file: Path, tmp_path: Path) -> None:
    write_new_keys(tmp_path / "other.key")
    server = start("server", key_file, SERVER)
    server.wait_for("address")
    plain, wrong = start("client", None, CLIENT), start("client", tmp_path / "other.key", SECOND)
    for program in (plain, wrong):
        assert "does not let this sidecar in" in program.wait_for("refused")[0]
    for reason in ("one side has a key and the other has none", "the two sides have different keys"):
        wanted = f"refused a connection from 10.77.0.2: {reason}"
        wait_until(lambda wanted=wanted: wanted in server.log.read_text(), wanted)
    assert not server.lines("up")
