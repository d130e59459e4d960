"""What is left of a job whose processes were killed, judged from the ranks' records, the storage and shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ckpt_proto.checkpoint_layout import METADATA_NAME, step_of
from testkit.training import Attempt, Entry, marks_in

Load = Callable[[Sequence[str]], Mapping[str, Any]]

KINDS: Final = {
    "torn": "a visible checkpoint does not load, or holds values of other attempts",
    "lost": "every rank had staged an attempt, no hook refused it, and it is not committed",
    "claimed": "a rank was told that an attempt is committed, and it is not",
    "denied": "a rank was told that an attempt has failed, and it is committed",
    "split": "ranks were told different ends of one attempt",
    "hung": "a rank was not told the end of an attempt in time, or no reason for its failure",
    "astray": "a restarted job restored another step than the newest committed one",
    "leaked": "something is left in shared memory, or runs",
    "littered": "something on storage belongs to no committed checkpoint",
    "unclean": "a process ended otherwise than it should",
}

A_KILLED_SIDECAR_MAY: Final = frozenset({"littered"})
"""Problems that are allowed of what was in flight when a sidecar was killed: files of an attempt that was given up
while nobody was there to remove them stay until they are old."""


@dataclass(frozen=True)
class Problem:
    """Something that must not be, of one of :data:`KINDS`; ``attempt`` is the save that it is about, if any."""

    kind: str
    text: str
    attempt: Attempt | None = None

    def __str__(self) -> str:
        about = f" {self.attempt}" if self.attempt else ""
        return f"{self.kind}{about}: {KINDS[self.kind]}. {self.text}"


@dataclass(frozen=True)
class Outcome:
    """The end of a job.

    Attributes:
        committed: attempts that can be restored, or could be until a later one replaced them.
        failed: all other attempts.
        problems: what must not be.
    """

    committed: frozenset[Attempt]
    failed: frozenset[Attempt]
    problems: tuple[Problem, ...]

    def unexpected(self, allowed: AbstractSet[str], in_flight: AbstractSet[Attempt]) -> list[str]:
        """The problems that are not of an ``allowed`` kind and of a save that was ``in_flight``, or of no save."""
        return [
            str(problem)
            for problem in self.problems
            if problem.kind not in allowed or (problem.attempt is not None and problem.attempt not in in_flight)
        ]

    def __str__(self) -> str:
        committed = ", ".join(map(str, in_order(self.committed)))
        failed = ", ".join(map(str, in_order(self.failed)))
        return "\n".join([f"committed: {committed}", f"failed: {failed}", *map(str, self.problems)])


def in_order(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Attempts in the order in which they were made."""
    return sorted(attempts, key=lambda attempt: (attempt.life, attempt.step, attempt.again))


def judge(
    directory: Path,
    records: Sequence[Entry],
    world_size: int,
    load: Load,
    *,
    vetoed: int = -1,
    found: Sequence[Problem] = (),
) -> Outcome:
    """The outcome of a job that has ended. ``load`` is ``load_each`` on a rank that has nothing but PyTorch.

    ``vetoed`` is the step that a hook refused in the first life, ``found`` are problems that the caller has seen.
    """
    stored, torn = _stored(directory, world_size, load)
    book = _Book(records)
    committed = frozenset(attempt for attempt in book.begun if _is_or_was_committed(attempt, stored, book))
    problems = [*found, *torn, *_astray(book, committed), *(Problem("littered", path) for path in litter(directory))]
    for attempt in book.begun:
        refused = attempt.life == 0 and attempt.step == vetoed
        problems += book.problems_of(attempt, world_size, is_committed=attempt in committed, refused=refused)
    return Outcome(committed, frozenset(book.begun) - committed, tuple(problems))


