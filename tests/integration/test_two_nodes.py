"""Two nodes with two ranks each: network namespaces with their own sidecars and shared memory, one storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from ckpt_sidecar.peer_keys import write_new_keys
from testkit.cluster import Cluster, cluster, together
from testkit.outcomes import Outcomes

NODE_TIMEOUT_S = 5.0


@pytest.fixture
def two_nodes(tmp_path: Path, outcomes: Outcomes) -> Iterator[Cluster]:
    with outcomes.run("two nodes: cut off, killed, restarted") as row:
        with cluster(2, tmp_path, write_new_keys, "--node-timeout-s", str(NODE_TIMEOUT_S)) as made:
            yield made
        for metadata in sorted(made.directory.glob("step-*/.metadata")):
            row.committed += 1
            row.torn += not is_whole(metadata.parent)


def is_whole(checkpoint: Path) -> bool:
    """Whether stock DCP reads every rank's part of that step."""
    keys = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    try:
        assert_holds(
            checkpoint.parent,
            int(checkpoint.name.removeprefix("step-")),
            sum(key.startswith("weight.") for key in keys),
        )
    except (AssertionError, CheckpointException):
        return False
    return True


def loaded(directory: Path, step: int, world_size: int = 4, elements: int = 1000) -> dict[str, torch.Tensor]:
    """The step as stock DCP reads it."""
    state = {f"weight.{rank}": torch.zeros(elements) for rank in range(world_size)}
    dcp.load(state, checkpoint_id=str(directory / f"step-{step}"))
    return state


def assert_holds(directory: Path, step: int, world_size: int = 4) -> None:
    """Every rank's part of the checkpoint is of that step."""
    for rank in range(world_size):
        assert torch.equal(
            loaded(directory, step, world_size)[f"weight.{rank}"], torch.full((1000,), 1000.0 * rank + step)
        )


@pytest.mark.faults
def test_four_ranks_on_two_nodes_save_and_stock_dcp_loads(two_nodes: Cluster) -> None:
    two_nodes.start_ranks(2, NODE_RANK="0")  # wrong on one of them: nobody may look at it
    for step in (1, 2, 3):
        assert two_nodes.all(do="save", step=step) == [{"staged": True}] * 4
        where = str(two_nodes.directory / f"step-{step}")
        assert two_nodes.all(do="result", step=step) == [{"committed": where}] * 4
        assert_holds(two_nodes.directory, step)
    assert two_nodes.all(do="latest") == [{"latest": 3}] * 4
    assert two_nodes.all(do="close") == [{"closed": True}] * 4


def test_a_node_that_is_cut_off_fails_the_save_by_name_and_the_next_one_commits(two_nodes: Cluster) -> None:
    two_nodes.start_ranks(2, NODE_RANK="0")  # wrong on one of them: nobody may look at it
    two_nodes.all(do="save", step=1)
    assert two_nodes.all(do="result", step=1) == [{"committed": str(two_nodes.directory / "step-1")}] * 4
    assert_holds(two_nodes.directory, 1)
    here, there = two_nodes.nodes
    two_nodes.net.cut(1)
    assert together(here.ranks, do="save", step=2) == [{"staged": True}] * 2
    for answer in together(here.ranks, do="result", step=2):
        assert "node node-b has not been heard of for" in answer["failed"]
        assert answer["ranks"] == [2, 3]
    assert together(there.ranks, do="save", step=2) == [{"staged": True}] * 2
    two_nodes.net.heal(1)
    for answer in together(there.ranks, do="result", step=2):
        assert "heard of for" in answer["failed"]  # by the coordinator of this node, or by this node of the coordinator
    assert two_nodes.all(do="save", step=3) == [{"staged": True}] * 4
    assert all("committed" in answer for answer in two_nodes.all(do="result", step=3))
    assert_holds(two_nodes.directory, 3)
    assert not (two_nodes.directory / "step-2").exists()
    assert two_nodes.all(do="latest") == [{"latest": 3}] * 4
    assert two_nodes.all(do="close") == [{"closed": True}] * 4


