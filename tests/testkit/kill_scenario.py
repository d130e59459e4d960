"""One job in which one process is killed at one point, and its restart: what is to be expected, and what came of it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from testkit.kill_points import RANK_POINTS, SIDECAR_POINTS, KillOrder
from testkit.leaks import left_in
from testkit.nodes import Node
from testkit.ranks import RankStarter
from testkit.stock_load import load_each
from testkit.training import Attempt, Program, read_records, train
from testkit.verdict import A_KILLED_SIDECAR_MAY, Outcome, Problem, in_order, judge
from testkit.waiting import last_of

WORLD_SIZE: Final = 2

COMMITTED = "committed"
"""The save that was struck can be restored, whatever dies."""

KEPT = "kept"
"""Every rank had staged it: it is committed, unless a killed sidecar may lose it."""

FAILED = "failed"
"""It is given up, and every rank that lives is told why."""

OPEN = "open"
"""Either: whether every rank had staged it is not determined. What every rank has written down as staged must not be
lost all the same."""

LIFE_S: Final = 80.0
"""How long one life of the ranks may take; a few seconds are usual."""

WINDOWS: Final = {"ckpt_sidecar.shard_writer:WINDOW_BYTES": 1 << 19}
"""So that a data file of a few MB is written in several windows."""


@dataclass(frozen=True)
class Scenario:
    """A job and the death in it.

    Attributes:
        order: who dies where.
        step: the step whose save is struck; 0: none is in flight then.
        fate: what becomes of it.
        all_die: every rank is killed as soon as the victim has died; otherwise the others go on as far as they can.
        again: the struck save is the second one of its step, over the first.
        supervised: the sidecar is started again by a supervisor; otherwise by the clients.
        overlap: a save begins while the one before is in flight, so that any of them may be struck.
        vetoed: the step that a pre-commit hook refuses.
        ahead: a rank that knows the end of the struck save may have begun the next one, which then is open too.
    """

    order: KillOrder
    step: int
    fate: str
    all_die: bool = False
    again: bool = False
    supervised: bool = True
    overlap: bool = False
    vetoed: int = -1
    ahead: bool = False

    def __post_init__(self) -> None:
        if self.order.point not in (SIDECAR_POINTS if self.kills_sidecar else RANK_POINTS):
            who = "a sidecar" if self.kills_sidecar else "a rank"
            raise ValueError(f"{self.order.point!r} is no point of {who}: see testkit/kill_points.py")

    @property
    def kills_sidecar(self) -> bool:
        """Whether the sidecar is the victim."""
        return self.order.rank is None

    @property
    def allowed(self) -> frozenset[str]:
        """The kinds of problems that what was in flight may have."""
        return A_KILLED_SIDECAR_MAY if self.kills_sidecar else frozenset()

    @property
    def name(self) -> str:
        """For the test's id."""
        who = "sidecar" if self.kills_sidecar else f"rank {self.order.rank}"
        words = {"all die": self.all_die, "saves overlap": self.overlap, "clients restart it": not self.supervised}
        return ", ".join([f"{who} {self.order.point} no {self.order.nth}", *(word for word in words if words[word])])

    def program(self, directory: Path, records: Path) -> Program:
        """What the ranks do."""
        saved_twice = self.step if self.again else -1
        return Program(str(directory), str(records), overlap=self.overlap, saved_twice=saved_twice, vetoed=self.vetoed)

    def unexpected(self, outcome: Outcome, program: Program) -> list[str]:
        """Where an outcome differs from what is to be expected, one line each; empty if it does not."""
        attempts = program.attempts(0, 0)
        struck = Attempt(0, self.step, int(self.again))
        next_one = {attempt for attempt in attempts if self.ahead and attempt.step == self.step + 1}
        found = outcome.unexpected(self.allowed, set(attempts) if self.overlap else {struck, *next_one})
        for attempt in attempts:
            fate = self._fate_of(attempt, struck)
            if fate == COMMITTED and attempt not in outcome.committed:
                found.append(f"{attempt} is not committed")
            if fate == FAILED and attempt in outcome.committed:
                found.append(f"{attempt} is committed")
        later = in_order(attempt for attempt in outcome.committed if attempt.life > 0)
        if len(later) != program.later_steps:
            found.append(f"of {program.later_steps} saves of the restarted job these are committed: {later}")
        return found

    def _fate_of(self, attempt: Attempt, struck: Attempt) -> str:
        if attempt.step == self.vetoed:
            return FAILED
        if self.overlap or (self.ahead and attempt.step == struck.step + 1):
            return OPEN
        if attempt == struck:
            kept = OPEN if "lost" in self.allowed else COMMITTED
            return kept if self.fate == KEPT else self.fate
        if self.step == 0 or (attempt.step, attempt.again) < (struck.step, struck.again):
            return COMMITTED
        return COMMITTED if self.kills_sidecar and not self.all_die else FAILED


