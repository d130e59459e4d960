"""Ranks as real processes: a function runs on each, with torchrun's variables set, with or without a gloo group."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from testkit.waiting import LIMIT_S

TESTS = Path(__file__).resolve().parent.parent


class RankFailed(AssertionError):
    """A rank raised, died, or did not end; the text has its traceback and log."""


class RankStarter:
    """Owner of one zygote. ``stock`` ranks cannot import our packages; ``preload`` modules are imported before the
    fork."""

    def __init__(self, folder: Path, *, stock: bool = False, preload: Sequence[str] = ()) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._stock = stock
        flags = ["-I"] if stock else []
        command = [sys.executable, *flags, str(Path(__file__).with_name("zygote.py"))]
        command += ["--stock"] if stock else []
        command += [f"--preload={','.join(preload)}"] if preload else []
        self._environment = {
            **{
                key: value
                for key, value in os.environ.items()
                if not key.startswith(("CKPT_SIDECAR_", "TORCHELASTIC_"))
            },
            "CKPT_SIDECAR_NICE": "0",  # a test waits for it, and the machine may be busy with others
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        self._zygote = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment, cwd="/"
        )

    def start(
        self,
        function: Callable[..., Any],
        world_size: int,
        *arguments: Any,
        group: bool = False,
        environment: Mapping[str, str] | None = None,
        threads_may_stay: bool = False,
        here: Sequence[int] | None = None,
        log: Path | None = None,
    ) -> RunningRanks:
        """Start ``function(*arguments)`` on every rank; it must be at the top level of its file.

        ``environment`` is added to that of each rank and has the last word; ``group`` initialises a gloo process group
        around the function; ``here`` are the ranks of this node, if others are started elsewhere; what the first of
        them writes is added to ``log``.
        """
        import torch

        folder = self._folder / f"run-{next(self._numbers)}"
        folder.mkdir()
        if log is not None:
            (folder / "rank-0.log").symlink_to(log)
        packed = folder / "arguments.pt"
        torch.save(arguments, packed)
        here = range(world_size) if here is None else here
        given = {**self._environment, **_torchrun_variables(world_size, len(here)), **(environment or {})}
        pids = []
        for local_rank, rank in enumerate(here):
            job = {
                "file": inspect.getfile(function),
                "function": function.__name__,
                "arguments": str(packed),
                "result": str(folder / f"rank-{local_rank}.result"),
                "log": str(folder / f"rank-{local_rank}.log"),
                "environment": {**given, "RANK": str(rank), "LOCAL_RANK": str(local_rank)},
                "store": str(folder / "store") if group else "",
                "path": [] if self._stock else [str(TESTS)],
            }
            pids.append(self._ask({"fork": job}))
        return RunningRanks(pids, folder, self._ask, threads_may_stay)

    def run(self, function: Callable[..., Any], world_size: int, *arguments: Any, **options: Any) -> list[Any]:
        """What ``function`` returned on each rank; :class:`RankFailed` if one raised."""
        return self.start(function, world_size, *arguments, **options).results()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps(request) + "\n")
        self._zygote.stdin.flush()
        return json.loads(self._zygote.stdout.readline())

    def close(self) -> None:
        """End the zygote; ranks that were not waited for are not looked after any more."""
        with self._zygote as zygote:
            assert zygote.stdin is not None
            zygote.stdin.close()
            zygote.wait(LIMIT_S)


class RunningRanks:
    """Ranks that were started, numbered as on this node. Every way to wait for them is bounded, and kills what did not
    end in time."""

    def __init__(
        self, pids: Sequence[int], folder: Path, ask: Callable[[dict[str, Any]], Any], threads_may_stay: bool
    ) -> None:
        self.pids = tuple(pids)
        self._folder = folder
        self._ask = ask
        self._threads_may_stay = threads_may_stay

    def results(self, timeout_s: float = LIMIT_S) -> list[Any]:
        """What the function returned on each rank, in their order.

        Raises:
            RankFailed: it raised on one, or one has not ended in time.
        """
        codes = self.exit_codes(timeout_s)
        outcomes = [self._outcome(rank) for rank in range(len(self.pids))]
        for rank, (code, outcome) in enumerate(zip(codes, outcomes, strict=True)):
            if code != 0 or "result" not in outcome:
                texts = [f"rank {each}: {self.text(each)}" for each in range(len(self.pids))]
                raise RankFailed(f"rank {rank} of {len(self.pids)} failed (exit code {code})\n" + "\n".join(texts))
            if outcome["threads"] and not self._threads_may_stay:
                raise RankFailed(f"rank {rank} left threads behind: {outcome['threads']}")
        return [outcome["result"] for outcome in outcomes]

    def exit_codes(self, timeout_s: float = LIMIT_S) -> list[int]:
        """The exit code of each rank (negative: killed by that signal)."""
        deadline_s = time.monotonic() + timeout_s
        late = [pid for pid in self.pids if not _ended(pid, deadline_s)]
        for pid in late:
            os.kill(pid, signal.SIGKILL)
            _ended(pid, time.monotonic() + LIMIT_S)
        return [self._ask({"reap": pid}) for pid in self.pids]

    def result_of(self, rank: int) -> Any:
        """What the function returned on one rank that has ended, whatever became of the others."""
        outcome = self._outcome(rank)
        if "result" not in outcome:
            raise RankFailed(f"rank {rank}: {self.text(rank)}")
        return outcome["result"]

    def error_of(self, rank: int) -> str:
        """The traceback of what the function raised on one rank that has ended; empty if it raised nothing."""
        return str(self._outcome(rank).get("error", ""))

    def text(self, rank: int) -> str:
        """What a rank wrote and raised, for a failure's text."""
        log = self._folder / f"rank-{rank}.log"
        written = log.read_text(errors="replace")[-6000:] if log.exists() else ""
        return f"{self._outcome(rank).get('error', '')}\n{written}"

    def _outcome(self, rank: int) -> dict[str, Any]:
        import torch

        path = self._folder / f"rank-{rank}.result"
        outcome: dict[str, Any] = torch.load(path, weights_only=False) if path.exists() else {}
        return outcome


def _torchrun_variables(world_size: int, local_world_size: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _ended(pid: int, deadline_s: float) -> bool:
    """Wait for a process that is not our child: its zygote keeps it as a zombie until it is reaped."""
    descriptor = os.pidfd_open(pid)
    try:
        readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline_s - time.monotonic()))
        return bool(readable)
    finally:
        os.close(descriptor)
