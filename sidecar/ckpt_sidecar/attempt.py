"""One attempt to save one step, as the coordinator sees it. Pure data with its story and its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey, step_text
from ckpt_proto.lifecycles import CHECKPOINT, CheckpointEvent, CheckpointState, walk
from ckpt_proto.messages import Aborted, ProposePlan

MAX_STORY = 40

DECIDE_TIMEOUT_S: Final = 600.0
"""How long rank 0's pre-commit hooks may take before the attempt is given up."""

PERSIST_TIMEOUT_S: Final = 7200.0
"""How long staged shards may take to become durable; the same bound as the longest among peers."""

LIST_ADOPTED_S: Final = 2.0
LIST_SILENT_S: Final = 15.0
"""Without news for so long, storage is looked at for durable shards of an attempt. Every rank of a session tells us of
its own, so that is rarely needed; of a session that was taken up, nobody may be left to tell."""

LISTING_S: Final = 30.0
"""Longest wait for storage to say which shards are durable, before a silent node ends an attempt all the same."""

RETURN_S: Final = 30.0
"""How long rank 0's client may take to come back to a restarted coordinator before that commits alone."""


@dataclass
class Attempt:
    """An attempt. ``asked_s`` is when rank 0 was asked to commit; ``approved`` is by whom the commit was
    ordered; ``publishing_s`` since when a worker publishes it.

    ``adopted``: its session is older than this coordinator, so that ranks may have persisted, or failed, without our
    knowledge. ``news_s`` is when a rank said something new, ``listed_s`` when storage was last looked at for shards,
    ``is_listing`` while that goes on, ``silence_listed`` if it was done because a node is silent.
    ``publish_failed_s`` when publishing failed first.
    ``withdrawing_s`` since when it is being made incomplete on storage, before ``failures`` are told; ``files_stay`` if
    it was given up although it may still appear.
    ``keys`` holds the key under which each rank called ``save()``: they differ only if the ranks disagree on the step.
    ``replan``: an aborted attempt whose ranks must forget their plan.
    ``doomed``: it was taken up, and ``failures`` abort it unless storage says that it is published.
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
    replan: bool = False
    doomed: bool = False
    asked_s: float | None = None
    approved: str = ""
    publishing_s: float | None = None
    ended_s: float | None = None
    adopted: bool = False
    news_s: float = 0.0
    listed_s: float | None = None
    is_listing: bool = False
    silence_listed: bool = False
    publish_failed_s: float | None = None
    withdrawing_s: float | None = None
    files_stay: bool = False
    story: list[str] = field(default_factory=list)

    def walk(self, event: CheckpointEvent) -> None:
        """One step of the checkpoint's lifecycle."""
        self.state = walk(CHECKPOINT, self.state, event)

    def tell(self, now_s: float, line: str) -> None:
        """Add to the story; the middle of a long one is dropped."""
        self.news_s = now_s
        if len(self.story) >= MAX_STORY:
            del self.story[MAX_STORY // 2]
        self.story.append(f"+{now_s - self.opened_s:.3f}s {line}")

    @property
    def publishing(self) -> bool:
        """Whether a worker publishes it."""
        return self.publishing_s is not None

    @property
    def is_open(self) -> bool:
        """Neither committed nor aborted yet."""
        return self.state in (CheckpointState.OPEN, CheckpointState.COMPLETE)

    @property
    def target(self) -> tuple[str, int]:
        """What is replaced when this attempt is published: directory and step."""
        return self.directory, self.save.step

    @property
    def unstaged_ranks(self) -> list[int]:
        """Ranks whose region is not sealed."""
        return [rank for rank in range(self.world_size) if rank not in self.staged]

    @property
    def awaited_ranks(self) -> list[int]:
        """Unstaged ranks that it is up to: while plans are collected, not those that have proposed theirs and wait."""
        waiting = self.proposals if len(self.proposals) < self.world_size else {}
        return [rank for rank in self.unstaged_ranks if rank not in waiting]

    @property
    def unpersisted_ranks(self) -> list[int]:
        """Ranks whose data file is not durable."""
        return [rank for rank in range(self.world_size) if rank not in self.persisted]

    def aborted_for(self, rank: int) -> Aborted:
        """What a rank is told about this aborted attempt, under the key that it used itself."""
        return Aborted(self.keys.get(rank, self.save), self.failures, self.skipped, self.replan, self.files_stay)

    def must_be_listed(self, now_s: float) -> bool:
        """Whether to look on storage for shards whose ranks have said nothing: storage is the ledger, messages are only
        quicker."""
        if self.withdrawing_s is not None:
            return False
        if not self.doomed and (self.state is not CheckpointState.OPEN or not self.unpersisted_ranks):
            return False
        patience_s = LIST_ADOPTED_S if self.adopted else LIST_SILENT_S
        return now_s - max(self.news_s, self.listed_s or 0.0) >= patience_s

    def is_left_alone(self, now_s: float) -> bool:
        """Whether the question to commit has had no answer for so long that rank 0's client will not come back."""
        if not self.adopted or self.approved or self.doomed or self.state is not CheckpointState.COMPLETE:
            return False
        return self.asked_s is not None and now_s - self.asked_s >= RETURN_S

    def overdue(self, now_s: float) -> list[tuple[int, str]]:
        """Ranks that are late and what each has not done; empty while nobody is."""
        age_s, step = now_s - self.opened_s, step_text(self.save.step)
        if not self.is_open or self.approved or self.doomed:
            return []
        if self.unstaged_ranks and age_s > self.stage_timeout_s:
            return [(rank, f"has not staged {step} after {age_s:.0f} s") for rank in self.awaited_ranks]
        if self.state is CheckpointState.OPEN and age_s > PERSIST_TIMEOUT_S:
            return [(rank, f"has not persisted {step} after {age_s:.0f} s") for rank in self.unpersisted_ranks]
        if self.asked_s is not None and now_s - self.asked_s > DECIDE_TIMEOUT_S:
            return [(0, f"has not decided on the commit of {step} after {now_s - self.asked_s:.0f} s")]
        return []
