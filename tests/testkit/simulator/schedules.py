"""Schedules drawn from seeds: what happens to a simulated job, played, told and made shorter.

``play(seed)`` plays one; a failing one raises with its whole story. ``shorten(seed)`` drops moves while it still fails.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckpt_proto.errors import LocalProtocolError
from ckpt_sidecar.checkpoint_table import DECIDE_TIMEOUT_S, PERSIST_TIMEOUT_S
from ckpt_sidecar.coordination import PATIENCE
from testkit.simulator.client import Wish
from testkit.simulator.node import NEVER, NODE_TIMEOUT_S
from testkit.simulator.promises import Broken
from testkit.simulator.world import World
from testkit.tables import STAGE_TIMEOUT_S

Move = tuple[str, dict[str, Any]]

SHORT_WAITS_S = (1.0, 1.0, 2.0, 2.0, 2.0, 16.0, 16.0, 31.0, 2.0, 2.0, 31.0)
"""Enough for everything that asks again by itself: lists of shards, rank 0 that does not return, writes that wait."""

ENOUGH = 3
"""Saves after which a healed job must have committed one."""

LONG_WAITS_S = (STAGE_TIMEOUT_S + 31.0, DECIDE_TIMEOUT_S + 1.0, PERSIST_TIMEOUT_S + 1.0, 2.0)
"""Every bound of the coordinator and of the clients."""


@dataclass(frozen=True)
class Schedule:
    """How a job is set up and what happens to it."""

    nodes: int
    ranks: int
    has_hooks: bool
    moves: tuple[Move, ...]


SHAPES = ((1, 1), (1, 2), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3), (2, 4))
"""Nodes and ranks."""

PACES = ((2, 5, 12), (5, 20, 60), (20, 60, 150), (60, 150, 400))
"""How many steps are taken between two things that happen."""


MOMENTS = (
    "Published", "Published", "PublishFailed", "DecideCommit", "ShardDurable", "ShardBroken", "ShardPersisted",
    "ReportFailure", "ShardsListed", "ShardFound", "SubmitShard", "FinalPlan", "RegionPrepared", "Hello", "Aborted",
)  # fmt: skip
"""When a sidecar is killed best: it has just heard this, and has not done all that follows."""


def draw_schedule(seed: int) -> Schedule:
    """The schedule that a seed stands for.

    Each has its own few kinds of things that happen, some of them often: if everything could happen in every schedule,
    hardly any would go on long enough after the first death to come to something rare.
    """
    draw = random.Random(seed)
    nodes, ranks = draw.choice(SHAPES)
    weights = [draw.choice((0, 0, 1, 1, 4)) for _ in range(len(_happenings(draw, 1, 1)))]
    pace = draw.choice(PACES)
    moves: list[Move] = [("save", {"kind": draw.choice((0, 0, draw.randrange(KINDS)))})]
    moves.append(("run", {"seed": draw.getrandbits(30), "steps": draw.choice((0, 100, 100, 200)) * ranks}))
    for _ in range(draw.randint(6, 40)):
        if draw.random() < 0.45 or not any(weights):
            moves.append(("run", {"seed": draw.getrandbits(30), "steps": draw.choice(pace)}))
        else:
            moves += draw.choices(_happenings(draw, nodes, ranks), weights)
    return Schedule(nodes, ranks, draw.random() < 0.3, tuple(moves))


KINDS = 14
"""Kinds of ``save()``; those above are ordinary."""


def _happenings(draw: random.Random, nodes: int, ranks: int) -> tuple[Move, ...]:
    """One of each kind."""
    rank, node, lost = draw.randrange(ranks), draw.randrange(nodes), draw.randrange(12)
    long_s = draw.choice((3.0, 16.0, 31.0, NODE_TIMEOUT_S + 1, PATIENCE * NODE_TIMEOUT_S + 1, STAGE_TIMEOUT_S + 1))
    return (
        ("save", {"kind": draw.randrange(KINDS)}),
        ("save", {"kind": KINDS}),
        ("kill_sidecar", {"node": node, "lost": lost}),
        ("kill_sidecar_in", {"node": node, "effects": draw.randrange(25)}),
        ("kill_sidecar_in", {"node": node, "effects": draw.randrange(60)}),
        ("kill_sidecar_at", {"node": node, "what": draw.choice(MOMENTS), "effects": draw.randrange(6)}),
        ("kill_sidecar_at", {"node": 0, "what": draw.choice(MOMENTS), "effects": draw.randrange(8)}),
        ("start_sidecar", {"node": node}),
        ("restart_sidecar", {"node": node, "lost": lost}),
        ("restart_sidecar", {"node": 0, "lost": lost}),
        ("kill_rank", {"rank": rank, "lost": lost}),
        ("restart_rank", {"rank": rank}),
        ("restart_ranks", {"world_size": draw.choice((ranks, ranks, draw.randint(1, 4))), "lost": lost}),
        ("rare", {"kind": draw.randrange(4), "rank": rank, "node": node, "lost": lost}),
        ("reconnect", {"rank": rank, "lost": lost}),
        ("cut", {"node": node, "cut": draw.random() < 0.5}),
        ("trouble", {"kind": draw.choice(("", "", "passes", "stays", "hangs"))}),
        ("trouble", {"kind": draw.choice(("", "stays"))}),
        ("fill_up", {"node": node, "full": draw.random() < 0.3}),
        ("wait", {"seconds": draw.choice((1.0, 1.0, 1.0, 3.0))}),
        ("wait", {"seconds": long_s}),
    )


class Player:
    """Makes moves in a world."""

    def __init__(self, schedule: Schedule, *, is_traced: bool = False) -> None:
        self.world = World(schedule.nodes, schedule.ranks, has_hooks=schedule.has_hooks, is_traced=is_traced)
        self._saves = 0

    def save(self, kind: int) -> None:
        """Every rank is to call ``save()`` once more."""
        again = kind in (1, 2)
        self._saves += not again or self._saves == 0
        step = 100 * self._saves
        self.world.wishes.append(
            Wish(
                step,
                overwrite=kind == 1,
                changed=kind == 3,
                grows=kind == 4,
                policy="skip" if kind == 5 else "wait",
                fails_on=kind - 7 if kind in (7, 8) else None,
            )
        )
        if kind == 6:
            self.world.vetoed.add(step)

    def run(self, seed: int, steps: int) -> None:
        """Everybody goes on for some steps."""
        self.world.run(seed, steps)

    def rest(self) -> None:
        """Everybody goes on until nobody can."""
        self.world.rest()

    def until_staged(self) -> None:
        """Ranks go on, workers do not write."""
        self.world.storage.trouble = "hangs"
        self.world.rest()
        self.world.storage.trouble = ""

    def kill_sidecar(self, node: int, lost: int) -> None:
        self.world.kill_sidecar(self.world.nodes[node], lost)

    def kill_sidecar_in(self, node: int, effects: int) -> None:
        """It is killed in the middle of whatever it does then."""
        self.world.nodes[node].fuse = effects

    def kill_sidecar_at(self, node: int, what: str, effects: int) -> None:
        """It is killed some effects after it takes that event or message."""
        self.world.nodes[node].trigger = (what, effects)

    def start_sidecar(self, node: int) -> None:
        self.world.start_sidecar(self.world.nodes[node])

    def restart_sidecar(self, node: int, lost: int) -> None:
        self.kill_sidecar(node, lost)
        self.start_sidecar(node)

    def kill_rank(self, rank: int, lost: int) -> None:
        self.world.kill_rank(rank, lost)

    def restart_rank(self, rank: int) -> None:
        self.world.restart_rank(rank)

    def restart_ranks(self, world_size: int, lost: int) -> None:
        self.world.restart_ranks(world_size, lost)

    def rare(self, kind: int, rank: int, node: int, lost: int) -> None:
        """What would end too many schedules if it came often."""
        if kind == 0:
            self.world.say_goodbye(rank)
        elif kind == 1:
            self.world.give_up_sidecar(rank)
        elif kind == 2:
            self.world.lose_node(self.world.nodes[node], lost)
        else:
            self.world.kill_everything(lost)

    def reconnect(self, rank: int, lost: int) -> None:
        self.world.reconnect(rank, lost)

    def cut(self, node: int, cut: bool) -> None:
        self.world.nodes[node].link.is_cut = cut

    def trouble(self, kind: str) -> None:
        self.world.storage.trouble = kind

    def fill_up(self, node: int, full: bool) -> None:
        self.world.nodes[node].shm.is_full = full

    def wait(self, seconds: float) -> None:
        self.world.passes(seconds)

    def settle(self) -> None:
        """Everything is healed; then all that can end does, at last by every bound there is."""
        world = self.world
        world.storage.trouble = ""
        world.wishes.clear()
        for node in world.nodes:
            node.fuse, node.trigger = NEVER, None
            node.link.is_cut = node.shm.is_full = False
            world.start_sidecar(node)
        world.rest()
        for seconds in SHORT_WAITS_S:
            world.passes(seconds)
            world.rest()
        world.promises.settled(world)
        for seconds in LONG_WAITS_S:
            world.passes(seconds)
            world.rest()
        world.promises.ended(world)
        if world.is_whole:
            self._go_on()

    def _go_on(self) -> None:
        """Ranks may have to plan anew, which costs them a save or two; then saves are committed again."""
        world = self.world
        for _ in range(ENOUGH):
            before = len(world.promises.published)
            self.save(KINDS)
            for seconds in (0.0, 1.0, 1.0):
                world.passes(seconds)
                world.rest()
            if len(world.promises.published) > before:
                return
        raise Broken(f"{ENOUGH} saves after everything was healed, and none is committed")


@contextmanager
def _silent() -> Iterator[None]:
    """The client logs every failure of a save: here there are millions."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def play_schedule(schedule: Schedule, *, is_traced: bool = False) -> Player:
    """Play one.

    Raises:
        AssertionError: a promise was broken; the text is the story.
    """
    player = Player(schedule, is_traced=is_traced)
    story = player.world.story if player.world.story is not None else []
    story.append(f"{schedule.nodes} nodes, {schedule.ranks} ranks, hooks: {schedule.has_hooks}")
    with _silent():
        try:
            for name, arguments in (*schedule.moves, ("settle", {})):
                story.append(f"{name} {arguments}")
                getattr(player, name)(**arguments)
        except (AssertionError, LocalProtocolError, LookupError, AttributeError) as error:
            text = f"broke a promise: {type(error).__name__}: {error}"
            raise AssertionError("\n".join([*story, text])) from error
    return player


def play(seed: int, *, is_traced: bool = False) -> Player:
    """Play the schedule of a seed; the text of its error begins with the seed.

    Raises:
        AssertionError: a promise was broken; the text is the story.
    """
    try:
        return play_schedule(draw_schedule(seed), is_traced=is_traced)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}\n{error}") from error


def fails(schedule: Schedule) -> str:
    """Which promise a schedule breaks; empty if none."""
    try:
        play_schedule(schedule)
    except AssertionError as error:
        return str(error).rsplit("\n", 1)[-1]
    return ""


def shorten(schedule: Schedule) -> Schedule:
    """Drop moves, first many and then single ones, while a promise is still broken."""
    moves = list(schedule.moves)
    size = max(1, len(moves) // 2)
    while size:
        start = 0
        while start < len(moves):
            shorter = moves[:start] + moves[start + size :]
            if fails(_with(schedule, shorter)):
                moves = shorter
            else:
                start += size
        size //= 2
    return _with(schedule, moves)


def _with(schedule: Schedule, moves: Sequence[Move]) -> Schedule:
    return Schedule(schedule.nodes, schedule.ranks, schedule.has_hooks, tuple(moves))
