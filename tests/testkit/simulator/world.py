"""The simulated job: nodes, ranks, storage and time, and everything that can happen to them.

Nothing happens by itself: :meth:`World.run` lets parts of it take steps in an order drawn from a number, everything
else is a method. All of it follows from the calls and their arguments, so a schedule can be played again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from itertools import count

from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import Message
from testkit.simulator.client import Client, Wish
from testkit.simulator.node import SimNode
from testkit.simulator.promises import Promises
from testkit.simulator.shared_memory import SharedMemory
from testkit.simulator.storage import Storage, Value

Step = Callable[[], bool]
"""Something that can go on; False if it cannot now."""


class World:
    """A job of ``world_size`` ranks on ``node_count`` nodes; rank n lives on node n modulo their number."""

    def __init__(self, node_count: int, world_size: int, *, has_hooks: bool = False, is_traced: bool = False) -> None:
        self.now_s = 0.0
        self.has_hooks = has_hooks
        self.story: list[str] | None = [] if is_traced else None
        self.promises = Promises(self)
        self.storage = Storage(self.promises, lambda: self.now_s)
        self._pids, self._tokens, self._values, self._peers = count(1000), count(10), count(1), count(1)
        self._living: set[int] = set()
        self.incarnation = 0
        self.world_size = world_size
        self.current: dict[int, Client] = {}
        self.ghosts: list[Client] = []
        self.vetoed: set[int] = set()
        self.wishes: deque[Wish] = deque()
        self._wish_of: dict[tuple[str, int], Wish] = {}
        self._steps: list[Step] = []
        self.nodes: list[SimNode] = []
        for index in range(node_count):
            self.nodes.append(SimNode(self, index))
        for rank in range(world_size):
            self.start_rank(rank)

    # ------------------------------------------------------------ questions and small things

    def tell(self, line: str) -> None:
        """A line of the story."""
        if self.story is not None:
            self.story.append(f"    {line}")

    def tell_message(self, sender: str, receiver: object, message: object) -> None:
        """A message, or the event of a worker, is taken."""
        if self.story is not None:
            self.story.append(f"    {sender} -> {receiver}: {message}")

    def new_pid(self) -> int:
        """The pid of a process that begins to live."""
        pid = next(self._pids)
        self._living.add(pid)
        return pid

    def new_peer(self) -> bytes:
        """A sidecar's name for a connection."""
        return b"peer-%d" % next(self._peers)

    def new_token(self) -> str:
        """A session's name."""
        return f"{next(self._tokens):08x}"

    def new_value(self, rank: int) -> Value:
        """What a rank fills a region with."""
        return rank, next(self._values)

    def lives(self, pid: int) -> bool:
        """Whether a process lives."""
        return pid in self._living

    def node_of(self, rank: int) -> SimNode:
        """Where a rank lives."""
        return self.nodes[rank % len(self.nodes)]

    def clients_of(self, node: SimNode) -> list[Client]:
        """The living clients of a node."""
        return [client for client in self.current.values() if client.node is node and client.alive]

    @property
    def is_whole(self) -> bool:
        """Whether every rank lives, can save, and is at the same save of the same session: not if one was restarted
        without the others."""
        clients = list(self.current.values())
        at = {(client.talk.session, client.seq) for client in clients}
        return len(clients) == self.world_size and all(client.can_save for client in clients) and len(at) == 1

    def accepts(self, step: int) -> bool:
        """The user's pre-commit hook."""
        if step not in self.vetoed:
            return True
        for (session, seq), record in self.promises.saves.items():
            for submit, _ in record.staged.values():
                if submit.save.step == step:
                    self.promises.spoil(SaveKey(session, seq, step), "vetoed")
        return False

    # ------------------------------------------------------------ ranks

    def start_rank(self, rank: int) -> None:
        """A process of a rank begins."""
        self.current[rank] = Client(self, rank, self.world_size, self.incarnation)
        self._steps = []

    def kill_rank(self, rank: int, lost: int = 0) -> None:
        """SIGKILL of a rank's process."""
        client = self.current.get(rank)
        if client is None or not client.alive:
            return
        self._living.discard(client.pid)
        client.dies(lost)
        self.ghosts.append(client)
        self._steps = []

    def restart_rank(self, rank: int) -> None:
        """A rank alone gets a new process, as without torchelastic."""
        if rank in self.current and not self.current[rank].alive:
            self.start_rank(rank)

    def restart_ranks(self, world_size: int, lost: int = 0) -> None:
        """An elastic restart: every rank ends, and a world begins that may have another size."""
        for rank in list(self.current):
            self.kill_rank(rank, lost)
        self.current.clear()
        self.incarnation += 1
        self.world_size = world_size
        for rank in range(world_size):
            self.start_rank(rank)

    def say_goodbye(self, rank: int) -> None:
        """A rank closes its client and ends."""
        client = self.current.get(rank)
        if client is not None and client.can_save:
            client.leave()

    def give_up_sidecar(self, rank: int) -> None:
        """A client without a sidecar, or with one that is stopped and goes on later, has waited for long enough."""
        client = self.current.get(rank)
        if client is not None and client.alive and client.talk.is_welcome:
            client.talk.give_up_sidecar()

    def reconnect(self, rank: int, lost: int) -> None:
        """A connection breaks and libzmq makes another."""
        client = self.current.get(rank)
        if client is not None and client.alive:
            client.connection.breaks(lost % 3, lost % 2)

    def send(self, node: SimNode, peer: bytes, message: Message) -> None:
        """From a sidecar to whoever has that connection."""
        for client in self.current.values():
            if client.connection.peer == peer and client.alive and client.node is node:
                client.connection.down.append(message)

    # ------------------------------------------------------------ sidecars and nodes

    def kill_sidecar(self, node: SimNode, lost: int = 0) -> None:
        """SIGKILL of a sidecar; shared memory stays."""
        if node.is_up:
            self.tell(f"the sidecar of {node} is dead")
            node.dies(lost)
            self.ghosts = [ghost for ghost in self.ghosts if ghost.node is not node]
            self._steps = []

    def sidecar_died(self, node: SimNode) -> None:
        """The same, in the middle of something."""
        self.kill_sidecar(node, self.draw_lost())

    def draw_lost(self) -> int:
        """How much is lost with a sidecar that dies in the middle of something."""
        return next(self._values)

    def start_sidecar(self, node: SimNode) -> None:
        """The supervisor starts another."""
        if not node.is_up:
            node.start()
            self._steps = []

    def lose_node(self, node: SimNode, lost: int = 0) -> None:
        """A machine is gone with all that was in its memory; another takes its place."""
        for client in self.clients_of(node):
            self.kill_rank(client.rank, lost)
        self.kill_sidecar(node, lost)
        node.shm = SharedMemory()
        for (session, seq), record in self.promises.saves.items():
            for rank, (submit, _) in list(record.staged.items()):
                if self.node_of(rank) is node and self.storage.durable((rank, submit.save)) is None:
                    self.promises.spoil(SaveKey(session, seq, 0), f"{node} was lost")
                    del record.staged[rank]  # with the memory that it was in

    def kill_everything(self, lost: int = 0) -> None:
        """The whole job at once; shared memory stays."""
        for rank in list(self.current):
            self.kill_rank(rank, lost)
        for node in self.nodes:
            self.kill_sidecar(node, lost)

    # ------------------------------------------------------------ time

    def passes(self, seconds: float) -> None:
        """Time passes; the sidecars tick."""
        self.now_s += seconds
        if seconds >= 20:
            for (session, seq), record in self.promises.saves.items():
                if not record.committed:
                    self.promises.spoil(SaveKey(session, seq, 0), f"{seconds} s have passed")
        for node in self.nodes:
            if node.is_up:
                node.tick()

    def run(self, seed: int, steps: int) -> None:
        """Whoever can goes on, in an order drawn from ``seed``."""
        draw = random.Random(seed).random
        for _ in range(steps):
            enabled = self._steps or self._all_steps()
            enabled[int(draw() * len(enabled))]()

    def rest(self) -> None:
        """Everybody goes on until nobody can."""
        for _ in range(2000):
            moved = [step() for step in list(self._steps or self._all_steps())]
            if not any(moved):
                return
        raise AssertionError("the simulated job does not come to rest")

    def _all_steps(self) -> list[Step]:
        steps: list[Step] = []
        for client in self.current.values():
            steps += [client.go_on, client.go_on, client.hear, client.hear, client.beat]
            steps += [self._begins(client), self._delivers(client), self._delivers(client)]
            if self.has_hooks and client.rank == 0:
                steps.append(client.talk.decide)
        self.ghosts = [ghost for ghost in self.ghosts if ghost.connection.up]
        steps += [self._delivers(ghost) for ghost in self.ghosts]
        for node in self.nodes:
            steps += [node.take_posted, node.take_posted, *node.worker_steps()]
            if node.index:
                steps += self._of_the_link(node)
        self._steps = steps
        return steps

    def _begins(self, client: Client) -> Step:
        def begin() -> bool:
            if not client.can_save:
                return False
            key = (client.talk.session, client.seq)
            if key not in self._wish_of:
                if not self.wishes:
                    return False
                self._wish_of[key] = self.wishes.popleft()
            client.begin(self._wish_of[key])
            return True

        return begin

    def _delivers(self, client: Client) -> Step:
        def deliver() -> bool:
            connection, node = client.connection, client.node
            if not connection.up or not node.is_up:
                return False
            message = connection.up.popleft()
            node.take_message(connection.peer, client.pid, message)
            return True

        return deliver

    def _of_the_link(self, node: SimNode) -> list[Step]:
        link, coordinator = node.link, self.nodes[0]

        def comes_up() -> bool:
            if link.is_up or link.is_cut or not (node.is_up and coordinator.is_up):
                return False
            link.is_up = True
            node.peer_is_up()
            return True

        def to_coordinator() -> bool:
            if link.is_cut or not link.to_coordinator:
                return False
            coordinator.take_from_node(*link.to_coordinator.popleft())
            return True

        def to_node() -> bool:
            if link.is_cut or not link.to_node:
                return False
            node.take_from_coordinator(*link.to_node.popleft())
            return True

        return [comes_up, to_coordinator, to_node]