class _Book:
    """The records by attempt."""

    def __init__(self, records: Sequence[Entry]) -> None:
        self.records = records
        self.by_attempt: dict[Attempt, list[Entry]] = {}
        for entry in records:
            if entry.attempt is not None and entry.what != "resumed":
                self.by_attempt.setdefault(entry.attempt, []).append(entry)
        self.begun = in_order(self.by_attempt)
        self._closed = {(entry.life, entry.rank) for entry in records if entry.what == "closed"}

    def ranks(self, attempt: Attempt, what: str) -> list[int]:
        """The ranks that have written this of an attempt, once per line."""
        return [entry.rank for entry in self.by_attempt[attempt] if entry.what == what]

    def problems_of(self, attempt: Attempt, world_size: int, *, is_committed: bool, refused: bool) -> list[Problem]:
        """What is wrong with one attempt."""
        ends = [entry for entry in self.by_attempt[attempt] if entry.what in ("committed", "failed", "late")]
        told = "; ".join(f"rank {end.rank} {end.what} {end.text}".rstrip() for end in ends) or "nobody was told"
        committed, failed = self.ranks(attempt, "committed"), self.ranks(attempt, "failed")
        kinds = []
        if not is_committed and not refused and set(self.ranks(attempt, "staged")) == set(range(world_size)):
            kinds.append("lost")
        if not is_committed and committed:
            kinds.append("claimed")
        if is_committed and failed:
            kinds.append("denied")
        if committed and failed:
            kinds.append("split")
        lived = [rank for rank in self.ranks(attempt, "begun") if (attempt.life, rank) in self._closed]
        if any((committed + failed).count(rank) != 1 for rank in lived) or self.ranks(attempt, "late"):
            kinds.append("hung")
        if any(end.what == "failed" and not end.text for end in ends):
            kinds.append("hung")
        return [Problem(kind, told, attempt) for kind in kinds]


def _is_or_was_committed(attempt: Attempt, stored: Mapping[int, Attempt], book: _Book) -> bool:
    now = stored.get(attempt.step)
    if now is None or now.life != attempt.life or now.again < attempt.again:
        return False
    return now.again == attempt.again or bool(book.ranks(attempt, "committed"))


def _astray(book: _Book, committed: frozenset[Attempt]) -> list[Problem]:
    found = []
    for entry in book.records:
        if entry.what == "resumed":
            newest = max((attempt.step for attempt in committed if attempt.life < entry.life), default=None)
            step = entry.attempt.step if entry.attempt else None
            if step != newest or (entry.attempt is not None and entry.attempt not in committed):
                found.append(Problem("astray", f"{entry}; the newest committed step was {newest}"))
    return found


def _stored(directory: Path, world_size: int, load: Load) -> tuple[dict[int, Attempt], list[Problem]]:
    """Which attempt each visible checkpoint is of, and what is wrong with those that are of none."""
    visible = {step_of(path.parent.name): str(path.parent) for path in directory.glob(f"step-*/{METADATA_NAME}")}
    loaded = load(sorted(visible.values()))
    stored, torn = {}, []
    for step, where in visible.items():
        marks, why = _marks(loaded[where], world_size)
        attempts = [Attempt.of_mark(mark) for mark in marks]
        if step is not None and not why and [attempt.step for attempt in attempts] == [step]:
            stored[step] = attempts[0]
        else:
            torn.append(Problem("torn", f"{where} holds {', '.join(map(str, in_order(attempts)))} {why}"))
    return stored, torn


def _marks(found: Mapping[str, Any] | str, world_size: int) -> tuple[set[int], str]:
    if isinstance(found, str):
        return set(), found
    try:
        return marks_in(found, world_size), ""
    except (KeyError, ValueError) as error:
        return set(), f"{type(error).__name__}: {error}"


def litter(directory: Path) -> list[str]:
    """Whatever lies in a checkpoint directory and is neither ``.metadata``, nor a file that one names, nor the shard
    manifest of such a file; one text per step."""
    from torch.distributed.checkpoint import FileSystemReader

    found = []
    for step in sorted(directory.iterdir()):
        wanted: set[str] = set()
        if step_of(step.name) is not None and (step / METADATA_NAME).exists():
            named = {info.relative_path for info in FileSystemReader(step).read_metadata().storage_data.values()}
            wanted = {METADATA_NAME, *named, *(str(Path(name).with_suffix(".manifest")) for name in named)}
        left = sorted(path.name for path in step.iterdir() if path.name not in wanted) if step.is_dir() else []
        if left or not wanted:
            found.append(f"{step} holds {', '.join(left) or 'nothing'}")
    return found
