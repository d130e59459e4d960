"""Both sides of the link between sidecars on real sockets: who is let in, what survives, what is refused.

The clock is the tests' own and runs faster than the real one.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from random import Random
from typing import Any

import pytest
import zmq

from ckpt_proto.codec import decode, encode
from ckpt_proto.errors import LocalProtocolError
from ckpt_proto.messages import Heartbeat, RankLeft
from ckpt_proto.peer_messages import MAX_PARCEL_BYTES, Parcel, PeerEnd, PeerPing, PeerRefused
from ckpt_sidecar import parcel_boxes, peer_server, peer_socket
from ckpt_sidecar.delivery import Local
from ckpt_sidecar.peer_client import PeerClient
from ckpt_sidecar.peer_events import FromPeer, PeerRefusal, PeerUp
from ckpt_sidecar.peer_frames import PeerEvent
from ckpt_sidecar.peer_keys import PeerKeys
from ckpt_sidecar.peer_server import PeerServer
from ckpt_sidecar.peer_socket import HandshakeLog, PeerAddressTaken
from testkit.waiting import LIMIT_S, wait_until

A, B, C, D = "a" * 16, "b" * 16, "c" * 16, "d" * 16
STEP_S = 0.05
ANY_PORT = "127.0.0.1:0"


def new_keys() -> PeerKeys:
    """Some key."""
    return PeerKeys(*zmq.curve_keypair())


KEYS, OTHER_KEYS = new_keys(), new_keys()


class ForgedKeys(PeerKeys):
    """A key of its own, for somebody who has come to know the public half of the job's."""

    def join(self, socket: zmq.Socket[bytes]) -> None:
        """Talk to the job's server all the same."""
        super().join(socket)
        socket.set(zmq.CURVE_SERVERKEY, KEYS.public)


class Site:
    """Some servers and clients, each with what has happened to it; closed at the end."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.happened: dict[PeerServer | PeerClient, list[PeerEvent]] = {}

    def server(
        self, address: str = ANY_PORT, life: str = A, job_id: str = "job", keys: PeerKeys | None = None
    ) -> PeerServer:
        """A coordinator's side."""
        made = PeerServer(address, Local(job_id, f"node-{life[0]}", life), keys)
        self.happened[made] = []
        return made

    def client(self, address: str, life: str = B, job_id: str = "job", keys: PeerKeys | None = None) -> PeerClient:
        """A node's side."""
        made = PeerClient(address, Local(job_id, f"node-{life[0]}", life), keys, self.now_s)
        self.happened[made] = []
        return made

    def close(self, *links: PeerServer | PeerClient) -> None:
        """As a process that ends; everything by default."""
        for link in links or list(self.happened):
            self.happened.pop(link)
            link.close()

    def step(self) -> None:
        """Let everybody take in what is there, and time pass."""
        poller = zmq.Poller()
        for link in self.happened:
            for one in link.sockets:
                poller.register(one, zmq.POLLIN)
        poller.poll(10)
        self.now_s += STEP_S
        for link, happened in self.happened.items():
            happened.extend(link.receive(self.now_s))
            link.tick(self.now_s)

    def until(self, look: Callable[[], Any], what: str) -> None:
        """Step until ``look`` is true."""

        def step_and_look() -> Any:
            self.step()
            return look()

        wait_until(step_and_look, what)

    def ups(self, link: PeerServer | PeerClient) -> list[str]:
        """The lives that came up, in order."""
        return [event.life for event in self.happened[link] if isinstance(event, PeerUp)]

    def got(self, link: PeerServer | PeerClient) -> list[str]:
        """The texts that arrived, in order."""
        return [event.message.reason for event in self.messages(link) if isinstance(event.message, RankLeft)]

    def messages(self, link: PeerServer | PeerClient) -> list[FromPeer]:
        """The messages that arrived."""
        return [event for event in self.happened[link] if isinstance(event, FromPeer)]

    def refusals(self, link: PeerServer | PeerClient) -> list[str]:
        """Why it is not served."""
        return [str(event.failure) for event in self.happened[link] if isinstance(event, PeerRefusal)]

    def both_up(self, server: PeerServer, client: PeerClient) -> None:
        """Wait until these two know of each other."""
        self.until(lambda: client.is_up and self.ups(server), "both are up")


