"""What a probe makes of a status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_proto.errors import FailureReport
from ckpt_proto.status import FailureStatus, RankStatus, ShardStatus, SidecarStatus
from ckpt_sidecar.health import STUCK_S, degradations

HEALTHY = SidecarStatus(
    sidecar_id="0123456789abcdef",
    job_id="job",
    node="node-a",
    pid=7,
    uptime_s=10.0,
    draining=False,
    directory="/checkpoints",
    world_size=2,
    shm_root="/dev/shm",
    shm_used_bytes=0,
    shm_free_bytes=1 << 30,
    written_bytes=0,
    last_committed_step=None,
    last_committed_age_s=None,
    committed_count=0,
    failed_count=0,
    skipped_count=0,
    consecutive_failures=0,
    ranks=(),
    shards=(),
    checkpoints=(),
    failures=(),
    torch_ready=True,
    torch_version="2.13.0",
)


def shard(state: str = "writing", idle_s: float = 0.0, rank: int = 0) -> ShardStatus:
    return ShardStatus(rank, 300, "0a1b2c3d-3", state, 5, 90, 100.0, idle_s)


def rank_of(rank: int, *, alive: bool) -> RankStatus:
    return RankStatus(rank, 100 + rank, alive, ())


def failure(step: int, *reports: str) -> FailureStatus:
    return FailureStatus(step, "0a1b2c3d-3", 1.0, tuple(FailureReport("StorageError", text) for text in reports))


HEALTHY_CHANGES: dict[str, dict[str, Any]] = {
    "no rank yet": {},
    "torch is being imported": {"torch_ready": False},
    "ranks are alive": {"ranks": (rank_of(0, alive=True), rank_of(1, alive=True))},
    "every rank is gone, as after a job": {"ranks": (rank_of(0, alive=False), rank_of(1, alive=False))},
    "writing and moving": {"shards": (shard(idle_s=STUCK_S),)},
    "queued for long": {"shards": (shard("queued", idle_s=1000.0),)},
    "ended long ago": {"shards": tuple(shard(s, idle_s=1000.0) for s in ("persisted", "failed", "cancelled"))},
    "failed, then succeeded": {"failed_count": 3, "failures": (failure(1, "x"),), "committed_count": 1},
    "skipped": {"skipped_count": 5},
}


@pytest.mark.parametrize("what", HEALTHY_CHANGES)
def test_healthy(what: str) -> None:
    assert degradations(replace(HEALTHY, **HEALTHY_CHANGES[what])) == []


def test_failures_in_a_row_name_the_newest_step_and_its_reasons() -> None:
    status = replace(
        HEALTHY, consecutive_failures=2, failures=(failure(100, "old"), failure(200, "one", "two", "three", "four"))
    )
    [reason] = degradations(status)
    assert reason == (
        "the last 2 save(s) failed, newest step 200: sidecar: one [StorageError]; sidecar: two [StorageError]; "
        "sidecar: three [StorageError]"
    )


def test_a_write_that_does_not_move_is_named_with_its_numbers() -> None:
    status = replace(HEALTHY, shards=(shard(idle_s=61.0, rank=5), shard(idle_s=1.0)))
    assert degradations(status) == ["rank 5's shard of step 300 has moved no byte for 61 s (5 of 90 written)"]


def test_ranks_that_are_gone_while_others_live_are_named() -> None:
    status = replace(HEALTHY, ranks=tuple(rank_of(rank, alive=rank == 2) for rank in range(4)))
    assert degradations(status) == ["ranks [0, 1, 3] are gone while others live"]


def test_draining_is_said() -> None:
    assert degradations(replace(HEALTHY, draining=True)) == ["draining: no new clients are taken"]


def test_the_most_serious_comes_first() -> None:
    status = replace(
        HEALTHY,
        draining=True,
        ranks=(rank_of(0, alive=True), rank_of(1, alive=False)),
        shards=(shard(idle_s=100.0),),
        consecutive_failures=1,
        failures=(failure(1, "x"),),
    )
    assert [reason.split()[0] for reason in degradations(status)] == ["the", "rank", "ranks", "draining:"]