def play(
    scenario: Scenario, folder: Path, roots: Sequence[Path], starter: RankStarter, stock: RankStarter, struck: int = 0
) -> tuple[list[str], str, Outcome]:
    """Run a scenario, on one node per root of shared memory; the sidecar of node ``struck`` is the one that dies.

    Returns:
        Where the outcome is not as expected, one line each; the story: verdict, records and logs; and the outcome.
    """
    directory, records, logs = (folder / name for name in ("checkpoints", "records", "logs"))
    for path in (directory, records, logs):
        path.mkdir()
    program = scenario.program(directory, records)
    coordinator = "local" if len(roots) == 1 else f"127.0.0.1:{_free_port()}"
    with ExitStack() as closing:
        nodes = [
            Node(starter, root, logs, ranks, supervised=scenario.supervised, constants=WINDOWS, coordinator=coordinator)
            for root, ranks in zip(roots, _shares(WORLD_SIZE, len(roots)), strict=True)
        ]
        for node in nodes:
            closing.callback(node.close)
            node.start_sidecar(scenario.order if scenario.kills_sidecar and node is nodes[struck] else None)
        found = [*_live(nodes, program, 0, scenario), *_live(nodes, program, 1, None)]
        codes = [node.stop_sidecar() for node in nodes]
        found += [Problem("unclean", f"a sidecar ended with exit code {code}") for code in codes if code]
        found += [Problem("leaked", line) for root in roots for line in left_in(root)]
        if not any(node.has_died_at_its_point() for node in nodes):
            found.append(Problem("unclean", "nobody has died at the point"))
        entries = read_records(records)
        outcome = judge(
            directory, entries, WORLD_SIZE, lambda names: stock.run(load_each, 1, names)[0],
            vetoed=scenario.vetoed, found=found,
        )  # fmt: skip
        story = "\n".join([str(outcome), *map(str, entries), *(node.story() for node in nodes)])
    return scenario.unexpected(outcome, program), story, outcome


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _shares(world_size: int, nodes: int) -> list[range]:
    """The ranks of each node, in order."""
    each = world_size // nodes
    return [range(index * each, (index + 1) * each) for index in range(nodes)]


def _live(nodes: Sequence[Node], program: Program, life: int, scenario: Scenario | None) -> list[Problem]:
    """One life of all ranks, from start to end. Returns what ended as it should not."""
    order = scenario.order if scenario else None
    victims = {order.rank} if order else set()
    all_die = scenario is not None and scenario.all_die
    for node in nodes:
        node.start_ranks(train, WORLD_SIZE, program, life, order, restarts=life)

    def have_ended() -> bool:
        for node in nodes:
            node.look_after_sidecar()
        living = {rank for node in nodes for rank in node.living_ranks()}
        if all_die and (any(node.deaths for node in nodes) or victims - living - {None}):
            for node in nodes:
                node.kill_ranks()
        return not living

    late = last_of(lambda: not have_ended(), LIFE_S)
    hung = [Problem("hung", f"life {life} has not ended after {LIFE_S:g} s")] if late else []
    for node in nodes:
        node.kill_ranks()
    ends = {rank: end for node in nodes for rank, end in node.end_ranks().items()}
    may_die = set(ends) if all_die else victims
    return hung + [
        Problem("unclean", f"life {life}, rank {rank}: {end}")
        for rank, end in ends.items()
        if end and not (end == "killed" and rank in may_die)
    ]
