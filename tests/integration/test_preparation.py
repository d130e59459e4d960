"""``prepare()``: plan and regions are there before the first save, which is then like any later one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_proto.runtime_dir import runtime_dir
from ckpt_trainer_client import CheckpointClient, CheckpointError, UnsupportedLeaf
from testkit.ranks import RankStarter
from testkit.sidecars import Sidecar
from testkit.waiting import LIMIT_S

ELEMENTS = 20_000


def regions(root: str, job_id: str) -> list[tuple[str, int, int]]:
    """Names, inodes and allocated bytes of the regions of a job."""
    found = sorted(runtime_dir(Path(root), job_id).glob("*.region"))
    return [(path.name, path.stat().st_ino, path.stat().st_blocks * 512) for path in found]


def prepare_and_save(directory: str) -> tuple[list[Any], list[Any], bool]:
    """Rank code: the regions after preparing and after four saves, and whether the plan is the same."""
    config_root = os.environ["CKPT_SIDECAR_SHM_ROOT"]
    job_id = os.environ["CKPT_SIDECAR_JOB_ID"]
    rank = os.environ["RANK"]
    with CheckpointClient(directory) as client:
        state = {f"x{rank}": torch.zeros(ELEMENTS), "text": "x" * 100}
        client.prepare(state, per_rank={"noise": bytes(200_000)}).result(LIMIT_S)
        mine = [found for found in regions(config_root, job_id) if found[0].startswith(f"rank-{rank}.")]
        plan = client._saver._stager._plan
        for step in range(4):
            state[f"x{rank}"].fill_(step)
            client.save(state, step=step, per_rank={"noise": os.urandom(200_000)})
            if step % 2:
                client.wait()
        after = [found for found in regions(config_root, job_id) if found[0].startswith(f"rank-{rank}.")]
        assert client.steps() == [0, 1, 2, 3]
        target = {f"x{rank}": torch.zeros(ELEMENTS)}
        client.load(target)
        assert target[f"x{rank}"].sum() == 3 * ELEMENTS
        return mine, after, plan is client._saver._stager._plan


def test_the_first_save_needs_neither_a_plan_nor_memory(tmp_path: Path, sidecar: Sidecar, ranks: RankStarter) -> None:
    for prepared, saved, same_plan in ranks.run(prepare_and_save, 2, str(tmp_path), environment=sidecar.environment):
        assert same_plan
        assert len(prepared) == 2
        assert prepared == saved
        assert all(allocated >= 4 * ELEMENTS + 200_000 for _, _, allocated in prepared)
    status = sidecar.status()
    assert (status.skipped_count, status.failed_count, status.failures) == (0, 0, ())


def test_a_save_waits_for_the_preparation_before_it(tmp_path: Path, sidecar: Sidecar) -> None:
    with CheckpointClient(tmp_path) as client:
        prepared = client.prepare({"x": torch.zeros(ELEMENTS)})
        handle = client.save({"x": torch.ones(ELEMENTS)}, step=0)
        assert prepared.done()
        prepared.result()
        assert handle.result(LIMIT_S)
        client.prepare({"x": torch.zeros(ELEMENTS)})  # at any time, also when there is nothing to do
        client.prepare({"y": torch.zeros(ELEMENTS)})  # or another structure
        client.save({"y": torch.ones(ELEMENTS)}, step=1).result(LIMIT_S)


def prepare_what_one_cannot_save(directory: str) -> str:
    """Rank code: what the preparation said on this rank."""
    rank = int(os.environ["RANK"])
    with CheckpointClient(directory) as client:
        bad = {"x": torch.zeros(3), **({"hook": lambda: 1} if rank else {})}
        try:
            client.prepare(bad).result(LIMIT_S)
            told = ""
        except (CheckpointError, UnsupportedLeaf) as error:
            told = str(error)
        client.save({"x": torch.zeros(3)}, step=1).result(LIMIT_S)
        assert client.steps() == [1]
    return told


def test_what_cannot_be_prepared_is_told_on_every_rank_and_the_next_save_works(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter
) -> None:
    told = ranks.run(prepare_what_one_cannot_save, 2, str(tmp_path), environment=sidecar.environment)
    assert all("hook" in text for text in told)


def prepare_alone(directory: str) -> str:
    """Rank code: rank 0 prepares, rank 1 never does, and both close."""
    with CheckpointClient(directory) as client:
        if os.environ["RANK"] == "0":
            prepared = client.prepare({"x": torch.zeros(3)})
    if os.environ["RANK"] == "0":
        with pytest.raises(CheckpointError) as raised:
            prepared.result(0)
        return str(raised.value)
    return ""


def test_a_preparation_that_other_ranks_do_not_join_does_not_hold_up_the_end(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter
) -> None:
    told, _ = ranks.run(prepare_alone, 2, str(tmp_path), environment=sidecar.environment)
    assert "prepar" in told
