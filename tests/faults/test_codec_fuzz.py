"""Hostile frames at the codec, and hostile files where frames are stored: a message, a refusal, or nothing.

Nothing else may happen: no other error, no memory or work beyond a stated multiple of what came in, and what is taken
for a message is one, so that it can be sent on.
"""

from __future__ import annotations

import random
import struct
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_proto.codec import decode, encode
from ckpt_proto.errors import RemoteProtocolError
from ckpt_proto.messages import Message, SubmitShard
from ckpt_proto.region import Seal, seal_path
from ckpt_proto.version import PROTOCOL_VERSION
from testkit.mutations import GOOD_FRAMES, hostile_frame, mutate, playing, seeds
from testkit.outcomes import Outcomes
from testkit.protocol_values import EXAMPLES, REPEATABLE, SAVE, any_message

GOLDEN = Path(__file__).resolve().parent.parent / "contract" / "golden" / "messages.hex"

MEMORY_FACTOR = 100
"""Bytes allocated at the peak for each byte of a frame: the worst is an empty map, 72 bytes for one on the wire."""
MEMORY_BASE_BYTES = 256 << 10
CALLS_FACTOR = 8
"""Function calls for each byte of a frame: the worst is a record of empty values."""
CALLS_BASE = 5_000
LONGEST_REFUSAL = 1_000

SHORT, LONG = 4_000, pytest.param(100_000, marks=pytest.mark.faults)


def golden_frames() -> Sequence[bytes]:
    """One frame of every message type, as it has to stay."""
    parts = GOLDEN.read_text().split(":\n")
    return [bytes.fromhex("".join(line for line in part.split("\n") if is_hex(line))) for part in parts[1:]]


def is_hex(line: str) -> bool:
    """Whether a line of the golden table is of a frame and not the next one's name."""
    return set(line) <= set("0123456789abcdef") and len(line) % 2 == 0


def message_or_refusal(frame: bytes) -> Message | RemoteProtocolError:
    """What the codec makes of a frame; whatever else it raises escapes and fails the test."""
    try:
        return decode(frame)
    except RemoteProtocolError as error:
        return error


def message_in(frame: bytes) -> Message | None:
    """The message, or None if the frame is refused; fails if anything else happens."""
    message = message_or_refusal(frame)
    if isinstance(message, RemoteProtocolError):
        assert len(str(message)) <= LONGEST_REFUSAL, f"a refusal of {len(str(message))} characters"
        return None
    again = encode(message)
    assert decode(again) == message or encode(decode(again)) == again, f"{message} came back as another message"
    return message


# ---------------------------------------------------------------- frames


@pytest.mark.parametrize("count", [SHORT, LONG])
@pytest.mark.parametrize("bases", [GOOD_FRAMES, golden_frames()], ids=["examples", "golden"])
def test_a_hostile_frame_is_a_message_or_refused(bases: Sequence[bytes], count: int, outcomes: Outcomes) -> None:
    taken = 0
    with outcomes.run("hostile frames at the codec", runs=0, unit="frames") as row:
        for seed in seeds(count):
            row.runs += 1
            frame = hostile_frame(seed, bases)
            with playing(seed, frame):
                taken += message_in(frame) is not None
    assert count // 50 < taken < count // 2 or len(seeds(count)) == 1, f"{taken} of {count} frames were messages"


@REPEATABLE
@given(message=any_message(), rng=st.randoms(use_true_random=False))
def test_any_message_made_hostile_is_a_message_or_refused(message: Message, rng: Any) -> None:
    message_in(mutate(encode(message), rng, GOOD_FRAMES))


def test_the_golden_frames_are_good() -> None:
    assert len(golden_frames()) == len(EXAMPLES)
    assert [decode(frame) for frame in golden_frames()] == list(EXAMPLES)


