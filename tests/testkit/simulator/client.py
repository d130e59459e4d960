"""A rank's client: the real connection and what it owns, driven by a trainer whose ``save()`` takes single steps."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_proto.errors import AlreadyCommitted, CheckpointError, FailureReport, RegionError, report_of
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import (
    FinalPlan,
    GlobalPlan,
    Goodbye,
    GrowRegion,
    Heartbeat,
    Message,
    RegionReady,
    ReportFailure,
    ReportSkip,
    SubmitShard,
)
from ckpt_sidecar.rank_record import FIRST_BYTE_CAPACITY
from ckpt_trainer_client.config import ClientConfig
from ckpt_trainer_client.errors import CheckpointFailed, SaveSkipped
from ckpt_trainer_client.plan_exchange import GRACE_S
from ckpt_trainer_client.region_pool import RegionRequest
from testkit.simulator.network import Connection
from testkit.simulator.shared_memory import Region
from testkit.simulator.stepped import SteppedConnection
from testkit.simulator.storage import Value
from testkit.tables import DIRECTORY, ITEMS, JOB, STAGE_TIMEOUT_S, propose

if TYPE_CHECKING:
    from testkit.simulator.world import World

Steps = Iterator[bool]
"""A ``save()``: yields after each step, True if it only waits."""

GROWN_BYTES = 2 * FIRST_BYTE_CAPACITY
"""What the byte entries of a save need that does not fit into a new region."""

SHM_ROOT = Path("/dev/shm")


@dataclass(frozen=True)
class Wish:
    """How a ``save()`` is called; ``fails_on`` is the rank that has something in its state that cannot be saved."""

    step: int
    overwrite: bool = False
    changed: bool = False
    grows: bool = False
    policy: str = "wait"
    fails_on: int | None = None


class Handle:
    """What the user holds: its facts go to the promises."""

    def __init__(self, world: World, rank: int, save: SaveKey) -> None:
        self._world = world
        self._rank = rank
        self._save = save
        self.is_resolved = False

    def _set_persisted(self) -> None:
        self._world.promises.told_persisted(self._rank, self._save)

    def _set_committed(self, where: str) -> None:
        if not self.is_resolved:
            self.is_resolved = True
            self._world.promises.told_committed(self._rank, self._save)

    def _fail(self, failures: Sequence[FailureReport], *, skipped: bool = False) -> None:
        if not self.is_resolved:
            self.is_resolved = True
            self._world.promises.told_failed(self._rank, self._save, failures)


class Client:
    """One process of one rank."""

    def __init__(self, world: World, rank: int, world_size: int, incarnation: int) -> None:
        self.world = world
        self.rank = rank
        self.world_size = world_size
        self.node = world.node_of(rank)
        self.pid = world.new_pid()
        self.alive = True
        self.said_goodbye = False
        self.connection = Connection(world.new_peer)
        config = ClientConfig(DIRECTORY, JOB, rank, world_size, rank, incarnation, SHM_ROOT, self.node.name)
        hooks = (self._hook,) if world.has_hooks and rank == 0 else ()
        self.talk = SteppedConnection(config, self.pid, self.connection.up.append, hooks)
        self.seq = 0
        self.handles: dict[SaveKey, Handle] = {}
        self._saving: Steps | None = None
        self._plan: FinalPlan | None = None
        self._plan_epoch = -1
        self._attached: dict[int, tuple[RegionReady, Region]] = {}
        self.filling: Region | None = None
        self._value: Value = (0, 0)
        self._hello_life = self.node.life
        self.talk.say_hello()

    def __repr__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    @property
    def can_save(self) -> bool:
        """Whether ``save()`` may be called now."""
        ready = self.alive and not self.said_goodbye and self.talk.is_welcome and not self.talk.is_refused
        return ready and self._saving is None

    def _hook(self, step: int, where: str) -> bool:
        return self.world.accepts(step)

    # ------------------------------------------------------------ life

    def hear(self) -> bool:
        """The next message that has arrived."""
        if not self.alive or not self.connection.down:
            return False
        message = self.connection.down.popleft()
        self.world.tell_message(self.connection.peer.decode(), self, message)
        self.talk.hear(message)
        return True

    def beat(self) -> bool:
        """A heartbeat, where it can change anything: the sidecar does not know us. Or another first Hello."""
        if not self.alive or not self.node.is_up or self.talk.is_refused or self.connection.up:
            return False
        if self.talk.is_welcome:
            records = self.node.jobs.ranks
            if self.rank in records and records[self.rank].peer == self.connection.peer:
                return False
            self.connection.up.append(Heartbeat())
            return True
        if self._hello_life == self.node.life:
            return False
        self._hello_life = self.node.life
        self.talk.say_hello()
        return True

    def leave(self) -> None:
        """``close()`` of a client that has no ``save()`` under way."""
        self.said_goodbye = True
        self.connection.up.append(Goodbye())

    def dies(self, lost: int) -> None:
        """SIGKILL. What its library had not sent is lost."""
        self.alive = False
        for _ in range(min(lost % 3, len(self.connection.up))):
            self.connection.up.pop()
        self.connection.down.clear()
        self._saving = self.filling = None

    # ------------------------------------------------------------ save()

    def begin(self, wish: Wish) -> None:
        """The user calls ``save()``."""
        self._saving = self._save(wish)

    def go_on(self) -> bool:
        """One step of the ``save()`` under way."""
        if not self.alive or self._saving is None:
            return False
        try:
            waits = next(self._saving)
        except StopIteration:
            self._saving, waits = None, False
        return not waits

    def _save(self, wish: Wish) -> Steps:
        """``CheckpointClient.save`` after its arguments were found to be good."""
        talk = self.talk
        save = SaveKey(talk.session, self.seq, wish.step)
        self.seq += 1
        handle = self.handles[save] = Handle(self.world, self.rank, save)
        talk.saves.expect(save, handle)  # type: ignore[arg-type]
        talk.next_seq = self.seq
        self.world.promises.save_begins(self.rank, save, self.world_size)
        yield False
        try:
            talk.exchange.raise_if_aborted(save)
            if not wish.overwrite and wish.step in talk.committed_steps:
                raise AlreadyCommitted(f"step {wish.step}")
            yield from self._stage(save, wish)
        except CheckpointError as error:
            self._give_up(save, error)

    def _give_up(self, save: SaveKey, error: CheckpointError) -> None:
        talk = self.talk
        if isinstance(error, CheckpointFailed):
            failures = list(error.failures.values())
        else:
            failures = [report_of(error).at(self.rank, self.node.name)]
        skipped = isinstance(error, SaveSkipped)
        self.world.promises.spoil(save, f"rank {self.rank} gave it up")
        report: Message = ReportFailure(save, failures[0], replan=isinstance(error, RegionError))
        talk.report(ReportSkip(save, failures[0].message) if skipped else report)  # type: ignore[arg-type]
        talk.saves.failed(save, failures, skipped=skipped)

    def _stage(self, save: SaveKey, wish: Wish) -> Steps:
        """``Stager.stage``: the region is sealed with the submission before the submission is sent."""
        yield from self._planned(save, wish)
        assert self._plan is not None
        if wish.fails_on == self.rank:
            raise CheckpointError("simulated")
        plan_id, pool = self._plan.plan_id, self.talk.pool
        request = self._request(save, plan_id, wish.policy)
        started_s, asked = self.world.now_s, set[tuple[int, int]]()
        while (ready := pool.try_acquire(request, asked, self.world.now_s - started_s)) is None:
            yield True
        try:
            if wish.grows and ready.byte_capacity < GROWN_BYTES:
                ready = yield from self._grown(ready, request)
            if wish.grows:
                self.world.promises.has_room(self, ready, GROWN_BYTES)
            request.check()
            yield from self._fill(ready)
            submit = SubmitShard(save, self.rank, plan_id, ready.slot, ready.generation, (5,), wish.overwrite)
            region = self._attach(ready)
            pool.seal(ready.slot, request, partial(self._seal, region, submit), partial(self._break_seal, region))
        except BaseException:
            self.filling = None
            pool.discard(ready.slot)
            raise
        yield False
        self.talk.submit(submit)

    def _grown(self, first: RegionReady, request: RegionRequest) -> Generator[bool, None, RegionReady]:
        asked: set[tuple[int, int]] = set()
        while (ready := self.talk.pool.try_grow(first, request, GROWN_BYTES, asked)) is None:
            yield True
        return ready

    def _request(self, save: SaveKey, plan_id: str, policy: str) -> RegionRequest:
        talk = self.talk
        return RegionRequest(
            plan_id,
            save.step,
            policy,
            600.0,
            save.seq,
            check=lambda: talk.exchange.raise_if_aborted(save),
            prepare=lambda slot, capacity: talk.send(GrowRegion(plan_id, slot, capacity)),
        )

    def _fill(self, ready: RegionReady) -> Steps:
        region = self._attach(ready)
        self.world.promises.fill_begins(self, ready.slot, region)
        self.filling = region
        region.seal, self._value = None, self.world.new_value(self.rank)
        yield False
        region.first = self._value
        yield False
        region.second = self._value
        yield False

    def _seal(self, region: Region, submit: SubmitShard) -> None:
        region.seal, self.filling = submit, None
        self.world.promises.sealed(self, submit, self._value)

    def _break_seal(self, region: Region) -> None:
        region.seal = None

    def _attach(self, ready: RegionReady) -> Region:
        known = self._attached.get(ready.slot)
        if known is not None and known[0] == ready:
            return known[1]
        region = self.node.shm.regions.get((self.rank, ready.slot))
        if region is None:
            raise RegionError(f"region {ready.path} is missing")
        self._attached[ready.slot] = (ready, region)
        return region

    def _planned(self, save: SaveKey, wish: Wish) -> Steps:
        """``Stager._plan_for``."""
        talk, epoch = self.talk, self.talk.plan_epoch
        if self._plan is not None and self._plan_epoch == epoch and not wish.changed:
            return
        talk.exchange.propose(propose(save, changed=["x"] if self._plan else []))
        deadline_s = self.world.now_s + STAGE_TIMEOUT_S + GRACE_S
        try:
            while not isinstance(message := talk.exchange.take(save), FinalPlan):
                if message is not None:
                    talk.send(GlobalPlan(save, (ITEMS,) * self.world_size))
                elif self.world.now_s > deadline_s:
                    raise CheckpointFailed(save.step, [FailureReport("PlanTimeout", "no plan")])
                yield message is None
        finally:
            talk.exchange.end()
        self._plan, self._plan_epoch = message, epoch
