"""The two directions of one conversation between sidecars: what was sent and is not acked, what came too early.

Numbers start at 1 and have no gaps. Both boxes are bounded; what the receiver drops the sender still has.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

FIRST_RESEND_S = 1.0
LONGEST_RESEND_S = 8.0

WINDOW_PARCELS = 256
WINDOW_BYTES = 32 << 20
"""Sent and not acked at once, so also what the receiver keeps until an earlier parcel arrives. One parcel may be
larger: it then travels alone."""

PROBE_PARCELS = 8
"""Window after a silence until something is acked: a dead connection is not fed the whole window again and again."""

MAX_UNACKED_PARCELS = 10_000
MAX_UNACKED_BYTES = 256 << 20
"""What one sidecar keeps for another that does not ack. A save has a handful of parcels per rank."""


class Outbox:
    """Numbered parcels that the other side has not acked; sends them in order, and again after a silence."""

    def __init__(self) -> None:
        self.acked = 0
        self.nbytes = 0
        self._parcels: deque[tuple[int, bytes]] = deque()
        self._sent = 0
        self._furthest = 0
        self._flying_bytes = 0
        self._window = WINDOW_PARCELS
        self._resend_at_s = math.inf
        self._backoff_s = FIRST_RESEND_S

    def __len__(self) -> int:
        return len(self._parcels)

    def has_room(self, frame_bytes: int) -> bool:
        """Whether one more parcel stays within the limits; the first always does."""
        if not self._parcels:
            return True
        return len(self._parcels) < MAX_UNACKED_PARCELS and self.nbytes + frame_bytes <= MAX_UNACKED_BYTES

    def add(self, rank: int, frame: bytes) -> None:
        """Give a parcel the next number."""
        self._parcels.append((rank, frame))
        self.nbytes += len(frame)

    def take_ready(self, now_s: float) -> Iterator[tuple[int, int, bytes]]:
        """``(number, rank, frame)`` of everything that may be put on the way now; it counts as sent."""
        if now_s >= self._resend_at_s:
            self._go_back(now_s)
        while self._sent - self.acked < min(self._window, len(self._parcels)):
            rank, frame = self._parcels[self._sent - self.acked]
            if self._flying_bytes and self._flying_bytes + len(frame) > WINDOW_BYTES:
                return
            if self._resend_at_s == math.inf:
                self._resend_at_s = now_s + self._backoff_s
            self._sent += 1
            self._furthest = max(self._furthest, self._sent)
            self._flying_bytes += len(frame)
            yield self._sent, rank, frame

    def take_ack(self, number: int, now_s: float) -> None:
        """Everything up to ``number`` has arrived. A late ack, or one of what was never sent, changes nothing."""
        if not self.acked < number <= self._furthest:
            return
        while self.acked < number:
            nbytes = len(self._parcels.popleft()[1])
            self.acked += 1
            self.nbytes -= nbytes
            if self.acked <= self._sent:
                self._flying_bytes -= nbytes
        self._sent = max(self._sent, number)
        self._window = WINDOW_PARCELS
        self._backoff_s = FIRST_RESEND_S
        self._resend_at_s = now_s + FIRST_RESEND_S if self._sent > self.acked else math.inf

    def hear(self, now_s: float) -> None:
        """The other side can be reached: what it has not acked need not wait for the whole backoff."""
        self._backoff_s = FIRST_RESEND_S
        if self._sent > self.acked:
            self._resend_at_s = min(self._resend_at_s, now_s + FIRST_RESEND_S)

    def resend_now(self, now_s: float) -> None:
        """What is on its way has been lost."""
        if self._sent > self.acked:
            self._resend_at_s = now_s

    def _go_back(self, now_s: float) -> None:
        self._sent, self._flying_bytes = self.acked, 0
        self._window = PROBE_PARCELS
        self._backoff_s = min(2 * self._backoff_s, LONGEST_RESEND_S)
        self._resend_at_s = now_s + self._backoff_s


class Inbox:
    """Puts parcels in order and drops what was there before."""

    def __init__(self) -> None:
        self.acked = 0
        self._early: dict[int, tuple[int, bytes]] = {}
        self._early_bytes = 0

    def take(self, number: int, rank: int, frame: bytes) -> list[tuple[int, bytes]]:
        """``(rank, frame)`` of every parcel that is its turn now. One that is too early waits, if there is room."""
        if number != self.acked + 1:
            self._keep(number, rank, frame)
            return []
        taken = [(rank, frame)]
        self.acked += 1
        while (early := self._early.pop(self.acked + 1, None)) is not None:
            self._early_bytes -= len(early[1])
            self.acked += 1
            taken.append(early)
        return taken

    def _keep(self, number: int, rank: int, frame: bytes) -> None:
        within = self.acked < number <= self.acked + WINDOW_PARCELS and number not in self._early
        if within and self._early_bytes + len(frame) <= WINDOW_BYTES:
            self._early[number] = (rank, frame)
            self._early_bytes += len(frame)
