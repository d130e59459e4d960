"""Both tables wired as the daemon wires them: whole stories of ranks, sidecar and workers, and any order of them.

The first part tells stories; the last lets hypothesis mix ranks that come, save, skip, fail, reconnect, leave, die and
are restarted with workers that succeed and fail, and looks for an order that breaks a promise.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from unittest import TestCase

import pytest
from hypothesis import HealthCheck, Phase, settings
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
    RestoreStep,
    SlotFreed,
    SubmitShard,
    Welcome,
)
from ckpt_sidecar.checkpoint_table import DECIDE_TIMEOUT_S, PERSIST_TIMEOUT_S
from ckpt_sidecar.events import (
    Action,
    CancelShard,
    DirectoryOpened,
    DirectoryRefused,
    OpenDirectory,
    PrepareRegion,
    Publish,
    Published,
    PublishFailed,
    RegionFailed,
    RegionPrepared,
    RemoveShardFiles,
    ShardBroken,
    ShardDurable,
    ShardStarted,
    WriteShard,
)
from testkit.tables import (
    DIRECTORY,
    FAILURE,
    ITEMS,
    SESSION,
    STAGE_TIMEOUT_S,
    World,
    hello,
    key,
    of_type,
    propose,
    ready_for,
)

SAVE = key()
WHERE = f"{DIRECTORY}/step-100"


@pytest.fixture(params=[1, 2, 3], ids="{} ranks".format)
def world(request: pytest.FixtureRequest) -> World:
    """Connected ranks that have planned their first save."""
    world = World(request.param).connect_all()
    world.plan(SAVE)
    for rank in range(world.world_size):
        world.read(rank)
    return world


@pytest.fixture
def two() -> World:
    """Two connected ranks that have planned their first save."""
    world = World(2).connect_all()
    world.plan(SAVE)
    world.read(0)
    world.read(1)
    return world


def submit_all(world: World, save: SaveKey, slot: int = 0) -> None:
    for rank in range(world.world_size):
        world.submit(rank, save, slot)


def ends_of(world: World, rank: int) -> list[tuple[str, SaveKey]]:
    """Which saves have ended for a rank, and how."""
    return [(type(m).__name__, m.save) for m in world.read(rank) if isinstance(m, (Committed, Aborted))]


# ---------------------------------------------------------------- stories


def test_a_first_save_from_hello_to_commit_as_a_rank_hears_it() -> None:
    world = World(2).connect_all()
    world.plan(SAVE)
    submit_all(world, SAVE)
    world.written()
    world.says(0, DecideCommit(SAVE, True))
    world.published()
    heard = [type(message).__name__ for message in world.read(0)]
    assert heard == [
        "Welcome",
        "MakeGlobalPlan",
        "FinalPlan",
        "RegionReady",
        "RegionReady",
        "ShardPersisted",
        "SlotFreed",
        "AskCommit",
        "Committed",
    ]
    assert [name for name in heard if name not in ("MakeGlobalPlan", "AskCommit")] == [
        type(message).__name__ for message in world.read(1)
    ]


def test_a_later_save_needs_one_message_of_each_rank_and_the_decision(world: World) -> None:
    submit_all(world, key(1))
    world.written()
    world.says(0, DecideCommit(key(1), True))
    world.published()
    for rank in range(world.world_size):
        assert ends_of(world, rank) == [("Committed", key(1))]


def test_saves_alternate_between_two_slots_without_waiting_for_each_other(two: World) -> None:
    submit_all(two, SAVE, slot=0)
    submit_all(two, key(1), slot=1)
    two.written()
    for save in (SAVE, key(1)):
        two.says(0, DecideCommit(save, True))
    two.published()
    assert ends_of(two, 1) == [("Committed", SAVE), ("Committed", key(1))]


def test_a_job_that_dies_right_after_staging_is_committed_and_the_next_life_restores_it(world: World) -> None:
    submit_all(world, SAVE)
    for rank in range(world.world_size):
        world.dies(rank)
    world.written()
    world.published()
    world.connect_all(incarnation=1)
    world.says(0, AskRestoreStep(0))
    assert RestoreStep(0, 100) in world.read(0)


def test_a_restarted_job_restores_the_save_that_its_earlier_life_had_staged(world: World) -> None:
    """The restart is faster than the storage: the answer must wait for the staged save, not tell an older step."""
    submit_all(world, SAVE)
    for rank in range(world.world_size):
        world.dies(rank)
    world.connect_all(incarnation=1)
    for rank in range(world.world_size):
        world.says(rank, AskRestoreStep(0))
    world.written()
    world.published()
    for rank in range(world.world_size):
        assert [m.step for m in world.read(rank) if isinstance(m, RestoreStep)] == [100]


def test_a_restarted_job_does_not_wait_for_a_save_that_cannot_complete(two: World) -> None:
    two.submit(0, SAVE)
    two.dies(0)
    two.dies(1)
    two.connect_all(incarnation=1)
    two.says(0, AskRestoreStep(0))
    assert RestoreStep(0, None) in two.read(0)


def test_a_broken_write_on_one_rank_fails_the_save_everywhere_and_leaves_no_file(two: World) -> None:
    submit_all(two, SAVE)
    two.written(0)
    (order,) = two.take(WriteShard, 1)
    two.at_node(ShardStarted(1, SAVE))
    two.at_node(ShardBroken(1, SAVE, FAILURE))
    assert order.submit.save == SAVE
    assert ends_of(two, 0) == ends_of(two, 1) == [("Aborted", SAVE)]
    assert {(order.rank, order.save) for order in two.take(RemoveShardFiles)} == {(0, SAVE), (1, SAVE)}
    assert not two.node.table.is_busy
    assert not two.coordinator.table.is_busy


def test_a_veto_leaves_no_file_and_the_slots_are_free(two: World) -> None:
    submit_all(two, SAVE)
    two.written()
    two.says(0, DecideCommit(SAVE, False, "no"))
    assert {order.rank for order in two.take(RemoveShardFiles)} == {0, 1}
    assert ends_of(two, 1) == [("Aborted", SAVE)]
    submit_all(two, key(1))
    assert len(two.take(WriteShard)) == 2


def test_a_commit_that_fails_leaves_no_file(two: World) -> None:
    submit_all(two, SAVE)
    two.written()
    two.says(0, DecideCommit(SAVE, True))
    two.take(Publish)
    two.at_coordinator(PublishFailed(SAVE, FAILURE))
    assert {order.rank for order in two.take(RemoveShardFiles)} == {0, 1}
    assert ends_of(two, 0) == ends_of(two, 1) == [("Aborted", SAVE)]


def test_a_skip_on_one_rank_cancels_what_the_others_have_staged(two: World) -> None:
    two.submit(0, SAVE)
    two.says(1, ReportSkip(SAVE, "no free region"))
    assert two.take(CancelShard) == [CancelShard(0, SAVE)]
    assert ends_of(two, 0) == [("Aborted", SAVE)]


def test_a_rank_that_stages_after_the_skip_is_told_and_its_write_is_stopped(two: World) -> None:
    two.says(1, ReportSkip(SAVE, "no free region"))
    two.submit(0, SAVE)
    assert two.take(CancelShard) == [CancelShard(0, SAVE)]
    two.take(WriteShard)
    two.at_node(ShardStarted(0, SAVE))
    two.at_node(ShardBroken(0, SAVE, FAILURE))
    assert SlotFreed(0, 1) in two.read(0)


def test_a_structure_that_changed_everywhere_is_planned_anew_while_the_old_save_is_written(two: World) -> None:
    submit_all(two, SAVE)
    two.plan(key(1))
    assert [m.slot for m in two.read(0) if isinstance(m, RegionReady)] == [1]
    two.written()
    two.prepared()
    heard = two.read(0)
    assert [m.slot for m in heard if isinstance(m, RegionReady)] == [0]
    assert [m for m in heard if isinstance(m, SlotFreed)] == []


def test_a_structure_that_changed_on_one_rank_is_planned_anew_at_the_next_save(two: World) -> None:
    two.submit(0, key(1))
    two.says(1, propose(key(1), changed=["head.bias"]))
    assert any(isinstance(m, Aborted) and m.replan for m in two.read(0))
    two.take(WriteShard)
    two.at_node(ShardStarted(0, key(1)))
    two.at_node(ShardBroken(0, key(1), FAILURE))
    two.plan(key(2))
    submit_all(two, key(2))
    two.written()
    two.says(0, DecideCommit(key(2), True))
    two.published()
    assert ("Committed", key(2)) in ends_of(two, 0)


def test_a_staged_save_survives_the_death_of_rank_0_at_every_moment(two: World) -> None:
    for seq, moment in enumerate(["staged", "persisted", "asked"]):
        world = World(2).connect_all()
        world.plan(SAVE)
        submit_all(world, SAVE)
        if moment == "staged":
            world.dies(0)
        world.written(0)
        if moment == "persisted":
            world.dies(0)
        world.written(1)
        if moment == "asked":
            world.dies(0)
        world.published()
        assert ("Committed", SAVE) in ends_of(world, 1), (seq, moment)


def test_a_late_rank_is_named_after_the_stage_timeout(two: World) -> None:
    two.submit(0, SAVE)
    two.passes(STAGE_TIMEOUT_S + 1)
    (aborted,) = [m for m in two.read(0) if isinstance(m, Aborted)]
    assert aborted.failures[0].message == "rank 1 on node-a has not staged step 100 after 601 s"


def test_a_survivor_of_a_death_is_not_left_without_an_answer(two: World) -> None:
    """Rank 1 is restarted alone and begins a new session; rank 0 lives on and saves under the cached plan."""
    two.dies(1)
    two.connect(1)
    two.opened()
    two.submit(0, key(1))
    assert ("Aborted", key(1)) in ends_of(two, 0)


def test_ranks_that_open_their_clients_twice_at_their_own_pace_end_up_together() -> None:
    """Each rank opens a client to look for a step, closes it, and opens the one it trains with."""
    world = World(2).connect_all()
    for rank in (0, 1):
        world.leaves(rank)
        world.connect(rank)
        world.opened()
    save = key(session=world.node.table.ranks[0].session)
    assert world.node.table.ranks[1].session == save.session
    world.plan(save)
    submit_all(world, save)
    world.written()
    world.says(0, DecideCommit(save, True))
    world.published()
    assert ends_of(world, 0) == ends_of(world, 1) == [("Committed", save)]


def test_a_death_that_is_noticed_after_the_restart_does_not_end_the_new_session(two: World) -> None:
    two.dies(0)
    two.connect(0, incarnation=1)
    two.opened()
    two.dies(1)
    two.connect(1, incarnation=1)
    two.opened()
    assert two.node.table.ranks[0].session == two.node.table.ranks[1].session


def test_a_client_that_reconnects_while_its_save_is_published_does_not_take_the_commit_back(two: World) -> None:
    submit_all(two, SAVE)
    two.written()
    two.says(0, DecideCommit(SAVE, True))
    two.says(1, hello(1, 2, session=SESSION, pid=two.node.table.ranks[1].hello.pid))
    two.says(1, ReportFailure(SAVE, FAILURE))
    two.published()
    assert ends_of(two, 0) == [("Committed", SAVE)]
    assert two.take(RemoveShardFiles) == []


def test_the_files_of_a_committed_save_are_never_removed_by_an_old_seal(two: World) -> None:
    """The seal of a slot that is seldom used outlives its job's memory; at the rank's death it is read once more."""
    old = two.node.submit(SAVE, 1, slot=1)
    two.submit(0, SAVE)
    two.says(1, old)
    two.written()
    two.says(0, DecideCommit(SAVE, True))
    two.published()
    for seq in range(1, 200):
        submit_all(two, key(seq))
        two.written()
        two.says(0, DecideCommit(key(seq), True))
        two.published()
    two.says(1, old)
    two.dies(1)
    two.written()
    two.passes(STAGE_TIMEOUT_S + 1)
    assert two.take(RemoveShardFiles) == []


def test_two_saves_of_one_step_are_published_in_their_order(two: World) -> None:
    """Publishing the later one removes the files of earlier ones, which must not wait for their own commit then."""
    first, second = key(1, step=7), key(2, step=7)
    submit_all(two, first, slot=0)
    submit_all(two, second, slot=1)
    (early, late) = two.take(WriteShard, 0), two.take(WriteShard, 1)
    for order in (early[1], late[1]):
        two.at_node(ShardStarted(order.submit.rank, second))
        two.at_node(ShardDurable(order.submit.rank, second, 1))
    two.says(0, DecideCommit(second, True))
    assert two.take(Publish) == []
    for order in (early[0], late[0]):
        two.at_node(ShardStarted(order.submit.rank, first))
        two.at_node(ShardDurable(order.submit.rank, first, 1))
    two.says(0, DecideCommit(first, True))
    assert [order.save for order in two.orders if isinstance(order, Publish)] == [first]
    two.published()
    assert [order.save for order in two.orders if isinstance(order, Publish)] == [second]


def test_a_save_of_one_step_does_not_wait_for_an_earlier_one_that_failed(two: World) -> None:
    first, second = key(1, step=7), key(2, step=7)
    submit_all(two, first, slot=0)
    submit_all(two, second, slot=1)
    for order in [order for order in two.take(WriteShard) if order.submit.save == second]:
        two.at_node(ShardStarted(order.submit.rank, second))
        two.at_node(ShardDurable(order.submit.rank, second, 1))
    two.says(0, DecideCommit(second, True))
    two.at_node(ShardStarted(1, first))
    two.at_node(ShardBroken(1, first, FAILURE))
    assert [order.save for order in two.orders if isinstance(order, Publish)] == [second]


def test_a_staged_save_that_fails_when_nobody_is_left_is_remembered(two: World) -> None:
    submit_all(two, SAVE)
    two.dies(0)
    two.dies(1)
    two.take(WriteShard)
    two.at_node(ShardStarted(0, SAVE))
    two.at_node(ShardBroken(0, SAVE, FAILURE))
    assert list(two.node.table.lost) == [SAVE]


def test_a_later_commit_makes_a_lost_save_history(two: World) -> None:
    submit_all(two, SAVE)
    two.dies(0)
    two.dies(1)
    two.take(WriteShard)
    two.at_node(ShardStarted(0, SAVE))
    two.at_node(ShardBroken(0, SAVE, FAILURE))
    two.connect_all(incarnation=1)
    assert two.coordinator.table.session is not None
    later = key(0, step=900, session=two.coordinator.table.session.token)
    two.plan(later)
    two.at_node(ShardStarted(1, SAVE))
    two.at_node(ShardBroken(1, SAVE, FAILURE))
    two.prepared()
    submit_all(two, later)
    two.written()
    two.says(0, DecideCommit(later, True))
    two.published()
    assert two.node.table.lost == {}


def test_a_failed_save_that_its_ranks_were_told_of_is_not_lost(two: World) -> None:
    submit_all(two, SAVE)
    two.take(WriteShard)
    two.at_node(ShardStarted(0, SAVE))
    two.at_node(ShardBroken(0, SAVE, FAILURE))
    assert two.node.table.lost == {}


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

    @rule(seconds=st.sampled_from([1.0, STAGE_TIMEOUT_S + 1, DECIDE_TIMEOUT_S + 1, PERSIST_TIMEOUT_S + 1]), luck=LUCK)
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


ORDERS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=250,
    stateful_step_count=60,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
)


def as_test(machine: type[AnyOrder]) -> type[TestCase]:
    """The machine as a test of its own."""
    case: type[TestCase] = machine.TestCase
    case.settings = ORDERS  # type: ignore[attr-defined]
    return case


TestAnyOrder = as_test(AnyOrder)
TestEveryoneIsAnswered = as_test(EveryoneIsAnswered)
