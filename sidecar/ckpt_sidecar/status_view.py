"""A status as text for a person. Pure."""

from __future__ import annotations

from ckpt_proto.identity import step_text
from ckpt_proto.lifecycles import CheckpointState, ShardState
from ckpt_proto.status import CheckpointStatus, MannersStatus, ShardStatus, SidecarStatus
from ckpt_sidecar.health import degradations

_UNDER_WAY = (ShardState.QUEUED.value, ShardState.WRITING.value)
_OPEN = (CheckpointState.OPEN.value, CheckpointState.COMPLETE.value)


SHOWN_RANKS = 8


def readable_bytes(nbytes: float) -> str:
    """``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def describe_pending(status: SidecarStatus) -> str:
    """One line: what is still being written or waits for its commit."""
    shards = [shard for shard in status.shards if shard.state in _UNDER_WAY]
    attempts = [attempt for attempt in status.checkpoints if attempt.state in _OPEN]
    if not shards and not attempts:
        living = [f"rank {rank.rank} (pid {rank.pid})" for rank in status.ranks if rank.alive]
        if not living:
            return "nothing is under way"
        shown = ", ".join(living[:SHOWN_RANKS]) + (", ..." if len(living) > SHOWN_RANKS else "")
        return f"nothing is being written, but {len(living)} rank(s) are still connected: {shown}"
    parts = [
        f"{step_text(attempt.step)}: {attempt.persisted_ranks} of {attempt.world_size} ranks persisted"
        for attempt in attempts
    ]
    done = sum(shard.written_bytes for shard in shards)
    total = sum(shard.total_bytes for shard in shards)
    if shards:
        parts.append(f"{len(shards)} shard(s), {readable_bytes(done)} of {readable_bytes(total)} written")
    return "; ".join(parts)


def describe(status: SidecarStatus) -> str:
    """The whole status, several lines."""
    committed = "none yet"
    if status.last_committed_step is not None:
        committed = f"step {status.last_committed_step}, {status.last_committed_age_s or 0:.1f} s ago"
    saves = f"{status.committed_count} committed, {status.failed_count} failed, {status.skipped_count} skipped"
    memory = f"{readable_bytes(status.shm_used_bytes)} in regions, {readable_bytes(status.shm_free_bytes)} free"
    lines = [
        f"sidecar of job {status.job_id} on {status.node}: pid {status.pid}, up {status.uptime_s:.0f} s"
        + (", draining" if status.draining else ""),
        f"  directory       {status.directory or '(no client yet)'}",
        f"  last committed  {committed}",
        f"  saves           {saves}",
        f"  shared memory   {memory}",
        f"  written         {readable_bytes(status.written_bytes)}",
        *(f"  other nodes     {link}" for link in status.links),
        f"  CPU             {_cpu(status.manners)}",
        *_slowed(status.manners),
        f"  torch           {status.torch_version}{'' if status.torch_ready else ' (being imported)'}",
    ]
    for rank in status.ranks:
        slots = ", ".join(f"slot {s.slot} {s.state} {readable_bytes(s.region_bytes)}" for s in rank.slots)
        lines.append(f"  rank {rank.rank:<4} pid {rank.pid} {'alive' if rank.alive else 'GONE'}: {slots}")
    lines += [_shard_line(shard) for shard in status.shards if shard.state in _UNDER_WAY]
    lines += [_attempt_line(attempt) for attempt in status.checkpoints[-5:]]
    for failure in status.failures:
        lines.append(f"  failed  step {failure.step} ({failure.save_id}), {failure.age_s:.0f} s ago:")
        lines += [f"          {report}" for report in failure.failures]
    lines += [f"  DEGRADED: {reason}" for reason in degradations(status)]
    return "\n".join(lines)


def _cpu(manners: MannersStatus) -> str:
    per_gb = "" if manners.cpu_s_per_gb is None else f", {manners.cpu_s_per_gb:.2f} s for each GB written"
    cores = f", on cores {_core_list(manners.cores)}" if manners.cores else ""
    return f"{manners.cpu_s:.1f} s{per_gb}{cores}"


def _core_list(cores: tuple[int, ...]) -> str:
    """``0-3,8``."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _slowed(manners: MannersStatus) -> list[str]:
    slowdown = (
        "" if manners.slowdown is None else f"training's steps take {manners.slowdown:.2f} times as long beside a write"
    )
    cap = manners.write_cap_bytes_per_s
    capped = "" if cap is None else f"writing at most {readable_bytes(cap)}/s"
    text = ", ".join(part for part in (capped, slowdown) if part)
    return [f"  bandwidth       {text}"] if text else []


def _shard_line(shard: ShardStatus) -> str:
    percent = 100 * shard.written_bytes / shard.total_bytes if shard.total_bytes else 0
    return (
        f"  shard   step {shard.step} rank {shard.rank}: {shard.state}, {readable_bytes(shard.written_bytes)} of "
        f"{readable_bytes(shard.total_bytes)} ({percent:.0f} %), {shard.age_s:.1f} s"
    )


def _attempt_line(attempt: CheckpointStatus) -> str:
    return (
        f"  save    {step_text(attempt.step)}: {attempt.state}, staged {attempt.staged_ranks}/{attempt.world_size}, "
        f"persisted {attempt.persisted_ranks}/{attempt.world_size} ranks, {attempt.age_s:.1f} s"
    )
