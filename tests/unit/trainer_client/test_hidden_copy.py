"""The hidden part of a copy, without regions: what it says when it cannot be finished."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_trainer_client.change_watch import VersionWatch, raise_if_changed
from ckpt_trainer_client.errors import CheckpointFailed, TensorChanged
from ckpt_trainer_client.guard import Guard
from ckpt_trainer_client.hidden_copy import HiddenCopy
from ckpt_trainer_client.save_handle import SaveHandle
from ckpt_trainer_client.stage_thread import StageThread


class FakeFilling:
    """Records what is done; ``fails`` at a batch."""

    def __init__(self, fails: int = -1) -> None:
        self.tensors = [torch.zeros(3)]
        self.did: list[Any] = []
        self._fails = fails

    def copy(self, places: Iterable[int]) -> None:
        self.did.append(list(places))
        if len(self.did) - 1 == self._fails:
            raise CheckpointFailed(7, [FailureReport("RankLost", "rank 1 is gone")])

    def discard(self) -> None:
        self.did.append("discard")


class Still:
    """Nothing changes."""

    def changed(self, places: Iterable[int]) -> list[int]:
        return []


@pytest.mark.parametrize(("fails", "told"), [(-1, "handed over"), (1, "given up")])
def test_a_save_that_was_given_up_ends_after_one_batch(fails: int, told: str) -> None:
    said: list[str] = []
    filling: Any = FakeFilling(fails)
    handle = SaveHandle(SaveKey("0" * 8, 0, 7), str)
    copy = HiddenCopy(
        handle,
        filling,
        [[0, 1], [2], [3]],
        Still(),
        lambda handle, filling: said.append("handed over"),
        lambda handle, error: said.append("given up"),
    )
    thread = StageThread()
    assert thread.start(copy.run)
    copy.wait()
    thread.close()
    assert said == [told]
    assert filling.did == ([[0, 1], [2], [3]] if fails < 0 else [[0, 1], [2], "discard"])
    assert handle.staged.done() == (fails < 0)


def test_changes_are_found_by_the_versions_of_tensors_and_named() -> None:
    tensors = {3: torch.zeros(4), 5: torch.zeros(4)}
    with torch.inference_mode():
        tensors[9] = torch.zeros(4)  # has no version; nothing is known of it
    watch = VersionWatch(tensors)
    raise_if_changed(watch, [3, 5, 9], str)
    tensors[5][1:].add_(1)  # through a view
    with pytest.raises(TensorChanged) as raised:
        raise_if_changed(watch, [3, 5, 9], "key {}".format)
    assert raised.value.keys == ("key 5",)


def test_buffers_of_models_that_are_alive() -> None:
    guard = Guard()
    kept, dropped = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    guard.watch(kept)
    guard.watch(dropped)
    assert len(guard.buffers()) == 6
    del dropped
    assert guard.buffers() == {buffer.untyped_storage().data_ptr() for buffer in kept.buffers()}
