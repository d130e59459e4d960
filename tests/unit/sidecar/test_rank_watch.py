"""Which ranks live, and what those that go have sealed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_proto.codec import encode
from ckpt_proto.messages import SubmitShard
from ckpt_proto.region import Seal, region_path, seal_path
from ckpt_sidecar.events import RankDied, ShardSealed
from ckpt_sidecar.rank_watch import SILENT_S, RankWatch
from testkit.tables import Node, hello, key

STARTED_S = hello().process_start_s


class Watched:
    """The ranks of a node, one of which has sealed something, and the processes that live."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.living = {1000: STARTED_S, 1001: STARTED_S}
        self.node = Node().welcomed(0).planned(0).welcomed(1).planned(1)
        self.watch = RankWatch(self.node.table, directory, self.living.get)

    def seals(self, rank: int, slot: int = 0) -> SubmitShard:
        submit = self.node.submit(key(), rank, slot)
        record = encode(submit)
        seal = Seal(seal_path(region_path(self.directory, rank, slot)))
        try:
            seal.reserve(len(record))
            seal.set(record)
        finally:
            seal.close()
        return submit


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_a_dead_rank_s_seal_is_told_before_its_death(watched: Watched) -> None:
    submit = watched.seals(1)
    assert watched.watch.deaths(0.0) == []
    del watched.living[1001]
    sealed, died = watched.watch.deaths(0.0)
    assert sealed == ShardSealed(submit)
    assert isinstance(died, RankDied)
    assert (died.rank, died.pid) == (1, 1001)


def test_a_pid_that_belongs_to_another_process_now_is_a_death(watched: Watched) -> None:
    watched.living[1001] = STARTED_S + 1
    assert [type(event) for event in watched.watch.deaths(0.0)] == [RankDied]


def test_who_says_goodbye_leaves_what_this_sidecar_has_not_heard_of(watched: Watched) -> None:
    submit = watched.seals(1)
    assert watched.watch.left_by(Node.peer(0)) == []
    assert watched.watch.left_by(Node.peer(1)) == [ShardSealed(submit)]
    assert watched.watch.left_by(b"a stranger") == []


def test_what_is_known_is_not_told_twice(watched: Watched) -> None:
    watched.seals(1)
    watched.node.submitted(key(), 1)
    assert watched.watch.left_by(Node.peer(1)) == []
    del watched.living[1001]
    assert [type(event) for event in watched.watch.deaths(0.0)] == [RankDied]


def test_a_silent_client_does_not_hold_up_a_drain_but_is_not_dead(watched: Watched) -> None:
    assert watched.watch.connected_ranks(0.0) == [0, 1]
    watched.watch.hear(Node.peer(1), SILENT_S)
    assert watched.watch.connected_ranks(SILENT_S) == [1]
    assert watched.watch.deaths(SILENT_S) == []


def test_a_rank_whose_process_cannot_be_looked_up_is_dead_when_it_is_silent(watched: Watched) -> None:
    watched.living.clear()
    for record in watched.node.table.ranks.values():
        record.other_namespace = True
    assert watched.watch.deaths(0.0) == []
    watched.watch.hear(Node.peer(0), 1.0)
    (died,) = watched.watch.deaths(SILENT_S + 0.5)
    assert isinstance(died, RankDied)
    assert died.rank == 1
