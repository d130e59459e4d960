"""Plans, regions and attempts made without a sidecar or a process group: what ranks would have planned and staged."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import RegionReady, SubmitShard
from ckpt_proto.plan_items import ItemKind, Plan, PlanItem
from ckpt_proto.region import round_to_pages
from ckpt_sidecar.actions import Publish, WriteShard
from ckpt_sidecar.commit import read_manifests
from ckpt_sidecar.dcp_layout import ShardLayout, lay_out, write_frames
from ckpt_sidecar.progress import Progress
from ckpt_sidecar.shard_writer import ShardWriter
from ckpt_sidecar.throttle import Throttle
from ckpt_trainer_client.planning import PlanningState, SavePlanned
from ckpt_trainer_client.staging import byte_entries, copy_all, sources

SESSION = "0a1b2c3d"
PLAN_ID = f"{SESSION}-p1"


def save_key(step: int = 5, seq: int = 0, session: str = SESSION) -> SaveKey:
    """An attempt."""
    return SaveKey(session, seq, step)


# ---------------------------------------------------------------- items


def tensor_item(fqn: str, sizes: tuple[int, ...], dtype: str = "float32", *, opaque: bool = False) -> PlanItem:
    """A whole tensor."""
    offsets = (0,) * len(sizes)
    return PlanItem(fqn, ItemKind.TENSOR.value, None, offsets, sizes, sizes, dtype, opaque=opaque)


def shard_item(
    fqn: str, offsets: tuple[int, ...], sizes: tuple[int, ...], whole: tuple[int, ...], dtype: str = "float32"
) -> PlanItem:
    """One shard of a tensor."""
    return PlanItem(fqn, ItemKind.SHARD.value, None, offsets, sizes, whole, dtype)


def bytes_item(fqn: str) -> PlanItem:
    """A value that is no tensor."""
    return PlanItem(fqn, ItemKind.BYTES.value)


# ---------------------------------------------------------------- regions


@contextmanager
def region_of(layout: ShardLayout, byte_capacity: int = 0) -> Iterator[mmap.mmap]:
    """A framed region in anonymous memory, page-aligned like a real one."""
    with mmap.mmap(-1, round_to_pages(layout.region_bytes(byte_capacity))) as mapping:
        write_frames(layout, mapping)
        yield mapping


def fill_at_random(layout: ShardLayout, mapping: mmap.mmap, byte_entries: Sequence[bytes], seed: int = 0) -> None:
    """Stage random payloads and the given byte entries."""
    source = random.Random(seed)
    for entry in layout.framed:
        mapping[entry.payload_offset : entry.payload_end] = source.randbytes(entry.frame.payload_bytes)
    position = layout.byte_offset
    for content in byte_entries:
        mapping[position : position + len(content)] = content
        position += len(content)


# ---------------------------------------------------------------- several ranks


class RowShard(torch.Tensor):
    """Some rows of a global tensor, by the protocol that DCP looks for in a tensor (DTensor has it too)."""

    rows: torch.Tensor
    first_row: int
    all_rows: int

    @staticmethod
    def of(rows: torch.Tensor, first_row: int, all_rows: int) -> RowShard:
        """``rows`` as those from ``first_row`` on, of ``all_rows``."""
        shard = torch.Tensor._make_subclass(RowShard, rows)
        shard.rows, shard.first_row, shard.all_rows = rows, first_row, all_rows
        return shard

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        offsets = torch.Size([self.first_row, *[0] * (self.rows.dim() - 1)])
        whole = torch.Size([self.all_rows, *self.rows.shape[1:]])
        properties = TensorProperties.create_from_tensor(self.rows)
        data = TensorWriteData(ChunkStorageMetadata(offsets, self.rows.shape), properties, whole)
        return [WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        assert index.offset[0] == self.first_row
        return self.rows


def shard_rows(whole: torch.Tensor, world_size: int) -> list[RowShard]:
    """``whole`` dealt out by rows as DTensor's ``Shard(0)`` does: the last ranks may have fewer rows, or none."""
    pieces = [*torch.chunk(whole, world_size)]
    pieces += [whole[len(whole) :]] * (world_size - len(pieces))
    shards, first_row = [], 0
    for piece in pieces:
        shards.append(RowShard.of(piece, first_row, len(whole)))
        first_row += len(piece)
    return shards


def states_of_ranks(world_size: int) -> list[dict[str, Any]]:
    """One state dict per rank: sharded, replicated, of one rank only, nested, no tensors."""
    weight = torch.arange(7 * 4, dtype=torch.float32).reshape(7, 4)
    moments = torch.arange(2 * 3, dtype=torch.float64).reshape(2, 3)  # fewer rows than three ranks
    weights, parts = shard_rows(weight, world_size), shard_rows(moments, world_size)
    return [
        {
            "model": {
                "weight": weights[rank],
                "bias": torch.full((5,), 1.5, dtype=torch.bfloat16),
                "scale": torch.tensor(3.25),
                "none": torch.empty(0, 4),
            },
            "optim": [{"moments": parts[rank], "lr": 0.125}],
            "step": 5,
            "name": "run",
            f"rank-{rank}": {"seed": rank, "state": torch.full((3 + rank,), rank, dtype=torch.uint8)},
        }
        for rank in range(world_size)
    ]


