"""How the sidecar keeps out of training's way: priority, cores, bandwidth, and what it costs. Used by the daemon's main
thread, except the throttle and the cost, which are for its writers too."""

from __future__ import annotations

import time

from ckpt_proto.lifecycles import RegionState
from ckpt_proto.status import MannersStatus
from ckpt_sidecar.action_runner import ActionRunner
from ckpt_sidecar.affinity import Affinity
from ckpt_sidecar.config import SidecarConfig
from ckpt_sidecar.job_table import JobTable
from ckpt_sidecar.politeness import Politeness, Writing
from ckpt_sidecar.priority import lower_priority
from ckpt_sidecar.rank_record import RankRecord
from ckpt_sidecar.throttle import Throttle
from ckpt_sidecar.write_cost import WriteCost


class Manners:
    """One sidecar's."""

    def __init__(self, config: SidecarConfig, jobs: JobTable) -> None:
        self._nice = config.nice
        self._jobs = jobs
        self._affinity = Affinity(config.cpu_affinity)
        self._politeness = Politeness(config.polite_within_s)
        self.throttle = Throttle(config.max_write_bytes_per_s)
        self.cost = WriteCost()

    def begin(self) -> None:
        """Before any thread is started."""
        lower_priority(self._nice)
        self._affinity.begin()

    def hear(self, peer: bytes, step_s: float, now_s: float) -> None:
        """A client says how long its steps take."""
        for rank, record in self._jobs.ranks.items():
            if record.peer == peer:
                self._politeness.hear(rank, step_s, now_s)

    def tick(self, runner: ActionRunner, now_s: float) -> None:
        """Once a second: choose cores and how fast to write."""
        ranks = [self._jobs.ranks[rank] for rank in self._jobs.living_ranks]
        self._affinity.avoid(record.hello.pid for record in ranks if not record.other_namespace)
        self._politeness.keep_only(self._jobs.living_ranks)
        cap = self._politeness.look(
            Writing(now_s, self._written_bytes(runner), self._left_bytes(runner), any(map(_is_crowded, ranks)))
        )
        self.throttle.slow_to(cap if ranks else None)

    def status(self) -> MannersStatus:
        """For ``ckpt-sidecar status``."""
        return MannersStatus(
            cpu_s=time.process_time(),
            cpu_s_per_gb=self.cost.per_gb,
            write_cap_bytes_per_s=self.throttle.bytes_per_s,
            slowdown=self._politeness.slowdown,
            cores=tuple(sorted(self._affinity.cores)),
        )

    def _written_bytes(self, runner: ActionRunner) -> int:
        return self._jobs.shards.written_bytes + sum(p.written_bytes for p in list(runner.progress.values()))

    def _left_bytes(self, runner: ActionRunner) -> int:
        return sum(
            (progress.total_bytes or _region_bytes(self._jobs.ranks.get(rank))) - progress.written_bytes
            for (rank, _), progress in list(runner.progress.items())
        )


def _region_bytes(record: RankRecord | None) -> int:
    """How much a shard may have that still waits for a writer."""
    return max((slot.ready.region_bytes for slot in record.slots if slot.ready), default=0) if record else 0


def _is_crowded(record: RankRecord) -> bool:
    return all(slot.state is not RegionState.FREE for slot in record.slots)
