"""A pid and its start time name a process; and what a sidecar sees of its starter's environment."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest

from ckpt_proto import process
from ckpt_proto.process import process_start_s, sidecar_environment


def with_stat(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    def open_stat(path: str, mode: str) -> Any:
        assert path == "/proc/77/stat"
        return io.BytesIO(text)

    monkeypatch.setattr(process, "open", open_stat, raising=False)


def stat_line(state: str, start_ticks: int, name: str = "python") -> bytes:
    fields = [state, *(str(number) for number in range(4, 22)), str(start_ticks), "0", "0"]
    return f"77 ({name}) {' '.join(fields)}\n".encode()


def test_this_process_has_one_start_time() -> None:
    start_s = process_start_s(os.getpid())
    assert start_s is not None
    assert start_s == process_start_s(os.getpid())


@pytest.mark.parametrize("pid", [0, -1, 2**31 - 1])
def test_a_pid_that_names_nobody_has_none(pid: int) -> None:
    assert process_start_s(pid) is None


def test_the_start_time_is_the_22nd_field_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    with_stat(monkeypatch, stat_line("S", 250 * os.sysconf("SC_CLK_TCK")))
    assert process_start_s(77) == 250.0


def test_a_name_with_blanks_and_brackets_does_not_shift_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    with_stat(monkeypatch, stat_line("R", 3 * os.sysconf("SC_CLK_TCK"), name="a) Z 1 2 (b"))
    assert process_start_s(77) == 3.0


@pytest.mark.parametrize("state", ["Z", "X"])
def test_a_zombie_counts_as_gone(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    with_stat(monkeypatch, stat_line(state, 1))
    assert process_start_s(77) is None


def test_a_process_that_ends_while_it_is_looked_at_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def vanished(path: str, mode: str) -> Any:
        raise ProcessLookupError(path)

    monkeypatch.setattr(process, "open", vanished, raising=False)
    assert process_start_s(77) is None


# ---------------------------------------------------------------- environment of a sidecar


def test_a_sidecar_sees_no_gpu_and_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("CKPT_TEST_MARK", "kept")
    environment = sidecar_environment()
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["CKPT_TEST_MARK"] == "kept"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_relative_python_path_still_works_from_the_root_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", "", "/abs"]))
    assert sidecar_environment()["PYTHONPATH"].split(os.pathsep) == [os.path.abspath("src"), "/abs"]
