"""Rank 0's answers: given once, said again to whoever asks again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import AskCommit, DecideCommit, Message
from ckpt_trainer_client.commit_decisions import CommitDecisions
from ckpt_trainer_client.commit_hooks import CommitHooks
from testkit.waiting import wait_until

GOOD, BAD = SaveKey("0a1b2c3d", 0, 100), SaveKey("0a1b2c3d", 1, 200)


class Rank0:
    """Its decisions, with a hook that refuses step 200 and counts its calls."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.calls: list[int] = []
        self.decisions = CommitDecisions(CommitHooks((self._hook,), ()), self.sent.append)
        self.decisions.start()

    def _hook(self, step: int, where: str) -> bool:
        self.calls.append(step)
        return step != 200

    def is_asked(self, save: SaveKey, *, is_open: bool = True) -> DecideCommit:
        before = len(self.sent)
        self.decisions.on_ask(AskCommit(save, f"/data/run/step-{save.step}"), is_open=is_open)
        wait_until(lambda: len(self.sent) > before, "an answer")
        answer = self.sent[-1]
        assert isinstance(answer, DecideCommit)
        return answer


@pytest.fixture
def rank_0() -> Iterator[Rank0]:
    made = Rank0()
    yield made
    made.decisions.close(10.0)


def test_the_hooks_are_asked_once_per_save(rank_0: Rank0) -> None:
    for _ in range(2):
        assert rank_0.is_asked(GOOD).accept
        assert not rank_0.is_asked(BAD).accept
    assert rank_0.calls == [100, 200]


def test_a_veto_of_a_save_in_flight_is_there_to_be_said_again(rank_0: Rank0) -> None:
    assert rank_0.decisions.vetoes([BAD]) == []
    rank_0.is_asked(GOOD)
    veto = rank_0.is_asked(BAD)
    assert rank_0.decisions.vetoes([GOOD, BAD]) == [veto]
    assert rank_0.decisions.vetoes([GOOD]) == []


def test_a_save_that_has_ended_is_refused_without_a_hook(rank_0: Rank0) -> None:
    assert "has ended" in rank_0.is_asked(GOOD, is_open=False).reason
    assert rank_0.calls == []
