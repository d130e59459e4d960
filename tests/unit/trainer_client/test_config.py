"""A client's configuration: what torchrun says in the environment, what was given, and what is refused."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from ckpt_proto.errors import LocalProtocolError
from ckpt_proto.identity import check_job_id
from ckpt_trainer_client.config import ClientConfig, absolute_directory


def config(environment: dict[str, str] | None = None, **given: Any) -> ClientConfig:
    return ClientConfig.from_env("/checkpoints", environment or {}, **given)


# ---------------------------------------------------------------- environment


def test_a_plain_process_is_a_world_of_one() -> None:
    found = config()
    assert (found.directory, found.rank, found.world_size, found.local_rank) == ("/checkpoints", 0, 1, 0)
    assert (found.incarnation, found.shm_root, found.node) == (0, Path("/dev/shm"), socket.gethostname())
    assert (found.slots, found.backpressure, found.supervised) == (2, "wait", False)
    assert found.job_id.startswith("checkpoints-")
    times = (found.backpressure_timeout_s, found.stage_timeout_s, found.connect_timeout_s, found.close_timeout_s)
    assert times == (600.0, 600.0, 120.0, 600.0)


def test_torchrun_says_who_this_is() -> None:
    found = config(
        {
            "RANK": "5",
            "WORLD_SIZE": "16",
            "LOCAL_RANK": "1",
            "TORCHELASTIC_RESTART_COUNT": "3",
            "TORCHELASTIC_RUN_ID": "run-7",
        }
    )
    assert (found.rank, found.world_size, found.local_rank, found.incarnation) == (5, 16, 1, 3)
    assert found.job_id == "run-7"


def test_the_wrapper_says_which_sidecar_and_where() -> None:
    found = config(
        {
            "CKPT_SIDECAR_JOB_ID": "from-wrapper",
            "CKPT_SIDECAR_SHM_ROOT": "/mnt/shm",
            "CKPT_SIDECAR_SUPERVISED": "1",
            "TORCHELASTIC_RUN_ID": "run-7",
        }
    )
    assert (found.job_id, found.shm_root, found.supervised) == ("from-wrapper", Path("/mnt/shm"), True)


@pytest.mark.parametrize("value", ["", "0", "yes", "true"])
def test_supervised_is_said_by_1_only(value: str) -> None:
    assert not config({"CKPT_SIDECAR_SUPERVISED": value}).supervised


def test_what_was_given_is_stronger_than_the_environment() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "16", "CKPT_SIDECAR_JOB_ID": "environment"}
    found = config(environment, rank=1, world_size=2, job_id="given", slots=1, backpressure="skip", stage_timeout_s=1.5)
    assert (found.rank, found.world_size, found.job_id) == (1, 2, "given")
    assert (found.slots, found.backpressure, found.stage_timeout_s) == (1, "skip", 1.5)


def test_none_means_not_given_and_zero_is_a_value() -> None:
    found = config({"RANK": "5", "WORLD_SIZE": "16"}, rank=0, world_size=None, slots=None)
    assert (found.rank, found.world_size, found.slots) == (0, 16, 2)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"])
def test_a_variable_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is 'many'"):
        config({name: "many"})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ClientConfig.from_env("/checkpoints").rank == 3


# ---------------------------------------------------------------- the job


@pytest.mark.parametrize("environment", [{}, {"TORCHELASTIC_RUN_ID": "none"}, {"CKPT_SIDECAR_JOB_ID": ""}])
def test_a_job_without_a_name_is_named_after_its_directory(environment: dict[str, str]) -> None:
    """``none`` is torchrun's run id when nobody gave one: two jobs on one machine would share it."""
    one = ClientConfig.from_env("/runs/a", environment).job_id
    assert one == ClientConfig.from_env("/runs/a", environment, rank=0).job_id
    assert one.startswith("a-")
    others = [ClientConfig.from_env(directory, environment).job_id for directory in ("/runs/b", "/other/a", "/")]
    assert len({one, *others}) == 4
    for name in (one, *others):
        check_job_id(name)


@pytest.mark.parametrize("name", ["with space", "a/b", "x" * 200, "äöü", "-dash", ".dot"])
def test_a_name_that_cannot_be_a_directory_becomes_one_that_can(name: str) -> None:
    job_id = config({"TORCHELASTIC_RUN_ID": name}).job_id
    check_job_id(job_id)
    assert job_id != config({"TORCHELASTIC_RUN_ID": name + "x"}).job_id


def test_the_runtime_directory_follows_from_root_and_job(tmp_path: Path) -> None:
    found = config({"CKPT_SIDECAR_SHM_ROOT": str(tmp_path)}, job_id="j")
    assert found.runtime_dir == tmp_path / f"ckpt-sidecar-{os.geteuid()}" / "j"


def test_a_root_that_is_too_long_for_a_socket_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="longer than 107 bytes"):
        _ = config({"CKPT_SIDECAR_SHM_ROOT": "/" + "x" * 100}).runtime_dir


# ---------------------------------------------------------------- bounds


BAD: list[tuple[dict[str, Any], str]] = [
    ({"backpressure": "block"}, r"backpressure is 'block'; it can be one of \('wait', 'skip'\)"),
    ({"slots": 0}, "slots is 0; it can be 1 to 8"),
    ({"slots": 9}, "slots is 9"),
    ({"rank": 1}, "rank 1 is outside the world of 1 ranks"),
    ({"rank": -1}, "rank -1 is outside"),
    ({"world_size": 0}, "rank 0 is outside the world of 0 ranks"),
    ({"backpressure_timeout_s": 0.0}, "backpressure_timeout_s is 0.0; it must be positive"),
    ({"stage_timeout_s": -1.0}, "stage_timeout_s is -1.0"),
    ({"connect_timeout_s": 0.0}, "connect_timeout_s is 0.0"),
    ({"no_sidecar": "wait"}, "no_sidecar is 'wait'; it can be one of"),
    ({"close_timeout_s": 0.0}, "close_timeout_s is 0.0"),
]


@pytest.mark.parametrize(("given", "complaint"), BAD, ids=[complaint for _, complaint in BAD])
def test_a_value_out_of_bounds_is_refused_by_name(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        config(**given)


def test_bounds_are_inside() -> None:
    assert config(slots=1).slots == 1
    assert config(slots=8).slots == 8
    assert config(rank=15, world_size=16).rank == 15


# ---------------------------------------------------------------- the directory


def test_a_relative_directory_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert ClientConfig.from_env("runs/../ckpt/", {}).directory == str(tmp_path / "ckpt")
    assert ClientConfig.from_env(Path("ckpt"), {}).directory == str(tmp_path / "ckpt")


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://b", "file:///tmp/x"])
def test_a_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=f"{url} is a URL"):
        absolute_directory(url)


def test_an_empty_directory_is_not_the_working_directory() -> None:
    with pytest.raises(ValueError, match="empty"):
        ClientConfig.from_env("")
