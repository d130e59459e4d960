"""One simulated node: its sidecar with the real tables and modelled workers, its shared memory, its link."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import Aborted, Goodbye, Hello, Message, Refused
from ckpt_sidecar.actions import (
    Action,
    BreakSeal,
    CancelShard,
    FindCommit,
    FindShard,
    ListShards,
    OpenDirectory,
    PrepareRegion,
    Publish,
    RemoveRegions,
    RemoveShardFiles,
    Send,
    ToCoordinator,
    ToRank,
    Withdraw,
    WriteShard,
)
from ckpt_sidecar.checkpoint_table import COORDINATOR_EVENTS, CheckpointTable
from ckpt_sidecar.coordination import PATIENCE
from ckpt_sidecar.events import (
    AtCoordinator,
    CoordinatorSilent,
    Event,
    FromCoordinator,
    FromRank,
    NodeSilent,
    RankDied,
    RegionsFound,
    ShardSealed,
    Tick,
)
from ckpt_sidecar.job_table import JobTable
from testkit.simulator import workers
from testkit.simulator.network import NodeLink
from testkit.simulator.shared_memory import Region, SharedMemory
from testkit.tables import JOB, TORCH

if TYPE_CHECKING:
    from testkit.simulator.world import World

_LANES: dict[type[Action], tuple[str, Callable[[SimNode, Any], workers.Work]]] = {
    PrepareRegion: ("layout", workers.prepare),
    WriteShard: ("write", workers.write),
    RemoveRegions: ("layout", workers.remove_regions),
    RemoveShardFiles: ("commit", workers.remove),
    OpenDirectory: ("commit", workers.open_directory),
    FindShard: ("commit", workers.find),
    FindCommit: ("commit", workers.find_commit),
    ListShards: ("commit", workers.list_shards),
    Publish: ("commit", workers.publish),
    Withdraw: ("commit", workers.withdraw),
}

WRITERS = 2
"""Shards written at the same time by one sidecar."""

NODE_TIMEOUT_S = 60.0

NEVER = 1 << 60


class Killed(Exception):
    """The sidecar's process ends here, in the middle of what it does."""