@pytest.fixture
def site() -> Iterator[Site]:
    """Everything is closed at the end."""
    with ExitStack() as stack:
        made = Site()
        stack.callback(made.close)
        yield made


def text(number: int) -> RankLeft:
    """A message that can be told from others."""
    return RankLeft(1, str(number))


def pair(site: Site, keys: PeerKeys | None = None) -> tuple[PeerServer, PeerClient]:
    """A server and a client that are up."""
    server = site.server(keys=keys)
    client = site.client(server.address, keys=keys)
    site.both_up(server, client)
    return server, client


# ---------------------------------------------------------------- traffic


@pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "curve"])
def test_messages_pass_both_ways_with_rank_life_and_node(site: Site, keys: PeerKeys | None) -> None:
    server, client = pair(site, keys)
    assert client.send(7, text(1), site.now_s)
    assert server.send(B, 3, text(2), site.now_s)
    site.until(lambda: site.messages(server) and site.messages(client), "both have got it")
    assert site.messages(server) == [FromPeer(B, "node-b", 7, text(1))]
    assert site.messages(client) == [FromPeer(A, "node-a", 3, text(2))]
    site.until(lambda: server.unacked_parcels == client.unacked_parcels == 0, "both have been acked")


def test_many_clients_are_told_apart(site: Site) -> None:
    server = site.server()
    lives = [f"{number:016x}" for number in range(20)]
    clients = [site.client(server.address, life) for life in lives]
    site.until(lambda: all(client.is_up for client in clients) and len(site.ups(server)) == 20, "all are up")
    for number, life in enumerate(lives):
        server.send(life, 0, text(number), site.now_s)
    site.until(lambda: all(site.got(client) for client in clients), "all have got theirs")
    assert [site.got(client) for client in clients] == [[str(number)] for number in range(20)]


def test_more_than_a_window_arrives_in_order(site: Site) -> None:
    server, client = pair(site)
    for number in range(1000):
        client.send(0, text(number), site.now_s)
    site.until(lambda: len(site.got(server)) >= 1000, "everything has arrived")
    assert site.got(server) == [str(number) for number in range(1000)]


def test_a_large_message_passes(site: Site) -> None:
    server, client = pair(site, KEYS)
    client.send(0, RankLeft(1, "x" * (40 << 20)), site.now_s)
    client.send(0, text(2), site.now_s)
    site.until(lambda: len(site.got(server)) == 2, "it has arrived")
    assert [len(reason) for reason in site.got(server)] == [40 << 20, 1]


def test_a_message_that_is_too_large_is_refused_where_it_is_sent(site: Site) -> None:
    server, client = pair(site)
    with pytest.raises(LocalProtocolError, match="for another node"):
        client.send(0, RankLeft(1, "x" * MAX_PARCEL_BYTES), site.now_s)
    client.send(0, text(1), site.now_s)
    site.until(lambda: site.got(server), "the link goes on")


def test_nothing_is_taken_for_one_that_is_not_there(site: Site) -> None:
    server = site.server()
    client = site.client("127.0.0.1:9")
    assert not server.send(B, 0, text(1), site.now_s)
    assert not client.send(0, text(1), site.now_s)
    site.step()
    assert client.tick(site.now_s + 7).silent_s >= 7
    assert client.tick(site.now_s).life == ""
    assert server.tick(site.now_s) == []


# ---------------------------------------------------------------- lives


def test_silence_is_counted_and_ends_with_the_next_word(site: Site) -> None:
    server, client = pair(site)
    assert [silence.life for silence in server.tick(site.now_s + 100)] == [B]
    assert server.tick(site.now_s + 100)[0].silent_s > 90
    site.now_s += 100
    site.until(lambda: server.tick(site.now_s)[0].silent_s < 1, "it is heard again")
    assert client.tick(site.now_s).node == "node-a"


def test_a_coordinator_that_was_restarted_on_its_port_is_up_anew(site: Site) -> None:
    server, client = pair(site)
    site.close(server)
    client.send(0, text(1), site.now_s)
    server = site.server(client.address, life=C)
    site.until(lambda: site.ups(client) == [A, C] and site.ups(server) == [B], "both are up with the new life")
    client.send(0, text(2), site.now_s)
    site.until(lambda: site.got(server), "it has arrived")
    assert site.got(server) == ["2"]


