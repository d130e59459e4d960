"""The simulated shared memory of one node: regions with seals and journals, as the sidecar's workers leave them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt_proto.messages import SubmitShard
from ckpt_proto.region_journal import RegionJournal
from ckpt_sidecar.events import FoundRegion
from testkit.simulator.storage import Value


@dataclass(eq=False)
class Region:
    """One region file and what lies beside it. Whoever has it mapped keeps it when its name is removed."""

    first: Value | None = None
    second: Value | None = None
    seal: SubmitShard | None = None
    journal: RegionJournal | None = None

    def frame(self) -> None:
        """Laid out anew: what was in it is gone."""
        self.first = self.second = None


@dataclass
class SharedMemory:
    """Regions by rank and slot. ``is_full``: nothing new fits."""

    regions: dict[tuple[int, int], Region] = field(default_factory=dict)
    is_full: bool = False

    def seal_of(self, rank: int, slot: int) -> SubmitShard | None:
        """What is whole in a region."""
        region = self.regions.get((rank, slot))
        return region.seal if region is not None else None

    def break_seal(self, rank: int, slot: int) -> None:
        """As ``leftovers.break_seal``."""
        region = self.regions.get((rank, slot))
        if region is not None:
            region.seal = None

    def find(self, lives: Callable[[int], bool]) -> tuple[FoundRegion, ...]:
        """As ``leftovers.find_regions``; ``lives`` says whether a process does."""
        found = []
        for place, region in sorted(self.regions.items()):
            if region.journal is None:
                del self.regions[place]
                continue
            found.append(FoundRegion(region.journal, lives(region.journal.owner.pid), region.seal))
        return tuple(found)
