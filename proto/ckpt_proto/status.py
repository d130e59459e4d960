"""What a sidecar says about itself: the records behind ``ckpt-sidecar status`` and ``health``."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_proto.errors import FailureReport


@dataclass(frozen=True)
class SlotStatus:
    """One region: ``state`` is a :class:`~ckpt_proto.lifecycles.RegionState` value as the sidecar sees it."""

    slot: int
    state: str
    region_bytes: int


@dataclass(frozen=True)
class RankStatus:
    """One rank served by this sidecar."""

    rank: int
    pid: int
    alive: bool
    slots: tuple[SlotStatus, ...]


@dataclass(frozen=True)
class ShardStatus:
    """One shard job under way or just ended: bytes written so far of the file's bytes."""

    rank: int
    step: int
    save_id: str
    state: str
    written_bytes: int
    total_bytes: int
    age_s: float
    idle_s: float


@dataclass(frozen=True)
class CheckpointStatus:
    """One attempt in the coordinator: how many ranks have staged and persisted of ``world_size``, and who is late.

    ``late`` names at most 20 ranks (with their node) that the attempt waits for and what each has not done.
    """

    step: int
    save_id: str
    state: str
    staged_ranks: int
    persisted_ranks: int
    world_size: int
    age_s: float
    late: tuple[str, ...] = ()
    story: tuple[str, ...] = ()


@dataclass(frozen=True)
class FailureStatus:
    """A save that failed, newest last."""

    step: int
    save_id: str
    age_s: float
    failures: tuple[FailureReport, ...]


@dataclass(frozen=True)
class MannersStatus:
    """What the sidecar takes from training.

    ``cpu_s``: CPU seconds of its whole life. ``cpu_s_per_gb``: of its writing threads, per 1e9 bytes written; None
    before the first. ``write_cap_bytes_per_s``: given, or because steps are slow; None: no cap. ``slowdown``: how many
    times longer the trainers' steps take beside a write than without one; None if not known. ``cores``: where it may
    run; empty: not known.
    """

    cpu_s: float = 0.0
    cpu_s_per_gb: float | None = None
    write_cap_bytes_per_s: float | None = None
    slowdown: float | None = None
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class SidecarStatus:
    """The whole answer. Times are seconds, sizes bytes; ``last_committed_step`` is None before the first commit.

    ``links`` has a line for each link to the sidecar of another node.
    """

    sidecar_id: str
    job_id: str
    node: str
    pid: int
    uptime_s: float
    draining: bool
    directory: str
    world_size: int
    shm_root: str
    shm_used_bytes: int
    shm_free_bytes: int
    written_bytes: int
    last_committed_step: int | None
    last_committed_age_s: float | None
    committed_count: int
    failed_count: int
    skipped_count: int
    consecutive_failures: int
    ranks: tuple[RankStatus, ...]
    shards: tuple[ShardStatus, ...]
    checkpoints: tuple[CheckpointStatus, ...]
    failures: tuple[FailureStatus, ...]
    torch_ready: bool
    torch_version: str
    links: tuple[str, ...] = ()
    manners: MannersStatus = MannersStatus()
