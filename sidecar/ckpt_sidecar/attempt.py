"""One attempt to save one step, as the coordinator sees it. Pure data with its story."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_proto.lifecycles import CHECKPOINT, CheckpointEvent, CheckpointState, walk
from ckpt_proto.messages import ProposePlan

MAX_STORY = 40


@dataclass
class Attempt:
    """An attempt. ``asked_s`` is when rank 0 was asked to commit; ``publishing`` while a worker publishes.

    ``keys`` holds the key under which each rank called ``save()``: they differ only if the ranks disagree on the step.
    """

    save: SaveKey
    world_size: int
    directory: str
    stage_timeout_s: float
    opened_s: float
    state: CheckpointState = CheckpointState.OPEN
    keys: dict[int, SaveKey] = field(default_factory=dict)
    proposals: dict[int, ProposePlan] = field(default_factory=dict)
    planned: bool = False
    plan_id: str = ""
    overwrite: bool = False
    staged: set[int] = field(default_factory=set)
    persisted: set[int] = field(default_factory=set)
    failures: tuple[FailureReport, ...] = ()
    skipped: bool = False
    asked_s: float | None = None
    publishing: bool = False
    ended_s: float | None = None
    story: list[str] = field(default_factory=list)

    def walk(self, event: CheckpointEvent) -> None:
        """One step of the checkpoint's lifecycle."""
        self.state = walk(CHECKPOINT, self.state, event)

    def tell(self, now_s: float, line: str) -> None:
        """Add to the story; the middle of a long one is dropped."""
        if len(self.story) >= MAX_STORY:
            del self.story[MAX_STORY // 2]
        self.story.append(f"+{now_s - self.opened_s:.3f}s {line}")

    @property
    def is_open(self) -> bool:
        """Neither committed nor aborted yet."""
        return self.state in (CheckpointState.OPEN, CheckpointState.COMPLETE)

    @property
    def silent_ranks(self) -> list[int]:
        """Ranks that have not called ``save()`` for this attempt."""
        return [rank for rank in range(self.world_size) if rank not in self.keys]

    @property
    def unstaged_ranks(self) -> list[int]:
        """Ranks whose region is not sealed."""
        return [rank for rank in range(self.world_size) if rank not in self.staged]

    @property
    def unpersisted_ranks(self) -> list[int]:
        """Ranks whose data file is not durable."""
        return [rank for rank in range(self.world_size) if rank not in self.persisted]
