"""The layout of a region: tensors first at aligned places in plan order, byte entries last."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_proto.plan_items import Plan, PlanItem
from ckpt_sidecar.dcp_layout import lay_out, write_frames
from ckpt_sidecar.frames import frame_of
from testkit.plans import bytes_item, fill_at_random, region_of, shard_item, tensor_item
from testkit.protocol_values import REPEATABLE

ALIGNMENT_BYTES = 64
SIZES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = st.sampled_from(["float32", "bfloat16", "uint8", "bool", "complex128", "float8_e4m3fn", "int64"])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    items: list[PlanItem] = []
    for index in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["tensor", "tensor", "shard", "bytes", "opaque"]))
        sizes, dtype = draw(SIZES), draw(DTYPES)
        if kind == "bytes":
            items.append(bytes_item(f"k{index}"))
        elif kind == "shard":
            whole = tuple(size + 2 for size in sizes)
            items.append(shard_item(f"k{index}", (1,) * len(sizes), sizes, whole, dtype))
        else:
            items.append(tensor_item(f"k{index}", sizes, dtype, opaque=kind == "opaque"))
    return tuple(items)


@REPEATABLE
@given(plans())
def test_entries_are_aligned_in_plan_order_and_never_overlap(items: Plan) -> None:
    layout = lay_out(items)
    assert [entry.item for entry in layout.framed] == [item for item in items if item.is_framed]
    end = 0
    for entry in layout.framed:
        assert entry.offset_bytes % ALIGNMENT_BYTES == 0
        assert end <= entry.offset_bytes < end + ALIGNMENT_BYTES
        assert entry.payload_offset == entry.offset_bytes + len(entry.frame.head)
        if entry.frame.payload_bytes:
            assert entry.payload_offset % ALIGNMENT_BYTES == 0
        end = entry.payload_end + len(entry.frame.tail)
        assert end - entry.offset_bytes == entry.frame.entry_bytes
    assert end <= layout.byte_offset < end + ALIGNMENT_BYTES


@REPEATABLE
@given(plans(), st.lists(st.integers(0, 10_000)))
def test_byte_entries_come_last_in_plan_order(items: Plan, lengths: list[int]) -> None:
    layout = lay_out(items)
    assert layout.byte_items == tuple(item for item in items if not item.is_framed)
    assert layout.file_bytes(lengths) == layout.byte_offset + sum(lengths)
    assert layout.region_bytes(sum(lengths)) == layout.file_bytes(lengths)
    assert layout.file_bytes(()) == layout.byte_offset


@REPEATABLE
@given(plans())
def test_the_fixed_part_depends_on_nothing_but_the_framed_items(items: Plan) -> None:
    framed_only = tuple(item for item in items if item.is_framed)
    assert lay_out(items).byte_offset == lay_out(framed_only).byte_offset
    assert [entry.offset_bytes for entry in lay_out(items).framed] == [
        entry.offset_bytes for entry in lay_out(framed_only).framed
    ]


@REPEATABLE
@given(plans())
def test_frames_are_put_around_the_payloads_and_nowhere_else(items: Plan) -> None:
    layout = lay_out(items)
    with region_of(layout, 100) as mapping:
        fill_at_random(layout, mapping, [])
        staged = {entry.item.fqn: mapping[entry.payload_offset : entry.payload_end] for entry in layout.framed}
        rest = mapping[layout.byte_offset :]
        write_frames(layout, mapping)  # again, as for a region that is grown
        position = 0
        for entry in layout.framed:
            assert not any(mapping[position : entry.offset_bytes])  # padding
            assert mapping[entry.offset_bytes : entry.payload_offset] == entry.frame.head
            assert mapping[entry.payload_offset : entry.payload_end] == staged[entry.item.fqn]
            position = entry.payload_end + len(entry.frame.tail)
            assert mapping[entry.payload_end : position] == entry.frame.tail
        assert mapping[layout.byte_offset :] == rest


def test_an_entry_of_a_region_is_an_archive_that_torch_loads(tmp_path: Path) -> None:
    layout = lay_out((tensor_item("a", (3,)), bytes_item("b"), tensor_item("c", (2, 2), "int16")))
    with region_of(layout) as mapping:
        fill_at_random(layout, mapping, [])
        for entry in layout.framed:
            payload = mapping[entry.payload_offset : entry.payload_end]
            for offset in entry.frame.crc_offsets:
                struct.pack_into("<I", mapping, entry.payload_end + offset, zlib.crc32(payload))
            path = tmp_path / entry.item.fqn
            path.write_bytes(mapping[entry.offset_bytes : entry.payload_end + len(entry.frame.tail)])
            loaded = torch.load(path, weights_only=True)
            assert tuple(loaded.shape) == entry.item.sizes
            assert bytes(loaded.untyped_storage()) == payload


def test_a_plan_of_nothing_has_an_empty_file() -> None:
    layout = lay_out(())
    assert (layout.byte_offset, layout.file_bytes(()), layout.region_bytes(64)) == (0, 0, 64)


def test_a_shard_is_framed_with_its_own_shape_and_not_that_of_the_whole() -> None:
    layout = lay_out((shard_item("w", (2, 0), (3, 4), (9, 4)),))
    assert layout.framed[0].frame is frame_of("float32", (3, 4))


def test_a_region_smaller_than_the_layout_is_not_written_past_its_end() -> None:
    layout = lay_out((tensor_item("w", (4096,)),))
    with region_of(lay_out(())) as mapping, pytest.raises((IndexError, ValueError)):
        write_frames(layout, mapping)
