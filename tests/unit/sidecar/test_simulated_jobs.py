"""Whole jobs, simulated: sidecars, ranks, nodes and storage that fail in orders drawn from seeds.

A failing schedule prints its story; ``play(seed)`` plays it again, ``shorten`` drops what it does not need.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from testkit.outcomes import Outcomes
from testkit.simulator.node import NODE_TIMEOUT_S
from testkit.simulator.schedules import Player, Schedule, draw_schedule, fails, play, play_schedule, shorten

SCHEDULES = 10_000
BATCH = 500
TOLD_BATCHES = 40
GROUP = "simulated jobs of up to three nodes"

FORKED = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
"""Of Python 3.12 and later; a simulated job takes no lock that another thread could have held."""


def play_all(first: int, count: int) -> int:
    """Play the schedules of some seeds; returns how many saves were committed in them."""
    return sum(len(play(seed).world.promises.published) for seed in range(first, first + count))


def play_on_all_cores(first: int, count: int) -> Iterator[tuple[int, int]]:
    """Play the schedules of ``count`` seeds; of each batch, how many it has and how many saves were committed in them.
    Batches that have not begun when one fails are not played."""
    firsts = range(first, first + count, BATCH)
    counts = [min(BATCH, first + count - each) for each in firsts]
    # Frozen: what the process that runs all tests has piled up is not looked at by every collection of garbage.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork"), initializer=gc.freeze) as pool:
        yield from zip(counts, pool.map(play_all, firsts, counts), strict=True)


@FORKED
def test_schedules_drawn_from_seeds(outcomes: Outcomes) -> None:
    with outcomes.run(GROUP, runs=0, unit="schedules") as row:
        for played, committed in play_on_all_cores(0, SCHEDULES):
            row.runs += played
            row.committed += committed
            assert committed > played // 4, "the schedules have become too hostile to tell anything"


@FORKED
@pytest.mark.faults
def test_a_million_schedules(pytestconfig: pytest.Config, outcomes: Outcomes, tell: Callable[[str], None]) -> None:
    """Some fifty minutes of one core, on all of them; those after the ones that are always played. ``--schedules`` says
    how many."""
    count = pytestconfig.getoption("schedules")
    with outcomes.run(GROUP, runs=0, unit="schedules") as row:
        for batch, (played, committed) in enumerate(play_on_all_cores(SCHEDULES, count)):
            row.runs += played
            row.committed += committed
            if batch % TOLD_BATCHES == TOLD_BATCHES - 1:
                tell(f"{row.runs:,} of {count:,} schedules played, {row.committed:,} saves committed in them")


def test_a_schedule_is_played_alike_every_time() -> None:
    stories = [play(3, is_traced=True).world.story for _ in range(2)]
    assert stories[0] == stories[1]


def test_an_undisturbed_job_commits_every_save() -> None:
    moves = (("save", {"kind": 99}),) * 3
    player = play_schedule(Schedule(2, 3, has_hooks=False, moves=moves))
    player.save(99)
    player.world.rest()
    assert [save.seq for save in player.world.promises.published] == [0, 1]  # it was asked for one when all had ended


def test_a_staged_save_survives_sidecars_and_ranks_that_are_killed_at_once() -> None:
    moves = (("save", {"kind": 99}), ("rest", {}), ("save", {"kind": 99}), ("until_staged", {}), ("rare", KILL_ALL))
    published = play_schedule(Schedule(2, 3, has_hooks=False, moves=moves)).world.promises.published
    assert [save.seq for save in published][:2] == [0, 1]


def cut_off_when_staged() -> Player:
    """Two nodes with a rank each, cut off from each other; the second save is staged on both."""
    player = Player(Schedule(2, 2, has_hooks=False, moves=()))
    for _ in range(2):
        player.rest()
        player.save(99)
        player.until_staged()
    player.cut(1, cut=True)
    return player


def test_a_node_that_does_not_hear_the_coordinator_sees_on_storage_what_is_committed() -> None:
    player = cut_off_when_staged()
    player.rest()
    promises = player.world.promises
    assert len(promises.published) == 1
    player.wait(NODE_TIMEOUT_S + 1)
    player.rest()
    assert len(promises.published) == 2
    player.wait(NODE_TIMEOUT_S / 2)
    player.rest()
    assert list(promises.saves.values())[1].committed == {0, 1}


def test_a_node_that_is_cut_off_does_not_wait_for_ever() -> None:
    """Rank 1 lives there. What is in doubt is committed after all when the storage that hung goes on."""
    player = cut_off_when_staged()
    player.trouble("hangs")
    for _ in range(2):
        player.wait(NODE_TIMEOUT_S + 1)
        player.rest()
    promises = player.world.promises
    told = list(promises.saves.values())[1].failed
    assert {rank: kinds for rank, (kinds, *_) in told.items()} == {1: {"CoordinatorLost"}}
    player.trouble("")
    player.rest()
    assert list(told) == [1]
    assert len(promises.published) == 2


KILL_ALL = {"kind": 3, "rank": 0, "node": 0, "lost": 0}


def test_a_broken_promise_is_told_with_its_story_and_made_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testkit.simulator.shared_memory.SharedMemory.break_seal", lambda *place: None)
    seed = next(seed for seed in range(100) if fails(draw_schedule(seed)))
    with pytest.raises(AssertionError, match=rf"seed {seed}\n.*\n(.*\n)*broke a promise: Broken"):
        play(seed)
    short = shorten(draw_schedule(seed))
    assert "sealed" in fails(short) or "written" in fails(short)
    assert len(short.moves) <= 3
