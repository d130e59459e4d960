"""A small training job that keeps a record of every save: what a rank did, and what it was told, survives its death.

Every value of its state is a known function of a *mark*, one number per attempt to save a step, so whatever is loaded
tells which attempt it is of, and a checkpoint that mixes two of them shows it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckpt_trainer_client import CheckpointClient, SaveHandle
from testkit.kill_points import KillOrder, arm
from testkit.waiting import wait_until

PATIENCE_S = 20.0
"""How long a client may wait to be welcomed, a rank for the others, and a handle for its end. Far more than a restarted
sidecar needs; less than other waits, so that a rank that hangs says in what."""

STAGE_TIMEOUT_S = 10.0
"""How long a rank may wait for one that has left without a word to the sidecar of now; less than its patience."""

VERSIONS_PER_LIFE = 10
VERSIONS_PER_STEP = 1000
TENSORS = 6


@dataclass(frozen=True)
class Attempt:
    """One call of ``save()`` on all ranks: in which life of the job, of which step, the how manyeth of that step."""

    life: int
    step: int
    again: int = 0

    @property
    def mark(self) -> int:
        """The number from which every saved value is made; floats of 32 bits hold it exactly."""
        return self.step * VERSIONS_PER_STEP + self.life * VERSIONS_PER_LIFE + self.again

    @classmethod
    def of_mark(cls, mark: int) -> Attempt:
        """The attempt that a value is of."""
        step, version = divmod(mark, VERSIONS_PER_STEP)
        return cls(version // VERSIONS_PER_LIFE, step, version % VERSIONS_PER_LIFE)

    def __str__(self) -> str:
        return f"step {self.step}{' again' if self.again else ''} (life {self.life})"


@dataclass(frozen=True)
class Program:
    """What every rank does.

    Attributes:
        directory: of the checkpoints.
        records: folder of the ranks' records.
        last_step: in the first life; a later life saves ``later_steps`` more than it has restored, or, if that is
            None, goes on to the same last step.
        elements: of each shared tensor; a rank's own tensor has ten times as many.
        overlap: begin the next save while the one before is in flight.
        saved_twice: a step that is saved again, over the first, -1 for none.
        vetoed: a step that a pre-commit hook refuses in the first life, -1 for none.
    """

    directory: str
    records: str
    last_step: int = 4
    later_steps: int | None = 2
    elements: int = 20_000
    overlap: bool = False
    saved_twice: int = -1
    vetoed: int = -1

    def attempts(self, life: int, restored: int) -> list[Attempt]:
        """The saves of one life, which has restored step ``restored``."""
        goes_on = life == 0 or self.later_steps is None
        last_step = self.last_step if goes_on else restored + (self.later_steps or 0)
        found = []
        for step in range(restored + 1, last_step + 1):
            found.append(Attempt(life, step))
            if step == self.saved_twice and life == 0:
                found.append(Attempt(life, step, 1))
        return found


def state_of(mark: int, elements: int) -> dict[str, Any]:
    """What all ranks save together; DCP spreads it over them."""
    weights = [torch.full((elements,), float(mark)) for _ in range(TENSORS)]
    return {"weights": weights, "ramp": torch.arange(elements) + mark, "mark": mark, "text": "x" * (mark % 7)}


def own_state_of(mark: int, elements: int, rank: int) -> dict[str, Any]:
    """What one rank saves alone."""
    return {"weight": torch.full((10 * elements,), mark + rank, dtype=torch.int64), "mark": mark}


def marks_in(found: Mapping[str, Any], world_size: int) -> set[int]:
    """The marks that a checkpoint holds, as ``load_flat`` gives it: one, if it is whole.

    Raises:
        KeyError: a part is missing.
        ValueError: a value is none that was ever saved.
    """
    mark = int(found["mark"])
    marks = {mark}
    for index in range(TENSORS):
        marks |= _values(found[f"weights.{index}"])
    marks |= _values(found["ramp"] - torch.arange(len(found["ramp"])))
    for rank in range(world_size):
        own = f"per_rank.rank-{rank}"
        marks |= {value - rank for value in _values(found[f"{own}.weight"])} | {int(found[f"{own}.mark"])}
    if found["text"] != "x" * (mark % 7):
        raise ValueError(f"the text of mark {mark} has {len(found['text'])} characters")
    return marks


def _values(tensor: torch.Tensor) -> set[int]:
    values = tensor.unique().tolist()
    if any(value != int(value) for value in values):
        raise ValueError(f"values that nobody has saved: {values[:5]}")
    return {int(value) for value in values}


@dataclass(frozen=True)
class Entry:
    """One line of a record: ``what`` is started, resumed, begun, staged, committed, failed, late, closed.

    ``steps`` are the committed ones that were seen at ``resumed``, ``attempt`` is then what was restored.
    """

    what: str
    life: int
    rank: int
    attempt: Attempt | None = None
    text: str = ""
    steps: tuple[int, ...] = ()

    def __str__(self) -> str:
        about = str(self.attempt or "") + (f", sees {list(self.steps)}" if self.what == "resumed" else "")
        return f"life {self.life} rank {self.rank}: {self.what} {about} {self.text}".rstrip()


class Record:
    """What a rank writes down; each line is in the page cache before the rank goes on, and outlives it."""

    def __init__(self, folder: str, life: int, rank: int) -> None:
        self._life, self._rank = life, rank
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(Path(folder) / f"life-{life}.rank-{rank}.jsonl", flags, 0o600)

    def write(self, what: str, attempt: Attempt | None = None, text: str = "", steps: tuple[int, ...] = ()) -> None:
        """Add a line, in one write: a reader, or a death, never splits it. Any thread may call."""
        line = {"what": what, "life": self._life, "rank": self._rank, "text": text, "steps": steps}
        os.write(self._fd, json.dumps({**line, "mark": attempt.mark if attempt else None}).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_records(folder: Path, life: int | None = None) -> list[Entry]:
    """Every line of every rank, of one life or of all: lives in order, each rank's lines in theirs."""
    paths = folder.glob(f"life-{'*' if life is None else life}.rank-*.jsonl")
    found = []
    for path in sorted(paths, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)]):
        for line in path.read_text().splitlines():
            said = json.loads(line)
            attempt = None if said["mark"] is None else Attempt.of_mark(said["mark"])
            found.append(Entry(said["what"], said["life"], said["rank"], attempt, said["text"], tuple(said["steps"])))
    return found


