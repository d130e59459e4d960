"""A storage that fails, fills up or hangs: tried again where that can help, else told by name, and training goes on.

The sidecar's own calls are made to fail, while a file named after the error lies in the test's folder.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_trainer_client import CheckpointClient, CheckpointFailed
from testkit.leaks import files_below
from testkit.nodes import serve
from testkit.sidecars import Sidecar
from testkit.waiting import LIMIT_S, wait_until


def serve_in_trouble(arguments: Sequence[str], ready: str, constants: Any, order: None, folder: str) -> int:
    """Process code: a sidecar whose storage is troubled by what lies in ``folder``."""
    real_pwrite, real_link = os.pwrite, os.link

    def trouble(kind: str) -> None:
        flag = Path(folder) / kind
        try:
            left = int(flag.read_text())
        except FileNotFoundError:
            return
        if left == 1:
            flag.unlink()
        elif left > 1:
            flag.write_text(str(left - 1))
        if kind == "hang":
            while flag.exists():
                time.sleep(0.01)  # as a call that does not come back: there is nothing to wait for
            return
        number = getattr(errno, kind.partition("-")[0])
        raise OSError(number, os.strerror(number))

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if threading.current_thread().name.startswith("ckpt-io"):
            for kind in ("EIO", "ENOSPC", "EACCES", "hang"):
                trouble(kind)
        return real_pwrite(fd, data, offset)

    def link(source: Any, target: Any) -> None:
        trouble("EIO-link")
        real_link(source, target)

    os.pwrite, os.link = pwrite, link  # type: ignore[assignment]
    return serve(arguments, ready, constants, order)


@pytest.fixture
def troubled(tmp_path: Path, start_sidecar: Callable[..., Sidecar]) -> Callable[..., Sidecar]:
    """Starts a sidecar whose storage can be troubled."""

    def start(**options: object) -> Sidecar:
        return start_sidecar(program=serve_in_trouble, told=(str(tmp_path),), **options)

    return start


def state(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((100_000,), float(step))}


def stored(client: CheckpointClient, step: int) -> float:
    target = state(-1)
    client.load(target, step)
    return float(target["x"].unique().item())


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC", "EIO-link"])
def test_an_error_that_passes_is_not_noticed(tmp_path: Path, troubled: Callable[..., Sidecar], kind: str) -> None:
    sidecar = troubled()
    (tmp_path / kind).write_text("2")  # the first two calls fail
    with CheckpointClient(tmp_path / "checkpoints") as client:
        client.save(state(1), step=1).result(LIMIT_S)
        assert stored(client, 1) == 1
    assert not (tmp_path / kind).exists()
    assert sidecar.log.read_text().count("Errno") >= 2


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
def test_an_error_that_stays_fails_the_save_by_name_and_the_next_one_works(
    tmp_path: Path, troubled: Callable[..., Sidecar], kind: str
) -> None:
    sidecar = troubled(storage_retry_s=1.0)
    directory = tmp_path / "checkpoints"
    with CheckpointClient(directory) as client:
        client.save(state(1), step=1).result(LIMIT_S)
        (tmp_path / kind).write_text("0")
        failed = client.save(state(2), step=2)
        with pytest.raises(CheckpointFailed, match=r"writing .*step-2/.* failed: .*\[StorageError\]"):
            failed.result(LIMIT_S)
        assert client.steps() == [1]
        assert sidecar.status().failures[-1].step == 2
        (tmp_path / kind).unlink()
        client.save(state(3), step=3).result(LIMIT_S)
        assert [stored(client, step) for step in client.steps()] == [1, 3]
    wait_until(lambda: not [name for name in files_below(directory) if "step-2/" in name], "no file of step 2 is left")


def test_an_error_that_can_not_pass_is_not_tried_again(tmp_path: Path, troubled: Callable[..., Sidecar]) -> None:
    sidecar = troubled(storage_retry_s=1000.0)
    (tmp_path / "EACCES").write_text("1")
    with CheckpointClient(tmp_path / "checkpoints") as client:
        with pytest.raises(CheckpointFailed, match="Permission denied"):
            client.save(state(1), step=1).result(LIMIT_S)
        client.save(state(2), step=2).result(LIMIT_S)
    assert sidecar.log.read_text().count("shard of rank 0, step 1: StorageError") == 1


def test_a_failed_overwrite_leaves_the_older_checkpoint_whole(tmp_path: Path, troubled: Callable[..., Sidecar]) -> None:
    troubled(storage_retry_s=0.0)
    with CheckpointClient(tmp_path / "checkpoints") as client:
        client.save(state(1), step=1).result(LIMIT_S)
        (tmp_path / "EIO").write_text("1")
        with pytest.raises(CheckpointFailed):
            client.save(state(2), step=1, overwrite=True).result(LIMIT_S)
        assert stored(client, 1) == 1


def test_a_storage_that_hangs_fails_the_save_and_training_goes_on(
    tmp_path: Path, troubled: Callable[..., Sidecar]
) -> None:
    troubled(write_stall_s=1.0)
    with CheckpointClient(tmp_path / "checkpoints", slots=2) as client:
        client.save(state(1), step=1).result(LIMIT_S)
        (tmp_path / "hang").write_text("0")
        hung = client.save(state(2), step=2)
        with pytest.raises(CheckpointFailed, match=r"nothing was written to .* for \d+ s .*\[StorageStalled\]"):
            hung.result(LIMIT_S)
        behind = client.save(state(3), step=3)  # into the other region, behind the one that hangs
        assert behind.staged.done()
        (tmp_path / "hang").unlink()
        behind.result(LIMIT_S)
        client.save(state(4), step=4).result(LIMIT_S)
        assert [stored(client, step) for step in client.steps()] == [1, 3, 4]
