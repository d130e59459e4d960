"""The benchmark's report: what the figures are made of, and when a target counts as met."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are scripts, not a package: each is found beside the other."""
    for folder in ("examples", "tests/benchmarks"):
        monkeypatch.syspath_prepend(ROOT / folder)
    for name in ("figures", "report", "tables"):
        sys.modules.pop(name, None)


def stretch(step_s: float, *, slow: tuple[int, float] | None = None, **saving: float) -> dict[str, Any]:
    """Ten steps; ``slow`` makes one of them longer."""
    ends, now_s = [], 0.0
    for index in range(10):
        now_s += slow[1] if slow is not None and index == slow[0] else step_s
        ends.append(now_s)
    return {"took_s": now_s, "ends_s": ends, **saving}


def rank_of(
    name: str, *, lost_s: float, cpu_s: float, pss: int, blocked_s: float, wait_s: float = 0.0
) -> dict[str, Any]:
    one = {
        "plain": stretch(0.1),
        "saving": stretch(0.1, slow=(5, 0.1 + lost_s), blocked_s=blocked_s, wait_s=wait_s, done_s=0.8),
    }
    return {
        "system": name,
        "durable": name != "torch-checkpointing",
        "nbytes": 500_000_000,
        "tensors": 100,
        "first": {"blocked_s": 1.0, "done_s": 2.0},
        "rounds": [one, one, one],
        "quiet_cpu_s": [cpu_s, cpu_s, 9.0],
        "pss_bytes": pss,
        "copy_s": 0.1,
    }


def results(*ranks: dict[str, Any], load_s: float = 0.1, scale_ranks: int = 1024) -> dict[str, Any]:
    save = {"stall_s": 0.11, "write_s": 0.9, "persisted_s": 1.0, "committed_s": 1.1}
    return {
        "machine": "2 cores",
        "mode": {"mb": 1000, "steps": 10, "rounds": 3, "passes": 1},
        "training": {"2": {rank["system"]: [[rank, rank]] for rank in ranks}},
        "saves": [
            {
                "ranks": 2,
                "repeats": {
                    "saves": [{**save, "committed_s": 1.2}, save],
                    "floors": [{"copy_s": 0.1, "write_s": 1.0}],
                    "loads": [{"load_s": load_s, "read_s": 0.1}],
                },
            }
        ],
        "tensor_count": {"10000": {"floor": 0.01, "in_call": 0.04, "overlap": 0.05, "wait": 0.0}},
        "scale": [{"ranks": scale_ranks, "items": 1000, "commit_s": 1.5, "plan_item_us": 30.0}],
    }


NOBODY = rank_of("none", lost_s=0.0, cpu_s=0.0, pss=1_000_000_000, blocked_s=0.0)
OURS = rank_of("ckpt-sidecar", lost_s=0.11, cpu_s=0.3, pss=3_000_000_000, blocked_s=0.11)
HIDDEN = rank_of("ckpt-sidecar, copy hidden", lost_s=0.01, cpu_s=0.3, pss=3_000_000_000, blocked_s=0.005)
THREAD = rank_of("dcp.async_save, thread", lost_s=0.5, cpu_s=2.0, pss=1_100_000_000, blocked_s=0.4)
PROCESS = rank_of("dcp.async_save, process", lost_s=0.8, cpu_s=3.0, pss=2_000_000_000, blocked_s=0.4)
OTHER = rank_of("torch-checkpointing", lost_s=0.02, cpu_s=1.0, pss=2_000_000_000, blocked_s=0.001)


def verdicts(**changes: Any) -> dict[str, Any]:
    report = importlib.import_module("report")
    options = {name: changes.pop(name) for name in ("load_s", "scale_ranks") if name in changes}
    ranks = {"none": NOBODY, "ours": OURS, "hidden": HIDDEN, "thread": THREAD, "process": PROCESS, "other": OTHER}
    rows = report.all_rows(results(*(ranks | changes).values(), **options))
    return {f"{row.number.split(',')[0]} {row.metric.split(' ')[0]}": row.met for row in rows}


def test_a_figure_is_of_the_slowest_rank_and_a_median_of_the_rounds() -> None:
    figures = importlib.import_module("figures")
    slow = rank_of("none", lost_s=0.3, cpu_s=0.0, pss=5, blocked_s=0.2)
    found = results(NOBODY)
    found["training"]["2"]["none"] = [[NOBODY, slow]]
    one = figures.systems(found, 2)["none"]
    assert one.lost_s == pytest.approx(0.3)
    assert one.blocked_s == 0.2
    assert one.worst_step == pytest.approx(4.0)
    assert one.nbytes == 1_000_000_000


def test_a_step_after_the_save_is_done_is_not_blamed_on_it() -> None:
    figures = importlib.import_module("figures")
    late = {"plain": stretch(0.1), "saving": stretch(0.1, slow=(8, 0.9), blocked_s=0.0, done_s=0.55)}
    found = results({**NOBODY, "rounds": [late]})
    assert figures.systems(found, 2)["none"].worst_step == pytest.approx(1.0)


def test_all_targets_met() -> None:
    found = verdicts()
    assert found.pop("P10 worst") is None  # no core free: no target
    assert found == {
        "P1 training": True, "P2 copy": True, "P3 call": True, "P4 first": True, "P5 CPU": True, "P6 memory": True,
        "P7 save()": True, "P8 CPU": True, "P9 restored": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("missed", "changes"),
    [
        ("P1 training", {"hidden": {**HIDDEN, "rounds": OURS["rounds"]}}),
        ("P5 CPU", {"ours": {**OURS, "quiet_cpu_s": [0.5]}}),
        ("P6 memory", {"ours": {**OURS, "pss_bytes": 4_000_000_000}}),
        ("P9 restored", {"load_s": 0.2}),
    ],
)
def test_a_target_that_is_missed_says_so(missed: str, changes: dict[str, Any]) -> None:
    assert verdicts(**changes)[missed] is False


def test_a_smaller_world_has_a_smaller_budget() -> None:
    report = importlib.import_module("report")
    [commit, _] = [row for row in report.all_rows(results(NOBODY, scale_ranks=256)) if row.number == "P8"]
    assert commit.target == "< 0.50 s"
    assert commit.met is False


def test_the_report_names_who_does_not_fsync(tmp_path: Path) -> None:
    report = importlib.import_module("report")
    text = report.write_report(results(NOBODY, OURS, HIDDEN, OTHER), tmp_path / "report.md")
    assert text == (tmp_path / "report.md").read_text()
    assert "torch-checkpointing (no fsync)" in text
    assert "| P1, 2 rank(s)" in text
