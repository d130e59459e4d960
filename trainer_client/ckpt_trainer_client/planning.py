"""Planning with DCP's own planner API: the only user of it on save. Drives no collective and never ``dcp.save``."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful

from ckpt_proto.plan_items import ItemKind, Plan, PlanItem
from ckpt_trainer_client.errors import PlanningError, UnsupportedLeaf
from ckpt_trainer_client.global_plan import stock_global_plan
from ckpt_trainer_client.recognition import Recognition
from ckpt_trainer_client.structure import Structure, planner_key, structure_of
from ckpt_trainer_client.wire_plan import from_wire, to_wire

DIGEST_BYTES = 8


@dataclass(frozen=True)
class SavePlanned:
    """A finished plan, kept between saves: DCP's items and our records of them, one to one.

    ``framed`` are the items with a payload at a fixed place, ``framed_items`` our records of them, ``others`` the items
    that are serialised, all in plan order.
    ``owner`` keeps a user's planner alive, so that its identity in ``key`` cannot be reused. ``recognition`` knows the
    state dict again, if a stock planner flattened it; ``pick`` takes the tensors of ``framed`` out of its leaves, if
    all are saved whole and as they are.
    """

    plan_id: str
    key: tuple[Any, ...] | None
    structure: Structure | None
    items: Plan
    framed: tuple[tuple[WriteItem, PlanItem], ...]
    framed_items: Plan
    others: tuple[WriteItem, ...]
    owner: SavePlanner | None
    recognition: Recognition | None = None
    pick: Callable[[Sequence[Any]], Sequence[torch.Tensor]] | None = None


class PlanningState:
    """One state dict being saved, seen through its planner. Lives as long as one ``save()``.

    ``known`` is the plan of an earlier state dict: one that is recognised as its like is flattened only if it must be
    planned after all. ``leaves`` are its leaves then.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Any],
        planner: SavePlanner | None,
        *,
        is_coordinator: bool,
        known: SavePlanned | None = None,
    ) -> None:
        if getattr(planner, "_enable_plan_caching", False):
            raise PlanningError(
                f"{type(planner).__name__} has enable_plan_caching on: that cache is global to the process and would "
                "answer with plans of other clients; leave it off, the client caches plans itself"
            )
        self.planner = planner if planner is not None else DefaultSavePlanner()
        self.is_own = planner is None
        self._is_coordinator = is_coordinator
        self._whole: dict[str, Any] = _without_stateful(state_dict)
        self.leaves: list[Any] | None = None
        self.key: tuple[Any, ...] | None = None
        self.structure: Structure | None = None
        if not self._recognise(known):
            self._set_up()

    def _recognise(self, known: SavePlanned | None) -> bool:
        if known is None or known.recognition is None or known.key != planner_key(self.planner):
            return False
        self.leaves = known.recognition.leaves(self._whole)
        if self.leaves is None:
            return False
        self.key, self.structure = known.key, known.structure
        self.planner.state_dict = dict(zip(known.recognition.fqns, self.leaves, strict=True))  # type: ignore[attr-defined]
        return True

    def _set_up(self) -> None:
        self.leaves = None
        self.planner.set_up_planner(self._whole, is_coordinator=self._is_coordinator)
        self.key = planner_key(self.planner)
        flat = getattr(self.planner, "state_dict", None)
        paths = getattr(self.planner, "mappings", None) or {}
        if self.key is not None and isinstance(flat, dict):
            self.structure = structure_of(flat, paths)

    def fits(self, plan: SavePlanned | None) -> bool:
        """Whether ``plan`` was made for this structure by this planner."""
        return (
            plan is not None
            and plan.key == self.key
            and self.structure is not None
            and plan.structure == self.structure
        )

    def local_plan(self) -> tuple[Plan, tuple[bytes, ...]]:
        """This rank's proposal and the digests of its byte items.

        Raises:
            PlanningError: the planner failed or made what a sidecar cannot carry.
            UnsupportedLeaf: a value cannot be saved.
        """
        if self.leaves is not None:
            self._set_up()
        plan = self.planner.create_local_plan()
        items, digests = [], []
        for item, record in zip(plan.items, to_wire(plan), strict=True):
            is_bytes = record.kind == ItemKind.BYTES.value
            if is_bytes:
                digests.append(hashlib.blake2b(self.resolve_bytes(item), digest_size=DIGEST_BYTES).digest())
            opaque = not is_bytes and _is_opaque(self.resolve_tensor(item))
            items.append(replace(record, opaque=True) if opaque else record)
        return tuple(items), tuple(digests)

    def global_plan(self, plans: Sequence[Plan]) -> tuple[Plan, ...]:
        """Rank 0: the final plan of every rank.

        Raises:
            PlanningError: the plans do not fit together, or the planner's metadata says more than its plans: the
                checkpoint's metadata is rebuilt from the plans alone.
        """
        planner = self.planner
        if type(planner) is DefaultSavePlanner:
            return stock_global_plan(plans, to_lowest_rank=planner.dedup_save_to_lowest_rank)
        try:
            final, metadata = self.planner.create_global_plan([from_wire(plan) for plan in plans])
        except Exception as error:
            raise PlanningError(f"the planner could not make a global plan: {error}") from error
        _check_derivable(final, metadata)
        return tuple(to_wire(replace(plan, planner_data=metadata.planner_data)) for plan in final)

    def finish(self, plan_id: str, items: Plan) -> SavePlanned:
        """Every rank: the planner's last word on its final plan.

        Raises:
            PlanningError: the planner changed the plan at this point; the region is laid out for it already.
        """
        finished = self.planner.finish_plan(from_wire(items))
        if [item.index for item in finished.items] != [from_item.index for from_item in from_wire(items).items]:
            raise PlanningError(f"{type(self.planner).__name__}.finish_plan changed the items: a sidecar cannot follow")
        owner = None if self.is_own else self.planner
        pairs = list(zip(finished.items, items, strict=True))
        framed = tuple(pair for pair in pairs if pair[1].is_framed)
        others = tuple(write_item for write_item, item in pairs if not item.is_framed)
        recognition = self._recognition()
        pick = recognition.picker_of([item.fqn for _, item in framed]) if recognition is not None else None
        framed_items = tuple(item for _, item in framed)
        return SavePlanned(
            plan_id, self.key, self.structure, items, framed, framed_items, others, owner, recognition, pick
        )

    def _recognition(self) -> Recognition | None:
        planner = self.planner
        if type(planner) is not DefaultSavePlanner or not planner.flatten_state_dict or self.structure is None:
            return None
        return Recognition.of(self._whole, planner.state_dict, self.structure)

    def resolve_tensor(self, item: WriteItem) -> torch.Tensor:
        """The tensor of an item, detached, where it lives.

        Raises:
            UnsupportedLeaf: it has no data.
        """
        tensor = self.planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedLeaf(
                f"{item.index.fqn}: the planner resolved a {type(tensor).__name__}, expected a tensor"
            )
        if tensor.is_meta:
            raise UnsupportedLeaf(f"{item.index.fqn} is a tensor on the meta device: it has no data to save")
        if tensor.layout is not torch.strided:
            raise UnsupportedLeaf(
                f"{item.index.fqn} is a {tensor.layout} tensor, which DCP cannot restore: save tensor.to_dense(), or "
                "its indices and values"
            )
        return tensor.detach()

    def leaf(self, fqn: str, tensor: torch.Tensor) -> torch.Tensor:
        """What the user has under a key, such as a DTensor; ``tensor``, which it resolved to, if that is unknown."""
        value = (getattr(self.planner, "state_dict", None) or {}).get(fqn)
        return value if isinstance(value, torch.Tensor) else tensor

    def resolve_bytes(self, item: WriteItem) -> bytes:
        """The serialised form of a byte item or of an opaque tensor.

        Raises:
            UnsupportedLeaf: it cannot be serialised; the text names key and type.
        """
        try:
            if item.type is not WriteItemType.BYTE_IO:
                buffer = io.BytesIO()
                torch.save(self.resolve_tensor(item).cpu(), buffer)
                return buffer.getvalue()
            data = self.planner.resolve_data(item)
            return data.getvalue() if isinstance(data, io.BytesIO) else bytes(data)
        except UnsupportedLeaf:
            raise
        except Exception as error:
            kind = type(getattr(self.planner, "state_dict", {}).get(item.index.fqn))
            raise UnsupportedLeaf(
                f"{item.index.fqn} is a {kind.__module__}.{kind.__qualname__} and cannot be saved: {error}"
            ) from error

    def release(self) -> None:
        """Let a user's planner, which lives on, go of the state dict: it would keep tensors alive till the next save.

        The planner is not called for it: a planner is only ever given what the user saves.
        """
        self._whole, self.leaves = {}, None
        if not self.is_own and isinstance(getattr(self.planner, "state_dict", None), dict):
            self.planner.state_dict = {}  # type: ignore[attr-defined]


def _without_stateful(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """As ``dcp.save`` does: a top-level object with ``state_dict()`` stands for what that returns."""
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}


def _is_opaque(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return not plain or tensor.is_quantized


def _check_derivable(plans: Sequence[SavePlan], metadata: Metadata) -> None:
    chunks: dict[str, int] = {}
    for plan in plans:
        for item in plan.items:
            chunks[item.index.fqn] = chunks.get(item.index.fqn, 0) + (item.type is not WriteItemType.BYTE_IO)
    said = {
        fqn: 0 if isinstance(entry, BytesStorageMetadata) else len(entry.chunks)
        for fqn, entry in metadata.state_dict_metadata.items()
    }
    if said != chunks:
        odd = sorted(fqn for fqn in {**said, **chunks} if said.get(fqn) != chunks.get(fqn))
        raise PlanningError(f"the planner's metadata does not follow from its plans for {len(odd)} keys: {odd[:20]}")
    paths = metadata.planner_data
    extra = sorted(set(paths) - set(chunks)) if isinstance(paths, Mapping) else []
    if extra:
        raise PlanningError(f"the planner's metadata has paths of keys that no rank saves: {extra[:20]}")
