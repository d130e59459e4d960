"""A node of a job: shared memory, a sidecar that is started again when it is killed, and the ranks that run there.

Sidecars are forked from the zygote, as ranks are, and so begin with torch imported: a restart takes a tenth of a second
instead of two. From there on they are what ``ckpt-sidecar run`` is. One node, or several in one test: each has
its own ``shm_root`` and, if it is to be another machine for the ranks, its own zygote.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_proto.process import process_start_s
from ckpt_proto.runtime_dir import runtime_dir
from testkit.finisher import ENVIRONMENT, arm_finishers
from testkit.kill_points import LAST_WORDS, KillOrder, arm, set_constants
from testkit.ranks import RankStarter, RunningRanks
from testkit.waiting import LIMIT_S, wait_until

READY = "READY\n"


def serve(
    arguments: Sequence[str],
    ready: str,
    constants: Mapping[str, Any],
    order: KillOrder | None,
    finishers: KillOrder | None = None,
) -> int:
    """Process code: a sidecar that perhaps dies at a point, or those that it starts for dead jobs. Returns its exit
    code."""
    from ckpt_sidecar.__main__ import main

    set_constants(dict(constants))
    if order is not None:
        arm(order)
    if finishers is not None:
        arm_finishers(finishers, constants)
    ready_fd = os.open(ready, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return main([*arguments, "--ready-fd", str(ready_fd)])


class Node:
    """One node, from :meth:`start_sidecar` to :meth:`close`.

    Args:
        starter: forks its processes.
        shm_root: its shared memory.
        folder: for logs.
        ranks: the global ranks that run here.
        supervised: whether the test starts a dead sidecar again; otherwise the clients do.
        coordinator: ``host:port`` of the first node's sidecar, or ``local`` if there is no other node.
        constants: of the sidecar's code that are to have other values, ``module:NAME``.
        options: of ``ckpt-sidecar run``.
    """

    def __init__(
        self,
        starter: RankStarter,
        shm_root: Path,
        folder: Path,
        ranks: Sequence[int],
        *,
        job_id: str = "job",
        supervised: bool = True,
        constants: Mapping[str, Any] | None = None,
        coordinator: str = "local",
        **options: Any,
    ) -> None:
        self.shm_root = shm_root
        self._coordinator = coordinator
        self.ranks = tuple(ranks)
        self.directory = runtime_dir(shm_root, job_id)
        self.deaths = 0
        self._starter = starter
        self._folder = folder
        self._job_id = job_id
        self._supervised = supervised
        self._constants = dict(constants or {})
        options.setdefault("nice", 0)
        self._flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        self._starts = 0
        self._sidecar: RunningRanks | None = None
        self._ranks: RunningRanks | None = None
        self._started: list[RunningRanks] = []

    # ------------------------------------------------------------ the sidecar

    def start_sidecar(self, order: KillOrder | None = None, finishers: KillOrder | None = None) -> None:
        """Start a sidecar, perhaps one that will die or whose finishers of dead jobs will, and wait until it serves."""
        self._starts += 1
        ready = self._folder / f"ready-{self.shm_root.name}-{self._starts}"
        arguments = ["--verbose", "run", "--job-id", self._job_id, "--shm-root", str(self.shm_root), *self._flags]
        environment = {"CUDA_VISIBLE_DEVICES": "", **ENVIRONMENT}
        orders = (order, finishers)
        self._sidecar = self._start(serve, 1, arguments, str(ready), self._constants, *orders, environment=environment)
        wait_until(lambda: self._sidecar_died() or _is_ready(ready), "the sidecar serves")
        assert not self._sidecar_died(), f"the sidecar died before it served:\n{self._sidecar.text(0)}"

    @property
    def sidecar_pid(self) -> int:
        """The process of the sidecar started last by this node."""
        assert self._sidecar is not None
        return self._sidecar.pids[0]

    def _sidecar_died(self) -> bool:
        return process_start_s(self.sidecar_pid) is None

    def look_after_sidecar(self) -> None:
        """Start it again, unarmed, if it has died; to be called again and again while ranks run."""
        if self._sidecar is not None and self._sidecar_died():
            assert self._sidecar.exit_codes() == [-signal.SIGKILL], f"the sidecar ended:\n{self._sidecar.text(0)}"
            self.deaths += 1
            self._sidecar = None
            if self._supervised:
                self.start_sidecar()

    def kill_sidecar(self) -> None:
        """SIGKILL, and wait until it is gone; :meth:`look_after_sidecar` then starts another."""
        os.kill(self.sidecar_pid, signal.SIGKILL)
        wait_until(self._sidecar_died, "the sidecar is gone")

    def stop_sidecar(self) -> int | None:
        """SIGTERM, wait for the drain, return the exit code; None if there is none of this node's."""
        if self._sidecar is None:
            return None
        sidecar, self._sidecar = self._sidecar, None
        os.kill(sidecar.pids[0], signal.SIGTERM)
        [code] = sidecar.exit_codes()
        return code or int(sidecar.result_of(0))

    # ------------------------------------------------------------ the ranks

    def start_ranks(self, function: Callable[..., Any], world_size: int, *arguments: Any, restarts: int = 0) -> None:
        """Start the ranks of this node, in a life of the job after so many ``restarts``."""
        environment = {
            "CKPT_SIDECAR_SHM_ROOT": str(self.shm_root),
            "CKPT_SIDECAR_JOB_ID": self._job_id,
            "CKPT_SIDECAR_SUPERVISED": "1" if self._supervised else "0",
            "CKPT_SIDECAR_COORDINATOR": self._coordinator,
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
        }
        self._ranks = self._start(function, world_size, *arguments, environment=environment, here=self.ranks)

    def living_ranks(self) -> list[int]:
        """The global ranks of this node whose process lives."""
        return [] if self._ranks is None else [rank for rank in self.ranks if process_start_s(self.pid_of(rank))]

    def pid_of(self, rank: int) -> int:
        """The process of a rank of this node, in the life started last."""
        assert self._ranks is not None
        return self._ranks.pids[self.ranks.index(rank)]

    def kill_rank(self, rank: int) -> None:
        """SIGKILL to a rank of this node that has not been waited for."""
        os.kill(self.pid_of(rank), signal.SIGKILL)

    def kill_ranks(self) -> None:
        """SIGKILL to every rank that lives."""
        for rank in self.living_ranks():
            self.kill_rank(rank)

    def end_ranks(self) -> dict[int, str]:
        """Wait for the ranks; how each ended: empty, ``killed``, or what it said."""
        assert self._ranks is not None
        ranks, self._ranks = self._ranks, None
        ends = {}
        for local, (rank, code) in enumerate(zip(self.ranks, ranks.exit_codes(), strict=True)):
            if code == -signal.SIGKILL:
                ends[rank] = "killed"
            else:
                error = str(ranks.error_of(local)).strip()
                ends[rank] = error if not code else f"exit code {code}: {error}"
        return ends

    # ------------------------------------------------------------ all of them

    def _start(self, function: Callable[..., Any], world_size: int, *arguments: Any, **options: Any) -> RunningRanks:
        self._started.append(self._starter.start(function, world_size, *arguments, **options))
        return self._started[-1]

    def has_died_at_its_point(self) -> bool:
        """Whether a process of this node has killed itself as ordered."""
        return any(LAST_WORDS in started.text(local) for started in self._started for local in range(len(started.pids)))

    def story(self) -> str:
        """The logs of everything that ran here, for a failure's text."""
        return "\n".join(
            f"---- process {started.pids[local]}\n{started.text(local)}"
            for started in self._started
            for local in range(len(started.pids))
        )

    def close(self) -> None:
        """Leave no process behind, however the test went."""
        for running in (self._sidecar, self._ranks):
            if running is not None:
                for pid in running.pids:
                    if process_start_s(pid) is not None:
                        os.kill(pid, signal.SIGKILL)
                running.exit_codes(LIMIT_S)


def _is_ready(path: Path) -> bool:
    return path.exists() and path.read_text() == READY
