"""Whether a region is sealed, as a client finds out for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_proto.region import Seal, region_path, seal_path
from ckpt_trainer_client.seal_look import is_sealed


@pytest.fixture
def region(tmp_path: Path) -> Path:
    """A region that is sealed."""
    path = region_path(tmp_path, 0, 0)
    seal = Seal(seal_path(path))
    seal.reserve(64)
    seal.set(b"sealed")
    seal.close()
    return path


def test_a_seal_is_seen_until_it_is_broken(region: Path) -> None:
    assert is_sealed(region)
    seal = Seal(seal_path(region))
    seal.clear()
    seal.close()
    assert not is_sealed(region)


def test_where_there_is_no_seal_none_is_made(region: Path) -> None:
    seal_path(region).unlink()
    assert not is_sealed(region)
    assert not seal_path(region).exists()


def test_a_seal_that_cannot_be_trusted_counts(region: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody may fill a region that somebody may be writing."""
    seal_path(region).chmod(0o666)
    assert is_sealed(region)
    assert str(seal_path(region)) in caplog.text
