"""The sidecar as a process: what it is to the system, how it ends, and what the death of ranks means for it."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_proto.runtime_dir import job_dirs, lock_owner
from ckpt_trainer_client import CheckpointClient, CheckpointFailed, SaveHandle
from testkit.ranks import RankStarter
from testkit.sidecars import Sidecar
from testkit.waiting import LIMIT_S, wait_until


def state(step: int, size: int = 1000) -> dict[str, torch.Tensor]:
    """A state whose values tell its step."""
    return {"x": torch.full((size,), float(step))}


def step_stored(client: CheckpointClient, step: int, size: int = 1000) -> float:
    """The value that a committed step holds."""
    target = state(-1, size)
    client.load(target, step)
    assert bool((target["x"] == target["x"][0]).all())
    return float(target["x"][0])


def ended(handle: SaveHandle) -> CheckpointFailed | None:
    """How a save ended, waited for."""
    handle.committed.exception(LIMIT_S)
    return handle.error()


def own_sidecar(shm_root: Path) -> int:
    """The sidecar that a client of this test has started."""
    [directory] = job_dirs(shm_root)
    pid = lock_owner(directory)
    assert pid
    return pid


def environment_of(pid: int) -> dict[str, str]:
    """What a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.partition("=")[::2] for entry in entries if entry)


# ---------------------------------------------------------------- what it is


