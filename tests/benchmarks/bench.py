"""What a save costs beside what this machine can do at all: `make bench`.

    python tests/benchmarks/bench.py --mb 512 --json bench.json

For 1 rank and for 2, floors and saves take turns in one run, so that a slow minute of the disk hits both;
the table gives medians over the repeats, each of the slowest rank, and ratios of these medians.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
RANK_SCRIPT = Path(__file__).with_name("bench_rank.py")
TARGET_RATIO = 1.3
"""For the stall over one warm copy, and for the write over a raw direct write + fsync."""
METRICS = (
    ("stall_s", "save() blocks", ("copy_s",), True),
    ("write_s", "staged to persisted", ("write_s",), True),
    ("persisted_s", "call to persisted", ("copy_s", "write_s"), True),
    ("committed_s", "call to committed", ("copy_s", "write_s"), False),
)
"""Time, its name, the floors it cannot beat one after the other, and whether it has a target."""

sys.path.insert(0, str(EXAMPLES))
from tables import markdown_table  # noqa: E402


@dataclass(frozen=True)
class Row:
    """One line of the table: a time or a size beside its floor, and whether it meets its target."""

    ranks: int
    metric: str
    ours: str
    floor: str = ""
    ratio: str = ""
    target: str = ""
    met: bool | None = None

    def cells(self) -> list[str]:
        verdict = {None: "", True: "met", False: "missed"}[self.met]
        return [str(self.ranks), self.metric, self.ours, self.floor, self.ratio, self.target, verdict]


def measure(ranks: int, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run the ranks under the launcher, as a user would; what they measured, as `bench_rank.py` says."""
    result = work / f"{ranks}.json"
    script = [str(RANK_SCRIPT), "--mb", str(args.mb), "--repeats", str(args.repeats)]
    script += ["--directory", str(work / f"ranks-{ranks}"), "--output", str(result)]
    job_id = f"bench-{os.getpid()}-{ranks}"
    script += ["--job-id", job_id]
    torchrun = ["--standalone", "--nproc-per-node", str(ranks), *script]
    command = [sys.executable, "-m", "ckpt_sidecar.launcher", "--job-id", job_id, "--", *torchrun]
    path = os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
    subprocess.run(command, check=True, env=environment, timeout=args.timeout_s)
    measured: dict[str, Any] = json.loads(result.read_text())
    return measured


def rows(measured: dict[str, Any]) -> Iterator[Row]:
    """The table of one number of ranks."""
    ranks, floors, saves = measured["ranks"], measured["repeats"]["floors"], measured["repeats"]["saves"]
    for when, repeats in (("first", saves[:1]), ("later", saves[1:])):
        for metric, name, floor_names, targeted in METRICS:
            below = [{"floor_s": sum(times[floor] for floor in floor_names)} for times in floors]
            ratio = _median(repeats, metric) / _median(below, "floor_s")
            has_target = when == "later" and targeted
            yield Row(
                ranks,
                f"{when} save: {name}",
                _ms(repeats, metric),
                f"{' + '.join(floor.removesuffix('_s') for floor in floor_names)} {_ms(below, 'floor_s')}",
                f"{ratio:.2f}",
                f"<= {TARGET_RATIO}" if has_target else "",
                ratio <= TARGET_RATIO if has_target else None,
            )
    allocated, kept = measured["second_save_allocated_bytes"], measured["second_save_keeps_regions"]
    yield Row(ranks, "second save: allocates", f"{allocated} bytes", target="0 bytes", met=allocated == 0)
    yield Row(ranks, "second save: same regions", str(kept).lower(), target="true", met=kept)


def _median(repeats: list[dict[str, float]], name: str) -> float:
    return statistics.median(times[name] for times in repeats)


def _ms(repeats: list[dict[str, float]], name: str) -> str:
    """Median and, of several, the range: a verdict near its target can flip from run to run."""
    middle = f"{_median(repeats, name) * 1e3:.0f} ms"
    seconds = [times[name] for times in repeats]
    return middle if len(repeats) == 1 else f"{middle} ({min(seconds) * 1e3:.0f}-{max(seconds) * 1e3:.0f})"


def print_report(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {results[0]['torch']}"
    print(f"\n{args.mb} MB of state, medians (and ranges) of {args.repeats} repeats, {machine}\n")
    headings = ("ranks", "metric", "ours", "floor", "ratio", "target", "")
    print(markdown_table(headings, [row.cells() for result in results for row in rows(result)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=512, help="state of all ranks together, in 10^6 bytes")
    parser.add_argument("--repeats", type=int, default=7, help="later saves, and floors between them")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: the system's temp")
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    parser.add_argument("--timeout-s", type=float, default=600, help="for each number of ranks")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=args.directory) as work:
        results = [measure(ranks, args, Path(work)) for ranks in args.ranks]
    print_report(results, args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
