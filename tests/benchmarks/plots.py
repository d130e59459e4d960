"""The report's plots: throughput around a save, blocking by number of tensors, CPU per GB."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from figures import NOBODY, systems


def draw(results: dict[str, Any], output: Path) -> None:
    """Write the PNG files."""
    for ranks in sorted(results["training"]):
        _throughput(results["training"][ranks], output / f"throughput-{ranks}.png", f"{ranks} rank(s)")
    _tensor_count(results["tensor_count"], output / "tensor-count.png")
    _cpu(results, output / "cpu.png")


def _throughput(passes: dict[str, Any], path: Path, title: str) -> None:
    """Steps per second over the time since the call, of the last round, smoothed over three steps."""
    figure, axes = plt.subplots(figsize=(9, 5))
    for name, found in passes.items():
        if name == NOBODY:
            continue
        ends = found[-1][0]["rounds"][-1]["saving"]["ends_s"]
        at = [(ends[i] + ends[i + 3]) / 2 for i in range(len(ends) - 3)]
        axes.plot(at, [3 / (ends[i + 3] - ends[i]) for i in range(len(ends) - 3)], label=name, linewidth=1.3)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set(
        xlabel="seconds since the call of save()", ylabel="steps per second", title=f"Training beside a save, {title}"
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    _write(figure, path)


def _tensor_count(counts: dict[str, dict[str, float]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 4))
    numbers = sorted(map(int, counts))
    for key, label in (("floor", "one copy"), ("in_call", "save()"), ("overlap", "save(overlap=True)")):
        axes.plot(numbers, [counts[str(n)][key] * 1e3 for n in numbers], marker="o", label=label)
    axes.set(xlabel="tensors of 1 KiB", ylabel="ms", title="What save() blocks")
    axes.legend()
    _write(figure, path)


def _cpu(results: dict[str, Any], path: Path) -> None:
    ranks = min(map(int, results["training"]))
    found = [figures for name, figures in systems(results, ranks).items() if name != NOBODY]
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(found) + 1.2))
    axes.barh([figures.name for figures in found], [figures.cpu_s_per_gb for figures in found])
    axes.invert_yaxis()
    axes.set(xlabel="CPU seconds per GB, all processes", title=f"Price of a save, {ranks} rank(s)")
    _write(figure, path)


def _write(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
