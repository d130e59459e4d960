"""Processes of the same user that do to a sidecar's socket what no client of ours does.

Each function is rank code: it is given the sidecar's runtime directory, a folder and a seed, says in the folder that it
has begun, goes on until it is told there to stop, and returns how often it has attacked.
"""

from __future__ import annotations

import dataclasses
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import zmq

from ckpt_proto import messages as m
from ckpt_proto.codec import decode, encode
from ckpt_proto.errors import LocalProtocolError
from ckpt_proto.identity import SaveKey
from ckpt_proto.process import process_start_s
from ckpt_proto.runtime_dir import endpoint, socket_path
from ckpt_proto.version import PROTOCOL_VERSION
from testkit.mutations import Pairs, hostile_frame, pack
from testkit.protocol_values import EXAMPLES
from testkit.waiting import LIMIT_S

ANSWER_LIMIT_MS = round(LIMIT_S * 1000)
HELD_CONNECTIONS = 300
NOTHING_DONE = (m.Refused, m.Pong, m.Farewell, m.Status)
"""What the sidecar may answer to those that it does not serve."""


def begun(folder: Path) -> list[Path]:
    """The attackers that are at it."""
    return list(folder.glob("begun-*"))


def stop(folder: Path) -> None:
    """Tell all attackers to stop."""
    (folder / "stop").touch()


def rounds(folder: str, seed: int) -> Iterator[random.Random]:
    """Rounds of an attack until it is told to stop: at least one."""
    rng = random.Random(seed)
    while True:
        yield rng
        (Path(folder) / f"begun-{os.getpid()}").touch()
        if (Path(folder) / "stop").exists():
            return


@contextmanager
def dealer(directory: str, **options: int) -> Iterator[zmq.Socket[bytes]]:
    """A connection as a client makes it."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as connection:
        connection.set(zmq.LINGER, 0)
        connection.set(zmq.RCVTIMEO, ANSWER_LIMIT_MS)
        connection.set(zmq.SNDTIMEO, ANSWER_LIMIT_MS)
        for name, value in options.items():
            connection.set(getattr(zmq, name), value)
        connection.connect(endpoint(Path(directory)))
        yield connection


def answers(connection: zmq.Socket[bytes]) -> list[m.Message]:
    """The answers to everything that was sent up to now, without the Status that shows where they end."""
    connection.send(encode(m.AskStatus()))
    found: list[m.Message] = []
    while not isinstance(answer := decode(connection.recv()), m.Status):
        found.append(answer)
    return found


def waiting(connection: zmq.Socket[bytes]) -> list[m.Message]:
    """The answers that are there."""
    found = []
    while connection.poll(0):
        found.append(decode(connection.recv()))
    return found


# ---------------------------------------------------------------- attacks


def garbage(directory: str, folder: str, seed: int) -> int:
    """Frames of nothing, of noise and of broken messages; messages of no, of many and of large frames."""
    attacks = 0
    with dealer(directory) as connection:
        for rng in rounds(folder, seed):
            frames: list[bytes] = [b"", rng.randbytes(rng.randrange(200)), rng.randbytes(1 << 20)]
            frames += [hostile_frame(rng.getrandbits(32)) for _ in range(20)]
            for frame in frames:
                connection.send(frame)
            connection.send_multipart([b""] * 3)
            connection.send_multipart(frames)
            connection.send_multipart([b""] * 1_000)
            attacks += len(frames) + 3
            for answer in waiting(connection):
                assert isinstance(answer, NOTHING_DONE), f"garbage is answered {answer}"
    return attacks


def stranger(directory: str, folder: str, seed: int) -> int:
    """Every message, without a Hello, with the keys, plans, slots and generations that the sidecar tells anybody."""
    attacks = 0
    with dealer(directory) as connection:
        for rng in rounds(folder, seed):
            for message in with_real_names(saves_of(connection), rng):
                connection.send(encode(message))
                attacks += 1
            for answer in answers(connection):
                assert isinstance(answer, (m.Pong, m.Farewell)), f"a stranger is answered {answer}"
    return attacks


def saves_of(connection: zmq.Socket[bytes]) -> list[SaveKey]:
    """The saves that the sidecar shows."""
    connection.send(encode(m.AskStatus()))
    answer = decode(connection.recv())
    while not isinstance(answer, m.Status):
        answer = decode(connection.recv())
    names = [(shown.save_id.split("-"), shown.step) for shown in answer.status.checkpoints]
    return [SaveKey(session, int(seq), step) for (session, seq), step in names]


def with_real_names(saves: list[SaveKey], rng: random.Random) -> Iterator[m.Message]:
    """Every example message but Hello, about one of ``saves`` or the next one."""
    for example in EXAMPLES:
        if isinstance(example, (m.Hello, m.AskStatus, m.Heartbeat)):
            continue
        changes: dict[str, object] = {"rank": 0, "slot": rng.randrange(2), "generation": rng.randrange(3)}
        if saves:
            save = rng.choice(saves)
            changes["save"] = dataclasses.replace(
                save, seq=save.seq + rng.randrange(2), step=save.step + rng.randrange(2)
            )
            changes["plan_id"] = f"{save.session}-p{rng.randrange(3)}"
        names = {field.name for field in dataclasses.fields(example)}
        yield dataclasses.replace(example, **{name: value for name, value in changes.items() if name in names})


def impostor(directory: str, folder: str, seed: int) -> int:
    """Hellos of another job, process, session, world or directory, and then a rank's messages as if it were welcome."""
    attacks = 0
    for rng in rounds(folder, seed):
        with dealer(directory) as connection:
            for change in FALSE_HELLOS:
                connection.send(false_hello(directory, change(rng)))
                attacks += 1
            refusals = answers(connection)
            assert [type(answer) for answer in refusals] == [m.Refused] * len(FALSE_HELLOS), refusals
            for message in with_real_names([], rng):
                connection.send(encode(message))
    return attacks


