"""Where the sidecar runs: lists of cores, and cores away from those that ranks are pinned to."""

from __future__ import annotations

import logging
import os

import pytest

from ckpt_sidecar.affinity import AWAY, INHERIT, Affinity, cores_away_from, parse_cores

ALL = frozenset(range(8))


class Machine:
    """What each process may use, and where the sidecar went."""

    def __init__(self, **pinned: set[int]) -> None:
        self.cores: dict[int, set[int]] = {0: set(ALL)} | {int(pid[1:]): cores for pid, cores in pinned.items()}
        self.moves: list[frozenset[int]] = []
        self.forbids = False

    def cores_of(self, pid: int) -> set[int]:
        if pid not in self.cores:
            raise ProcessLookupError(3, "No such process")
        return self.cores[pid]

    def move(self, cores: frozenset[int]) -> None:
        if self.forbids:
            raise PermissionError(1, "Operation not permitted")
        self.moves.append(cores)

    def affinity(self, wanted: str) -> Affinity:
        return Affinity(wanted, self.cores_of, self.move)


@pytest.fixture
def _eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 8)


@pytest.mark.usefixtures("_eight")
@pytest.mark.parametrize(
    ("text", "cores"), [("0", {0}), ("0-3,7", {0, 1, 2, 3, 7}), ("1, 3", {1, 3}), ("2-2", {2}), ("0,0", {0})]
)
def test_a_list_of_cores(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.usefixtures("_eight")
@pytest.mark.parametrize("text", ["", ",", "a", "-1", "1-", "3-1", "0-8", "8", "1.5", "\u0663", "9" * 30])
def test_what_is_no_list_of_cores_of_this_machine_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="core|ends before it begins"):
        parse_cores(text)


def test_cores_that_ranks_are_pinned_to_are_left_to_them() -> None:
    assert cores_away_from([frozenset({0, 1}), frozenset({2, 3})], ALL) == {4, 5, 6, 7}
    assert cores_away_from([], ALL) == ALL


def test_where_ranks_may_use_every_core_the_sidecar_may_too() -> None:
    assert cores_away_from([ALL], ALL) == ALL
    assert cores_away_from([frozenset(range(4)), frozenset(range(4, 8))], ALL) == ALL


def test_away_follows_the_ranks() -> None:
    machine = Machine(p11={0, 1}, p12={2, 3})
    affinity = machine.affinity(AWAY)
    affinity.begin()
    affinity.avoid([])
    assert machine.moves == []
    affinity.avoid([11])
    affinity.avoid([11])
    affinity.avoid([11, 12])
    affinity.avoid([])
    assert machine.moves == [ALL - {0, 1}, ALL - {0, 1, 2, 3}, ALL]
    assert affinity.cores == ALL


def test_a_rank_that_has_just_ended_takes_no_core() -> None:
    machine = Machine()
    machine.affinity(AWAY).avoid([77])
    assert machine.moves == []


@pytest.mark.usefixtures("_eight")
def test_given_cores_are_kept_whatever_the_ranks_use() -> None:
    machine = Machine(p11={6, 7})
    affinity = machine.affinity("6-7")
    affinity.begin()
    affinity.avoid([11])
    assert (machine.moves, affinity.cores) == ([frozenset({6, 7})], {6, 7})


def test_inherited_cores_are_kept() -> None:
    machine = Machine(p11={0})
    affinity = machine.affinity(INHERIT)
    affinity.begin()
    affinity.avoid([11])
    assert (machine.moves, affinity.cores) == ([], ALL)


def test_a_container_that_forbids_it_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(p11={0})
    machine.forbids = True
    affinity = machine.affinity(AWAY)
    with caplog.at_level(logging.WARNING):
        affinity.avoid([11])
        affinity.avoid([11])
    assert len(caplog.records) == 1
    assert "cannot move the sidecar to cores [1, 2, 3, 4, 5, 6, 7]" in caplog.text
    assert affinity.cores == ALL
