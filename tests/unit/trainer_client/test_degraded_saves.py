"""Saves without a sidecar, on one thread and with a stand-in that is none: what is started, and what is told when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckpt_proto.checkpoint_layout import METADATA_NAME, manifest_name
from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import DecideCommit, SubmitShard
from ckpt_proto.region import Seal, region_path, seal_path
from ckpt_trainer_client import degraded_saves
from ckpt_trainer_client.config import ClientConfig
from ckpt_trainer_client.degraded_decisions import GIVE_UP_S, IN_DOUBT, SETTLE_S, WITHDRAWN_S
from ckpt_trainer_client.degraded_saves import WRITE_AGAIN_S, DegradedSaves
from ckpt_trainer_client.saves_of_client import SavesOfClient
from ckpt_trainer_client.stand_in_process import EXIT_LOCK_TAKEN, KILL_S, StandInReport

SESSION = "0a1b2c3d"
BOUND_S = 60.0
WHY = FailureReport("SidecarLost", "no sidecar ran for 120 s")
DONE, TAKEN = StandInReport(0), StandInReport(EXIT_LOCK_TAKEN)
BROKEN = StandInReport(1, (("StorageError", "no space"),))


class Inline:
    """A thread that runs what it is given at once, one after another."""

    def __init__(self, name: str) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self._running = False

    def start(self) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        pass

    def submit(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        if not self._running:
            self._running = True
            while self._work:
                self._work.popleft()()
            self._running = False


@dataclass
class Rank:
    """One rank's saves: the ledger and the seals are real files, the stand-in and the handles are not."""

    config: ClientConfig
    now_s: float = 1000.0
    pending: list[SaveKey] = field(default_factory=list)
    submits: list[SubmitShard] = field(default_factory=list)
    held: set[SaveKey] = field(default_factory=set)
    given_up: list[SaveKey] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    failures: dict[int, Sequence[FailureReport]] = field(default_factory=dict)
    unserved: list[FailureReport | None] = field(default_factory=list)
    decision: DecideCommit | None = None
    answers: dict[str, StandInReport] = field(default_factory=dict)
    during: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.config.runtime_dir.mkdir(parents=True)
        self.decision = DecideCommit(self.key(0), True)
        self.degraded = DegradedSaves(self.config, self.saves(), self, lambda: self.now_s)  # type: ignore[arg-type]

    def saves(self) -> SavesOfClient:
        return SavesOfClient(
            session=lambda: SESSION,
            next_seq=lambda: 7,
            pending=lambda: list(self.pending),
            given_up=lambda: list(self.given_up),
            submits=lambda: list(self.submits),
            holds=lambda submit: submit.save in self.held,
            freed=lambda submit: self.held.remove(submit.save),
            persisted=lambda save: None,
            committed=lambda save: self._ended(save, f"committed {save.step}"),
            failed=self._failed,
            decision=lambda save, where: self.decision,
            serve=self.unserved.append,
        )

    def key(self, seq: int, step: int | None = None) -> SaveKey:
        return SaveKey(SESSION, seq, seq if step is None else step)

    def _ended(self, save: SaveKey, what: str) -> None:
        self.pending.remove(save)
        self.said.append(what)

    def _failed(self, save: SaveKey, failures: Sequence[FailureReport]) -> None:
        self._ended(save, f"failed {save.step}")
        self.failures[save.step] = failures
        self.given_up.append(save)

    # ------------------------------------------------------------ the trainer

    def stage(self, seq: int, step: int | None = None) -> SaveKey:
        """A save is sealed and handed over."""
        save = self.key(seq, step)
        slot = len(self.submits)
        region = region_path(self.config.runtime_dir, self.config.rank, slot)
        region.touch(0o600)
        seal = Seal(seal_path(region))
        seal.reserve(64)
        seal.set(b"sealed")
        seal.close()
        self.submits.append(SubmitShard(save, self.config.rank, "p", slot, 1, ()))
        self.pending.append(save)
        self.held.add(save)
        return save

    def beat(self, after_s: float = 0.0) -> None:
        """Time has passed, and there is no sidecar."""
        self.now_s += after_s
        self.degraded.begin(WHY)

    # ------------------------------------------------------------ the ledger

    def where(self, save: SaveKey) -> Path:
        path = Path(self.config.directory) / f"step-{save.step}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def make_durable(self, save: SaveKey, *ranks: int) -> None:
        for rank in ranks:
            (self.where(save) / manifest_name(rank, save.save_id)).touch()

    def take_away(self, save: SaveKey, rank: int) -> None:
        (self.where(save) / manifest_name(rank, save.save_id)).unlink(missing_ok=True)

    def make_published(self, save: SaveKey) -> None:
        (self.where(save) / METADATA_NAME).write_bytes(b"x" + save.save_id.encode() + b"y")

    # ------------------------------------------------------------ the stand-in

    def write(self, session: str, next_seq: int, pending: Sequence[int], timeout_s: float) -> StandInReport:
        assert (session, timeout_s) == (SESSION, BOUND_S)
        return self._does("write", f"write {list(pending)} before {next_seq}", lambda: self._write(pending))

    def _write(self, pending: Sequence[int]) -> None:
        for submit in self.submits:
            if submit.save in self.held:
                if submit.save.seq in pending:
                    self.make_durable(submit.save, self.config.rank)
                self._break_seal(submit)

    def _break_seal(self, submit: SubmitShard) -> None:
        seal = Seal(seal_path(region_path(self.config.runtime_dir, submit.rank, submit.slot)))
        seal.clear()
        seal.close()

    def publish(self, save: SaveKey, timeout_s: float) -> StandInReport:
        return self._does("publish", f"publish {save.step}", lambda: self.make_published(save))

    def withdraw(self, save: SaveKey, timeout_s: float) -> StandInReport:
        return self._does("withdraw", f"withdraw {save.step}", lambda: self.take_away(save, self.config.rank))

    def _does(self, work: str, said: str, effect: Callable[[], None]) -> StandInReport:
        self.said.append(said)
        self.during()
        report = self.answers.get(work, DONE)
        if report.is_done:
            effect()
        return report

    def stop(self) -> None:
        self.said.append("stop")


