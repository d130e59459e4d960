"""A region between the break of its seal and the next seal, and what one save puts into it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from ckpt_proto.codec import encode
from ckpt_proto.messages import SubmitShard
from ckpt_proto.plan_items import PlanItem
from ckpt_trainer_client.attached_region import AttachedRegion
from ckpt_trainer_client.region_pool import RegionPool, RegionRequest
from ckpt_trainer_client.staging import copy_all


class Filling:
    """What is copied where for one save. Ends in :meth:`seal` or :meth:`discard`.

    Args:
        pool, request: where the region was acquired and for what.
        region: the region, its seal broken.
        items: the plan's framed items, in plan order.
        tensors: the source of each item, where it lives; they may change once they are copied.
        entries: the serialised byte entries, which follow the tensors.
        submit: the submission, which is the record of the seal too.

    Thread rule: the trainer's thread, or ``ckpt-stage`` once it was handed over; never both.
    """

    def __init__(
        self,
        pool: RegionPool,
        request: RegionRequest,
        region: AttachedRegion,
        items: Sequence[PlanItem],
        tensors: Sequence[torch.Tensor],
        entries: Sequence[bytes],
        submit: SubmitShard,
    ) -> None:
        self._pool = pool
        self._request = request
        self._region = region
        self.items = items
        self.tensors = tensors
        self._entries = entries
        self._submit = submit

    @property
    def targets(self) -> Sequence[torch.Tensor]:
        """Where each tensor goes."""
        return self._region.targets

    def copy(self, which: Iterable[int] | None = None) -> None:
        """Copy the tensors at these places of the plan, or all; on return these may change.

        Raises:
            CheckpointFailed: the save was given up meanwhile.
        """
        self._request.check()
        if which is None:
            copy_all(self.targets, self.tensors)
        else:
            places = list(which)
            copy_all([self.targets[place] for place in places], [self.tensors[place] for place in places])

    def seal(self) -> SubmitShard:
        """Add the byte entries and declare the region whole; returns the submission to hand it over with.

        Raises:
            RegionError, CheckpointFailed: as ``RegionPool.seal`` says.
        """
        region = self._region
        region.write_bytes(self._entries)
        record = encode(self._submit)
        self._pool.seal(self._submit.slot, self._request, partial(region.seal, record), region.begin)
        return self._submit

    def discard(self) -> None:
        """What was filled in is not wanted."""
        self._pool.discard(self._submit.slot)