@pytest.mark.faults
def test_storage_is_the_ledger_on_both_sides_of_a_cut(two_nodes: Cluster) -> None:
    """Messages are only quicker. What is not on storage either is in doubt, and nobody waits for ever for it."""
    here, there = two_nodes.nodes
    there.kill_sidecar()
    there.start_sidecar("--node-timeout-s", str(4 * NODE_TIMEOUT_S))  # the coordinator shall have committed by then
    two_nodes.start_ranks(2)
    two_nodes.all(do="save", step=1)
    two_nodes.all(do="result", step=1)
    two_nodes.net.cut(1)
    assert two_nodes.all(do="save", step=2) == [{"staged": True}] * 4
    assert all("committed" in answer for answer in together(here.ranks, do="result", step=2))
    assert all("committed" in answer for answer in together(there.ranks, do="result", step=2))
    assert_holds(two_nodes.directory, 2)
    assert together(there.ranks, do="save", step=3) == [{"staged": True}] * 2
    for answer in together(there.ranks, do="result", step=3):
        assert "CoordinatorLost" in answer["failed"]
        assert "was not heard of for" in answer["failed"]
    two_nodes.net.heal(1)
    together(here.ranks, do="save", step=3)
    two_nodes.all(do="save", step=4)
    assert all("committed" in answer for answer in two_nodes.all(do="result", step=4))
    assert_holds(two_nodes.directory, 4)
    two_nodes.all(do="close")


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1], ids=["the coordinator", "another node's"])
def test_a_killed_sidecar_loses_nothing(two_nodes: Cluster, victim: int) -> None:
    two_nodes.start_ranks(2)
    two_nodes.all(do="save", step=1)
    two_nodes.all(do="result", step=1)
    assert two_nodes.all(do="save", step=2) == [{"staged": True}] * 4
    two_nodes.nodes[victim].kill_sidecar()
    assert two_nodes.all(do="save", step=3) == [{"staged": True}] * 4
    two_nodes.nodes[victim].start_sidecar("--node-timeout-s", str(NODE_TIMEOUT_S))
    for step in (2, 3):
        assert all("committed" in answer for answer in two_nodes.all(do="result", step=step))
        assert_holds(two_nodes.directory, step)
    two_nodes.all(do="close")


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1], ids=["rank 0's", "another"])
def test_ranks_of_a_node_without_a_sidecar_save_on(two_nodes: Cluster, victim: int) -> None:
    """By the policy ``degraded``: the ledger tells each side what the other has done."""
    two_nodes.start_ranks(1, NODE_RANK_NO_SIDECAR="degraded", NODE_RANK_CONNECT_TIMEOUT_S="15")
    two_nodes.all(do="save", step=1)
    two_nodes.all(do="result", step=1)
    two_nodes.nodes[victim].kill_sidecar()
    assert two_nodes.all(do="save", step=2) == [{"staged": True}] * 2
    without, served = two_nodes.nodes[victim].ranks, two_nodes.nodes[1 - victim].ranks
    assert all("committed" in answer for answer in together(without, do="result", step=2))
    assert all("committed" in answer for answer in together(served, do="result", step=2))
    assert_holds(two_nodes.directory, 2, world_size=2)
    two_nodes.nodes[victim].start_sidecar("--node-timeout-s", str(NODE_TIMEOUT_S))
    assert two_nodes.all(do="save", step=3) == [{"staged": True}] * 2
    assert all("committed" in answer for answer in two_nodes.all(do="result", step=3))
    assert_holds(two_nodes.directory, 3, world_size=2)
    two_nodes.all(do="close")


@pytest.mark.faults
def test_a_restarted_job_resumes_from_what_the_dead_one_had_staged(two_nodes: Cluster) -> None:
    two_nodes.start_ranks(2)
    two_nodes.all(do="save", step=1)
    two_nodes.all(do="result", step=1)
    assert two_nodes.all(do="save", step=2) == [{"staged": True}] * 4
    for rank in two_nodes.ranks:
        rank.kill()
    two_nodes.start_ranks(2, TORCHELASTIC_RESTART_COUNT="1")
    assert two_nodes.all(do="latest") == [{"latest": 2}] * 4
    assert_holds(two_nodes.directory, 2)
    two_nodes.all(do="save", step=3)
    assert all("committed" in answer for answer in two_nodes.all(do="result", step=3))
    two_nodes.all(do="close")


@pytest.mark.faults
def test_a_job_that_is_restarted_with_a_smaller_world_goes_on(two_nodes: Cluster) -> None:
    two_nodes.start_ranks(2)
    assert two_nodes.all(do="save", step=1) == [{"staged": True}] * 4
    for rank in two_nodes.ranks:
        rank.kill()
    two_nodes.start_ranks(2, two_nodes.nodes[:1], TORCHELASTIC_RESTART_COUNT="1")
    assert two_nodes.all(do="latest") == [{"latest": 1}] * 2
    assert_holds(two_nodes.directory, 1)
    two_nodes.all(do="save", step=2)
    assert all("committed" in answer for answer in two_nodes.all(do="result", step=2))
    assert_holds(two_nodes.directory, 2, world_size=2)
    two_nodes.all(do="close")


@pytest.mark.faults
def test_a_node_that_joins_late_is_waited_for(two_nodes: Cluster) -> None:
    here, there = two_nodes.nodes
    two_nodes.launch(here, 2, 4)
    for rank in here.ranks:
        assert "welcomed" in rank.hear()
        rank.tell(do="save", step=1)  # its planning needs all ranks
    two_nodes.launch(there, 2, 4)
    for rank in there.ranks:
        assert "welcomed" in rank.hear()
        rank.tell(do="save", step=1)
    assert [rank.hear() for rank in two_nodes.ranks] == [{"staged": True}] * 4
    assert all("committed" in answer for answer in two_nodes.all(do="result", step=1))
    two_nodes.all(do="close")