NewRank = Callable[[int, int], Rank]


@pytest.fixture
def new_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewRank:
    """Makes rank n of a world of m."""
    monkeypatch.setattr(degraded_saves, "CallbackThread", Inline)

    def make(rank: int, world_size: int) -> Rank:
        return Rank(
            ClientConfig(
                directory=str(tmp_path / "run"),
                job_id="job",
                rank=rank,
                world_size=world_size,
                local_rank=rank,
                incarnation=0,
                shm_root=tmp_path,
                node="node-a",
                stage_timeout_s=BOUND_S,
                no_sidecar="degraded",
            )
        )

    return make


# ---------------------------------------------------------------- to the commit


def test_a_save_is_written_then_published_and_its_slot_freed(new_rank: NewRank) -> None:
    rank = new_rank(0, 1)
    rank.beat()
    rank.stage(3)
    rank.beat()
    assert rank.said == ["write [3] before 7", "publish 3", "committed 3"]
    assert not rank.held
    rank.beat()
    assert len(rank.said) == 3


def test_what_is_handed_over_is_not_left_until_the_next_beat(new_rank: NewRank) -> None:
    rank = new_rank(0, 1)
    rank.degraded.wake()
    rank.stage(3)
    assert rank.said == []
    rank.beat()
    rank.stage(4)
    assert "write [3, 4] before 7" not in rank.said
    rank.degraded.wake()
    assert "write [3, 4] before 7" in rank.said


def test_another_rank_waits_for_rank_0(new_rank: NewRank) -> None:
    rank = new_rank(1, 2)
    save = rank.stage(3)
    rank.beat()
    rank.make_durable(save, 0)
    rank.beat(1.0)
    assert rank.said == ["write [3] before 7"]
    rank.make_published(save)
    rank.beat(1.0)
    assert rank.said[1:] == ["committed 3"]


