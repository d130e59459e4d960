"""Which ranks of this node live: by pid and start time, or by heartbeats where the kernel cannot name their process.

Called on the daemon's main thread. Knows no socket; what it finds are events for the job table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ckpt_proto.process import process_start_s
from ckpt_proto.region import region_path
from ckpt_sidecar.events import Event, RankDied, ShardSealed
from ckpt_sidecar.job_table import JobTable
from ckpt_sidecar.leftovers import read_seal
from ckpt_sidecar.rank_record import RankRecord

SILENT_S = 30.0
"""Without a heartbeat for so long a rank does not hold up a drain any more, and one in another pid namespace, which
cannot be looked up, counts as dead."""

logger = logging.getLogger(__name__)


class RankWatch:
    """Looks at the ranks of a job table.

    Args:
        directory: where the regions lie: a dead rank's last message may have died with it, its seal has not.
        start_s: when a process was started, None if there is none.
    """

    def __init__(
        self, jobs: JobTable, directory: Path, start_s: Callable[[int], float | None] = process_start_s
    ) -> None:
        self._jobs = jobs
        self._directory = directory
        self._start_s = start_s
        self._heard_s: dict[int, float] = {}

    def hear(self, peer: bytes, now_s: float) -> None:
        """A client has given a sign of life."""
        for rank, record in self._jobs.ranks.items():
            if record.peer == peer:
                self._heard_s[rank] = now_s

    def connected_ranks(self, now_s: float) -> list[int]:
        """Living ranks whose client lives too: a trainer may have dropped its client without a Goodbye."""
        heard_s = self._heard_s
        return [rank for rank in self._jobs.living_ranks if now_s - heard_s.setdefault(rank, now_s) < SILENT_S]

    def deaths(self, now_s: float) -> list[Event]:
        """Ranks that have died since the last look: first what each had sealed, then its death."""
        events: list[Event] = []
        for rank in self._jobs.living_ranks:
            record = self._jobs.ranks[rank]
            reason = self._why_dead(rank, record, now_s)
            if reason is None:
                continue
            logger.warning("rank %d is gone: %s", rank, reason)
            events += [*self._sealed_by(rank, record), RankDied(rank, record.hello.pid, reason)]
        return events

    def left_by(self, peer: bytes) -> list[ShardSealed]:
        """What a client that says goodbye has sealed and this sidecar does not know of: it may have been handed over
        to one that died, by a client that does not wait to say it again."""
        leaving = [(rank, record) for rank, record in self._jobs.ranks.items() if record.peer == peer and record.alive]
        return [sealed for rank, record in leaving for sealed in self._sealed_by(rank, record)]

    def _why_dead(self, rank: int, record: RankRecord, now_s: float) -> str | None:
        pid = record.hello.pid
        if self._start_s(pid) == record.hello.process_start_s:
            return None
        silent_s = now_s - self._heard_s.setdefault(rank, now_s)
        if record.other_namespace:
            return f"no heartbeat for {silent_s:.0f} s" if silent_s > SILENT_S else None
        return f"its process {pid} has ended"

    def _sealed_by(self, rank: int, record: RankRecord) -> list[ShardSealed]:
        found = [read_seal(region_path(self._directory, rank, slot)) for slot in range(len(record.slots))]
        known = self._jobs.jobs
        return [ShardSealed(submit) for submit in found if submit is not None and (rank, submit.save) not in known]
