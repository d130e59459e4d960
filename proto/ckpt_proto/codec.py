"""Message <-> bytes. The only importer of msgpack.

A frame is one msgpack array ``[protocol version, type name, {field: value}]``. Records inside a message (plan items,
failure reports) are arrays of their fields in order, because a plan has thousands of them. Unknown fields are ignored
(a newer minor sender may add them), missing fields must have a default; unknown types, other versions, wrong types of
value and oversized frames are refused by name. Nothing received is trusted: every value is checked against the
declared type.
"""

from __future__ import annotations

import dataclasses
import operator
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import msgpack

from ckpt_proto.errors import CheckpointError, LocalProtocolError, RemoteProtocolError
from ckpt_proto.gc_pause import gc_paused
from ckpt_proto.messages import Message
from ckpt_proto.version import PROTOCOL_VERSION

MAX_MESSAGE_BYTES = 512 << 20
"""Largest frame that is sent or accepted: the plans of 1,024 ranks x 2,000 items are about 300 MiB."""

LARGE_BYTES = 64 << 10
"""Frames with thousands of objects in them: the plan of a rank, or of all."""

_MAX_RULE_CHARS = 400

_SCALARS = (bool, int, float, str, bytes)
_NONE = type(None)

Decoder = Callable[[Any, str], Any]
Record = TypeVar("Record")


def encode(message: Message, *, version: int = PROTOCOL_VERSION) -> bytes:
    """The frame of ``message``.

    Raises:
        LocalProtocolError: the frame would be larger than :data:`MAX_MESSAGE_BYTES`, or a value has no form in msgpack:
            a number of more than 64 bits, text that is no Unicode.
    """
    kind: type = type(message)
    fields = {name: getattr(message, name) for name in _field_names(kind)}
    try:
        frame: bytes = msgpack.packb([version, type(message).__name__, fields], use_bin_type=True, default=_as_array)
    except (OverflowError, ValueError, TypeError) as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be sent: {error}") from error
    if len(frame) > MAX_MESSAGE_BYTES:
        raise LocalProtocolError(
            f"{type(message).__name__} has {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} can be sent"
        )
    return frame


def decode(frame: bytes | memoryview) -> Message:
    """The message in ``frame``.

    Raises:
        RemoteProtocolError: the frame is too large, no msgpack, of another protocol version, of an unknown type, or
            one of its fields is missing, of a wrong type or out of bounds. The error names which.
    """
    if len(frame) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a frame of {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} are accepted")
    if len(frame) > LARGE_BYTES:
        with gc_paused():
            return _decode(frame)
    return _decode(frame)


def _decode(frame: bytes | memoryview) -> Message:
    version, name, fields = _envelope(frame)
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise RemoteProtocolError(
            f"the other side speaks protocol version {_shown(version)}, this side {PROTOCOL_VERSION}: "
            "install the same ckpt-sidecar release for trainer and sidecar"
        )
    cls = Message.TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise RemoteProtocolError(f"unknown message type {_shown(name)}")
    if not isinstance(fields, dict):
        raise RemoteProtocolError(f"{name}: fields are {type(fields).__name__}, expected a map")
    message: Message = _build(cls, fields, name)
    return message


def pack_records(records: tuple[Any, ...]) -> bytes:
    """Records as bytes for a field of bytes: what is in it is looked at by who needs it."""
    packed: bytes = msgpack.packb(records, use_bin_type=True, default=_as_array)
    return packed


def unpack_records(kind: type[Record], packed: bytes) -> tuple[Record, ...]:
    """The records of one class in a field of bytes, validated like those of a message.

    Raises:
        RemoteProtocolError: they are none.
    """
    try:
        with gc_paused():
            values = msgpack.unpackb(packed, raw=False, strict_map_key=True)
            records: tuple[Record, ...] = _tuple_decoder(kind)(values, kind.__name__)
    except RemoteProtocolError:
        raise
    except Exception as error:  # as in an envelope
        raise RemoteProtocolError(f"{len(packed)} bytes are no packed {kind.__name__}s: {error}") from error
    return records


def _shown(value: Any) -> str:
    """A received value for an error text: short, and never the repr of something nested."""
    if isinstance(value, (str, bytes)):
        return repr(value[:80])
    return repr(value) if isinstance(value, (int, float, type(None))) else type(value).__name__


def _shortened(text: str) -> str:
    """A rule's error text may repeat the value that broke it, which is as long as its sender liked."""
    return text if len(text) <= _MAX_RULE_CHARS else f"{text[:_MAX_RULE_CHARS]}... ({len(text)} characters)"


def _envelope(frame: bytes | memoryview) -> tuple[Any, Any, Any]:
    try:
        envelope = msgpack.unpackb(frame, raw=False, strict_map_key=True)
    except Exception as error:  # msgpack raises a dozen types, ValueError to StackError, on hostile input
        raise RemoteProtocolError(f"a frame of {len(frame)} bytes is not msgpack: {error}") from error
    if not isinstance(envelope, list) or len(envelope) != 3:
        raise RemoteProtocolError("a frame is not an array of version, type and fields")
    return envelope[0], envelope[1], envelope[2]


