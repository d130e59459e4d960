"""The socket by itself: what it takes in at a time, what it says when it cannot send, and what it writes down."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from ckpt_proto import codec
from ckpt_proto.codec import decode, encode
from ckpt_proto.messages import AskRestoreStep, Heartbeat, Message, Pong, Refused, Welcome
from ckpt_proto.runtime_dir import endpoint
from ckpt_sidecar.server import MAX_DESCRIPTORS, MAX_RECEIVED, REFUSALS_LOGGED_EVERY_S, Server
from testkit.leaks import private_shm_root
from testkit.waiting import LIMIT_S, wait_until


class Clock:
    """Time that stands still until it is told."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory() -> Iterator[Path]:
    with private_shm_root() as root:
        yield root


@pytest.fixture
def server(directory: Path, clock: Clock) -> Iterator[Server]:
    server = Server(directory, clock)
    yield server
    server.close()


@pytest.fixture
def client(directory: Path, server: Server) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVTIMEO, round(LIMIT_S * 1000))
        socket.connect(endpoint(directory))
        yield socket


def take(server: Server, count: int) -> list[tuple[bytes, Message]]:
    """The next ``count`` messages, with their senders."""
    found: list[tuple[bytes, Message]] = []

    def enough() -> bool:
        found.extend((peer, message) for peer, _, message in server.receive())
        return len(found) >= count

    wait_until(enough, f"{count} messages have come")
    return found


def test_a_client_that_never_stops_talking_does_not_keep_the_loop_from_its_other_work(
    server: Server, client: zmq.Socket[bytes]
) -> None:
    for number in range(5 * MAX_RECEIVED):
        client.send(encode(AskRestoreStep(number)))
    largest, found = 0, []
    while len(found) < 5 * MAX_RECEIVED:
        server.wait(LIMIT_S)
        batch = [message for _, _, message in server.receive()]
        largest = max(largest, len(batch))
        found += batch
    assert largest <= MAX_RECEIVED
    assert found == [AskRestoreStep(number) for number in range(5 * MAX_RECEIVED)]


def test_a_client_that_never_stops_sending_garbage_does_not_either(server: Server, client: zmq.Socket[bytes]) -> None:
    for _ in range(5 * MAX_RECEIVED):
        client.send(b"garbage")
    client.send(encode(Heartbeat()))
    # A call that went on until nothing is left would find the Heartbeat in the first one that finds anything.
    calls = 0
    while not [message for _, _, message in server.receive()]:
        server.wait(LIMIT_S)
        calls += 1
    assert calls >= 5


def test_what_is_too_large_to_be_sent_is_refused_by_name_and_the_next_message_arrives(
    server: Server, client: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client.send(encode(Heartbeat()))
    [(peer, _)] = take(server, 1)
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 300)
    server.send(peer, Welcome("9f3ac1d2", "0" * 16, "node", "2.13.0", tuple(range(1_000, 1_200))))
    server.send(peer, Pong("0" * 16, True))
    refused = decode(client.recv())
    assert isinstance(refused, Refused)
    assert refused.failure.kind == "LocalProtocolError"
    assert "Welcome has" in refused.failure.message
    assert "at most 300" in refused.failure.message
    assert refused.failure.message in caplog.text
    assert decode(client.recv()) == Pong("0" * 16, True)


def test_refusals_are_logged_once_a_second_with_their_number(
    server: Server, client: zmq.Socket[bytes], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def refuse(count: int) -> None:
        for _ in range(count):
            client.send(b"garbage")
        client.send(encode(Heartbeat()))
        take(server, 1)

    refuse(1)
    assert [record.getMessage().partition(", the newest")[0] for record in caplog.records] == [
        "refused messages: 1 since the last such line"
    ]
    refuse(50)
    assert len(caplog.records) == 1
    clock.now_s += REFUSALS_LOGGED_EVERY_S
    refuse(1)
    assert "refused messages: 51 since" in caplog.records[1].getMessage()
    assert "not msgpack" in caplog.records[1].getMessage()
    assert len(caplog.records) == 2


def test_the_limit_of_descriptors_is_raised_as_far_as_it_goes(directory: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        Server(directory).close()
        raised, same = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert same == hard
    assert raised == (MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS))
