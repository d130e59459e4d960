"""SHA-256 of every full tensor in a state dict: how the demo compares bit for bit across processes."""

import ctypes
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def digest(tensor: Tensor) -> str:
    """Digest of dtype, shape and bytes, so that equal bytes of another dtype differ."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    sha = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    if flat.nbytes:
        sha.update((ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr()))
    return sha.hexdigest()


def full_tensor_digests(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """Digest of each tensor by fqn. Gathers sharded tensors: every rank must call it together."""
    return {
        fqn: digest(leaf.full_tensor() if isinstance(leaf, DTensor) else leaf) for fqn, leaf in _tensors(state_dict, "")
    }


def _tensors(node: Any, fqn: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(node, Tensor):
        yield fqn, node
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from _tensors(child, f"{fqn}.{key}" if fqn else str(key))
