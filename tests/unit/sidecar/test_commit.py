"""The commit: what the manifests say becomes the ``.metadata`` that stock DCP would have written, or nothing at all."""

from __future__ import annotations

import errno
import io
import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from ckpt_proto.checkpoint_layout import METADATA_NAME, data_file_name, manifest_name
from ckpt_proto.codec import decode, encode
from ckpt_proto.errors import AlreadyCommitted, IncompleteCheckpoint, StorageError
from ckpt_proto.messages import Heartbeat
from ckpt_proto.plan_items import PlanItem
from ckpt_proto.shard_manifest import ManifestEntry, ShardManifest, StoredManifest
from ckpt_sidecar import commit, durable_fs
from ckpt_sidecar.actions import Publish
from ckpt_sidecar.commit import check_complete, publish_checkpoint, read_manifests
from ckpt_sidecar.metadata_build import StoredFile, build_metadata
from ckpt_sidecar.metadata_template import MetadataTemplates
from testkit.plans import (
    bytes_item,
    persist_attempt,
    save_key,
    shard_item,
    states_of_ranks,
    stock_plans,
    tensor_item,
)

WORLD_SIZE = 3
# What an unpickler must know to read .metadata: classes of stock DCP and torch, nothing of ours, no pathlib.
STOCK_NAMES = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch", "float64"),
    ("torch", "bfloat16"),
    ("torch", "uint8"),
}


@pytest.fixture
def attempt(tmp_path: Path) -> Publish:
    """Three ranks' durable files; nothing is committed."""
    return persist_attempt(tmp_path, states_of_ranks(WORLD_SIZE))


def directory_of(order: Publish) -> Path:
    return Path(order.directory) / f"step-{order.save.step}"


def manifests_of(order: Publish) -> list[ShardManifest]:
    return [stored.whole() for stored in stored_of(order)]


def stored_of(order: Publish) -> list[StoredManifest]:
    return read_manifests(directory_of(order), order.save.save_id, order.world_size)


def metadata_of(order: Publish) -> Metadata:
    """What is published at a place called where."""
    return build_metadata([StoredFile.of(manifest) for manifest in manifests_of(order)], "where", order.save.save_id)


def rewrite(order: Publish, rank: int, change: Callable[[ShardManifest], ShardManifest]) -> None:
    path = directory_of(order) / manifest_name(rank, order.save.save_id)
    stored = decode(path.read_bytes())
    assert isinstance(stored, StoredManifest)
    path.write_bytes(encode(StoredManifest.of(change(stored.whole()))))


def read_metadata(order: Publish) -> Metadata:
    metadata: Metadata = pickle.loads((directory_of(order) / METADATA_NAME).read_bytes())
    return metadata


def save_by_stock(directory: Path, states: list[dict[str, Any]], planner: type[DefaultSavePlanner]) -> Metadata:
    """The metadata that DCP's own planner and writer make, rank after rank, without a process group."""
    stock = stock_plans(states, planner)
    writer = FileSystemWriter(directory)
    writer.set_up_storage_writer(True)
    writer.prepare_local_plan(stock.local[0])
    plans = writer.prepare_global_plan(stock.final)
    results = [
        writer.write_data(plan, rank_planner).wait() for plan, rank_planner in zip(plans, stock.planners, strict=True)
    ]
    writer.finish(stock.metadata, results)
    metadata: Metadata = pickle.loads((directory / METADATA_NAME).read_bytes())
    return metadata


# ---------------------------------------------------------------- the metadata


class ToLowestRank(DefaultSavePlanner):
    """Another decision about who saves what."""

    def __init__(self) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)


