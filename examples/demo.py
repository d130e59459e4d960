"""The whole promise in three minutes: train, save, be killed, resume, and read the result without us.

    python examples/demo.py            # what `make demo` runs

Trains the example GPT on two ranks: once in one go; once with torchrun and all ranks killed 50 ms after a
save was staged, and started again; once with the sidecar killed while it writes; once without any save, and once
with saves that are copied behind forward and backward. Prints what each save cost beside the floor of this machine,
one PASS or FAIL line per claim, and exits with 1 if a claim failed.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from floors import Floors, measure_floors
from leftovers import processes_of, shared_memory_of, until_empty
from tables import markdown_table
from violence import has_staged, kill_processes, wait_for

EXAMPLES = Path(__file__).resolve().parent
STEPS, SAVE_EVERY = 30, 5
KILL_AT, KILL_AFTER_S = 15, 0.05
"""torchrun and its ranks are killed so long after this step was staged."""
SIDECAR_KILL_AT = 10
SLOW_BYTES_PER_S = 30e6
"""Bandwidth cap of the run whose sidecar is killed, so that the kill meets it in mid-write."""
MODEL = ("--layers", "4", "--width", "512", "--batch-size", "1")
RANKS = 2
MARK = "CKPT_DEMO_RUN"
"""Environment variable that every process of a run inherits."""
STALLS = ("stall_s", "wait_s")
RUN_TIMEOUT_S = 300
EXIT_TIMEOUT_S = 10
"""How long processes may take to disappear after the launcher returned."""


@dataclass(frozen=True)
class Claim:
    """One sentence that this run proved or refuted."""

    text: str
    holds: bool
    detail: str

    def __str__(self) -> str:
        return f"{'PASS' if self.holds else 'FAIL'}  {self.text}: {self.detail}"


@dataclass(frozen=True)
class Run:
    """One life of the training job and what it wrote down."""

    life: str
    checkpoints: Path
    losses: dict[int, float]
    saves: list[dict[str, Any]]
    digests: dict[str, dict[str, str]]
    exit_code: int = 0


class Trainer:
    """Starts the example trainer, named so that what it leaves behind can be found."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self.name = f"demo-{uuid.uuid4().hex[:8]}"
        self.committed_after_s = math.inf

    def run(
        self,
        life: str,
        directory: str,
        *flags: str,
        attack: Callable[[Path], None] | None = None,
        options: tuple[str, ...] = (),
    ) -> Run:
        """Train until the end in `directory`; a run resumes what lies there. `attack` gets the log to watch.

        `flags` are the trainer's, `options` the sidecar's.
        """
        checkpoints, log = self._work / directory, self._work / f"{life}.jsonl"
        digests = self._work / f"{life}.digests.json"
        script = [str(EXAMPLES / "train_gpt.py"), "--directory", str(checkpoints), *MODEL]
        script += ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
        script += ["--loss-log", str(log), *(flags or ("--digests", str(digests)))]
        torchrun = ["--standalone", "--nproc-per-node", str(RANKS), *script]
        arguments = ["--job-id", f"{self.name}-{directory}", *options, "--", *torchrun]
        print(f"\n== {life} run: ckpt-torchrun {shlex.join(arguments)}", flush=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: self.name}
        command = [sys.executable, "-m", "ckpt_sidecar.launcher", *arguments]
        with subprocess.Popen(command, env=environment) as process:
            if attack is not None:
                attack(log)
            code = process.wait(RUN_TIMEOUT_S)
        if code != 0 and attack is None:
            raise RuntimeError(f"the {life} run ended with exit code {code}")
        records = [json.loads(line) for line in log.read_text().splitlines()]
        losses = {record["step"]: record["loss"] for record in records if "step" in record}
        saves = [record for record in records if "saved_step" in record]
        written = json.loads(digests.read_text()) if digests.exists() else {}
        return Run(life, checkpoints, losses, saves, written, code)

    def kill_the_trainer(self, log: Path) -> None:
        """Wrapper, torchrun and every rank, as soon as a save is staged; only the sidecar is left."""
        wait_for(f"step {KILL_AT} staged", lambda: has_staged(log, KILL_AT), RUN_TIMEOUT_S)
        time.sleep(KILL_AFTER_S)
        pids = kill_processes(f"{MARK}={self.name}", "train_gpt.py --directory")
        killed_s = time.monotonic()
        print(f"== kill -9 of ckpt-torchrun, torchrun and the ranks: {pids}", flush=True)
        published = self._work / "interrupted" / f"step-{KILL_AT}" / ".metadata"
        wait_for(f"step {KILL_AT} committed", published.exists, EXIT_TIMEOUT_S)
        self.committed_after_s = time.monotonic() - killed_s

    def kill_the_sidecar(self, log: Path) -> None:
        """The sidecar, while it writes."""
        wait_for(f"step {SIDECAR_KILL_AT} staged", lambda: has_staged(log, SIDECAR_KILL_AT), RUN_TIMEOUT_S)
        pids = kill_processes(f"{MARK}={self.name}", "ckpt_sidecar run")
        print(f"== kill -9 of the sidecar: {pids}", flush=True)


