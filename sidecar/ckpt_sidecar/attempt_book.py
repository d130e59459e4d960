"""All attempts that the coordinator remembers, and what they mean for each other. Pure."""

from __future__ import annotations

from typing import Final

from ckpt_proto.identity import SaveKey
from ckpt_proto.lifecycles import CheckpointState
from ckpt_sidecar.attempt import Attempt
from ckpt_sidecar.membership import Terms

MAX_ENDED_ATTEMPTS: Final = 64
"""Ended attempts kept to answer late ranks and ``status``; far more than can be in flight."""


class AttemptBook:
    """Attempts by session and number. Ended ones are forgotten, oldest first, but never begun again."""

    def __init__(self) -> None:
        self.attempts: dict[tuple[str, int], Attempt] = {}
        self._forgotten: dict[str, int] = {}

    def get(self, save: SaveKey) -> Attempt | None:
        """The attempt that a key belongs to, whatever step it names."""
        return self.attempts.get((save.session, save.seq))

    def is_forgotten(self, save: SaveKey) -> bool:
        """Whether the attempt has ended so long ago that it is not kept; its ranks were told then."""
        return save.seq <= self._forgotten.get(save.session, -1)

    def open(self, save: SaveKey, terms: Terms, now_s: float) -> Attempt:
        """Begin an attempt."""
        self._forget()
        attempt = Attempt(
            save,
            terms.world_size,
            terms.directory,
            terms.stage_timeout_s,
            now_s,
            adopted=terms.adopted,
            news_s=now_s,
        )
        self.attempts[save.session, save.seq] = attempt
        return attempt

    def _forget(self) -> None:
        ended = [key for key, attempt in self.attempts.items() if not attempt.is_open]
        for token, seq in ended[: max(0, len(ended) - MAX_ENDED_ATTEMPTS)]:
            del self.attempts[token, seq]
            self._forgotten[token] = max(seq, self._forgotten.get(token, -1))

    # ------------------------------------------------------------ questions

    @property
    def is_busy(self) -> bool:
        """Whether an attempt can still end in a commit."""
        return any(attempt.is_open for attempt in self.attempts.values())

    def earlier_life_is_busy(self, token: str) -> bool:
        """Whether an attempt of another session than ``token`` can still end in a commit."""
        return any(attempt.is_open and attempt.save.session != token for attempt in self.attempts.values())

    @property
    def in_hand(self) -> tuple[str, ...]:
        """The save ids of attempts that only this coordinator may end: open ones, and those that it has given up, whose
        files are being removed or must stay for a commit that may be under way."""
        return tuple(
            attempt.save.save_id for attempt in self.attempts.values() if attempt.state is not CheckpointState.COMMITTED
        )

    def open_of(self, token: str) -> list[Attempt]:
        """The open attempts of a session."""
        return [attempt for attempt in self.attempts.values() if attempt.is_open and attempt.save.session == token]

    def to_publish(self) -> list[Attempt]:
        """Approved attempts whose turn it is. Attempts of one session at one step are published in their order: a later
        one removes the files of earlier ones."""
        return [
            attempt
            for attempt in self.attempts.values()
            if attempt.approved and attempt.is_open and not attempt.publishing and not self._earlier_is_open(attempt)
        ]

    def _earlier_is_open(self, attempt: Attempt) -> bool:
        return any(
            other.save.seq < attempt.save.seq and other.target == attempt.target
            for other in self.open_of(attempt.save.session)
        )

    def is_superseded(self, attempt: Attempt, token: str) -> bool:
        """Whether the life ``token`` of the job saves the same step: an earlier life's must not replace that."""
        return attempt.save.session != token and any(
            other.save.session == token
            and other.target == attempt.target
            and other.state is not CheckpointState.ABORTED
            for other in self.attempts.values()
        )
