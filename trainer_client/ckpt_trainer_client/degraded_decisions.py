"""What to do about a save while no sidecar runs, as far as the ledger on storage tells. Pure.

Every rank decides for itself, and all come to the same: a save counts when, and only when, ``.metadata`` names it. Only
rank 0 publishes, and only what is complete; whoever gives up takes its own part back first, so that it never will be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from ckpt_proto.errors import FailureReport

WITHDRAWN_S: Final = 10.0
"""How long a rank that has taken its part back looks whether rank 0, on another node, was publishing just then."""

GIVE_UP_S: Final = 60.0
"""How long taking a part back is tried; then the save fails all the same."""

SETTLE_S: Final = 10.0
"""How long rank 0 waits with a complete save that was in flight when the sidecar was lost. Some rank may have been told
that the save has failed, and others not: those who know it take their part back in this time."""

MAX_NAMED: Final = 20

IN_DOUBT: Final = "this rank's part could not be taken back: it may still be committed, and is whole then"


class Move(Enum):
    """The next step for a save."""

    WAIT = "wait"
    COMMITTED = "committed"
    PUBLISH = "publish"
    WITHDRAW = "withdraw"
    FAIL = "fail"


@dataclass(frozen=True)
class Ledger:
    """What storage says of an attempt: whether it is published, and which ranks have a durable shard, as far as looked
    for (rank 0 looks for all, the others for rank 0's and their own). ``trouble`` is why it says nothing."""

    published: bool
    durable: frozenset[int]
    trouble: str = ""


@dataclass
class Progress:
    """How far a save has come here. Times are in seconds, of one clock.

    Attributes:
        since_s: when this rank began to wait for it; ``overdue_s`` how long it does.
        seen_first: rank 0's shard was durable once.
        accepted: rank 0's pre-commit hooks have agreed.
        failures: why it is given up; empty while it is not.
        giving_up_s: since when this rank tries to take its part back; ``withdrawn_s`` when that was done.
        settle_s: how long rank 0 leaves it alone from ``complete_s`` on, when it has first seen it complete.
    """

    since_s: float
    overdue_s: float
    settle_s: float = 0.0
    complete_s: float | None = None
    seen_first: bool = False
    accepted: bool = False
    failures: tuple[FailureReport, ...] = ()
    giving_up_s: float | None = None
    withdrawn_s: float | None = None

    def is_settled(self, now_s: float) -> bool:
        """Whether whoever knows that it has failed has had the time to take its part back."""
        return self.complete_s is not None and now_s - self.complete_s >= self.settle_s

    def failures_told(self) -> tuple[FailureReport, ...]:
        """Why it has failed, and whether that is certain."""
        if self.withdrawn_s is not None:
            return self.failures
        return tuple(replace(each, hint="; ".join(filter(None, (each.hint, IN_DOUBT)))) for each in self.failures)

    def is_overdue(self, now_s: float) -> bool:
        """Whether it has been waited for long enough."""
        return now_s - self.since_s > self.overdue_s


def next_move(rank: int, world_size: int, progress: Progress, ledger: Ledger, now_s: float) -> Move:
    """What this rank does next about a save."""
    if ledger.published:
        return Move.COMMITTED
    if progress.withdrawn_s is not None:
        grace_s = 0.0 if rank == 0 else WITHDRAWN_S
        return Move.FAIL if now_s - progress.withdrawn_s >= grace_s else Move.WAIT
    if progress.giving_up_s is not None and now_s - progress.giving_up_s > GIVE_UP_S:
        return Move.FAIL
    if progress.failures:
        return Move.WITHDRAW
    is_complete = len(ledger.durable) == world_size
    if rank == 0 and progress.accepted and is_complete and progress.is_settled(now_s):
        return Move.PUBLISH
    return Move.WAIT


def given_up_by_first(rank: int, step: int, progress: Progress, ledger: Ledger) -> tuple[FailureReport, ...]:
    """The failure of a save whose shard of rank 0 was durable and is not there any more; empty if it is not so."""
    if rank == 0 or not progress.seen_first or 0 in ledger.durable or ledger.trouble:
        return ()
    text = f"rank 0 has taken its shard of step {step} back: it has given that up, or a later save has replaced it"
    return (FailureReport("CommitRefused", text, "see the log of rank 0", 0),)


def region_gone(step: int, path: str) -> tuple[FailureReport, ...]:
    """The failure of a save whose region has been removed before it was written."""
    text = (
        f"what was staged for step {step} is gone: {path} has been removed, as a sidecar does that ends in good order"
    )
    return (FailureReport("RegionError", text, "start a sidecar for the job again"),)


def hung(save_step: int, waited_s: float) -> FailureReport:
    """The failure, in doubt, of a save whose storage does not answer."""
    text = f"step {save_step}: the storage has not answered for {waited_s:.0f} s, and no sidecar runs here"
    return FailureReport("PublishStalled", text, "does the storage hang? it may still be committed, and is whole then")


def late(step: int, missing: Sequence[int], ledger: Ledger, waited_s: float, trouble: str) -> tuple[FailureReport, ...]:
    """Why a save is overdue: who has no durable shard; if nobody, rank 0 has not committed. ``trouble`` is what this
    rank met itself."""
    hint = trouble or "is the rank alive, and has it a sidecar or the policy no_sidecar='degraded' too?"
    if ledger.trouble:
        text = f"step {step}: the storage cannot be looked at: {ledger.trouble}"
        return (FailureReport("StorageError", text, hint),)
    if missing:
        text = f"has no durable shard of step {step} after {waited_s:.0f} s, and no sidecar runs here"
        return tuple(FailureReport("RankLate", f"rank {rank} {text}", hint, rank) for rank in missing[:MAX_NAMED])
    text = f"rank 0 has not committed step {step} after {waited_s:.0f} s, and no sidecar runs here"
    return (FailureReport("RankLate", text, hint, 0),)