def train(program: Program, life: int, order: KillOrder | None) -> None:
    """Rank code: restore the newest step, save the next ones, close."""
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(threadName)s %(message)s")
    record = Record(program.records, life, rank)
    record.write("started", text=str(os.getpid()))
    if order is not None and order.rank == rank:
        arm(order)
    client = CheckpointClient(
        program.directory,
        connect_timeout_s=PATIENCE_S,
        stage_timeout_s=STAGE_TIMEOUT_S,
        pre_commit=[lambda step, where: life > 0 or step != program.vetoed],
        post_commit=[lambda step, where: None],
    )
    restored = _restore(client, program, record, rank)
    _await_all(program, life)
    attempts = program.attempts(life, restored)
    handles = []
    for attempt in attempts:
        handles.append(_save(client, program, record, rank, attempt))
        if not program.overlap:
            _settle(record, attempt, handles[-1])
    for attempt, handle in zip(attempts, handles, strict=True):
        _settle(record, attempt, handle)
    client.close()
    record.write("closed")
    record.close()


def _restore(client: CheckpointClient, program: Program, record: Record, rank: int) -> int:
    step = client.latest()
    if step is None:
        record.write("resumed", steps=tuple(client.steps()))
        return 0
    state, own = state_of(0, program.elements), own_state_of(0, program.elements, rank)
    client.load(state, step, per_rank=own)
    record.write("resumed", Attempt.of_mark(state["mark"]), steps=tuple(client.steps()))
    return step


def _await_all(program: Program, life: int) -> None:
    """Go on when every rank has joined: one that came after another's death would wait for it in vain, as a launcher
    would not let it."""
    world_size = int(os.environ["WORLD_SIZE"])

    def have_resumed() -> bool:
        entries = read_records(Path(program.records), life)
        return len({entry.rank for entry in entries if entry.what == "resumed"}) == world_size

    wait_until(have_resumed, f"every rank of life {life} has resumed", PATIENCE_S)


def _save(client: CheckpointClient, program: Program, record: Record, rank: int, attempt: Attempt) -> SaveHandle:
    record.write("begun", attempt)
    state = state_of(attempt.mark, program.elements)
    own = own_state_of(attempt.mark, program.elements, rank)
    handle = client.save(state, step=attempt.step, overwrite=attempt.again > 0, per_rank=own)
    if handle.staged.exception() is None:
        record.write("staged", attempt)

    def tell(future: Future[str]) -> None:
        error = future.exception()
        record.write("committed" if error is None else "failed", attempt, str(error or ""))

    handle.committed.add_done_callback(tell)
    return handle


def _settle(record: Record, attempt: Attempt, handle: SaveHandle) -> None:
    try:
        handle.committed.exception(PATIENCE_S)
        handle.error()  # counts as having been told, so that close() does not tell it again
    except FutureTimeout:
        record.write("late", attempt, f"not resolved within {PATIENCE_S:g} s")


if __name__ == "__main__":  # under a real launcher
    train(Program(sys.argv[1], sys.argv[2], int(sys.argv[3])), int(sys.argv[4]), None)
