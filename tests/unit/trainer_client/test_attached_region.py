"""A region seen by the trainer: the targets are the region's own memory, made once, checked, and let go of."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ckpt_proto.errors import RegionError
from ckpt_proto.messages import RegionReady
from ckpt_proto.plan_items import Plan
from ckpt_proto.region import Seal, region_path, reserve, round_to_pages, seal_path
from ckpt_sidecar.dcp_layout import lay_out
from ckpt_trainer_client.attached_region import AttachedRegion
from testkit.plans import PLAN_ID, bytes_item, shard_item, tensor_item

ITEMS: Plan = (
    tensor_item("w", (3, 4)),
    bytes_item("step"),
    shard_item("h", (2, 0), (2, 5), (9, 5), "bfloat16"),
    tensor_item("zero", (), "float64"),
    tensor_item("none", (0, 4)),
    tensor_item("opaque", (7,), opaque=True),
    tensor_item("flag", (3,), "bool"),
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "regions"
    made.mkdir(mode=0o700)
    return made


Prepare = Callable[..., RegionReady]
Attach = Callable[..., AttachedRegion]


@pytest.fixture
def prepare(directory: Path) -> Prepare:
    """What the sidecar does: reserve a region for the plan and say where things lie."""

    def prepared(items: Plan = ITEMS, capacity: int = 4096, slot: int = 0, generation: int = 1) -> RegionReady:
        layout = lay_out(items)
        path = region_path(directory, 0, slot)
        nbytes = round_to_pages(layout.region_bytes(capacity))
        reserve(path, nbytes)
        offsets = tuple(entry.payload_offset for entry in layout.framed)
        return RegionReady(
            PLAN_ID, slot, generation, str(path), nbytes, offsets, layout.byte_offset, nbytes - layout.byte_offset
        )

    return prepared


@pytest.fixture
def attach() -> Iterator[Attach]:
    """Attach regions that are closed at the end."""
    made: list[AttachedRegion] = []

    def attached(ready: RegionReady, items: Plan = ITEMS, old: AttachedRegion | None = None) -> AttachedRegion:
        region = AttachedRegion(ready, items, old)
        if old in made:
            made.remove(old)
        made.append(region)
        return region

    yield attached
    for region in made:
        region.close()


def content(ready: RegionReady, offset: int, nbytes: int) -> bytes:
    with open(ready.path, "rb") as file:
        return os.pread(file.fileno(), nbytes, offset)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines(keepends=True)


def mapped(path: str) -> bool:
    return path in Path("/proc/self/maps").read_text()


# ---------------------------------------------------------------- targets


def test_there_is_a_target_for_each_framed_item_in_plan_order(prepare: Prepare, attach: Attach) -> None:
    region = attach(prepare())
    assert [(tuple(target.shape), target.dtype) for target in region.targets] == [
        ((3, 4), torch.float32),
        ((2, 5), torch.bfloat16),
        ((), torch.float64),
        ((0, 4), torch.float32),
        ((3,), torch.bool),
    ]
    assert all(target.is_contiguous() for target in region.targets)


def test_a_target_is_the_regions_own_memory(prepare: Prepare, attach: Attach) -> None:
    ready = prepare()
    region = attach(ready)
    for seed, (target, offset) in enumerate(zip(region.targets, ready.payload_offsets, strict=True)):
        nbytes = target.numel() * target.element_size()
        value = (torch.arange(target.numel()) + seed + 1).to(target.dtype).reshape(target.shape)
        target.copy_(value)
        expected = bytes(value.contiguous().untyped_storage()) if nbytes else b""
        assert content(ready, offset, nbytes) == expected
    region.targets[0].fill_(0)
    assert content(ready, ready.payload_offsets[0], 48) == bytes(48)


def test_what_the_sidecar_has_framed_is_not_touched(prepare: Prepare, attach: Attach) -> None:
    ready = prepare()
    with open(ready.path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[:] = b"\xee" * len(mapping)
    region = attach(ready)
    payload: set[int] = set()
    for target, offset in zip(region.targets, ready.payload_offsets, strict=True):
        target.zero_()
        payload |= set(range(offset, offset + target.numel() * target.element_size()))
    whole = content(ready, 0, ready.region_bytes)
    assert {index for index, byte in enumerate(whole) if byte != 0xEE} == payload


def test_byte_entries_follow_each_other_at_the_end(prepare: Prepare, attach: Attach) -> None:
    ready = prepare()
    region = attach(ready)
    region.write_bytes([b"abc", b"", b"defg"])
    assert content(ready, ready.byte_offset, 8) == b"abcdefg\0"
    region.write_bytes([b"x" * ready.byte_capacity])
    assert content(ready, ready.byte_offset, ready.byte_capacity) == b"x" * ready.byte_capacity


def test_byte_entries_never_leave_the_region(prepare: Prepare, attach: Attach) -> None:
    ready = prepare()
    region = attach(ready)
    with pytest.raises((IndexError, ValueError, RegionError)):
        region.write_bytes([b"x" * (ready.byte_capacity + 1)])
    assert os.stat(ready.path).st_size == ready.region_bytes


def test_a_plan_without_tensors_has_no_targets(prepare: Prepare, attach: Attach) -> None:
    items: Plan = (bytes_item("a"),)
    region = attach(prepare(items), items)
    assert region.targets == []
    region.write_bytes([b"abc"])


# ---------------------------------------------------------------- the seal


def test_the_seal_is_broken_while_the_region_is_filled(prepare: Prepare, attach: Attach) -> None:
    ready = prepare()
    region = attach(ready)
    looker = Seal(seal_path(Path(ready.path)))
    assert looker.read() is None
    region.seal(b"record")
    assert looker.read() == b"record"
    region.begin()
    assert looker.read() is None
    region.seal(b"longer record")
    assert looker.read() == b"longer record"
    looker.close()


# ---------------------------------------------------------------- reuse


def test_the_mapping_is_kept_for_another_plan_that_fits(prepare: Prepare, attach: Attach) -> None:
    old = attach(prepare(capacity=1 << 16))
    address = old.targets[0].data_ptr()
    before = descriptors()
    items: Plan = (tensor_item("other", (5,), "float64"), bytes_item("b"))
    again = prepare(items, generation=2)
    region = attach(again, items, old)
    assert descriptors() == before
    assert old.targets == []
    assert region.targets[0].data_ptr() - again.payload_offsets[0] == address - prepare().payload_offsets[0]
    region.targets[0].fill_(2.0)
    assert content(again, again.payload_offsets[0], 8) == bytes(
        torch.tensor([2.0], dtype=torch.float64).untyped_storage()
    )


def test_a_grown_region_is_mapped_anew_and_the_old_mapping_let_go_of(prepare: Prepare, attach: Attach) -> None:
    old = attach(prepare())
    before = descriptors()
    grown = prepare(capacity=1 << 20, generation=2)
    region = attach(grown, ITEMS, old)
    assert descriptors() == before
    region.write_bytes([b"y" * (1 << 20)])
    assert content(grown, grown.byte_offset + (1 << 20) - 1, 1) == b"y"


def test_another_file_is_mapped_and_the_old_one_let_go_of(prepare: Prepare, attach: Attach) -> None:
    first = prepare(slot=0)
    old = attach(first)
    region = attach(prepare(slot=1), ITEMS, old)
    assert not mapped(first.path)
    assert len(region.targets) == 5


# ---------------------------------------------------------------- what cannot be trusted


def test_another_file_under_the_same_name_is_mapped(prepare: Prepare, attach: Attach) -> None:
    """A restarted sidecar that could not use the region has made it anew: what is filled into the old one is lost."""
    ready = prepare()
    old = attach(ready)
    kept = os.open(ready.path, os.O_RDONLY | os.O_CLOEXEC)  # as long as it lives nobody gets its inode number
    try:
        for path in (Path(ready.path), seal_path(Path(ready.path))):
            path.unlink()
        again = prepare(generation=2)
        region = attach(again, ITEMS, old)
        region.targets[0].fill_(2.0)
        assert content(again, again.payload_offsets[0], 4) == struct.pack("<f", 2.0)
        region.seal(b"whole")
        seal = Seal(seal_path(Path(again.path)))
        assert seal.read() == b"whole"
        seal.close()
        assert " (deleted)" not in "".join(line for line in maps() if ready.path in line)
    finally:
        os.close(kept)


def test_a_file_that_has_gone_is_refused_also_if_it_was_mapped_before(prepare: Prepare, attach: Attach) -> None:
    ready = prepare()
    old = attach(ready)
    Path(ready.path).unlink()
    with pytest.raises(RegionError, match="cannot open region"):
        attach(ready, ITEMS, old)


def test_a_layout_of_another_plan_is_refused(prepare: Prepare, attach: Attach) -> None:
    ready = prepare()
    with pytest.raises(RegionError, match="laid out for 5 tensors, the plan has 1"):
        attach(ready, (tensor_item("w", (3, 4)),))


@pytest.mark.parametrize("offset", [-64, 1 << 40])
def test_a_place_outside_the_region_is_refused(prepare: Prepare, attach: Attach, offset: int) -> None:
    items: Plan = (tensor_item("w", (3, 4)),)
    ready = prepare(items)
    moved = RegionReady(PLAN_ID, 0, 1, ready.path, ready.region_bytes, (offset,), ready.byte_offset, 64)
    with pytest.raises(RegionError, match=f"w of 48 bytes at {offset} is outside {ready.path}"):
        attach(moved, items)


def test_a_tensor_that_would_reach_into_the_byte_entries_is_refused(prepare: Prepare, attach: Attach) -> None:
    items: Plan = (tensor_item("w", (3, 4)),)
    ready = prepare(items)
    last = ready.byte_offset - 48
    for offset, fits in ((last, True), (last + 1, False)):
        moved = RegionReady(
            PLAN_ID, 0, 1, ready.path, ready.region_bytes, (offset - last % 4,), last - last % 4 + 48, 64
        )
        if fits:
            attach(moved, items)
        else:
            with pytest.raises(RegionError, match="outside"):
                attach(moved, items)


def test_a_region_that_is_not_there_is_refused(directory: Path, prepare: Prepare, attach: Attach) -> None:
    ready = prepare()
    os.unlink(ready.path)
    with pytest.raises(RegionError, match="cannot open region"):
        attach(ready)


def test_a_region_smaller_than_said_is_refused_with_both_sizes(prepare: Prepare, attach: Attach) -> None:
    ready = prepare()
    os.truncate(ready.path, 4096)
    with pytest.raises(RegionError, match=f"has 4096 bytes, {ready.region_bytes} are needed"):
        attach(ready)


def test_a_region_that_others_may_read_is_refused(prepare: Prepare, attach: Attach) -> None:
    ready = prepare()
    os.chmod(ready.path, 0o644)
    with pytest.raises(RegionError, match="not a private file"):
        attach(ready)


def test_an_attachment_that_fails_leaves_the_old_one_usable(prepare: Prepare, attach: Attach) -> None:
    """The next save of the slot starts from the old one again."""
    first = prepare()
    old = attach(first)
    missing = prepare(slot=1)
    os.unlink(missing.path)
    with pytest.raises(RegionError):
        AttachedRegion(missing, ITEMS, old)
    region = attach(prepare(capacity=1 << 20, generation=2), ITEMS, old)
    region.targets[0].fill_(1.0)


def test_a_failing_attachment_leaks_nothing(prepare: Prepare) -> None:
    ready = prepare()
    before = descriptors()
    with pytest.raises(RegionError):
        AttachedRegion(ready, ())
    assert descriptors() == before


# ---------------------------------------------------------------- the end


def test_closing_unmaps_and_closes(prepare: Prepare) -> None:
    ready = prepare()
    before = descriptors()
    region = AttachedRegion(ready, ITEMS)
    assert mapped(ready.path)
    region.close()
    assert not mapped(ready.path)
    assert descriptors() == before
    assert region.targets == []


def test_closing_twice_closes_nothing_of_anybody_else(prepare: Prepare, directory: Path) -> None:
    before = descriptors()
    region = AttachedRegion(prepare(), ITEMS)
    count = descriptors() - before
    region.close()
    others = [os.open(directory, os.O_RDONLY) for _ in range(count)]  # they get the numbers that were let go of
    region.close()
    for fd in others:
        os.close(fd)
