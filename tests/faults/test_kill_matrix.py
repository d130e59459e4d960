"""Every process of a job is killed at every point of a save, one at a time, and the job goes on.

Real processes, real deaths: see ``testkit/kill_scenario.py`` for what is looked at afterwards. A short part of the
matrix runs with the ordinary tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testkit.kill_points import POINTS, KillOrder, find
from testkit.kill_scenario import COMMITTED, FAILED, KEPT, OPEN, Scenario, play
from testkit.leaks import private_shm_root
from testkit.outcomes import Outcomes
from testkit.ranks import RankStarter
from testkit.verdict import Outcome


def sidecar(point: str, nth: int, step: int, fate: str, *, all_die: bool = False, overlap: bool = False) -> Scenario:
    """The sidecar dies at the ``nth`` passing of ``point``."""
    return Scenario(KillOrder(point, nth), step, fate, all_die=all_die, overlap=overlap)


def rank(
    rank: int, point: str, nth: int, step: int, fate: str, *, all_die: bool = False, overlap: bool = False
) -> Scenario:
    """A rank dies at its ``nth`` passing of ``point``."""
    return Scenario(KillOrder(point, nth, rank), step, fate, all_die=all_die, overlap=overlap)


IN_HANDSHAKES = [
    *(
        sidecar(point, nth, 0, COMMITTED)
        for point, nths in (
            ("before Hello is taken", (1, 2)),
            ("after Hello is taken", (1, 2)),
            ("before the directory is opened", (1,)),
            ("after the directory is opened", (1,)),
        )
        for nth in nths
    ),
    *(
        sidecar(point, nth, 0, COMMITTED)
        for point in ("before Goodbye is taken", "after Goodbye is taken")
        for nth in (1, 2)
    ),
]

IN_PLANNING = [
    sidecar(point, nth, 1, COMMITTED)
    for point, nths in (
        ("before ProposePlan is taken", (1, 2)),
        ("after ProposePlan is taken", (1, 2)),
        ("before GlobalPlan is taken", (1,)),
        ("after GlobalPlan is taken", (1,)),
        ("before a region is prepared", (1, 4)),
        ("after a region is prepared", (1, 4)),
    )
    for nth in nths
]

_OF_EACH_SHARD = (
    "before SubmitShard is taken",
    "after SubmitShard is taken",
    "before a shard is written",
    "before the first window",
    "after the first window",
    "before the last window",
    "after the last window",
    "before a data file is durable",
    "after a data file is durable",
    "before a manifest is written",
    "before a manifest has its name",
    "after a manifest has its name",
    "before a durable shard is reported",
)
# The third and fourth are those of the second save. When the second of them gets there, both ranks have sealed theirs.
IN_WRITING = [sidecar(point, nth, 2, fate) for point in _OF_EACH_SHARD for nth, fate in ((3, OPEN), (4, KEPT))]

IN_COMMITS = [
    *(
        sidecar(point, nth, 2, fate)
        for point, nth, fate in (
            ("before DecideCommit is taken", 2, KEPT),
            ("after DecideCommit is taken", 2, KEPT),
            ("before the checkpoint is published", 2, KEPT),
            ("before .metadata is linked", 2, KEPT),
            ("after .metadata is linked", 2, COMMITTED),
            ("before the commit is reported", 2, COMMITTED),
            ("before a rank is told of the commit", 3, COMMITTED),
        )
    ),
    *(Scenario(KillOrder("after a rank is told of the commit", nth), 2, COMMITTED, ahead=True) for nth in (3, 4)),
    *(
        Scenario(KillOrder(point), 2, fate, again=True)
        for point, fate in (
            ("before .metadata is replaced", KEPT),
            ("after .metadata is replaced", COMMITTED),
            ("before superseded files are removed", COMMITTED),
        )
    ),
    *(
        # The first removal makes the veto durable. After it the ranks know, and have begun the next save.
        Scenario(KillOrder(point, nth), 3, OPEN, vetoed=2)
        for point in ("before the files of an attempt are removed", "after the files of an attempt are removed")
        for nth in (1, 2, 3)
    ),
    Scenario(KillOrder("after the files of an attempt are removed"), 2, FAILED, vetoed=2, all_die=True),
]

WITH_EVERY_RANK = [
    sidecar("before SubmitShard is taken", 4, 2, KEPT, all_die=True),
    sidecar("after the first window", 4, 2, KEPT, all_die=True),
    sidecar("before a durable shard is reported", 4, 2, KEPT, all_die=True),
    sidecar("before .metadata is linked", 2, 2, KEPT, all_die=True),
    sidecar("after .metadata is linked", 2, 2, COMMITTED, all_die=True),
    sidecar("after a region is prepared", 2, 1, OPEN, all_die=True),
]

WHILE_SAVES_OVERLAP = [
    sidecar("after SubmitShard is taken", 6, 3, OPEN, overlap=True),
    sidecar("after the first window", 5, 3, OPEN, overlap=True),
    sidecar("before the last window", 4, 3, OPEN, overlap=True),
    sidecar("before .metadata is linked", 2, 2, OPEN, overlap=True),
    sidecar("after .metadata is linked", 2, 2, OPEN, overlap=True),
    rank(0, "halfway through the copy", 3, 3, OPEN, overlap=True),
    rank(1, "after the region is sealed", 3, 3, OPEN, overlap=True, all_die=True),
    rank(0, "before the pre-commit hooks", 2, 2, OPEN, overlap=True, all_die=True),
]

_OF_A_RANK = (
    ("before the local plan is made", 1, 1, FAILED),
    ("after the local plan is made", 1, 1, FAILED),
    ("after FinalPlan has come", 1, 1, FAILED),
    ("after RegionReady has come", 1, 1, FAILED),
    ("before the seal is broken", 2, 2, FAILED),
    ("after the seal is broken", 2, 2, FAILED),
    ("halfway through the copy", 2, 2, FAILED),
    ("before the region is sealed", 2, 2, FAILED),
    ("after the region is sealed", 2, 2, COMMITTED),
    ("before SubmitShard is sent", 2, 2, COMMITTED),
    ("after SubmitShard is queued", 2, 2, COMMITTED),
    ("after save has returned", 2, 2, COMMITTED),
    ("after ShardPersisted has come", 2, 2, COMMITTED),
    ("after Committed has come", 2, 2, COMMITTED),
    ("before the post-commit hooks", 2, 3, OPEN),  # the next save may have begun meanwhile, on another thread
    ("before close", 1, 0, COMMITTED),
    ("before Goodbye", 1, 0, COMMITTED),
    ("after Farewell has come", 1, 0, COMMITTED),
)
_OF_RANK_0 = (
    ("before the global plan is made", 1, 1, FAILED),
    ("after the global plan is made", 1, 1, FAILED),
    ("before the pre-commit hooks", 2, 2, COMMITTED),
    ("after the pre-commit hooks", 2, 2, COMMITTED),
)
OF_RANKS = [
    *(rank(number, *row) for number in (0, 1) for row in _OF_A_RANK),
    *(rank(0, *row) for row in _OF_RANK_0),
]
# As a launcher does it: when one has died the others are killed. One that had not staged then never will.
OF_ALL_RANKS = [
    *(rank(1, point, nth, step, FAILED, all_die=True) for point, nth, step, fate in _OF_A_RANK if fate == FAILED),
    *(rank(0, point, nth, step, OPEN, all_die=True) for point, nth, step, fate in _OF_A_RANK if step == 2 != fate),
    rank(0, "after Welcome has come", 1, 1, FAILED, all_die=True),
    rank(1, "after Welcome has come", 1, 1, FAILED, all_die=True),
    rank(0, "before the pre-commit hooks", 2, 2, COMMITTED, all_die=True),
    rank(0, "after the pre-commit hooks", 2, 2, COMMITTED, all_die=True),
    rank(1, "after Committed has come", 2, 2, COMMITTED, all_die=True),
]

BY_CLIENTS = [Scenario(KillOrder("after the first window", 4), 2, KEPT, supervised=False)]

MATRIX = [
    *IN_HANDSHAKES,
    *IN_PLANNING,
    *IN_WRITING,
    *IN_COMMITS,
    *WITH_EVERY_RANK,
    *WHILE_SAVES_OVERLAP,
    *OF_RANKS,
    *OF_ALL_RANKS,
    *BY_CLIENTS,
]

# Two nodes with one rank each: what is counted by rank happens half as often on each of them.
_ON_EITHER_NODE = (
    sidecar("after Hello is taken", 1, 0, COMMITTED),
    sidecar("after ProposePlan is taken", 1, 1, COMMITTED),
    sidecar("before a region is prepared", 1, 1, COMMITTED),
    sidecar("after a region is prepared", 1, 1, COMMITTED),
    sidecar("before SubmitShard is taken", 2, 2, COMMITTED),
    sidecar("after SubmitShard is taken", 2, 2, COMMITTED),
    sidecar("after the first window", 2, 2, COMMITTED),
    sidecar("after a data file is durable", 2, 2, COMMITTED),
    sidecar("before a manifest has its name", 2, 2, COMMITTED),
    sidecar("after a manifest has its name", 2, 2, COMMITTED),
    sidecar("before a durable shard is reported", 2, 2, COMMITTED),
    sidecar("after the first window", 2, 2, COMMITTED, all_die=True),
    sidecar("before a durable shard is reported", 2, 2, COMMITTED, all_die=True),
)
_ON_THE_COORDINATOR = (
    sidecar("after GlobalPlan is taken", 1, 1, COMMITTED),
    sidecar("before DecideCommit is taken", 2, 2, COMMITTED),
    sidecar("after DecideCommit is taken", 2, 2, COMMITTED),
    sidecar("before the checkpoint is published", 2, 2, COMMITTED),
    sidecar("before .metadata is linked", 2, 2, COMMITTED),
    sidecar("after .metadata is linked", 2, 2, COMMITTED),
    sidecar("before the commit is reported", 2, 2, COMMITTED),
    sidecar("before the checkpoint is published", 2, 2, COMMITTED, all_die=True),
    sidecar("after .metadata is linked", 2, 2, COMMITTED, all_die=True),
)
_OF_RANKS_ON_NODES = (
    *(rank(number, "before the region is sealed", 2, 2, FAILED) for number in (0, 1)),
    *(rank(number, "after the region is sealed", 2, 2, COMMITTED) for number in (0, 1)),
    *(rank(number, "after SubmitShard is queued", 2, 2, COMMITTED) for number in (0, 1)),
    rank(0, "before the pre-commit hooks", 2, 2, COMMITTED),
)
ON_TWO_NODES = [
    *((struck, scenario) for struck in (0, 1) for scenario in _ON_EITHER_NODE),
    *((0, scenario) for scenario in _ON_THE_COORDINATOR),
    *((0, scenario) for scenario in _OF_RANKS_ON_NODES),
]

SHORT = [
    sidecar("after ProposePlan is taken", 2, 1, OPEN),
    sidecar("after the first window", 4, 2, KEPT),
    sidecar("after .metadata is linked", 2, 2, COMMITTED),
    sidecar("before a durable shard is reported", 4, 2, KEPT, all_die=True),
    rank(1, "halfway through the copy", 2, 2, FAILED),
    rank(0, "before SubmitShard is sent", 2, 2, COMMITTED),
    rank(0, "before the pre-commit hooks", 2, 2, COMMITTED, all_die=True),
]


def judge_scenario(
    scenario: Scenario, outcomes: Outcomes, run: Callable[[], tuple[list[str], str, Outcome]], nodes: int = 1
) -> None:
    """Run a scenario, count what came of it, and fail if that is not what it should be."""
    victim = "a sidecar" if scenario.kills_sidecar else "a rank"
    others = ", then all ranks" if scenario.all_die else ""
    with outcomes.run(f"{victim} killed{others}; {'one node' if nodes == 1 else 'two nodes'}") as row:
        unexpected, story, outcome = run()
        row.count(outcome)
    print(story)
    assert not unexpected


def test_every_point_is_where_the_table_says() -> None:
    for point in POINTS.values():
        owner, name, value = find(point.module, point.attribute)
        assert callable(value), (owner, name)


def test_every_point_is_in_the_matrix() -> None:
    assert {scenario.order.point for scenario in MATRIX} == set(POINTS)


@pytest.mark.parametrize("scenario", SHORT, ids=lambda scenario: scenario.name)
def test_a_process_is_killed(
    scenario: Scenario,
    tmp_path: Path,
    shm_root: Path,
    processes: RankStarter,
    stock_ranks: RankStarter,
    outcomes: Outcomes,
) -> None:
    judge_scenario(scenario, outcomes, lambda: play(scenario, tmp_path, [shm_root], processes, stock_ranks))


@pytest.mark.faults
@pytest.mark.parametrize("scenario", MATRIX, ids=lambda scenario: scenario.name)
def test_a_process_is_killed_at_every_point(
    scenario: Scenario,
    tmp_path: Path,
    shm_root: Path,
    processes: RankStarter,
    stock_ranks: RankStarter,
    outcomes: Outcomes,
) -> None:
    judge_scenario(scenario, outcomes, lambda: play(scenario, tmp_path, [shm_root], processes, stock_ranks))


@pytest.fixture
def second_root() -> Iterator[Path]:
    with private_shm_root() as root:
        yield root


@pytest.mark.faults
@pytest.mark.parametrize(
    ("struck", "scenario"), ON_TWO_NODES, ids=[f"node {node}, {scenario.name}" for node, scenario in ON_TWO_NODES]
)
def test_a_process_of_two_nodes_is_killed(
    struck: int,
    scenario: Scenario,
    tmp_path: Path,
    shm_root: Path,
    second_root: Path,
    processes: RankStarter,
    stock_ranks: RankStarter,
    outcomes: Outcomes,
) -> None:
    roots = [shm_root, second_root]
    judge_scenario(scenario, outcomes, lambda: play(scenario, tmp_path, roots, processes, stock_ranks, struck), nodes=2)
