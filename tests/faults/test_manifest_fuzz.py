"""Hostile shard manifests: an attempt that has one is not published, or what is published is a table of contents."""

from __future__ import annotations

import io
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from ckpt_proto.checkpoint_layout import METADATA_NAME, manifest_name
from ckpt_proto.errors import IncompleteCheckpoint
from ckpt_sidecar.commit import publish_checkpoint
from testkit.mutations import mutate, playing, seeds
from testkit.outcomes import Outcomes
from testkit.plans import persist_attempt, states_of_ranks

WORLD_SIZE = 2
DCP = "torch.distributed.checkpoint"
ALLOWED_MODULES = ("torch.serialization", f"{DCP}.metadata", f"{DCP}.filesystem")


class TableOfContents(pickle.Unpickler):
    """Reads ``.metadata`` and takes no function or module of torch for a property of a tensor."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module not in ALLOWED_MODULES:
            assert module == "torch" and (found is torch.Size or isinstance(found, torch.dtype)), f"{module}.{name}"
        return found


@pytest.mark.parametrize("count", [250, pytest.param(3_000, marks=pytest.mark.faults)])
def test_a_hostile_manifest_is_refused_or_makes_a_table_of_contents(
    tmp_path: Path, count: int, outcomes: Outcomes
) -> None:
    order = persist_attempt(tmp_path, states_of_ranks(WORLD_SIZE))
    directory = Path(order.directory) / f"step-{order.save.step}"
    paths = [directory / manifest_name(rank, order.save.save_id) for rank in range(WORLD_SIZE)]
    frames = [path.read_bytes() for path in paths]
    published = 0
    with outcomes.run("hostile shard manifests", runs=0, unit="manifests") as row:
        for seed in seeds(count):
            row.runs += 1
            rng = random.Random(seed)
            rank = rng.randrange(WORLD_SIZE)
            frame = mutate(frames[rank], rng, frames)
            with playing(seed, frame):
                paths[rank].write_bytes(frame)
                try:
                    publish_checkpoint(order)
                except IncompleteCheckpoint:
                    assert not (directory / METADATA_NAME).exists()
                else:
                    table = TableOfContents(io.BytesIO((directory / METADATA_NAME).read_bytes())).load()
                    assert isinstance(table, Metadata)
                    (directory / METADATA_NAME).unlink()
                    published += 1
            paths[rank].write_bytes(frames[rank])
    assert 0 < published < count or len(seeds(count)) == 1, f"{published} of {count} were published"