class NotFlattened(DefaultSavePlanner):
    """Keeps no paths."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)


@pytest.mark.parametrize("planner", [DefaultSavePlanner, ToLowestRank, NotFlattened])
def test_the_metadata_is_that_of_stock_planner_and_writer(tmp_path: Path, planner: type[DefaultSavePlanner]) -> None:
    states = states_of_ranks(WORLD_SIZE)
    stock = save_by_stock(tmp_path / "stock", states, planner)
    order = persist_attempt(tmp_path / "ours", states, new_planner=planner)
    ours = metadata_of(order)

    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.planner_data == stock.planner_data
    assert {field.name for field in fields(Metadata)} == set(vars(stock))
    assert set(vars(ours)) == set(vars(stock))
    assert getattr(ours, "version", None) == getattr(stock, "version", None)
    # Where an entry lies is ours; which entries there are, in whose file, and the hints, are the planner's.
    ranks = {index: info.relative_path.split("_")[2] for index, info in ours.storage_data.items()}
    assert ranks == {index: info.relative_path.split("_")[2] for index, info in stock.storage_data.items()}
    hints = {(index.fqn, index.offset): index.index for index in ours.storage_data}
    assert hints == {(index.fqn, index.offset): index.index for index in stock.storage_data}
    assert {type(info) for info in ours.storage_data.values()} == {type(info) for info in stock.storage_data.values()}
    assert all(vars(info).keys() <= {"relative_path", "offset", "length"} for info in stock_pickled(ours))


def stock_pickled(metadata: Metadata) -> list[Any]:
    """The storage entries as an unpickler finds them: without fields that older releases do not know."""
    return [*pickle.loads(pickle.dumps(metadata)).storage_data.values()]


def test_the_identity_is_text_and_names_the_attempt(attempt: Publish) -> None:
    publish_checkpoint(attempt)
    meta = read_metadata(attempt).storage_meta
    assert meta is not None
    assert type(meta.checkpoint_id) is str
    assert meta.checkpoint_id == str(directory_of(attempt))
    assert meta.save_id == attempt.save.save_id


def test_the_pickle_has_stock_names_only(attempt: Publish) -> None:
    publish_checkpoint(attempt)
    names: set[tuple[str, str]] = set()

    class Watching(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            names.add((module, name))
            return super().find_class(module, name)

    content = (directory_of(attempt) / METADATA_NAME).read_bytes()
    Watching(io.BytesIO(content)).load()
    assert names <= STOCK_NAMES
    assert content[:2] == b"\x80\x03"  # protocol 3: what every Python and DCP reads


def test_stock_dcp_loads_what_the_ranks_held(attempt: Publish) -> None:
    publish_checkpoint(attempt)
    target: dict[str, Any] = {
        "model": {
            "weight": torch.zeros(7, 4),
            "bias": torch.zeros(5, dtype=torch.bfloat16),
            "scale": torch.tensor(0.0),
            "none": torch.empty(0, 4),
        },
        "optim": [{"moments": torch.zeros(2, 3, dtype=torch.float64), "lr": 0.0}],
        "step": 0,
        "name": "",
        "rank-2": {"seed": 0, "state": torch.zeros(5, dtype=torch.uint8)},
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(target, checkpoint_id=directory_of(attempt))
    assert torch.equal(target["model"]["weight"], torch.arange(28, dtype=torch.float32).reshape(7, 4))
    assert torch.equal(target["model"]["bias"], torch.full((5,), 1.5, dtype=torch.bfloat16))
    assert target["model"]["scale"] == 3.25
    assert torch.equal(target["optim"][0]["moments"], torch.arange(6, dtype=torch.float64).reshape(2, 3))
    assert (target["optim"][0]["lr"], target["step"], target["name"]) == (0.125, 5, "run")
    assert (target["rank-2"]["seed"], target["rank-2"]["state"].tolist()) == (2, [2] * 5)


def test_a_state_dict_of_nothing_can_be_committed(tmp_path: Path) -> None:
    order = persist_attempt(tmp_path, [{}, {}])
    publish_checkpoint(order)
    assert read_metadata(order).state_dict_metadata == {}


def test_properties_of_tensors_are_kept(tmp_path: Path) -> None:
    order = persist_attempt(tmp_path, [{"p": torch.nn.Parameter(torch.ones(2)), "q": torch.ones(2), "b": 1}])
    state = metadata_of(order).state_dict_metadata
    assert state["p"].properties.requires_grad
    assert not state["q"].properties.requires_grad
    assert isinstance(state["b"], BytesStorageMetadata)


# ---------------------------------------------------------------- completeness


def refused(order: Publish, match: str) -> None:
    with pytest.raises(IncompleteCheckpoint, match=match):
        publish_checkpoint(order)
    assert not (directory_of(order) / METADATA_NAME).exists()
    assert not list(directory_of(order).glob("*.tmp"))


def test_a_complete_attempt_is_published(attempt: Publish) -> None:
    check_complete(directory_of(attempt), stored_of(attempt), attempt)
    publish_checkpoint(attempt)
    assert (directory_of(attempt) / METADATA_NAME).exists()


def test_the_number_of_entries_need_not_be_known(attempt: Publish) -> None:
    """A coordinator that did not see the plan being made."""
    publish_checkpoint(replace(attempt, entry_counts=()))


def test_missing_manifests_are_named_by_rank(attempt: Publish) -> None:
    for rank in (0, 2):
        (directory_of(attempt) / manifest_name(rank, attempt.save.save_id)).unlink()
    refused(attempt, rf"attempt {attempt.save.save_id} has no shard manifest of ranks \[0, 2\]")


def test_an_attempt_without_any_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step-5").mkdir()
    refused(Publish(save_key(), str(tmp_path), 2, "p", (), False), r"ranks \[0, 1\]")


@pytest.mark.parametrize("content", [b"", b"torn", encode(Heartbeat())])
def test_what_is_no_manifest_is_named(attempt: Publish, content: bytes) -> None:
    path = directory_of(attempt) / manifest_name(1, attempt.save.save_id)
    path.write_bytes(content)
    refused(attempt, f"{path} is .*no shard manifest")


def test_a_torn_manifest_is_refused(attempt: Publish) -> None:
    path = directory_of(attempt) / manifest_name(1, attempt.save.save_id)
    path.write_bytes(path.read_bytes()[:-10])
    refused(attempt, "no shard manifest")


@pytest.mark.parametrize(
    "change", [{"layout": "load"}, {"layout": "nn"}, {"layout": "no such"}, {"memory_format": "x"}, {"dtype": "Tensor"}]
)
def test_a_name_that_is_no_property_of_a_tensor_is_not_looked_up_and_published(
    attempt: Publish, change: dict[str, str]
) -> None:
    def damage(manifest: ShardManifest) -> ShardManifest:
        index = next(index for index, entry in enumerate(manifest.entries) if entry.item.dtype)
        entry = manifest.entries[index]
        damaged = replace(entry, item=replace(entry.item, **change))
        return replace(manifest, entries=(*manifest.entries[:index], damaged, *manifest.entries[index + 1 :]))

    for rank in range(WORLD_SIZE):
        rewrite(attempt, rank, damage)
    refused(attempt, "torch .* in the sidecar has no")


def test_a_missing_data_file_is_refused(attempt: Publish) -> None:
    path = directory_of(attempt) / data_file_name(1, attempt.save.save_id)
    path.unlink()
    refused(attempt, f"{path} has None bytes")


@pytest.mark.parametrize("change", [-1, 1, -4096])
def test_a_data_file_of_another_size_is_refused_with_both_sizes(attempt: Publish, change: int) -> None:
    path = directory_of(attempt) / data_file_name(2, attempt.save.save_id)
    size = path.stat().st_size
    os.truncate(path, max(0, size + change))
    refused(attempt, f"{path} has {max(0, size + change)} bytes, its manifest says {size}")


def test_an_item_stored_twice_is_refused(attempt: Publish) -> None:
    twice = manifests_of(attempt)[0].entries[0]
    rewrite(attempt, 1, lambda manifest: replace(manifest, entries=(*manifest.entries, replace(twice, offset_bytes=0))))
    refused(replace(attempt, entry_counts=()), f"{twice.item.fqn} at .* is stored twice")


def test_a_value_stored_twice_is_refused(attempt: Publish) -> None:
    twice = next(e for m in manifests_of(attempt) for e in m.entries if e.item.kind == "bytes")
    for rank in range(WORLD_SIZE):
        rewrite(attempt, rank, lambda m: replace(m, entries=(*m.entries, replace(twice, offset_bytes=0))))
    refused(replace(attempt, entry_counts=()), "is stored twice")


def without(fqn: str) -> Callable[[ShardManifest], ShardManifest]:
    return lambda manifest: replace(manifest, entries=tuple(e for e in manifest.entries if e.item.fqn != fqn))


def test_a_missing_shard_is_refused_with_numbers(attempt: Publish) -> None:
    rewrite(attempt, 1, without("model.weight"))
    refused(replace(attempt, entry_counts=()), "model.weight has 16 of 28 elements stored")


def test_a_missing_item_is_noticed_by_the_planned_number(attempt: Publish) -> None:
    rank = next(rank for rank, m in enumerate(manifests_of(attempt)) if any(e.item.fqn == "step" for e in m.entries))
    planned = attempt.entry_counts[rank]
    rewrite(attempt, rank, without("step"))
    refused(attempt, f"rank {rank} wrote {planned - 1} entries, {planned} were planned")


DIFFERENT: dict[str, Callable[[ShardManifest], ShardManifest]] = {
    "plan": lambda manifest: replace(manifest, plan_id="0a1b2c3d-p2"),
    "rank": lambda manifest: replace(manifest, rank=2),
    "world size": lambda manifest: replace(manifest, world_size=4),
    "step": lambda manifest: replace(manifest, save=save_key(step=6)),
    "attempt": lambda manifest: replace(manifest, save=save_key(seq=1)),
    "session": lambda manifest: replace(manifest, save=save_key(session="ffffffff")),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_manifest_of_another_save_is_refused(attempt: Publish, what: str) -> None:
    rewrite(attempt, 1, DIFFERENT[what])
    refused(attempt, "manifest of rank 1 .* belongs to another save")


@pytest.mark.parametrize("change", [{"layout": "load"}, {"layout": "no such"}, {"memory_format": "load"}])
def test_names_of_torch_in_a_manifest_are_not_looked_up_unseen(attempt: Publish, change: dict[str, str]) -> None:
    [rank] = [r for r, m in enumerate(manifests_of(attempt)) if any(e.item.fqn == "model.bias" for e in m.entries)]

    def changed(manifest: ShardManifest) -> ShardManifest:
        entries = [
            replace(e, item=replace(e.item, **change)) if e.item.fqn == "model.bias" else e for e in manifest.entries
        ]
        return replace(manifest, entries=tuple(entries))

    rewrite(attempt, rank, changed)
    refused(attempt, f"model.bias: .*no (layout|memory format) '{next(iter(change.values()))}'")


@pytest.mark.parametrize("make", ["symlink", "pipe"])
def test_a_manifest_that_is_no_file_is_neither_followed_nor_waited_for(attempt: Publish, make: str) -> None:
    path = directory_of(attempt) / manifest_name(1, attempt.save.save_id)
    path.rename(path.with_name("elsewhere"))
    if make == "symlink":
        path.symlink_to("elsewhere")
    else:
        os.mkfifo(path)
    with pytest.raises(StorageError, match=str(path)):
        publish_checkpoint(attempt)
    assert not (directory_of(attempt) / METADATA_NAME).exists()


def entry(item: PlanItem) -> ManifestEntry:
    return ManifestEntry(item, 0, 0, 0)


@pytest.mark.parametrize(
    ("items", "complaint"),
    [
        ([tensor_item("a", ()), tensor_item("b", (0, 3)), bytes_item("c")], None),
        ([shard_item("a", (0,), (2,), (5,)), shard_item("a", (2,), (3,), (5,))], None),
        ([shard_item("a", (0,), (5,), (5,)), shard_item("a", (5,), (0,), (5,))], None),
        ([shard_item("a", (0,), (2,), (5,)), shard_item("a", (3,), (2,), (5,))], "a has 4 of 5 elements"),
        ([shard_item("a", (0,), (4,), (5,)), shard_item("a", (2,), (3,), (5,))], "a has 7 of 5 elements"),
        ([bytes_item("a"), bytes_item("a")], "a at .* is stored twice"),
        ([tensor_item("a", ()), tensor_item("a", ())], "a at .* is stored twice"),
    ],
)
def test_the_entries_must_add_up(items: list[PlanItem], complaint: str | None) -> None:
    entries = tuple(map(entry, items))
    manifest = ShardManifest(save_key(), 0, 1, "p", "file", 0, torch.__version__, False, entries)
    stored = StoredManifest.of(manifest)
    if complaint is None:
        assert MetadataTemplates().pickled([stored], "where")
    else:
        with pytest.raises(IncompleteCheckpoint, match=complaint):
            MetadataTemplates().pickled([stored], "where")


# ---------------------------------------------------------------- who was first


def test_a_committed_step_is_not_committed_again(tmp_path: Path, attempt: Publish) -> None:
    publish_checkpoint(attempt)
    first = (directory_of(attempt) / METADATA_NAME).read_bytes()
    second = persist_attempt(tmp_path, states_of_ranks(WORLD_SIZE), save_key(seq=1))
    with pytest.raises(AlreadyCommitted, match="step 5 is committed already"):
        publish_checkpoint(second)
    assert (directory_of(attempt) / METADATA_NAME).read_bytes() == first
    assert len(manifests_of(attempt)) == WORLD_SIZE


def test_somebody_who_commits_between_the_look_and_the_act_stays(
    attempt: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = directory_of(attempt) / METADATA_NAME
    real = commit.publish

    def publish_late(*args: Any, **options: Any) -> None:
        target.write_bytes(b"somebody else's")
        real(*args, **options)

    monkeypatch.setattr(commit, "publish", publish_late)
    with pytest.raises(AlreadyCommitted):
        publish_checkpoint(attempt)
    assert target.read_bytes() == b"somebody else's"


def everything_in(order: Publish) -> dict[str, tuple[bytes, int, int]]:
    """Content, inode and time of change of every file of a step."""
    found = {path.name: (path.read_bytes(), path.stat()) for path in directory_of(order).iterdir()}
    return {name: (content, stat.st_ino, stat.st_mtime_ns) for name, (content, stat) in found.items()}


@pytest.mark.parametrize("overwrite", [False, True])
def test_publishing_what_is_published_succeeds_and_changes_nothing(tmp_path: Path, overwrite: bool) -> None:
    """A sidecar was killed after it had published and before it could tell anybody; another finishes its work."""
    order = persist_attempt(tmp_path, states_of_ranks(WORLD_SIZE), overwrite=overwrite)
    publish_checkpoint(order)
    persist_attempt(tmp_path, [{"a": 1}], save_key(session="ffffffff"))
    before = everything_in(order)
    publish_checkpoint(order)
    assert everything_in(order) == before


def test_what_is_published_is_made_durable_by_whoever_finds_it(
    attempt: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_checkpoint(attempt)
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    publish_checkpoint(attempt)
    assert synced == [str(directory_of(attempt))]


def test_what_is_published_and_cannot_be_made_durable_is_not_reported_as_unpublished(
    attempt: Publish, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever is told that it failed removes the data files."""
    publish_checkpoint(attempt)

    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, "no luck")

    monkeypatch.setattr(os, "fsync", fsync)
    publish_checkpoint(attempt)
    assert "no luck" in caplog.text


