"""Figures out of what the benchmark has measured: medians over rounds and passes, each of the slowest rank. Pure."""

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

OURS, HIDDEN = "ckpt-sidecar", "ckpt-sidecar, copy hidden"
NOBODY = "none"
FLIGHT_FROM = 4
"""The step of a stretch before which its save begins."""


@dataclass(frozen=True)
class SystemFigures:
    """One system with one number of ranks. Seconds but for ``cpu_s_per_gb``, ``worst_step`` (a ratio) and bytes.

    ``lost_s`` is what a stretch with a save takes longer, ``lost_range`` its quartiles; ``quiet_s`` the same of
    stretches compared with each other in which nobody saves: what the figure cannot tell from nothing.
    """

    name: str
    durable: bool
    ranks: int
    lost_s: float
    lost_range: tuple[float, float]
    blocked_s: float
    wait_s: float
    done_s: float
    first_blocked_s: float
    first_done_s: float
    cpu_s_per_gb: float
    worst_step: float
    pss_bytes: int
    copy_s: float
    tensors: int
    nbytes: int

    @property
    def is_ours(self) -> bool:
        return self.name in (OURS, HIDDEN)


def systems(results: dict[str, Any], ranks: int) -> dict[str, SystemFigures]:
    """What there is for a number of ranks, by name."""
    found = results["training"].get(str(ranks), {})
    return {name: _figures(passes, ranks) for name, passes in found.items()}


def _figures(passes: list[list[dict[str, Any]]], ranks: int) -> SystemFigures:
    one = passes[0][0]
    nbytes = sum(rank["nbytes"] for rank in passes[0])
    lost = [saving - plain for plain, saving in _stretches(passes)]
    quarters = statistics.quantiles(lost, n=4) if len(lost) > 1 else [lost[0]] * 3
    rounds = [rounds for ranks_of in passes for rounds in zip(*(rank["rounds"] for rank in ranks_of), strict=True)]

    def saving(key: str) -> float:
        return statistics.median(max(rank["saving"].get(key, 0.0) for rank in each) for each in rounds)

    return SystemFigures(
        name=one["system"],
        durable=one["durable"],
        ranks=ranks,
        lost_s=statistics.median(lost),
        lost_range=(quarters[0], quarters[2]),
        blocked_s=saving("blocked_s"),
        wait_s=saving("wait_s"),
        done_s=saving("done_s"),
        first_blocked_s=statistics.median(max(rank["first"]["blocked_s"] for rank in p) for p in passes),
        first_done_s=statistics.median(max(rank["first"]["done_s"] for rank in p) for p in passes),
        cpu_s_per_gb=statistics.median(cpu for p in passes for cpu in p[0]["quiet_cpu_s"]) / (nbytes / 1e9),
        worst_step=statistics.median(max(map(_worst_step, each)) for each in rounds),
        pss_bytes=round(statistics.median(p[0]["pss_bytes"] for p in passes)),
        copy_s=statistics.median(max(rank["copy_s"] for rank in p) for p in passes),
        tensors=one["tensors"],
        nbytes=nbytes,
    )


def _stretches(passes: list[list[dict[str, Any]]]) -> Iterator[tuple[float, float]]:
    """A stretch without and the one with a save next to it, of the slowest rank."""
    for ranks in passes:
        for each in zip(*(rank["rounds"] for rank in ranks), strict=True):
            yield max(r["plain"]["took_s"] for r in each), max(r["saving"]["took_s"] for r in each)


def step_times(ends_s: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(ends_s)]


def _worst_step(found: dict[str, Any]) -> float:
    """The longest step between the call of a save and its end, the call included, over the median without a save."""
    usual = statistics.median(step_times(found["plain"]["ends_s"]))
    ends, done_s = found["saving"]["ends_s"], found["saving"]["done_s"]
    in_flight = [ends[index] - ends[index - 1] for index in range(FLIGHT_FROM, len(ends)) if ends[index - 1] < done_s]
    return max(in_flight) / usual if in_flight else 1.0
