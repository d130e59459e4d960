"""What `save()` costs by the number of tensors, beyond copying their bytes: the second half of `make bench`.

    python tests/benchmarks/tensor_count.py --counts 1000 10000 30000

One rank, tensors of 1 KiB. Floor and saves take turns: the floor copies the same tensors into tensors that are there,
in one call of torch. The table gives medians; `--profile` prints where the time of the largest count goes.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ckpt_trainer_client import CheckpointClient

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from tables import markdown_table

TARGET_US = 5.0
"""For each tensor, beyond the copy."""


def state_of(count: int) -> dict[str, Any]:
    """As a model of many layers has it."""
    return {
        "model": {f"layers.{index // 10}.w{index % 10}": torch.full((256,), float(index)) for index in range(count)}
    }


def floor_s(state: dict[str, Any], copies: list[torch.Tensor]) -> float:
    """One warm copy."""
    started_s = time.perf_counter()
    torch._foreach_copy_(copies, list(state["model"].values()))
    return time.perf_counter() - started_s


def measure(count: int, repeats: int, directory: str, profile: cProfile.Profile | None) -> dict[str, float]:
    """Medians in seconds: the floor, `save()`, `save(overlap=True)`, and the wait for the latter's copy."""
    state, found = state_of(count), {"floor": [], "in_call": [], "overlap": [], "wait": []}
    copies = [torch.empty(256) for _ in range(count)]
    with CheckpointClient(directory) as client:
        client.before_optimizer_step()
        client.prepare(state).result()
        for step in range(repeats):
            found["floor"].append(floor_s(state, copies))
            if profile is not None:
                profile.enable()
            handle = client.save(state, step=2 * step)
            if profile is not None:
                profile.disable()
            found["in_call"].append(handle.stall_s)
            handle.result()
            handle = client.save(state, step=2 * step + 1, overlap=True)
            client.before_optimizer_step()
            found["overlap"].append(handle.stall_s)
            found["wait"].append(handle.wait_s)
            handle.result()
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def row(count: int, measured: dict[str, float]) -> list[str]:
    beyond_us = (measured["in_call"] - measured["floor"]) / count * 1e6
    verdict = "met" if beyond_us <= TARGET_US else "missed"
    cells = [f"{measured[name] * 1e3:.1f} ms" for name in ("floor", "in_call", "overlap", "wait")]
    return [f"{count:,}", *cells, f"{beyond_us:.1f} us", f"<= {TARGET_US:g} us", verdict]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000, 10_000, 30_000])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: the system's temp")
    parser.add_argument("--json", type=Path, help="also write the medians, in seconds, to this file")
    parser.add_argument("--profile", action="store_true", help="print where the time of the largest count goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    profile = cProfile.Profile() if args.profile else None
    rows, found = [], {}
    for count in args.counts:
        with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=args.directory) as directory:
            chosen = profile if count == max(args.counts) else None
            found[count] = measure(count, args.repeats, directory, chosen)
        rows.append(row(count, found[count]))
    headings = ("tensors", "one copy", "save()", "with overlap", "waited later", "each, beyond the copy", "target", "")
    print(f"\n1 rank, tensors of 1 KiB, medians of {args.repeats}\n\n{markdown_table(headings, rows)}")
    if args.json:
        args.json.write_text(json.dumps(found))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    main()
