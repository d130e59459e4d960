"""Regions as an earlier sidecar leaves them, as values: journals, what is sealed, what was found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import RegionReady, SubmitShard
from ckpt_proto.region import region_path
from ckpt_proto.region_journal import RegionJournal
from ckpt_sidecar.events import FoundRegion
from ckpt_sidecar.rank_record import FIRST_BYTE_CAPACITY
from testkit.tables import ITEMS, hello, key

REGION_BYTES = 4096 + FIRST_BYTE_CAPACITY


def plan_of(save: SaveKey) -> str:
    """The plan that a save has made."""
    return f"{save.session}-p{save.seq + 1}"


def journal(
    rank: int = 0,
    slot: int = 0,
    planned_by: SaveKey | None = None,
    *,
    directory: Path = Path("/dev/shm/x"),
    world_size: int = 2,
    generation: int = 7,
    other_namespace: bool = False,
    **owner: Any,
) -> RegionJournal:
    """The journal of a region that was prepared for the plan of ``planned_by``; ``owner`` are changes to the Hello."""
    planned_by = planned_by or key()
    who = hello(rank, world_size, **{"session": planned_by.session, **owner})
    path = str(region_path(directory, rank, slot))
    ready = RegionReady(plan_of(planned_by), slot, generation, path, REGION_BYTES, (0,), 4096, FIRST_BYTE_CAPACITY)
    return RegionJournal(who, other_namespace, planned_by, ITEMS, ready)


def sealed_in(of: RegionJournal, save: SaveKey, **changes: Any) -> SubmitShard:
    """What is sealed for ``save`` in the region of a journal."""
    ready = of.ready
    submit = SubmitShard(save, of.owner.rank, ready.plan_id, ready.slot, ready.generation, (10,))
    return replace(submit, **changes)


def found(of: RegionJournal, save: SaveKey | None = None, *, alive: bool = True, **changes: Any) -> FoundRegion:
    """A region, sealed for ``save`` if there is one."""
    return FoundRegion(of, alive, sealed_in(of, save, **changes) if save is not None else None)
