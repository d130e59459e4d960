"""Nobody can start a sidecar any more: ranks with the policy ``degraded`` have their saves written and committed by
stand-ins, and go on with a sidecar when there is one again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_trainer_client import CheckpointClient
from testkit.forked_sidecars import ForkedSidecar
from testkit.ranks import RankStarter
from testkit.stock_load import load_each
from testkit.waiting import LIMIT_S, wait_until

BOUND_S = 4.0
"""How long the clients wait for a sidecar; longer than their patience before they look whether one runs."""

Check = Callable[[Sequence[int]], None]


@pytest.fixture
def sidecar(
    shm_root: Path, tmp_path: Path, ranks: RankStarter, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ForkedSidecar]:
    """The sidecar of this test's job; no client ever starts one."""
    folder = tmp_path / "sidecar"
    folder.mkdir()
    sidecar = ForkedSidecar(ranks, shm_root, folder)
    for name, value in sidecar.environment.items():
        monkeypatch.setenv(name, value)
    yield sidecar
    print(sidecar.story())
    assert sidecar.stop() == 0


@pytest.fixture
def check(tmp_path: Path, stock_ranks: RankStarter) -> Check:
    """Whether exactly these steps are committed and stock PyTorch finds in each what was staged for it."""

    def look(steps: Sequence[int]) -> None:
        committed = sorted(tmp_path.glob("step-*/.metadata"))
        assert sorted(int(path.parent.name.partition("-")[2]) for path in committed) == sorted(steps)
        places = [str(tmp_path / f"step-{step}") for step in steps]
        [found] = stock_ranks.run(load_each, 1, places)
        for step, place in zip(steps, places, strict=True):
            content = found[place]
            assert isinstance(content, dict), content
            assert content["step"] == step
            assert bool((content["x"] == float(step)).all())

    return look


def state(step: int) -> dict[str, Any]:
    """A state whose values tell its step: a tensor, and a value that is none."""
    return {"x": torch.full((1000,), float(step)), "step": step}


def client_of(directory: str | Path, **options: Any) -> CheckpointClient:
    given = {"no_sidecar": "degraded", "connect_timeout_s": BOUND_S, "stage_timeout_s": 60.0, **options}
    return CheckpointClient(directory, **given)


def tell(directory: str, rank: int, what: str) -> None:
    Path(directory, f"rank-{rank}.{what}").touch()


def told(directory: Path, what: str) -> Callable[[], bool]:
    return lambda: all((directory / f"rank-{rank}.{what}").exists() for rank in (0, 1))


def save_without_and_with_a_sidecar(directory: str) -> list[int]:
    """Rank code: the sidecar is killed when the second save is staged; the fifth is served by another."""
    rank = int(os.environ["RANK"])
    with client_of(directory) as client:
        client.save(state(1), step=1, per_rank={"rank": rank}).result(LIMIT_S)
        handle = client.save(state(2), step=2, per_rank={"rank": rank})
        tell(directory, rank, "staged")
        handle.result(LIMIT_S)
        assert handle.persisted.done()
        for step in (3, 4):
            client.save(state(step), step=step, per_rank={"rank": rank}).result(LIMIT_S)
        tell(directory, rank, "degraded")
        wait_until(Path(directory, "served").exists, "there is a sidecar again")
        client.save(state(5), step=5, per_rank={"rank": rank}).result(LIMIT_S)
        return client.steps()


def test_two_ranks_save_on_and_go_on_with_a_sidecar_when_there_is_one(
    tmp_path: Path, sidecar: ForkedSidecar, check: Check, ranks: RankStarter
) -> None:
    sidecar.pause()
    sidecar.resume()
    running = ranks.start(save_without_and_with_a_sidecar, 2, str(tmp_path), environment=sidecar.environment)
    wait_until(told(tmp_path, "staged"), "the second save is staged")
    sidecar.kill()
    wait_until(told(tmp_path, "degraded"), "four saves are committed")
    sidecar.start()
    (tmp_path / "served").touch()
    assert running.results() == [[1, 2, 3, 4, 5]] * 2
    logs = [running.text(rank) for rank in (0, 1)]
    assert [log.count("is written without one") for log in logs] == [1, 1], logs
    assert [log.count("answers again") for log in logs] == [1, 1], logs
    check([1, 2, 3, 4, 5])
