"""Configuration of a sidecar: one frozen value, made once from flags and environment, validated at construction."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from ckpt_proto.identity import check_job_id
from ckpt_proto.runtime_dir import DEFAULT_SHM_ROOT, runtime_dir

ENV_PREFIX = "CKPT_SIDECAR_"


@dataclass(frozen=True)
class SidecarConfig:
    """What ``ckpt-sidecar run`` needs to know.

    Attributes:
        job_id: the training job served.
        shm_root: file system of shared memory; regions and the socket lie below it.
        writers: shards written at the same time on this node.
        max_write_bytes_per_s: bandwidth cap over all writers; None for none.
        nice: CPU niceness added to the sidecar, 0 to 19.
        idle_exit_s: exit when no rank has been connected for so long and nothing is under way; None: only when told.
            If every rank closed its client in good order the sidecar does not wait.
        supervisor_pid: drain and exit when this process is gone; None: nobody in particular has to live.
        ready_fd: descriptor on which ``READY`` is written when the socket serves; None for none.
    """

    job_id: str
    shm_root: Path = Path(DEFAULT_SHM_ROOT)
    writers: int = 2
    max_write_bytes_per_s: float | None = None
    nice: int = 10
    idle_exit_s: float | None = None
    supervisor_pid: int | None = None
    ready_fd: int | None = None

    def __post_init__(self) -> None:
        check_job_id(self.job_id)
        if not self.shm_root.is_dir():
            raise ValueError(f"--shm-root {self.shm_root} is no directory")
        if not 1 <= self.writers <= 64:
            raise ValueError(f"--writers {self.writers} is outside 1 .. 64")
        if self.idle_exit_s is not None and not self.idle_exit_s >= 0:
            raise ValueError(f"--idle-exit-s {self.idle_exit_s} is negative")
        if self.max_write_bytes_per_s is not None and not self.max_write_bytes_per_s > 0:
            raise ValueError(f"--max-write-bytes-per-s {self.max_write_bytes_per_s} is not positive")
        if not 0 <= self.nice <= 19:
            raise ValueError(f"--nice {self.nice} is outside 0 .. 19")

    @property
    def runtime_dir(self) -> Path:
        """The private directory of this job on this node."""
        return runtime_dir(self.shm_root, self.job_id)


def add_option(parser: argparse.ArgumentParser, flag: str, **options: object) -> None:
    """A flag whose default comes from ``CKPT_SIDECAR_<FLAG>``, as torchrun's come from ``PET_<FLAG>``."""
    name = ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper()
    if name in os.environ:
        options["default"] = os.environ[name]
        options.pop("required", None)
    options["help"] = f"{options.get('help', '')} [{name}]"
    parser.add_argument(flag, **options)  # type: ignore[arg-type]


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The flags of ``ckpt-sidecar run`` and ``start``."""
    add_option(parser, "--job-id", required=True, help="the training job to serve")
    add_option(parser, "--shm-root", type=Path, default=Path(DEFAULT_SHM_ROOT), help="where shared memory is mounted")
    add_option(parser, "--writers", type=int, default=2, help="shards written at the same time")
    add_option(parser, "--max-write-bytes-per-s", type=float, help="bandwidth cap over all writers; none by default")
    add_option(parser, "--nice", type=int, default=10, help="CPU niceness of the sidecar")
    add_option(
        parser, "--idle-exit-s", type=float, help="exit when no rank was connected for so long; never by default"
    )


def config_from(arguments: argparse.Namespace) -> SidecarConfig:
    """The configuration in parsed flags.

    Raises:
        ValueError, LocalProtocolError: a value is out of bounds; the text names the flag.
    """
    return SidecarConfig(
        job_id=arguments.job_id,
        shm_root=arguments.shm_root,
        writers=arguments.writers,
        max_write_bytes_per_s=arguments.max_write_bytes_per_s,
        nice=arguments.nice,
        idle_exit_s=arguments.idle_exit_s,
        supervisor_pid=getattr(arguments, "supervisor_pid", None),
        ready_fd=getattr(arguments, "ready_fd", None),
    )
