"""Hidden copies that begin only when training waits for them: whatever it does before that, it does in their way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpt_trainer_client import filling
from ckpt_trainer_client.hidden_copy import HiddenCopy


@contextmanager
def late_copies() -> Iterator[list[str]]:
    """While this lasts, a hidden copy does nothing until it is waited for, or this ends.

    Yields the names of the threads that have copied, in order.
    """
    awaited, by = threading.Event(), list[str]()
    real_wait, real_copy = HiddenCopy.wait, filling.copy_all

    def wait(copy: HiddenCopy) -> None:
        awaited.set()
        real_wait(copy)
        awaited.clear()

    def copy_all(*given: Any) -> None:
        name = threading.current_thread().name
        if name.startswith("ckpt-stage"):
            awaited.wait()
        by.append(name)
        real_copy(*given)

    HiddenCopy.wait, filling.copy_all = wait, copy_all  # type: ignore[method-assign]
    try:
        yield by
    finally:
        HiddenCopy.wait, filling.copy_all = real_wait, real_copy  # type: ignore[method-assign]
        awaited.set()
