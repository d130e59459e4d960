"""Frames: head + payload + tail with the payload's CRC put in is a ``torch.save`` archive, bit for bit."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from isal import isal_zlib

from ckpt_sidecar.frames import Frame, FrameError, dtype_of, frame_of


def framed_dtypes() -> list[str]:
    """Every dtype but those that are never framed: quantised ones are opaque, and torch itself cannot save integers of
    1 to 7 bits."""
    names = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    unknown_to_torch_save = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    return sorted(name for name in names - unknown_to_torch_save if not name.startswith("q"))


DTYPES = framed_dtypes()
SHAPES = [(), (0,), (3, 0), (1,), (5, 7)]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def payload_of(dtype: torch.dtype, nbytes: int) -> bytes:
    if dtype is torch.bool:
        return bytes(index % 2 for index in range(nbytes))
    return random.Random(nbytes).randbytes(nbytes)


def with_crc(frame: Frame, crc: int) -> bytes:
    tail = bytearray(frame.tail)
    for offset in frame.crc_offsets:
        struct.pack_into("<I", tail, offset, crc)
    return bytes(tail)


def archive_of(frame: Frame, payload: bytes) -> bytes:
    return frame.head + payload + with_crc(frame, zlib.crc32(payload))


def saved_by_torch(payload: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    tensor = torch.empty(shape, dtype=dtype)
    if payload:
        raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        tensor.untyped_storage().copy_(raw.untyped_storage())
    sink = io.BytesIO()
    torch.save(tensor, sink)
    return sink.getvalue()


def test_the_list_of_dtypes_is_what_torch_can_save() -> None:
    assert {"float32", "bfloat16", "float8_e4m3fn", "complex32", "bool", "uint64", "float4_e2m1fn_x2"} <= {*DTYPES}
    assert len(DTYPES) >= 20


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_an_archive_is_what_torch_would_have_saved(dtype_name: str, shape: tuple[int, ...]) -> None:
    dtype = getattr(torch, dtype_name)
    frame = frame_of(dtype_name, shape)
    payload = payload_of(dtype, frame.payload_bytes)
    archive = archive_of(frame, payload)

    assert len(archive) == frame.entry_bytes
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        assert file.testzip() is None
        members = {name: file.read(name) for name in file.namelist()}
    loaded = torch.load(io.BytesIO(archive), weights_only=True)
    assert (loaded.dtype, tuple(loaded.shape), loaded.is_contiguous()) == (dtype, shape, True)
    assert bytes(loaded.untyped_storage()) == payload

    stock = saved_by_torch(payload, dtype, shape)
    assert len(stock) == len(archive)
    with zipfile.ZipFile(io.BytesIO(stock)) as file:
        stock_members = {name: file.read(name) for name in file.namelist()}
    # The one record that differs is a hash over the other records' CRCs, made before the payload's is known.
    identity = "archive/.data/serialization_id"
    assert members.pop(identity) is not None
    assert stock_members.pop(identity) is not None
    assert members == stock_members


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_a_payload_is_aligned_within_its_archive(dtype_name: str) -> None:
    assert len(frame_of(dtype_name, (5, 7)).head) % 64 == 0


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 0, 5)], ids=str)
def test_an_empty_tensor_is_all_head(shape: tuple[int, ...]) -> None:
    frame = frame_of("bfloat16", shape)
    assert (frame.payload_bytes, frame.tail, frame.crc_offsets) == (0, b"", ())
    assert frame.entry_bytes == len(frame.head)


def test_a_frame_is_made_once() -> None:
    assert frame_of("float32", (5, 7)) is frame_of("float32", (5, 7))
    assert frame_of("float32", (5, 7)) is not frame_of("float32", (7, 5))


def test_the_crc_is_stored_twice_and_starts_as_that_of_nothing_known() -> None:
    frame = frame_of("float32", (5, 7))
    assert len(frame.crc_offsets) == 2
    assert all(frame.tail[at : at + 4] == bytes(4) for at in frame.crc_offsets)


# ---------------------------------------------------------------- above 4 GiB


BIG = (2**31 + 3,)


def sparse_archive(path: Path, frame: Frame, crc: int, last: bytes) -> None:
    with path.open("wb") as file:
        file.write(frame.head)
        file.seek(frame.payload_bytes - len(last), io.SEEK_CUR)
        file.write(last)
        file.write(with_crc(frame, crc))


def test_a_tensor_above_4_gib_is_framed_with_zip64(tmp_path: Path) -> None:
    frame = frame_of("float16", BIG)
    assert frame.payload_bytes == 2**32 + 6
    last = struct.pack("<3e", 1.0, 2.0, 3.0)
    sparse_archive(tmp_path / "big", frame, 0x12345678, last)

    with zipfile.ZipFile(tmp_path / "big") as file:
        record = file.getinfo("archive/data/0")
        assert (record.CRC, record.file_size, record.compress_size) == (0x12345678, *(2 * [frame.payload_bytes]))
        for name in file.namelist():
            if name != record.filename:
                assert file.read(name)
    descriptor = struct.unpack_from("<IIQQ", frame.tail)
    assert descriptor == (0x08074B50, 0, frame.payload_bytes, frame.payload_bytes)
    loaded = torch.load(tmp_path / "big", weights_only=True, mmap=True)
    assert tuple(loaded.shape) == BIG
    assert loaded[-4:].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert loaded[0] == 0


@pytest.mark.slow
def test_an_archive_above_4_gib_passes_the_zip_test(tmp_path: Path) -> None:
    frame = frame_of("float16", BIG)
    block, crc, left = bytes(64 << 20), 0, frame.payload_bytes
    while left:
        crc = isal_zlib.crc32(block[: min(left, len(block))], crc)
        left -= min(left, len(block))
    sparse_archive(tmp_path / "big", frame, crc, b"\0")
    with zipfile.ZipFile(tmp_path / "big") as file:
        assert file.testzip() is None


# ---------------------------------------------------------------- what is not known is refused


@pytest.fixture
def empty_cache() -> Iterator[None]:
    frame_of.cache_clear()
    yield
    frame_of.cache_clear()


def pieces_saved(*pieces: tuple[int, bytes]) -> Callable[[Any, Any], None]:
    """A ``torch.save`` that writes these pieces at these offsets."""

    def save(tensor: object, sink: io.RawIOBase) -> None:
        for offset, piece in pieces:
            sink.seek(offset)
            sink.write(piece)

    return save


def directory_entry(name: bytes) -> bytes:
    return b"PK\x01\x02" + bytes(24) + struct.pack("<HHH", len(name), 0, 0) + bytes(12) + name


DESCRIPTOR = b"PK\x07\x08" + bytes(20)
HEAD = b"h" * 64
UNKNOWN_FORMS = {
    "the payload is written too": [(0, HEAD + bytes(12) + DESCRIPTOR)],
    "nothing is written": [],
    "two holes": [(0, HEAD), (70, b"x"), (76, DESCRIPTOR)],
    "hole of another size": [(0, HEAD), (64 + 16, DESCRIPTOR + directory_entry(b"archive/data/0"))],
    "hole at the front": [(12, HEAD), (100, DESCRIPTOR)],
    "pieces overlap": [(0, HEAD), (32, HEAD), (96 + 12, DESCRIPTOR)],
    "no data descriptor": [(0, HEAD), (76, directory_entry(b"archive/data/0"))],
    "no directory": [(0, HEAD), (76, DESCRIPTOR)],
    "directory without the payload": [(0, HEAD), (76, DESCRIPTOR + directory_entry(b"archive/version"))],
}


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("form", UNKNOWN_FORMS)
def test_an_unknown_form_of_archive_is_refused(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(torch, "save", pieces_saved(*UNKNOWN_FORMS[form]))
    with pytest.raises(FrameError, match=torch.__version__.replace("+", r"\+")):
        frame_of("float32", (3,))


@pytest.mark.usefixtures("empty_cache")
def test_a_known_form_made_by_hand_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forms refused above differ from this one in one respect each."""
    others, mine = directory_entry(b"archive/version"), directory_entry(b"archive/data/0")
    monkeypatch.setattr(torch, "save", pieces_saved((0, HEAD), (76, DESCRIPTOR + others + mine)))
    frame = frame_of("float32", (3,))
    assert (frame.head, frame.payload_bytes) == (HEAD, 12)
    assert frame.crc_offsets == (4, len(DESCRIPTOR) + len(others) + 16)


@pytest.mark.usefixtures("empty_cache")
def test_an_empty_tensor_with_a_hole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "save", pieces_saved((0, HEAD), (80, DESCRIPTOR)))
    with pytest.raises(FrameError, match="gap or overlap at 64"):
        frame_of("float32", (0,))


@pytest.mark.usefixtures("empty_cache")
def test_a_writer_that_seeks_from_the_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "save", lambda tensor, sink: sink.seek(0, io.SEEK_END))
    with pytest.raises(io.UnsupportedOperation):
        frame_of("float32", (3,))


@pytest.mark.usefixtures("empty_cache")
def test_a_refusal_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(FrameError):
        patch.setattr(torch, "save", pieces_saved((0, HEAD)))
        frame_of("float32", (3,))
    assert frame_of("float32", (3,)).payload_bytes == 12


@pytest.mark.parametrize("name", ["float77", "Tensor", "nn", "", "_C"])
def test_a_name_that_is_no_dtype_is_refused(name: str) -> None:
    with pytest.raises(FrameError, match=f"no dtype '{name}'"):
        dtype_of(name)
    with pytest.raises(FrameError, match="no dtype"):
        frame_of(name, (1,))