def test_two_who_publish_one_attempt_at_once_both_succeed(attempt: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    real = commit.publish

    def publish_late(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(commit, "publish", real)
        publish_checkpoint(attempt)
        real(*args, **options)

    monkeypatch.setattr(commit, "publish", publish_late)
    publish_checkpoint(attempt)
    assert read_metadata(attempt).storage_meta.save_id == attempt.save.save_id  # type: ignore[union-attr]
    assert names_in(attempt) == {METADATA_NAME, *files_of(attempt)}


def test_a_step_that_stock_dcp_has_saved_is_somebody_elses(tmp_path: Path) -> None:
    save_by_stock(tmp_path / "step-5", [{"a": torch.ones(2)}], DefaultSavePlanner)
    order = persist_attempt(tmp_path, [{"a": torch.zeros(2)}])
    before = everything_in(order)
    with pytest.raises(AlreadyCommitted):
        publish_checkpoint(order)
    assert everything_in(order) == before


class _Runs:
    """Runs something when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_a_metadata_that_would_run_something_is_somebody_elses_and_runs_nothing(
    tmp_path: Path, attempt: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    (directory_of(attempt) / METADATA_NAME).write_bytes(pickle.dumps(_Runs(tmp_path / "made")))
    with pytest.raises(AlreadyCommitted):
        publish_checkpoint(attempt)
    assert not (tmp_path / "made").exists()
    assert "posix.mkdir" in caplog.text


# ---------------------------------------------------------------- overwrite


def names_in(order: Publish) -> set[str]:
    return {path.name for path in directory_of(order).iterdir()}


def files_of(order: Publish) -> set[str]:
    return {
        make(rank, order.save.save_id) for rank in range(order.world_size) for make in (data_file_name, manifest_name)
    }


def test_an_overwritten_commit_takes_its_files_along(tmp_path: Path, attempt: Publish) -> None:
    publish_checkpoint(attempt)
    second = persist_attempt(tmp_path, [{"a": torch.ones(2)}], save_key(seq=1), overwrite=True)
    publish_checkpoint(second)
    assert names_in(second) == {METADATA_NAME, *files_of(second)}
    assert set(read_metadata(second).state_dict_metadata) == {"a"}


def test_files_of_an_earlier_session_are_superseded_too(tmp_path: Path) -> None:
    persist_attempt(tmp_path, [{"a": 1}] * 2, save_key(session="ffffffff", seq=9))
    order = persist_attempt(tmp_path, [{"a": 1}], overwrite=True)
    publish_checkpoint(order)
    assert names_in(order) == {METADATA_NAME, *files_of(order)}


def test_files_of_a_later_attempt_of_the_session_stay(tmp_path: Path) -> None:
    """It is under way while the earlier one is still being committed."""
    order = persist_attempt(tmp_path, [{"a": 1}], save_key(seq=3), overwrite=True)
    later = persist_attempt(tmp_path, [{"a": 2}], save_key(seq=12), overwrite=True)
    publish_checkpoint(order)
    assert names_in(order) == {METADATA_NAME, *files_of(order), *files_of(later)}
    publish_checkpoint(later)
    assert names_in(order) == {METADATA_NAME, *files_of(later)}


def test_an_earlier_save_of_a_session_never_replaces_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator has taken up both; the later one is committed from the directory meanwhile, by another process."""
    first = persist_attempt(tmp_path, [{"a": 1}], save_key(seq=9), overwrite=True)
    later = persist_attempt(tmp_path, [{"a": 2}], save_key(seq=12), overwrite=True)

    real = commit.publish

    def published_meanwhile(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(commit, "publish", real)
        publish_checkpoint(later, remove_superseded=False)
        real(*args, **options)

    monkeypatch.setattr(commit, "publish", published_meanwhile)
    for _ in range(2):
        with pytest.raises(AlreadyCommitted, match=f"by a later save, {later.save.save_id}"):
            publish_checkpoint(first)
    assert names_in(later) == {METADATA_NAME, *files_of(first), *files_of(later)}


def test_files_that_are_not_ours_stay(tmp_path: Path) -> None:
    order = persist_attempt(tmp_path, [{"a": 1}], overwrite=True)
    foreign = {"__0_0.distcp", "notes.txt", "__x.manifest", "__0_0a1b2c3d-0.distcp.bak"}
    for name in foreign:
        (directory_of(order) / name).write_bytes(b"")
    publish_checkpoint(order)
    assert names_in(order) == {METADATA_NAME, *files_of(order), *foreign}


def test_without_overwrite_nothing_is_removed(tmp_path: Path) -> None:
    older = persist_attempt(tmp_path, [{"a": 1}], save_key(seq=0))
    order = persist_attempt(tmp_path, [{"a": 1}], save_key(seq=1))
    publish_checkpoint(order)
    assert names_in(order) == {METADATA_NAME, *files_of(order), *files_of(older)}


def test_who_finishes_what_another_left_removes_nothing(tmp_path: Path, attempt: Publish) -> None:
    publish_checkpoint(attempt)
    second = persist_attempt(tmp_path, [{"a": 1}], save_key(seq=1), overwrite=True)
    publish_checkpoint(second, remove_superseded=False)
    assert names_in(second) == {METADATA_NAME, *files_of(attempt), *files_of(second)}
    assert set(read_metadata(second).state_dict_metadata) == {"a"}


def test_superseded_files_that_cannot_be_removed_do_not_undo_the_commit(
    tmp_path: Path, attempt: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data files of an attempt that is not published are removed: a published one must never be reported so."""
    publish_checkpoint(attempt)
    second = persist_attempt(tmp_path, [{"a": 1}], save_key(seq=1), overwrite=True)
    real = os.unlink

    def unlink(path: Path, *args: Any, **options: Any) -> None:
        if attempt.save.save_id in str(path):
            raise OSError(errno.EACCES, "not yours")
        real(path, *args, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    publish_checkpoint(second)
    assert set(read_metadata(second).state_dict_metadata) == {"a"}
    assert files_of(second) <= names_in(second)


def test_an_overwrite_whose_directory_cannot_be_synced_is_a_commit(
    tmp_path: Path, attempt: Publish, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new ``.metadata`` is visible; the old files stay for the crash that brings the old one back."""
    publish_checkpoint(attempt)
    second = persist_attempt(tmp_path, [{"a": 1}], save_key(seq=1), overwrite=True)
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "no luck")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    publish_checkpoint(second)
    assert names_in(second) == {METADATA_NAME, *files_of(attempt), *files_of(second)}
    assert "no luck" in caplog.text


def test_an_incomplete_overwrite_leaves_the_old_checkpoint_alone(tmp_path: Path, attempt: Publish) -> None:
    publish_checkpoint(attempt)
    before = (directory_of(attempt) / METADATA_NAME).read_bytes()
    second = persist_attempt(tmp_path, [{"a": 1}], save_key(seq=1), overwrite=True)
    (directory_of(second) / data_file_name(0, second.save.save_id)).unlink()
    with pytest.raises(IncompleteCheckpoint):
        publish_checkpoint(second)
    assert (directory_of(attempt) / METADATA_NAME).read_bytes() == before
    assert files_of(attempt) <= names_in(attempt)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_part_that_is_taken_back_at_the_last_moment_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """Its rank has told that the save has failed: building ``.metadata`` of many ranks takes long enough for that."""
    order = persist_attempt(tmp_path, states_of_ranks(WORLD_SIZE), overwrite=overwrite)
    write = durable_fs._write_temporary

    def then_withdraw(path: Path, content: bytes) -> Path:
        temporary = write(path, content)
        (directory_of(order) / manifest_name(1, order.save.save_id)).unlink()
        return temporary

    monkeypatch.setattr(durable_fs, "_write_temporary", then_withdraw)
    refused(order, r"the shard manifests of ranks \[1\] were removed while")
    assert [path.name for path in directory_of(order).iterdir() if "metadata" in path.name] == []
