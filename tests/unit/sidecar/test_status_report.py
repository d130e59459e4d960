"""What the sidecar says about itself, put together from the tables and the writers' progress."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt_proto.errors import FailureReport
from ckpt_proto.lifecycles import CheckpointEvent, RegionState, ShardState
from ckpt_proto.messages import Hello, RegionReady, SubmitShard
from ckpt_proto.region import free_bytes
from ckpt_proto.status import ShardStatus, SidecarStatus, SlotStatus
from ckpt_sidecar.action_runner import ActionRunner
from ckpt_sidecar.attempt import Attempt
from ckpt_sidecar.checkpoint_table import CheckpointTable
from ckpt_sidecar.config import SidecarConfig
from ckpt_sidecar.events import AtCoordinator, DirectoryOpened
from ckpt_sidecar.job_table import JobTable
from ckpt_sidecar.progress import Progress
from ckpt_sidecar.rank_record import RankRecord, Slot
from ckpt_sidecar.shard_job import ShardJob
from ckpt_sidecar.status_report import SHOWN_FAILURES, SHOWN_LATE_RANKS, Identity, build_status
from ckpt_sidecar.throttle import Throttle
from testkit.plans import PLAN_ID, SESSION, save_key

NOW_S = 1000.0


def hello(rank: int, world_size: int = 2) -> Hello:
    return Hello(
        job_id="job",
        rank=rank,
        world_size=world_size,
        pid=100 + rank,
        process_start_s=1.0,
        node="node-a",
        incarnation=0,
        session="",
        torch_version=torch.__version__,
        directory="/checkpoints",
        slots=2,
        stage_timeout_s=60.0,
    )


def ready(slot: int, nbytes: int) -> RegionReady:
    return RegionReady(PLAN_ID, slot, 1, "/dev/shm/region", nbytes, (), 0, nbytes)


class Sidecar:
    """The parts that a status is made of."""

    def __init__(self, tmp_path: Path) -> None:
        self.config = SidecarConfig("job", shm_root=tmp_path)
        self.jobs = JobTable("job", "0123", "node-a", torch.__version__)
        self.checkpoints = CheckpointTable(lambda: SESSION)
        self.runner = ActionRunner(tmp_path, 1, Throttle(None), lambda event: None)

    def status(self) -> SidecarStatus:
        identity = Identity("0123", "node-a", torch.__version__, started_s=NOW_S - 60.0)
        return build_status(self.config, identity, self.jobs, self.checkpoints, self.runner, NOW_S)

    def add_session(self, world_size: int = 2) -> None:
        for rank in range(world_size):
            self.checkpoints.handle(AtCoordinator(rank, hello(rank, world_size)), NOW_S)
        self.checkpoints.handle(DirectoryOpened("/checkpoints", ()), NOW_S)
        assert self.checkpoints.session is not None
        assert self.checkpoints.session.token == SESSION

    def add_attempt(self, seq: int = 0, world_size: int = 2, session: str = SESSION) -> Attempt:
        save = save_key(step=seq, seq=seq, session=session)
        attempt = Attempt(save, world_size, "/checkpoints", 60.0, opened_s=NOW_S - 5.0)
        self.checkpoints.attempts[save.session, save.seq] = attempt
        return attempt


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    return Sidecar(tmp_path)


def test_a_sidecar_that_nobody_has_used(sidecar: Sidecar, tmp_path: Path) -> None:
    status = sidecar.status()
    assert (status.sidecar_id, status.job_id, status.node, status.pid) == ("0123", "job", "node-a", os.getpid())
    assert (status.uptime_s, status.draining, status.directory, status.world_size) == (60.0, False, "", 0)
    assert (status.last_committed_step, status.last_committed_age_s) == (None, None)
    assert (status.shm_root, status.shm_used_bytes) == (str(tmp_path), 0)
    assert status.shm_free_bytes == pytest.approx(free_bytes(tmp_path), rel=0.5)
    assert (status.ranks, status.shards, status.checkpoints, status.failures) == ((), (), (), ())
    assert (status.torch_ready, status.torch_version) == (False, torch.__version__)


def test_ranks_are_in_order_with_their_regions(sidecar: Sidecar) -> None:
    sidecar.jobs.ranks[1] = RankRecord(hello(1), b"b", slots=[Slot(RegionState.SEALED, 1, ready(0, 8192)), Slot()])
    sidecar.jobs.ranks[0] = RankRecord(hello(0), b"a", slots=[Slot(ready=ready(0, 4096))])
    status = sidecar.status()
    assert [(rank.rank, rank.pid, rank.alive) for rank in status.ranks] == [(0, 100, True), (1, 101, True)]
    assert status.ranks[0].slots == (SlotStatus(0, "free", 4096),)
    assert status.ranks[1].slots == (SlotStatus(0, "sealed", 8192), SlotStatus(1, "free", 0))
    assert status.shm_used_bytes == 4096 + 8192


def test_a_region_that_a_dead_rank_sealed_is_shown_as_orphaned(sidecar: Sidecar) -> None:
    slots = [Slot(RegionState.SEALED, 1, ready(0, 8192)), Slot(RegionState.FREE, 1, ready(1, 8192))]
    sidecar.jobs.ranks[0] = RankRecord(hello(0), b"a", alive=False, slots=slots)
    [rank] = sidecar.status().ranks
    assert not rank.alive
    assert [slot.state for slot in rank.slots] == ["orphaned", "free"]
    assert slots[0].state is RegionState.SEALED  # only looked at


def test_a_shard_under_way_shows_its_progress(sidecar: Sidecar) -> None:
    submit = SubmitShard(save_key(), 0, PLAN_ID, 0, 1, ())
    sidecar.jobs.jobs[0, submit.save] = ShardJob(submit, "/checkpoints", ShardState.WRITING, NOW_S - 9.0)
    sidecar.runner.progress[0, submit.save] = Progress(total_bytes=90, written_bytes=30, moved_s=NOW_S - 2.0)
    status = sidecar.status()
    assert status.shards == (ShardStatus(0, 5, "0a1b2c3d-0", "writing", 30, 90, 9.0, 2.0),)
    assert status.written_bytes == 30


@pytest.mark.parametrize(
    ("state", "written"), [(ShardState.PERSISTED, 90), (ShardState.FAILED, 0), (ShardState.CANCELLED, 0)]
)
def test_a_shard_that_has_ended_shows_what_became_of_it(sidecar: Sidecar, state: ShardState, written: int) -> None:
    submit = SubmitShard(save_key(), 3, PLAN_ID, 0, 1, ())
    job = ShardJob(submit, "/checkpoints", state, NOW_S - 9.0, nbytes=90 if written else 0)
    sidecar.jobs.jobs[3, submit.save] = job
    [shard] = sidecar.status().shards
    assert (shard.rank, shard.state, shard.written_bytes, shard.total_bytes) == (3, state.value, written, job.nbytes)
    assert shard.idle_s == 0.0


# ---------------------------------------------------------------- attempts


def test_an_open_attempt_says_who_has_not_staged(sidecar: Sidecar) -> None:
    sidecar.add_session()
    attempt = sidecar.add_attempt()
    attempt.staged = {0}
    attempt.tell(NOW_S, "rank 0 staged")
    [shown] = sidecar.status().checkpoints
    assert (shown.step, shown.save_id, shown.state, shown.age_s) == (0, "0a1b2c3d-0", "open", 5.0)
    assert (shown.staged_ranks, shown.persisted_ranks, shown.world_size) == (1, 0, 2)
    assert shown.late == ("rank 1 on node-a has not staged",)
    assert shown.story == ("+5.000s rank 0 staged",)


def test_then_who_has_not_persisted_then_who_has_not_decided(sidecar: Sidecar) -> None:
    sidecar.add_session()
    attempt = sidecar.add_attempt()
    attempt.staged = {0, 1}
    attempt.persisted = {1}
    assert sidecar.status().checkpoints[0].late == ("rank 0 on node-a has not persisted",)
    attempt.persisted = {0, 1}
    attempt.walk(CheckpointEvent.ALL_PERSISTED)
    assert sidecar.status().checkpoints[0].late == ("rank 0 on node-a has not decided on the commit",)
    attempt.publishing_s = 0.0
    assert sidecar.status().checkpoints[0].late == ("the coordinator is publishing",)
    attempt.walk(CheckpointEvent.PUBLISH)
    assert sidecar.status().checkpoints[0].late == ()


def test_late_ranks_of_an_earlier_life_have_no_node(sidecar: Sidecar) -> None:
    sidecar.add_session()
    sidecar.add_attempt(session="ffffffff")
    assert sidecar.status().checkpoints[0].late == ("rank 0 has not staged", "rank 1 has not staged")


def test_not_all_of_many_late_ranks_are_named(sidecar: Sidecar) -> None:
    sidecar.add_session(100)
    sidecar.add_attempt(world_size=100)
    late = sidecar.status().checkpoints[0].late
    assert len(late) == SHOWN_LATE_RANKS
    assert late[0] == "rank 0 on node-a has not staged"


def test_the_newest_failures_are_shown(sidecar: Sidecar) -> None:
    sidecar.add_session()
    for seq in range(SHOWN_FAILURES + 3):
        attempt = sidecar.add_attempt(seq)
        attempt.walk(CheckpointEvent.ABORT)
        attempt.failures = (FailureReport("StorageError", f"failure {seq}"),)
        attempt.ended_s = NOW_S - 2.0
    failures = sidecar.status().failures
    assert [failure.step for failure in failures] == [*range(3, SHOWN_FAILURES + 3)]
    assert failures[-1].failures[0].message == f"failure {SHOWN_FAILURES + 2}"
    assert {failure.age_s for failure in failures} == {2.0}


def test_a_skipped_save_is_no_failure(sidecar: Sidecar) -> None:
    """Health names the newest of these as the reason of failures in a row."""
    sidecar.add_session()
    attempt = sidecar.add_attempt()
    attempt.skipped = True
    attempt.walk(CheckpointEvent.ABORT)
    attempt.failures = (FailureReport("SaveSkipped", "no free region"),)
    attempt.ended_s = NOW_S
    status = sidecar.status()
    assert status.failures == ()
    assert [shown.state for shown in status.checkpoints] == ["aborted"]


def test_counters_and_session_are_taken_over(sidecar: Sidecar) -> None:
    sidecar.add_session(3)
    sidecar.jobs.draining = True
    counters = sidecar.checkpoints.counters
    counters.committed, counters.failed, counters.skipped, counters.consecutive_failures = 4, 3, 2, 1
    counters.last_committed_step, counters.last_committed_s = 77, NOW_S - 30.0
    status = sidecar.status()
    assert (status.committed_count, status.failed_count, status.skipped_count) == (4, 3, 2)
    assert (status.consecutive_failures, status.draining) == (1, True)
    assert (status.last_committed_step, status.last_committed_age_s) == (77, 30.0)
    assert (status.directory, status.world_size) == ("/checkpoints", 3)
