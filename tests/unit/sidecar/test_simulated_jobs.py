"""Whole jobs, simulated: sidecars, ranks, nodes and storage that fail in orders drawn from seeds.

A failing schedule prints its story; ``play(seed)`` plays it again, ``shorten`` drops what it does not need.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from testkit.outcomes import Outcomes
from testkit.simulator.node import NODE_TIMEOUT_S
from testkit.simulator.schedules import Player, Schedule, draw_schedule, fails, play, play_schedule, shorten

SCHEDULES = 10_000
BATCH = 1_000
TOLD_BATCHES = 20
GROUP = "simulated jobs of up to three nodes"


def play_all(first: int, count: int) -> int:
    """Play the schedules of some seeds; returns how many saves were committed in them."""
    return sum(len(play(seed).world.promises.published) for seed in range(first, first + count))


@pytest.mark.parametrize("first", range(0, SCHEDULES, BATCH))
def test_schedules_drawn_from_seeds(first: int, outcomes: Outcomes) -> None:
    with outcomes.run(GROUP, runs=BATCH, unit="schedules") as row:
        committed = play_all(first, BATCH)
        row.committed += committed
    assert committed > BATCH // 4, "the schedules have become too hostile to tell anything"


@pytest.mark.faults
def test_a_million_schedules(pytestconfig: pytest.Config, outcomes: Outcomes, tell: Callable[[str], None]) -> None:
    """Some fifty minutes of one core, on all of them; those after the ones that are always played. ``--schedules`` says
    how many. Batches that have not begun when one fails are not played."""
    count = pytestconfig.getoption("schedules")
    firsts = range(SCHEDULES, SCHEDULES + count, BATCH)
    counts = [min(BATCH, SCHEDULES + count - first) for first in firsts]
    with (
        outcomes.run(GROUP, runs=0, unit="schedules") as row,
        ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool,
    ):
        for batch, committed in enumerate(pool.map(play_all, firsts, counts)):
            row.runs += counts[batch]
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
    assert [save.seq for save in player.world.promises.published] == [0]


def test_a_staged_save_survives_sidecars_and_ranks_that_are_killed_at_once() -> None:
    moves = (("save", {"kind": 99}), ("rest", {}), ("save", {"kind": 99}), ("until_staged", {}), ("rare", KILL_ALL))
    published = play_schedule(Schedule(2, 3, has_hooks=False, moves=moves)).world.promises.published
    assert [save.seq for save in published] == [0, 1]


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
