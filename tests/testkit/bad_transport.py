"""Two ends of a delivery and a transport between them that loses, doubles, delays and reorders, drawn from a seed.

Time is a number. Every parcel's text names the life that sent it and which of its talks it belongs to, so that what
arrives tells where it comes from.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from random import Random

from ckpt_proto.peer_messages import Parcel, PeerPing
from ckpt_sidecar.delivery import Delivered, Delivery, Local, Up

STEP_S = 0.25
FEWEST_STEPS, MOST_STEPS = 16, 400
"""Of a transport that lets everything through at the end. Far fewer than the most are needed, unless ends are stuck."""


@dataclass
class Talk:
    """What ``life`` has sent to and got from ``other`` since it was told that this one is up."""

    life: str
    other: str
    sent: list[str] = field(default_factory=list)
    got: list[str] = field(default_factory=list)


class End:
    """One side; :meth:`restart` makes it another life. ``talks`` are those of all its lives."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lives = 0
        self.talks: list[Talk] = []
        self.most_unacked = (0, 0)
        self.restart(0.0)

    def restart(self, now_s: float) -> None:
        """A new process: it remembers nothing."""
        self.lives += 1
        self.life = f"{self.name}{self.lives:015x}"
        self._calls = itertools.count(1)
        self.meet_anew(now_s)

    def meet_anew(self, now_s: float) -> None:
        """Forget the other side, as the owner of the sockets does with one that was silent for long."""
        self.delivery = Delivery(Local("job", f"node-{self.name}", self.life), self._calls.__next__, now_s)

    def send(self) -> None:
        """Send one more text, if there is somebody."""
        talk = self.talks[-1] if self.talks else Talk("", "")
        text = f"{self.life} talk {len(self.talks)} number {len(talk.sent)}"
        if self.delivery.send(len(talk.sent) % 7, text.encode()):
            talk.sent.append(text)
        self.most_unacked = max(self.most_unacked, self.delivery.unacked)

    def receive(self, message: Parcel | PeerPing, now_s: float) -> None:
        """Note what it means."""
        for event in self.delivery.receive(message, now_s):
            match event:
                case Up(life=life):
                    self.talks.append(Talk(self.life, life))
                case Delivered(frame=frame):
                    self.talks[-1].got.append(frame.decode())


class BadTransport:
    """Plays ``seed``; ``story`` has every move of it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_s = 0.0
        self.a, self.b = End("a"), End("b")
        self.story: list[str] = [f"seed {seed}"]
        self._waiting: list[tuple[End, Parcel | PeerPing]] = []
        self._kept: list[tuple[End, Parcel | PeerPing]] = []
        self.loss, self.doubling, self.disorder = (self.random.choice((0.0, 0.1, 0.5)) for _ in range(3))
        self.restarts = self.random.choice((0.0, 0.0, 0.03))
        self.forgets = self.random.choice((0.0, 0.0, 0.02))
        self.lives_end = bool(self.restarts or self.forgets)

    def play(self, moves: int) -> None:
        """So many random moves, then time with a transport that lets everything through."""
        for _ in range(moves):
            self._move()
        self.loss = self.doubling = 0.0
        for step in range(MOST_STEPS):
            self._pass_time()
            self._carry(len(self._waiting))
            if step >= FEWEST_STEPS and self._has_settled():
                break

    def _has_settled(self) -> bool:
        ends = (self.a.delivery, self.b.delivery)
        return all(end.is_up and end.unacked == (0, 0) for end in ends)

    def _move(self) -> None:
        end = self.random.choice((self.a, self.b))
        chance = self.random.random()
        if chance < self.restarts:
            end.restart(self.now_s)
            self.story.append(f"{end.name} restarts as {end.life}")
        elif chance < self.restarts + self.forgets:
            end.meet_anew(self.now_s)
            self.story.append(f"{end.life} forgets the other")
        elif self.random.random() < 0.4:
            self._send(end, self.random.choice((1, 1, 2, 20)))
        elif self.random.random() < 0.3:
            self._pass_time()
        else:
            self._carry(self.random.randint(1, 8))

    def _send(self, end: End, count: int) -> None:
        self.story.append(f"{end.life} sends {count}")
        for _ in range(count):
            end.send()
        self._collect()

    def _pass_time(self) -> None:
        self.now_s += STEP_S
        self._collect()

    def _collect(self) -> None:
        for end, other in ((self.a, self.b), (self.b, self.a)):
            self._waiting += [(other, message) for message in end.delivery.take_outgoing(self.now_s)]

    def _carry(self, count: int) -> None:
        if self._kept and self.random.random() < 0.1:
            self._waiting.append(self.random.choice(self._kept))  # again and very late, perhaps of an earlier life
        for _ in range(min(count, len(self._waiting))):
            at = self.random.randrange(len(self._waiting)) if self.random.random() < self.disorder else 0
            end, message = self._waiting.pop(at)
            if len(self._kept) < 40 and self.random.random() < 0.1:
                self._kept.append((end, message))
            if self.random.random() < self.loss:
                self.story.append(f"lost: {message}")
                continue
            for _ in range(2 if self.random.random() < self.doubling else 1):
                self.story.append(f"{end.life} gets {message}")
                end.receive(message, self.now_s)
            self._collect()
