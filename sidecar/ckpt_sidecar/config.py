"""Configuration of a sidecar: one frozen value, made once from flags and environment, validated at construction."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path

from ckpt_proto.identity import check_job_id
from ckpt_proto.runtime_dir import DEFAULT_SHM_ROOT, runtime_dir
from ckpt_sidecar.affinity import AWAY, INHERIT, parse_cores

ENV_PREFIX = "CKPT_SIDECAR_"


@dataclass(frozen=True)
class SidecarConfig:
    """What ``ckpt-sidecar run`` needs to know.

    Attributes:
        job_id: the training job served.
        shm_root: file system of shared memory; regions and the socket lie below it.
        writers: shards written at the same time on this node.
        max_write_bytes_per_s: bandwidth cap over all writers; None for none.
        storage_retry_s: how long a write or commit that fails by an error that may pass is tried again; 0: never.
        write_stall_s: a write that makes no progress for so long fails its save.
        nice: CPU niceness added to the sidecar, 0 to 19.
        cpu_affinity: ``away`` from cores that ranks are pinned to, ``inherit``, or a list of cores such as ``0-3,8``.
        polite_within_s: while training's steps are slower beside a write, it is slowed too, as far as it still ends
            within so many seconds; 0: never.
        idle_exit_s: exit when no rank has been connected for so long and nothing is under way; None: only when told.
            If every rank closed its client in good order the sidecar does not wait.
        supervisor_pid: drain and exit when this process is gone; None: nobody in particular has to live.
        sweep_orphans: at start, finish jobs of this user on this node that nobody serves any more.
        reap_older_than_s: files in the checkpoint directory that can never become a checkpoint are removed at the start
            of a job if nothing has touched them for so long.
        peer_key_file: key with which the sidecars of several nodes know each other; None: none, which works on one
            machine only unless ``peer_insecure``.
        node_timeout_s: a node whose sidecar was not heard of for so long fails the saves that need it.
        ready_fd: descriptor on which ``READY`` is written when the socket serves; None for none.
    """

    job_id: str
    shm_root: Path = Path(DEFAULT_SHM_ROOT)
    writers: int = 2
    max_write_bytes_per_s: float | None = None
    storage_retry_s: float = 30.0
    write_stall_s: float = 600.0
    nice: int = 10
    cpu_affinity: str = AWAY
    polite_within_s: float = 30.0
    idle_exit_s: float | None = None
    supervisor_pid: int | None = None
    sweep_orphans: bool = True
    reap_older_than_s: float = 3600.0
    peer_key_file: Path | None = None
    peer_insecure: bool = False
    node_timeout_s: float = 60.0
    ready_fd: int | None = None

    def __post_init__(self) -> None:
        check_job_id(self.job_id)
        if not self.shm_root.is_dir():
            raise ValueError(f"--shm-root {self.shm_root} is no directory")
        self._check_manners()
        if not 1 <= self.writers <= 64:
            raise ValueError(f"--writers {self.writers} is outside 1 .. 64")
        if self.idle_exit_s is not None and not self.idle_exit_s >= 0:
            raise ValueError(f"--idle-exit-s {self.idle_exit_s} is negative")
        if not 0 <= self.storage_retry_s < math.inf:
            raise ValueError(f"--storage-retry-s {self.storage_retry_s} is no number of seconds")
        if not self.write_stall_s > 0:
            raise ValueError(f"--write-stall-s {self.write_stall_s} is not positive")
        if not 0 <= self.reap_older_than_s < math.inf:
            raise ValueError(f"--reap-older-than-s {self.reap_older_than_s} is no number of seconds")
        if not 3 <= self.node_timeout_s < math.inf:
            raise ValueError(f"--node-timeout-s {self.node_timeout_s} is less than 3 s, or no number")

    def _check_manners(self) -> None:
        if self.max_write_bytes_per_s is not None and not self.max_write_bytes_per_s > 0:
            raise ValueError(f"--max-write-bytes-per-s {self.max_write_bytes_per_s} is not positive")
        if not 0 <= self.nice <= 19:
            raise ValueError(f"--nice {self.nice} is outside 0 .. 19")
        if not 0 <= self.polite_within_s < math.inf:
            raise ValueError(f"--polite-within-s {self.polite_within_s} is no number of seconds")
        if self.cpu_affinity not in (AWAY, INHERIT):
            try:
                parse_cores(self.cpu_affinity)
            except ValueError as error:
                raise ValueError(f"--cpu-affinity: {error} (or {AWAY!r}, {INHERIT!r})") from None

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
    add_option(
        parser, "--storage-retry-s", type=float, default=30.0, help="how long to try again when the storage fails"
    )
    add_option(
        parser, "--write-stall-s", type=float, default=600.0, help="a write without progress for so long fails its save"
    )
    add_option(
        parser, "--reap-older-than-s", type=float, default=3600.0, help="age of useless files that are removed at start"
    )
    add_option(
        parser, "--peer-key-file", type=Path, help="key of the sidecars of several nodes; see ckpt-sidecar keygen"
    )
    add_option(parser, "--peer-insecure", action="store_true", help="several nodes without a key, in the clear")
    add_option(parser, "--node-timeout-s", type=float, default=60.0, help="silence after which a node is given up")
    add_option(parser, "--nice", type=int, default=10, help="CPU niceness of the sidecar")
    add_option(
        parser,
        "--cpu-affinity",
        default=AWAY,
        help="'away' from cores that ranks are pinned to, 'inherit', or cores such as 0-3,8",
    )
    add_option(
        parser,
        "--polite-within-s",
        type=float,
        default=30.0,
        help="a write that slows training is slowed too, as far as it still ends within so long; 0: never",
    )
    add_option(
        parser, "--idle-exit-s", type=float, help="exit when no rank was connected for so long; never by default"
    )


def _is_on(given: bool | str) -> bool:
    """A flag, or what the environment says instead of it."""
    return given if isinstance(given, bool) else given not in ("", "0")


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
        storage_retry_s=arguments.storage_retry_s,
        write_stall_s=arguments.write_stall_s,
        reap_older_than_s=arguments.reap_older_than_s,
        sweep_orphans=not getattr(arguments, "no_orphans", False),
        peer_key_file=arguments.peer_key_file,
        peer_insecure=_is_on(arguments.peer_insecure),
        node_timeout_s=arguments.node_timeout_s,
        nice=arguments.nice,
        cpu_affinity=arguments.cpu_affinity,
        polite_within_s=arguments.polite_within_s,
        idle_exit_s=arguments.idle_exit_s,
        supervisor_pid=getattr(arguments, "supervisor_pid", None),
        ready_fd=getattr(arguments, "ready_fd", None),
    )
