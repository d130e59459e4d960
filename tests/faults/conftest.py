"""What the tests that kill processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testkit.ranks import RankStarter


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankStarter]:
    """Forks the processes that are killed, ranks and sidecars."""
    preload = ("ckpt_sidecar.__main__", "ckpt_sidecar.daemon", "ckpt_sidecar.torch_work", "ckpt_trainer_client")
    starter = RankStarter(tmp_path_factory.mktemp("processes"), preload=preload)
    yield starter
    starter.close()
