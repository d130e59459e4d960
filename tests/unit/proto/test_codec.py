"""The codec: what is sent arrives, and nothing that arrives can do worse than be refused."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_proto import codec
from ckpt_proto.codec import decode, encode
from ckpt_proto.errors import LocalProtocolError, RemoteProtocolError
from ckpt_proto.messages import (
    Aborted,
    AskRestoreStep,
    DecideCommit,
    Heartbeat,
    Hello,
    Message,
    ProposePlan,
    Refused,
    ReportSkip,
    RestoreStep,
)
from ckpt_proto.version import PROTOCOL_VERSION
from testkit.protocol_values import EXAMPLES, FAILURE, MESSAGE_TYPES, REPEATABLE, SAVE, TENSOR, any_message, instances

WRONG_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**64 - 1,
    1.5,
    float("nan"),
    "",
    "text",
    b"bytes",
    [],
    [[]],
    [None],
    [[[["deep"]]]],
    {},
    {"key": "value"},
    msgpack.ExtType(5, b"x"),
    msgpack.Timestamp(1, 2),
)


def name_of(value: object) -> str:
    """Readable ids of parametrised cases."""
    if isinstance(value, Message):
        return type(value).__name__
    return value.__name__ if isinstance(value, type) else repr(value)


def frame_with(message: Message, **changes: Any) -> bytes:
    """The frame of ``message`` with raw values put in place of fields; a change to ``...`` leaves the field out."""
    version, name, fields = msgpack.unpackb(encode(message))
    fields.update(changes)
    return msgpack.packb([version, name, {key: value for key, value in fields.items() if value is not ...}])


def is_refused(frame: bytes) -> bool:
    """Whether a frame is refused; any error but RemoteProtocolError escapes and fails the test."""
    try:
        decode(frame)
    except RemoteProtocolError:
        return True
    return False


# ---------------------------------------------------------------- what is sent arrives


def test_there_is_an_example_of_every_message_type() -> None:
    assert {cls.__name__: cls for cls in MESSAGE_TYPES} == Message.TYPES


@pytest.mark.parametrize("message", EXAMPLES, ids=name_of)
def test_every_example_comes_back_equal(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("cls", MESSAGE_TYPES, ids=name_of)
@REPEATABLE
@given(data=st.data())
def test_every_valid_message_comes_back_equal(cls: type[Message], data: st.DataObject) -> None:
    message = data.draw(instances(cls))
    assert decode(encode(message)) == message


@REPEATABLE
@given(message=any_message())
def test_a_frame_may_lie_in_a_memoryview(message: Message) -> None:
    assert decode(memoryview(encode(message))) == message


def test_an_integer_is_taken_for_a_float_but_arrives_as_a_float() -> None:
    hello = decode(frame_with(EXAMPLES[0], stage_timeout_s=600))
    assert isinstance(hello, Hello)
    assert type(hello.stage_timeout_s) is float


def test_messages_arrive_hashable_and_with_tuples_inside() -> None:
    proposal = decode(encode(ProposePlan(SAVE, (TENSOR,), (b"12345678",), ())))
    assert isinstance(proposal, ProposePlan)
    assert hash(proposal) == hash(ProposePlan(SAVE, (TENSOR,), (b"12345678",), ()))


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize("version", [[1], {"major": 1}, [[]]], ids=repr)
def test_a_version_that_is_no_number_is_refused(version: Any) -> None:
    assert is_refused(msgpack.packb([version, "Heartbeat", {}]))


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 99, -1, "1", None])
def test_another_protocol_version_is_refused_and_both_are_named(version: Any) -> None:
    frame = msgpack.packb([version, "Heartbeat", {}])
    with pytest.raises(RemoteProtocolError) as raised:
        decode(frame)
    assert f"version {version!r}" in str(raised.value)
    assert f"this side {PROTOCOL_VERSION}" in str(raised.value)


@pytest.mark.parametrize("version", [True, 1.0])
def test_a_version_that_only_compares_equal_is_refused(version: Any) -> None:
    assert is_refused(msgpack.packb([version, "Heartbeat", {}]))


def test_a_frame_can_be_encoded_as_another_version_for_tests_of_the_refusal() -> None:
    with pytest.raises(RemoteProtocolError, match="version 7"):
        decode(encode(Heartbeat(), version=7))


# ---------------------------------------------------------------- fields


@pytest.mark.parametrize("message", EXAMPLES, ids=name_of)
def test_unknown_fields_of_a_newer_sender_are_ignored(message: Message) -> None:
    assert decode(frame_with(message, brand_new_field=[1, {"a": None}])) == message


def test_unknown_fields_at_the_end_of_a_record_are_ignored() -> None:
    key = [SAVE.session, SAVE.seq, SAVE.step, "brand new"]
    assert decode(frame_with(ReportSkip(SAVE, "full"), save=key)) == ReportSkip(SAVE, "full")


@pytest.mark.parametrize("message", EXAMPLES, ids=name_of)
def test_a_missing_field_is_named_or_takes_its_default(message: Message) -> None:
    for field in dataclasses.fields(message):
        frame = frame_with(message, **{field.name: ...})
        if field.default is not dataclasses.MISSING:
            assert getattr(decode(frame), field.name) == field.default
            continue
        with pytest.raises(RemoteProtocolError, match=f"{type(message).__name__}: field '{field.name}' is missing"):
            decode(frame)


def test_a_record_that_is_too_short_is_refused_and_the_missing_field_is_named() -> None:
    with pytest.raises(RemoteProtocolError, match=r"ReportSkip\.save: field 'step' is missing"):
        decode(frame_with(ReportSkip(SAVE, "full"), save=[SAVE.session, SAVE.seq]))


def test_a_short_record_takes_the_defaults_of_its_last_fields() -> None:
    refused = decode(frame_with(Refused(FAILURE), failure=["StorageError", "no room"]))
    assert isinstance(refused, Refused)
    assert (refused.failure.hint, refused.failure.rank, refused.failure.node) == ("", -1, "")


@pytest.mark.parametrize("message", EXAMPLES, ids=name_of)
def test_a_wrong_value_is_refused_or_makes_a_valid_message(message: Message) -> None:
    for name, hint in hints_of(message).items():
        for wrong in WRONG_VALUES:
            frame = frame_with(message, **{name: wrong})
            if not is_refused(frame):
                assert is_of_hint(getattr(decode(frame), name), hint)


def hints_of(message: Message) -> dict[str, Any]:
    """The declared type of every field."""
    hints = typing.get_type_hints(type(message))
    return {field.name: hints[field.name] for field in dataclasses.fields(message)}


def is_of_hint(value: Any, hint: Any) -> bool:
    """Whether a scalar has exactly the declared type; containers were built by the codec from checked values."""
    members = typing.get_args(hint) or (hint,)
    return isinstance(value, tuple) or dataclasses.is_dataclass(value) or type(value) in members


@pytest.mark.parametrize("message", EXAMPLES, ids=name_of)
def test_a_bool_is_no_int(message: Message) -> None:
    for name in [name for name, hint in hints_of(message).items() if hint is int]:
        with pytest.raises(RemoteProtocolError, match=rf"{name}: bool, expected int"):
            decode(frame_with(message, **{name: True}))


def test_a_bool_is_no_int_inside_a_tuple_or_a_record() -> None:
    submit = next(example for example in EXAMPLES if type(example).__name__ == "SubmitShard")
    assert is_refused(frame_with(submit, byte_lengths=[True]))
    assert is_refused(frame_with(submit, save=["9f3ac1d2", True, 300]))
    assert is_refused(frame_with(RestoreStep(0, 1), step=True))


def test_an_int_is_no_bool() -> None:
    assert is_refused(frame_with(DecideCommit(SAVE, True), accept=1))


def test_text_and_bytes_are_not_mixed_up() -> None:
    assert is_refused(frame_with(ReportSkip(SAVE, "x"), reason=b"x"))
    assert is_refused(frame_with(ProposePlan(SAVE, (), ()), byte_digests=["12345678"]))


def test_a_field_that_breaks_a_rule_of_its_class_is_refused_with_the_rule() -> None:
    with pytest.raises(RemoteProtocolError, match="rank 2 is outside 0 .. 1"):
        decode(frame_with(EXAMPLES[0], rank=2))
    with pytest.raises(RemoteProtocolError, match="eight hexadecimal digits"):
        decode(frame_with(ReportSkip(SAVE, "x"), save=["../../etc", 0, 0]))


def test_an_unknown_kind_of_plan_item_is_refused() -> None:
    assert is_refused(frame_with(ProposePlan(SAVE, (), ()), items=[["fqn", "sparse"]]))


# ---------------------------------------------------------------- frames that are no messages


@pytest.mark.parametrize("name", ["Message", "hello", "", "SaveKey", "Hello\0", None, 3, b"Hello", ["Hello"], {"a": 1}])
def test_an_unknown_type_is_refused(name: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="unknown message type"):
        decode(msgpack.packb([PROTOCOL_VERSION, name, {}]))


@pytest.mark.parametrize("fields", [None, [], "x", 1])
def test_fields_that_are_no_map_are_refused(fields: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="expected a map"):
        decode(msgpack.packb([PROTOCOL_VERSION, "Heartbeat", fields]))


@pytest.mark.parametrize("envelope", [None, 1, "x", [], [1], [1, "Heartbeat"], [1, "Heartbeat", {}, {}], {"v": 1}])
def test_an_envelope_of_another_shape_is_refused(envelope: Any) -> None:
    assert is_refused(msgpack.packb(envelope))


def test_a_map_with_keys_that_are_no_text_is_refused() -> None:
    assert is_refused(msgpack.packb([PROTOCOL_VERSION, "Heartbeat", {1: 2}]))


def test_text_that_is_no_utf8_is_refused() -> None:
    good = encode(ReportSkip(SAVE, "MARK"))
    assert is_refused(good.replace(b"MARK", b"\xff\xfe\xfd\xfc"))


@pytest.mark.parametrize("message", EXAMPLES, ids=name_of)
def test_every_truncated_frame_is_refused(message: Message) -> None:
    frame = encode(message)
    assert all(is_refused(frame[:length]) for length in range(len(frame)))


@pytest.mark.parametrize("message", EXAMPLES, ids=name_of)
def test_bytes_behind_a_frame_are_refused(message: Message) -> None:
    assert is_refused(encode(message) + b"\xc0")


@REPEATABLE
@given(frame=st.binary(max_size=200))
def test_random_bytes_are_refused(frame: bytes) -> None:
    assert is_refused(frame)


@REPEATABLE
@given(message=any_message(), position=st.integers(0, 2**16), value=st.integers(0, 255))
def test_a_changed_byte_makes_a_valid_message_or_is_refused(message: Message, position: int, value: int) -> None:
    frame = bytearray(encode(message))
    frame[position % len(frame)] = value
    is_refused(bytes(frame))


_GARBAGE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@REPEATABLE
@given(message=any_message(), data=st.data())
def test_nested_garbage_in_a_field_makes_a_valid_message_or_is_refused(message: Message, data: st.DataObject) -> None:
    names = [field.name for field in dataclasses.fields(message)]
    if names:
        is_refused(frame_with(message, **{data.draw(st.sampled_from(names)): data.draw(_GARBAGE)}))


@REPEATABLE
@given(version=_GARBAGE, name=_GARBAGE, fields=_GARBAGE)
def test_garbage_in_the_envelope_is_refused(version: Any, name: Any, fields: Any) -> None:
    assert is_refused(msgpack.packb([version, name, fields]))


@pytest.mark.parametrize("depth", [10, 500, 1_000, 1_020, 2_000, 100_000])
@pytest.mark.parametrize("place", ["version", "type", "fields", "field", "record"])
def test_deep_nesting_is_refused_wherever_it_is(depth: int, place: str) -> None:
    deep = b"\x91" * depth + b"\x90"
    frame = {
        "version": b"\x93" + deep + b"\xa9Heartbeat\x80",
        "type": b"\x93\x01" + deep + b"\x80",
        "fields": b"\x93\x01\xa9Heartbeat" + deep,
        "field": b"\x93\x01\xaeAskRestoreStep\x81\xa3ask" + deep,
        "record": b"\x93\x01\xa7Refused\x81\xa7failure" + deep,
    }[place]
    assert is_refused(frame)


def test_a_refusal_does_not_repeat_a_huge_value() -> None:
    huge = "x" * 100_000
    for frame in (
        msgpack.packb([PROTOCOL_VERSION, huge, {}]),
        msgpack.packb([huge, "Heartbeat", {}]),
        frame_with(EXAMPLES[0], directory=huge),
        frame_with(ProposePlan(SAVE, (), ()), items=[[huge, "bytes", None, [1]]]),
        frame_with(ProposePlan(SAVE, (), ()), items=[["x", huge]]),
    ):
        with pytest.raises(RemoteProtocolError) as raised:
            decode(frame)
        assert len(str(raised.value)) < 1_000


# ---------------------------------------------------------------- bounds


def test_an_oversized_frame_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode(AskRestoreStep(1))
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", len(frame) - 1)
    with pytest.raises(RemoteProtocolError, match=f"{len(frame)} bytes; at most {len(frame) - 1}"):
        decode(frame)


def test_an_oversized_message_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 20)
    with pytest.raises(LocalProtocolError, match="AskRestoreStep has .* at most 20"):
        encode(AskRestoreStep(1))


def test_a_frame_of_exactly_the_largest_size_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode(AskRestoreStep(1))
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", len(frame))
    assert decode(encode(AskRestoreStep(1))) == AskRestoreStep(1)


def test_a_length_that_promises_more_than_there_is_is_refused() -> None:
    assert is_refused(b"\xdd\xff\xff\xff\xff")
    assert is_refused(b"\x93\x01\xdb\xff\xff\xff\xff")
    assert is_refused(b"\x93\x01\xa9Heartbeat\xdf\xff\xff\xff\xff")


@pytest.mark.parametrize(
    "message",
    [
        AskRestoreStep(2**64),
        AskRestoreStep(-(2**63) - 1),
        ReportSkip(SAVE, "file \udcff"),
        Aborted(SAVE, ("no record",)),  # type: ignore[arg-type]
    ],
    ids=["int too large", "int too small", "no unicode text", "wrong type that msgpack can pack"],
)
def test_what_cannot_be_sent_is_this_sides_fault_or_refused_by_the_other(message: Message) -> None:
    try:
        frame = encode(message)
    except LocalProtocolError:
        return
    assert is_refused(frame)
