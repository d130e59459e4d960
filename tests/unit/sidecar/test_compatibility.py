"""Which torch may write for which: the writer's minor release must not be newer than the reader's."""

from __future__ import annotations

import pytest

from ckpt_sidecar.compatibility import torch_mismatch


@pytest.mark.parametrize(
    ("sidecar", "trainer"),
    [
        ("2.13.0", "2.13.0"),
        ("2.13.1", "2.13.0"),
        ("2.13.0+cpu", "2.13.0+cu130"),
        ("2.6.0", "2.13.0"),
        ("2.9.1", "2.10.0"),
        ("2.13.0", "3.0.0"),
        ("2.13.0", "2.14.0a0+git1234567"),
    ],
)
def test_an_older_or_equal_writer_is_fine(sidecar: str, trainer: str) -> None:
    assert torch_mismatch(sidecar, trainer) is None


@pytest.mark.parametrize(("sidecar", "trainer"), [("2.15.0", "2.13.0"), ("2.10.0", "2.9.1"), ("3.0.0", "2.99.0")])
def test_a_newer_writer_is_refused_and_both_versions_are_named(sidecar: str, trainer: str) -> None:
    text = torch_mismatch(sidecar, trainer)
    assert text is not None
    assert f"sidecar has torch {sidecar}, the trainer {trainer}" in text


@pytest.mark.parametrize(("sidecar", "trainer"), [("", "2.13.0"), ("2.13.0", "unknown"), ("2", "2")])
def test_versions_that_cannot_be_compared_are_refused(sidecar: str, trainer: str) -> None:
    text = torch_mismatch(sidecar, trainer)
    assert text is not None
    assert repr(sidecar) in text
    assert repr(trainer) in text