def _as_array(value: Any) -> tuple[Any, ...]:
    """A record, for msgpack, which packs everything else that a message may hold by itself."""
    kind: type = type(value)
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"a {kind.__name__} has no form in a message")
    return _values_of(kind)(value)


@cache
def _values_of(cls: type) -> Callable[[Any], tuple[Any, ...]]:
    names = _field_names(cls)
    if len(names) < 2:  # attrgetter gives one value without a tuple
        return lambda record: tuple(getattr(record, name) for name in names)
    return operator.attrgetter(*names)


@cache
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


@cache
def _field_decoders(cls: type) -> tuple[tuple[dataclasses.Field[Any], Decoder], ...]:
    hints = typing.get_type_hints(cls)
    return tuple((field, _decoder(hints[field.name])) for field in dataclasses.fields(cls))


def _build(cls: type, fields: dict[str, Any], where: str) -> Any:
    values = {}
    for field, decoder in _field_decoders(cls):
        if field.name in fields:
            values[field.name] = decoder(fields[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING:
            raise RemoteProtocolError(f"{where}: field {field.name!r} is missing")
    try:
        return cls(**values)
    except (CheckpointError, ValueError) as error:
        raise RemoteProtocolError(f"{where}: {_shortened(str(error))}") from error


@cache
def _decoder(hint: Any) -> Decoder:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _union_decoder(typing.get_args(hint))
    if origin is tuple:
        item, ellipsis = typing.get_args(hint)
        if ellipsis is not Ellipsis:
            raise LocalProtocolError(f"the codec has no form for {hint}")
        return _tuple_decoder(item)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _record_decoder(hint)
    if hint in _SCALARS:
        return _scalar_decoder(hint)
    raise LocalProtocolError(f"the codec has no form for {hint}")


def _scalar_decoder(expected: type) -> Decoder:
    def decode_scalar(value: Any, where: str) -> Any:
        if type(value) is expected:
            return value
        if expected is float and type(value) is int:
            return float(value)
        raise RemoteProtocolError(f"{where}: {type(value).__name__}, expected {expected.__name__}")

    return decode_scalar


def _union_decoder(members: tuple[Any, ...]) -> Decoder:
    decoders = [(member, _decoder(member)) for member in members if member is not type(None)]

    def decode_union(value: Any, where: str) -> Any:
        if value is None and type(None) in members:
            return None
        for member, decoder in decoders:
            if len(decoders) == 1 or type(value) is member:
                return decoder(value, where)
        raise RemoteProtocolError(f"{where}: {type(value).__name__} is none of the allowed types")

    return decode_union


def _tuple_decoder(hint: Any) -> Decoder:
    item, plain = _decoder(hint), frozenset(_members(hint))

    def decode_tuple(value: Any, where: str) -> Any:
        if type(value) is not list:
            raise RemoteProtocolError(f"{where}: {type(value).__name__}, expected an array")
        if plain >= set(map(type, value)):
            return tuple(value)  # scalars of the right types, looked at by C
        return tuple([item(element, where) for element in value])

    return decode_tuple


def _record_decoder(cls: type) -> Decoder:
    """Most records that arrive have all their fields, of the right types: those are recognised by the types of their
    values at once and made without looking at each field. All others, and errors, take the long way."""
    hints = typing.get_type_hints(cls)
    fields = tuple(hints[name] for name in _field_names(cls))
    known: dict[tuple[type, ...], tuple[tuple[int, Decoder], ...]] = {}

    def decode_record(value: Any, where: str) -> Any:
        if type(value) is not list:
            raise RemoteProtocolError(f"{where}: {type(value).__name__}, expected an array of {cls.__name__}")
        if len(value) == len(fields):
            signature = tuple(map(type, value))
            nested = known.get(signature)
            if nested is None and (nested := _nested(fields, signature)) is not None:
                known[signature] = nested  # only right ones are kept, of which there are few
            if nested is not None:
                try:
                    values = list(value)
                    for index, decoder in nested:
                        values[index] = decoder(value[index], where)
                    return cls(*values)
                except (CheckpointError, ValueError):
                    pass  # the long way says which field it is
        return _build(cls, dict(zip(_field_names(cls), value, strict=False)), where)

    return decode_record


def _nested(hints: tuple[Any, ...], signature: tuple[type, ...]) -> tuple[tuple[int, Decoder], ...] | None:
    """Which of the values have something in them to decode; None if one of them is of no right type."""
    found = []
    for index, (hint, kind) in enumerate(zip(hints, signature, strict=True)):
        members = _members(hint)
        if kind in members:
            continue
        arrays = [member for member in members if kind is list and member not in _SCALARS and member is not _NONE]
        if len(arrays) != 1:
            return None
        found.append((index, _decoder(arrays[0])))
    return tuple(found)


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
