"""A sidecar's configuration: validated at construction, from flags, and from the environment where no flag is given."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from ckpt_proto.errors import LocalProtocolError
from ckpt_sidecar.config import ENV_PREFIX, SidecarConfig, add_run_options, config_from


def parse(*words: str) -> SidecarConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_run_options(parser)
    return config_from(parser.parse_args(words))


# ---------------------------------------------------------------- values


def test_defaults() -> None:
    config = SidecarConfig("job")
    assert dataclasses.asdict(config) == {
        "job_id": "job",
        "shm_root": Path("/dev/shm"),
        "writers": 2,
        "max_write_bytes_per_s": None,
        "nice": 10,
        "idle_exit_s": None,
        "supervisor_pid": None,
        "ready_fd": None,
    }


@pytest.mark.parametrize("value", [1, 64])
def test_bounds_of_writers_are_inside(value: int) -> None:
    assert SidecarConfig("job", writers=value).writers == value


BAD = [
    ({"writers": 0}, "--writers 0 is outside 1 .. 64"),
    ({"writers": 65}, "--writers 65"),
    ({"max_write_bytes_per_s": 0.0}, "--max-write-bytes-per-s 0.0 is not positive"),
    ({"max_write_bytes_per_s": -1.0}, "--max-write-bytes-per-s -1.0"),
    ({"max_write_bytes_per_s": float("nan")}, "--max-write-bytes-per-s nan"),
    ({"nice": -1}, "--nice -1 is outside 0 .. 19"),
    ({"nice": 20}, "--nice 20"),
    ({"idle_exit_s": -1.0}, "--idle-exit-s -1.0"),
    ({"idle_exit_s": float("nan")}, "--idle-exit-s nan"),
    ({"shm_root": Path("/no/such/place")}, "--shm-root /no/such/place is no directory"),
]


@pytest.mark.parametrize(("given", "complaint"), BAD, ids=[complaint for _, complaint in BAD])
def test_a_value_out_of_bounds_is_refused_by_its_flag(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError) as raised:
        SidecarConfig("job", **given)  # type: ignore[arg-type]
    assert complaint in str(raised.value)


@pytest.mark.parametrize("job_id", ["", "../up", ".hidden", "a/b", "x" * 65, "a b"])
def test_a_job_id_that_is_no_name_is_refused(job_id: str) -> None:
    with pytest.raises(LocalProtocolError, match="job id"):
        SidecarConfig(job_id)


def test_the_file_system_of_shared_memory_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="is no directory"):
        SidecarConfig("job", shm_root=tmp_path / "file")


def test_the_runtime_directory_is_the_jobs_own(tmp_path: Path) -> None:
    one, other = SidecarConfig("one", shm_root=tmp_path), SidecarConfig("other", shm_root=tmp_path)
    assert one.runtime_dir.name == "one"
    assert one.runtime_dir.parent == other.runtime_dir.parent
    assert one.runtime_dir.is_relative_to(tmp_path)
    assert not one.runtime_dir.exists()


# ---------------------------------------------------------------- flags and environment


def test_every_flag(tmp_path: Path) -> None:
    words = f"--job-id j --shm-root {tmp_path} --writers 3 --max-write-bytes-per-s 1e9 --nice 0 --idle-exit-s 60"
    assert parse(*words.split()) == SidecarConfig("j", tmp_path, 3, 1e9, 0, 60.0)


def test_a_job_is_required() -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse("--writers", "3")


def test_the_environment_fills_in_what_no_flag_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "JOB_ID": "from-env",
        "SHM_ROOT": str(tmp_path),
        "WRITERS": "5",
        "MAX_WRITE_BYTES_PER_S": "12.5",
        "NICE": "19",
        "IDLE_EXIT_S": "7",
    }.items():
        monkeypatch.setenv(ENV_PREFIX + name, value)
    assert parse() == SidecarConfig("from-env", tmp_path, 5, 12.5, 19, 7.0)
    assert parse("--job-id", "flag", "--writers", "1") == SidecarConfig("flag", tmp_path, 1, 12.5, 19, 7.0)


@pytest.mark.parametrize("name", ["WRITERS", "NICE", "IDLE_EXIT_S", "MAX_WRITE_BYTES_PER_S"])
def test_an_environment_variable_that_is_no_number_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_PREFIX + name, "many")
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse("--job-id", "j")


def test_the_help_names_the_environment_variables() -> None:
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    shown = parser.format_help()
    for name in ("JOB_ID", "SHM_ROOT", "WRITERS", "MAX_WRITE_BYTES_PER_S", "NICE", "IDLE_EXIT_S"):
        assert f"[{ENV_PREFIX}{name}]" in shown.replace("\n", "").replace(" ", "")


def test_the_descriptor_for_ready_is_taken_where_it_was_parsed() -> None:
    given = argparse.Namespace(
        job_id="j",
        shm_root=Path("/dev/shm"),
        writers=1,
        max_write_bytes_per_s=None,
        nice=0,
        idle_exit_s=None,
        ready_fd=9,
    )
    assert config_from(given).ready_fd == 9
