"""A stand-in as a child: how it is asked, what it says, and what ends it. A script is in its place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt_proto.runtime_dir import log_path
from ckpt_trainer_client.config import ClientConfig
from ckpt_trainer_client.stand_in_process import StandInProcess, StandInReport
from testkit.plans import save_key
from testkit.waiting import LIMIT_S, wait_until

SAVE = save_key(step=5, seq=3)
Program = Callable[[str], StandInProcess]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A shell script in place of the interpreter; it writes its arguments into a file first."""

    def make(script: str) -> StandInProcess:
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{script}\n')
        path.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(path))
        config = ClientConfig(str(tmp_path / "run"), "job", 1, 2, 1, 0, tmp_path, "node-a")
        config.runtime_dir.mkdir(parents=True)
        return StandInProcess(config)

    return make


def asked(tmp_path: Path) -> str:
    return (tmp_path / "asked").read_text().strip()


def test_each_work_is_asked_for(tmp_path: Path, program: Program) -> None:
    process = program("exit 0")
    always = f"--job-id job --shm-root {tmp_path} --rank 1"
    assert process.write("0a1b2c3d", 7, [3, 4], LIMIT_S).is_done
    assert asked(tmp_path) == (f"-m ckpt_sidecar stand-in write {always} --session 0a1b2c3d --next-seq 7 --pending 3 4")
    assert process.write("0a1b2c3d", 7, [], LIMIT_S).is_done
    assert asked(tmp_path).endswith("--next-seq 7")
    about = f"{always} --directory {tmp_path}/run --save {SAVE.save_id} --step 5"
    assert process.publish(SAVE, LIMIT_S).is_done
    assert asked(tmp_path) == f"-m ckpt_sidecar stand-in publish {about}"
    assert process.withdraw(SAVE, LIMIT_S).is_done
    assert asked(tmp_path) == f"-m ckpt_sidecar stand-in withdraw {about}"


def test_what_it_could_not_do_is_reported(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    script = """echo '{"did": "write", "kind": "", "message": ""}'
echo 'no json'
echo '[1]'
echo '{"did": "write", "kind": "StorageError", "message": "no space"}'
exit 1"""
    report = program(script).write("0a1b2c3d", 7, [3], LIMIT_S)
    assert report == StandInReport(1, (("StorageError", "no space"),))
    assert (report.is_done, report.met_a_sidecar, str(report)) == (False, False, "no space [StorageError]")
    assert "no json" in caplog.text


def test_a_lock_that_was_taken_is_told_apart(program: Program) -> None:
    report = program("exit 4").withdraw(SAVE, LIMIT_S)
    assert (report.is_done, report.met_a_sidecar, str(report)) == (False, True, "the job's lock was taken")


def test_one_that_dies_is_told_by_its_exit_code(program: Program) -> None:
    assert str(program("kill -9 $$").publish(SAVE, LIMIT_S)) == "the stand-in ended with exit code -9"


def test_its_log_is_the_jobs_if_there_is_one(tmp_path: Path, program: Program) -> None:
    process = program("echo 'a word' >&2")
    config = process._config
    assert process.publish(SAVE, LIMIT_S).is_done
    assert log_path(config.runtime_dir).read_text() == "a word\n"
    log_path(config.runtime_dir).unlink()
    config.runtime_dir.rmdir()
    assert process.publish(SAVE, LIMIT_S).is_done
    assert not config.runtime_dir.exists()


def test_one_that_cannot_be_started_is_a_failure_and_no_error(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = program("exit 0")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    report = process.publish(SAVE, LIMIT_S)
    assert (report.code, report.failures[0][0]) == (None, "FileNotFoundError")
    assert "the stand-in cannot be started" in str(report)


def test_one_that_does_not_end_is_killed(program: Program) -> None:
    assert program("exec sleep 1000").publish(SAVE, 0.05) == StandInReport(None)


def test_closing_kills_the_one_that_runs_and_starts_no_other(tmp_path: Path, program: Program) -> None:
    process = program("exec sleep 1000")
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(process.publish, SAVE, LIMIT_S)
        wait_until((tmp_path / "asked").exists, "the stand-in runs")
        process.stop()
        assert running.result(LIMIT_S) == StandInReport(None)
    (tmp_path / "asked").unlink()
    assert process.publish(SAVE, LIMIT_S) == StandInReport(None)
    assert not (tmp_path / "asked").exists()
