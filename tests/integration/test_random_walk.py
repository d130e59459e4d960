"""Many saves in random order of good and bad ones: all ranks agree on each end, and what is committed is right."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_trainer_client import CheckpointClient, CheckpointError
from testkit.ranks import RankStarter
from testkit.sidecars import Sidecar
from testkit.stock_load import load_each
from testkit.waiting import wait_until

SAVES = 40
KINDS = (
    "good",
    "good",
    "good",
    "grown everywhere",
    "grown on one",
    "bad value on one",
    "veto",
    "other step",
    "large blob",
)


def walk(seed: int, world_size: int) -> list[tuple[str, int, int]]:
    """``(kind, odd rank, size)`` of each save; the same on every rank."""
    draw = random.Random(seed)
    steps, size = [], 5
    for _ in range(SAVES):
        kind = draw.choice(KINDS)
        size += kind == "grown everywhere"
        steps.append((kind, draw.randrange(world_size), size))
    return [*steps, ("good", 0, 5)]


def state_of(step: int, kind: str, size: int, *, is_odd: bool) -> dict[str, Any]:
    """What a rank saves."""
    state: dict[str, Any] = {"x": torch.full((size,), float(step)), "step": step}
    if kind == "grown on one" and is_odd:
        state["x"] = torch.full((size + 1,), float(step))
    if kind == "large blob":
        state["step"] = "x" * (step * 10_000)
    return state


def wander(directory: str, seed: int) -> list[str]:
    """Rank code: the walk; how each save ended on this rank."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    steps = walk(seed, world_size)
    draw = random.Random(seed * 100 + rank)
    vetoed = {step for step, (kind, _, _) in enumerate(steps) if kind == "veto"}
    ends: list[Any] = []
    with CheckpointClient(directory, slots=1 + seed % 3, pre_commit=[lambda step, where: step not in vetoed]) as client:
        for step, (kind, odd_rank, size) in enumerate(steps[:SAVES]):
            is_odd = rank == odd_rank
            try:
                number = step + 1_000 if kind == "other step" and is_odd else step
                mine = {"value": (lambda: 1) if kind == "bad value on one" and is_odd else rank}
                ends.append(client.save(state_of(step, kind, size, is_odd=is_odd), step=number, per_rank=mine))
            except CheckpointError as error:
                ends.append(error)
            if draw.random() < 0.2:
                client.wait()
        client.wait()
        ends.append(client.save(state_of(SAVES, "good", 5, is_odd=False), step=SAVES, per_rank={"value": rank}))
        client.wait()
        return [
            "failed" if isinstance(end, CheckpointError) or end.error() is not None else "committed" for end in ends
        ]


@pytest.mark.parametrize("seed", [0, 2, 3, 11])
def test_the_ranks_agree_and_the_checkpoints_are_right(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter, stock_ranks: RankStarter, seed: int
) -> None:
    world_size = 2 + seed % 2
    results = ranks.run(wander, world_size, str(tmp_path), seed, environment=sidecar.environment)
    assert all(result == results[0] for result in results)
    steps = walk(seed, world_size)
    places = {step: str(tmp_path / f"step-{step}") for step, end in enumerate(results[0]) if end == "committed"}
    [loaded] = stock_ranks.run(load_each, 1, list(places.values()))
    for step, (end, (kind, _, size)) in enumerate(zip(results[0], steps, strict=True)):
        if kind in ("grown on one", "bad value on one", "veto", "other step"):
            assert end == "failed", (step, kind)
        if end == "committed":
            found = loaded[places[step]]
            assert isinstance(found, dict), found
            assert torch.equal(found["x"], torch.full((size,), float(step)))
            assert [found[f"per_rank.rank-{rank}.value"] for rank in range(world_size)] == list(range(world_size))
            assert found["step"] == state_of(step, kind, size, is_odd=False)["step"]
    committed = {step for step, end in enumerate(results[0]) if end == "committed"}
    wait_until(
        lambda: {int(path.name.removeprefix("step-")) for path in tmp_path.iterdir()} == committed,
        "the files of failed saves are removed",
    )
    # A save may fail because of one before it: it was begun while that one made every plan void. The last cannot.
    assert SAVES in committed
