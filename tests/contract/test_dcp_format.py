"""The files of a checkpoint, looked at without DCP's reader: they are what DCP itself would have written."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from ckpt_proto.checkpoint_layout import METADATA_NAME
from ckpt_trainer_client import CheckpointClient
from testkit.ranks import RankStarter
from testkit.sharded_states import SHAPES
from testkit.sidecars import Sidecar
from testkit.states import nested_state, random_tensor, same_bits

_DCP = "torch.distributed.checkpoint"
ALLOWED_NAMES = {
    (f"{_DCP}.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "StorageMeta",
    )
} | {(f"{_DCP}.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"), ("torch", "Size")}


class StockOnlyUnpickler(pickle.Unpickler):
    """What a careful reader of DCP checkpoints may allow, as it has been proposed to PyTorch."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in ALLOWED_NAMES or isinstance(found, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in .metadata")


def read_metadata(checkpoint: Path) -> Metadata:
    """``.metadata``, read by the careful reader."""
    with open(checkpoint / METADATA_NAME, "rb") as file:
        metadata: Metadata = StockOnlyUnpickler(file).load()
    return metadata


def stored_entries(checkpoint: Path) -> list[tuple[str, bytes]]:
    """Every entry's key and bytes, found as a reader finds them."""
    return [
        (index.fqn, (checkpoint / info.relative_path).read_bytes()[info.offset : info.offset + info.length])
        for index, info in read_metadata(checkpoint).storage_data.items()
    ]


@pytest.fixture
def nested_save(tmp_path: Path, sidecar: Sidecar) -> Path:
    """A checkpoint of one rank with every kind of value in it."""
    with CheckpointClient(tmp_path) as client:
        return Path(client.save(nested_state(2), step=1).result())


@pytest.mark.parametrize("name", ["1d", "2d"])
def test_metadata_says_what_stock_dcp_says_of_the_same_sharded_state(
    sharded_saves: dict[str, tuple[Path, Path]], name: str
) -> None:
    ours, stock = map(read_stock_metadata, sharded_saves[name])
    assert_same_contents(ours, stock)
    assert set(ours.state_dict_metadata) == set(SHAPES)


def test_metadata_says_what_stock_dcp_says_of_a_nested_state(
    nested_save: Path, tmp_path: Path, ranks: RankStarter
) -> None:
    stock_directory = tmp_path / "stock"
    ranks.run(save_with_stock_dcp, 1, str(stock_directory))
    assert_same_contents(read_metadata(nested_save), read_stock_metadata(stock_directory))


def save_with_stock_dcp(directory: str) -> None:
    """Rank code: the same state, saved by DCP itself."""
    import torch.distributed.checkpoint as dcp

    dcp.save(nested_state(2), checkpoint_id=directory, no_dist=True)


def read_stock_metadata(checkpoint: Path) -> Metadata:
    """``.metadata`` of stock DCP, which holds a ``pathlib`` object."""
    metadata: Metadata = pickle.loads((checkpoint / METADATA_NAME).read_bytes())
    return metadata


def assert_same_contents(ours: Metadata, stock: Metadata) -> None:
    """Everything that a loader looks at is equal, but for where in the files the entries lie."""
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert list(ours.state_dict_metadata) == list(stock.state_dict_metadata)  # the order of a state loaded by key
    assert ours.planner_data == stock.planner_data
    assert set(ours.storage_data) == set(stock.storage_data)
    hints = {(index, index.index) for index in ours.storage_data}
    assert hints == {(index, index.index) for index in stock.storage_data}
    assert ours.version == stock.version


@pytest.mark.parametrize("name", ["1d", "2d"])
def test_metadata_holds_stock_classes_only_and_its_own_path_as_text(
    sharded_saves: dict[str, tuple[Path, Path]], name: str
) -> None:
    checkpoint = sharded_saves[name][0]
    meta = read_metadata(checkpoint).storage_meta
    assert meta is not None
    assert type(meta.checkpoint_id) is str
    assert meta.checkpoint_id == str(checkpoint)
    assert meta.save_id
    assert type(meta.save_id) is str


@pytest.mark.parametrize("name", ["1d", "2d"])
def test_every_entry_of_a_sharded_save_is_a_whole_zip_archive(
    sharded_saves: dict[str, tuple[Path, Path]], name: str
) -> None:
    entries = stored_entries(sharded_saves[name][0])
    assert {fqn for fqn, _ in entries} == set(SHAPES)
    for fqn, content in entries:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert archive.testzip() is None, fqn
        assert torch.load(io.BytesIO(content), weights_only=True).dtype == SHAPES[fqn][1]


def test_every_entry_of_a_nested_save_is_what_torch_would_save(nested_save: Path) -> None:
    kinds = read_metadata(nested_save).state_dict_metadata
    for fqn, content in stored_entries(nested_save):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert archive.testzip() is None, fqn
        value = torch.load(io.BytesIO(content), weights_only=not isinstance(kinds[fqn], BytesStorageMetadata))
        again = io.BytesIO()
        torch.save(value, again)
        assert archive_members(content) == archive_members(again.getvalue()), fqn


def archive_members(content: bytes) -> list[tuple[str, bytes]]:
    """Names and bytes in order, but for the id that torch hashes from the names and, with a payload, from its bytes."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".data/serialization_id")]
        return [(name, archive.read(name)) for name in names]


def test_entries_do_not_overlap_and_lie_within_their_file(nested_save: Path) -> None:
    spans: dict[str, list[tuple[int, int]]] = {}
    for info in read_metadata(nested_save).storage_data.values():
        spans.setdefault(info.relative_path, []).append((info.offset, info.offset + info.length))
    for name, found in spans.items():
        found.sort()
        assert all(stop <= start for (_, stop), (start, _) in pairwise(found))
        assert found[-1][1] == os.stat(nested_save / name).st_size


def test_the_region_in_shared_memory_is_the_data_file(tmp_path: Path, sidecar: Sidecar) -> None:
    with CheckpointClient(tmp_path, slots=1) as client:
        where = Path(client.save({"x": random_tensor((100, 7), torch.bfloat16, 1), "step": 1}, step=1).result())
        [data_file] = where.glob("*.distcp")
        [region] = sidecar.directory.glob("rank-0.slot-0.region")
        content = data_file.read_bytes()
        assert region.read_bytes()[: len(content)] == content


def test_a_large_step_of_many_windows_is_written_whole(tmp_path: Path, sidecar: Sidecar) -> None:
    # More than two of the writer's windows of 8 MiB, no multiple of a page, with entries across their borders.
    state = {f"x{index}": random_tensor((300_001 + index,), torch.float32, index) for index in range(16)}
    with CheckpointClient(tmp_path) as client:
        where = Path(client.save(state, step=1).result())
    for fqn, content in stored_entries(where):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert archive.testzip() is None, fqn
        assert same_bits(torch.load(io.BytesIO(content)), state[fqn]), fqn
