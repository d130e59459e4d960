"""Which tensors are copied in the call, and in what portions the others are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_trainer_client.copy_order import BATCH_BYTES, IN_CALL_BYTES, CopyOrder, Source, batches

LARGE = IN_CALL_BYTES + 1


@pytest.mark.parametrize(
    ("source", "in_call"),
    [
        (Source("w", LARGE, 100), False),
        (Source("w", IN_CALL_BYTES, 100), True),
        (Source("w", 0), True),
        (Source("w", LARGE, 7), True),
        (Source("optimizer.state.w.exp_avg", LARGE, 100), True),
        (Source("model.norm.running_var", LARGE, 100), True),
        (Source("running_var", LARGE, 100), True),
        (Source("model.running_var.w", LARGE, 100), False),
        (Source("cache.1", LARGE, 100), True),
        (Source("cache", LARGE, 100), False),
    ],
    ids=str,
)
def test_what_is_small_named_known_or_a_buffer_is_copied_in_the_call(source: Source, in_call: bool) -> None:
    order = CopyOrder(["cache.*", "*.exp_avg"])
    assert order.split([source], frozenset({7})) == (([0], []) if in_call else ([], [0]))


def test_what_was_found_changed_is_copied_in_the_call_from_then_on() -> None:
    order = CopyOrder()
    sources = [Source("a", LARGE), Source("b", LARGE)]
    assert order.split(sources) == ([], [0, 1])
    order.learn(["b"])
    assert order.split(sources) == ([1], [0])


@given(st.lists(st.integers(0, 3 * BATCH_BYTES)))
def test_batches_hold_every_place_once_in_order_and_are_no_larger_than_need_be(sizes: list[int]) -> None:
    sources = [Source(str(place), nbytes) for place, nbytes in enumerate(sizes)]
    runs = batches(range(len(sizes)), sources)
    assert [place for run in runs for place in run] == list(range(len(sizes)))
    for run in runs:
        assert run
        assert sum(sizes[place] for place in run[:-1]) < BATCH_BYTES
