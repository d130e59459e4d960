"""What a save of this rank needs before bytes are copied: the plan, and a region to fill in."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner

from ckpt_proto.errors import FailureReport, NotEnoughSharedMemory, RegionError
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import Aborted, GrowRegion, RegionReady, SubmitShard
from ckpt_trainer_client.attached_region import AttachedRegion
from ckpt_trainer_client.config import ClientConfig
from ckpt_trainer_client.connection import Connection
from ckpt_trainer_client.errors import CheckpointFailed
from ckpt_trainer_client.filling import Filling
from ckpt_trainer_client.planning import PlanningState, SavePlanned
from ckpt_trainer_client.region_pool import RegionRequest
from ckpt_trainer_client.staging import byte_entries, sources
from ckpt_trainer_client.structure import changed_keys

logger = logging.getLogger(__name__)


class Stager:
    """Keeps the plan and the attached regions between saves, so that a later save is: compare, copy, one message."""

    def __init__(self, config: ClientConfig, connection: Connection) -> None:
        self._config = config
        self._connection = connection
        self._plan: SavePlanned | None = None
        self._plan_epoch = -1
        self._regions: dict[int, AttachedRegion] = {}
        self._is_closing = False

    # Without gradients the local tensor of a DTensor is just there; with them it is an operation of autograd.
    @torch.no_grad()
    def planning_state(self, state_dict: Mapping[str, Any], planner: SavePlanner | None) -> PlanningState:
        """``state_dict`` seen through its planner, recognised if it is like the one of the save before.

        Raises:
            UnsupportedLeaf, PlanningError: it cannot be saved.
        """
        return PlanningState(state_dict, planner, is_coordinator=self._config.rank == 0, known=self._plan)

    @torch.no_grad()
    def begin(self, save: SaveKey, state: PlanningState, *, overwrite: bool) -> Filling:
        """A region for what ``state`` resolves, its seal broken.

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
            ready = self._with_room(ready, request, sum(map(len, entries)))
            request.check()
            region = self._attach(ready, plan)
            region.begin()
        except BaseException:
            pool.discard(ready.slot)
            raise
        submit = self._submission(save, ready, tuple(map(len, entries)), overwrite)
        if _are_pinnable(tensors):
            region.pin()
        return Filling(pool, request, region, plan.framed_items, tensors, entries, submit)

    def _with_room(self, ready: RegionReady, request: RegionRequest, needed: int) -> RegionReady:
        if needed <= ready.byte_capacity:
            return ready
        # Twice what is needed, so that a slowly growing value does not grow the region at every save.
        return self._connection.pool.grow(ready, request, 2 * needed)

    # ------------------------------------------------------------ preparing

    def prepare(self, save: SaveKey, state: PlanningState) -> None:
        """Get the plan for ``state``, and have each slot's region made, grown and attached. Not at once with a save.

        Raises:
            UnsupportedLeaf, PlanningError: the state dict cannot be saved.
            RegionError: no region could be made, or only the first: then that is logged.
            CheckpointFailed: another rank has failed, or the client is being closed.
        """
        plan = self._plan_for(save, state)
        needed = sum(map(len, byte_entries(state, plan)))
        request = replace(self._request(save, plan), policy="wait", check=partial(self._raise_if_pointless, save))
        epoch, pool, taken = self._connection.plan_epoch, self._connection.pool, list[int]()
        try:
            while len(taken) < self._config.slots and epoch == self._connection.plan_epoch:
                ready = self._acquire(request)
                taken.append(ready.slot)
                region = self._attach(self._with_room(ready, request, needed), plan)
                if _are_pinnable(sources(state, plan)):
                    region.pin()
        except NotEnoughSharedMemory as error:
            if len(taken) == 0:
                raise
            logger.warning("only %d of %d regions could be made: %s", len(taken), self._config.slots, error)
        finally:
            for slot in taken:
                pool.discard(slot)

    def _raise_if_pointless(self, save: SaveKey) -> None:
        """Other ranks end the attempt as soon as they are ready, so that it has ended says nothing."""
        if self._is_closing:
            raise CheckpointFailed(save.step, [FailureReport("ClientClosed", "the client is being closed")])

    def give_up_preparing(self, save: SaveKey) -> None:
        """A preparation that waits for something ends now. Called on the trainer's thread."""
        self._is_closing = True
        closing = FailureReport("ClientClosed", "the client is being closed").at(self._config.rank, self._config.node)
        self._connection.exchange.on_message(Aborted(save, (closing,)))
        self._connection.pool.wake()

    # ------------------------------------------------------------ plan and region

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
        if region is None or (region.ready is not ready and region.ready != ready):
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


def _are_pinnable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether copying one of them is faster into pinned memory."""
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_used and any(tensor.is_cuda for tensor in tensors)