class SimNode:
    """A node. ``fuse``: how many more effects its sidecar has before it is killed; ``trigger`` sets it when an event or
    message of that name is taken."""

    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.index = index
        self.name = f"node-{index}"
        self.shm = SharedMemory()
        self.link = NodeLink()
        self.life = 0
        self.is_up = False
        self.fuse = NEVER
        self.trigger: tuple[str, int] | None = None
        self.start()

    def __repr__(self) -> str:
        return self.name

    # ------------------------------------------------------------ life and death

    def start(self) -> None:
        """A sidecar starts: empty tables, and what lies in shared memory."""
        self.life += 1
        self.is_up = True
        self.fuse = NEVER
        # An odd number for each life: generations of two lives never meet, as with the 40 random bits of the daemon.
        self.jobs = JobTable(JOB, f"{self.life:016x}", self.name, TORCH, generation=1000 * self.life)
        self.checkpoints = CheckpointTable(self.world.new_token) if self.index == 0 else None
        self._has_no_work()
        self.heard_s = self.world.now_s
        self.heard_of: dict[int, float] = {}
        regions = self.shm.find(self.world.lives)
        if regions:
            self.take(RegionsFound(regions))

    def _has_no_work(self) -> None:
        self.posted: deque[Event] = deque()
        self.lanes: dict[str, list[workers.Work]] = {"layout": [], "write": [], "commit": []}
        self.attached: dict[tuple[int, int], tuple[Region, str]] = {}
        self.writing: dict[int, tuple[int, int]] = {}
        self.preparing: dict[int, tuple[int, int]] = {}
        self.cancelled: set[tuple[int, SaveKey]] = set()

    def dies(self, lost: int) -> None:
        """SIGKILL. ``lost`` draws how much of what was on its way is lost."""
        self.is_up = False
        self.fuse = NEVER
        self._has_no_work()
        for client in self.world.clients_of(self):
            client.connection.breaks(lost % 4, lost % 3)
        if self.index == 0:
            for node in self.world.nodes:
                node.link.ends()
        else:
            self.link.ends()

    # ------------------------------------------------------------ as the daemon does it

    def take(self, event: Event) -> None:
        """One event, with all that follows from it at once; the sidecar may be killed in the middle."""
        try:
            self._handle(event)
        except Killed:
            self.world.sidecar_died(self)

    def take_message(self, peer: bytes, pid: int, message: Message) -> None:
        """A message of a rank."""
        self.world.tell_message(peer.decode(), self, message)
        if isinstance(message, Hello):
            self.look_for_the_dead()
        if isinstance(message, Goodbye):
            for rank, record in list(self.jobs.ranks.items()):
                if record.peer == peer and record.alive:
                    self._find_sealed(rank)
        if self.is_up:
            self.take(FromRank(peer, pid, message))

    def _find_sealed(self, rank: int) -> None:
        """``RankWatch``: what a rank that goes had sealed counts, whether its last message came or not."""
        slots = range(len(self.jobs.ranks[rank].slots))
        for submit in [self.shm.seal_of(rank, slot) for slot in slots]:
            if self.is_up and submit is not None and (rank, submit.save) not in self.jobs.jobs:
                self.take(ShardSealed(submit))

    def tick(self) -> None:
        """About once a second."""
        self.look_for_the_dead()
        if self.is_up and self.checkpoints is not None:
            self._look_for_the_silent()
            self.take(Tick())
        elif self.is_up:
            self._listen_for_the_coordinator()

    def _listen_for_the_coordinator(self) -> None:
        """``Coordination._unheard``."""
        now_s = self.world.now_s
        if self.hears(self.world.nodes[0]):
            self.heard_s = now_s
        sessions = frozenset(record.session for record in self.jobs.ranks.values() if record.session)
        if now_s - self.heard_s >= NODE_TIMEOUT_S and sessions:
            self.take(CoordinatorSilent("node-0:1", sessions, now_s - self.heard_s, PATIENCE * NODE_TIMEOUT_S))

    def _look_for_the_silent(self) -> None:
        """``Coordination._gave_up``."""
        now_s = self.world.now_s
        for node in self.world.nodes[1:]:
            if self.hears(node):
                self.heard_of[node.index] = now_s
            silent_s = now_s - self.heard_of.setdefault(node.index, now_s)
            ranks = tuple(rank for rank in self.world.current if self.world.node_of(rank) is node)
            if silent_s >= NODE_TIMEOUT_S and ranks and self.is_up:
                self.take(NodeSilent(node.name, ranks, silent_s))

    def hears(self, node: SimNode) -> bool:
        """Whether pings arrive from a node, one of the two being the coordinator."""
        link = (node if self.index == 0 else self).link
        return node.is_up and link.is_up and not link.is_cut

    def look_for_the_dead(self) -> None:
        """Ranks that have died since the last look."""
        for rank in self.jobs.living_ranks:
            pid = self.jobs.ranks[rank].hello.pid
            if self.world.lives(pid) or not self.is_up:
                continue
            self._find_sealed(rank)
            if self.is_up:
                self.take(RankDied(rank, pid, "its process has ended"))

    def peer_is_up(self) -> None:
        """The link has met a new life of the coordinator."""
        self.look_for_the_dead()
        if not self.is_up:
            return
        try:
            self._perform(self.jobs.say_again())
        except Killed:
            self.world.sidecar_died(self)

    def take_from_node(self, rank: int, message: Message) -> None:
        """The coordinator hears from another node."""
        self.world.tell_message(f"rank {rank} by its node", self, message)
        self.take(AtCoordinator(rank, message))

    def take_from_coordinator(self, rank: int, message: Message) -> None:
        """A node hears from the coordinator."""
        self.world.tell_message(f"coordinator for rank {rank}", self, message)
        self.take(FromCoordinator(rank, message))

    def _handle(self, event: Event) -> None:
        if self.trigger is not None and self.trigger[0] in (_name(event), _name(getattr(event, "message", None))):
            self.fuse, self.trigger = self.trigger[1], None
        if isinstance(event, COORDINATOR_EVENTS):
            if self.checkpoints is not None:
                self._perform(self.checkpoints.handle(event, self.world.now_s))
            return
        if isinstance(event, FromCoordinator) and isinstance(event.message, Refused):
            self.world.promises.refused.add(event.message.pid)
        self._perform(self.jobs.handle(event, self.world.now_s))

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._burn()
            match action:
                case Send(peer=peer, message=message):
                    self.world.send(self, peer, message)
                case ToCoordinator(rank=rank, message=message):
                    self._to_coordinator(rank, message)
                case ToRank(rank=rank, message=message):
                    self._to_rank(rank, message)
                case BreakSeal(rank=rank, slot=slot):
                    self.shm.break_seal(rank, slot)
                case CancelShard(rank=rank, save=save):
                    self.cancelled.add((rank, save))
                case _:
                    self._order(action)

    def _to_coordinator(self, rank: int, message: Message) -> None:
        if self.index == 0:
            self._handle(AtCoordinator(rank, message))
        elif self.link.is_up:
            self.link.to_coordinator.append((rank, message))

    def _to_rank(self, rank: int, message: Message) -> None:
        node = self.world.node_of(rank)
        if isinstance(message, Aborted):
            self.world.promises.given_up[message.save] = self.life
        if node is self:
            self._handle(FromCoordinator(rank, message))
        elif node.link.is_up:
            node.link.to_node.append((rank, message))

    def _burn(self) -> None:
        self.fuse -= 1
        if self.fuse < 0:
            raise Killed

    # ------------------------------------------------------------ workers

    def _order(self, action: Action) -> None:
        self.world.promises.order_is_given(self, action)
        lane, body = _LANES[type(action)]
        work = body(self, action)
        if isinstance(action, WriteShard):
            self.cancelled.discard((action.submit.rank, action.submit.save))
            self.writing[id(work)] = (action.submit.rank, action.submit.slot)
        elif isinstance(action, PrepareRegion):
            self.preparing[id(work)] = (action.rank, action.slot)
        self.lanes[lane].append(work)

    def post(self, event: Event) -> None:
        """From a worker to the main thread."""
        self.posted.append(event)

    def work(self, lane: str, which: int) -> bool:
        """One step of one worker; False if there is nothing to do."""
        works = self.lanes[lane]
        if not works or (lane != "layout" and self.world.storage.trouble == "hangs"):
            return False
        work = works[which % min(len(works), WRITERS if lane == "write" else 1)]
        try:
            self._burn()
            next(work)
        except StopIteration:
            works.remove(work)
            self.writing.pop(id(work), None)
            self.preparing.pop(id(work), None)
        except Killed:
            self.world.sidecar_died(self)
        return True

    def worker_steps(self) -> list[Callable[[], bool]]:
        """What its workers can do next."""
        return [
            lambda: self.work("layout", 0),
            lambda: self.work("write", 0),
            lambda: self.work("write", 1),
            lambda: self.work("commit", 0),
        ]

    def take_posted(self) -> bool:
        """One event of a worker."""
        if not self.posted:
            return False
        event = self.posted.popleft()
        self.world.tell_message("worker", self, event)
        self.take(event)
        return True


def _name(thing: object) -> str:
    return type(thing).__name__
