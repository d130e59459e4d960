"""What the tests that kill processes share."""

from __future__ import annotations

import pytest

from testkit.ranks import RankStarter


@pytest.fixture(scope="session")
def processes(ranks: RankStarter) -> RankStarter:
    """Forks the processes that are killed, ranks and sidecars."""
    return ranks
