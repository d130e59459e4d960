"""What people and probes see of a sidecar: ``status`` and ``health``, and how ``run`` refuses a second one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_proto.runtime_dir import lock_owner
from ckpt_trainer_client import CheckpointClient
from testkit.leaks import left_in
from testkit.sidecars import Sidecar
from testkit.waiting import LIMIT_S, wait_until

COMMAND = (sys.executable, "-m", "ckpt_sidecar")


def run_cli(*arguments: str | Path, command: tuple[str, ...] = COMMAND) -> subprocess.CompletedProcess[str]:
    """One command line, ended within the limit."""
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT_S, cwd="/")


def json_status(sidecar: Sidecar) -> dict[str, Any]:
    """The answer of ``status --json`` about one job."""
    done = run_cli("status", "--json", "--job-id", sidecar.job_id, "--shm-root", sidecar.shm_root)
    assert done.returncode == 0, done.stderr
    [status] = json.loads(done.stdout)
    assert isinstance(status, dict)
    return status


def test_bytes_move_in_status_while_a_throttled_write_is_under_way(
    tmp_path: Path, start_sidecar: Callable[..., Sidecar]
) -> None:
    total = 6 << 20
    sidecar = start_sidecar(max_write_bytes_per_s=total / LIMIT_S)  # far slower than this test, which cuts it short
    where = ("--job-id", sidecar.job_id, "--shm-root", sidecar.shm_root)

    def shard() -> dict[str, Any]:
        [found] = json_status(sidecar)["shards"]
        assert isinstance(found, dict)
        return found

    client = CheckpointClient(tmp_path)
    client.save({"x": torch.ones(total // 4)}, step=3)
    first = wait_until(lambda: (now := shard())["written_bytes"] and now, "the first bytes are written")
    assert (first["step"], first["state"]) == (3, "writing")
    assert 0 < first["written_bytes"] < first["total_bytes"]
    assert total < first["total_bytes"] < total + 100_000
    text = run_cli("status", *where)
    assert text.returncode == 0
    assert "step 3 rank 0: writing" in text.stdout
    healthy = run_cli("health", *where)
    assert (healthy.returncode, healthy.stdout) == (0, "healthy: job job last committed step None\n")
    wait_until(lambda: shard()["written_bytes"] > first["written_bytes"], "bytes move")
    sidecar.cut_short()
    start_sidecar()  # without the cap: finishes what the slow one has left
    client.close()
    assert client.steps() == [3]


def test_status_after_a_save(tmp_path: Path, start_sidecar: Callable[..., Sidecar]) -> None:
    sidecar = start_sidecar()
    with CheckpointClient(tmp_path) as client:
        client.save({"x": torch.ones(1000)}, step=3).result()
        wait_until(sidecar.can_be_filled, "both regions are the rank's again")
        done = json_status(sidecar)
        assert done["last_committed_step"] == 3
        assert done["committed_count"] == 1
        assert done["written_bytes"] == done["shards"][0]["written_bytes"] == done["shards"][0]["total_bytes"]
        assert done["shards"][0]["state"] == "persisted"
        [rank] = done["ranks"]
        assert (rank["pid"], rank["alive"]) == (os.getpid(), True)
        assert [slot["state"] for slot in rank["slots"]] == ["free", "free"]
        assert done["shm_used_bytes"] == sum(slot["region_bytes"] for slot in rank["slots"]) > 8_000
        assert (done["directory"], done["world_size"], done["pid"]) == (str(tmp_path), 1, sidecar.pid)
        text = run_cli("status", "--job-id", sidecar.job_id, "--shm-root", sidecar.shm_root).stdout
        assert "last committed  step 3" in text
        assert "1 committed, 0 failed, 0 skipped" in text


def test_health_is_degraded_by_a_failed_save_until_the_next_success(tmp_path: Path, sidecar: Sidecar) -> None:
    where = ("--job-id", sidecar.job_id, "--shm-root", sidecar.shm_root)
    with CheckpointClient(tmp_path, pre_commit=[lambda step, where: step != 2]) as client:
        client.save({"x": torch.tensor(1)}, step=1).result()
        assert run_cli("health", *where).returncode == 0
        client.save({"x": torch.tensor(2)}, step=2).committed.exception(LIMIT_S)
        degraded = run_cli("health", *where)
        assert degraded.returncode == 1
        assert degraded.stdout.startswith("degraded: job job: the last 1 save(s) failed, newest step 2: ")
        assert "returned False" in degraded.stdout
        assert degraded.stdout.count("\n") == 1
        status = run_cli("status", *where)
        assert status.returncode == 0
        assert "DEGRADED" in status.stdout
        assert [entry["step"] for entry in json_status(sidecar)["failures"]] == [2]
        client.save({"x": torch.tensor(3)}, step=3).result()
        healthy = run_cli("health", *where)
        assert (healthy.returncode, healthy.stdout) == (0, "healthy: job job last committed step 3\n")


def test_a_draining_sidecar_is_degraded_and_takes_no_new_client(
    tmp_path: Path, start_sidecar: Callable[..., Sidecar]
) -> None:
    sidecar = start_sidecar()
    with CheckpointClient(tmp_path) as client:
        client.save({"x": torch.tensor(1)}, step=1).result()
        sidecar.terminate()
        wait_until(lambda: sidecar.status().draining, "the sidecar drains")
        degraded = run_cli("health", "--shm-root", sidecar.shm_root)
        assert degraded.returncode == 1
        assert "draining" in degraded.stdout
        client.save({"x": torch.tensor(2)}, step=2).result()
    assert sidecar.wait() == 0
    assert sidecar.stop() == 0


def test_nobody_to_ask_is_unreachable(shm_root: Path) -> None:
    for command in ("health", "status"):
        for job in ((), ("--job-id", "nobody")):
            done = run_cli(command, "--shm-root", shm_root, *job)
            assert done.returncode == 2
            assert "no sidecar" in done.stdout + done.stderr
            assert (done.stdout + done.stderr).count("\n") == 1


def test_a_sidecar_that_hangs_is_unreachable_within_the_given_time(sidecar: Sidecar) -> None:
    sidecar.pause()
    try:
        done = run_cli("health", "--shm-root", sidecar.shm_root, "--timeout-s", "0.2")
    finally:
        sidecar.resume()
    assert done.returncode == 2
    assert f"(pid {sidecar.pid}) has not answered within 0.2 s" in done.stdout


def test_every_job_is_shown_unless_one_is_named(
    start_sidecar: Callable[..., Sidecar], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = start_sidecar(job_id="one"), start_sidecar(job_id="other")
    monkeypatch.delenv("CKPT_SIDECAR_JOB_ID")
    done = run_cli("status", "--json", "--shm-root", one.shm_root)
    assert [status["pid"] for status in json.loads(done.stdout)] == [one.pid, other.pid]
    assert json_status(other)["pid"] == other.pid
    monkeypatch.setenv("CKPT_SIDECAR_JOB_ID", "one")
    monkeypatch.setenv("CKPT_SIDECAR_SHM_ROOT", str(one.shm_root))
    script = Path(sys.executable).with_name("ckpt-sidecar")
    done = run_cli("status", "--json", command=(str(script),))
    assert [status["pid"] for status in json.loads(done.stdout)] == [one.pid]


@pytest.mark.parametrize("command", ["health", "status", "status --json"])
def test_health_commands_do_without_torch(sidecar: Sidecar, command: str) -> None:
    done = run_cli(
        *command.split(),
        "--shm-root",
        sidecar.shm_root,
        command=(sys.executable, "-X", "importtime", "-m", "ckpt_sidecar"),
    )
    assert done.returncode == 0
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "ckpt_sidecar" in modules
    assert not modules & {"torch", "numpy", "isal", "asyncio", "psutil"}


def test_a_second_sidecar_of_a_job_refuses_to_start_and_names_the_first(sidecar: Sidecar) -> None:
    done = run_cli("run", "--job-id", sidecar.job_id, "--shm-root", sidecar.shm_root)
    assert done.returncode == 4
    assert f"a sidecar (pid {sidecar.pid}) already serves job job" in done.stderr
    assert sidecar.status().pid == sidecar.pid  # its socket has not been stolen


def test_start_in_the_background_twice(shm_root: Path) -> None:
    where = ("--job-id", "again", "--shm-root", shm_root)
    first = run_cli("start", *where)
    pid = lock_owner(shm_root / f"ckpt-sidecar-{os.geteuid()}" / "again")
    assert (first.returncode, first.stdout) == (0, f"sidecar of job again: pid {pid}\n")
    second = run_cli("start", *where)
    assert (second.returncode, second.stdout) == (0, "sidecar of job again: one is running already\n")
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    assert left_in(shm_root, LIMIT_S) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("run",), "--job-id"),
        (("run", "--job-id", "../x"), "job id"),
        (("run", "--job-id", "x", "--shm-root", "/nowhere"), "/nowhere"),
        (("run", "--job-id", "x", "--writers", "0"), "--writers 0"),
        (("run", "--job-id", "x", "--max-write-bytes-per-s", "-1"), "--max-write-bytes-per-s"),
        (("status", "--job-id", "a/b"), "job id"),
        ((), "COMMAND"),
        (("unknown",), "unknown"),
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_named(arguments: tuple[str, ...], named: str, shm_root: Path) -> None:
    done = run_cli(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