def test_rank_0_waits_for_every_shard(new_rank: NewRank) -> None:
    rank = new_rank(0, 2)
    rank.beat()
    save = rank.stage(3)
    rank.beat()
    assert rank.said == ["write [3] before 7"]
    rank.make_durable(save, 1)
    rank.beat(1.0)
    assert rank.said[1:] == ["publish 3", "committed 3"]


def test_a_save_in_flight_when_the_sidecar_was_lost_is_published_later(new_rank: NewRank) -> None:
    rank = new_rank(0, 1)
    rank.stage(3)
    rank.beat()
    rank.beat(SETTLE_S - 0.1)
    assert rank.said == ["write [3] before 7"]
    rank.beat(0.1)
    assert rank.said[1:] == ["publish 3", "committed 3"]


def test_a_save_that_has_failed_is_taken_back_before_anything_is_written(new_rank: NewRank) -> None:
    rank = new_rank(1, 2)
    failed = rank.key(2)
    rank.given_up.append(failed)
    rank.make_durable(failed, 1)
    rank.stage(3)
    rank.beat()
    assert rank.said == ["withdraw 2", "write [3] before 7"]
    rank.beat(1.0)
    assert len(rank.said) == 2


def test_a_save_that_has_failed_and_left_nothing_starts_no_stand_in(new_rank: NewRank) -> None:
    rank = new_rank(1, 2)
    rank.given_up.append(rank.key(2))
    rank.beat()
    assert rank.said == []


def test_what_turns_out_to_be_committed_is_taken_back_once(new_rank: NewRank) -> None:
    rank = new_rank(1, 2)
    failed = rank.key(2)
    rank.given_up.append(failed)
    rank.make_durable(failed, 1)
    rank.take_away = lambda save, rank: None  # type: ignore[method-assign]
    rank.beat()
    rank.beat(1.0)
    assert rank.said == ["withdraw 2"]


def test_what_cannot_be_taken_back_is_tried_again(new_rank: NewRank) -> None:
    rank = new_rank(1, 2)
    failed = rank.key(2)
    rank.given_up.append(failed)
    rank.make_durable(failed, 1)
    rank.answers["withdraw"] = TAKEN
    rank.beat()
    rank.answers.clear()
    rank.beat(WRITE_AGAIN_S - 0.1)
    assert rank.said == ["withdraw 2"]
    rank.beat(0.1)
    assert rank.said == ["withdraw 2", "withdraw 2"]


def test_attempts_at_one_step_end_in_their_order(new_rank: NewRank) -> None:
    rank = new_rank(0, 2)
    rank.beat()
    first, second = rank.stage(3, step=5), rank.stage(4, step=5)
    rank.make_durable(second, 1)
    rank.beat()
    assert rank.said == ["write [3, 4] before 7"]
    rank.make_durable(first, 1)
    rank.beat(1.0)
    rank.beat(1.0)
    assert rank.said[1:] == ["publish 5", "committed 5"] * 2


def test_the_seal_of_a_save_that_has_ended_is_broken_and_the_slot_freed(new_rank: NewRank) -> None:
    rank = new_rank(0, 1)
    save = rank.stage(3)
    rank.pending.remove(save)
    rank.beat()
    assert rank.said == ["write [] before 7"]
    assert not rank.held


def test_what_hooks_have_not_decided_waits(new_rank: NewRank) -> None:
    rank = new_rank(0, 1)
    rank.beat()
    rank.decision = None
    save = rank.stage(3)
    rank.beat()
    assert rank.said == ["write [3] before 7"]
    rank.decision = DecideCommit(save, True)
    rank.beat(1.0)
    assert rank.said[1:] == ["publish 3", "committed 3"]


# ---------------------------------------------------------------- given up


def test_a_veto_is_withdrawn_before_it_is_told(new_rank: NewRank) -> None:
    rank = new_rank(0, 1)
    rank.beat()
    save = rank.stage(3)
    rank.decision = DecideCommit(save, False, "too late")
    rank.beat()
    assert rank.said == ["write [3] before 7", "withdraw 3", "failed 3"]
    [failure] = rank.failures[3]
    assert (failure.kind, failure.rank) == ("CommitVetoed", 0)
    assert IN_DOUBT not in failure.hint