def check_commits(*runs: Run) -> Claim:
    """Both the trainer's word and the file that makes a checkpoint count."""
    saves = [(run.checkpoints / f"step-{save['saved_step']}", save) for run in runs for save in run.saves]
    committed = [path for path, save in saves if save["committed_at_s"] is not None and (path / ".metadata").exists()]
    return Claim("every save committed", len(committed) == len(saves) > 0, f"{len(committed)} of {len(saves)} saves")


def check_resume(reference: Run, resumed: Run) -> Claim:
    resumed_at = min(resumed.losses) - 1
    tail = {step: loss for step, loss in reference.losses.items() if step > resumed_at}
    holds = resumed_at == KILL_AT and resumed.losses == tail
    equal = sum(resumed.losses.get(step) == loss for step, loss in tail.items())
    detail = f"resumed at step {resumed_at}, {equal} of {len(tail)} losses equal bit for bit"
    return Claim("the resumed run draws the curve of the uninterrupted one", holds, detail)


def check_killed(killed: Run, committed_after_s: float) -> Claim:
    """The checkpoint that was only staged when everything but the sidecar was killed."""
    text = f"kill -9 of torchrun and all ranks {KILL_AFTER_S * 1e3:.0f} ms after `staged`: the step is committed"
    holds = killed.exit_code != 0 and committed_after_s < math.inf and KILL_AT in killed.losses
    return Claim(text, holds, f"step {KILL_AT}, {committed_after_s:.2f} s after the kill")


def check_sidecar_killed(reference: Run, survivor: Run) -> Claim:
    """No step of the training and no save may have been lost with the sidecar."""
    text = "kill -9 of the sidecar in mid-write: every handle resolves committed, training loses no step"
    committed = [save for save in survivor.saves if save["committed_at_s"] is not None]
    holds = survivor.losses == reference.losses and len(committed) == STEPS // SAVE_EVERY and survivor.exit_code == 0
    detail = f"{len(committed)} of {STEPS // SAVE_EVERY} saves committed, {len(survivor.losses)} of {STEPS} steps"
    return Claim(text, holds, detail)


def check_overlap(unsaved: Run, overlapped: Run) -> Claim:
    """Also that nothing of what was copied behind training's back was the state of a later step, see below."""
    committed = [save for save in overlapped.saves if save["committed_at_s"] is not None]
    stall_s, wait_s = (statistics.median(save[name] or 0.0 for save in committed or [{name: 0.0}]) for name in STALLS)
    equal = sum(overlapped.losses.get(step) == loss for step, loss in unsaved.losses.items())
    holds = unsaved.losses == overlapped.losses and len(committed) == STEPS // SAVE_EVERY
    detail = f"{equal} of {STEPS} losses equal bit for bit; save() took {stall_s * 1e3:.1f} ms (median of "
    detail += f"{len(committed)}), optimizer steps waited {wait_s * 1e3:.1f} ms for it"
    return Claim("with overlap=True training draws the curve of one that never saves", holds, detail)


def check_stock_load(run: Run, digests: dict[str, dict[str, str]]) -> Claim:
    """In a fresh interpreter, on one rank, with stock `torch.distributed.checkpoint`."""
    text = f"stock PyTorch reads the last checkpoint of the {run.life} run"
    command = [sys.executable, str(EXAMPLES / "stock_load.py"), str(run.checkpoints / f"step-{STEPS}")]
    output = subprocess.run(command, check=False, stdout=subprocess.PIPE, timeout=RUN_TIMEOUT_S)
    if output.returncode:
        return Claim(text, False, f"the reader exited with {output.returncode}, its error is above")
    loaded, written = json.loads(output.stdout), digests[str(STEPS)]
    equal = sum(loaded.get(fqn) == digest for fqn, digest in written.items())
    detail = f"{equal} of {len(written)} tensors equal bit for bit, 1 rank reads what {RANKS} wrote"
    return Claim(text, loaded == written != {}, detail)


