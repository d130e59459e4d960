"""The user's hooks: the first that objects stops the commit, none of them stops anything else."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from ckpt_trainer_client.commit_hooks import CommitHooks

STEP, WHERE = 300, "/checkpoints/step-300"


class Calls:
    """Records what it was called with; answers or raises what it was given."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.seen: list[tuple[int, str]] = []

    def hook(self, step: int, checkpoint_id: str) -> Any:
        self.seen.append((step, checkpoint_id))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def veto_by(*answers: Any) -> tuple[str | None, list[Calls]]:
    calls = [Calls(answer) for answer in answers]
    return CommitHooks(tuple(call.hook for call in calls), ()).veto(STEP, WHERE), calls


# ---------------------------------------------------------------- before


@pytest.mark.parametrize("answer", [None, True, 1, "fine", 0, "", [], (), 0.0, np.True_, torch.tensor(True)], ids=repr)
def test_what_is_not_false_is_no_objection(answer: Any) -> None:
    """A hook may well return a count or an exit code."""
    veto, calls = veto_by(answer, answer)
    assert veto is None
    assert [call.seen for call in calls] == [[(STEP, WHERE)]] * 2


@pytest.mark.parametrize("answer", [False, np.False_, torch.tensor(False)], ids=repr)
def test_false_is_an_objection_that_names_the_hook(answer: Any) -> None:
    veto, [first, second] = veto_by(answer, None)
    assert veto is not None
    assert "Calls.hook returned" in veto
    assert first.seen
    assert second.seen == []


FAILURES = [ValueError("loss is NaN"), CheckpointException("dcp.load failed", {}), SystemExit(3), KeyboardInterrupt()]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_what_a_hook_raises_is_an_objection(failure: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """DCP's own CheckpointException is no Exception."""
    veto, [_, second] = veto_by(failure, None)
    assert veto is not None
    assert veto.startswith(f"Calls.hook raised {type(failure).__name__}")
    assert second.seen == []
    assert "refused step 300" in caplog.text


def test_the_reason_is_told() -> None:
    assert veto_by(ValueError("loss is NaN"))[0] == "Calls.hook raised ValueError: loss is NaN"


def test_without_hooks_nobody_objects() -> None:
    hooks = CommitHooks((), ())
    assert hooks.veto(STEP, WHERE) is None
    hooks.tell(STEP, WHERE)


class Object(Calls):
    """A hook that is an object."""

    __call__ = Calls.hook


@pytest.mark.parametrize("hook", [functools.partial(Calls(False).hook), lambda step, where: False, Object(False)])
def test_any_callable_can_be_a_hook(hook: Any) -> None:
    veto = CommitHooks((hook,), ()).veto(STEP, WHERE)
    assert veto is not None
    assert veto.endswith("returned False")


# ---------------------------------------------------------------- after


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_what_a_hook_raises_after_the_commit_is_logged_and_the_others_run(
    failure: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Calls(failure), Calls()
    CommitHooks((), (bad.hook, good.hook)).tell(STEP, WHERE)
    assert bad.seen == good.seen == [(STEP, WHERE)]
    assert "Calls.hook failed for step 300" in caplog.text
    assert type(failure).__name__ in caplog.text


def test_what_a_hook_returns_after_the_commit_does_not_matter() -> None:
    calls = [Calls(False), Calls(False)]
    CommitHooks((), tuple(call.hook for call in calls)).tell(STEP, WHERE)
    assert all(call.seen for call in calls)
