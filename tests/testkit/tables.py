"""Driving the pure tables of the sidecar by hand: builders of events, and drivers that bring a table to a beginning.

``Node`` drives one JobTable, ``Coordinator`` one CheckpointTable, ``World`` both, wired as the daemon wires them, with
workers that end only when a test says so. No clock, thread, file or socket anywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import (
    DecideCommit,
    FinalPlan,
    GlobalPlan,
    Goodbye,
    Hello,
    Message,
    ProposePlan,
    RegionReady,
    ShardPersisted,
    ShardStaged,
    SubmitShard,
    Welcome,
)
from ckpt_proto.plan_items import Plan, PlanItem
from ckpt_sidecar.actions import (
    Action,
    OpenDirectory,
    PrepareRegion,
    Publish,
    Send,
    ToCoordinator,
    ToRank,
    Withdraw,
    WriteShard,
)
from ckpt_sidecar.checkpoint_table import CheckpointTable
from ckpt_sidecar.events import (
    AtCoordinator,
    DirectoryOpened,
    Event,
    FromCoordinator,
    FromRank,
    Published,
    RankDied,
    RegionPrepared,
    ShardDurable,
    ShardStarted,
    Tick,
    Withdrawn,
)
from ckpt_sidecar.job_table import JobTable

JOB = "job-1"
SESSION = "0000000a"
DIRECTORY = "/data/run"
TORCH = "2.13.0"
SIDECAR_ID = "5" * 16
PLAN_ID = f"{SESSION}-p1"
STAGE_TIMEOUT_S = 600.0
FAILURE = FailureReport("StorageError", "no room on /data")

WEIGHT = PlanItem("w", "tensor", offsets=(0,), sizes=(8,), global_sizes=(8,), dtype="float32")
RNG = PlanItem("rng", "bytes")
ITEMS: Plan = (WEIGHT, RNG)

A = TypeVar("A", bound=Action)


def key(seq: int = 0, step: int | None = None, session: str = SESSION) -> SaveKey:
    """The ``seq``-th save; its step is 100 for the first, 200 for the second, unless given."""
    return SaveKey(session, seq, 100 * (seq + 1) if step is None else step)


def hello(rank: int = 0, world_size: int = 1, **changes: Any) -> Hello:
    """A Hello of rank ``rank``, whose pid is 1000 + rank."""
    whole = Hello(
        job_id=JOB,
        rank=rank,
        world_size=world_size,
        pid=1000 + rank,
        process_start_s=50.0,
        node="node-a",
        incarnation=0,
        session="",
        torch_version=TORCH,
        directory=DIRECTORY,
        slots=2,
        stage_timeout_s=STAGE_TIMEOUT_S,
    )
    return replace(whole, **changes)


def propose(
    save: SaveKey, items: Plan = ITEMS, digest: bytes = b"12345678", changed: Sequence[str] = ()
) -> ProposePlan:
    """A local plan; every BYTES item has the same digest."""
    digests = tuple(digest for item in items if item.kind == "bytes")
    return ProposePlan(save, items, digests, tuple(changed))


def ready_for(order: PrepareRegion) -> RegionReady:
    """What a worker would answer to ``order``."""
    framed = sum(item.is_framed for item in order.items)
    offsets = tuple(4096 * index for index in range(framed))
    path = f"/dev/shm/x/rank-{order.rank}.slot-{order.slot}.region"
    size = 4096 * framed + order.byte_capacity
    return RegionReady(
        order.plan_id, order.slot, order.generation, path, size, offsets, 4096 * framed, order.byte_capacity
    )


def of_type(actions: Sequence[Action], kind: type[A]) -> list[A]:
    """The actions of one kind."""
    return [action for action in actions if isinstance(action, kind)]


class Node:
    """One JobTable and the peers of its ranks."""

    def __init__(self, torch_version: str = TORCH) -> None:
        self.table = JobTable(JOB, SIDECAR_ID, "node-a", torch_version)
        self.now_s = 0.0

    def do(self, event: Event) -> list[Action]:
        return self.table.handle(event, self.now_s)

    @staticmethod
    def peer(rank: int) -> bytes:
        return b"peer-%d" % rank

    def says(self, rank: int, message: Message, peer: bytes | None = None) -> list[Action]:
        """A message of a rank; the kernel confirms the pid in a Hello."""
        pid = message.pid if isinstance(message, Hello) else 1000 + rank
        return self.do(FromRank(peer or self.peer(rank), pid, message))

    def hears(self, rank: int, message: Message) -> list[Action]:
        """A message of the coordinator for a rank."""
        return self.do(FromCoordinator(rank, message))

    def welcomed(self, rank: int = 0, session: str = SESSION, **changes: Any) -> Node:
        """Handshake of a rank."""
        self.says(rank, hello(rank, max(rank + 1, 2), **changes))
        self.hears(rank, Welcome(session, "", "", "", ()))
        return self

    def planned(self, rank: int = 0, save: SaveKey | None = None, plan_id: str = PLAN_ID, items: Plan = ITEMS) -> Node:
        """A final plan for a rank, its free regions prepared."""
        self.prepare(self.hears(rank, FinalPlan(save or key(), plan_id, items)))
        return self

    def prepare(self, actions: Sequence[Action]) -> list[Action]:
        """Let the workers prepare every region that ``actions`` ask for."""
        after: list[Action] = []
        for order in of_type(actions, PrepareRegion):
            after += self.do(RegionPrepared(order.rank, ready_for(order)))
        return after

    def submit(self, save: SaveKey, rank: int = 0, slot: int = 0, **changes: Any) -> SubmitShard:
        """The submission of a slot that is prepared."""
        plan = self.table.ranks[rank].plan
        generation = self.table.ranks[rank].slots[slot].generation
        return replace(SubmitShard(save, rank, plan.plan_id if plan else PLAN_ID, slot, generation, (10,)), **changes)

    def submitted(self, save: SaveKey, rank: int = 0, slot: int = 0) -> Node:
        """A job that is queued."""
        assert of_type(self.says(rank, self.submit(save, rank, slot)), WriteShard)
        return self

    def writing(self, save: SaveKey, rank: int = 0, slot: int = 0) -> Node:
        """A job that a writer has taken."""
        self.submitted(save, rank, slot).do(ShardStarted(rank, save))
        return self

    def durable(self, save: SaveKey, rank: int = 0, slot: int = 0) -> list[Action]:
        """A job from submission to its durable file; returns what the end of it asks for."""
        self.writing(save, rank, slot)
        return self.do(ShardDurable(rank, save, 4096))


class Coordinator:
    """One CheckpointTable; sessions are 0000000a, 0000000b and so on."""

    def __init__(self) -> None:
        tokens = count(10)
        self.table = CheckpointTable(lambda: f"{next(tokens):08x}")
        self.now_s = 0.0

    def do(self, event: Event) -> list[Action]:
        return self.table.handle(event, self.now_s)

    def at(self, rank: int, message: Message) -> list[Action]:
        """A message of a rank, or about it."""
        return self.do(AtCoordinator(rank, message))

    def says_hello(self, rank: int, world_size: int, steps: tuple[int, ...] = (), **changes: Any) -> list[Action]:
        """A Hello; the directory opens at once if it has to."""
        actions = self.at(rank, hello(rank, world_size, **changes))
        for order in of_type(actions, OpenDirectory):
            actions += self.do(DirectoryOpened(order.directory, steps))
        return actions

    def joined(self, world_size: int, steps: tuple[int, ...] = (), **changes: Any) -> Coordinator:
        """Every rank has been welcomed; rank n lives on node-n."""
        for rank in range(world_size):
            self.says_hello(rank, world_size, steps, node=f"node-{rank}", **changes)
        assert self.table.session is not None
        assert len(self.table.session.members) == world_size
        return self

    def planned(self, save: SaveKey, plans: Sequence[Plan] | None = None) -> list[Action]:
        """Every rank proposes, rank 0 makes the global plan; returns the final plans."""
        assert self.table.session is not None
        ranks = range(self.table.session.world_size)
        for rank in ranks:
            self.at(rank, propose(save, plans[rank] if plans else ITEMS))
        return self.at(0, GlobalPlan(save, tuple(plans) if plans else (ITEMS,) * len(ranks)))

    def staged(self, save: SaveKey, *ranks: int, plan_id: str = PLAN_ID, overwrite: bool = False) -> list[Action]:
        """These ranks have sealed their regions; returns the actions of all of it."""
        actions: list[Action] = []
        for rank in ranks:
            actions += self.at(rank, ShardStaged(save, rank, plan_id, overwrite))
        return actions

    def persisted(self, save: SaveKey, *ranks: int) -> list[Action]:
        """The files of these ranks are durable."""
        actions: list[Action] = []
        for rank in ranks:
            actions += self.at(rank, ShardPersisted(save, rank, 4096))
        return actions

    def complete(self, save: SaveKey, world_size: int, plan_id: str = PLAN_ID) -> list[Action]:
        """Staged and persisted by everybody; returns what the last one asks for."""
        self.staged(save, *range(world_size), plan_id=plan_id)
        return self.persisted(save, *range(world_size))

    def committed(self, save: SaveKey, world_size: int) -> list[Action]:
        """A whole save, published."""
        self.complete(save, world_size)
        assert of_type(self.at(0, DecideCommit(save, True)), Publish)
        return self.do(Published(save))

    def withdrawn(self, actions: Sequence[Action]) -> list[Action]:
        """Storage carries out that a complete attempt is withdrawn, before which nobody is told anything."""
        (order,) = actions
        assert isinstance(order, Withdraw)
        return self.do(Withdrawn(order.save))


def told(actions: Sequence[Action], rank: int) -> list[Message]:
    """What the coordinator tells a rank."""
    return [action.message for action in of_type(actions, ToRank) if action.rank == rank]


class World:
    """Ranks on one node, a sidecar that is the coordinator too, and workers that wait for orders to end.

    ``inbox`` has what was sent to each rank and not read yet; ``orders`` what the workers were asked and have not done;
    ``steps`` are the committed ones on storage. ``watch`` is called with each order before it is given.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.node = Node()
        self.coordinator = Coordinator()
        self.inbox: dict[int, deque[Message]] = {rank: deque() for rank in range(world_size)}
        self.orders: list[Action] = []
        self.watch: Callable[[Action], None] = lambda order: None
        self.steps: set[int] = set()
        self._peers = {rank: Node.peer(rank) for rank in range(world_size)}
        self._lives = 0

    @property
    def now_s(self) -> float:
        return self.node.now_s

    def passes(self, seconds: float) -> None:
        """Time passes, and the daemon ticks."""
        self.node.now_s += seconds
        self.coordinator.now_s += seconds
        self.perform(self.coordinator.do(Tick()))

    # ------------------------------------------------------------ as the daemon does it

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(peer=peer, message=message):
                    for rank, known in self._peers.items():
                        if known == peer:
                            self.inbox[rank].append(message)
                case ToCoordinator(rank=rank, message=message):
                    self.perform(self.coordinator.at(rank, message))
                case ToRank(rank=rank, message=message):
                    self.perform(self.node.hears(rank, message))
                case _:
                    self.watch(action)
                    self.orders.append(action)

    def at_node(self, event: Event) -> None:
        self.perform(self.node.do(event))

    def at_coordinator(self, event: Event) -> None:
        self.perform(self.coordinator.do(event))

    # ------------------------------------------------------------ ranks

    def connect(self, rank: int, **changes: Any) -> None:
        """A new client of a rank says Hello on a new connection; its process is new too."""
        self._lives += 1
        self._peers[rank] = b"peer-%d.%d" % (rank, self._lives)
        self.inbox[rank].clear()
        values: dict[str, Any] = {"pid": 1000 + 100 * self._lives + rank, **changes}
        self.says(rank, hello(rank, self.world_size, **values))

    def connect_all(self, **changes: Any) -> World:
        for rank in range(self.world_size):
            self.connect(rank, **changes)
        self.opened()
        return self

    def says(self, rank: int, message: Message) -> None:
        pid = message.pid if isinstance(message, Hello) else 0
        self.at_node(FromRank(self._peers[rank], pid, message))

    def leaves(self, rank: int) -> None:
        self.says(rank, Goodbye())

    def dies(self, rank: int) -> None:
        record = self.node.table.ranks.get(rank)
        if record is not None:  # a rank that was refused is nobody's business any more
            self.at_node(RankDied(rank, record.hello.pid, "its process has ended"))

    def read(self, rank: int) -> list[Message]:
        """Everything sent to a rank since it was read last."""
        messages = list(self.inbox[rank])
        self.inbox[rank].clear()
        return messages

    # ------------------------------------------------------------ workers

    def take(self, kind: type[A], rank: int | None = None) -> list[A]:
        """Take the open orders of a kind off the list."""
        mine = [order for order in of_type(self.orders, kind) if rank is None or _rank_of(order) == rank]
        self.orders = [order for order in self.orders if not any(order is other for other in mine)]
        return mine

    def opened(self) -> None:
        for order in self.take(OpenDirectory):
            self.at_coordinator(DirectoryOpened(order.directory, tuple(sorted(self.steps))))

    def prepared(self) -> None:
        while orders := self.take(PrepareRegion):
            for order in orders:
                self.at_node(RegionPrepared(order.rank, ready_for(order)))

    def written(self, rank: int | None = None) -> None:
        for order in self.take(WriteShard, rank):
            self.at_node(ShardStarted(order.submit.rank, order.submit.save))
            self.at_node(ShardDurable(order.submit.rank, order.submit.save, 4096))

    def published(self) -> None:
        for order in self.take(Publish):
            self.steps.add(order.save.step)
            self.at_coordinator(Published(order.save))

    def withdrawn(self) -> None:
        for order in self.take(Withdraw):
            self.at_coordinator(Withdrawn(order.save))

    # ------------------------------------------------------------ saves

    def plan(self, save: SaveKey) -> None:
        """Every rank proposes, rank 0 plans, the regions are prepared."""
        for rank in range(self.world_size):
            self.says(rank, propose(save))
        self.says(0, GlobalPlan(save, (ITEMS,) * self.world_size))
        self.prepared()

    def submit(self, rank: int, save: SaveKey, slot: int = 0) -> None:
        self.says(rank, self.node.submit(save, rank, slot))


def _rank_of(order: Action) -> int | None:
    return order.submit.rank if isinstance(order, WriteShard) else getattr(order, "rank", None)
