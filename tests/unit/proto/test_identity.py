"""Names become paths and log lines: what may be one, and what any text is made into."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_proto.errors import LocalProtocolError
from ckpt_proto.identity import MAX_STEP, SaveKey, check_job_id, check_session, job_id_from, save_key_of
from testkit.protocol_values import REPEATABLE, instances


@pytest.mark.parametrize("job_id", ["a", "_", "0", "llama-70b.v2_x", "A" * 64, "a..b"])
def test_a_valid_job_id_is_returned_unchanged(job_id: str) -> None:
    assert check_job_id(job_id) == job_id
    assert job_id_from(job_id) == job_id


@pytest.mark.parametrize("job_id", ["", ".", "..", ".hidden", "-rf", "a/b", "a b", "a\0", "a\n", "é", "A" * 65, "../x"])
def test_a_job_id_that_could_leave_its_directory_or_hide_is_refused(job_id: str) -> None:
    with pytest.raises(LocalProtocolError, match="job id"):
        check_job_id(job_id)


def test_a_refusal_shows_only_the_beginning_of_a_huge_job_id() -> None:
    with pytest.raises(LocalProtocolError) as raised:
        check_job_id("x" * 100_000)
    assert len(str(raised.value)) < 300


@REPEATABLE
@given(text=st.text(max_size=200))
def test_any_text_becomes_a_valid_job_id_and_always_the_same(text: str) -> None:
    made = job_id_from(text)
    assert check_job_id(made) == made
    assert job_id_from(text) == made


@pytest.mark.parametrize("pair", [("a b", "a/b"), ("", " "), ("ä", "ö"), ("x" * 70, "x" * 71), ("-a", ".a")])
def test_texts_that_are_cleaned_alike_are_told_apart(pair: tuple[str, str]) -> None:
    assert job_id_from(pair[0]) != job_id_from(pair[1])


def test_a_long_job_id_keeps_its_end_where_runs_differ() -> None:
    assert "run-17-" in job_id_from("x" * 80 + "run-17")


@pytest.mark.parametrize("session", ["", "9f3ac1d", "9f3ac1d22", "9F3AC1D2", "9f3ac1dg", "9f3ac1d2\n", "../../.."])
def test_a_session_is_eight_hexadecimal_digits(session: str) -> None:
    with pytest.raises(LocalProtocolError, match="eight hexadecimal digits"):
        check_session(session)


def test_a_valid_session_is_returned_unchanged() -> None:
    assert check_session("9f3ac1d2") == "9f3ac1d2"


def test_the_save_id_tells_attempts_apart_and_leaves_the_step_out() -> None:
    assert SaveKey("9f3ac1d2", 3, 300).save_id == "9f3ac1d2-3"
    assert SaveKey("9f3ac1d2", 4, 300).save_id != SaveKey("9f3ac1d2", 3, 300).save_id


@pytest.mark.parametrize(
    "changes", [{"seq": -1}, {"seq": 2**31}, {"step": -1}, {"step": MAX_STEP + 1}, {"session": "x"}]
)
def test_a_save_key_out_of_bounds_cannot_be_made(changes: dict[str, int | str]) -> None:
    with pytest.raises(LocalProtocolError):
        dataclasses.replace(SaveKey("9f3ac1d2", 0, 0), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("seq", "step"), [(0, 0), (2**31 - 1, MAX_STEP)])
def test_the_bounds_of_a_save_key_belong_to_it(seq: int, step: int) -> None:
    assert SaveKey("00000000", seq, step).step == step


def test_a_save_key_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SaveKey("9f3ac1d2", 0, 0).step = 1  # type: ignore[misc]


@REPEATABLE
@given(save=instances(SaveKey))
def test_an_attempt_is_found_again_in_its_name(save: SaveKey) -> None:
    assert save_key_of(save.save_id, save.step) == save


@pytest.mark.parametrize(
    "save_id",
    [
        "", "0a1b2c3d", "0a1b2c3d-", "-1", "0a1b2c3d--1", "0a1b2c3d-01", "0a1b2c3d-+1", "0a1b2c3d- 1", "0a1b2c3d-1_0",
        "0A1B2C3D-1", f"0a1b2c3d-{2**31}", "45e847cb-d5c0-4aa2-98de-63992af8fd9d", "0a1b2c3d-\u0661",
    ],
)  # fmt: skip
def test_a_name_that_no_attempt_has_is_not_one(save_id: str) -> None:
    assert save_key_of(save_id, 5) is None
