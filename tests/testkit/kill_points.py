"""Named points of the save path at which a process kills itself, without any hook in the product.

A process is armed before it begins: one function that the product calls at the point is replaced by one that counts the
calls that are meant and, at the n-th, ends the process with SIGKILL, before the call, after it, or after a part of it.
``POINTS`` is the only place that knows where in the code a point lies: when code moves, a line of it changes.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

BEFORE, AFTER, HALFWAY = "before", "after", "halfway"

LAST_WORDS: Final = "killed by itself at the point"
"""What a process writes to its log before it dies at its point."""

LAST_WORDS_BEFORE_A_STOP: Final = "stopped by itself at the point"
"""What it writes if it only stops there."""


class KillPointGone(AssertionError):
    """The code of a point has moved; the text says what was looked for and where."""


@dataclass(frozen=True)
class KillPoint:
    """Where the product is when it dies.

    Attributes:
        module, attribute: the function that is called at the point, where its callers look it up.
        when: ``before`` or ``after`` the call, or ``halfway``: after a call with the first half of every list given.
        about: only calls with an argument or a result of a type of this name, or a path that ends so, are meant.
        only: a further condition on the arguments.
    """

    module: str
    attribute: str
    when: str
    about: str = ""
    only: Callable[..., bool] | None = None


@dataclass(frozen=True)
class KillOrder:
    """Die at the ``nth`` passing of ``point``; ``rank`` is whom it is for, None for a sidecar. With ``stops`` it does
    not die there but stops, until SIGCONT."""

    point: str
    nth: int = 1
    rank: int | None = None
    stops: bool = False


def _is_first_window(file: Any, view: memoryview, offset: int) -> bool:
    return offset == 0


def _is_last_window(file: Any, view: memoryview, offset: int) -> bool:
    return offset + len(view) >= file._nbytes


_TAKE = ("ckpt_sidecar.job_table", "JobTable.handle")
_WRITE = ("ckpt_sidecar.data_file", "DataFile.write_at")
_REPLACE = ("ckpt_sidecar.durable_fs", "os.replace")
_LINK = ("ckpt_sidecar.durable_fs", "os.link")
_POST = ("ckpt_sidecar.daemon", "Daemon._post")
_SEND = ("ckpt_sidecar.server", "Server.send")
_HEARD = ("ckpt_trainer_client.sidecar_link", "decode")

SIDECAR_POINTS: Final = {
    "before Hello is taken": KillPoint(*_TAKE, BEFORE, "Hello"),
    "after Hello is taken": KillPoint(*_TAKE, AFTER, "Hello"),
    "before ProposePlan is taken": KillPoint(*_TAKE, BEFORE, "ProposePlan"),
    "after ProposePlan is taken": KillPoint(*_TAKE, AFTER, "ProposePlan"),
    "before GlobalPlan is taken": KillPoint(*_TAKE, BEFORE, "GlobalPlan"),
    "after GlobalPlan is taken": KillPoint(*_TAKE, AFTER, "GlobalPlan"),
    "before SubmitShard is taken": KillPoint(*_TAKE, BEFORE, "SubmitShard"),
    "after SubmitShard is taken": KillPoint(*_TAKE, AFTER, "SubmitShard"),
    "before DecideCommit is taken": KillPoint(*_TAKE, BEFORE, "DecideCommit"),
    "after DecideCommit is taken": KillPoint(*_TAKE, AFTER, "DecideCommit"),
    "before Goodbye is taken": KillPoint(*_TAKE, BEFORE, "Goodbye"),
    "after Goodbye is taken": KillPoint(*_TAKE, AFTER, "Goodbye"),
    "before the directory is opened": KillPoint("ckpt_sidecar.storage_work", "open_directory", BEFORE),
    "after the directory is opened": KillPoint("ckpt_sidecar.storage_work", "open_directory", AFTER),
    "before a region is prepared": KillPoint("ckpt_sidecar.torch_work", "prepare_region", BEFORE),
    "after a region is prepared": KillPoint("ckpt_sidecar.torch_work", "prepare_region", AFTER),
    "before a shard is written": KillPoint("ckpt_sidecar.shard_writer", "ShardWriter.write", BEFORE),
    "before the first window": KillPoint(*_WRITE, BEFORE, only=_is_first_window),
    "after the first window": KillPoint(*_WRITE, AFTER, only=_is_first_window),
    "before the last window": KillPoint(*_WRITE, BEFORE, only=_is_last_window),
    "after the last window": KillPoint(*_WRITE, AFTER, only=_is_last_window),
    "before a data file is durable": KillPoint("ckpt_sidecar.data_file", "DataFile.finish", BEFORE),
    "after a data file is durable": KillPoint("ckpt_sidecar.data_file", "DataFile.finish", AFTER),
    "before a manifest is written": KillPoint("ckpt_sidecar.shard_writer", "write_file", BEFORE),
    "before a manifest has its name": KillPoint(*_REPLACE, BEFORE, ".manifest"),
    "after a manifest has its name": KillPoint(*_REPLACE, AFTER, ".manifest"),
    "before a durable shard is reported": KillPoint(*_POST, BEFORE, "ShardDurable"),
    "before the checkpoint is published": KillPoint("ckpt_sidecar.torch_work", "publish_checkpoint", BEFORE),
    "before .metadata is linked": KillPoint(*_LINK, BEFORE, ".metadata"),
    "after .metadata is linked": KillPoint(*_LINK, AFTER, ".metadata"),
    "before .metadata is replaced": KillPoint(*_REPLACE, BEFORE, ".metadata"),
    "after .metadata is replaced": KillPoint(*_REPLACE, AFTER, ".metadata"),
    "before superseded files are removed": KillPoint("ckpt_sidecar.commit", "remove_files", BEFORE),
    "before the commit is reported": KillPoint(*_POST, BEFORE, "Published"),
    "before a rank is told of the commit": KillPoint(*_SEND, BEFORE, "Committed"),
    "after a rank is told of the commit": KillPoint(*_SEND, AFTER, "Committed"),
    "before the files of an attempt are removed": KillPoint("ckpt_sidecar.storage_work", "remove_files", BEFORE),
    "after the files of an attempt are removed": KillPoint("ckpt_sidecar.storage_work", "remove_files", AFTER),
}

RANK_POINTS: Final = {
    "after Welcome has come": KillPoint(*_HEARD, AFTER, "Welcome"),
    "before the local plan is made": KillPoint("ckpt_trainer_client.planning", "PlanningState.local_plan", BEFORE),
    "after the local plan is made": KillPoint("ckpt_trainer_client.planning", "PlanningState.local_plan", AFTER),
    "before the global plan is made": KillPoint("ckpt_trainer_client.planning", "PlanningState.global_plan", BEFORE),
    "after the global plan is made": KillPoint("ckpt_trainer_client.planning", "PlanningState.global_plan", AFTER),
    "after FinalPlan has come": KillPoint(*_HEARD, AFTER, "FinalPlan"),
    "after RegionReady has come": KillPoint(*_HEARD, AFTER, "RegionReady"),
    "before the seal is broken": KillPoint("ckpt_trainer_client.attached_region", "AttachedRegion.begin", BEFORE),
    "after the seal is broken": KillPoint("ckpt_trainer_client.attached_region", "AttachedRegion.begin", AFTER),
    "halfway through the copy": KillPoint("ckpt_trainer_client.filling", "copy_all", HALFWAY),
    "before the region is sealed": KillPoint("ckpt_trainer_client.attached_region", "AttachedRegion.seal", BEFORE),
    "after the region is sealed": KillPoint("ckpt_trainer_client.attached_region", "AttachedRegion.seal", AFTER),
    "before SubmitShard is sent": KillPoint("ckpt_trainer_client.connection", "Connection.submit", BEFORE),
    "after SubmitShard is queued": KillPoint("ckpt_trainer_client.connection", "Connection.submit", AFTER),
    "after save has returned": KillPoint("ckpt_trainer_client.client", "CheckpointClient.save", AFTER),
    "after ShardPersisted has come": KillPoint(*_HEARD, AFTER, "ShardPersisted"),
    "before the pre-commit hooks": KillPoint("ckpt_trainer_client.commit_hooks", "CommitHooks.veto", BEFORE),
    "after the pre-commit hooks": KillPoint("ckpt_trainer_client.commit_hooks", "CommitHooks.veto", AFTER),
    "after Committed has come": KillPoint(*_HEARD, AFTER, "Committed"),
    "before the post-commit hooks": KillPoint("ckpt_trainer_client.commit_hooks", "CommitHooks.tell", BEFORE),
    "before close": KillPoint("ckpt_trainer_client.client", "CheckpointClient.close", BEFORE),
    "before Goodbye": KillPoint("ckpt_trainer_client.connection", "Connection.close", BEFORE),
    "after Farewell has come": KillPoint(*_HEARD, AFTER, "Farewell"),
}

POINTS: Final = {**SIDECAR_POINTS, **RANK_POINTS}


def find(module: str, attribute: str) -> tuple[Any, str, Any]:
    """``(owner, name, value)`` of something in the product.

    Raises:
        KillPointGone: it is not there.
    """
    try:
        owner: Any = importlib.import_module(module)
        *path, name = attribute.split(".")
        for part in path:
            owner = getattr(owner, part)
        return owner, name, getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise KillPointGone(
            f"there is no {module}:{attribute} any more ({error}): say in POINTS where it is"
        ) from error


def set_constants(constants: dict[str, Any]) -> None:
    """Give constants of the product (``module:NAME``) other values in this process.

    Raises:
        KillPointGone: one is not there.
    """
    for where, value in constants.items():
        owner, name, _ = find(*where.split(":"))
        setattr(owner, name, value)


def arm(order: KillOrder) -> None:
    """Let this process die at a point.

    Raises:
        KillPointGone: the point's function is not there.
    """
    point = POINTS[order.point]
    owner, name, real = find(point.module, point.attribute)
    numbers, lock = itertools.count(1), threading.Lock()

    def is_due(*values: Any) -> bool:
        if (point.about and not _is_about(point.about, values)) or (point.only is not None and not point.only(*values)):
            return False
        with lock:
            return next(numbers) == order.nth

    @functools.wraps(real)
    def deadly(*args: Any, **kwargs: Any) -> Any:
        if point.when != AFTER and is_due(*args):
            if point.when == HALFWAY:
                real(*(arg[: len(arg) // 2] if isinstance(arg, list) else arg for arg in args))
            _die(order)
        result = real(*args, **kwargs)
        if point.when == AFTER and is_due(*args, *((result,) if point.about else ())):
            _die(order)
        return result

    setattr(owner, name, deadly)


def _is_about(about: str, values: tuple[Any, ...]) -> bool:
    named = [type(value).__name__ for value in (*values, *(getattr(value, "message", None) for value in values))]
    paths = [os.fspath(value) for value in values if isinstance(value, (str, os.PathLike))]
    return about in named or any(path.endswith(about) for path in paths)


def _die(order: KillOrder) -> None:
    words = LAST_WORDS_BEFORE_A_STOP if order.stops else LAST_WORDS
    os.write(2, f"{words} {order.point!r} ({order.nth})\n".encode())
    os.kill(os.getpid(), signal.SIGSTOP if order.stops else signal.SIGKILL)
