"""What carries messages in the simulation: connections of ranks to their sidecar, links between sidecars."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt_proto.messages import Message


@dataclass
class Connection:
    """A rank's connection: in order, both ways, as slow as it likes. ``peer`` is the sidecar's name for it."""

    new_peer: Callable[[], bytes]
    up: deque[Message] = field(default_factory=deque)
    down: deque[Message] = field(default_factory=deque)
    peer: bytes = b""

    def __post_init__(self) -> None:
        self.peer = self.new_peer()

    def breaks(self, lost_up: int, kept_down: int) -> None:
        """The connection, or the sidecar, is gone; libzmq makes another.

        What the rank's library still had goes to the next sidecar, what was on its way is lost; of what came down the
        rank may have received the beginning.
        """
        for _ in range(min(lost_up, len(self.up))):
            self.up.popleft()
        while len(self.down) > kept_down:
            self.down.pop()
        self.peer = self.new_peer()


@dataclass
class NodeLink:
    """Between the sidecar of a node and that of rank 0's node: what was taken arrives once and in order, as long as
    both live. ``is_up``: each knows the other's life; what is sent while it is not is dropped."""

    to_coordinator: deque[tuple[int, Message]] = field(default_factory=deque)
    to_node: deque[tuple[int, Message]] = field(default_factory=deque)
    is_up: bool = False
    is_cut: bool = False

    def ends(self) -> None:
        """One of the two sidecars is dead."""
        self.to_coordinator.clear()
        self.to_node.clear()
        self.is_up = False
