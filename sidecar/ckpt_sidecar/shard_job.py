"""One rank's part of one attempt, and all of them that a node remembers. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_proto.lifecycles import SHARD, ShardEvent, ShardState, is_terminal, walk
from ckpt_proto.messages import ShardStaged, SubmitShard
from ckpt_sidecar.actions import WriteShard

MAX_ENDED_JOBS: Final = 64
"""Ended shard jobs kept for ``status``, late messages and diagnosis."""

FIRST_RETRY_S: Final = 0.5
LONGEST_RETRY_S: Final = 8.0
"""How long to wait before a failed write is tried again: twice as long each time, up to this."""


@dataclass
class ShardJob:
    """One rank's part of one attempt. ``order`` is None if it was found on storage, written by an earlier sidecar.

    ``failed_s`` is when its first try failed; ``tries`` counts them. ``aborted`` and ``committed`` are how its attempt
    has ended, as far as this node knows; ``failure`` is why it failed itself. ``looked_s`` is when it was last looked
    for its commit on storage, ``looking`` whether the answer is still to come, ``in_doubt`` whether the rank was told
    that nobody here knows the end.
    """

    submit: SubmitShard
    directory: str
    state: ShardState
    queued_s: float
    aborted: bool = False
    committed: bool = False
    failure: FailureReport | None = None
    nbytes: int = 0
    order: WriteShard | None = None
    world_size: int = 0
    tries: int = 0
    failed_s: float | None = None
    looked_s: float = -math.inf
    looking: bool = False
    in_doubt: bool = False

    @classmethod
    def queued(cls, order: WriteShard, now_s: float) -> ShardJob:
        """A job whose write is ordered now."""
        return cls(order.submit, order.directory, ShardState.QUEUED, now_s, order=order, world_size=order.world_size)

    @property
    def is_ended(self) -> bool:
        """Durable, failed or cancelled: nobody works on it."""
        return is_terminal(SHARD, self.state)

    @property
    def settled(self) -> bool:
        """Whether this node has heard how the attempt has ended."""
        return self.aborted or self.committed

    @property
    def is_persisted(self) -> bool:
        """Durable, and wanted."""
        return self.state is ShardState.PERSISTED and not self.aborted

    def walk(self, event: ShardEvent) -> None:
        """One step of the shard job's lifecycle."""
        self.state = walk(SHARD, self.state, event)

    def staged(self) -> ShardStaged:
        """What the coordinator is told of it."""
        submit = self.submit
        return ShardStaged(submit.save, submit.rank, submit.plan_id, submit.overwrite, self.world_size, self.directory)

    def next_try(self, now_s: float, patience_s: float) -> WriteShard | None:
        """The write to order again after a failure that may pass, or None if it was tried for long enough."""
        if self.order is None:
            return None
        self.failed_s = now_s if self.failed_s is None else self.failed_s
        delay_s = min(FIRST_RETRY_S * 2**self.tries, LONGEST_RETRY_S)
        if now_s + delay_s > self.failed_s + patience_s:
            return None
        self.tries += 1
        return replace(self.order, delay_s=delay_s)


class ShardBook(dict[tuple[int, SaveKey], ShardJob]):
    """The jobs of a node by rank and save. Ended ones are forgotten, oldest first, but never begun again."""

    def __init__(self) -> None:
        super().__init__()
        self._forgotten: dict[tuple[int, str], int] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a job has not ended."""
        return any(not job.is_ended for job in self.values())

    def is_forgotten(self, rank: int, save: SaveKey) -> bool:
        """Whether the job has ended so long ago that it is not kept."""
        return save.seq <= self._forgotten.get((rank, save.session), -1)

    def add(self, job: ShardJob) -> None:
        """Remember a new job."""
        ended = [key for key, other in self.items() if other.is_ended]
        for rank, save in ended[: max(0, len(ended) - MAX_ENDED_JOBS)]:
            del self[rank, save]
            session = (rank, save.session)
            self._forgotten[session] = max(save.seq, self._forgotten.get(session, -1))
        self[job.submit.rank, job.submit.save] = job

    def unknown_to(self, rank: int, session: str, next_seq: int, in_flight: tuple[int, ...]) -> list[ShardJob]:
        """Jobs under way of saves that the rank's client knows to have ended: an earlier sidecar told it so."""
        return [
            job
            for (of_rank, save), job in self.items()
            if of_rank == rank
            and save.session == session
            and not (job.is_ended or job.aborted)
            and save.seq < next_seq
            and save.seq not in in_flight
        ]
