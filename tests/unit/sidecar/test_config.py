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
        "storage_retry_s": 30.0,
        "write_stall_s": 600.0,
        "nice": 10,
        "cpu_affinity": "away",
        "polite_within_s": 30.0,
        "idle_exit_s": None,
        "supervisor_pid": None,
        "sweep_orphans": True,
        "reap_older_than_s": 3600.0,
        "peer_key_file": None,
        "peer_insecure": False,
        "node_timeout_s": 60.0,
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
    ({"storage_retry_s": -1.0}, "--storage-retry-s -1.0"),
    ({"storage_retry_s": float("inf")}, "--storage-retry-s inf"),
    ({"write_stall_s": 0.0}, "--write-stall-s 0.0 is not positive"),
    ({"reap_older_than_s": -1.0}, "--reap-older-than-s -1.0"),
    ({"node_timeout_s": 1.0}, "--node-timeout-s 1.0 is less than 3 s"),
    ({"nice": -1}, "--nice -1 is outside 0 .. 19"),
    ({"nice": 20}, "--nice 20"),
    ({"polite_within_s": -1.0}, "--polite-within-s -1.0"),
    ({"polite_within_s": float("nan")}, "--polite-within-s nan"),
    ({"cpu_affinity": "far"}, "--cpu-affinity: 'far' is no list of cores, such as 0-3,8 (or 'away', 'inherit')"),
    ({"cpu_affinity": "99999"}, "names core 99999, this machine has 0 to"),
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
    words = f"--job-id j --shm-root {tmp_path} --writers 3 --max-write-bytes-per-s 1e9 --nice 0 --idle-exit-s 60 "
    words += "--storage-retry-s 5 --write-stall-s 50 --reap-older-than-s 7 --node-timeout-s 8 --peer-key-file /k "
    words += "--peer-insecure --cpu-affinity 0 --polite-within-s 9"
    assert parse(*words.split()) == SidecarConfig(
        job_id="j",
        shm_root=tmp_path,
        writers=3,
        max_write_bytes_per_s=1e9,
        storage_retry_s=5.0,
        write_stall_s=50.0,
        nice=0,
        idle_exit_s=60.0,
        reap_older_than_s=7.0,
        peer_key_file=Path("/k"),
        peer_insecure=True,
        node_timeout_s=8.0,
        cpu_affinity="0",
        polite_within_s=9.0,
    )


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
        "CPU_AFFINITY": "inherit",
        "POLITE_WITHIN_S": "0",
        "IDLE_EXIT_S": "7",
        "STORAGE_RETRY_S": "3",
        "PEER_KEY_FILE": "/k",
        "PEER_INSECURE": "1",
    }.items():
        monkeypatch.setenv(ENV_PREFIX + name, value)
    expected = SidecarConfig(
        "from-env",
        tmp_path,
        5,
        12.5,
        storage_retry_s=3.0,
        nice=19,
        idle_exit_s=7.0,
        peer_key_file=Path("/k"),
        peer_insecure=True,
        cpu_affinity="inherit",
        polite_within_s=0.0,
    )
    assert parse() == expected
    assert parse("--job-id", "flag", "--writers", "1") == dataclasses.replace(expected, job_id="flag", writers=1)


@pytest.mark.parametrize(("value", "is_on"), [("", False), ("0", False), ("1", True)])
def test_a_switch_in_the_environment(value: str, is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_PREFIX + "PEER_INSECURE", value)
    assert parse("--job-id", "j").peer_insecure is is_on


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
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    given = parser.parse_args(["--job-id", "j"])
    given.ready_fd = 9
    assert config_from(given).ready_fd == 9
