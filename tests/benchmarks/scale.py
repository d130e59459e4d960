"""What one coordinator carries: many simulated ranks, real tables, codec, planner and commit, no tensor bytes.

    python tests/benchmarks/scale.py --ranks 128 256 512 1024 --items 1000

Each rank has a row of each of `--items` tensors, as fully sharded training has. CPU seconds of this process, which
plays the coordinator and rank 0 in turn; what other ranks and nodes do for themselves is not counted. `--profile`
prints where the time of the largest world goes.
"""

import argparse
import cProfile
import json
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ckpt_proto.checkpoint_layout import checkpoint_id, data_file_name, manifest_name
from ckpt_proto.codec import decode, encode
from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import (
    AskCommit,
    Committed,
    DecideCommit,
    FinalPlan,
    GlobalPlan,
    Hello,
    MakeGlobalPlan,
    Message,
    ProposePlan,
    ShardPersisted,
    ShardStaged,
)
from ckpt_proto.plan_items import ItemKind, Plan, PlanItem
from ckpt_proto.shard_manifest import ManifestEntry, ShardManifest, StoredManifest
from ckpt_sidecar.actions import Action, Publish, ToRank
from ckpt_sidecar.checkpoint_table import CheckpointTable
from ckpt_sidecar.commit import publish_checkpoint
from ckpt_sidecar.events import AtCoordinator, DirectoryOpened, Published
from ckpt_sidecar.metadata_template import MetadataTemplates
from ckpt_trainer_client.planning import PlanningState

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from tables import markdown_table

SESSION = "0a1b2c3d"
COLUMNS = 256
ENTRY_BYTES = 2048
COMMIT_TARGET_S = 2.0
ITEM_TARGET_US = 40.0


class Cost:
    """CPU seconds by what they were spent for; profiles all of it if told to."""

    def __init__(self, profile: cProfile.Profile | None) -> None:
        self.seconds: dict[str, float] = {}
        self._profile = profile

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        began_s = time.process_time()
        if self._profile is not None:
            self._profile.enable()
        try:
            yield
        finally:
            if self._profile is not None:
                self._profile.disable()
            self.seconds[what] = self.seconds.get(what, 0.0) + time.process_time() - began_s


class World:
    """A coordinator and its ranks, which say what they would say after an hour of training."""

    def __init__(self, ranks: int, items: int, directory: Path, cost: Cost) -> None:
        self.ranks, self.items, self.directory, self.cost = ranks, items, str(directory), cost
        self.table = CheckpointTable(lambda: SESSION)
        self.messages = self.message_bytes = 0
        self.templates = MetadataTemplates()
        for rank in range(ranks):
            self.table.handle(AtCoordinator(rank, self._hello(rank)), 0.0)
        self.table.handle(DirectoryOpened(self.directory, ()), 0.0)

    def _hello(self, rank: int) -> Hello:
        return Hello(
            job_id="scale",
            rank=rank,
            world_size=self.ranks,
            pid=1 + rank,
            process_start_s=1.0,
            node=f"node-{rank // 8}",
            incarnation=0,
            session="",
            torch_version=torch.__version__,
            directory=self.directory,
            slots=2,
            stage_timeout_s=600.0,
        )

    def proposal(self, rank: int) -> Plan:
        """The local plan of a rank."""
        offsets, sizes, whole = (rank, 0), (1, COLUMNS), (self.ranks, COLUMNS)
        return tuple(
            PlanItem(
                fqn=f"model.layers.{index // 10}.part{index % 10}.weight",
                kind=ItemKind.SHARD.value,
                path=("model", f"layers.{index // 10}.part{index % 10}.weight"),
                offsets=offsets,
                sizes=sizes,
                global_sizes=whole,
                dtype="float32",
            )
            for index in range(self.items)
        )

    def arrive(self, rank: int, frame: bytes) -> list[Action]:
        """A message of a rank reaches the coordinator."""
        self.messages += 1
        self.message_bytes += len(frame)
        return self.table.handle(AtCoordinator(rank, decode(frame)), 1.0)

    def plan(self) -> tuple[Plan, ...]:
        """The first save's plan, through rank 0 and back."""
        save, said = SaveKey(SESSION, 0, 1), []
        for rank in range(self.ranks):
            frame = encode(ProposePlan(save, self.proposal(rank), ()))
            with self.cost.of("take proposals in"):
                said += self.arrive(rank, frame)
        [order] = _told(said, MakeGlobalPlan)
        with self.cost.of("hand them to rank 0"):
            frame = encode(order)
        with self.cost.of("plan on rank 0"):
            asked = decode(frame)
            assert isinstance(asked, MakeGlobalPlan)
            state = PlanningState({"model": {"x": torch.ones(1)}}, None, is_coordinator=True)
            answer = encode(GlobalPlan(save, state.global_plan(asked.plans)))
        with self.cost.of("hand out final plans"):
            finals = _told(self.arrive(0, answer), FinalPlan)
            for final in finals:
                encode(final)
        assert len(finals) == self.ranks
        return tuple(final.items for final in finals if isinstance(final, FinalPlan))

    def persist(self, save: SaveKey, plans: tuple[Plan, ...], plan_id: str) -> None:
        """What the nodes write: a data file without bytes of its own, and its manifest."""
        where = Path(checkpoint_id(self.directory, save.step))
        where.mkdir()
        nbytes = ENTRY_BYTES * self.items
        for rank, plan in enumerate(plans):
            name = data_file_name(rank, save.save_id)
            (where / name).touch()
            os.truncate(where / name, nbytes)
            entries = tuple(
                ManifestEntry(item, ENTRY_BYTES * at, ENTRY_BYTES, (rank * 7919 + at) % 2**32)
                for at, item in enumerate(plan)
            )
            manifest = ShardManifest(
                save, rank, self.ranks, plan_id, name, nbytes, torch.__version__, overwrite=False, entries=entries
            )
            (where / manifest_name(rank, save.save_id)).write_bytes(encode(StoredManifest.of(manifest)))

    def save(self, seq: int, plans: tuple[Plan, ...]) -> None:
        """A later save, from the first rank that has staged to the commit that every rank is told."""
        save, plan_id = SaveKey(SESSION, seq, seq + 1), f"{SESSION}-p1"
        self.persist(save, plans, plan_id)
        said: list[Action] = []
        self.messages = self.message_bytes = 0
        frames = [(rank, encode(ShardStaged(save, rank, plan_id))) for rank in range(self.ranks)]
        frames += [(rank, encode(ShardPersisted(save, rank, ENTRY_BYTES * self.items))) for rank in range(self.ranks)]
        with self.cost.of("take reports in"):
            for rank, frame in frames:
                said += self.arrive(rank, frame)
            assert _told(said, AskCommit)
            [order] = [
                action
                for action in self.arrive(0, encode(DecideCommit(save, accept=True)))
                if isinstance(action, Publish)
            ]
        with self.cost.of("build and publish .metadata"):
            publish_checkpoint(order, templates=self.templates)
        with self.cost.of("tell the ranks"):
            ends = _told(self.table.handle(Published(save), 2.0), Committed)
            for end in ends:
                encode(end)
        assert len(ends) == self.ranks


