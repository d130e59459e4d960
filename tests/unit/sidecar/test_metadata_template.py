"""A later save's ``.metadata`` out of an earlier one's: the same bytes that building it anew would give."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckpt_proto.errors import IncompleteCheckpoint
from ckpt_proto.shard_manifest import ManifestEntry, ShardManifest, StoredManifest
from ckpt_sidecar import metadata_template
from ckpt_sidecar.actions import Publish
from ckpt_sidecar.commit import publish_checkpoint, read_manifests
from ckpt_sidecar.metadata_template import MetadataTemplate, MetadataTemplates, plain_pickle
from testkit.plans import bytes_item, persist_attempt, save_key, shard_item, states_of_ranks, tensor_item

WORLD_SIZE = 3


def stored_of(order: Publish) -> list[StoredManifest]:
    return read_manifests(Path(order.directory) / f"step-{order.save.step}", order.save.save_id, order.world_size)


def later(manifests: Sequence[StoredManifest], seq: int) -> list[StoredManifest]:
    """The manifests of a later save of the same plan: other names, values of other lengths."""
    changed = []
    for stored in manifests:
        whole = stored.whole()
        entries, moved = [], 0
        for entry in whole.entries:
            if entry.item.is_framed:
                entries.append(replace(entry, crc32=(entry.crc32 + seq) % 2**32))
            else:
                entries.append(replace(entry, offset_bytes=entry.offset_bytes + moved, length_bytes=7**seq))
                moved += 7**seq - entry.length_bytes
        save = save_key(step=100 * seq, seq=seq * 1000)
        name = f"__{whole.rank}_{save.save_id}.distcp"
        changed.append(
            replace(whole, save=save, file_name=name, file_bytes=whole.file_bytes + 2**40, entries=tuple(entries))
        )
    return [StoredManifest.of(manifest) for manifest in changed]


@pytest.fixture
def manifests(tmp_path: Path) -> list[StoredManifest]:
    return stored_of(persist_attempt(tmp_path, states_of_ranks(WORLD_SIZE)))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[MetadataTemplate]:
    """Every template that is made."""
    made: list[MetadataTemplate] = []
    real = MetadataTemplate.of

    def of(shapes: object, whole: Sequence[ShardManifest]) -> MetadataTemplate | None:
        template = real(shapes, whole)  # type: ignore[arg-type]
        assert template is not None
        made.append(template)
        return template

    monkeypatch.setattr(MetadataTemplate, "of", of)
    return made


def anew(manifests: Sequence[StoredManifest], where: str) -> bytes:
    return plain_pickle([manifest.whole() for manifest in manifests], where)


def test_every_save_of_a_plan_is_filled_in_byte_for_byte(
    manifests: list[StoredManifest], made: list[MetadataTemplate]
) -> None:
    templates = MetadataTemplates()
    assert templates.pickled(manifests, "/a/step-5") == anew(manifests, "/a/step-5")
    for seq in range(1, 12):
        changed, where = later(manifests, seq), f"/b/größer \udcff/{'x' * 30 * seq}/step-{seq}"
        assert templates.pickled(changed, where) == anew(changed, where)
    assert len(made) == 1


def test_another_plan_gets_its_own(
    tmp_path: Path, manifests: list[StoredManifest], made: list[MetadataTemplate]
) -> None:
    templates = MetadataTemplates()
    others = stored_of(persist_attempt(tmp_path / "other", [{"a": torch.ones(3), "b": 1}, {"c": torch.ones(2)}]))
    for which in (manifests, others, others, manifests):
        assert templates.pickled(which, "/x") == anew(which, "/x")
    assert len(made) == 3


def test_a_rank_that_writes_nothing_has_no_name_in_it(made: list[MetadataTemplate]) -> None:
    full = ShardManifest(
        save_key(), 0, 2, "p", "zero", 8, "2", False, (ManifestEntry(tensor_item("a", (2,)), 0, 8, 1),)
    )
    empty = ShardManifest(save_key(), 1, 2, "p", "one", 0, "2", False, ())
    stored = [StoredManifest.of(full), StoredManifest.of(empty)]
    assert MetadataTemplates().pickled(stored, "/x") == anew(stored, "/x")
    assert b"one" not in anew(stored, "/x")


def test_values_that_look_like_holes_are_left_alone(made: list[MetadataTemplate]) -> None:
    items = [bytes_item("hole-0-where-"), tensor_item("X\x10\0\0\0hole-", (2,)), bytes_item("save")]
    entries = tuple(ManifestEntry(item, 2**62 + index, 2, 0) for index, item in enumerate(items))
    stored = [StoredManifest.of(ShardManifest(save_key(), 0, 1, "p", "hole-0-0-", 2**63 - 1, "2", False, entries))]
    templates = MetadataTemplates()
    for where in ("hole-0-save-", "/x"):
        assert templates.pickled(stored, where) == anew(stored, where)
    assert len(made) == 1


def test_what_does_not_add_up_is_refused_and_not_kept(manifests: list[StoredManifest]) -> None:
    templates = MetadataTemplates()
    half = shard_item("w", (0,), (2,), (5,))
    bad = StoredManifest.of(ShardManifest(save_key(), 0, 1, "p", "f", 8, "2", False, (ManifestEntry(half, 0, 8, 0),)))
    for _ in range(2):
        with pytest.raises(IncompleteCheckpoint, match="w has 2 of 5 elements"):
            templates.pickled([bad], "/x")
    assert templates.pickled(manifests, "/x") == anew(manifests, "/x")


def test_a_file_too_short_for_the_layout_is_refused_in_later_saves_too(manifests: list[StoredManifest]) -> None:
    templates = MetadataTemplates()
    templates.pickled(manifests, "/x")
    short = replace(manifests[0], file_bytes=1, byte_places=(0, 0) * (len(manifests[0].byte_places) // 2))
    with pytest.raises(IncompleteCheckpoint, match="behind the file's 1 bytes"):
        templates.pickled([short, *manifests[1:]], "/x")


def test_a_torch_that_pickles_otherwise_costs_time_and_not_the_commit(
    manifests: list[StoredManifest], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metadata_template, "_expected", lambda *_: [])
    with caplog.at_level(logging.WARNING):
        assert MetadataTemplates().pickled(manifests, "/x") == anew(manifests, "/x")
    assert "no template of .metadata can be made with this torch" in caplog.text


def test_two_saves_published_with_one_template_are_read_by_stock_pickle(tmp_path: Path) -> None:
    templates = MetadataTemplates()
    for step in (5, 6):
        order = persist_attempt(tmp_path, states_of_ranks(WORLD_SIZE), save_key(step=step, seq=step))
        publish_checkpoint(order, templates=templates)
        content = (tmp_path / f"step-{step}" / ".metadata").read_bytes()
        assert pickle.loads(content).storage_meta.save_id == order.save.save_id
        assert content == anew(stored_of(order), str(tmp_path / f"step-{step}"))
