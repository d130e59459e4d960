"""Where the coordinator listens: every rank of a job comes to the same answer from its own environment."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ckpt_proto.coordinator_address import (
    FIRST_PORT,
    LAST_PORT,
    check_coordinator_address,
    coordinator_address,
    derived_port,
    is_loopback,
    join_address,
    split_address,
)
from ckpt_proto.errors import LocalProtocolError

TORCHRUN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node-a.cluster",
    "MASTER_PORT": "29500",
    "NODE_RANK": "1",
    "GROUP_RANK": "1",
}


def address(changes: dict[str, str] | None = None, job_id: str = "job", world_size: int = 16) -> str:
    """The address under torchrun on two nodes of eight ranks, with changes; an empty value is like none."""
    return coordinator_address({**TORCHRUN, **(changes or {})}, job_id, world_size)


# ---------------------------------------------------------------- which address


def test_on_several_nodes_it_is_rank_0s_node_and_a_port_of_the_job() -> None:
    assert address() == f"node-a.cluster:{derived_port('job')}"


def test_it_is_the_same_on_every_node_and_after_every_elastic_restart() -> None:
    elsewhere = {"RANK": "0", "NODE_RANK": "0", "GROUP_RANK": "0", "MASTER_PORT": "31234", "LOCAL_RANK": "3"}
    assert address(elsewhere) == address()


def test_on_one_node_there_is_no_network() -> None:
    assert address({"LOCAL_WORLD_SIZE": "16"}) == ""
    assert coordinator_address({}, "job", 1) == ""
    assert coordinator_address({"MASTER_ADDR": "node-a"}, "job", 1) == ""


def test_without_a_launcher_there_is_no_network() -> None:
    assert coordinator_address({}, "job", 4) == ""
    assert coordinator_address({"MASTER_ADDR": "127.0.0.1"}, "job", 4) == ""


def test_a_launcher_that_does_not_say_how_many_ranks_are_here_may_have_several_nodes() -> None:
    assert address({"LOCAL_WORLD_SIZE": ""}) == address()


def test_two_nodes_may_be_the_same_machine() -> None:
    assert address({"MASTER_ADDR": "localhost"}) == f"localhost:{derived_port('job')}"


@pytest.mark.parametrize("given", ["10.0.0.1:1", "host:65535", "[fd00::1]:4000", "a_b:5", "[fe80::1%eth0]:6"])
def test_what_the_user_says_wins(given: str) -> None:
    assert address({"CKPT_SIDECAR_COORDINATOR": given}) == given
    assert coordinator_address({"CKPT_SIDECAR_COORDINATOR": given}, "job", 1) == given


def test_the_user_can_say_that_there_is_one_node() -> None:
    assert address({"CKPT_SIDECAR_COORDINATOR": "local"}) == ""


@pytest.mark.parametrize("host", ["fd00::1", "[fd00::1]"])
def test_an_ipv6_master_gets_brackets(host: str) -> None:
    assert address({"MASTER_ADDR": host}) == f"[fd00::1]:{derived_port('job')}"


# ---------------------------------------------------------------- which port


def test_the_port_of_a_job_never_changes_between_processes_or_releases() -> None:
    assert [derived_port(job_id) for job_id in ("job", "run-17", "a")] == [28512, 21266, 20125]
    code = "from ckpt_proto.coordinator_address import derived_port; print(derived_port('job'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == 28512


def test_ports_are_spread_over_the_range_and_stay_in_it() -> None:
    ports = [derived_port(f"job-{number}") for number in range(2000)]
    assert min(ports) >= FIRST_PORT
    assert max(ports) <= LAST_PORT < 30_000
    assert len(set(ports)) > 1700


def test_a_job_id_that_is_none_has_no_port() -> None:
    with pytest.raises(LocalProtocolError):
        derived_port("../x")


# ---------------------------------------------------------------- nonsense


def test_a_missing_master_says_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"8 of 16 ranks.*MASTER_ADDR.*torchrun.*CKPT_SIDECAR_COORDINATOR=HOST:PORT"):
        address({"MASTER_ADDR": ""})


@pytest.mark.parametrize("master", ["a b", "http://x", "300.1.1.1", "fd00::zz", "x" * 300, "-x", "a..b"])
def test_a_master_that_is_no_host_is_named(master: str) -> None:
    with pytest.raises(ValueError, match="MASTER_ADDR: .*CKPT_SIDECAR_COORDINATOR"):
        address({"MASTER_ADDR": master})


@pytest.mark.parametrize(
    "given",
    ["host", "host:", ":4000", "host:x", "host:0", "host:65536", "host:-1", "host:１", "fd00::1:4000", "[]:1", "[x]:1",
     "tcp://host:1", "host:4000/", "host :1", "ho\nst:1", "1.2.3:4", "*:4000", "[fe80::1%a b]:1"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="CKPT_SIDECAR_COORDINATOR: "):
        address({"CKPT_SIDECAR_COORDINATOR": given})
    with pytest.raises(ValueError):
        check_coordinator_address(given)


@pytest.mark.parametrize("text", ["x", "-1", "0", "1.5"])
def test_a_local_world_size_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE"):
        address({"LOCAL_WORLD_SIZE": text})


def test_the_validator_takes_an_address_or_none() -> None:
    assert check_coordinator_address("") == ""
    assert check_coordinator_address("node-a:23456") == "node-a:23456"


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize("whole", ["host:1", "10.0.0.1:65535", "[fd00::1]:0"])
def test_splitting_and_joining_are_inverse(whole: str) -> None:
    assert join_address(*split_address(whole)) == whole


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.", "127.0.0.1", "127.255.0.3", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_recognised(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["128.0.0.1", "0.0.0.0", "::", "localhost.evil.org", "10.0.0.1", "fe80::1%lo", "*", "", "::ffff:10.0.0.1"]
)
def test_everything_else_is_not(host: str) -> None:
    assert not is_loopback(host)