def check_processes(name: str) -> Claim:
    left = until_empty(lambda: processes_of(f"{MARK}={name}"), EXIT_TIMEOUT_S)
    return Claim("no process left", not left, ", ".join(left) or "none carries this run's mark")


def check_shared_memory(name: str) -> Claim:
    left = until_empty(lambda: shared_memory_of(name), EXIT_TIMEOUT_S)
    return Claim("nothing left in /dev/shm", not left, ", ".join(left) or "no file of this run")


def rank_nbytes(checkpoint: Path) -> list[int]:
    """Bytes each rank wrote into one checkpoint."""
    return [sum(path.stat().st_size for path in checkpoint.glob(f"__{rank}_*.distcp")) for rank in range(RANKS)]


def print_costs(runs: list[Run], floors: Floors) -> None:
    """For orientation: single saves beside floors measured afterwards. The benchmark lets them take turns."""

    def cell(seconds: float | None, floor_s: float) -> str:
        return "failed" if seconds is None else f"{seconds * 1e3:.0f} ms ({seconds / floor_s:.1f}x)"

    floor = ("floor", *(f"{seconds * 1e3:.0f} ms" for seconds in (*[floors.copy_s] * 2, *[floors.write_s] * 2)))
    rows = [
        (
            f"{run.life}, step {save['saved_step']}",
            cell(save["stall_s"], floors.copy_s),
            cell(save["wait_s"], floors.copy_s),
            cell(save["persisted_at_s"], floors.write_s),
            cell(save["committed_at_s"], floors.write_s),
        )
        for run in runs
        for save in run.saves
    ]
    headings = ("save", "stall (x one warm copy)", "waited later", "persisted (x raw write + fsync)", "committed")
    print(markdown_table(headings, [floor, *rows]))


def demonstrate(work: Path) -> list[Claim]:
    trainer = Trainer(work)
    reference = trainer.run("uninterrupted", "uninterrupted")
    killed = trainer.run("killed", "interrupted", attack=trainer.kill_the_trainer)
    committed_in_time = check_killed(killed, trainer.committed_after_s)
    resumed = trainer.run("resumed", "interrupted")
    slow = ("--max-write-bytes-per-s", str(SLOW_BYTES_PER_S))
    survivor = trainer.run("sidecar killed", "survivor", attack=trainer.kill_the_sidecar, options=slow)
    unsaved = trainer.run("unsaved", "unsaved", "--save-every", "0")
    overlapped = trainer.run("overlapped", "overlapped", "--overlap")
    nbytes = rank_nbytes(resumed.checkpoints / f"step-{STEPS}")
    print(f"\n== what {sum(nbytes) / 1e6:.0f} MB per save cost, written by {RANKS} ranks while both cores train")
    print_costs([reference, resumed, overlapped], measure_floors(nbytes, work))
    return [
        check_commits(reference, resumed, survivor, overlapped),
        committed_in_time,
        check_resume(reference, resumed),
        check_sidecar_killed(reference, survivor),
        check_overlap(unsaved, overlapped),
        check_stock_load(resumed, resumed.digests),
        check_stock_load(overlapped, reference.digests),
        check_processes(trainer.name),
        check_shared_memory(trainer.name),
    ]


@contextmanager
def work_directory(parent: Path | None, keep: bool) -> Iterator[Path]:
    """A new directory, removed at the end unless it is to be kept."""
    if parent:
        parent.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="ckpt-demo-", dir=parent))
    try:
        yield path
    finally:
        if keep:
            print(f"kept: {path}")
        else:
            shutil.rmtree(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where to work; default: the system's temp")
    parser.add_argument("--keep", action="store_true", help="leave checkpoints and logs behind")
    args = parser.parse_args()
    start = time.monotonic()
    with work_directory(args.directory, args.keep) as work:
        claims = demonstrate(work)
    print(f"\n== claims, after {math.ceil(time.monotonic() - start)} s")
    print(*claims, sep="\n")
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
