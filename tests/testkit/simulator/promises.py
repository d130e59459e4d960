"""What must hold in every schedule, and the record of what has happened by which it is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import RegionReady, SubmitShard
from ckpt_sidecar.actions import Action, PrepareRegion, WriteShard
from testkit.simulator.shared_memory import Region
from testkit.simulator.storage import Shard, Storage, Value

if TYPE_CHECKING:
    from testkit.simulator.client import Client
    from testkit.simulator.node import SimNode
    from testkit.simulator.world import World

IN_DOUBT: Final = {
    "SidecarLost",
    "SidecarSilent",
    "SessionEnded",
    "Refused",
    "PublishStalled",
    "NotWithdrawn",
    "CoordinatorLost",
}
"""Failures told by somebody who cannot know the end: a client or node without the coordinator, a coordinator without
storage.
A handle must not stay open for ever, but nobody can promise that such a save is not committed all the same: what is
sealed is no longer the client's to give up (a staged save is not lost with its trainer)."""

PASSING_S: Final = 15.0
"""A trouble of the storage that lasts no longer for a save must not cost it: writes are tried again for 30 s."""


class Broken(AssertionError):
    """A promise was broken."""


@dataclass
class SaveRecord:
    """One attempt, as the simulation knows it. ``staged`` has what each rank has sealed, under its own key; ``spoiled``
    why it may fail."""

    world_size: int
    order: int
    staged: dict[int, tuple[SubmitShard, Value]] = field(default_factory=dict)
    spoiled: list[str] = field(default_factory=list)
    failed: dict[int, tuple[set[str], int, int]] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)
    first_trouble_s: float | None = None