def test_a_rank_that_is_late_is_named_when_the_own_part_is_taken_back(new_rank: NewRank) -> None:
    rank = new_rank(0, 2)
    rank.stage(3)
    rank.beat()
    rank.beat(BOUND_S)
    assert rank.said == ["write [3] before 7"]
    rank.beat(0.1)
    assert rank.said[1:] == ["withdraw 3", "failed 3"]
    assert [failure.rank for failure in rank.failures[3]] == [1]


def test_another_rank_gives_up_what_rank_0_has_given_up(new_rank: NewRank) -> None:
    rank = new_rank(1, 2)
    save = rank.stage(3)
    rank.make_durable(save, 0)
    rank.beat()
    rank.take_away(save, 0)
    rank.beat(1.0)
    assert rank.said[1:] == ["withdraw 3"]
    rank.beat(WITHDRAWN_S)
    assert rank.said[2:] == ["failed 3"]
    assert rank.failures[3][0].kind == "CommitRefused"


def test_a_part_that_cannot_be_taken_back_fails_in_doubt(new_rank: NewRank) -> None:
    rank = new_rank(0, 2)
    rank.answers["withdraw"] = BROKEN
    rank.stage(3)
    rank.beat()
    rank.beat(BOUND_S + 0.1)
    rank.beat(GIVE_UP_S)
    assert "failed 3" not in rank.said
    rank.beat(0.1)
    assert rank.said[-1] == "failed 3"
    assert IN_DOUBT in rank.failures[3][0].hint


def test_what_was_committed_while_it_was_taken_back_is_committed(new_rank: NewRank) -> None:
    rank = new_rank(1, 2)
    save = rank.stage(3)
    rank.beat()
    rank.beat(BOUND_S + 0.1)
    assert rank.said[1:] == ["withdraw 3"]
    rank.make_published(save)
    rank.beat(1.0)
    assert rank.said[2:] == ["committed 3"]


def test_a_part_that_is_still_there_after_it_was_taken_back_is_no_failure_yet(new_rank: NewRank) -> None:
    """A stand-in leaves what ``.metadata`` names; who published may have to take that away again."""
    rank = new_rank(0, 2)
    save = rank.stage(3)
    rank.beat()
    rank.during = lambda: rank.make_durable(save, 0)
    rank.take_away = lambda save, rank: None  # type: ignore[method-assign]
    rank.beat(BOUND_S + 0.1)
    rank.beat(1.0)
    assert rank.said[1:] == ["withdraw 3", "withdraw 3"]


def test_an_attempt_that_no_other_try_can_commit_is_given_up(new_rank: NewRank) -> None:
    rank = new_rank(0, 1)
    rank.answers["publish"] = StandInReport(1, (("AlreadyCommitted", "step 3 is committed already"),))
    rank.beat()
    rank.stage(3)
    rank.beat()
    rank.beat(1.0)
    assert rank.said == ["write [3] before 7", "publish 3", "withdraw 3", "failed 3"]
    assert rank.failures[3][0].kind == "AlreadyCommitted"


def test_an_attempt_that_another_try_may_commit_is_published_again(new_rank: NewRank) -> None:
    rank = new_rank(0, 1)
    rank.answers["publish"] = BROKEN
    rank.beat()
    rank.stage(3)
    rank.beat()
    rank.answers.clear()
    rank.beat(WRITE_AGAIN_S - 0.1)
    assert rank.said[1:] == ["publish 3"]
    rank.beat(0.1)
    assert rank.said[2:] == ["publish 3", "committed 3"]


def test_a_write_that_fails_is_tried_again_and_the_reason_is_told_in_the_end(new_rank: NewRank) -> None:
    rank = new_rank(0, 1)
    rank.answers["write"] = BROKEN
    rank.stage(3)
    rank.beat()
    rank.beat(WRITE_AGAIN_S - 0.1)
    assert len(rank.said) == 1
    rank.beat(0.1)
    assert rank.said == ["write [3] before 7"] * 2
    assert rank.held
    rank.beat(BOUND_S)
    assert rank.said[-1] == "failed 3"
    assert rank.failures[3][0].hint == "write: no space [StorageError]"


