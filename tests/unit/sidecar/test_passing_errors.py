"""Which errors are worth another try."""

from __future__ import annotations

import errno

import pytest

from ckpt_proto.errors import StorageError
from ckpt_sidecar.passing_errors import may_pass


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT])
def test_a_storage_that_is_full_away_or_slow_may_come_back(number: int) -> None:
    assert may_pass(OSError(number, "x"))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENAMETOOLONG])
def test_rights_and_names_do_not_change_by_themselves(number: int) -> None:
    assert not may_pass(OSError(number, "x"))


@pytest.mark.parametrize("error", [ValueError("x"), StorageError("x"), OSError("no number")])
def test_what_is_no_error_of_the_system_does_not_pass(error: Exception) -> None:
    assert not may_pass(error)


def wrapped(number: int, depth: int) -> Exception:
    error: Exception = OSError(number, "x")
    for _ in range(depth):
        outer = StorageError("translated at a border")
        outer.__cause__ = error
        error = outer
    return error


@pytest.mark.parametrize("depth", [1, 3])
def test_the_cause_decides_however_often_it_was_translated(depth: int) -> None:
    assert may_pass(wrapped(errno.ENOSPC, depth))
    assert not may_pass(wrapped(errno.EACCES, depth))


def test_an_error_that_was_only_met_on_the_way_is_no_cause() -> None:
    error = StorageError("x")
    error.__context__ = OSError(errno.ENOSPC, "x")
    assert not may_pass(error)