def test_a_restarted_node_is_another_life_beside_the_old_one_until_that_is_forgotten(site: Site) -> None:
    server, client = pair(site)
    site.close(client)
    site.client(server.address, life=C)
    site.until(lambda: site.ups(server) == [B, C], "the new life is up")
    assert {silence.life for silence in server.tick(site.now_s)} == {B, C}
    server.forget(B)
    assert {silence.life for silence in server.tick(site.now_s)} == {C}
    assert not server.send(B, 0, text(1), site.now_s)


def test_one_that_was_forgotten_and_comes_back_is_up_anew_on_both_sides(site: Site) -> None:
    server, client = pair(site)
    server.forget(B)
    site.until(lambda: site.ups(server) == [B, B] and site.ups(client) == [A, A], "both are up again")
    client.send(0, text(1), site.now_s)
    site.until(lambda: site.got(server) == ["1"], "it has arrived")


def test_a_client_that_was_made_again_in_the_same_process_is_up_anew(site: Site) -> None:
    server, client = pair(site)
    site.close(client)
    client = site.client(server.address)
    site.until(lambda: client.is_up and site.ups(server) == [B, B], "up again")
    client.send(0, text(1), site.now_s)
    site.until(lambda: site.got(server) == ["1"], "it has arrived")


def test_one_that_takes_nothing_in_is_begun_anew_and_then_told(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parcel_boxes, "MAX_UNACKED_PARCELS", 5)
    server, client = pair(site)
    assert [server.send(B, 0, text(number), site.now_s) for number in range(6)] == [True] * 5 + [False]
    assert f"the sidecar {B} on node-b acks nothing" in caplog.text
    assert server.unacked_parcels == 0
    site.until(lambda: site.ups(server) == [B, B] and site.ups(client) == [A, A], "both are up anew")
    server.send(B, 0, text(7), site.now_s)
    site.until(lambda: site.got(client)[-1:] == ["7"], "it has arrived")


def test_there_are_no_more_peers_than_there_is_room_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "MAX_PEERS", 1)
    server, client = pair(site)
    second = site.client(server.address, life=C)
    site.until(lambda: site.refusals(second), "the second is refused")
    assert "1 sidecars are connected to the coordinator on node-a" in site.refusals(second)[0]
    site.close(client)
    site.now_s += peer_server.FORGET_AFTER_S
    site.until(lambda: site.ups(server) == [B, C], "the room of one that is long silent is given away")
    assert [silence.life for silence in server.tick(site.now_s)] == [C]


# ---------------------------------------------------------------- who is let in


@pytest.mark.parametrize(
    ("server_keys", "client_keys", "logged"),
    [
        (KEYS, None, "one side has a key and the other has none"),
        (KEYS, OTHER_KEYS, "the two sides have different keys"),
        (KEYS, ForgedKeys(OTHER_KEYS.public, OTHER_KEYS.secret), "another key than that of this job"),
        (None, KEYS, "one side has a key and the other has none"),
    ],
    ids=["no key", "wrong key", "forged key", "plain server"],
)
def test_nothing_of_one_that_has_not_the_key_gets_through_and_both_sides_say_so(
    site: Site,
    caplog: pytest.LogCaptureFixture,
    server_keys: PeerKeys | None,
    client_keys: PeerKeys | None,
    logged: str,
) -> None:
    server = site.server(keys=server_keys)
    client = site.client(server.address, keys=client_keys)
    # Whoever is refused is gone in a moment, so that the first lines may have no address.
    site.until(lambda: f": {logged}" in caplog.text, "it is logged")
    site.until(lambda: site.refusals(client), "and told on its side")
    assert f"the coordinator at {server.address} does not let this sidecar in" in site.refusals(client)[0]
    assert "--peer-key-file" in site.refusals(client)[0]
    assert not client.is_up
    assert site.happened[server] == []


def test_an_honest_one_gets_in_beside_those_that_do_not(site: Site) -> None:
    server = site.server(keys=KEYS)
    for life, keys in ((C, None), (D, OTHER_KEYS)):
        site.client(server.address, life=life, keys=keys)
    client = site.client(server.address, keys=KEYS)
    site.both_up(server, client)
    client.send(0, text(1), site.now_s)
    site.until(lambda: site.got(server), "it has arrived")
    assert site.ups(server) == [B]