def test_an_error_of_our_own_does_not_hold_up_the_bounds(new_rank: NewRank) -> None:
    rank = new_rank(0, 1)

    def fail() -> None:
        if rank.said[-1].startswith("write"):
            raise RuntimeError("a bug")

    rank.during = fail
    rank.stage(3)
    rank.beat()
    rank.beat(BOUND_S + 0.1)
    assert rank.said[-1] == "failed 3"


def test_a_region_that_was_removed_fails_its_save_at_once(new_rank: NewRank) -> None:
    rank = new_rank(0, 2)
    rank.stage(3)
    for path in rank.config.runtime_dir.iterdir():
        path.unlink()
    rank.beat()
    assert rank.said == ["withdraw 3", "failed 3"]
    assert rank.failures[3][0].kind == "RegionError"


def test_a_storage_that_hangs_fails_every_save_in_doubt(new_rank: NewRank) -> None:
    rank = new_rank(0, 1)
    rank.stage(3)
    bound_s = BOUND_S + 2 * KILL_S

    def hang() -> None:
        rank.during = lambda: None
        rank.beat(bound_s)
        assert rank.pending
        rank.beat(0.1)

    rank.during = hang
    rank.beat()
    assert rank.said[:2] == ["write [3] before 7", "failed 3"]
    assert rank.failures[3][0].kind == "PublishStalled"
    assert "publish 3" not in rank.said
    assert rank.said[2:] == ["withdraw 3"]


def test_a_thread_that_does_nothing_does_not_hang(new_rank: NewRank) -> None:
    rank = new_rank(0, 2)
    rank.stage(3)
    rank.beat()
    rank.degraded.end()
    rank.beat(1000.0)
    assert rank.failures == {}


# ---------------------------------------------------------------- a sidecar again, and the end


def test_who_waits_for_a_sidecar_is_told_that_there_is_none_and_that_there_is_one(new_rank: NewRank) -> None:
    rank = new_rank(0, 1)
    rank.degraded.end()
    assert rank.unserved == []
    rank.beat()
    rank.degraded.end()
    rank.degraded.end()
    assert rank.unserved == [WHY, None]


def test_nothing_is_started_beside_a_sidecar(new_rank: NewRank) -> None:
    rank = new_rank(0, 1)
    rank.beat()
    rank.stage(3)
    rank.during = rank.degraded.end
    rank.beat()
    assert rank.said == ["write [3] before 7"]
    rank.degraded.wake()
    assert rank.said == ["write [3] before 7"]
    assert rank.pending


def test_a_sidecar_that_answers_decides_on_what_is_overdue(new_rank: NewRank) -> None:
    rank = new_rank(0, 2)
    rank.beat()
    rank.stage(3)

    def answer() -> None:
        rank.now_s += BOUND_S + 1
        rank.degraded.end()

    rank.during = answer
    rank.beat()
    assert rank.said == ["write [3] before 7"]
    assert rank.pending


def test_a_save_that_has_ended_while_it_was_written_is_let_alone(new_rank: NewRank) -> None:
    rank = new_rank(0, 2)
    save = rank.stage(3)

    def end() -> None:
        rank.now_s += BOUND_S + 1
        rank.pending.remove(save)

    rank.during = end
    rank.beat()
    assert rank.said == ["write [3] before 7"]


def test_after_another_sidecar_the_time_of_a_save_begins_anew(new_rank: NewRank) -> None:
    rank = new_rank(0, 2)
    rank.stage(3)
    rank.beat()
    rank.degraded.end()
    rank.beat(BOUND_S + 1)
    assert rank.pending


def test_closing_ends_the_stand_in_that_runs(new_rank: NewRank) -> None:
    rank = new_rank(0, 1)
    rank.beat()
    rank.degraded.close(1.0)
    rank.stage(3)
    rank.degraded.wake()
    assert rank.said == ["stop"]
