"""``proto/PROTOCOL.md`` says what the code says: its diagrams, its messages, its numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckpt_proto.codec import MAX_MESSAGE_BYTES
from ckpt_proto.lifecycles import LIFECYCLES, diagram
from ckpt_proto.messages import Message
from testkit.protocol_values import MESSAGE_TYPES

TEXT = (Path(__file__).parents[3] / "proto" / "PROTOCOL.md").read_text()
BEGIN, END = "<!-- lifecycles: begin -->\n", "<!-- lifecycles: end -->"
SEQUENCES = re.findall(r"```mermaid\nsequenceDiagram\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_state_diagrams_are_those_of_the_tables() -> None:
    generated = "\n".join(f"### {name}\n\n{diagram(name)}\n" for name in LIFECYCLES)
    assert TEXT.split(BEGIN)[1].split(END)[0] == generated, (
        "run python -m ckpt_proto.lifecycles and put its output there"
    )


@pytest.mark.parametrize("cls", MESSAGE_TYPES, ids=lambda cls: cls.__name__)
def test_every_message_has_a_row_in_a_table(cls: type[Message]) -> None:
    assert Message.TYPES[cls.__name__] is cls
    assert re.search(rf"^\| {cls.__name__} \|", TEXT, flags=re.MULTILINE)


def test_the_tables_name_no_message_that_does_not_exist() -> None:
    messages = TEXT.split("\n## Messages\n")[1].split("\n## ")[0]
    named = re.findall(r"^\| ([A-Za-z]+) \|", messages, flags=re.MULTILINE)
    assert set(named) - {"message"} == set(Message.TYPES)


def test_only_messages_are_sent_in_the_sequence_diagrams() -> None:
    sent = re.findall(r"->>\w+: (\w+)", "\n".join(SEQUENCES))
    assert len(SEQUENCES) == 11
    assert set(sent) <= set(Message.TYPES)


def test_every_sequence_uses_only_its_participants() -> None:
    for sequence in SEQUENCES:
        participants = set(re.findall(r"participant (\w+) as", sequence))
        arrows = re.findall(r"^\s*(\w+)--?>>(\w+):", sequence, flags=re.MULTILINE)
        assert arrows
        assert {name for arrow in arrows for name in arrow} <= participants


def test_the_largest_frame_is_as_documented() -> None:
    assert f"at most {MAX_MESSAGE_BYTES >> 20} MiB" in TEXT