def hello(runtime_directory: str, **changes: object) -> m.Hello:
    """What this process would say as rank 0."""
    start_s = process_start_s(os.getpid())
    assert start_s is not None
    mine = m.Hello(
        Path(runtime_directory).name, 0, 1, os.getpid(), start_s, "node", 0, "", "2.13.0", "/tmp/never-made", 2, 600.0
    )
    return dataclasses.replace(mine, **changes)  # type: ignore[arg-type]


def false_hello(runtime_directory: str, changes: dict[str, object]) -> bytes:
    """A Hello with changed fields, valid or not."""
    try:
        return encode(hello(runtime_directory, **changes))
    except LocalProtocolError:
        fields = {**dataclasses.asdict(hello(runtime_directory)), **changes}
        return pack([PROTOCOL_VERSION, "Hello", Pairs(fields.items())])


FALSE_HELLOS: tuple[Callable[[random.Random], dict[str, object]], ...] = (
    lambda rng: {},
    lambda rng: {"job_id": "another"},
    lambda rng: {"job_id": "../../x"},
    lambda rng: {"job_id": "x" * 1_000_000},
    lambda rng: {"pid": os.getppid()},
    lambda rng: {"pid": 1},
    lambda rng: {"pid": rng.getrandbits(63) + 1},
    lambda rng: {"process_start_s": float("nan")},
    lambda rng: {"process_start_s": float("-inf")},
    lambda rng: {"session": f"{rng.getrandbits(32):08x}"},
    lambda rng: {"torch_version": "0.1"},
    lambda rng: {"torch_version": "\x01" * 1_000_000},
    lambda rng: {"node": "\x01" * 1_000_000},
    lambda rng: {"directory": "/" + "x" * 1_000_000},
    lambda rng: {"directory": "\x01" * 1_000_000},
    lambda rng: {"directory": "/a\0b"},
    lambda rng: {"rank": -1},
    lambda rng: {"rank": 2**20, "world_size": 2**20},
    lambda rng: {"slots": 2**63},
    lambda rng: {"stage_timeout_s": float("nan")},
    lambda rng: {"incarnation": -1},
)


def flood(directory: str, folder: str, seed: int) -> int:
    """Asks as fast as it can for the longest answers and reads none of them."""
    attacks = 0
    frames = [encode(m.AskStatus()), encode(m.Heartbeat()), b"noise"]
    with dealer(directory, RCVHWM=1) as connection:
        for rng in rounds(folder, seed):
            frame = rng.choice(frames)
            for _ in range(500):
                connection.send(frame)
            attacks += 500
    return attacks


def connections(directory: str, folder: str, seed: int) -> int:
    """Connections that say nothing, or a part of what they should, and are dropped by the hundred."""
    attacks = 0
    for rng in rounds(folder, seed):
        held = []
        for _ in range(HELD_CONNECTIONS):
            held.append(connected(directory))
            words = GREETING + READY
            if rng.random() < 0.3:
                shake_hands(held[-1])
                words = message_frame(rng.randbytes(20), 100) * 3
            say(held[-1], rng.choice([b"", words[: rng.randrange(len(words))], words, rng.randbytes(100)]))
        for each in held:
            each.close()
        attacks += len(held)
    return attacks


def lengths(directory: str, folder: str, seed: int) -> int:
    """Frames that say they are larger than allowed, or as large as allowed, and end after a few bytes."""
    attacks = 0
    for rng in rounds(folder, seed):
        held = []
        for nbytes in (2**63, 2**62, 2**40, (512 << 20) + 1, 512 << 20, 511 << 20, 100 << 20):
            held.append(connected(directory))
            shake_hands(held[-1])
            say(held[-1], message_frame(b"few", nbytes, more=rng.random() < 0.5))
        for each in held:
            each.close()
        attacks += len(held)
    return attacks


def connected(directory: str) -> socket.socket:
    """A plain connection to the sidecar's socket."""
    connection = socket.socket(socket.AF_UNIX)
    # Not settimeout(): that makes the socket non-blocking, and then a full backlog is an error instead of a wait.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", round(LIMIT_S), 0))
    connection.connect(str(socket_path(Path(directory))))
    return connection


def say(connection: socket.socket, words: bytes) -> None:
    """Send, unless the sidecar has hung up after the first of them."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(words)


def shake_hands(connection: socket.socket) -> None:
    """Be greeted: libzmq hangs up on who does not wait for its greeting."""
    connection.sendall(GREETING)
    exactly(connection, len(GREETING))
    connection.sendall(READY)
    _, length = exactly(connection, 2)
    exactly(connection, length)


def exactly(connection: socket.socket, nbytes: int) -> bytes:
    """The next bytes."""
    received = b""
    while len(received) < nbytes:
        part = connection.recv(nbytes - len(received))
        assert part, f"hung up after {received!r}"
        received += part
    return received


def message_frame(frame: bytes, nbytes: int | None = None, *, more: bool = False) -> bytes:
    """A frame as it is on the wire, with its own length or another one."""
    return struct.pack(">BQ", 2 | more, len(frame) if nbytes is None else nbytes) + frame


# ZMTP 3.0, RFC 23: what a DEALER says first.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
READY = bytes([4, len(_READY)]) + _READY

ATTACKS: tuple[Callable[[str, str, int], int], ...] = (garbage, stranger, impostor, flood, connections, lengths)
