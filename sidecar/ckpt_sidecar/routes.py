"""Where the coordinator of a session is, and where the ranks of a session are. Pure: the sockets are elsewhere.

The coordinator is the sidecar that serves rank 0, whatever number its node has. The others find it at the address that
their ranks say in their Hello. An elastic restart may move rank 0 to another node: what is in flight of the session
before goes on with the coordinator of that session.
"""

from __future__ import annotations

from typing import Final

from ckpt_proto.identity import SaveKey
from ckpt_proto.messages import Hello, Message, RankLeft, Welcome

HERE: Final = ""
"""Address of a coordinator in this process; place of a rank of this node."""

KEPT_SESSIONS: Final = 16
"""Sessions whose routes are remembered; far more than can have a save in flight."""


def session_of(message: Message) -> str:
    """The session that a message is about; empty if it is about none, or about a rank's first Hello."""
    if isinstance(message, (Hello, RankLeft, Welcome)):
        return message.session
    save: SaveKey | None = getattr(message, "save", None)
    return save.session if save is not None else str(getattr(message, "session", ""))


class CoordinatorRoutes:
    """A node's view: which address coordinates which session. ``served`` is the address that this sidecar serves."""

    def __init__(self) -> None:
        self._by_session: dict[str, str] = {}
        self._by_rank: dict[int, str] = {}
        self.served: str | None = None

    def learn(self, rank: int, message: Message) -> None:
        """Take note of a Hello of a rank, or of the Welcome that it gets."""
        if isinstance(message, Hello):
            self._by_rank[rank] = message.coordinator
            if message.session:
                self._remember(message.session, message.coordinator)
        elif isinstance(message, Welcome) and rank in self._by_rank:
            self._remember(message.session, self._by_rank[rank])

    def _remember(self, session: str, address: str) -> None:
        self._by_session.pop(session, None)
        self._by_session[session] = address
        for old in list(self._by_session)[:-KEPT_SESSIONS]:
            del self._by_session[old]

    def address(self, rank: int, message: Message) -> str:
        """Where a message of a rank, or about it, goes: :data:`HERE`, or an address to connect to."""
        found = self._by_session.get(session_of(message), self._by_rank.get(rank, HERE))
        return HERE if found == self.served else found

    def sessions_at(self, address: str) -> frozenset[str]:
        """The sessions that are coordinated there, as far as they are remembered."""
        return frozenset(session for session, place in self._by_session.items() if place == address)


class RankPlaces:
    """The coordinator's view: at which sidecar (its life) which rank of which session is."""

    def __init__(self) -> None:
        self._latest: dict[int, str] = {}
        self._left: set[int] = set()
        self._by_session: dict[str, dict[int, str]] = {}

    def learn(self, rank: int, message: Message, life: str) -> None:
        """A message of a rank, or about it, has come from there."""
        session = session_of(message)
        if session:
            self._remember(session, rank, life)
        if isinstance(message, Hello) or rank not in self._latest:
            self._latest[rank] = life
            self._left.discard(rank)
        if isinstance(message, RankLeft) and self._latest[rank] == life:
            self._left.add(rank)

    def _remember(self, session: str, rank: int, life: str) -> None:
        ranks = self._by_session.pop(session, {})
        ranks[rank] = life
        self._by_session[session] = ranks
        for old in list(self._by_session)[:-KEPT_SESSIONS]:
            del self._by_session[old]

    def life(self, rank: int, message: Message) -> str:
        """Where a message for a rank goes: :data:`HERE`, or the life of another node's sidecar."""
        latest = self._latest.get(rank, HERE)
        if isinstance(message, Welcome):
            self._remember(message.session, rank, latest)
            return latest
        return self._by_session.get(session_of(message), {}).get(rank, latest)

    def ranks_at(self, life: str) -> list[int]:
        """The ranks whose latest client is or was there."""
        return sorted(rank for rank, place in self._latest.items() if place == life)

    def other_lives(self) -> set[str]:
        """Every other sidecar that a rank's client lives at."""
        return {life for rank, life in self._latest.items() if rank not in self._left} - {HERE}
