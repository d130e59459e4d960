"""What is done in place of a sidecar: which sealed regions are written, which are taken back, what is published."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpt_proto.checkpoint_layout import METADATA_NAME, data_file_name, manifest_name
from ckpt_proto.codec import encode
from ckpt_proto.errors import StorageError
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import SubmitShard
from ckpt_proto.process import process_start_s
from ckpt_proto.region import Seal, region_path, seal_path
from ckpt_proto.runtime_dir import lock_owner, make_private_dir, stand_in_runs
from ckpt_sidecar import stand_in
from ckpt_sidecar.__main__ import main
from ckpt_sidecar.actions import PrepareRegion
from ckpt_sidecar.job_lock import JobLock, JobLockTaken
from ckpt_sidecar.leftovers import read_seal
from ckpt_sidecar.stand_in import Client, Outcome, holding_the_lock, publish_attempt, withdraw_shard, write_shards
from ckpt_sidecar.throttle import Throttle
from ckpt_sidecar.torch_work import prepare_region
from testkit.plans import persist_attempt, states_of_ranks
from testkit.tables import ITEMS, PLAN_ID, SESSION, hello, key

EARLIER = "0e0e0e0e"


@dataclass
class Job:
    """A job's directory in shared memory and its checkpoint directory."""

    directory: Path
    run: Path

    def seal(
        self, save: SaveKey, *, rank: int = 0, slot: int = 0, alive: bool = True, session: str = SESSION
    ) -> SubmitShard:
        """A region that a sidecar has prepared and a rank, dead or alive, has sealed."""
        start_s = process_start_s(os.getpid())
        assert start_s is not None
        owner = hello(
            rank,
            2,
            session=session,
            directory=str(self.run),
            pid=os.getpid(),
            process_start_s=start_s if alive else start_s - 1,
        )
        order = PrepareRegion(rank, slot, 1, PLAN_ID, ITEMS, 4096, owner, key())
        region, ready = prepare_region(self.directory, order, None)
        region.mapping.close()
        submit = SubmitShard(save, rank, PLAN_ID, slot, ready.generation, (10,))
        seal = Seal(seal_path(region_path(self.directory, rank, slot)))
        seal.set(encode(submit))
        seal.close()
        return submit

    def is_sealed(self, rank: int = 0, slot: int = 0) -> bool:
        return read_seal(region_path(self.directory, rank, slot)) is not None

    def lay(self, save: SaveKey, rank: int = 0) -> None:
        """Something that goes by the names of a durable shard."""
        where = self.run / f"step-{save.step}"
        where.mkdir(parents=True, exist_ok=True)
        for name in (data_file_name(rank, save.save_id), manifest_name(rank, save.save_id)):
            (where / name).write_bytes(b"-")

    def names(self, save: SaveKey) -> set[str]:
        """What lies in a step's directory."""
        where = self.run / f"step-{save.step}"
        return {path.name for path in where.iterdir()} if where.is_dir() else set()

    def has_manifest(self, save: SaveKey, rank: int = 0) -> bool:
        return manifest_name(rank, save.save_id) in self.names(save)

    def publish(self, save: SaveKey) -> None:
        (self.run / f"step-{save.step}" / METADATA_NAME).write_bytes(b"-" + save.save_id.encode() + b"-")

    def write(self, *pending: int, next_seq: int = 9) -> list[Outcome]:
        """What a stand-in of rank 0 makes of it."""
        return write_shards(self.directory, Client(0, SESSION, next_seq, frozenset(pending)), Throttle(None))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    directory = tmp_path / "user" / "job"
    make_private_dir(directory)
    return Job(directory, tmp_path / "run")


def did(outcomes: list[Outcome]) -> list[tuple[str, int, int, str]]:
    """What was done, of which rank and save number, and what came between."""
    return [(each.did, each.rank, each.save.seq, each.failure.kind if each.failure else "") for each in outcomes]


# ---------------------------------------------------------------- writing


def test_what_the_client_has_in_flight_is_durable_and_its_seal_broken(job: Job) -> None:
    job.seal(key(3))
    job.seal(key(4), slot=1)
    outcomes = job.write(3, 4)
    assert did(outcomes) == [("write", 0, 3, ""), ("write", 0, 4, "")]
    for outcome in outcomes:
        path = job.run / f"step-{outcome.save.step}" / data_file_name(0, outcome.save.save_id)
        assert path.stat().st_size == outcome.nbytes > 0
        assert job.has_manifest(outcome.save)
    assert not job.is_sealed(slot=0)
    assert not job.is_sealed(slot=1)


