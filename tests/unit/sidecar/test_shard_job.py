"""One shard job: how long it is tried again, and what of the jobs is remembered."""

from __future__ import annotations

import pytest

from ckpt_proto.identity import SaveKey
from ckpt_proto.lifecycles import ShardEvent, ShardState
from ckpt_proto.messages import RegionReady, ShardStaged, SubmitShard
from ckpt_sidecar.actions import WriteShard
from ckpt_sidecar.shard_job import FIRST_RETRY_S, LONGEST_RETRY_S, MAX_ENDED_JOBS, ShardBook, ShardJob
from testkit.tables import DIRECTORY, ITEMS, PLAN_ID, TORCH, key


def order(save: SaveKey | None = None, rank: int = 0) -> WriteShard:
    submit = SubmitShard(save or key(), rank, PLAN_ID, 0, 1, (10,), overwrite=True)
    return WriteShard(submit, ITEMS, DIRECTORY, 2, TORCH, RegionReady(PLAN_ID, 0, 1, "/x", 8192, (0,), 4096, 4096))


def job(save: SaveKey | None = None, rank: int = 0, *events: ShardEvent) -> ShardJob:
    made = ShardJob.queued(order(save, rank), 0.0)
    for event in events:
        made.walk(event)
    return made


DURABLE = (ShardEvent.START, ShardEvent.DURABLE)


# ---------------------------------------------------------------- one job


def test_a_queued_job_is_staged_under_the_terms_of_its_order() -> None:
    made = job()
    assert made.state is ShardState.QUEUED
    assert made.staged() == ShardStaged(key(), 0, PLAN_ID, True, 2, DIRECTORY)
    assert not made.is_ended


def test_a_durable_job_is_persisted_unless_it_was_aborted() -> None:
    made = job(None, 0, *DURABLE)
    assert made.is_ended
    assert made.is_persisted
    made.aborted = True
    assert not made.is_persisted


def retries(made: ShardJob, patience_s: float, write_s: float) -> list[tuple[float, float]]:
    """(time of the failure, delay) of each retry, if every try takes ``write_s`` and fails."""
    now_s, found = 100.0, []
    while (again := made.next_try(now_s, patience_s)) is not None:
        found.append((now_s, again.delay_s))
        now_s += again.delay_s + write_s
    return found


def test_each_try_waits_twice_as_long_up_to_a_bound() -> None:
    delays = [delay_s for _, delay_s in retries(job(), 60.0, 0.0)]
    assert delays[0] == FIRST_RETRY_S
    assert delays[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert max(delays) == LONGEST_RETRY_S


@pytest.mark.parametrize("write_s", [0.0, 3.0])
def test_no_try_begins_later_than_the_patience_allows(write_s: float) -> None:
    made = job()
    tried = retries(made, 30.0, write_s)
    assert all(failed_s + delay_s <= 100.0 + 30.0 for failed_s, delay_s in tried)
    assert made.tries == len(tried) >= 3


def test_without_patience_nothing_is_tried_again() -> None:
    assert job().next_try(100.0, 0.0) is None


def test_the_patience_runs_from_the_first_failure_and_not_from_the_submission() -> None:
    """A write may take an hour before it fails."""
    assert job().next_try(7200.0, 30.0) is not None


def test_a_retry_is_the_same_write() -> None:
    again = job().next_try(0.0, 30.0)
    assert again is not None
    assert (again.submit, again.items, again.directory, again.ready) == (
        order().submit,
        order().items,
        order().directory,
        order().ready,
    )


def test_a_shard_that_was_found_on_storage_has_nothing_to_try_again() -> None:
    found = ShardJob(order().submit, DIRECTORY, ShardState.PERSISTED, 0.0)
    assert found.next_try(0.0, 30.0) is None


# ---------------------------------------------------------------- all of them


def test_a_book_is_busy_while_a_job_has_not_ended() -> None:
    book = ShardBook()
    assert not book.is_busy
    made = job()
    book.add(made)
    assert book.is_busy
    made.walk(ShardEvent.CANCEL)
    assert not book.is_busy


def test_old_ended_jobs_are_forgotten_and_known_to_be() -> None:
    book = ShardBook()
    for seq in range(MAX_ENDED_JOBS + 5):
        book.add(job(key(seq), 0, *DURABLE))
    assert len(book) <= MAX_ENDED_JOBS + 1
    assert book.is_forgotten(0, key(0))
    assert not book.is_forgotten(0, key(MAX_ENDED_JOBS))
    assert not book.is_forgotten(1, key(0))
    assert not book.is_forgotten(0, key(0, session="0000000b"))


def test_a_job_under_way_is_never_forgotten() -> None:
    book = ShardBook()
    book.add(job(key(0)))
    for seq in range(1, 2 * MAX_ENDED_JOBS):
        book.add(job(key(seq), 0, *DURABLE))
    assert book[0, key(0)].state is ShardState.QUEUED


def test_jobs_that_the_client_knows_to_have_ended_are_unknown_to_it() -> None:
    """A client that says ``next_seq`` 4 and nothing of 1 has been told how 1 ended."""
    book = ShardBook()
    for seq in (1, 2, 3, 4):
        book.add(job(key(seq)))
    found = book.unknown_to(0, key().session, next_seq=4, in_flight=(2,))
    assert [one.submit.save.seq for one in found] == [1, 3]


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "aborted"])
def test_a_job_that_has_ended_or_was_aborted_is_not_given_up_once_more(ended: bool) -> None:
    book, made = ShardBook(), job(key(1))
    book.add(made)
    made.aborted = not ended
    for event in DURABLE if ended else ():
        made.walk(event)
    assert book.unknown_to(0, key().session, 4, ()) == []


def test_jobs_of_other_ranks_and_sessions_are_not_the_clients_business() -> None:
    book = ShardBook()
    book.add(job(key(1), rank=1))
    book.add(job(key(1, session="0000000b")))
    assert book.unknown_to(0, key().session, 4, ()) == []
