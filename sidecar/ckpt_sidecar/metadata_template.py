"""The pickle of a plan's ``.metadata`` with holes, so that a later save of the plan only fills them.

Between two saves of one plan only names, the attempt, and the places of byte entries differ. Building and pickling the
metadata of 1,024 ranks with 1,000 items takes half a minute of CPU, filling the holes a second.

The holes are found, not computed: the metadata is pickled once with values in them that occur nowhere else, and is
split where those are. Protocol 3 has no frames, whose lengths would have to be mended; every reader of DCP takes it.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import re
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ckpt_proto.errors import IncompleteCheckpoint, LocalProtocolError, RemoteProtocolError
from ckpt_proto.gc_pause import gc_paused
from ckpt_proto.shard_manifest import ShardManifest, StoredManifest
from ckpt_sidecar.metadata_build import StoredFile, build_metadata, check_items

PICKLE_PROTOCOL = 3
_DIGEST_BYTES = 16
_WHERE, _SAVE = "where", "save"

Hole = Callable[[Sequence[StoredManifest], str], bytes]
"""What belongs into a hole, from the manifests of a save and where its checkpoint is."""

logger = logging.getLogger(__name__)


class MetadataTemplates:
    """The template of the plan that was committed last. Used by one thread."""

    def __init__(self) -> None:
        self._last: MetadataTemplate | None = None

    def pickled(self, manifests: Sequence[StoredManifest], where: str) -> bytes:
        """The content of ``.metadata`` for the manifests of all ranks, in their order, of the checkpoint at ``where``.

        Raises:
            IncompleteCheckpoint: one is no manifest, or the entries of all do not add up to the whole state.
        """
        shapes = tuple(map(_Shape.of, manifests))
        if self._last is not None and self._last.fits(shapes, manifests):
            return self._last.fill(manifests, where)
        self._last = None  # before the next one is made: each is as large as .metadata
        with gc_paused():
            whole = [_whole(manifest) for manifest in manifests]
            check_items(entry.item for manifest in whole for entry in manifest.entries)
            self._last = MetadataTemplate.of(shapes, whole)
            return self._last.fill(manifests, where) if self._last is not None else plain_pickle(whole, where)


def plain_pickle(manifests: Sequence[ShardManifest], where: str) -> bytes:
    """The content of ``.metadata`` made without a template."""
    files = [StoredFile.of(manifest) for manifest in manifests]
    return pickle.dumps(build_metadata(files, where, manifests[0].save.save_id), protocol=PICKLE_PROTOCOL)


def _whole(manifest: StoredManifest) -> ShardManifest:
    try:
        return manifest.whole()
    except (RemoteProtocolError, LocalProtocolError) as error:
        raise IncompleteCheckpoint(f"the manifest of {manifest.file_name} is no shard manifest: {error}") from error


@dataclass(frozen=True)
class _Shape:
    """What must be as it was for a rank's part of a template to hold."""

    layout_digest: bytes
    entry_count: int
    byte_count: int

    @classmethod
    def of(cls, manifest: StoredManifest) -> _Shape:
        digest = hashlib.blake2b(manifest.layout, digest_size=_DIGEST_BYTES).digest()
        return cls(digest, manifest.entry_count, len(manifest.byte_places) // 2)


class MetadataTemplate:
    """The pickle of one plan: ``fixed`` parts, and after each but the last a hole to be filled by ``holes``."""

    def __init__(
        self,
        shapes: tuple[_Shape, ...],
        ends: tuple[int, ...],
        fixed: list[memoryview],
        holes: list[Hole],
    ) -> None:
        self._shapes = shapes
        self._ends = ends
        self._fixed = fixed
        self._holes = holes

    @classmethod
    def of(cls, shapes: tuple[_Shape, ...], manifests: Sequence[ShardManifest]) -> MetadataTemplate | None:
        """Made of the manifests of one save; None if this torch pickles something else than what is expected here.

        Raises:
            IncompleteCheckpoint: an item names a dtype, layout or memory format that torch does not have.
        """
        marks = _Marks(secrets.token_hex(16), secrets.randbelow(1 << 30) + (1 << 30))
        files = [_with_holes(rank, StoredFile.of(manifest), marks) for rank, manifest in enumerate(manifests)]
        metadata = build_metadata(files, marks.text(_WHERE), marks.text(_SAVE))
        content = pickle.dumps(metadata, protocol=PICKLE_PROTOCOL)
        logger.debug("a template of %d bytes for %d ranks", len(content), len(manifests))
        fixed, names = _split(content, marks)
        if sorted(names) != _expected(manifests, marks):
            logger.warning("no template of .metadata can be made with this torch: every commit builds it anew")
            return None
        framed_ends = tuple(
            max((e.offset_bytes + e.length_bytes for e in manifest.entries if e.item.is_framed), default=0)
            for manifest in manifests
        )
        return cls(shapes, framed_ends, fixed, [_hole(name, marks) for name in names])

    def fits(self, shapes: tuple[_Shape, ...], manifests: Sequence[StoredManifest]) -> bool:
        """Whether it is the template of these manifests too."""
        return shapes == self._shapes and all(
            end <= manifest.file_bytes for end, manifest in zip(self._ends, manifests, strict=True)
        )

    def fill(self, manifests: Sequence[StoredManifest], where: str) -> bytes:
        """The pickle of the metadata of a save."""
        parts: list[bytes | memoryview] = [self._fixed[0]]
        for hole, after in zip(self._holes, self._fixed[1:], strict=True):
            parts += (hole(manifests, where), after)
        return b"".join(parts)


@dataclass
class _Marks:
    """Values that occur nowhere else: texts with ``mark`` in them, and numbers whose upper half is ``high`` and whose
    lower half counts the places (rank, index among its byte entries, offset or length) in ``numbers``."""

    mark: str
    high: int

    def __post_init__(self) -> None:
        self.numbers: list[tuple[int, int]] = []

    def text(self, name: str) -> str:
        return f"hole-{self.mark}-{name}-"

    def number(self, rank: int, place: int) -> int:
        self.numbers.append((rank, place))
        return self.high << 32 | (len(self.numbers) - 1)

    def pattern(self) -> re.Pattern[bytes]:
        text = b"X(....)hole-" + self.mark.encode() + b"-([a-z0-9]+)-"
        number = b"\x8a\x08(....)" + re.escape(struct.pack("<I", self.high))
        return re.compile(text + b"|" + number, re.DOTALL)


def _with_holes(rank: int, file: StoredFile, marks: _Marks) -> StoredFile:
    count = 0
    places = []
    for item, place in zip(file.items, file.places, strict=True):
        if not item.is_framed:
            place = (marks.number(rank, 2 * count), marks.number(rank, 2 * count + 1))  # noqa: PLW2901
            count += 1
        places.append(place)
    return replace(file, name=marks.text(str(rank)), places=places)


def _split(content: bytes, marks: _Marks) -> tuple[list[memoryview], list[tuple[str, int]]]:
    """The parts of ``content`` between the holes, and what each hole is for: a text by its name, or the number in
    ``marks.numbers``."""
    view = memoryview(content)
    fixed: list[memoryview] = []
    names: list[tuple[str, int]] = []
    position = 0
    for found in marks.pattern().finditer(content):
        fixed.append(view[position : found.start()])
        text, number = found.group(2), found.group(3)
        names.append((text.decode(), -1) if text else ("", struct.unpack("<I", number)[0]))
        position = found.end()
    fixed.append(view[position:])
    return fixed, names


def _expected(manifests: Sequence[ShardManifest], marks: _Marks) -> list[tuple[str, int]]:
    texts = [_WHERE, _SAVE, *(str(rank) for rank, manifest in enumerate(manifests) if manifest.entries)]
    return sorted([*((text, -1) for text in texts), *(("", index) for index in range(len(marks.numbers)))])


def _hole(name: tuple[str, int], marks: _Marks) -> Hole:
    text, number = name
    return _text_hole(text) if text else _number_hole(*marks.numbers[number])


def _text_hole(name: str) -> Hole:
    if name == _WHERE:
        return lambda manifests, where: _pickled_text(where)
    if name == _SAVE:
        return lambda manifests, where: _pickled_text(manifests[0].save.save_id)
    return lambda manifests, where: _pickled_text(manifests[int(name)].file_name)


def _number_hole(rank: int, place: int) -> Hole:
    return lambda manifests, where: _pickled_number(manifests[rank].byte_places[place])


def _pickled_text(text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(content)) + content


def _pickled_number(number: int) -> bytes:
    return pickle.dumps(number, protocol=PICKLE_PROTOCOL)[2:-1]  # without the header and the full stop
