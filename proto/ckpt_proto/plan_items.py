"""A save plan as data: what DCP's ``WriteItem`` says, without torch.

DCP objects never cross a process border (they would need pickle, and their pickles change between torch releases);
these records do. Sizes are in elements unless a name says bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ckpt_proto.errors import LocalProtocolError

MAX_DIMENSIONS = 64


class ItemKind(Enum):
    """DCP's ``WriteItemType``: a whole tensor, a shard of one, or opaque bytes."""

    TENSOR = "tensor"
    SHARD = "shard"
    BYTES = "bytes"


_KINDS = frozenset(kind.value for kind in ItemKind)
_BYTES = ItemKind.BYTES.value


@dataclass(frozen=True, slots=True)
class PlanItem:
    """One entry of a rank's plan.

    Attributes:
        fqn: key in the flattened state dict.
        kind: value of :class:`ItemKind`.
        path: DCP's ``planner_data`` for the key: how to rebuild the nesting, or None if the planner keeps none.
        offsets, sizes: the shard in the global tensor; both empty for bytes and for 0-dim tensors.
        global_sizes: shape of the global tensor.
        dtype: torch's name without the prefix, such as ``bfloat16``; empty for bytes.
        requires_grad, pin_memory, layout, memory_format: the remaining fields of DCP's ``TensorProperties``.
        index_hint: position of the chunk in the tensor's list of chunks, or -1.
        opaque: the trainer serialises this tensor with ``torch.save`` (no plain dense tensor); it has no payload
            at a fixed place and is stored like bytes.
    """

    fqn: str
    kind: str
    path: tuple[str | int, ...] | None = None
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    global_sizes: tuple[int, ...] = ()
    dtype: str = ""
    requires_grad: bool = False
    pin_memory: bool = False
    layout: str = "strided"
    memory_format: str = "contiguous_format"
    index_hint: int = -1
    opaque: bool = False

    def __post_init__(self) -> None:
        # Once for each of a million items of a large job.
        if self.kind not in _KINDS:
            raise LocalProtocolError(f"{self.fqn}: {self.kind!r} is no kind of item")
        if not len(self.offsets) == len(self.sizes) == len(self.global_sizes) <= MAX_DIMENSIONS:
            raise LocalProtocolError(f"{self.fqn}: offsets, sizes and global sizes differ in length")
        for offset, size, whole in zip(self.offsets, self.sizes, self.global_sizes):  # noqa: B905 - just compared
            if offset < 0 or size < 0 or offset + size > whole:
                raise LocalProtocolError(
                    f"{self.fqn}: shard {self.offsets}+{self.sizes} is outside {self.global_sizes}"
                )
        if (self.kind == _BYTES) != (not self.dtype):
            raise LocalProtocolError(f"{self.fqn}: a tensor needs a dtype, bytes have none")

    @property
    def is_framed(self) -> bool:
        """Whether the entry is a dense tensor with a payload at a fixed place in the region."""
        return self.kind != _BYTES and not self.opaque

    @property
    def key(self) -> tuple[str, tuple[int, ...] | None]:
        """What DCP's ``MetadataIndex`` compares: the fqn and, for tensors, the offsets."""
        return (self.fqn, None if self.kind == _BYTES else self.offsets)


Plan = tuple[PlanItem, ...]
