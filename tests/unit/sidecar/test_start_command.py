"""``ckpt-sidecar start`` hands every option on to the ``run`` that it starts."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from ckpt_sidecar import __main__, daemon_start
from ckpt_sidecar.config import SidecarConfig, add_run_options, config_from

NOT_HANDED_ON = {"supervisor_pid", "sweep_orphans", "ready_fd"}
"""A started sidecar has no supervisor, looks for orphans as ever, and its starter makes the descriptor."""


def test_every_option_reaches_the_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed_on: list[str] = []
    monkeypatch.setattr(daemon_start, "start_detached", lambda arguments, directory: handed_on.extend(arguments) or 7)
    words = f"start --job-id j --shm-root {tmp_path} --writers 3 --max-write-bytes-per-s 1e9 --nice 0 --idle-exit-s 60 "
    words += "--storage-retry-s 5 --write-stall-s 50 --reap-older-than-s 7 --node-timeout-s 8 --peer-key-file /k "
    words += "--peer-insecure --cpu-affinity 0 --polite-within-s 9"
    assert __main__.main(words.split()) == 0

    parser = argparse.ArgumentParser()
    add_run_options(parser)
    config = config_from(parser.parse_args(handed_on))
    plain = SidecarConfig("x")
    for field in dataclasses.fields(SidecarConfig):
        same = getattr(config, field.name) == getattr(plain, field.name)
        assert same == (field.name in NOT_HANDED_ON), f"{field.name} is {getattr(config, field.name)!r}"
