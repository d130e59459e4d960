"""Configuration of a client: one frozen value; the environment is read here and nowhere else."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_proto.coordinator_address import coordinator_address
from ckpt_proto.identity import job_id_from
from ckpt_proto.messages import MAX_SLOTS
from ckpt_proto.node_name import node_name
from ckpt_proto.runtime_dir import DEFAULT_SHM_ROOT, runtime_dir

BACKPRESSURE = ("wait", "skip")
NO_SIDECAR = ("error", "degraded")


@dataclass(frozen=True)
class ClientConfig:
    """What one rank's client needs to know. Times are seconds.

    Attributes:
        directory: absolute path that gets one ``step-N`` directory per checkpoint; the same on every rank.
        job_id: the job whose sidecar on this node is used.
        slots: regions of this rank: with 2, one can be persisted while the next is staged.
        backpressure: when no slot is free: ``wait`` at most ``backpressure_timeout_s``, or ``skip`` the save.
        stage_timeout_s: how long the ranks may be apart in calling ``save()`` before the attempt is given up.
        connect_timeout_s: how long to wait for a sidecar, at start and later.
        close_timeout_s: how long ``close()`` waits for saves in flight.
        coordinator: ``host:port`` where the sidecars of other nodes find that of rank 0's; empty for one node.
        no_sidecar: what becomes of saves when that has passed later on: ``error``, they fail; ``degraded``, the client
            has them written without one, slowly.
        overlap: whether ``save()`` copies behind the training's back if it is not told.
        copy_first: shell patterns of keys that ``save()`` copies before it returns all the same.
        check_overlap: compare what was copied so with a second copy made in the call: for debugging.
        supervised: somebody else restarts the sidecar (the wrapper), so the client never starts one.
    """

    directory: str
    job_id: str
    rank: int
    world_size: int
    local_rank: int
    incarnation: int
    shm_root: Path
    node: str
    slots: int = 2
    backpressure: str = "wait"
    backpressure_timeout_s: float = 600.0
    stage_timeout_s: float = 600.0
    connect_timeout_s: float = 120.0
    close_timeout_s: float = 600.0
    supervised: bool = False
    coordinator: str = ""
    no_sidecar: str = "error"
    overlap: bool = False
    copy_first: tuple[str, ...] = ()
    check_overlap: bool = False

    def __post_init__(self) -> None:
        if self.backpressure not in BACKPRESSURE:
            raise ValueError(f"backpressure is {self.backpressure!r}; it can be one of {BACKPRESSURE}")
        if self.no_sidecar not in NO_SIDECAR:
            raise ValueError(f"no_sidecar is {self.no_sidecar!r}; it can be one of {NO_SIDECAR}")
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"slots is {self.slots}; it can be 1 to {MAX_SLOTS}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is outside the world of {self.world_size} ranks")
        for name in ("backpressure_timeout_s", "stage_timeout_s", "connect_timeout_s", "close_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")

    @property
    def runtime_dir(self) -> Path:
        """The private directory of the job on this node."""
        return runtime_dir(self.shm_root, self.job_id)

    @classmethod
    def from_env(
        cls, directory: str | os.PathLike[str], environment: Mapping[str, str] = os.environ, **given: object
    ) -> ClientConfig:
        """The configuration of this process: what torchrun says in the environment, then what was ``given``.

        The job is ``CKPT_SIDECAR_JOB_ID`` (the wrapper sets it), else torchrun's run id, else it is named after the
        directory: two scripts that save to different directories never share a sidecar by accident.

        Raises:
            ValueError: a value is out of bounds or the directory is a URL (only file systems are supported).
        """
        where = absolute_directory(directory)
        values: dict[str, object] = {
            "directory": where,
            "job_id": _job_id(environment, where),
            "rank": _number(environment, "RANK", 0),
            "world_size": _number(environment, "WORLD_SIZE", 1),
            "local_rank": _number(environment, "LOCAL_RANK", 0),
            "incarnation": _number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
            "shm_root": Path(os.path.abspath(environment.get("CKPT_SIDECAR_SHM_ROOT", DEFAULT_SHM_ROOT))),
            "node": node_name(environment),
            "supervised": environment.get("CKPT_SIDECAR_SUPERVISED", "0") == "1",
            "check_overlap": environment.get("CKPT_SIDECAR_CHECK_OVERLAP", "0") == "1",
        }
        values.update({key: value for key, value in given.items() if value is not None})
        config = cls(**values)  # type: ignore[arg-type]
        return replace(config, coordinator=coordinator_address(environment, config.job_id, config.world_size))


def absolute_directory(directory: str | os.PathLike[str]) -> str:
    """``directory`` as an absolute path; a URL is refused instead of becoming a folder called ``s3:``."""
    text = os.fspath(directory)
    if not text:
        raise ValueError("the checkpoint directory is empty; give a path, '.' for the working directory")
    if "://" in text:
        raise ValueError(f"{text} is a URL; this release saves to file systems only")
    return os.path.abspath(text)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ValueError(f"the environment variable {name} is {text!r}, expected a number") from None


def _job_id(environment: Mapping[str, str], directory: str) -> str:
    job_id = environment.get("CKPT_SIDECAR_JOB_ID")
    if job_id:
        return job_id_from(job_id)
    run_id = environment.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return job_id_from(run_id)
    return job_id_from(f"{os.path.basename(directory) or 'root'}-{hashlib.sha256(directory.encode()).hexdigest()[:12]}")
