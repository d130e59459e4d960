"""Hostile frames from seeds: golden frames and other good ones, torn, spliced and filled with what nobody should send.

One seed is one frame, the same in every run, so a failing test is played again by its number. Frames are changed as
bytes and as trees: a tree is what msgpack unpacks, with maps as lists of pairs, because a map on the wire may repeat
keys and have keys of any type, and with ready-made bytes in places where msgpack itself would refuse.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgpack

from ckpt_proto.codec import encode
from testkit.protocol_values import EXAMPLES

CHANGES = (1, 1, 1, 2, 3, 4)
SHOWN_BYTES = 2_000


@dataclass(frozen=True)
class Raw:
    """Bytes that are put on the wire as they are."""

    data: bytes


class Pairs(list[tuple[Any, Any]]):
    """A map as it is on the wire: pairs in their order, keys of any type, repeated or not."""


def _long_list(rng: random.Random) -> Any:
    return [rng.choice([None, 0, "x", [], b""])] * rng.choice([1, 65, 1_000, 20_000])


def _deep_list(rng: random.Random) -> Any:
    depth = rng.choice([3, 100, 511, 1_023, 1_024, 30_000])
    return Raw(rng.choice([b"\x91", b"\x81\xa1k"]) * depth + b"\xc0")


def _promise(rng: random.Random) -> Any:
    """A header that declares far more than follows: text, bytes, array, map, ext."""
    return Raw(rng.choice(b"\xdb\xc6\xdd\xdf\xc9").to_bytes(1, "big") + struct.pack(">I", rng.choice(PROMISES)))


PROMISES = (1, 0xFFFF, 0x00FFFFFF, 0x7FFFFFFF, 0xFFFFFFFF)

SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 8, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63),
    0.0, -0.0, 1.5, 1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip

TEXTS = (
    "", "x", "\0", "/", "..", "../../etc/passwd", "/etc/passwd", "a\0b", "/a\0b", "step-1/../..", "~", "%s%n",
    "\n\r\x1b[2J", "é" * 200, "\U0010ffff", "\u202e", "9f3ac1d2", "9F3AC1D2", "9f3ac1d2\n", "Hello", "tensor", "bytes",
    "x" * 70_000, "\x01" * 70_000,
)  # fmt: skip

RAW = (
    Raw(b"\xa4\xff\xfe\xfd\xfc"),  # text that is no UTF-8
    Raw(b"\xa3\xed\xa0\x80"),  # a lone surrogate
    Raw(b"\xa2\xc0\x80"),  # an overlong NUL
    Raw(b"\xc1"),  # the one byte that msgpack never uses
    Raw(b"\xc7\x09\x01" + bytes(9)),  # an integer of 72 bits, as some would send it
    Raw(b"\xd6\xff\xff\xff\xff\xff"),  # a timestamp
    Raw(b"\xc7\x0c\xff\xff\xff\xff\xff" + b"\xff" * 8),  # a timestamp with too many nanoseconds
    Raw(b"\xd4\x05x"),  # some other ext type
)

HOSTILE: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: rng.choice(SCALARS),
    lambda rng: rng.choice(TEXTS),
    lambda rng: rng.choice(TEXTS).encode(),
    lambda rng: rng.choice(RAW),
    lambda rng: rng.randbytes(rng.randrange(40)),
    lambda rng: rng.getrandbits(64) - 2**63,
    lambda rng: Pairs([(rng.choice([1, None, b"k", "k", 1.5]), 0)] * rng.randrange(3)),
    lambda rng: [],
    _long_list,
    _deep_list,
    _promise,
)


LIKE: dict[type, Callable[[random.Random], Any]] = {
    bool: lambda rng: rng.random() < 0.5,
    int: lambda rng: rng.choice([value for value in SCALARS if type(value) is int]),
    float: lambda rng: rng.choice([value for value in SCALARS if type(value) is float]),
    str: lambda rng: rng.choice(TEXTS),
    bytes: lambda rng: rng.randbytes(rng.choice([0, 1, 8, 70_000])),
}
"""Other values of the same type: what is checked is then the value, in the message's own rules."""


def pack(tree: Any) -> bytes:
    """The bytes of a tree."""
    if isinstance(tree, Raw):
        return tree.data
    if isinstance(tree, Pairs):
        return _header(0x80, 0xDE, len(tree)) + b"".join(pack(key) + pack(value) for key, value in tree)
    if isinstance(tree, list):
        return _header(0x90, 0xDC, len(tree)) + b"".join(map(pack, tree))
    packed: bytes = msgpack.packb(tree)
    return packed


