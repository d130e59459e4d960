"""What ``prepare()`` hands out: whether plan and regions are ready."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckpt_proto.errors import report_of
from ckpt_proto.identity import SaveKey
from ckpt_trainer_client.errors import CheckpointError
from ckpt_trainer_client.planning import PlanningState


class Preparation:
    """One call of ``prepare()``. A later ``save()`` waits for it by itself; nothing has to be done with this.

    Args:
        save: the attempt that it is to the other ranks.
        work: plans and makes the regions; called on ``ckpt-stage`` with ``state``, which is let go of afterwards.
    """

    def __init__(self, save: SaveKey, work: Callable[[PlanningState], None], state: PlanningState) -> None:
        self.save = save
        self._work: Callable[[PlanningState], None] | None = work
        self._state: PlanningState | None = state
        self._ended = threading.Event()
        self._failure = ""

    def run(self) -> None:
        """On ``ckpt-stage``."""
        work, state = self._work, self._state
        self._work = self._state = None
        assert work is not None
        assert state is not None
        try:
            work(state)
        except BaseException as error:  # noqa: BLE001 - told by result()
            self._failure = str(report_of(error).message)
        finally:
            state.release()
            del work, state
            self._ended.set()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until it has ended."""
        self._ended.wait()

    def result(self, timeout: float | None = None) -> None:
        """Wait until plan and regions of this rank are ready. Any thread.

        Raises:
            CheckpointError: they could not be made, for the reason given; the next ``save()`` tries again.
            TimeoutError: it is not known after ``timeout`` seconds.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"plan and regions are not prepared after {timeout} s; see ckpt-sidecar status")
        if self._failure:
            raise CheckpointError(f"nothing was prepared: {self._failure}")