def test_what_was_sealed_since_the_client_asked_is_left_alone(job: Job) -> None:
    """It is not among the saves in flight, and has not ended all the same."""
    job.seal(key(3))
    job.seal(key(4), slot=1)
    assert did(job.write(3, next_seq=4)) == [("write", 0, 3, "")]
    assert job.is_sealed(slot=1)


def test_what_has_ended_is_taken_back(job: Job) -> None:
    job.seal(key(3))
    job.lay(key(3))
    assert did(job.write(4)) == [("withdraw", 0, 3, "")]
    assert not job.is_sealed()
    assert not job.has_manifest(key(3))


def test_what_an_earlier_session_of_the_process_has_sealed_is_taken_back(job: Job) -> None:
    job.seal(key(3, session=EARLIER))
    assert did(job.write(3)) == [("withdraw", 0, 3, "")]
    assert not job.is_sealed()


def test_what_has_ended_in_a_commit_keeps_its_files_and_frees_its_region(job: Job) -> None:
    job.seal(key(3))
    job.lay(key(3))
    job.publish(key(3))
    assert did(job.write()) == [("withdraw", 0, 3, "")]
    assert not job.is_sealed()
    assert job.has_manifest(key(3))


def test_what_a_dead_rank_has_sealed_is_written(job: Job) -> None:
    job.seal(key(3), rank=1, alive=False)
    assert did(job.write(3)) == [("write", 1, 3, "")]
    assert job.has_manifest(key(3), rank=1)
    assert not job.is_sealed(rank=1)


def test_what_an_earlier_process_of_the_rank_has_sealed_is_written(job: Job) -> None:
    job.seal(key(3, session=EARLIER), alive=False, session=EARLIER)
    assert did(job.write(3)) == [("write", 0, 3, "")]


def test_what_another_living_rank_has_sealed_is_its_own_stand_ins_work(job: Job) -> None:
    job.seal(key(3), rank=1)
    assert job.write(3) == []
    assert job.is_sealed(rank=1)
    assert not job.has_manifest(key(3), rank=1)


def test_what_is_durable_is_not_written_again(job: Job) -> None:
    job.seal(key(3))
    job.write(3)
    path = job.run / f"step-{key(3).step}" / data_file_name(0, key(3).save_id)
    before = path.stat().st_ino, path.stat().st_mtime_ns
    job.seal(key(3))
    assert did(job.write(3)) == [("write", 0, 3, "")]
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == before
    assert not job.is_sealed()


def test_what_cannot_be_written_stays_sealed_and_says_why(job: Job) -> None:
    job.seal(key(3))
    job.seal(key(4), slot=1)
    job.run.mkdir()
    (job.run / f"step-{key(3).step}").touch()
    assert did(job.write(3, 4)) == [("write", 0, 3, "StorageError"), ("write", 0, 4, "")]
    assert job.is_sealed(slot=0)
    assert not job.is_sealed(slot=1)


# ---------------------------------------------------------------- taking back


def test_only_the_part_of_the_save_is_taken_back(job: Job) -> None:
    job.seal(key(3))
    job.seal(key(4), slot=1)
    for save, rank in ((key(3), 0), (key(3), 1), (key(4), 0)):
        job.lay(save, rank)
    outcome = withdraw_shard(job.directory, str(job.run), 0, key(3))
    assert did([outcome]) == [("withdraw", 0, 3, "")]
    assert not job.is_sealed(slot=0)
    assert job.is_sealed(slot=1)
    assert (job.has_manifest(key(3)), job.has_manifest(key(3), 1), job.has_manifest(key(4))) == (False, True, True)
    assert data_file_name(0, key(3).save_id) in job.names(key(3))  # a commit that was under way needs it


