"""A region seen by the trainer: tensors whose memory is the region, made once and reused for every save."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from ckpt_proto.errors import RegionError
from ckpt_proto.messages import RegionReady
from ckpt_proto.plan_items import Plan
from ckpt_proto.region import Seal, attach, seal_path
from ckpt_trainer_client.device_copy import pin, unpin


class AttachedRegion:
    """One slot's mapping, seal and target tensors.

    ``targets`` has one contiguous tensor per framed item of the plan, in plan order, of the item's dtype and shape,
    whose
    storage is the region itself: copying into it puts the bytes where they will be in the data file.
    """

    def __init__(self, ready: RegionReady, items: Plan, old: AttachedRegion | None = None) -> None:
        self.ready = ready
        self._closed = False
        self._pinned = 0  # address of the registered memory; 0 if nobody has asked, -1 if it was refused
        self._mapping: mmap.mmap
        self._seal: Seal
        self._inode: int
        if old is not None and old._still_is(ready):
            self._mapping, self._seal, self._inode = old._mapping, old._seal, old._inode
            self._pinned, old._pinned = old._pinned, 0
            self.targets = _targets(self._mapping, ready, items)
            old.targets = []
            return
        with ExitStack() as undo:
            self._mapping = attach(Path(ready.path), ready.region_bytes)
            self._inode = os.stat(ready.path).st_ino
            undo.callback(self._mapping.close)
            self._seal = Seal(seal_path(Path(ready.path)))
            undo.callback(self._seal.close)
            self.targets = _targets(self._mapping, ready, items)
            undo.pop_all()
        if old is not None:
            old.close()

    def _still_is(self, ready: RegionReady) -> bool:
        """Whether ``ready`` is about the file that is mapped here: a restarted sidecar may have made another one."""
        if self.ready.path != ready.path or len(self._mapping) < ready.region_bytes:
            return False
        try:
            return os.stat(ready.path).st_ino == self._inode
        except FileNotFoundError:
            return False  # attaching it says so, with all that is known

    def begin(self) -> None:
        """Break the seal: from here on the region is torn until :meth:`seal`."""
        self._seal.clear()

    def pin(self) -> None:
        """Register the mapping with CUDA, once: copies from the device are direct then."""
        if not self._pinned:
            whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
            self._pinned = whole.data_ptr() if pin(whole) else -1

    def write_bytes(self, entries: Sequence[bytes]) -> None:
        """Put the byte entries behind each other at the end of the region."""
        position = self.ready.byte_offset
        for entry in entries:
            self._mapping[position : position + len(entry)] = entry
            position += len(entry)

    def seal(self, record: bytes) -> None:
        """Declare the region whole, with the record that a later sidecar needs."""
        self._seal.set(record)

    def close(self) -> None:
        """Unmap. Idempotent. The targets must not be used by anyone any more."""
        if self._closed:
            return
        self._closed = True
        self.targets = []
        self._seal.close()
        if self._pinned > 0:
            unpin(self._pinned)
        self._mapping.close()


@torch.inference_mode(mode=False)
def _targets(mapping: mmap.mmap, ready: RegionReady, items: Plan) -> list[torch.Tensor]:
    framed = [item for item in items if item.is_framed]
    if len(framed) != len(ready.payload_offsets):
        raise RegionError(
            f"{ready.path} is laid out for {len(ready.payload_offsets)} tensors, the plan has {len(framed)}"
        )
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    targets = []
    for item, offset in zip(framed, ready.payload_offsets, strict=True):
        dtype: torch.dtype = getattr(torch, item.dtype)
        nbytes = math.prod(item.sizes) * dtype.itemsize
        if not 0 <= offset <= ready.byte_offset - nbytes:
            raise RegionError(f"{item.fqn} of {nbytes} bytes at {offset} is outside {ready.path}")
        if nbytes == 0:
            # An empty tensor has no payload and so no aligned place, which a view would ask for.
            targets.append(torch.empty(item.sizes, dtype=dtype, device="cpu"))
            continue
        targets.append(whole[offset : offset + nbytes].view(dtype).view(item.sizes))
    return targets
