"""Ranks, sidecar and workers in any order that real ones could take, and the promises that must hold in each.

``AnyOrder`` is a hypothesis state machine over both tables of one node, wired as the daemon wires them; hypothesis
chooses and shrinks orders. Messages are doubled and come late here; what dies with its memory is ``simulator``'s.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_proto.lifecycles import CheckpointState, RegionState
from ckpt_proto.messages import (
    Aborted,
    AskCommit,
    AskRestoreStep,
    Committed,
    DecideCommit,
    FinalPlan,
    GlobalPlan,
    Goodbye,
    GrowRegion,
    Heartbeat,
    Hello,
    MakeGlobalPlan,
    Message,
    Pong,
    Refused,
    RegionReady,
    RegionRefused,
    ReportFailure,
    ReportSkip,
    SlotFreed,
    SubmitShard,
    Welcome,
)
from ckpt_sidecar.actions import Action, OpenDirectory, PrepareRegion, Publish, RemoveShardFiles, Withdraw, WriteShard
from ckpt_sidecar.checkpoint_table import DECIDE_TIMEOUT_S, PERSIST_TIMEOUT_S
from ckpt_sidecar.events import (
    DirectoryOpened,
    DirectoryRefused,
    Published,
    PublishFailed,
    RegionFailed,
    RegionPrepared,
    ShardBroken,
    ShardDurable,
    ShardStarted,
    WithdrawFailed,
    Withdrawn,
)
from testkit.tables import (
    FAILURE,
    ITEMS,
    STAGE_TIMEOUT_S,
    World,
    of_type,
    propose,
    ready_for,
)

# ---------------------------------------------------------------- any order


@dataclass
class ModelSlot:
    """A slot as the client's pool sees it."""

    state: RegionState = RegionState.FREE
    ready: RegionReady | None = None


@dataclass
class Client:
    """What a rank's client does: the same moves as the real one, one message at a time.

    ``save`` is the ``save()`` under way; ``stage`` is where it is: planning, acquiring or filling. ``unanswered`` has
    the saves whose handle is not resolved.
    """

    rank: int
    hello: Hello
    session: str = ""
    seq: int = 0
    connected: bool = True
    plan: FinalPlan | None = None
    save: SaveKey | None = None
    stage: str = ""
    slot: int = 0
    slots: list[ModelSlot] = field(default_factory=lambda: [ModelSlot(), ModelSlot()])
    unanswered: set[SaveKey] = field(default_factory=set)
    asked_to_commit: deque[SaveKey] = field(default_factory=deque)
    sent: list[Message] = field(default_factory=list)
    growing: bool = False


WAITS = [1.0, STAGE_TIMEOUT_S + 1, DECIDE_TIMEOUT_S + 1, PERSIST_TIMEOUT_S + 1]

LUCK = st.integers(0, 2)
"""What goes wrong does so one time in three, so that something is left to go right."""


