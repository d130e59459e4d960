"""What a ``.metadata`` that is there already says about itself: which save made it, which files it refers to.

``.metadata`` is a pickle, and whoever can write into the directory can write one that runs anything. Here nothing that
it names is looked up: the names that stock DCP needs are replaced by classes without behaviour, every other name is
refused. That also makes the reader independent of torch: a ``.metadata`` of any release can be read, in milliseconds.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_proto.attempt_files import MAX_METADATA_BYTES
from ckpt_proto.errors import StorageError
from ckpt_proto.regular_file import read_regular_file

_DCP = "torch.distributed.checkpoint.metadata"
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_STOCK_NAMES = {
    _DCP: (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata",
        "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # where Python 3.13 has them
}  # fmt: skip
_TORCH_NAME = re.compile(r"Size|(bool|b?float|complex|u?int|q?u?int|bits)[0-9a-z_]*")


class MetadataUnreadable(StorageError):
    """A ``.metadata`` is no pickle of DCP's metadata, or names something that such a pickle has no use for."""


@dataclass(frozen=True)
class MetadataContent:
    """``save_id`` is DCP's ``StorageMeta.save_id``, empty if there is none; ``files`` are the data files referred to,
    relative to the checkpoint."""

    save_id: str
    files: frozenset[str]


class _Stored:
    """In place of anything that a pickle names: keeps what it is given, does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        # Of this reader alone: a pickle can set attributes of a class that it names.
        self.stored: dict[tuple[str, str], type[_Stored]] = {}

    def find_class(self, module: str, name: str) -> Any:
        is_torch_name = module == "torch" and _TORCH_NAME.fullmatch(name)
        if not is_torch_name and name not in _STOCK_NAMES.get(module, ()):
            raise MetadataUnreadable(f"it names {module[:80]}.{name[:80]}, for which DCP's metadata has no use")
        if (module, name) not in self.stored:
            self.stored[module, name] = type(name, (_Stored,), {})
        return self.stored[module, name]


def read_metadata_file(path: Path) -> MetadataContent:
    """Who made ``path``, and what it refers to. Called by whoever is about to publish or to remove beside it.

    Raises:
        FileNotFoundError: it does not exist.
        MetadataUnreadable: it is not what DCP writes; the text says what was refused.
        StorageError: it is no regular file, too large, or cannot be read.
    """
    content, _ = read_regular_file(path, MAX_METADATA_BYTES)
    return parse_metadata(content, str(path))


def parse_metadata(content: bytes, where: str) -> MetadataContent:
    """What the bytes of a ``.metadata`` say; ``where`` is for the error.

    Raises:
        MetadataUnreadable: as :func:`read_metadata_file`.
    """
    reader = _Reader(content)
    try:
        whole = reader.load()
        return _content_of(whole, reader.stored.get((_DCP, "Metadata"), _Stored))
    except Exception as error:  # pickle raises a dozen types on hostile input
        text = str(error) or type(error).__name__
        raise MetadataUnreadable(f"{where} is no metadata of a checkpoint: {text}") from error


def _content_of(whole: Any, expected: type[_Stored]) -> MetadataContent:
    if type(whole) is not expected:
        raise MetadataUnreadable(f"it is a {type(whole).__name__}")
    fields = _fields(whole)
    meta, data = fields.get("storage_meta"), fields.get("storage_data")
    save_id = _fields(meta).get("save_id") if meta is not None else None
    entries = data.values() if isinstance(data, dict) else ()
    files = {_fields(entry).get("relative_path") for entry in entries}
    return MetadataContent(
        save_id if isinstance(save_id, str) else "", frozenset(name for name in files if isinstance(name, str))
    )


def _fields(stored: Any) -> Mapping[Any, Any]:
    state = getattr(stored, "state", None)
    if not isinstance(state, dict):
        raise MetadataUnreadable(f"a {type(stored).__name__} in it has no fields")
    return state
