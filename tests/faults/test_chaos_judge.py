"""An outside judge: ``ckpt-chaos`` kills a process at file events of a save, resumes, and compares what comes back.

It counts the file events below the checkpoint directory in the first Python process of the command that it is given,
and ends that process at one of them. Given a trainer it would find next to none: our trainers write no checkpoint. So
it is given the shell launcher, whose first Python process is the sidecar: the sidecar dies at its own file events, the
trainer goes on, and then the same command is run again. The judge compares what stock DCP reads from the last step,
bit for bit, with the run that nobody disturbed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testkit.outcomes import Outcomes

ROOT = Path(__file__).resolve().parents[2]
JUDGE = "ckpt-chaos==0.1.8"
INSTALL_LIMIT_S = 120
RUN_LIMIT_S = 240
POINTS = 4
STEPS = 4
MODEL = "--layers 1 --width 32 --heads 2 --context 16 --batch-size 1".split()


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the judge is installed; skips where it cannot be had."""
    target = tmp_path_factory.mktemp("judge")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), JUDGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{JUDGE} was not installed within {INSTALL_LIMIT_S} s")
    if done.returncode != 0:
        pytest.skip(f"{JUDGE} cannot be installed here: {done.stderr.strip()[-300:]}")
    return target


def judged(
    judge: Path, work: Path, shm_root: Path, *command: str
) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """What the judge says about a command, in words and as the records of its runs."""
    paths = [str(judge), *(str(ROOT / name) for name in ("proto", "trainer_client", "sidecar"))]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # ckpt-sidecar, for the launcher
        "CKPT_SIDECAR_SHM_ROOT": str(shm_root),
        "OMP_NUM_THREADS": "1",
    }
    reader = f"{sys.executable} {ROOT / 'examples' / 'stock_load.py'} {{out}}/checkpoints/step-{STEPS}"
    options = ["--work", str(work), "--max-points", str(POINTS), "--timeout", str(RUN_LIMIT_S), "--result-cmd", reader]
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_chaos", "run", "--modes", "before", *options, "--", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=(2 * POINTS + 2) * RUN_LIMIT_S,
    )
    records = [json.loads(path.read_text()) for path in sorted(work.glob("pt_*/result.json"))]
    return done, records


def read_by_stock(out: Path) -> dict[str, str]:
    """The digests of the last step's tensors; the judge would take two readers that fail alike for equal."""
    command = [sys.executable, str(ROOT / "examples" / "stock_load.py"), str(out / "checkpoints" / f"step-{STEPS}")]
    digests: dict[str, str] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return digests


def last_event(point: Path) -> int:
    """The number of the last file event of the process that was to be killed."""
    return max(int(line.split("\t")[0]) for line in (point / "events.log.rank0").read_text().splitlines())


@pytest.mark.faults
def test_the_judge_passes_a_sidecar_that_dies_at_its_own_file_events(
    tmp_path: Path, judge: Path, shm_root: Path, outcomes: Outcomes
) -> None:
    # The trainer is told that the judge has its process already: the events of the sidecar are the ones that count.
    torchrun = ["env", "CKPT_CHAOS_ARMED=1", sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [str(ROOT / "examples" / "train_gpt.py"), "--directory", "{out}/checkpoints", *MODEL]
    saves = ["--steps", str(STEPS), "--save-every", str(STEPS // 2)]
    launcher = [str(ROOT / "deploy" / "ckpt-launch.sh"), "--"]
    work = tmp_path / "work"
    with outcomes.run("a sidecar killed at its file events; ckpt-chaos judges", runs=0) as outcome:
        done, records = judged(judge, work, shm_root, *launcher, *torchrun, "--nproc-per-node", "2", *script, *saves)
        differences = [record["outcome"]["weights_diff"] for record in records]
        outcome.runs += len(records)
        outcome.committed += differences.count(0.0)
        outcome.torn += sum(difference not in (0.0, None) for difference in differences)
        outcome.lost += differences.count(None)
    told = done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0, told
    assert f"PASS: {POINTS + 1}" in done.stdout, told
    assert len(records) == POINTS + 1, told
    assert differences == [0.0] * len(records), told
    # It did die there: the judge itself cannot tell, because a job may survive its sidecar.
    dead_at = {
        record["point"][0]: last_event(work / f"pt_{record['order']:03d}") for record in records if "point" in record
    }
    assert all(number == last for number, last in dead_at.items()), dead_at
    assert read_by_stock(work / "reference" / "out"), "the undisturbed run has left nothing to compare with"
