"""Names on storage: what is written is recognised, what is not ours is left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_proto.checkpoint_layout import (
    METADATA_NAME,
    attempt_of,
    checkpoint_id,
    data_file_name,
    manifest_name,
    step_name,
    step_of,
    target_of,
    temporary_name,
)
from ckpt_proto.identity import MAX_RANKS, MAX_STEP, SaveKey
from testkit.protocol_values import REPEATABLE, instances


@REPEATABLE
@given(step=st.integers(0, MAX_STEP))
def test_a_step_is_found_again_in_the_name_of_its_directory(step: int) -> None:
    assert step_of(step_name(step)) == step


@REPEATABLE
@given(rank=st.integers(0, MAX_RANKS - 1), save=instances(SaveKey))
def test_rank_and_attempt_are_found_again_in_file_names(rank: int, save: SaveKey) -> None:
    assert attempt_of(data_file_name(rank, save.save_id)) == (rank, save.save_id)
    assert attempt_of(manifest_name(rank, save.save_id)) == (rank, save.save_id)


@pytest.mark.parametrize(
    "name", ["", "step-", "step-01", "step--1", "step-1 ", "step-1\n", "Step-1", "step-1.tmp", "xstep-1", "step-١"]
)
def test_a_directory_that_only_looks_like_a_step_is_not_one(name: str) -> None:
    assert step_of(name) is None


def test_a_step_that_no_message_could_carry_is_not_one() -> None:
    assert step_of(step_name(MAX_STEP)) == MAX_STEP
    assert step_of(step_name(MAX_STEP + 1)) is None
    assert step_of("step-9999999999999999999") is None


@pytest.mark.parametrize(
    "name",
    [
        METADATA_NAME,
        "__0_0.distcp",
        "__0_9f3ac1d2-3.distcp.tmp",
        "__0_9f3ac1d2-3.tmp",
        "__00_9f3ac1d2-3.distcp",
        "__-1_9f3ac1d2-3.distcp",
        "__0_9F3AC1D2-3.distcp",
        "__0_9f3ac1d2-3.manifest\n",
        "x__0_9f3ac1d2-3.distcp",
        "__0_9f3ac1d2.distcp",
    ],
)
def test_a_file_that_is_not_ours_belongs_to_no_attempt(name: str) -> None:
    assert attempt_of(name) is None


def test_names_of_a_checkpoint_as_the_documentation_shows_them() -> None:
    assert checkpoint_id("/data/run", 300) == "/data/run/step-300"
    assert checkpoint_id("/data/run/", 0) == "/data/run/step-0"
    assert data_file_name(0, "9f3ac1d2-3") == "__0_9f3ac1d2-3.distcp"
    assert manifest_name(0, "9f3ac1d2-3") == "__0_9f3ac1d2-3.manifest"


def test_two_attempts_at_one_step_share_no_file_name() -> None:
    first, second = SaveKey("9f3ac1d2", 3, 300), SaveKey("9f3ac1d2", 4, 300)
    assert data_file_name(0, first.save_id) != data_file_name(0, second.save_id)


def test_data_files_have_the_ending_that_dcp_gives_them() -> None:
    assert data_file_name(7, "9f3ac1d2-3").endswith(".distcp")
    assert not manifest_name(7, "9f3ac1d2-3").endswith(".distcp")


@REPEATABLE
@given(rank=st.integers(0, MAX_RANKS - 1), save=instances(SaveKey), token=st.from_regex(r"[0-9a-f]{8}", fullmatch=True))
def test_a_temporary_file_is_known_by_what_it_would_have_become(rank: int, save: SaveKey, token: str) -> None:
    for name in (METADATA_NAME, manifest_name(rank, save.save_id)):
        temporary = temporary_name(name, token)
        assert target_of(temporary) == name
        assert attempt_of(temporary) is None
        assert target_of(name) is None


@pytest.mark.parametrize(
    "name",
    [
        ".metadata.tmp",  # stock DCP's own
        ".metadata.1.tmp",
        ".metadata.0123456g.tmp",
        ".metadata.01234567.tmp\n",
        ".metadata.01234567.tmp.tmp",
        "notes.01234567.tmp",
        "__0_0.distcp.01234567.tmp",
        ".01234567.tmp",
    ],
)
def test_temporary_files_of_others_are_not_ours(name: str) -> None:
    assert target_of(name) is None
