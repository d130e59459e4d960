"""The bytes of protocol version 1, one frame of every message, kept in ``golden/messages.hex``.

A difference means that a sidecar and a trainer of different releases may misunderstand each other although both say
version 1, or that shard manifests on storage can no longer be read: raise ``PROTOCOL_VERSION`` or take the change
back. After a wanted change, ``python tests/contract/test_codec_golden.py`` writes the table anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckpt_proto.codec import decode, encode
from ckpt_proto.messages import Message
from testkit.protocol_values import EXAMPLES

TABLE = Path(__file__).parent / "golden" / "messages.hex"
BYTES_PER_LINE = 32
BY_NAME = {type(message).__name__: message for message in EXAMPLES}


def read_table() -> dict[str, bytes]:
    """``name:`` on a line of its own, then the frame in hexadecimal lines."""
    parts = re.split(r"^(\w+):$", TABLE.read_text(), flags=re.MULTILINE)
    return {name: bytes.fromhex(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def table_of(messages: tuple[Message, ...]) -> str:
    """The table as text."""
    lines: list[str] = []
    for message in messages:
        frame = encode(message)
        lines.append(f"{type(message).__name__}:")
        lines += [frame[at : at + BYTES_PER_LINE].hex() for at in range(0, len(frame), BYTES_PER_LINE)]
    return "\n".join([*lines, ""])


def test_the_table_has_every_message_type() -> None:
    assert set(read_table()) == set(Message.TYPES)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_message_is_encoded_to_exactly_these_bytes(name: str) -> None:
    assert encode(BY_NAME[name]).hex() == read_table()[name].hex()


@pytest.mark.parametrize("name", BY_NAME)
def test_these_bytes_are_understood(name: str) -> None:
    assert decode(read_table()[name]) == BY_NAME[name]


if __name__ == "__main__":
    TABLE.write_text(table_of(EXAMPLES))