def test_the_log_is_not_flooded_by_one_that_tries_again_and_again(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    server = site.server(keys=KEYS)
    site.client(server.address, keys=OTHER_KEYS)
    site.until(lambda: "(8 times)" in caplog.text, "it has tried for long")
    assert len([record for record in caplog.records if "refused a connection" in record.message]) <= 10


def test_when_the_coordinator_gets_the_right_key_the_client_comes_back_by_itself(site: Site) -> None:
    server = site.server()
    client = site.client(server.address, keys=KEYS)
    site.until(lambda: site.refusals(client), "the client is refused, for good as far as libzmq is concerned")
    site.close(server)
    server = site.server(client.address, life=C, keys=KEYS)
    site.both_up(server, client)
    assert site.ups(client) == [C]


def test_when_another_program_leaves_the_port_the_client_comes_back_by_itself(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        client = site.client(f"127.0.0.1:{other.getsockname()[1]}")
        other.settimeout(LIMIT_S)
        connection, _ = other.accept()
        with connection:
            connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n" * 10)
            for _ in range(5):
                site.step()
    server = site.server(client.address)
    site.both_up(server, client)


def test_another_jobs_sidecar_is_refused_by_name(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    server = site.server(job_id="job-x")
    client = site.client(server.address, job_id="job-y")
    site.until(lambda: site.refusals(client), "it is refused")
    port = server.address.split(":")[1]
    refusal = site.refusals(client)[0]
    assert f"port {port} on node-a is served by job job-x, not by job job-y" in refusal
    assert "set CKPT_SIDECAR_COORDINATOR=HOST:PORT" in refusal
    assert "refused the sidecar on node-b of job job-y" in caplog.text
    assert site.happened[server] == []
    assert not client.is_up


def test_a_sidecar_that_calls_itself_is_not_its_own_peer(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    server = site.server()
    site.client(server.address, life=A)
    site.until(lambda: "this very sidecar" in caplog.text, "it is noticed")
    assert site.happened[server] == []


# ---------------------------------------------------------------- what is refused


def end(life: str, call: int = 1) -> PeerEnd:
    """Short for tables."""
    return PeerEnd(life, call)


def ping(**changes: Any) -> PeerPing:
    """A first contact of life C."""
    return PeerPing(**{"job_id": "job", "node": "node-c", "sender": end(C), "receiver": None, "acked": 0, **changes})


BAD = {
    "nothing": [b""],
    "no msgpack": [b"\xc1"],
    "noise": [Random(1).randbytes(200)],
    "another version": [encode(ping(), version=99)],
    "not for sidecars": [encode(Heartbeat())],
    "two frames": [encode(ping()), encode(ping())],
    "an endless nest": [b"\x91" * 100_000],
    "a refusal": [encode(PeerRefused("job", "node-c", peer_server.FailureReport("X", "y")))],
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_frame_is_logged_with_its_address_answered_and_dropped(
    site: Site, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    server, client = pair(site)
    with zmq.Context() as context, context.socket(zmq.DEALER) as bad:
        bad.set(zmq.LINGER, 0)
        bad.connect(f"tcp://{server.address}")
        bad.send_multipart(BAD[name])
        site.until(lambda: "dropped what came from 127.0.0.1" in caplog.text, "it is logged")
        site.until(lambda: bad.poll(0), "it is answered")
        assert isinstance(decode(bad.recv()), PeerRefused)
    client.send(0, text(1), site.now_s)
    site.until(lambda: site.got(server), "the others go on")
    assert site.ups(server) == [B]


def test_a_frame_above_the_limit_ends_its_connection_only(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_socket, "MAX_FRAME_BYTES", 1 << 20)
    server, client = pair(site)
    with zmq.Context() as context, context.socket(zmq.DEALER) as bad:
        bad.set(zmq.LINGER, 0)
        watch = HandshakeLog(bad)
        bad.connect(f"tcp://{server.address}")
        bad.send(bytes((1 << 20) + 1))
        site.until(lambda: [watch.read(), watch.ended][1], "the connection has ended")
        watch.close()
    client.send(0, text(1), site.now_s)
    site.until(lambda: site.got(server), "the others go on")


def test_a_parcel_with_something_bad_inside_is_dropped_and_the_next_one_comes(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    server = site.server()
    nested = encode(ping())
    frames = [b"\xc1", nested, encode(text(3))]
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.set(zmq.LINGER, 0)
        peer.connect(f"tcp://{server.address}")
        peer.send(encode(ping()))
        site.until(lambda: peer.poll(0), "it is answered")
        answer = decode(peer.recv())
        assert isinstance(answer, PeerPing)
        for number, frame in enumerate(frames, 1):
            peer.send(encode(Parcel("job", "node-c", end(C), answer.sender, number, 0, 0, frame)))
        site.until(lambda: site.got(server), "the good one has arrived")
    assert site.got(server) == ["3"]
    assert caplog.text.count(f"dropped a parcel of the sidecar {C} on node-c") == 2


def test_a_client_drops_what_a_bad_coordinator_says(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as bad:
        bad.set(zmq.LINGER, 0)
        port = bad.bind_to_random_port("tcp://127.0.0.1")
        client = site.client(f"127.0.0.1:{port}")
        site.until(lambda: bad.poll(0), "the client has pinged")
        route = bad.recv_multipart()[0]
        for frames in BAD.values():
            bad.send_multipart([route, *frames])
        bad.send_multipart([route, encode(ping(job_id="other"))])
        site.until(lambda: "dropped a message of job other" in caplog.text, "the last one was taken in")
    assert caplog.text.count("dropped what came from the coordinator") >= len(BAD) - 1
    assert not client.is_up


def test_what_is_no_sidecar_at_all_changes_nothing_and_its_address_is_logged(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    server = site.server(keys=KEYS)
    host, port = server.address.split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    for content in (b"GET / HTTP/1.0\r\n\r\n" * 10, Random(2).randbytes(1000), greeting):
        with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
            site.until(lambda: server._log._hosts, "it is accepted")
            connection.sendall(content)
            site.until(lambda: not server._log._hosts, "it is thrown out")
    assert "refused a connection from 127.0.0.1: one side has a key and the other has none" in caplog.text
    client = site.client(server.address, keys=KEYS)
    site.both_up(server, client)
    assert site.ups(server) == [B]


def test_a_stream_of_bad_frames_does_not_fill_the_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    server = site.server()
    with zmq.Context() as context, context.socket(zmq.DEALER) as bad:
        bad.set(zmq.LINGER, 0)
        bad.connect(f"tcp://{server.address}")
        for _ in range(500):
            bad.send(b"\xc1")
        bad.send(encode(ping()))
        site.until(lambda: server._peers, "all of them were taken in")
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) < 12


# ---------------------------------------------------------------- the address


def test_a_port_that_somebody_has_is_named_with_the_process_and_the_option(site: Site) -> None:
    server = site.server()
    port = server.address.split(":")[1]
    with pytest.raises(PeerAddressTaken, match=rf"port {port} .*process {os.getpid()} .*CKPT_SIDECAR_COORDINATOR"):
        PeerServer(server.address, Local("job", "node-c", C), None)


def listening_on(port: str) -> set[str]:
    """The addresses of this machine on which somebody listens on ``port``."""
    import psutil

    return {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == int(port)
    }


@pytest.mark.parametrize(("host", "bound"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("[::1]", "::1")])
def test_a_loopback_address_is_bound_alone(site: Site, host: str, bound: str) -> None:
    server = site.server(f"{host}:0")
    assert server.address.startswith(f"{host}:")
    assert {address.removeprefix("::ffff:") for address in listening_on(server.address.rpartition(":")[2])} == {bound}
    client = site.client(server.address)
    site.both_up(server, client)


def test_any_other_is_bound_on_all_interfaces_because_it_may_be_a_name_for_this_node_elsewhere(site: Site) -> None:
    server = site.server("node-a.cluster:0", keys=KEYS)
    assert listening_on(server.address.split(":")[1]) <= {"::", "0.0.0.0"}
    client = site.client(f"127.0.0.1:{server.address.split(':')[1]}", keys=KEYS)
    site.both_up(server, client)
