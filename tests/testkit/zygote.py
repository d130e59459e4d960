"""A process that has imported torch once and forks one real process per rank from then on.

Importing torch costs two seconds, a fork milliseconds. Nothing has run in here before the fork: no thread, no client,
no process group, so a rank is as fresh as one that a launcher started. Started with ``--stock`` it cannot import our
packages, nor can its ranks; started with ``--preload=a,b`` it has imported these modules too.

Protocol on standard input and output, one JSON value per line: ``{"fork": JOB}`` is answered with the pid,
``{"reap": PID}`` with the exit code (negative: killed by that signal), null while the process lives. End of input ends
the zygote.
Runs alone (``python -I zygote.py``): it must not import the testkit.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import sys
import threading
import traceback
from typing import Any


class Blocker(importlib.abc.MetaPathFinder):
    """Makes our packages impossible to import, whatever the path holds."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.startswith("ckpt_"):
            raise ImportError(f"{fullname} must not be needed here")


def main() -> None:
    """Serve until the end of input."""
    if "--stock" in sys.argv:
        sys.meta_path.insert(0, Blocker())
    import torch
    import torch._dynamo  # DTensor and optimizers import it at their first use
    import torch.distributed.checkpoint
    import torch.distributed.tensor
    import torch.optim

    if "--stock" not in sys.argv:
        import pytest  # noqa: F401  (the modules that hold the ranks' functions import it)

    for argument in sys.argv[1:]:
        if argument.startswith("--preload="):
            for name in argument.removeprefix("--preload=").split(","):
                importlib.import_module(name)
    torch.set_num_threads(1)
    gc.freeze()
    control_in, control_out = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    for line in control_in:
        request = json.loads(line)
        if "fork" in request:
            pid = os.fork()
            if pid == 0:
                control_in.close()
                control_out.close()
                run_rank(request["fork"])
                _exit()
            answer = pid
        else:
            pid, status = os.waitpid(request["reap"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        control_out.write(json.dumps(answer) + "\n")
        control_out.flush()
    _exit()


def _exit() -> None:
    """End as a child of multiprocessing does: the finalisation of an interpreter with torch in it takes a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_rank(job: dict[str, Any]) -> None:
    """One rank: its environment, its log, perhaps a process group, its function, its result."""
    import torch

    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, number)
    os.close(log)
    os.close(null)
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.path[:0] = job["path"]
    outcome: dict[str, Any] = {}
    try:
        function, arguments = _load(job["file"], job["function"]), _read(job["arguments"])
        if job["store"]:
            outcome["result"] = _in_group(job["store"], function, arguments)
        else:
            outcome["result"] = function(*arguments)
        outcome["threads"] = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    except BaseException as error:  # noqa: BLE001 - DCP's own errors are no Exceptions
        outcome = {"kind": type(error).__name__, "error": traceback.format_exc()}
    temporary = job["result"] + ".part"
    torch.save(outcome, temporary)
    os.rename(temporary, job["result"])


def _in_group(store: str, function: Any, arguments: Any) -> Any:
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A file instead of a port: nobody can take it in between.
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()


def _load(file: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"rank_code_{os.path.basename(file)[:-3]}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _read(path: str) -> Any:
    import torch

    return torch.load(path, weights_only=False)


if __name__ == "__main__":
    main()