def test_a_sidecar_started_by_a_client_stands_on_its_own(
    tmp_path: Path, shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("CKPT_SIDECAR_NICE")
    with CheckpointClient(tmp_path) as client:
        client.save(state(1), step=1).result()
        pid = own_sidecar(shm_root)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        parent, group, session = map(int, fields[1:4])
        assert session == pid != os.getsid(0)
        assert group == pid != os.getpgid(0)
        assert parent != os.getpid()
        assert environment_of(pid)["CUDA_VISIBLE_DEVICES"] == ""
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
        assert (tmp_path / "step-1" / ".metadata").exists()


def test_everything_in_shared_memory_is_private(tmp_path: Path, shm_root: Path) -> None:
    before = os.umask(0)
    try:
        with CheckpointClient(tmp_path) as client:
            client.save(state(1), step=1).result()
            found = list(shm_root.rglob("*"))
            assert {path.suffix for path in found} >= {".region", ".seal", ".sock", ".lock", ".log"}
            for path in found:
                status = path.lstat()
                assert status.st_uid == os.geteuid()
                assert not stat.S_IMODE(status.st_mode) & 0o077 or path.suffix == ".sock", path
                if path.is_dir():
                    assert stat.S_IMODE(status.st_mode) == 0o700
    finally:
        os.umask(before)


def test_checkpoint_files_have_the_modes_that_the_umask_gives(
    tmp_path: Path, start_sidecar: Callable[..., Sidecar]
) -> None:
    before = os.umask(0o027)
    try:
        start_sidecar(as_command=True)
        with CheckpointClient(tmp_path / "checkpoints") as client:
            client.save(state(1), step=1).result()
    finally:
        os.umask(before)
    modes = {path.name.rpartition(".")[2]: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*/step-1/*")}
    assert modes == {"distcp": 0o640, "manifest": 0o640, "metadata": 0o640}
    assert stat.S_IMODE((tmp_path / "checkpoints" / "step-1").stat().st_mode) == 0o750


# ---------------------------------------------------------------- how it ends


def test_sigterm_drains_what_is_in_flight(tmp_path: Path, start_sidecar: Callable[..., Sidecar]) -> None:
    # Two windows of the writer per save, each waits for the bandwidth that the one before has taken.
    size = 3 << 20
    sidecar = start_sidecar(as_command=True, max_write_bytes_per_s=20 << 20)
    with CheckpointClient(tmp_path) as client:
        handles = [client.save(state(step, size), step=step) for step in (1, 2)]
        sidecar.terminate()
        for handle in handles:
            handle.result()
        assert step_stored(client, 2, size) == 2
    assert sidecar.wait() == 0
    assert not sidecar.directory.exists()


def test_sigterm_while_no_rank_is_left_drains_too(
    tmp_path: Path, start_sidecar: Callable[..., Sidecar], ranks: RankStarter
) -> None:
    sidecar = start_sidecar(max_write_bytes_per_s=20 << 20)
    running = ranks.start(save_and_die, 1, str(tmp_path), 3 << 20, environment=sidecar.environment)
    assert running.exit_codes() == [-signal.SIGKILL]
    sidecar.terminate()
    assert sidecar.wait() == 0
    assert (tmp_path / "step-1" / ".metadata").exists()
    assert (tmp_path / "step-2" / ".metadata").exists()


def save_and_die(directory: str, size: int) -> None:
    """Rank code: killed in the instant in which the second save is staged."""
    client = CheckpointClient(directory)
    client.save(state(1, size), step=1).result()
    client.save(state(2, size), step=2)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_sidecar_that_nobody_needs_ends_by_itself_when_told_to(start_sidecar: Callable[..., Sidecar]) -> None:
    sidecar = start_sidecar(idle_exit_s=0.1)
    assert sidecar.wait() == 0
    assert not sidecar.directory.exists()


def test_what_a_second_sigterm_cuts_short_is_finished_by_the_next_sidecar(
    tmp_path: Path, start_sidecar: Callable[..., Sidecar]
) -> None:
    sidecar = start_sidecar(as_command=True, max_write_bytes_per_s=100_000)  # far slower than this test
    client = CheckpointClient(tmp_path)
    handle = client.save(state(1, 2 << 20), step=1)
    wait_until(lambda: [shard.state for shard in sidecar.status().shards] == ["writing"], "the write is under way")
    sidecar.cut_short()
    assert "what is staged stays in" in sidecar.log.read_text()
    assert not (tmp_path / "step-1" / ".metadata").exists()
    assert not handle.done()
    start_sidecar()
    handle.result(LIMIT_S)
    assert step_stored(client, 1, 2 << 20) == 1
    client.close()


# ---------------------------------------------------------------- its death (more in test_sidecar_death.py)


def save_around_a_death(directory: str, shm_root: str, job_id: str) -> list[int]:
    """Rank code: the sidecar dies between two saves; the next ones wait for another and are committed."""
    import torch.distributed as dist

    from ckpt_sidecar.status_query import ask_status

    with CheckpointClient(directory) as client:
        client.save(state(1), step=1).result()
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(ask_status(shm_root, job_id).pid, signal.SIGKILL)
        dist.barrier()
        for step in (2, 3):
            client.save(state(step), step=step).result(LIMIT_S)
        return client.steps()


def test_all_ranks_come_back_to_a_replaced_sidecar(tmp_path: Path, shm_root: Path, ranks: RankStarter) -> None:
    environment = {"CKPT_SIDECAR_SHM_ROOT": str(shm_root), "CKPT_SIDECAR_JOB_ID": "job"}
    arguments = (str(tmp_path), str(shm_root), "job")
    results = ranks.run(save_around_a_death, 2, *arguments, group=True, environment=environment)
    assert results == [[1, 2, 3]] * 2


# ---------------------------------------------------------------- death of a rank


def leave_before_the_second_save(directory: str) -> Any:
    """Rank code: rank 1 is killed instead of saving; how the save ended on rank 0."""
    client = CheckpointClient(directory)
    client.save(state(1), step=1).result()
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    failure = ended(client.save(state(2), step=2))
    client.close()
    return str(failure)


def test_a_rank_that_dies_before_it_has_staged_fails_the_save_of_the_others(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter
) -> None:
    running = ranks.start(leave_before_the_second_save, 2, str(tmp_path), environment=sidecar.environment)
    assert running.exit_codes() == [0, -signal.SIGKILL]
    text = running.result_of(0)
    assert "rank 1" in text
    assert "left before it had staged step 2" in text
    wait_until(lambda: not (tmp_path / "step-2").exists(), "the files of the failed save are removed")


def die_after_the_second_save(directory: str) -> None:
    """Rank code: both ranks are killed as soon as the second save is staged on both."""
    import torch.distributed as dist

    client = CheckpointClient(directory)
    client.save(state(1), step=1).result()
    client.save(state(2), step=2)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_all_ranks_have_staged_is_committed_although_they_are_killed(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter
) -> None:
    running = ranks.start(die_after_the_second_save, 2, str(tmp_path), group=True, environment=sidecar.environment)
    assert running.exit_codes() == [-signal.SIGKILL] * 2
    wait_until((tmp_path / "step-2" / ".metadata").exists, "the staged step is committed")
    with CheckpointClient(tmp_path) as client:  # the job's next life, on one rank
        assert client.latest() == 2
        assert step_stored(client, 2) == 2
        client.save(state(3), step=3).result()