@dataclass(frozen=True)
class StockPlans:
    """What DCP's planner alone makes of state dicts: nothing of ours is involved."""

    planners: list[SavePlanner]
    local: list[SavePlan]
    final: list[SavePlan]
    metadata: Metadata


def stock_plans(
    states: Sequence[Mapping[str, Any]], new_planner: Callable[[], SavePlanner] = DefaultSavePlanner
) -> StockPlans:
    """Plan as ``dcp.save`` does, the ranks one after another."""
    planners = [new_planner() for _ in states]
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(dict(state), is_coordinator=rank == 0)
    local = [planner.create_local_plan() for planner in planners]
    final, metadata = planners[0].create_global_plan(local)
    finished = [planner.finish_plan(plan) for planner, plan in zip(planners, final, strict=True)]
    return StockPlans(planners, local, finished, metadata)


def our_plans(
    states: Sequence[Mapping[str, Any]], new_planner: Callable[[], SavePlanner | None] = lambda: None
) -> list[tuple[PlanningState, SavePlanned]]:
    """Plan as clients and coordinator do, the ranks one after another; the client's own planner by default."""
    states_seen = [PlanningState(state, new_planner(), is_coordinator=rank == 0) for rank, state in enumerate(states)]
    proposals = [state.local_plan()[0] for state in states_seen]
    final = states_seen[0].global_plan(proposals)
    marked = [_marked(plan, proposal) for plan, proposal in zip(final, proposals, strict=True)]
    return [(state, state.finish(PLAN_ID, plan)) for state, plan in zip(states_seen, marked, strict=True)]


def _marked(plan: Plan, proposal: Plan) -> Plan:
    opaque = {item.key for item in proposal if item.opaque}
    return tuple(replace(item, opaque=item.key in opaque) for item in plan)


@contextmanager
def staged_region(state: PlanningState, plan: SavePlanned) -> Iterator[tuple[ShardLayout, mmap.mmap, tuple[int, ...]]]:
    """What a rank's region holds after ``save()``: layout, mapping and the lengths of its byte entries."""
    layout, entries = lay_out(plan.items), byte_entries(state, plan)
    with region_of(layout, sum(map(len, entries))) as mapping:
        targets = [
            torch.empty(entry.item.sizes, dtype=getattr(torch, entry.item.dtype)).contiguous()
            for entry in layout.framed
        ]
        copy_all(targets, sources(state, plan))
        for entry, target in zip(layout.framed, targets, strict=True):
            mapping[entry.payload_offset : entry.payload_end] = bytes(target.untyped_storage())
        position = layout.byte_offset
        for content in entries:
            mapping[position : position + len(content)] = content
            position += len(content)
        yield layout, mapping, tuple(map(len, entries))


def write_order(
    directory: Path,
    items: Plan,
    byte_lengths: tuple[int, ...] = (),
    *,
    rank: int = 0,
    world_size: int = 1,
    save: SaveKey | None = None,
    overwrite: bool = False,
) -> WriteShard:
    """The order to write a staged region."""
    submit = SubmitShard(save or save_key(), rank, PLAN_ID, 0, 1, byte_lengths, overwrite)
    layout = lay_out(items)
    offsets = tuple(entry.payload_offset for entry in layout.framed)
    nbytes = round_to_pages(layout.region_bytes(sum(byte_lengths)))
    ready = RegionReady(PLAN_ID, 0, 1, "", nbytes, offsets, layout.byte_offset, nbytes - layout.byte_offset)
    return WriteShard(submit, items, str(directory), world_size, torch.__version__, ready)


def publish_order(directory: Path, plans: Sequence[Plan], save: SaveKey, *, overwrite: bool = False) -> Publish:
    """The order to commit an attempt whose shards are durable."""
    return Publish(save, str(directory), len(plans), PLAN_ID, tuple(map(len, plans)), overwrite)


def persist_attempt(
    directory: Path,
    states: Sequence[Mapping[str, Any]],
    save: SaveKey | None = None,
    *,
    new_planner: Callable[[], SavePlanner | None] = lambda: None,
    overwrite: bool = False,
) -> Publish:
    """Data files and manifests of every rank, nothing published; returns the order that would publish them."""
    save = save or save_key()
    planned = our_plans(states, new_planner)
    with ThreadPoolExecutor(2) as io:
        writer = ShardWriter(io, Throttle(None), lambda: 0.0)
        for rank, (state, plan) in enumerate(planned):
            with staged_region(state, plan) as (layout, mapping, lengths):
                order = write_order(
                    directory, plan.items, lengths, rank=rank, world_size=len(states), save=save, overwrite=overwrite
                )
                writer.write(order, layout, mapping, Progress())
    plans = [plan.items for _, plan in planned]
    assert len(read_manifests(directory / f"step-{save.step}", save.save_id, len(states))) == len(states)
    return publish_order(directory, plans, save, overwrite=overwrite)
