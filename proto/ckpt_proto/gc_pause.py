"""Making a million objects at once without Python's cycle collector looking through them again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """The collector is off in the block, and on afterwards if it was on before. What is made must have no cycles.

    It belongs to the whole process: another thread only collects later. Measured: decoding plans of 64,000 items takes
    27 us an item with the collector and 9 without.
    """
    if not gc.isenabled():  # by whoever trains, or by somebody else's pause
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
