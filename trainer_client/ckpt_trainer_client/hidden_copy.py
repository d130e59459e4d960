"""The part of a save that is copied behind the training's back, on ``ckpt-stage``, after ``save()`` has returned."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ckpt_trainer_client.change_watch import ChangeWatch, raise_if_changed
from ckpt_trainer_client.device_copy import SideStreams
from ckpt_trainer_client.filling import Filling
from ckpt_trainer_client.save_handle import SaveHandle


class HiddenCopy:
    """Copies what is left of a filling, seals it, and hands it over.

    Args:
        handle: of the save.
        filling: its region, with what had to be copied in the call copied. Belongs to the copy until it ends.
        batches: places of the tensors to copy, in the order of copying.
        watch: knows whether they were changed meanwhile.
        hand_over: seals and submits; called on ``ckpt-stage``.
        give_up: told why the save has failed; called there too.

    Nothing of it raises there. When :meth:`wait` returns no tensor is held any more.
    """

    def __init__(
        self,
        handle: SaveHandle,
        filling: Filling,
        batches: Sequence[Sequence[int]],
        watch: ChangeWatch,
        hand_over: Callable[[SaveHandle, Filling], None],
        give_up: Callable[[SaveHandle, BaseException], None],
    ) -> None:
        self.handle = handle
        self._filling: Filling | None = filling
        self._batches = batches
        self._watch: ChangeWatch | None = watch
        self._hand_over = hand_over
        self._give_up = give_up
        self._streams = SideStreams(filling.tensors)
        self._begun = threading.Lock()
        self._ended = threading.Event()
        self._is_staged = False

    def run(self) -> None:
        """On ``ckpt-stage``, or on the trainer's thread if that is ending."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._run()
        finally:
            self._end()

    def call_off(self) -> None:
        """Discard the filling, unless the copy has begun: then it goes on. On the trainer's thread."""
        if not self._begun.acquire(blocking=False):
            return
        if self._filling is not None:
            self._filling.discard()
        self._end()

    def _end(self) -> None:
        self._filling = self._watch = None
        self._ended.set()

    def _run(self) -> None:
        filling, watch = self._filling, self._watch
        assert filling is not None
        assert watch is not None
        try:
            with self._streams.entered():
                for places in self._batches:
                    filling.copy(places)
                    raise_if_changed(watch, places, lambda place: filling.items[place].fqn)
            self._hand_over(self.handle, filling)
            self._is_staged = True
        except BaseException as error:  # noqa: BLE001 - a save that fails must not stop training
            filling.discard()
            self._give_up(self.handle, error)

    def wait(self) -> None:
        """Wait until the tensors may change, whether the save goes on or not. On the trainer's thread.

        What it took is added to the handle's ``wait_s``, and ``staged`` is resolved here if the save is staged.
        """
        started_s = time.monotonic()
        self._ended.wait()
        self.handle.wait_s += time.monotonic() - started_s
        if self._is_staged:
            self.handle._set_staged()
