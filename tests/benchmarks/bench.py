"""What saving costs, beside what this machine can do at all and beside every peer, in one run: `make bench`.

    python tests/benchmarks/bench.py            # small: about a quarter of an hour
    python tests/benchmarks/bench.py --long

Everything compared takes turns, so that a slow minute of the machine hits all of it: systems run after each other again
and again, and within a run stretches of training with and without a save, and floors and saves. Figures are medians.
Writes the report, its plots and what was measured into `--output`.
"""

import argparse
import json
import os
import platform
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from processes import MARK

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"

sys.path.insert(0, str(EXAMPLES))
from plots import draw  # noqa: E402
from report import write_report  # noqa: E402
from systems import SYSTEMS  # noqa: E402
from training_rank import MATRIX  # noqa: E402


@dataclass(frozen=True)
class Mode:
    """How much is measured. ``mb`` is the state of all ranks together, in 10^6 bytes."""

    mb: int
    steps: int
    step_s: float
    rounds: int
    passes: int
    repeats: int
    counts: tuple[int, ...]
    worlds: tuple[int, ...]


SMALL = Mode(256, 30, 0.05, 6, 1, 7, (1_000, 10_000, 30_000), (64, 128, 256))
LONG = Mode(512, 40, 0.1, 5, 3, 9, (1_000, 10_000, 30_000), (128, 256, 512, 1024))


class Bench:
    """Runs scripts under the launcher, as a user would, and collects what they have measured."""

    def __init__(self, mode: Mode, work: Path, timeout_s: float) -> None:
        self._mode = mode
        self._work = work
        self._timeout_s = timeout_s

    def floors_and_saves(self, ranks: int) -> dict[str, Any]:
        """What `bench_rank.py` says."""
        mode = self._mode
        return self._launch("bench_rank.py", ranks, ["--mb", str(mode.mb), "--repeats", str(mode.repeats)], "--job-id")

    def training(self, system: str, ranks: int, products: int) -> list[dict[str, Any]] | None:
        """What `training_rank.py` says, of each rank; None if the system does not run here."""
        mode = self._mode
        options = ["--system", system, "--mb", str(mode.mb), "--steps", str(mode.steps), "--products", str(products)]
        try:
            return self._launch("training_rank.py", ranks, [*options, "--rounds", str(mode.rounds)], "--mark")
        except subprocess.CalledProcessError as error:
            print(f"{system} with {ranks} ranks has failed: {error}", file=sys.stderr)
            return None

    def script(self, name: str, *options: str) -> Any:
        """What another script writes as JSON."""
        result = self._work / f"{name}.json"
        subprocess.run([sys.executable, str(HERE / name), *options, "--json", str(result)], check=True)
        return json.loads(result.read_text())

    def _launch(self, script: str, ranks: int, options: Sequence[str], name_flag: str) -> Any:
        name = f"bench-{secrets.token_hex(4)}"
        result = self._work / f"{name}.json"
        command = [sys.executable, "-m", "ckpt_sidecar.launcher", "--job-id", name, "--"]
        command += ["--standalone", "--nproc-per-node", str(ranks), str(HERE / script), *options, name_flag, name]
        command += ["--directory", str(self._work / name), "--output", str(result)]
        path = os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, MARK: name}
        subprocess.run(command, check=True, env=environment, timeout=self._timeout_s)
        return json.loads(result.read_text())


def products_of(step_s: float) -> int:
    """How many matrix products take about so long on an idle core."""
    torch.set_num_threads(1)
    left, right = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
    times = []
    for _ in range(20):
        began_s = time.perf_counter()
        torch.mm(left, right)
        times.append(time.perf_counter() - began_s)
    return max(1, round(step_s / min(times)))


def measure(mode: Mode, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Everything, one thing after the other."""
    bench = Bench(mode, work, args.timeout_s)
    products = products_of(mode.step_s)
    training: dict[str, dict[str, list[Any]]] = {str(ranks): {} for ranks in args.ranks}
    for number in range(mode.passes):
        for ranks in args.ranks:
            for system in args.systems:
                print(f"\n== pass {number + 1} of {mode.passes}: {system}, {ranks} rank(s)", flush=True)
                found = bench.training(system, ranks, products)
                if found is not None:
                    training[str(ranks)].setdefault(system, []).append(found)
    counts = [str(count) for count in mode.counts]
    return {
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}",
        "mode": asdict(mode),
        "training": training,
        "saves": [bench.floors_and_saves(ranks) for ranks in args.ranks],
        "tensor_count": bench.script("tensor_count.py", "--counts", *counts, "--directory", str(work)),
        "scale": bench.script("scale.py", "--ranks", *map(str, mode.worlds)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--long", action="store_true", help="twice the state, more repeats, 1,024 simulated ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: the system's temp")
    parser.add_argument("--output", type=Path, default=Path("bench-results"), help="for report, plots and JSON")
    parser.add_argument("--timeout-s", type=float, default=600, help="for each run of a system")
    parser.add_argument("--from-json", type=Path, help="measure nothing: report what an earlier run has measured")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    if args.from_json:
        results = json.loads(args.from_json.read_text())
    else:
        with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=args.directory) as work:
            results = measure(LONG if args.long else SMALL, args, Path(work))
        (args.output / "bench.json").write_text(json.dumps(results))
    print(write_report(results, args.output / "report.md"))
    draw(results, args.output)
    print(f"\nreport, plots and JSON are in {args.output}")


if __name__ == "__main__":
    main()
