"""After everything died: ``ckpt-sidecar recover`` on what real jobs left, and killed itself wherever it can be."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_proto.checkpoint_layout import manifest_name
from ckpt_proto.process import process_start_s
from ckpt_sidecar.__main__ import main
from ckpt_sidecar.commit import publish_checkpoint
from ckpt_trainer_client import CheckpointClient
from testkit.leaks import files_below
from testkit.plans import persist_attempt, save_key
from testkit.ranks import RankStarter
from testkit.sharded_states import SAVED_1D, expected, sharded_state
from testkit.sidecars import Sidecar
from testkit.states import blank_like, copied, differences, nested_state
from testkit.stock_load import load_flat, load_into
from testkit.waiting import LIMIT_S, wait_until


def recover_by_hand(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, as a person runs it."""
    command = [sys.executable, "-m", "ckpt_sidecar", "recover", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd="/")


def recover(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has torch imported already."""
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            code: Any = main(["recover", str(directory), *arguments])
        except SystemExit as refused:
            code = refused.code
    return subprocess.CompletedProcess(["recover", *arguments], code, output.getvalue(), errors.getvalue())


def report_of(directory: Path, *arguments: str) -> dict[str, Any]:
    """Its report; there were no problems."""
    done = recover(directory, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


# ---------------------------------------------------------------- real jobs that died


def die_before_commit(directory: str, sidecar_pid: int) -> None:
    """Rank code: step 2 is durable on every rank; then the sidecar, and every rank, is killed before the commit."""
    mesh_shape = (int(os.environ["WORLD_SIZE"]),)

    def kill_everything(step: int, where: str) -> bool:
        if step == 2:
            os.kill(sidecar_pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    client = CheckpointClient(directory, pre_commit=[kill_everything])
    per_rank = {"state": nested_state(int(os.environ["RANK"]))}
    client.save(sharded_state(mesh_shape, SAVED_1D, 1), step=1, per_rank=per_rank).result()
    client.save(sharded_state(mesh_shape, SAVED_1D, 2), step=2, per_rank=per_rank)
    wait_until(lambda: process_start_s(sidecar_pid) is None, "the sidecar is dead")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_save_that_was_durable_when_everything_died_is_committed_later(
    tmp_path: Path, start_sidecar: Callable[..., Sidecar], ranks: RankStarter, stock_ranks: RankStarter
) -> None:
    sidecar, directory = start_sidecar(), tmp_path / "run"
    job = ranks.start(die_before_commit, 2, str(directory), sidecar.pid, group=True, environment=sidecar.environment)
    assert job.exit_codes() == [-signal.SIGKILL] * 2
    sidecar.kill()
    assert not (directory / "step-2" / ".metadata").exists()

    assert [finding["step"] for finding in report_of(directory, "--dry-run")["committed"]] == [2]
    report_of(directory)  # has the job's regions taken over first, by a sidecar that finds it all durable
    for step in (1, 2):
        [found] = stock_ranks.run(load_flat, 1, str(directory / f"step-{step}"))
        assert differences({fqn: found[fqn] for fqn in expected(step)}, expected(step)) == []
        target = {f"rank-{rank}": {"state": blank_like(nested_state(rank))} for rank in range(2)}
        [loaded] = stock_ranks.run(load_into, 1, str(directory / f"step-{step}"), {"per_rank": target})
        for rank in range(2):
            assert differences(loaded["per_rank"][f"rank-{rank}"]["state"], copied(nested_state(rank))) == []
    assert report_of(directory, "--reap-older-than-s", "0") == {
        "dry_run": False, "directory": str(directory), "committed": [], "reaped": [], "left": [], "problems": [],
    }  # fmt: skip
    assert not sidecar.directory.exists()


def test_what_is_removed_of_a_save_that_is_still_staged_is_written_again(
    tmp_path: Path, start_sidecar: Callable[..., Sidecar]
) -> None:
    directory = tmp_path / "run"
    sidecar = start_sidecar(max_write_bytes_per_s=100_000)  # the second save would take longer than this test
    with CheckpointClient(directory) as client:
        client.save({"x": torch.full((1000,), 1.0)}, step=1).result()
        in_flight = client.save({"x": torch.full((2 << 20,), 2.0)}, step=2)
        wait_until(lambda: list(directory.glob("step-2/*.distcp")), "the write is under way")
        sidecar.kill()
        before = files_below(directory)
        [left] = report_of(directory)["left"]
        assert left["step"] == 2
        assert left["reason"].startswith("incomplete: no shard manifest; last changed ")
        assert files_below(directory) == before
        assert [each["step"] for each in report_of(directory, "--reap-older-than-s", "0")["reaped"]] == [2]
        assert {name.partition("/")[0] for name in files_below(directory)} == {"step-1"}
        start_sidecar()
        in_flight.result(LIMIT_S)
        target = {"x": torch.zeros(2 << 20)}
        assert client.load(target) == 2
        assert differences(target, {"x": torch.full((2 << 20,), 2.0)}) == []


# ---------------------------------------------------------------- recover itself dies


CALLS = ("open", "write", "fsync", "link", "replace", "unlink", "rmdir")


def recover_until(directory: str, deadly: int) -> int:
    """Rank code: recover, killed before its ``deadly``-th call that changes storage; how many there were."""
    calls = itertools.count(1)

    def count(name: str) -> None:
        real = getattr(os, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            is_change = name != "open" or (len(arguments) > 1 and arguments[1] & os.O_CREAT)
            if is_change and next(calls) == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(os, name, counted)

    import ckpt_sidecar.commit  # noqa: F401  (before the calls are counted: what it does to storage is not recovery)

    for name in CALLS:
        count(name)
    assert main(["recover", directory, "--reap-older-than-s", "0"]) == 0
    return next(calls) - 1


def persist(root: Path, step: int, seq: int, *, overwrite: bool = False) -> Any:
    """A complete attempt whose values tell step and number."""
    states = [{"a": torch.full((50,), step + seq / 10), f"rank-{rank}": rank} for rank in range(2)]
    return persist_attempt(root, states, save_key(step, seq), overwrite=overwrite)


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with some of everything."""
    root = tmp_path_factory.mktemp("left") / "run"
    publish_checkpoint(persist(root, 1, 1))
    persist(root, 1, 2)
    persist(root, 2, 1)
    persist(root, 2, 2)
    publish_checkpoint(persist(root, 3, 1))
    persist(root, 3, 2, overwrite=True)
    (root / "step-4" / manifest_name(1, persist(root, 4, 1).save.save_id)).unlink()
    (root / "step-4" / "__1_0a1b2c3d-1.manifest.01234567.tmp").write_bytes(b"torn")
    (root / "step-5").mkdir()
    return root


def values_in(root: Path) -> dict[str, float]:
    """What every committed step holds; all values of one are the same."""
    found = {}
    for path in root.glob("step-*/.metadata"):
        target: dict[str, Any] = {"a": torch.zeros(50), "rank-0": -1, "rank-1": -1}
        dcp.load(target, checkpoint_id=path.parent)
        assert (target["rank-0"], target["rank-1"]) == (0, 1)
        [value] = set(target["a"].tolist())
        found[path.parent.name] = round(value, 3)
    return found


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.faults)])
def test_recover_killed_before_any_of_its_steps_is_finished_by_the_next(
    tmp_path: Path, left_behind: Path, ranks: RankStarter, stride: int
) -> None:
    """Before every step with ``make faults``, before every fourth otherwise."""
    root = tmp_path / "run"

    def die_at(deadly: int) -> Any:
        if root.exists():
            shutil.rmtree(root)
        shutil.copytree(left_behind, root)
        return ranks.start(recover_until, 1, str(root), deadly)

    [count] = die_at(0).results()
    whole = files_below(root)
    assert values_in(root) == {"step-1": 1.1, "step-2": 2.2, "step-3": 3.2}
    assert whole == sorted(
        [f"step-{step}" for step in (1, 2, 3)]
        + [f"step-{step}/.metadata" for step in (1, 2, 3)]
        + [
            f"step-{step}/__{rank}_0a1b2c3d-{seq}.{kind}"
            for step, seq in ((1, 1), (2, 2), (3, 2))
            for rank in range(2)
            for kind in ("distcp", "manifest")
        ]
    )
    for deadly in range(1, count + 1, stride):
        assert die_at(deadly).exit_codes() == [-signal.SIGKILL]
        at_death = values_in(root)
        assert at_death["step-1"] == 1.1
        assert at_death["step-3"] in (3.1, 3.2)
        assert at_death.get("step-2") in (None, 2.2)
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["recover", str(root), "--reap-older-than-s", "0"]) == 0
        assert (files_below(root), values_in(root)) == (whole, {"step-1": 1.1, "step-2": 2.2, "step-3": 3.2}), deadly