class AnyOrder(RuleBasedStateMachine):
    """Ranks, sidecar and workers in any order that real ones could take."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(1)
        self.clients: dict[int, Client] = {}
        self.incarnation = 0
        self.started: set[tuple[int, SaveKey]] = set()
        self.durable: set[tuple[int, SaveKey]] = set()
        self.removed: set[tuple[int, SaveKey]] = set()
        self.published: set[SaveKey] = set()
        self.publishing: set[SaveKey] = set()

    @initialize(world_size=st.integers(1, 3))
    def begin(self, world_size: int) -> None:
        self.world = World(world_size)
        self.world.watch = self.check_order
        self.connect_all()

    # -------------------------------------------------------- ranks: life and death

    def connect(self, rank: int) -> None:
        self.world.connect(rank, incarnation=self.incarnation)
        self.clients[rank] = Client(rank, self.last_hello(rank))

    def connect_all(self) -> None:
        for rank in range(self.world.world_size):
            self.connect(rank)

    def last_hello(self, rank: int) -> Hello:
        return self.world.node.table.ranks[rank].hello

    def some(self, rank: int) -> Client:
        return self.clients[rank % self.world.world_size]

    def send(self, client: Client, message: Message) -> None:
        client.sent.append(message)
        self.world.says(client.rank, message)

    @rule(rank=st.integers(0, 2), goodbye=st.booleans(), luck=LUCK)
    def leave(self, rank: int, goodbye: bool, luck: int) -> None:
        client = self.some(rank)
        if not client.connected or luck:
            return
        if goodbye:
            self.world.says(client.rank, Goodbye())
        else:
            self.world.dies(client.rank)
        client.connected = False
        client.unanswered.clear()

    @rule(rank=st.integers(0, 2))
    def come_back(self, rank: int) -> None:
        """A rank alone gets a new process, as without torchelastic."""
        client = self.some(rank)
        if not client.connected:
            self.connect(client.rank)

    @rule(luck=LUCK)
    def restart_the_job(self, luck: int) -> None:
        if luck:
            return
        for client in self.clients.values():
            if client.connected:
                self.world.dies(client.rank)
        self.incarnation += 1
        self.connect_all()

    @rule(rank=st.integers(0, 2), luck=LUCK)
    def reconnect(self, rank: int, luck: int) -> None:
        """The connection breaks and libzmq makes another: the sidecar does not know it and asks for a Hello."""
        client = self.some(rank)
        if client.connected and client.session and not luck:
            self.world._peers[client.rank] += b"+"
            self.world.inbox[client.rank].clear()
            self.world.says(client.rank, Heartbeat())

    # -------------------------------------------------------- ranks: saves

    @rule(rank=st.integers(0, 2), changed=st.booleans(), wrong_step=st.integers(0, 9))
    def begin_save(self, rank: int, changed: bool, wrong_step: int) -> None:
        client = self.some(rank)
        if not client.connected or not client.session or client.save is not None:
            return
        step = 100 * (client.seq + 1) + (wrong_step == 9)
        client.save = SaveKey(client.session, client.seq, step)
        client.seq += 1
        client.unanswered.add(client.save)
        if all(slot.state is RegionState.SEALED for slot in client.slots) and changed:
            self.send(client, ReportSkip(client.save, "no free region"))
            client.save = None
        elif client.plan is None or changed:
            client.stage = "planning"
            self.send(client, propose(client.save, changed=["x"] if client.plan else []))
        else:
            client.stage = "acquiring"

    @rule(rank=st.integers(0, 2))
    def acquire(self, rank: int) -> None:
        client = self.some(rank)
        if client.stage != "acquiring" or client.plan is None:
            return
        for index, slot in enumerate(client.slots):
            fits = slot.ready is not None and slot.ready.plan_id == client.plan.plan_id
            if slot.state is RegionState.FREE and fits:
                slot.state = RegionState.FILLING
                client.slot, client.stage = index, "filling"
                return

    @rule(rank=st.integers(0, 2))
    def grow(self, rank: int) -> None:
        client = self.some(rank)
        if client.stage == "filling" and not client.growing:
            ready = client.slots[client.slot].ready
            assert ready is not None
            client.growing = True
            self.send(client, GrowRegion(ready.plan_id, client.slot, 2 * ready.byte_capacity))

    @rule(rank=st.integers(0, 2), overwrite=st.integers(0, 9))
    def seal(self, rank: int, overwrite: int) -> None:
        client = self.some(rank)
        if client.stage != "filling" or client.growing or client.save is None:
            return
        slot = client.slots[client.slot]
        assert slot.ready is not None
        slot.state = RegionState.SEALED
        ready = slot.ready
        submit = SubmitShard(
            client.save, client.rank, ready.plan_id, client.slot, ready.generation, (5,), overwrite == 9
        )
        client.save, client.stage = None, ""
        self.send(client, submit)

    @rule(rank=st.integers(0, 2), luck=LUCK)
    def fail(self, rank: int, luck: int) -> None:
        if not luck:
            self.give_up(self.some(rank))

    def give_up(self, client: Client) -> None:
        if client.save is not None:
            save = client.save
            if client.stage == "filling":
                client.slots[client.slot].state = RegionState.FREE
            client.save, client.stage, client.growing = None, "", False
            self.send(client, ReportFailure(save, FAILURE))

    @rule(accept=st.booleans())
    def decide(self, accept: bool) -> None:
        client = self.clients[0]
        if client.connected and client.asked_to_commit:
            self.send(client, DecideCommit(client.asked_to_commit.popleft(), accept))

    @rule(rank=st.integers(0, 2))
    def ask_for_a_step(self, rank: int) -> None:
        client = self.some(rank)
        if client.connected and client.session:
            self.send(client, AskRestoreStep(0))

    @rule(rank=st.integers(0, 2), which=st.integers(0, 50))
    def say_again(self, rank: int, which: int) -> None:
        """A message is doubled, late or both."""
        client = self.some(rank)
        if client.connected and client.sent:
            self.world.says(client.rank, client.sent[-1 - which % len(client.sent)])

    # -------------------------------------------------------- the usual course

    @rule(times=st.integers(1, 6), ranks=st.sampled_from([(0, 1, 2), (1, 2), (0,)]), work=st.booleans())
    def go_on(self, times: int, ranks: tuple[int, ...], work: bool) -> None:
        """Some ranks read and make their next move, workers finish: without this, few orders get as far as a commit."""
        for _ in range(times):
            for rank in ranks:
                self.read(rank, 20)
                self.next_move(self.some(rank))
            for order in list(self.world.orders) if work else ():
                self.finish(order, ok=True)

    def next_move(self, client: Client) -> None:
        if client.save is None:
            self.begin_save(client.rank, changed=False, wrong_step=0)
        self.acquire(client.rank)
        self.seal(client.rank, overwrite=0)
        self.decide(accept=True)

    # -------------------------------------------------------- ranks: what they hear

    @rule(rank=st.integers(0, 2), count=st.integers(1, 5))
    def read(self, rank: int, count: int) -> None:
        client = self.some(rank)
        inbox = self.world.inbox[client.rank]
        while client.connected and inbox and count:
            self.hear(client, inbox.popleft())
            count -= 1

    def hear(self, client: Client, message: Message) -> None:
        match message:
            case Welcome(session=session):
                self.welcomed(client, session)
            case Refused():
                client.connected = False  # it knows now that nothing more will come
            case Pong(known=False):
                self.world.says(client.rank, replace(client.hello, session=client.session))
            case RegionReady() | RegionRefused() | SlotFreed():
                self.hear_of_a_slot(client, message)
            case MakeGlobalPlan(save=save) if save == client.save:
                self.send(client, GlobalPlan(save, (ITEMS,) * self.world.world_size))
            case FinalPlan(save=save) if save == client.save and client.stage == "planning":
                client.plan, client.stage = message, "acquiring"
            case AskCommit(save=save):
                client.asked_to_commit.append(save)
            case Committed(save=save):
                client.unanswered.discard(save)
            case Aborted():
                self.aborted(client, message)

    def hear_of_a_slot(self, client: Client, message: RegionReady | RegionRefused | SlotFreed) -> None:
        slot = client.slots[message.slot]
        match message:
            case RegionReady():
                slot.state = RegionState.FREE if slot.state is RegionState.SEALED else slot.state
                slot.ready = message
                client.growing = False
            case RegionRefused():
                if client.stage == "filling" and client.slot == message.slot:
                    self.give_up(client)
                slot.ready = None
            case SlotFreed(generation=generation):
                if slot.state is RegionState.SEALED and slot.ready and slot.ready.generation == generation:
                    slot.state = RegionState.FREE

    def welcomed(self, client: Client, session: str) -> None:
        again = client.session != ""
        client.session = session
        if again:
            lost = sorted(client.unanswered, key=lambda save: save.seq)
            client.unanswered.clear()
            client.plan, client.save, client.stage, client.growing = None, None, "", False
            client.slots = [ModelSlot(), ModelSlot()]
            for save in lost:
                self.send(client, ReportFailure(save, FailureReport("SidecarRestarted", "lost")))

    def aborted(self, client: Client, message: Aborted) -> None:
        client.unanswered.discard(message.save)
        if message.replan:
            client.plan = None
        if client.save is not None and client.save.seq == message.save.seq and client.stage != "filling":
            self.give_up(client)

    # -------------------------------------------------------- workers and time

    @precondition(lambda self: self.world.orders)
    @rule(which=st.integers(0, 20), succeeds=st.integers(0, 4))
    def work(self, which: int, succeeds: int) -> None:
        """A worker ends an order; one in five fails."""
        self.finish(self.world.orders[which % len(self.world.orders)], ok=succeeds > 0)

    def finish(self, order: Action, *, ok: bool) -> None:
        world = self.world
        if isinstance(order, WriteShard) and (order.submit.rank, order.submit.save) not in self.started:
            self.started.add((order.submit.rank, order.submit.save))
            world.at_node(ShardStarted(order.submit.rank, order.submit.save))
            return
        world.orders = [other for other in world.orders if other is not order]
        match order:
            case OpenDirectory(directory=directory):
                steps = tuple(sorted({save.step for save in self.published}))
                event = DirectoryOpened(directory, steps) if ok else DirectoryRefused(directory, FAILURE)
                world.at_coordinator(event)
            case PrepareRegion(rank=rank, slot=slot, plan_id=plan_id):
                ready = RegionPrepared(rank, ready_for(order))
                world.at_node(ready if ok else RegionFailed(rank, slot, plan_id, FAILURE))
            case WriteShard(submit=submit):
                if ok:
                    self.durable.add((submit.rank, submit.save))
                    world.at_node(ShardDurable(submit.rank, submit.save, 1))
                else:
                    world.at_node(ShardBroken(submit.rank, submit.save, FAILURE))
            case Publish(save=save):
                self.publishing.discard(save)
                if ok:
                    self.published.add(save)
                world.at_coordinator(Published(save) if ok else PublishFailed(save, FAILURE))
            case Withdraw(save=save):
                world.at_coordinator(Withdrawn(save) if ok else WithdrawFailed(save, FAILURE))

    @rule(seconds=st.sampled_from(WAITS), luck=LUCK)
    def wait(self, seconds: float, luck: int) -> None:
        self.world.passes(1.0 if luck else seconds)

    # -------------------------------------------------------- promises

    def check_order(self, order: Action) -> None:
        """Whether an order may be given now."""
        match order:
            case Publish(save=save, world_size=world_size):
                missing = {(rank, save) for rank in range(world_size)} - (self.durable - self.removed)
                assert not missing, f"published without {missing}"
                assert save not in self.published | self.publishing, "published twice"
                self.publishing.add(save)
            case Withdraw(save=save):
                assert save not in self.published | self.publishing, "a committed save was withdrawn"
                self.removed.add((0, save))
            case RemoveShardFiles(rank=rank, save=save):
                assert save not in self.published | self.publishing, "files of a committed save were removed"
                self.removed.add((rank, save))
            case PrepareRegion(rank=rank, slot=index):
                self.check_slot(rank, index)
                client = self.clients[rank]
                filling = client.connected and client.stage == "filling" and client.slot == index
                assert not filling or client.growing, "a region was prepared under the hands of its rank"
            case WriteShard(submit=submit):
                self.check_slot(submit.rank, submit.slot)

    def check_slot(self, rank: int, index: int) -> None:
        orders = self.world.orders
        prepared = [o for o in of_type(orders, PrepareRegion) if (o.rank, o.slot) == (rank, index)]
        written = [o for o in of_type(orders, WriteShard) if (o.submit.rank, o.submit.slot) == (rank, index)]
        assert not prepared, "a slot was given out while it is prepared"
        assert not written, "a slot was given out while it is written"

    @invariant()
    def no_slot_is_offered_while_it_is_written(self) -> None:
        writing = {(order.submit.rank, order.submit.slot) for order in of_type(self.world.orders, WriteShard)}
        for rank, record in self.world.node.table.ranks.items():
            for index, slot in enumerate(record.slots):
                sealed = slot.state is RegionState.SEALED
                assert sealed == ((rank, index) in writing), "a slot is sealed exactly while it is written"

    def teardown(self) -> None:
        self.settle()
        assert not self.world.coordinator.table.is_busy, "an attempt has not ended"
        assert not self.world.node.table.is_busy, "a shard job has not ended"
        committed = {
            attempt.save
            for attempt in self.world.coordinator.table.attempts.values()
            if attempt.state is CheckpointState.COMMITTED
        }
        assert committed <= self.published

    def settle(self) -> None:
        """Everything ends: ranks give up what they are at, workers finish, time passes."""
        for _ in range(6):
            for client in self.clients.values():
                self.read(client.rank, 10_000)
                self.give_up(client)
            while self.world.orders:
                self.finish(self.world.orders[0], ok=True)
            self.world.passes(PERSIST_TIMEOUT_S + STAGE_TIMEOUT_S)


class EveryoneIsAnswered(AnyOrder):
    """The same, and in the end every living client knows how each of its saves has ended."""

    def teardown(self) -> None:
        super().teardown()
        for client in self.clients.values():
            assert not (client.connected and client.unanswered), f"rank {client.rank} waits for {client.unanswered}"
