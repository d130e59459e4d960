"""One end of the link between sidecars as a process: told what to do by lines on stdin, tells what happens on stdout.

    python -m testkit.peer_program server|client ADDRESS KEY_FILE|- LIFE NODE

``send N`` sends N numbered texts to every peer that is up; end of input ends it. It says ``address``, ``up``, ``got``,
``sent``, ``silent`` and ``refused``. :class:`PeerProgram` is the test's side of it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from ckpt_proto.messages import RankLeft
from ckpt_sidecar.delivery import Local
from ckpt_sidecar.peer_client import PeerClient
from ckpt_sidecar.peer_events import FromPeer, PeerRefusal, PeerSilence, PeerUp
from ckpt_sidecar.peer_frames import PeerEvent
from ckpt_sidecar.peer_keys import read_keys
from ckpt_sidecar.peer_server import PeerServer
from testkit.waiting import wait_until

TICK_S = 0.2
JOB_ID = "job"
Starter = Callable[..., "subprocess.Popen[Any]"]


class PeerProgram:
    """A running one. ``start`` is ``subprocess.Popen``, or what starts a process on another node."""

    def __init__(
        self, log: Path, role: str, address: str, key_file: Path | None, life: str, start: Starter = subprocess.Popen
    ) -> None:
        self.log, self.life = log, life
        tests = str(Path(__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
        command = [
            sys.executable,
            "-m",
            "testkit.peer_program",
            role,
            address,
            str(key_file or "-"),
            life,
            f"n-{life[0]}",
        ]
        with log.open("ab") as output:
            self.process = start(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, bufsize=0, cwd="/"
            )

    def lines(self, word: str) -> list[str]:
        """What it has said with this first word, without it."""
        return [line[len(word) + 1 :] for line in self.log.read_text().splitlines() if line.startswith(word + " ")]

    def wait_for(self, word: str, count: int = 1) -> list[str]:
        """Wait for so many of :meth:`lines`."""
        try:
            return wait_until(lambda: lines if len(lines := self.lines(word)) >= count else [], f"{count} x {word}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()[-3000:]}") from None

    def send(self, count: int) -> None:
        """Let it send so many texts."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"send %d\n" % count)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self._wait()

    def stop(self) -> int:
        """Let it end in good order."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self._wait()

    def _wait(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            self.process.stdin.close()


def main(role: str, address: str, key_file: str, life: str, node: str) -> None:
    """The process."""
    logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(message)s", stream=sys.stdout)
    local = Local(JOB_ID, node, life)
    keys = None if key_file == "-" else read_keys(Path(key_file))
    link: PeerServer | PeerClient
    link = PeerServer(address, local, keys) if role == "server" else PeerClient(address, local, keys, time.monotonic())
    say("address", link.address)
    poller = zmq.Poller()
    for source in (sys.stdin.fileno(), *link.sockets):
        poller.register(source, zmq.POLLIN)
    ups: list[str] = []
    sent = 0
    while True:
        ready = dict(poller.poll(round(TICK_S * 1000)))
        now_s = time.monotonic()
        for event in link.receive(now_s):
            tell(event)
            if isinstance(event, PeerUp):
                ups.append(event.life)
        if sys.stdin.fileno() in ready:
            order = os.read(sys.stdin.fileno(), 100).split()
            if not order:
                break
            for _ in range(int(order[1])):
                sent += 1
                send(link, ups, RankLeft(1, f"{life} {sent}"), now_s)
            say("sent", sent)
        silences = link.tick(now_s)
        for silence in [silences] if isinstance(silences, PeerSilence) else silences:
            say("silent", f"{silence.life} {silence.silent_s:.3f}")
    link.close()


def send(link: PeerServer | PeerClient, ups: list[str], message: RankLeft, now_s: float) -> None:
    """Send to the coordinator, or to the peer that came up last."""
    taken = link.send(1, message, now_s) if isinstance(link, PeerClient) else link.send(ups[-1], 1, message, now_s)
    if not taken:
        say("dropped", message.reason)


def tell(event: PeerEvent) -> None:
    """Say what has happened."""
    match event:
        case PeerUp(life=life):
            say("up", life)
        case FromPeer(message=message):
            assert isinstance(message, RankLeft)
            say("got", message.reason)
        case PeerRefusal(failure=failure):
            say("refused", failure.message)


def say(word: str, what: object) -> None:
    """One line, at once."""
    print(word, what, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
