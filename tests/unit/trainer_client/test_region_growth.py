"""A region that is grown while sidecars come and go, and saves are given up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from ckpt_proto.messages import RegionReady
from ckpt_trainer_client.errors import CheckpointFailed
from ckpt_trainer_client.region_pool import RegionPool, RegionRequest

PLAN = "0a1b2c3d-p1"
NEEDED = 1 << 20


def ready(slot: int, generation: int, capacity: int = 1 << 16) -> RegionReady:
    return RegionReady(PLAN, slot, generation, f"/dev/shm/x/rank-0.slot-{slot}.region", 1 << 21, (0,), 4096, capacity)


def request(prepare: Callable[[int, int], None], check: Callable[[], None] = lambda: None) -> RegionRequest:
    return RegionRequest(PLAN, 5, "wait", 60.0, 0, check, prepare)


@contextmanager
def sidecar(pool: RegionPool, answers: Sequence[RegionReady]) -> Iterator[queue.SimpleQueue[tuple[int, int]]]:
    """Answers one question after the other on a thread of its own."""
    asked: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def serve() -> None:
        for answer in answers:
            assert asked.get(timeout=30.0) == (0, NEEDED)
            pool.on_ready(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    yield asked
    thread.join(30.0)


def test_a_region_that_a_restarted_sidecar_has_prepared_small_is_asked_for_again() -> None:
    pool = RegionPool(1)
    pool.on_ready(ready(0, 1))
    with sidecar(pool, [ready(0, 7), ready(0, 8, NEEDED)]) as asked:
        wish = request(lambda slot, capacity: asked.put((slot, capacity)))
        assert pool.grow(pool.acquire(wish), wish, NEEDED) == ready(0, 8, NEEDED)


def test_a_slot_that_the_sidecar_may_begin_to_prepare_at_any_moment_is_not_filled() -> None:
    pool = RegionPool(2)
    for slot in range(2):
        pool.on_ready(ready(slot, 1))
    abandoned: list[tuple[int, int]] = []

    def check() -> None:
        if abandoned:
            raise CheckpointFailed(5, [])

    def prepare(slot: int, capacity: int) -> None:
        abandoned.append((slot, capacity))
        pool.wake()
        threading.Thread(target=pool.wake).start()

    wish = request(prepare, check)
    first = pool.acquire(wish)
    with pytest.raises(CheckpointFailed):
        pool.grow(first, wish, NEEDED)
    pool.discard(first.slot)
    later = request(lambda slot, capacity: None)
    assert pool.acquire(later).slot == 1
    pool.on_ready(ready(0, 2, NEEDED))
    assert pool.acquire(later) == ready(0, 2, NEEDED)