def _told(actions: list[Action], kind: type[Message]) -> list[Message]:
    return [action.message for action in actions if isinstance(action, ToRank) and isinstance(action.message, kind)]


PLAN_PARTS = ("take proposals in", "hand them to rank 0", "plan on rank 0", "hand out final plans")
COMMIT_PARTS = ("take reports in", "build and publish .metadata", "tell the ranks")


def measure(ranks: int, items: int, saves: int, profile: cProfile.Profile | None) -> dict[str, float]:
    """CPU seconds by part, of the plan, the first commit, and the mean of later ones; and what each rank has said."""
    cost = Cost(profile)
    with tempfile.TemporaryDirectory(prefix="ckpt-scale-", dir="/dev/shm") as directory:
        world = World(ranks, items, Path(directory), cost)
        plans = world.plan()
        world.save(1, plans)
        first_s = sum(cost.seconds.pop(name) for name in COMMIT_PARTS)
        for seq in range(2, saves + 2):
            world.save(seq, plans)
    found = {name: cost.seconds[name] / (saves if name in COMMIT_PARTS else 1) for name in PLAN_PARTS + COMMIT_PARTS}
    return found | {
        "ranks": ranks,
        "items": items,
        "plan_item_us": sum(found[name] for name in PLAN_PARTS) / (ranks * items) * 1e6,
        "first_commit_s": first_s,
        "commit_s": sum(found[name] for name in COMMIT_PARTS),
        "messages_per_rank": world.messages / ranks,
        "bytes_per_message": world.message_bytes / world.messages,
    }


def row(found: dict[str, float]) -> list[str]:
    """One row of the table."""
    return [
        f"{found['ranks']:,} x {found['items']:,}",
        f"{found['plan_item_us']:.1f} us",
        *(f"{found[name]:.2f} s" for name in PLAN_PARTS),
        f"{found['messages_per_rank']:.0f} x {found['bytes_per_message']:.0f} B",
        f"{found['first_commit_s']:.2f} s",
        f"{found['commit_s']:.2f} s",
        *(f"{found[name]:.2f} s" for name in COMMIT_PARTS),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--saves", type=int, default=2, help="later saves; their mean is shown")
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    parser.add_argument("--profile", action="store_true", help="print where the time of the largest world goes")
    args = parser.parse_args()
    profile = cProfile.Profile() if args.profile else None
    measured = [
        measure(ranks, args.items, args.saves, profile if ranks == max(args.ranks) else None) for ranks in args.ranks
    ]
    headings = (
        "ranks x items",
        "plan, each item",
        *PLAN_PARTS,
        "said by each rank",
        "first commit",
        "later commit",
        *COMMIT_PARTS,
    )
    print(f"\nCPU seconds of coordinator and rank 0\n\n{markdown_table(headings, [row(found) for found in measured])}")
    print(f"\ntargets for 1,024 x 1,000: plan <= {ITEM_TARGET_US:g} us an item, later commit < {COMMIT_TARGET_S:g} s")
    if args.json:
        args.json.write_text(json.dumps(measured))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
