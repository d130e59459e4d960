"""Staging one rank's part of a save: plan, region, copy, seal. Called on the trainer's thread only."""

from __future__ import annotations

from functools import partial

from ckpt_proto.codec import encode
from ckpt_proto.errors import NotEnoughSharedMemory, RegionError
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import GrowRegion, RegionReady, SubmitShard
from ckpt_trainer_client.attached_region import AttachedRegion
from ckpt_trainer_client.config import ClientConfig
from ckpt_trainer_client.connection import Connection
from ckpt_trainer_client.planning import PlanningState, SavePlanned
from ckpt_trainer_client.region_pool import RegionRequest
from ckpt_trainer_client.staging import byte_entries, copy_all, sources
from ckpt_trainer_client.structure import changed_keys


class Stager:
    """Keeps the plan and the attached regions between saves, so that a later save is: compare, copy, one message."""

    def __init__(self, config: ClientConfig, connection: Connection) -> None:
        self._config = config
        self._connection = connection
        self._plan: SavePlanned | None = None
        self._plan_epoch = -1
        self._regions: dict[int, AttachedRegion] = {}

    def stage(self, save: SaveKey, state: PlanningState, *, overwrite: bool) -> None:
        """Copy what ``state`` resolves into a region and hand that over; on return the tensors may change.

        Raises:
            UnsupportedLeaf, PlanningError: the state dict cannot be saved.
            SaveSkipped, RegionsExhausted, RegionError: there is no region for it.
            CheckpointFailed: the attempt was given up meanwhile.
        """
        plan = self._plan_for(save, state)
        entries = byte_entries(state, plan)
        tensors = sources(state, plan)
        pool, request = self._connection.pool, self._request(save, plan)
        ready = self._acquire(request)
        try:
            needed = sum(map(len, entries))
            if needed > ready.byte_capacity:
                # Twice what is needed, so that a slowly growing value does not grow the region at every save.
                ready = pool.grow(ready, request, 2 * needed)
            request.check()
            region = self._attach(ready, plan)
            region.begin()
            copy_all(region.targets, tensors)
            region.write_bytes(entries)
            submit = self._submission(save, ready, tuple(map(len, entries)), overwrite)
            pool.seal(ready.slot, request, partial(region.seal, encode(submit)), region.begin)
        except BaseException:
            pool.discard(ready.slot)
            raise
        self._connection.submit(submit)

    def _acquire(self, request: RegionRequest) -> RegionReady:
        try:
            return self._connection.pool.acquire(request)
        except NotEnoughSharedMemory:
            raise  # the plan is good, and its regions are asked for again at the next save
        except RegionError:
            self._plan = None  # the sidecar does not answer for it: plan anew next time rather than wait as long again
            raise

    def _submission(
        self, save: SaveKey, ready: RegionReady, byte_lengths: tuple[int, ...], overwrite: bool
    ) -> SubmitShard:
        rank = self._config.rank
        return SubmitShard(save, rank, ready.plan_id, ready.slot, ready.generation, byte_lengths, overwrite)

    def _request(self, save: SaveKey, plan: SavePlanned) -> RegionRequest:
        config, connection = self._config, self._connection
        return RegionRequest(
            plan.plan_id,
            save.step,
            config.backpressure,
            config.backpressure_timeout_s,
            save.seq,
            check=lambda: connection.exchange.raise_if_aborted(save),
            prepare=lambda slot, capacity: connection.send(GrowRegion(plan.plan_id, slot, capacity)),
        )

    def _plan_for(self, save: SaveKey, state: PlanningState) -> SavePlanned:
        epoch = self._connection.plan_epoch
        cached = self._plan if self._plan_epoch == epoch else None
        if cached is not None and state.fits(cached):
            return cached
        old = self._plan.structure if self._plan is not None else None
        changed = changed_keys(old, state.structure) if state.structure is not None else ()
        self._plan = self._connection.exchange.exchange(save, state, changed)
        self._plan_epoch = epoch  # as it was before: what was said meanwhile may have been about this plan
        return self._plan

    def _attach(self, ready: RegionReady, plan: SavePlanned) -> AttachedRegion:
        region = self._regions.get(ready.slot)
        if region is None or region.ready != ready:
            self._regions[ready.slot] = region = AttachedRegion(ready, plan.items, region)
        return region

    def _detach(self) -> None:
        for region in self._regions.values():
            region.close()
        self._regions.clear()

    def close(self) -> None:
        """Let go of plan and regions."""
        self._plan = None
        self._detach()
