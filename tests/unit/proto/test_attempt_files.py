"""What the names in a step's directory tell: who is durable, and which attempt is committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_proto.attempt_files import durable_ranks, is_named_in_metadata
from ckpt_proto.checkpoint_layout import METADATA_NAME, data_file_name, manifest_name
from ckpt_proto.errors import StorageError

SAVE_ID = "0a1b2c3d-3"


def test_the_ranks_with_a_manifest_of_the_attempt_are_durable(tmp_path: Path) -> None:
    for rank in (0, 2, 10):
        (tmp_path / manifest_name(rank, SAVE_ID)).touch()
    assert durable_ranks(tmp_path, SAVE_ID) == {0, 2, 10}


@pytest.mark.parametrize(
    "name",
    [
        manifest_name(0, "0a1b2c3d-31"),
        manifest_name(0, "0a1b2c3e-3"),
        data_file_name(0, SAVE_ID),
        manifest_name(0, SAVE_ID) + ".tmp",
        "x" + manifest_name(0, SAVE_ID),
        METADATA_NAME,
    ],
)
def test_nothing_else_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert durable_ranks(tmp_path, SAVE_ID) == frozenset()


def test_where_nothing_was_ever_written_nobody_is(tmp_path: Path) -> None:
    assert durable_ranks(tmp_path / "step-5", SAVE_ID) == frozenset()


def test_a_directory_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "step-5").touch()
    with pytest.raises(StorageError, match="step-5 cannot be read"):
        durable_ranks(tmp_path / "step-5", SAVE_ID)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"..0a1b2c3d-3..", True),
        (b"0a1b2c3d-3", True),
        (b"..0a1b2c3d-31..", False),
        (b"..0a1b2c3d-31..0a1b2c3d-3", True),
        (b"..0a1b2c3d.3..", False),
        (b"", False),
    ],
)
def test_the_attempt_that_metadata_names_is_committed(tmp_path: Path, content: bytes, named: bool) -> None:
    (tmp_path / METADATA_NAME).write_bytes(content)
    assert is_named_in_metadata(tmp_path, SAVE_ID) is named


def test_without_metadata_nothing_is_committed(tmp_path: Path) -> None:
    assert not is_named_in_metadata(tmp_path, SAVE_ID)


def test_a_link_in_its_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(SAVE_ID.encode())
    (tmp_path / METADATA_NAME).symlink_to("elsewhere")
    with pytest.raises(StorageError, match="symbolic link"):
        is_named_in_metadata(tmp_path, SAVE_ID)
