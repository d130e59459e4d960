"""A rank that is welcome and then breaks every rule: plans, regions and submissions of any kind in any order."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import zmq

from ckpt_proto import messages as m
from ckpt_proto.codec import decode, encode
from ckpt_proto.errors import FailureReport, LocalProtocolError
from ckpt_proto.identity import SaveKey
from ckpt_proto.plan_items import Plan, PlanItem
from testkit.attackers import dealer, hello
from testkit.mutations import GOOD_FRAMES, mutate

TURNS = 150
FAILURE = FailureReport("Rogue", "\x01" * 100_000)
SIZES: tuple[tuple[int, ...], ...] = (
    (), (0,), (1,), (3, 5), (1_000,), (2**20,), (2**40,), (2**62,), (2**62, 2**62), (0, 2**63), (1,) * 64,
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "bool", "load", "Tensor", "no such", "quint8", "complex128", "int4")
GOOD_PLAN: Plan = (PlanItem("a", "tensor", None, (0,), (9,), (9,), "float32"), PlanItem("b", "bytes"))


def rogue_rank(runtime_directory: str, directory: str, seed: int) -> str:
    """Say Hello, play ``TURNS`` turns, and leave: with a Goodbye, without one, or killed. Returns the session."""
    rogue = Rogue(random.Random(seed))
    with dealer(runtime_directory) as connection:
        connection.send(encode(hello(runtime_directory, directory=directory, torch_version=rogue.torch_version)))
        welcome = decode(connection.recv())
        assert isinstance(welcome, m.Welcome), welcome
        rogue.session = welcome.session
        for _ in range(TURNS):
            for frame in rogue.turn():
                connection.send(frame)
            while connection.poll(rogue.patience_ms()):
                rogue.hear(decode(connection.recv()))
        await_status(connection)
        if seed % 3 == 0:
            connection.send(encode(m.Goodbye()))
            while not isinstance(decode(connection.recv()), m.Farewell):
                pass
        elif seed % 3 == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return rogue.session


def await_status(connection: zmq.Socket[bytes]) -> None:
    """Everything sent before has been taken in: none of it has ended the sidecar."""
    connection.send(encode(m.AskStatus()))
    while not isinstance(decode(connection.recv()), m.Status):
        pass


class Rogue:
    """What a rogue rank has been told, and what it makes of it."""

    def __init__(self, rng: random.Random) -> None:
        import torch

        self.torch_version = torch.__version__
        self.session = ""
        self._rng = rng
        self._seq = 0
        self._plan_id = ""
        self._proposed: SaveKey | None = None
        self._ready: list[m.RegionReady] = []
        self._due: list[m.Message] = []

    def patience_ms(self) -> int:
        """How long to listen between two turns: mostly not at all."""
        return self._rng.choice([0, 0, 20, 20])

    def hear(self, message: m.Message) -> None:
        """Remember what makes later lies believable, and what an honest rank would say next."""
        match message:
            case m.FinalPlan(save=save, plan_id=plan_id):
                self._plan_id, self._proposed = plan_id, save
            case m.RegionReady():
                self._ready.append(message)
                if self._proposed is not None and message.plan_id == self._plan_id:
                    lengths = (self._rng.randrange(100),)
                    self._due.append(
                        m.SubmitShard(self._proposed, 0, self._plan_id, message.slot, message.generation, lengths)
                    )
            case m.MakeGlobalPlan(save=save, plans=plans):
                self._proposed = save
                self._due.append(m.GlobalPlan(save, plans))
            case m.AskCommit(save=save):
                self._due.append(m.DecideCommit(save, True))

    def turn(self) -> list[bytes]:
        """The frames of one turn."""
        honest = self._due and self._rng.random() < 0.7
        try:
            frame = encode(self._due.pop() if honest else self._rng.choice(MOVES)(self))
        except LocalProtocolError:
            return []  # the constructor knows better
        if self._rng.random() < 0.07:
            frame = mutate(frame, self._rng, GOOD_FRAMES)
        return [frame] * self._rng.choice([1, 1, 1, 2])

    # ------------------------------------------------------------ moves

    def save(self) -> SaveKey:
        """The attempt of now, an earlier or a later one, sometimes of another step or session."""
        if self._rng.random() < 0.3:
            self._seq += 1
        seq = max(0, self._seq - self._rng.choice([0, 0, 0, 1, 5, -1, -1000]))
        session = self._rng.choice([self.session] * 19 + ["00000000"])
        return SaveKey(session, seq, self._rng.choice([seq, seq, seq, 0, 2**63 - 1]))

    def item(self) -> PlanItem:
        """Any entry of a plan that can be made."""
        rng = self._rng
        if rng.random() < 0.3:
            return PlanItem(
                rng.choice(["a", "b", "", "\0", "../x", "x" * 10_000]), "bytes", rng.choice([None, (), ("a", 1)])
            )
        sizes = rng.choice(SIZES)
        whole = tuple(size + rng.randrange(2) for size in sizes)
        dtype = rng.choice(DTYPES) if rng.random() < 0.3 else "float32"
        return PlanItem(
            rng.choice("abc"), rng.choice(["tensor", "shard"]), None, (0,) * len(sizes), sizes, whole, dtype,
            layout=rng.choice(["strided"] * 5 + ["load"]), memory_format=rng.choice(["contiguous_format"] * 5 + ["x"]),
            opaque=rng.random() < 0.2,
        )  # fmt: skip

    def plan(self) -> Plan:
        """A tensor and a value, or a few entries of any kind, or very many."""
        if self._rng.random() < 0.5:
            return GOOD_PLAN
        return tuple(self.item() for _ in range(self._rng.choice([0, 1, 1, 2, 3]))) * self._rng.choice([1, 1, 1, 500])

    def propose(self) -> m.Message:
        """A local plan."""
        return m.ProposePlan(self.save(), self.plan(), (b"",) * self._rng.randrange(3))

    def answer_plan(self) -> m.Message:
        """A global plan, for what was proposed last or not."""
        plans = tuple(self.plan() for _ in range(self._rng.choice([1, 1, 1, 1, 0, 2])))
        return m.GlobalPlan(self._proposed or self.save(), plans)

    def submit(self) -> m.Message:
        """A region, whether it was filled or not."""
        ready = self._rng.choice(self._ready) if self._ready else None
        generation = (ready.generation if ready else 0) + self._rng.choice([0, 0, 0, 0, 1, -1])
        lengths = (self._rng.choice([0, 1, 2**16, 2**16 + 1, 2**63]),) * self._rng.choice([0, 0, 1, 2])
        plan_id = self._rng.choice([self._plan_id, self._plan_id, ready.plan_id if ready else "", "no plan"])
        slot = ready.slot if ready else self._rng.randrange(8)
        return m.SubmitShard(self.save(), self._rng.choice([0] * 9 + [1]), plan_id, slot, generation, lengths)

    def grow(self) -> m.Message:
        """More room."""
        capacity = self._rng.choice([0, 1, 2**16, 2**20, 2**49])
        return m.GrowRegion(self._plan_id, self._rng.randrange(3), capacity)

    def example(self) -> m.Message:
        """Any message at all, about a save of mine."""
        message = self._rng.choice([decode(frame) for frame in GOOD_FRAMES])
        if isinstance(message, (m.Hello, m.Goodbye)):
            return m.Heartbeat()
        names = {field.name for field in dataclasses.fields(message)}
        changes: dict[str, Any] = {"save": self.save(), "rank": 0, "plan_id": self._plan_id}
        return dataclasses.replace(message, **{name: changes[name] for name in names & set(changes)})


MOVES: tuple[Callable[[Rogue], m.Message], ...] = (
    Rogue.propose,
    Rogue.propose,
    Rogue.answer_plan,
    Rogue.answer_plan,
    Rogue.submit,
    Rogue.submit,
    Rogue.grow,
    Rogue.example,
    lambda rogue: m.ReportSkip(rogue.save(), ""),
    lambda rogue: m.ReportFailure(rogue.save(), FAILURE),
    lambda rogue: m.DecideCommit(rogue.save(), rogue.session < "8", "\x01" * 1_000),
    lambda rogue: m.AskRestoreStep(0, rogue.session),
)
