"""The priority of the sidecar's session, where the kernel groups tasks by session."""

from __future__ import annotations

from pathlib import Path

from ckpt_sidecar.priority import lower_autogroup


def test_the_session_gets_the_niceness_too(tmp_path: Path) -> None:
    autogroup = tmp_path / "autogroup"
    autogroup.write_text("/autogroup-77 nice 0\n")
    lower_autogroup(10, autogroup)
    assert autogroup.read_text() == "10"


def test_a_kernel_without_groups_is_left_alone(tmp_path: Path) -> None:
    lower_autogroup(10, tmp_path / "autogroup")
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_that_refuses_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "autogroup").mkdir()
    lower_autogroup(10, tmp_path / "autogroup")