# ---------------------------------------------------------------- bounds


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that was allocated at one time during ``work``."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def calls_made(work: Callable[[], object]) -> int:
    """How many functions were called during ``work``: what it costs, whatever the machine is busy with."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def many(unit: bytes, nbytes: int = 100_000) -> bytes:
    """A frame whose one field is an array of as many ``unit`` as make ``nbytes``."""
    count = nbytes // len(unit)
    head = b"\x93" + bytes([PROTOCOL_VERSION]) + b"\xa9Heartbeat\x81\xa1x\xdd"
    return head + struct.pack(">I", count) + unit * count


def filled(name: str, **fields: Any) -> bytes:
    """A frame with these fields and SAVE."""
    return msgpack.packb([PROTOCOL_VERSION, name, {"save": [SAVE.session, SAVE.seq, SAVE.step], **fields}])


HEAVY = {
    "empty arrays": many(b"\x90"),
    "empty maps": many(b"\x80"),
    "maps": many(b"\x81\xa1x\xc0"),
    "nested arrays": many(b"\x91" * 5 + b"\x90"),
    "ext": many(b"\xd4\x05x"),
    "timestamps": many(b"\xd6\xff\0\0\0\0"),
    "integers": many(b"\xcd\x7f\xff"),
    "wide text": many("é".encode().join([b"\xa2", b""])),
    "empty plans": filled("GlobalPlan", plans=[[]] * 100_000),
    "short items": filled("ProposePlan", items=[["", "bytes"]] * 12_000, byte_digests=[]),
    "short failures": filled("Aborted", failures=[["", ""]] * 30_000),
    "a long text in an error": filled("ProposePlan", items=[["\x01" * 100_000, "bytes", None, [1]]], byte_digests=[]),
    "a long name in an error": filled("ProposePlan", items=[["x", "\x01" * 100_000]], byte_digests=[]),
    "a promise of 4 G entries": b"\x93\x01\xa9Heartbeat\x81\xa1x\xdd\xff\xff\xff\xff",
    "a promise of 4 GB": b"\x93\x01\xa9Heartbeat\x81\xa1x\xc6\xff\xff\xff\xff",
    "a promise of 4 G pairs": b"\x93\x01\xa9Heartbeat\xdf\xff\xff\xff\xff",
    "deep": b"\x91" * 100_000,
}


@pytest.mark.parametrize("frame", HEAVY.values(), ids=HEAVY)
def test_the_memory_that_a_frame_takes_is_bounded_by_its_length(frame: bytes) -> None:
    peak = peak_bytes(lambda: message_or_refusal(frame))
    assert peak <= MEMORY_FACTOR * len(frame) + MEMORY_BASE_BYTES, f"{peak / len(frame):.1f} bytes for each byte"


@pytest.mark.parametrize("frame", HEAVY.values(), ids=HEAVY)
def test_the_work_that_a_frame_makes_is_bounded_by_its_length(frame: bytes) -> None:
    calls = calls_made(lambda: message_or_refusal(frame))
    assert calls <= CALLS_FACTOR * len(frame) + CALLS_BASE, f"{calls / len(frame):.1f} calls for each byte"


def test_the_memory_of_any_hostile_frame_is_bounded_by_its_length() -> None:
    for seed in seeds(500):
        frame = hostile_frame(seed)
        with playing(seed, frame):
            assert peak_bytes(lambda frame=frame: message_or_refusal(frame)) <= (  # type: ignore[misc]
                MEMORY_FACTOR * len(frame) + MEMORY_BASE_BYTES
            )


# ---------------------------------------------------------------- seals


def seal_bytes(record: bytes, *, length: int | None = None, magic: bytes = b"CKPTSEAL") -> bytes:
    """The file of a seal with a checksum that is right for ``record``."""
    return struct.pack("<8sII", magic, len(record) if length is None else length, zlib.crc32(record)) + record


def read_seal(path: Path) -> bytes | None:
    """What the sidecar finds."""
    seal = Seal(path)
    try:
        return seal.read()
    finally:
        seal.close()


SUBMITS = [frame for frame in GOOD_FRAMES if isinstance(decode(frame), SubmitShard)]


def hostile_seal(seed: int) -> bytes:
    """The file of a seal that somebody has spoiled, in what it says or as a whole."""
    rng = random.Random(seed)
    content = bytearray(seal_bytes(mutate(rng.choice(SUBMITS), rng, GOOD_FRAMES)))
    if rng.random() < 0.5:
        at = rng.randrange(len(content))
        content[at : at + rng.randrange(5)] = rng.randbytes(rng.randrange(5))
    return bytes(content)


@pytest.mark.parametrize("count", [2_000, pytest.param(20_000, marks=pytest.mark.faults)])
def test_a_hostile_seal_holds_a_message_or_nothing(tmp_path: Path, count: int, outcomes: Outcomes) -> None:
    path = seal_path(tmp_path / "rank-0.slot-0.region")
    path.touch(0o600)
    whole = 0
    with outcomes.run("hostile seals in shared memory", runs=0, unit="seals") as row:
        for seed in seeds(count):
            row.runs += 1
            content = hostile_seal(seed)
            with playing(seed, content):
                path.write_bytes(content)
                found = read_seal(path)
                if found is not None:
                    assert content.startswith(seal_bytes(found))
                    whole += message_in(found) is not None
    assert whole or len(seeds(count)) == 1


def test_a_seal_that_promises_more_than_its_file_has_takes_no_more_memory_than_that(tmp_path: Path) -> None:
    path = seal_path(tmp_path / "rank-0.slot-0.region")
    path.touch(0o600)
    path.write_bytes(seal_bytes(b"short", length=64 << 20))
    assert peak_bytes(lambda: read_seal(path)) < 1 << 20
    assert read_seal(path) is None
