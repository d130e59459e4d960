"""What the sidecar says about itself: the tables and the workers' progress as one record. Touches no storage."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from ckpt_proto.lifecycles import REGION, RegionEvent, RegionState, ShardState, walk
from ckpt_proto.region import free_bytes
from ckpt_proto.status import (
    CheckpointStatus,
    FailureStatus,
    MannersStatus,
    RankStatus,
    ShardStatus,
    SidecarStatus,
    SlotStatus,
)
from ckpt_sidecar.action_runner import ActionRunner
from ckpt_sidecar.attempt import Attempt
from ckpt_sidecar.checkpoint_table import CheckpointTable
from ckpt_sidecar.config import SidecarConfig
from ckpt_sidecar.job_table import JobTable
from ckpt_sidecar.rank_record import RankRecord
from ckpt_sidecar.session import Session
from ckpt_sidecar.shard_job import ShardJob

SHOWN_FAILURES = 8
SHOWN_LATE_RANKS = 20


@dataclass(frozen=True)
class Identity:
    """What does not change while a sidecar lives. Times are monotonic seconds."""

    sidecar_id: str
    node: str
    torch_version: str
    started_s: float


def build_status(
    config: SidecarConfig,
    identity: Identity,
    jobs: JobTable,
    checkpoints: CheckpointTable,
    runner: ActionRunner,
    now_s: float,
    links: tuple[str, ...] = (),
    manners: MannersStatus | None = None,
) -> SidecarStatus:
    """The answer to AskStatus. Called on the daemon's main thread; touches no storage."""
    counters = checkpoints.counters
    committed_s = counters.last_committed_s
    session = checkpoints.session
    attempts = list(checkpoints.attempts.values())
    return SidecarStatus(
        sidecar_id=identity.sidecar_id,
        job_id=config.job_id,
        node=identity.node,
        pid=os.getpid(),
        uptime_s=now_s - identity.started_s,
        draining=jobs.draining,
        directory=session.directory if session else "",
        world_size=session.world_size if session else 0,
        shm_root=str(config.shm_root),
        shm_used_bytes=_used_bytes(jobs),
        shm_free_bytes=free_bytes(config.shm_root),
        written_bytes=jobs.shards.written_bytes + _bytes_under_way(runner),
        last_committed_step=counters.last_committed_step,
        last_committed_age_s=None if committed_s is None else now_s - committed_s,
        committed_count=counters.committed,
        failed_count=counters.failed,
        skipped_count=counters.skipped,
        consecutive_failures=counters.consecutive_failures,
        ranks=tuple(_rank_status(rank, record) for rank, record in sorted(jobs.ranks.items())),
        shards=tuple(_shard_status(rank, job, runner, now_s) for (rank, _), job in jobs.jobs.items()),
        checkpoints=tuple(_checkpoint_status(attempt, session, now_s) for attempt in attempts),
        failures=tuple(
            _failure_status(attempt, now_s)
            for attempt in attempts
            if attempt.failures and not attempt.skipped and not attempt.save.is_preparation
        )[-SHOWN_FAILURES:],
        torch_ready=runner.torch_ready,
        torch_version=identity.torch_version,
        links=links,
        manners=manners or MannersStatus(),
    )


def _bytes_under_way(runner: ActionRunner) -> int:
    return sum(progress.written_bytes for progress in list(runner.progress.values()))


def _used_bytes(jobs: JobTable) -> int:
    return sum(slot.ready.region_bytes for record in jobs.ranks.values() for slot in record.slots if slot.ready)


def _rank_status(rank: int, record: RankRecord) -> RankStatus:
    slots = []
    for index, slot in enumerate(record.slots):
        orphaned = not record.alive and slot.state is not RegionState.FREE
        state = walk(REGION, slot.state, RegionEvent.OWNER_DIED) if orphaned else slot.state
        slots.append(SlotStatus(index, state.value, slot.ready.region_bytes if slot.ready else 0))
    return RankStatus(rank, record.hello.pid, record.alive, tuple(slots))


def _shard_status(rank: int, job: ShardJob, runner: ActionRunner, now_s: float) -> ShardStatus:
    progress = runner.progress.get((rank, job.submit.save))
    done = job.state is ShardState.PERSISTED
    return ShardStatus(
        rank=rank,
        step=job.submit.save.step,
        save_id=job.submit.save.save_id,
        state=job.state.value,
        written_bytes=progress.written_bytes if progress else job.nbytes if done else 0,
        total_bytes=progress.total_bytes if progress else job.nbytes,
        age_s=now_s - job.queued_s,
        idle_s=now_s - progress.moved_s if progress else 0.0,
    )


def _checkpoint_status(attempt: Attempt, session: Session | None, now_s: float) -> CheckpointStatus:
    names = session.name if session and session.token == attempt.save.session else "rank {}".format
    return CheckpointStatus(
        step=attempt.save.step,
        save_id=attempt.save.save_id,
        state=attempt.state.value,
        staged_ranks=len(attempt.staged),
        persisted_ranks=len(attempt.persisted),
        world_size=attempt.world_size,
        age_s=now_s - attempt.opened_s,
        late=tuple(_late(attempt, names)) if attempt.is_open else (),
        story=tuple(attempt.story),
    )


def _late(attempt: Attempt, name: Callable[[int], str]) -> list[str]:
    if attempt.unstaged_ranks:
        return [f"{name(rank)} has not staged" for rank in attempt.awaited_ranks[:SHOWN_LATE_RANKS]]
    if attempt.unpersisted_ranks:
        return [f"{name(rank)} has not persisted" for rank in attempt.unpersisted_ranks[:SHOWN_LATE_RANKS]]
    return ["the coordinator is publishing" if attempt.publishing else f"{name(0)} has not decided on the commit"]


def _failure_status(attempt: Attempt, now_s: float) -> FailureStatus:
    return FailureStatus(attempt.save.step, attempt.save.save_id, now_s - (attempt.ended_s or now_s), attempt.failures)
