"""State dicts that hold what real ones hold, and how to compare them bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of any dtype whose values depend on ``seed`` only; no NaN."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def tensor_zoo(seed: int) -> dict[str, torch.Tensor]:
    """Every kind of plain dense tensor that has been met in a state dict."""
    zoo = {
        str(dtype).removeprefix("torch."): random_tensor((7, 5), dtype, seed + index)
        for index, dtype in enumerate((*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128))
    }
    base = random_tensor((6, 8), torch.float32, seed + 100)
    complex_base = random_tensor((3, 3), torch.complex64, seed + 101)
    tied = random_tensor((4, 4), torch.float32, seed + 102)
    return {
        **zoo,
        "zero_dim": torch.tensor(float(seed)),
        "zero_dim_int": torch.tensor(seed),
        "empty": torch.empty(0),
        "empty_rows": torch.empty(0, 3, dtype=torch.bfloat16),
        "empty_columns": torch.empty(4, 0, dtype=torch.int64),
        "one_element": torch.tensor([seed + 0.5]),
        "transposed": base.t(),
        "every_second_column": base[:, ::2],
        "view_of_larger_storage": base[2:4, 3:5],
        "expanded": torch.tensor([[float(seed)], [1.0]]).expand(2, 9),
        "channels_last": random_tensor((2, 3, 4, 5), torch.float32, seed + 103).to(memory_format=torch.channels_last),
        "conjugated": complex_base.conj(),
        "negative_bit": torch.imag(complex_base.conj()),
        "tied": tied,
        "tied_again": tied,
        "parameter": torch.nn.Parameter(random_tensor((5, 3), torch.float32, seed + 104)),
        "frozen_parameter": torch.nn.Parameter(random_tensor((3,), torch.bfloat16, seed + 105), requires_grad=False),
        "with_history": torch.nn.Parameter(base) * 2,
        "many_dimensions": random_tensor((1, 2, 1, 2, 1, 2, 3), torch.float16, seed + 106),
    }


def nested_state(seed: int) -> dict[str, Any]:
    """The zoo, nested containers, and every kind of other value."""
    return {
        "zoo": tensor_zoo(seed),
        "nested": {
            "list": [random_tensor((3,), torch.float32, seed), {"deep": torch.tensor(seed)}],
            "name": f"run {seed}",
        },
        "tuple": (1, seed, "three"),
        "list_of_values": [seed, 2.5, None],
        "none": None,
        "text": f"step {seed} \N{SNOWMAN}",
        "bytes": bytes([seed % 256, 0, 255]),
        "integer": 2**70 + seed,
        "number": 0.1 * seed,
        "flag": seed % 2 == 0,
        "rng": torch.Generator().manual_seed(seed).get_state(),
        "python_rng": (3, (1, 2, seed), None),
    }


def adamw_state(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model and its AdamW, after one step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def mapped(value: Any, change: Callable[[torch.Tensor], Any], other: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """``value`` with every tensor and every other leaf replaced; containers are made anew."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(entry, change, other) for key, entry in value.items()}
    if isinstance(value, list):
        return [mapped(entry, change, other) for entry in value]
    return other(value)


def blank_like(state: Any) -> Any:
    """A target for a load: the same structure, zeros instead of values, None instead of other leaves."""
    return mapped(state, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), lambda leaf: None)


def copied(state: Any) -> Any:
    """What ``state`` holds now, sharing no memory with it: plain contiguous tensors."""
    return mapped(state, plain)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor as a contiguous tensor of their own."""
    whole = tensor.detach().resolve_conj().resolve_neg()
    return torch.empty(whole.shape, dtype=whole.dtype).copy_(whole)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are equal."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return plain(tensor).flatten().view(torch.uint8) if tensor.numel() else torch.empty(0)


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Where two states differ, one line each; empty if they are the same bit for bit."""
    if isinstance(expected, torch.Tensor):
        same = isinstance(found, torch.Tensor) and same_bits(found, expected)
        return [] if same else [f"{where}: {found!r} instead of {expected!r}"]
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or sorted(found) != sorted(expected):
            return [f"{where}: keys {sorted(found)} instead of {sorted(expected)}"]
        return [line for key in expected for line in differences(found[key], expected[key], f"{where}.{key}")]
    if isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            return [f"{where}: {found!r} instead of {expected!r}"]
        pairs = zip(found, expected, strict=True)
        return [line for index, pair in enumerate(pairs) for line in differences(*pair, f"{where}[{index}]")]
    return (
        [] if type(found) is type(expected) and found == expected else [f"{where}: {found!r} instead of {expected!r}"]
    )