class Promises:
    """The judge. Every method either notes a fact or raises :class:`Broken`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.saves: dict[tuple[str, int], SaveRecord] = {}
        self.published: dict[SaveKey, int] = {}
        self.sessions: dict[str, int] = {}
        self.was_durable: set[Shard] = set()
        self.refused: set[int] = set()
        self.given_up: dict[SaveKey, int] = {}  # the life of the coordinator that gave an attempt up

    def of(self, save: SaveKey) -> SaveRecord:
        """The record of an attempt."""
        return self.saves[save.session, save.seq]

    def spoil(self, save: SaveKey, why: str) -> None:
        """From now on the attempt may fail."""
        record = self.saves.get((save.session, save.seq))
        if record is not None:
            record.spoiled.append(why)

    def trouble(self, save: SaveKey, now_s: float, *, passes: bool) -> None:
        """The storage has refused something of a save."""
        record = self.of(save)
        if record.first_trouble_s is None:
            record.first_trouble_s = now_s
        if not passes or now_s - record.first_trouble_s > PASSING_S:
            record.spoiled.append("the storage failed")

    # ------------------------------------------------------------ what ranks do and hear

    def save_begins(self, rank: int, save: SaveKey, world_size: int) -> None:
        """A rank calls ``save()``."""
        self.sessions.setdefault(save.session, len(self.sessions))
        key = (save.session, save.seq)
        record = self.saves.setdefault(key, SaveRecord(world_size, len(self.saves)))
        _check(record.world_size == world_size, f"{save} is of {record.world_size} and {world_size} ranks")
        for other in self.published:
            if other.step == save.step and other.session != save.session:
                record.spoiled.append("its step is committed by another life")
        for (session, _), older in self.saves.items():
            keys = [submit.save.step for submit, _ in older.staged.values()]
            if session != save.session and save.step in keys:
                older.spoiled.append("the restarted job saves the step itself")

    def has_room(self, client: Client, ready: RegionReady, nbytes: int) -> None:
        """A rank has had a region grown."""
        _check(ready.byte_capacity >= nbytes, f"{client} got {ready}, it needs {nbytes} bytes")

    def fill_begins(self, client: Client, slot: int, region: Region) -> None:
        """A rank begins to fill a region."""
        node, place = client.node, (client.rank, slot)
        if node.is_up and node.shm.regions.get(place) is region:
            _check(place not in node.writing.values(), f"{client} fills slot {slot} while it is written")
            _check(place not in node.preparing.values(), f"{client} fills slot {slot} while it is prepared")

    def sealed(self, client: Client, submit: SubmitShard, value: Value) -> None:
        """A rank has sealed a region: staged."""
        record = self.of(submit.save)
        _check(client.rank not in record.staged, f"{submit.save} is staged by two clients of rank {client.rank}")
        record.staged[client.rank] = (submit, value)

    def told_persisted(self, rank: int, save: SaveKey) -> None:
        """A handle says persisted."""
        _check((rank, save) in self.was_durable, f"rank {rank} was told that {save} is persisted, and it was not")

    def told_committed(self, rank: int, save: SaveKey) -> None:
        """A handle says committed."""
        _check(save in self.published, f"rank {rank} was told that {save} is committed, and it is not")
        self.of(save).committed.add(rank)

    def told_failed(self, rank: int, save: SaveKey, failures: Sequence[FailureReport]) -> None:
        """A handle says failed."""
        kinds = {failure.kind for failure in failures}
        by_itself = bool(kinds & IN_DOUBT)
        # Replaced by a later save of the same step before anybody was told: nothing is left that says it was there.
        at = self.published.get(save)
        replaced = at is not None and any(
            other.step == save.step and order > at for other, order in self.published.items()
        )
        _check(
            at is None or by_itself or replaced or kinds == {"AlreadyCommitted"},  # which is true
            f"rank {rank} was told {kinds} of {save}, which is committed",
        )
        record = self.of(save)
        world = self._world
        life = self.given_up.get(save, world.nodes[0].life)
        record.failed[rank] = (kinds, world.current[rank].pid, life)
        if by_itself:
            record.spoiled.append(f"rank {rank} gave it up: {kinds}")
        self._world.tell(f"rank {rank} was told that {save} failed: {'; '.join(map(str, failures))}")

    # ------------------------------------------------------------ what the sidecar does

    def order_is_given(self, node: SimNode, action: Action) -> None:
        """The tables order something of a worker."""
        match action:
            case PrepareRegion(rank=rank, slot=slot):
                place = (rank, slot)
            case WriteShard(submit=submit):
                place = (submit.rank, submit.slot)
            case _:
                return
        _check(place not in node.writing.values(), f"{place} on {node} is given out while it is written")
        _check(place not in node.preparing.values(), f"{place} on {node} is given out while it is prepared")

    def region_is_framed(self, node: SimNode, place: tuple[int, int], region: Region) -> None:
        """A worker lays a region out."""
        client = self._world.current.get(place[0])
        fills = client is not None and client.node is node and client.filling is region
        _check(not fills, f"{place} on {node} is prepared under the hands of its rank")
        _check(place not in node.writing.values(), f"{place} on {node} is prepared while it is written")

    def files_change(self, shard: Shard, storage: Storage) -> None:
        """A data file or manifest is created or removed."""
        rank, save = shard
        _check(storage.metadata.get(save.step) != save, f"a file of rank {rank} in the published {save} is touched")

    def removal_is_refused(self, save: SaveKey) -> None:
        """The tables have ordered to remove a shard of a published attempt, which only the worker has prevented.

        Where the storage fails that is as it should be: a shard that is durable already is written once more, by a
        sidecar that has found it sealed, and that fails, while the coordinator counts what it sees there.
        """
        _check(bool(self.of(save).spoiled), f"the files of the published {save} were to be removed")

    def published_now(self, save: SaveKey, before: SaveKey | None, storage: Storage) -> None:
        """``.metadata`` of an attempt has appeared."""
        record = self.of(save)
        plans = set()
        for rank in range(record.world_size):
            manifest = storage.durable((rank, save))
            _check(manifest is not None, f"{save} is published without a durable shard of rank {rank}")
            _check(rank in record.staged, f"{save} is published, which rank {rank} has not staged")
            submit, value = record.staged[rank]
            file = storage.files[rank, save]
            same = (file.first, file.second) == (value, value)
            _check(same, f"{save} of rank {rank} holds {file}, staged was {value}")
            plans.add(submit.plan_id)
        _check(len(plans) == 1, f"{save} mixes the plans {plans}")
        told = {rank: kinds for rank, (kinds, pid, life) in record.failed.items() if self._is_known(kinds, pid, life)}
        _check(not told, f"{save} is committed after ranks were told that it has failed: {told}")
        if before is not None:
            mine, other = (self.sessions[save.session], save.seq), (self.sessions[before.session], before.seq)
            _check(mine > other, f"{save} replaces the later {before}")
        self.published[save] = len(self.published)

    def _is_known(self, kinds: set[str], pid: int, life: int) -> bool:
        """Whether somebody must know that a save was given up: not if that was in doubt, nor if both the
        client that was told and the coordinator that told it are dead. Then what is sealed or durable speaks."""
        world = self._world
        return not kinds & IN_DOUBT and (world.lives(pid) or world.nodes[0].life == life)

    # ------------------------------------------------------------ in the end

    def settled(self, world: World) -> None:
        """Everything is healed and time has passed: what is staged by every rank is committed."""
        for (session, seq), record in self.saves.items():
            submits = [submit for submit, _ in record.staged.values()]
            alike = len({(submit.save, submit.plan_id, submit.overwrite) for submit in submits}) == 1
            if len(submits) < record.world_size or not alike or record.spoiled:
                continue
            _check(submits[0].save in self.published, f"{session}-{seq} is staged by every rank and is not committed")

    def ended(self, world: World) -> None:
        """All bounds have passed: nothing is open."""
        for client in world.current.values():
            if not client.alive or client.said_goodbye:
                continue
            for save, handle in client.handles.items():
                _check(handle.is_resolved or client.talk.is_refused, f"{client} waits for {save} for ever")
        for node in world.nodes:
            _check(not node.jobs.is_busy, f"a shard job of {node} has not ended")
            for place, region in node.shm.regions.items():
                # A client that is refused hands nothing over; the next one of the rank begins anew.
                refused = place[0] in world.current and world.current[place[0]].pid in self.refused
                _check(region.seal is None or refused, f"{place} on {node} is sealed for ever: {region.seal}")
            if node.checkpoints is not None:
                _check(not node.checkpoints.is_busy, "an attempt is open for ever")


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Broken(otherwise)
