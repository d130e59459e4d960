"""The work that needs torch, in one module that worker threads import when they first need it.

The sidecar answers its socket from the first moment; torch takes seconds to import.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from ckpt_proto.errors import RegionError
from ckpt_proto.messages import RegionReady
from ckpt_proto.region import Seal, attach, region_path, reserve, round_to_pages, seal_path
from ckpt_proto.region_journal import RegionJournal, remove_journal, write_journal
from ckpt_sidecar.actions import PrepareRegion, WriteShard
from ckpt_sidecar.commit import publish_checkpoint
from ckpt_sidecar.dcp_layout import ShardLayout, lay_out, write_frames
from ckpt_sidecar.metadata_template import MetadataTemplates
from ckpt_sidecar.shard_writer import ShardWriter

__all__ = ["MetadataTemplates", "Region", "ShardWriter", "adopt_region", "prepare_region", "publish_checkpoint"]


SEAL_RECORD_BYTES = 512
SEAL_BYTES_PER_ENTRY = 9
"""Upper bounds of an encoded SubmitShard: its fixed part, and one length as msgpack stores it."""


class Region:
    """A prepared region: its mapping and the layout it is framed for. Kept between saves."""

    def __init__(self, mapping: mmap.mmap, layout: ShardLayout, plan_id: str) -> None:
        self.mapping = mapping
        self.layout = layout
        self.plan_id = plan_id


def prepare_region(runtime_dir: Path, order: PrepareRegion, old: Region | None) -> tuple[Region, RegionReady]:
    """Lay out, reserve, touch and frame one region.

    ``old`` is what the slot held before: its pages are kept, its mapping too if it is large enough.

    Raises:
        RegionError: there is no room in shared memory, or the files cannot be trusted.
        FrameError: torch writes archives that we do not know.
    """
    path = region_path(runtime_dir, order.rank, order.slot)
    remove_journal(path)
    layout = old.layout if old and old.plan_id == order.plan_id else lay_out(order.items)
    nbytes = round_to_pages(layout.region_bytes(order.byte_capacity))
    seal = Seal(seal_path(path))
    try:
        seal.clear()
        seal.reserve(SEAL_RECORD_BYTES + SEAL_BYTES_PER_ENTRY * len(layout.byte_items))
    finally:
        seal.close()
    reserve(path, nbytes)
    mapping = old.mapping if old and len(old.mapping) >= nbytes else attach(path, nbytes)
    if old and old.mapping is not mapping:
        old.mapping.close()
    write_frames(layout, mapping)
    ready = RegionReady(
        order.plan_id,
        order.slot,
        order.generation,
        str(path),
        nbytes,
        tuple(entry.payload_offset for entry in layout.framed),
        layout.byte_offset,
        nbytes - layout.byte_offset,
    )
    write_journal(path, RegionJournal(order.owner, order.other_namespace, order.planned_by, order.items, ready))
    return Region(mapping, layout, order.plan_id), ready


def adopt_region(runtime_dir: Path, order: WriteShard, old: Region | None) -> Region:
    """Attach a region that an earlier sidecar has prepared for the order's plan.

    ``old`` is another mapping of the slot, which is let go of.

    Raises:
        RegionError: it is missing, too small, or laid out otherwise than this torch would lay it out.
        FrameError: torch writes archives that we do not know.
    """
    submit, ready = order.submit, order.ready
    layout = lay_out(order.items)
    offsets = tuple(entry.payload_offset for entry in layout.framed)
    if (offsets, layout.byte_offset) != (ready.payload_offsets, ready.byte_offset):
        raise RegionError(
            f"{ready.path} was laid out by another version of torch than {torch.__version__}: step {submit.save.step} "
            f"of rank {submit.rank} can be written only by that one"
        )
    if old is not None:
        old.mapping.close()
    mapping = attach(region_path(runtime_dir, submit.rank, submit.slot), ready.region_bytes)
    return Region(mapping, layout, submit.plan_id)