# ---------------------------------------------------------------- the command


def test_a_person_sees_a_table_and_can_try_it_first(tmp_path: Path) -> None:
    order = persist(tmp_path, 300, 3)
    broken = persist(tmp_path, 7, 1)
    (tmp_path / "step-7" / manifest_name(1, broken.save.save_id)).write_bytes(b"torn")
    before = files_below(tmp_path)
    tried, done, again = recover(tmp_path, "--dry-run"), recover_by_hand(tmp_path), recover(tmp_path)
    assert [run.returncode for run in (tried, done, again)] == [1, 1, 1]
    heading, committed, problem = done.stdout.splitlines()
    assert heading.split() == ["outcome", "step", "attempt", "size", "reason"]
    assert committed.split()[:3] == ["committed", "300", order.save.save_id]
    assert committed.endswith("complete")
    assert problem.split()[:3] == ["PROBLEM", "7", broken.save.save_id]
    assert "is no shard manifest that can be read here" in problem
    assert tried.stdout.splitlines()[1].split() == ["would", *committed.replace("committed", "commit").split()]
    assert [line.split() for line in again.stdout.splitlines()[1:]] == [problem.split()]
    assert files_below(tmp_path) == sorted([*before, "step-300/.metadata"])


def test_nothing_to_do_is_said_too(tmp_path: Path) -> None:
    done = recover_by_hand(tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}: nothing was left behind\n")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("missing", "is no checkpoint directory"),
        ("file", "is no checkpoint directory"),
        ("step-1", "is itself one step"),
    ],
)
def test_what_is_no_checkpoint_directory_is_refused(tmp_path: Path, name: str, complaint: str) -> None:
    persist(tmp_path, 1, 1)
    (tmp_path / "file").write_bytes(b"")
    before = files_below(tmp_path)
    done = recover(tmp_path / name, "--reap-older-than-s", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path / name} {complaint}" in done.stderr
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("seconds", ["-1", "nan", "soon"])
def test_an_age_that_is_none_is_refused(tmp_path: Path, seconds: str) -> None:
    done = recover(tmp_path, "--reap-older-than-s", seconds)
    assert done.returncode == 2
    assert "reap" in done.stderr
