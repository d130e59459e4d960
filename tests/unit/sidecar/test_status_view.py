"""A status as text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_proto.errors import FailureReport
from ckpt_proto.status import (
    CheckpointStatus,
    FailureStatus,
    MannersStatus,
    RankStatus,
    ShardStatus,
    SidecarStatus,
    SlotStatus,
)
from ckpt_sidecar.status_view import describe, describe_pending, readable_bytes

QUIET = SidecarStatus(
    sidecar_id="0123456789abcdef",
    job_id="job",
    node="node-a",
    pid=7,
    uptime_s=12.4,
    draining=False,
    directory="",
    world_size=0,
    shm_root="/dev/shm",
    shm_used_bytes=0,
    shm_free_bytes=3 << 30,
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
    torch_ready=False,
    torch_version="2.13.0",
)
GIB = 1 << 30


def shard(state: str, written: int, total: int, rank: int = 0) -> ShardStatus:
    return ShardStatus(rank, 300, "0a1b2c3d-3", state, written, total, 2.5, 0.0)


def attempt(state: str, staged: int, persisted: int, step: int = 300, late: tuple[str, ...] = ()) -> CheckpointStatus:
    return CheckpointStatus(step, "0a1b2c3d-3", state, staged, persisted, 4, 9.0, late)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 40, "1.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_sizes_are_readable(nbytes: int, text: str) -> None:
    assert readable_bytes(nbytes) == text


# ---------------------------------------------------------------- one line


PENDING: list[tuple[dict[str, Any], str]] = [
    ({}, "nothing is under way"),
    ({"shards": (shard("persisted", 5, 5),), "checkpoints": (attempt("committed", 4, 4),)}, "nothing is under way"),
    ({"checkpoints": (attempt("open", 4, 3),)}, "step 300: 3 of 4 ranks persisted"),
    ({"checkpoints": (attempt("complete", 4, 4),)}, "step 300: 4 of 4 ranks persisted"),
    (
        {"shards": (shard("writing", GIB, 4 * GIB), shard("queued", 0, 0), shard("failed", 1, 9))},
        "2 shard(s), 1.0 GiB of 4.0 GiB written",
    ),
    (
        {
            "shards": (shard("writing", 0, 1024),),
            "checkpoints": (attempt("open", 1, 0), attempt("aborted", 1, 0, 1), attempt("open", 0, 0, 301)),
        },
        "step 300: 0 of 4 ranks persisted; step 301: 0 of 4 ranks persisted; 1 shard(s), 0 B of 1.0 KiB written",
    ),
]


@pytest.mark.parametrize(("changes", "line"), PENDING)
def test_what_is_under_way_is_one_line(changes: dict[str, Any], line: str) -> None:
    assert describe_pending(replace(QUIET, **changes)) == line


# ---------------------------------------------------------------- the whole


def test_a_sidecar_that_nobody_has_used() -> None:
    assert describe(QUIET).splitlines() == [
        "sidecar of job job on node-a: pid 7, up 12 s",
        "  directory       (no client yet)",
        "  last committed  none yet",
        "  saves           0 committed, 0 failed, 0 skipped",
        "  shared memory   0 B in regions, 3.0 GiB free",
        "  written         0 B",
        "  CPU             0.0 s",
        "  torch           2.13.0 (being imported)",
    ]


def test_a_sidecar_at_work() -> None:
    status = replace(
        QUIET,
        directory="/checkpoints",
        world_size=4,
        last_committed_step=200,
        last_committed_age_s=61.25,
        committed_count=2,
        failed_count=1,
        skipped_count=3,
        shm_used_bytes=8 * GIB,
        written_bytes=20 * GIB,
        torch_ready=True,
        ranks=(RankStatus(0, 100, True, (SlotStatus(0, "sealed", 4 * GIB), SlotStatus(1, "free", 0))),),
        shards=(shard("writing", GIB, 4 * GIB), shard("persisted", 5, 5, 1)),
        checkpoints=(attempt("open", 4, 3),),
    )
    lines = describe(status).splitlines()
    assert "  directory       /checkpoints" in lines
    assert "  last committed  step 200, 61.2 s ago" in lines
    assert "  saves           2 committed, 1 failed, 3 skipped" in lines
    assert "  shared memory   8.0 GiB in regions, 3.0 GiB free" in lines
    assert "  torch           2.13.0" in lines
    assert "  rank 0    pid 100 alive: slot 0 sealed 4.0 GiB, slot 1 free 0 B" in lines
    assert "  shard   step 300 rank 0: writing, 1.0 GiB of 4.0 GiB (25 %), 2.5 s" in lines
    assert "  save    step 300: open, staged 4/4, persisted 3/4 ranks, 9.0 s" in lines
    assert not any("rank 1" in line for line in lines)
    assert not any("DEGRADED" in line for line in lines)


def test_what_it_takes_from_training() -> None:
    manners = MannersStatus(12.25, 0.314, 64.0 * (1 << 20), 1.2, (0, 2, 3, 4, 9))
    lines = describe(replace(QUIET, manners=manners)).splitlines()
    assert "  CPU             12.2 s, 0.31 s for each GB written, on cores 0,2-4,9" in lines
    assert (
        "  bandwidth       writing at most 64.0 MiB/s, training's steps take 1.20 times as long beside a write" in lines
    )


def test_a_sidecar_in_trouble_says_so_last() -> None:
    status = replace(
        QUIET,
        draining=True,
        consecutive_failures=1,
        ranks=(RankStatus(3, 103, False, ()), RankStatus(4, 104, True, ())),
        failures=(
            FailureStatus(
                300, "0a1b2c3d-3", 4.0, (FailureReport("RankLost", "it is gone", "restart it", rank=3, node="node-b"),)
            ),
        ),
    )
    lines = describe(status).splitlines()
    assert lines[0].endswith(", draining")
    assert "  rank 3    pid 103 GONE: " in lines
    at = lines.index("  failed  step 300 (0a1b2c3d-3), 4 s ago:")
    assert lines[at + 1] == "          rank 3 on node-b: it is gone [RankLost] — restart it"
    assert [line.startswith("  DEGRADED: ") for line in lines[at + 2 :]] == [True] * 3


def test_a_shard_without_a_size_yet_has_no_percentage_to_divide_by() -> None:
    [line] = [
        line for line in describe(replace(QUIET, shards=(shard("queued", 0, 0),))).splitlines() if "shard " in line
    ]
    assert "(0 %)" in line


def test_only_the_newest_attempts_are_shown() -> None:
    status = replace(QUIET, checkpoints=tuple(attempt("committed", 4, 4, step) for step in range(10)))
    shown = [line.split()[2] for line in describe(status).splitlines() if line.startswith("  save ")]
    assert shown == ["5:", "6:", "7:", "8:", "9:"]


def test_ranks_that_hold_up_a_drain_are_named() -> None:
    idle = replace(
        QUIET, shards=(), checkpoints=(), ranks=(RankStatus(3, 4711, True, ()), RankStatus(4, 4712, False, ()))
    )
    assert describe_pending(idle) == "nothing is being written, but 1 rank(s) are still connected: rank 3 (pid 4711)"
    assert describe_pending(replace(idle, ranks=())) == "nothing is under way"
