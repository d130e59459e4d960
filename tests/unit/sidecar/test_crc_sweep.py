"""The CRC sweep: whatever the windows, every CRC is right and in its place before its window is passed."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_proto.codec import unpack_records
from ckpt_proto.plan_items import Plan
from ckpt_proto.shard_manifest import LayoutEntry
from ckpt_sidecar.crc_sweep import CrcSweep
from ckpt_sidecar.dcp_layout import lay_out
from testkit.plans import bytes_item, fill_at_random, region_of, tensor_item
from testkit.protocol_values import REPEATABLE

SHAPES = st.lists(st.integers(0, 40), min_size=0, max_size=2).map(tuple)


@st.composite
def regions(draw: st.DrawFn) -> tuple[Plan, list[bytes]]:
    """A plan and the contents of its byte entries."""
    items, contents = [], []
    for index in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            items.append(tensor_item(f"k{index}", draw(SHAPES), draw(st.sampled_from(["float32", "uint8"]))))
        else:
            items.append(bytes_item(f"k{index}"))
            contents.append(draw(st.binary(max_size=3000)))
    return tuple(items), contents


@REPEATABLE
@given(regions(), st.lists(st.integers(1, 9000), max_size=30), st.integers(0, 2**32 - 1))
def test_crcs_are_right_and_final_before_their_window_is_passed(
    region: tuple[Plan, list[bytes]], windows: list[int], seed: int
) -> None:
    items, contents = region
    layout, lengths = lay_out(items), tuple(map(len, contents))
    nbytes = layout.file_bytes(lengths)
    with region_of(layout, sum(lengths)) as mapping:
        fill_at_random(layout, mapping, contents, seed)
        sweep = CrcSweep(layout, lengths, mapping)
        passed, limit = b"", 0
        for window in [*windows, nbytes]:
            limit = min(nbytes, limit + window)
            sweep.advance(limit)
            assert mapping[: len(passed)] == passed  # what the writer has taken is never changed again
            passed = mapping[:limit]
        crcs, places = sweep.crcs(), sweep.byte_places()
        sweep.close()

        expected = {}
        for entry in layout.framed:
            crc = zlib.crc32(mapping[entry.payload_offset : entry.payload_end])
            for offset in entry.frame.crc_offsets:
                at = entry.payload_end + offset
                assert struct.unpack_from("<I", passed, at) == (crc,)
            expected[entry.item.fqn] = (entry.offset_bytes, entry.frame.entry_bytes, crc)
        position = layout.byte_offset
        for item, content in zip(layout.byte_items, contents, strict=True):
            expected[item.fqn] = (position, len(content), zlib.crc32(content))
            position += len(content)
        assert passed == mapping[:nbytes]
        stored = unpack_records(LayoutEntry, layout.packed)
        assert tuple(entry.item for entry in stored) == items
        values = iter(zip(places[::2], places[1::2], strict=True))
        for entry, crc in zip(stored, crcs, strict=True):
            place = (entry.offset_bytes, entry.length_bytes) if entry.item.is_framed else next(values)
            assert (*place, crc) == expected[entry.item.fqn]


@REPEATABLE
@given(regions(), st.integers(1, 5000))
def test_a_second_save_in_the_same_region_gets_its_own_crcs(region: tuple[Plan, list[bytes]], window: int) -> None:
    items, contents = region
    layout, lengths = lay_out(items), tuple(map(len, contents))
    with region_of(layout, sum(lengths)) as mapping:
        for seed in (1, 2):
            fill_at_random(layout, mapping, contents, seed)
            sweep = CrcSweep(layout, lengths, mapping)
            for limit in [*range(window, layout.file_bytes(lengths), window), layout.file_bytes(lengths)]:
                sweep.advance(limit)
            crcs = [crc for item, crc in zip(items, sweep.crcs(), strict=True) if item.is_framed]
            sweep.close()
            assert crcs == [zlib.crc32(mapping[e.payload_offset : e.payload_end]) for e in layout.framed]


def test_going_back_changes_nothing() -> None:
    layout = lay_out((tensor_item("a", (1000,)),))
    with region_of(layout) as mapping:
        fill_at_random(layout, mapping, [])
        sweep = CrcSweep(layout, (), mapping)
        for limit in (3000, 100, 0, 3000, layout.byte_offset, 50):
            sweep.advance(limit)
        [crc] = sweep.crcs()
        sweep.close()
        assert crc == zlib.crc32(mapping[layout.framed[0].payload_offset : layout.framed[0].payload_end])


def test_there_are_no_entries_before_the_end() -> None:
    layout = lay_out((tensor_item("a", (1000,)),))
    with region_of(layout) as mapping:
        sweep = CrcSweep(layout, (), mapping)
        sweep.advance(layout.framed[0].payload_end - 1)
        with pytest.raises(AssertionError, match="has not reached the end"):
            sweep.crcs()
        sweep.close()


def test_a_closed_sweep_does_not_hold_the_mapping() -> None:
    layout = lay_out((tensor_item("a", (10,)),))
    with region_of(layout) as mapping:
        sweep = CrcSweep(layout, (), mapping)
        with pytest.raises(BufferError):
            mapping.close()
        sweep.close()
        mapping.close()