def _header(small: int, large: int, length: int) -> bytes:
    return bytes([small | length]) if length < 16 else struct.pack(">BI", large + 1, length)


def tree_of(frame: bytes) -> Any:
    """What a good frame holds."""
    return msgpack.unpackb(frame, object_pairs_hook=Pairs)


# ---------------------------------------------------------------- changes of a tree


def _places(tree: Any) -> list[tuple[list[Any], int]]:
    """Every (container, index) below ``tree``; a pair of a map counts as a place too."""
    found: list[tuple[list[Any], int]] = []
    waiting = [tree] if isinstance(tree, list) else []
    while waiting:
        node = waiting.pop()
        for index in range(len(node)):
            found.append((node, index))
            if isinstance(_inner(node, index), list):
                waiting.append(_inner(node, index))
    return found


def _put(node: list[Any], index: int, value: Any, rng: random.Random) -> None:
    if not isinstance(node, Pairs):
        node[index] = value
    elif rng.random() < 0.1:
        node[index] = (value, node[index][1])
    else:
        node[index] = (node[index][0], value)


def _change_tree(tree: list[Any], rng: random.Random) -> None:
    places = _places(tree)
    if not places:
        return
    node, index = rng.choice(places)
    kind = rng.randrange(10)
    like = LIKE.get(type(_inner(node, index)))
    if kind < 5 and like is not None:
        _put(node, index, like(rng), rng)
    elif kind < 6:
        _put(node, index, rng.choice(HOSTILE)(rng), rng)
    elif kind == 6:
        del node[index]
    elif kind == 7:
        node.insert(rng.randrange(len(node) + 1), node[index])
    elif kind == 8:
        _put(node, index, _copy(*rng.choice(places)), rng)
    else:
        _put(node, index, [_copy(node, index)] * rng.randrange(3), rng)


def _inner(node: list[Any], index: int) -> Any:
    return node[index][1] if isinstance(node, Pairs) else node[index]


def _copy(node: list[Any], index: int) -> Any:
    """What lies there, as bytes if it is a tree: one that was put below itself would have no end."""
    value = _inner(node, index)
    return Raw(pack(value)) if isinstance(value, list) else value


# ---------------------------------------------------------------- changes of bytes


def _change_bytes(frame: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    at = rng.randrange(len(frame) + 1)
    kind = rng.randrange(7)
    if kind == 0 and at < len(frame):
        frame[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del frame[at:]
    elif kind == 2:
        del frame[at : at + rng.randrange(1, 9)]
    elif kind == 3:
        frame[at:at] = rng.randbytes(rng.randrange(1, 9))
    elif kind == 4:
        other = rng.choice(others)
        frame[at:] = other[rng.randrange(len(other) + 1) :]
    elif kind == 5:
        frame[at : at + 5] = pack(_promise(rng))
    elif at < len(frame):
        frame[at] = rng.choice(b"\x80\x8f\x90\x9f\xa0\xbf\xc0\xc1\xc4\xc7\xca\xcb\xcf\xd3\xd9\xdc\xde\xdf\xff")


def mutate(base: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """``base`` after a few changes: of its tree, of its bytes, or first one and then the other."""
    changes = rng.choice(CHANGES)
    as_bytes = rng.choice([0, 0, 0, 1, changes])
    frame = base
    if changes > as_bytes:
        tree = tree_of(base)
        for _ in range(changes - as_bytes):
            _change_tree(tree, rng)
        frame = pack(tree)
    changed = bytearray(frame)
    for _ in range(as_bytes):
        _change_bytes(changed, rng, others)
    return bytes(changed)


GOOD_FRAMES: tuple[bytes, ...] = tuple(encode(example) for example in EXAMPLES)


def hostile_frame(seed: int, bases: Sequence[bytes] = GOOD_FRAMES) -> bytes:
    """The frame of a seed."""
    rng = random.Random(seed)
    return mutate(rng.choice(bases), rng, bases)


def seeds(count: int) -> Sequence[int]:
    """The seeds of a test: 0 .. ``count`` - 1, or the one in ``FUZZ_SEED``, to play a failing one again."""
    one = os.environ.get("FUZZ_SEED")
    return range(count) if one is None else (int(one),)


@contextmanager
def playing(seed: int, frame: bytes) -> Iterator[None]:
    """Whatever goes wrong with the frame of a seed names both."""
    try:
        yield
    except BaseException as error:
        shown = frame.hex() if len(frame) <= SHOWN_BYTES else f"{frame[:SHOWN_BYTES].hex()}... ({len(frame)} bytes)"
        raise AssertionError(f"seed {seed} (FUZZ_SEED={seed} plays it again), frame {shown}: {error!r}") from error
