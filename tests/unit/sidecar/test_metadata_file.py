"""Reading a ``.metadata`` that somebody else may have made: it says whose it is, and nothing that it names is run."""

from __future__ import annotations

import collections
import os
import pickle
import subprocess
import sys
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from ckpt_proto.checkpoint_layout import METADATA_NAME, data_file_name
from ckpt_proto.errors import StorageError
from ckpt_sidecar import metadata_file
from ckpt_sidecar.commit import publish_checkpoint
from ckpt_sidecar.metadata_file import MetadataContent, MetadataUnreadable, parse_metadata, read_metadata_file
from testkit.plans import persist_attempt, states_of_ranks
from testkit.states import adamw_state, tensor_zoo


def test_our_own_says_which_attempt_made_it_and_what_it_refers_to(tmp_path: Path) -> None:
    order = persist_attempt(tmp_path, states_of_ranks(3))
    publish_checkpoint(order)
    found = read_metadata_file(tmp_path / "step-5" / METADATA_NAME)
    files = frozenset(data_file_name(rank, order.save.save_id) for rank in range(3))
    assert found == MetadataContent(order.save.save_id, files)


def test_stock_dcps_is_read_too(tmp_path: Path) -> None:
    model, optimizer = adamw_state(0)
    state = {"zoo": tensor_zoo(0), "model": model.state_dict(), "optimizer": optimizer.state_dict(), "values": [1, {}]}
    dcp.save(state, checkpoint_id=tmp_path)
    stock = pickle.loads((tmp_path / METADATA_NAME).read_bytes())
    found = read_metadata_file(tmp_path / METADATA_NAME)
    assert found == MetadataContent(stock.storage_meta.save_id, frozenset({"__0_0.distcp"}))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickle_that_a_python_3_writes_by_default_can_be_read(protocol: int) -> None:
    metadata = Metadata({}, storage_meta=StorageMeta(checkpoint_id=PosixPath("/data/run"), save_id="0a1b2c3d-4"))
    assert parse_metadata(pickle.dumps(metadata, protocol), "here") == MetadataContent("0a1b2c3d-4", frozenset())


@pytest.mark.parametrize("meta", [None, StorageMeta(), StorageMeta(save_id=3)])  # type: ignore[arg-type]
def test_one_without_a_save_id_is_nobodys(meta: StorageMeta | None) -> None:
    assert parse_metadata(pickle.dumps(Metadata({}, storage_meta=meta)), "here").save_id == ""


def test_reading_imports_no_torch(tmp_path: Path) -> None:
    publish_checkpoint(persist_attempt(tmp_path, [{"a": torch.ones(2)}]))
    code = (
        "import sys; from pathlib import Path; from ckpt_sidecar.metadata_file import read_metadata_file; "
        "print(read_metadata_file(Path(sys.argv[1])).save_id, 'torch' in sys.modules)"
    )
    path = tmp_path / "step-5" / METADATA_NAME
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "0a1b2c3d-0 False\n"


# ---------------------------------------------------------------- refused


class Calls:
    """Its pickle calls ``function``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


class Ours(dict[Any, Any]):
    """A class that a user may have in a planner's data."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Calls(os.system, "false"), "posix.system"),
        (Calls(eval, "1"), "builtins.eval"),
        (Calls(getattr, "", "join"), "builtins.getattr"),
        (Calls(torch.load, "x"), "torch.serialization.load"),
        (Calls(torch.hub.load, "x", "y"), "torch.hub.load"),
        (Calls(bytearray, 1 << 40), "builtins.bytearray"),
        (collections.OrderedDict(a=1), "collections.OrderedDict"),
        (Ours(), "Ours"),
        (torch.nn.Linear, "torch.nn.modules.linear.Linear"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_name_that_no_metadata_needs_is_refused_by_name(value: Any, named: str) -> None:
    content = pickle.dumps(Metadata({}, planner_data=value, storage_meta=StorageMeta(save_id="0a1b2c3d-4")))
    with pytest.raises(MetadataUnreadable, match=f"here is no metadata of a checkpoint: it names .*{named}"):
        parse_metadata(content, "here")


def test_nothing_is_reached_through_a_name_that_is_allowed() -> None:
    """Protocol 4 looks up dotted names."""
    for name in (b"Metadata.__init__", b"Metadata.__init__.__globals__"):
        module = b"torch.distributed.checkpoint.metadata"
        content = b"\x80\x04" + b"".join(bytes([0x8C, len(text)]) + text for text in (module, name)) + b"\x93."
        with pytest.raises(MetadataUnreadable, match="it names"):
            parse_metadata(content, "here")


def test_a_pickle_cannot_change_the_classes_that_it_names() -> None:
    content = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}U\x07save_idK\x01s\x86b."
    with pytest.raises(MetadataUnreadable):
        parse_metadata(content, "here")
    assert parse_metadata(pickle.dumps(Metadata({})), "here") == MetadataContent("", frozenset())
    assert not hasattr(Metadata, "save_id")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps(Metadata({}))[:-20],
        pickle.dumps(None),
        pickle.dumps({"storage_meta": None}),
        pickle.dumps(StorageMeta()),
        pickle.dumps(Metadata({}, storage_meta="0a1b2c3d-4")),  # type: ignore[arg-type]
        pickle.dumps(Metadata({}, storage_data={MetadataIndex("a"): "file"})),
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.",
        b"cpersistent\nP1\n.",
    ],
)
def test_what_is_no_metadata_is_refused(content: bytes) -> None:
    with pytest.raises(MetadataUnreadable, match="here is no metadata of a checkpoint: "):
        parse_metadata(content, "here")


def test_a_link_a_pipe_a_directory_and_a_giant_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_checkpoint(persist_attempt(tmp_path, [{"a": 1}]))
    real = tmp_path / "step-5" / METADATA_NAME
    (tmp_path / "link").symlink_to(real)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name in ("link", "pipe", "directory"):
        with pytest.raises(StorageError, match=str(tmp_path / name)):
            read_metadata_file(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_metadata_file(tmp_path / "missing")
    size = real.stat().st_size
    monkeypatch.setattr(metadata_file, "MAX_METADATA_BYTES", size - 1)
    with pytest.raises(StorageError, match=f"{real} has {size} bytes; at most {size - 1} are read"):
        read_metadata_file(real)