def test_a_manifest_that_cannot_be_removed_has_lost_its_seal_already(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed in between leaves nothing that the next sidecar would write again."""
    job.seal(key(3))
    job.lay(key(3))

    def fail(paths: list[Path]) -> None:
        raise StorageError("the storage is read-only")

    monkeypatch.setattr(stand_in, "remove_files", fail)
    assert did([withdraw_shard(job.directory, str(job.run), 0, key(3))]) == [("withdraw", 0, 3, "StorageError")]
    assert not job.is_sealed()


def test_what_may_be_committed_is_not_taken_back(job: Job) -> None:
    job.seal(key(3))
    job.lay(key(3))
    (job.run / f"step-{key(3).step}" / METADATA_NAME).symlink_to("elsewhere")
    [(_, _, _, kind)] = did([withdraw_shard(job.directory, str(job.run), 0, key(3))])
    assert kind == "UnfitFile"
    assert job.is_sealed()
    assert job.has_manifest(key(3))


def test_taking_back_what_was_never_there_is_done(job: Job) -> None:
    assert did([withdraw_shard(job.directory, str(job.run), 0, key(3))]) == [("withdraw", 0, 3, "")]
    assert job.names(key(3)) == set()


# ---------------------------------------------------------------- publishing


def test_a_complete_attempt_is_published_once(tmp_path: Path) -> None:
    order = persist_attempt(tmp_path, states_of_ranks(2))
    path = tmp_path / f"step-{order.save.step}" / METADATA_NAME
    assert did([publish_attempt(str(tmp_path), order.save)]) == [("publish", 0, order.save.seq, "")]
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert did([publish_attempt(str(tmp_path), order.save)]) == [("publish", 0, order.save.seq, "")]
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_an_attempt_that_lacks_a_part_is_not(tmp_path: Path, rank: int) -> None:
    order = persist_attempt(tmp_path, states_of_ranks(2))
    where = tmp_path / f"step-{order.save.step}"
    (where / manifest_name(rank, order.save.save_id)).unlink()
    outcome = publish_attempt(str(tmp_path), order.save)
    assert did([outcome]) == [("publish", 0, order.save.seq, "IncompleteCheckpoint")]
    assert not (where / METADATA_NAME).exists()


# ---------------------------------------------------------------- the lock


def test_the_lock_is_a_stand_ins_while_it_works(job: Job) -> None:
    with holding_the_lock(job.directory, 0.0):
        assert stand_in_runs(job.directory)
        assert lock_owner(job.directory) is None
    assert not stand_in_runs(job.directory)


def test_nothing_is_done_beside_a_sidecar(job: Job) -> None:
    sidecar = JobLock(job.directory)
    with pytest.raises(JobLockTaken, match="already serves"), holding_the_lock(job.directory, 30.0):
        raise AssertionError
    sidecar.release()


def test_where_a_sidecar_has_ended_in_good_order_there_is_nothing_to_write(job: Job) -> None:
    job.directory.rmdir()
    with pytest.raises(JobLockTaken, match="has ended there in good order"), holding_the_lock(job.directory, 0.0):
        raise AssertionError
    assert not job.directory.exists()
    with holding_the_lock(job.directory, 0.0, needs_regions=False):  # a part can still be taken back
        assert stand_in_runs(job.directory)


# ---------------------------------------------------------------- the command


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., int]:
    """``ckpt-sidecar stand-in`` about a job below ``tmp_path``."""

    def run(work: str, *arguments: str) -> int:
        always = ["--job-id", "job", "--rank", "0", "--shm-root", str(tmp_path), "--wait-s", "0"]
        return main(["stand-in", work, *always, *arguments])

    return run


@pytest.fixture
def served(tmp_path: Path) -> Job:
    """The job that the command is about."""
    directory = tmp_path / f"ckpt-sidecar-{os.geteuid()}" / "job"
    make_private_dir(directory)
    return Job(directory, tmp_path / "run")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_command_says_what_it_has_written(
    served: Job, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    served.seal(key(3))
    assert command("write", "--session", SESSION, "--next-seq", "4", "--pending", "3") == 0
    [line] = lines(capsys)
    assert (line["did"], line["save"], line["step"], line["kind"]) == ("write", key(3).save_id, key(3).step, "")
    assert served.has_manifest(key(3))


def test_the_command_takes_a_part_back(
    served: Job, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    served.lay(key(3))
    about = ["--directory", str(served.run), "--save", key(3).save_id, "--step", str(key(3).step)]
    assert command("withdraw", *about) == 0
    assert [line["did"] for line in lines(capsys)] == ["withdraw"]
    assert not served.has_manifest(key(3))


def test_the_command_says_what_it_could_not_do(
    served: Job, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    about = ["--directory", str(served.run), "--save", key(3).save_id, "--step", str(key(3).step)]
    assert command("publish", *about) == 1
    [line] = lines(capsys)
    assert line["kind"] == "IncompleteCheckpoint"
    assert "rank 0 has no durable shard" in str(line["message"])


def test_the_command_leaves_a_sidecar_alone(
    served: Job, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar = JobLock(served.directory)
    served.lay(key(3))
    about = ["--directory", str(served.run), "--save", key(3).save_id, "--step", str(key(3).step)]
    assert command("withdraw", *about) == 4
    assert "already serves" in capsys.readouterr().err
    assert served.has_manifest(key(3))
    sidecar.release()


def test_the_command_refuses_what_is_no_attempt(served: Job, command: Callable[..., int]) -> None:
    assert command("publish", "--directory", str(served.run), "--save", "nonsense", "--step", "3") == 2
