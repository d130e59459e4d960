"""What storage says of a save: durable shards by name, a commit only when it is there to stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_proto.checkpoint_layout import METADATA_NAME, manifest_name
from ckpt_proto.errors import StorageError
from ckpt_trainer_client import degraded_ledger
from ckpt_trainer_client.degraded_decisions import Ledger
from ckpt_trainer_client.degraded_ledger import LedgerView
from testkit.plans import save_key

SAVE, LATER = save_key(step=5, seq=3), save_key(step=5, seq=4)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """The directory of the step."""
    path = tmp_path / "step-5"
    path.mkdir()
    return path


def lay(step: Path, *ranks: int) -> None:
    for rank in ranks:
        (step / manifest_name(rank, SAVE.save_id)).touch()


def publish(step: Path, save_id: str = SAVE.save_id) -> None:
    (step / METADATA_NAME).write_bytes(f"<{save_id}>".encode())


def view(tmp_path: Path, rank: int = 0) -> LedgerView:
    return LedgerView(str(tmp_path), rank, 4)


def test_rank_0_looks_for_all_and_another_for_rank_0_and_itself(tmp_path: Path, step: Path) -> None:
    lay(step, 0, 1, 3)
    assert view(tmp_path).look(SAVE) == Ledger(False, frozenset({0, 1, 3}))
    assert view(tmp_path, 1).look(SAVE) == Ledger(False, frozenset({0, 1}))
    assert view(tmp_path, 2).look(SAVE) == Ledger(False, frozenset({0}))
    assert view(tmp_path, 2).missing(SAVE) == [2]
    assert [view(tmp_path, rank).has_own(SAVE) for rank in range(4)] == [True, True, False, True]


def test_nothing_is_there_before_the_first_shard(tmp_path: Path) -> None:
    assert view(tmp_path).look(SAVE) == Ledger(False, frozenset())
    assert view(tmp_path).missing(SAVE) == [0, 1, 2, 3]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_attempt_that_metadata_names_is_published(tmp_path: Path, step: Path, rank: int) -> None:
    publish(step)
    assert view(tmp_path, rank).look(SAVE).published
    assert not view(tmp_path, rank).look(LATER).published


def test_metadata_that_has_not_changed_is_not_read_again(
    tmp_path: Path, step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    real = degraded_ledger.is_named_in_metadata

    def look(path: Path, save_id: str) -> bool:
        looked.append(save_id)
        return real(path, save_id)

    monkeypatch.setattr(degraded_ledger, "is_named_in_metadata", look)
    publish(step)
    mine = view(tmp_path)
    for _ in range(3):
        assert not mine.look(LATER).published
    assert looked == [LATER.save_id]
    mine.keep_only([LATER])
    (step / "new").write_bytes(LATER.save_id.encode())
    (step / "new").replace(step / METADATA_NAME)
    assert mine.look(LATER).published
    mine.keep_only([])
    assert mine.look(LATER).published


def test_metadata_that_is_taken_away_again_is_no_commit(
    tmp_path: Path, step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its publisher could not make the directory durable."""
    publish(step)
    monkeypatch.setattr(degraded_ledger, "_sync", lambda directory: (step / METADATA_NAME).unlink())
    mine = view(tmp_path)
    assert not mine.look(SAVE).published
    monkeypatch.undo()
    publish(step)
    assert mine.look(SAVE).published


def test_a_commit_that_cannot_be_made_durable_is_none_yet(
    tmp_path: Path, step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    publish(step)
    mine = view(tmp_path)
    monkeypatch.setattr(os, "fsync", fail)
    ledger = mine.look(SAVE)
    assert (ledger.published, ledger.durable) == (False, frozenset())
    assert "Input/output error" in ledger.trouble
    monkeypatch.undo()
    assert mine.look(SAVE).published


def test_a_storage_that_cannot_be_read_is_trouble_and_no_absence(tmp_path: Path) -> None:
    (tmp_path / "step-5").touch()
    ledger = view(tmp_path).look(SAVE)
    assert not ledger.published
    assert ledger.trouble
    with pytest.raises(StorageError):
        view(tmp_path).missing(SAVE)
