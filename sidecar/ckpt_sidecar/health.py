"""What a probe makes of a status: healthy, or degraded and why. Pure and light: a probe imports it."""

from __future__ import annotations

from ckpt_proto.lifecycles import ShardState
from ckpt_proto.status import SidecarStatus

STUCK_S = 60.0
"""A write that has moved no byte for so long makes the sidecar degraded."""


def degradations(status: SidecarStatus) -> list[str]:
    """Why this sidecar is degraded, most serious first; empty if it is healthy."""
    reasons: list[str] = []
    if status.consecutive_failures and status.failures:
        last = status.failures[-1]
        reasons.append(
            f"the last {status.consecutive_failures} save(s) failed, newest step {last.step}: "
            f"{'; '.join(map(str, last.failures[:3]))}"
        )
    writing = [shard for shard in status.shards if shard.state == ShardState.WRITING.value]
    reasons += [
        f"rank {shard.rank}'s shard of step {shard.step} has moved no byte for {shard.idle_s:.0f} s "
        f"({shard.written_bytes} of {shard.total_bytes} written)"
        for shard in writing
        if shard.idle_s > STUCK_S
    ]
    dead = [rank.rank for rank in status.ranks if not rank.alive]
    if dead and any(rank.alive for rank in status.ranks):
        reasons.append(f"ranks {dead} are gone while others live")
    if status.draining:
        reasons.append("draining: no new clients are taken")
    return reasons
