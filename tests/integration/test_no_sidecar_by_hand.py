"""Scripts that use nothing but ``CheckpointClient``, started as people do: a sidecar comes and goes by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from ckpt_proto.runtime_dir import job_dirs, lock_owner
from testkit.leaks import left_in, processes_marked
from testkit.ranks import RankStarter
from testkit.stock_load import load_each, load_flat
from testkit.waiting import LIMIT_S, wait_until

PLAIN = """
import sys
import torch
from ckpt_trainer_client import CheckpointClient

with CheckpointClient(sys.argv[1]) as client:
    print("latest", client.latest())
    for step in (1, 2, 3):
        client.save({"x": torch.full((1000,), float(step)), "step": step}, step=step)
print("done")
"""

WITHOUT_CLOSE = """
import sys
import torch
from ckpt_trainer_client import CheckpointClient

client = CheckpointClient(sys.argv[1])
client.save({"x": torch.full((1000,), 1.0), "step": 1}, step=1).result()
client.save({"x": torch.full((1000,), 2.0), "step": 2}, step=2)
if len(sys.argv) > 2:
    raise SystemExit(int(sys.argv[2]))
"""

RANKED = """
import os
import sys
import torch
from ckpt_trainer_client import CheckpointClient

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if "group" in sys.argv:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world_size,))
with CheckpointClient(sys.argv[1]) as client:
    for step in (1, 2, 3):
        mine = torch.arange(10.0) + step
        state = {"x": distribute_tensor(mine, mesh, [Shard(0)]) if "group" in sys.argv else mine, "step": step}
        client.save(state, step=step, per_rank={"rank": rank})
    client.wait()
    found = {"rank": -1}
    target = {"x": torch.zeros(10) if "group" not in sys.argv else torch.zeros_like(state["x"]), "step": 0}
    assert client.load(target, per_rank=found) == 3
    assert found == {"rank": rank} and target["step"] == 3
if "group" in sys.argv:
    dist.destroy_process_group()
"""


WriteScript = Callable[[str], Path]


@pytest.fixture
def write_script(tmp_path: Path) -> WriteScript:
    """Writes a script's text to a file."""

    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def start(*command: str | Path) -> subprocess.Popen[str]:
    """A process whose output is read by :func:`finish`."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd="/",
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and output of a process, waited for within the limit."""
    with process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, output


def values(stock_ranks: RankStarter, directory: Path, steps: Sequence[int]) -> list[tuple[float, int]]:
    """First element and step number of each checkpoint, read by stock DCP."""
    places = [str(directory / f"step-{step}") for step in steps]
    [found] = stock_ranks.run(load_each, 1, places)
    return [(float(found[place]["x"][0]), found[place]["step"]) for place in places]


def test_plain_python_scripts_that_start_together(
    tmp_path: Path, shm_root: Path, write_script: WriteScript, stock_ranks: RankStarter
) -> None:
    script = write_script(PLAIN)
    directories = [tmp_path / "one", tmp_path / "another rün"]
    running = [start(script, directory) for directory in directories]
    for code, output in map(finish, running):
        assert (code, output) == (0, "latest None\ndone\n")
    assert left_in(shm_root, LIMIT_S) == []
    for directory in directories:
        assert values(stock_ranks, directory, (1, 2, 3)) == [(1.0, 1), (2.0, 2), (3.0, 3)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), marks=pytest.mark.faults, id="no process group"),
        pytest.param(("group",), id="gloo and DTensors"),
    ],
)
def test_a_plain_torchrun_script(
    tmp_path: Path, shm_root: Path, write_script: WriteScript, stock_ranks: RankStarter, options: tuple[str, ...]
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    code, output = finish(start(*torchrun, write_script(RANKED), tmp_path / "checkpoints", *options))
    assert code == 0, output
    assert "warn" not in output.lower(), output
    assert left_in(shm_root, LIMIT_S) == []
    [found] = stock_ranks.run(load_flat, 1, str(tmp_path / "checkpoints" / "step-2"))
    assert torch.equal(found["x"], torch.arange(10.0) + 2)
    assert [found[f"per_rank.rank-{rank}.rank"] for rank in range(2)] == [0, 1]


def test_scripts_that_end_right_after_save_without_closing(
    tmp_path: Path, shm_root: Path, write_script: WriteScript, stock_ranks: RankStarter
) -> None:
    success, failure = tmp_path / "success", tmp_path / "failure"
    script = write_script(WITHOUT_CLOSE)
    running = [start(script, success), start(script, failure, "7")]
    assert [finish(process)[0] for process in running] == [0, 7]
    for directory in (success, failure):
        wait_until((directory / "step-2" / ".metadata").exists, "the step that was staged last is committed")
        assert values(stock_ranks, directory, (1, 2)) == [(1.0, 1), (2.0, 2)]

    # The sidecars wait a minute for the job's next life. One job has it, and is served by the same sidecar to its end.
    before = {lock_owner(directory) for directory in job_dirs(shm_root)}
    assert before == set(processes_marked(str(shm_root)))
    code, output = finish(start(write_script(PLAIN.replace("(1, 2, 3)", "(3, 4)")), failure))
    assert (code, output) == (0, "latest 2\ndone\n")
    assert values(stock_ranks, failure, (1, 2, 3, 4)) == [(1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4)]

    # The other one is told to end, and leaves nothing either.
    [waiting] = wait_until(lambda: len(pids := processes_marked(str(shm_root))) == 1 and pids, "one sidecar ends")
    assert waiting in before
    os.kill(waiting, signal.SIGTERM)
    assert left_in(shm_root, LIMIT_S) == []
