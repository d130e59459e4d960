"""One life of the ranks: a session is a set of ranks that are alive together. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_proto.errors import FailureReport
from ckpt_proto.messages import Hello


@dataclass
class Session:
    """One life of the ranks.

    ``members`` are the ranks whose client is connected. As soon as one has left, ``closed`` is set and no rank joins
    any more: the next Hello begins a new session. So ranks of two lives never share a save attempt.
    ``silent`` are members whose node does not answer: another process may take their place, in the next session.
    ``departed`` has the reason of each that left. ``taken_up``: it is older than this coordinator; ``spoken`` are the
    ranks of which something was heard in it. ``hellos`` has the last one of every rank that was a member.
    ``restore_answers`` keeps the step given to the n-th ask, the same for every rank.
    """

    token: str
    world_size: int
    directory: str
    incarnation: int
    stage_timeout_s: float
    members: dict[int, Hello] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)
    departed: dict[int, str] = field(default_factory=dict)
    closed: bool = False
    restore_answers: dict[int, int | None] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    taken_up: bool = False
    spoken: set[int] = field(default_factory=set)
    hellos: dict[int, Hello] = field(default_factory=dict)

    @classmethod
    def of(cls, token: str, hello: Hello) -> Session:
        """A new session begun by ``hello``."""
        return cls(token, hello.world_size, hello.directory, hello.incarnation, hello.stage_timeout_s)

    def refusal(self, hello: Hello) -> FailureReport | None:
        """Why ``hello`` can neither join this session nor end it, or None."""
        if hello.incarnation < self.incarnation and self.members:
            return FailureReport(
                "StaleIncarnation",
                f"rank {hello.rank} is of restart {hello.incarnation}, the job is at restart {self.incarnation} by now",
            )
        if self.ended_by(hello):
            return None
        taken = self.members.get(hello.rank)
        if taken is not None and (taken.node, taken.pid) != (hello.node, hello.pid) and not hello.session:
            return FailureReport(
                "RankTaken",
                f"rank {hello.rank} is already served for pid {taken.pid} on node {taken.node}; pid {hello.pid} on "
                f"node {hello.node} asked too",
                hint="RANK must differ between all processes of a job: check NODE_RANK and how the nodes are started",
            )
        if hello.session not in ("", self.token):
            return FailureReport(
                "StaleSession", f"rank {hello.rank} is of session {hello.session}, the job is in session {self.token}"
            )
        if hello.world_size != self.world_size:
            return FailureReport(
                "WorldSizeDiffers",
                f"rank {hello.rank} says the world has {hello.world_size} ranks, ranks {sorted(self.members)} say "
                f"{self.world_size}",
                hint="WORLD_SIZE must be the same on every rank",
            )
        if hello.directory != self.directory:
            return FailureReport(
                "DirectoryDiffers",
                f"rank {hello.rank} saves to {hello.directory}, ranks {sorted(self.members)} save to {self.directory}",
                hint="every rank must pass the same directory to CheckpointClient",
            )
        return None

    def ended_by(self, hello: Hello) -> bool:
        """Whether this session is over once ``hello`` has come: a rank has left it, or ``hello`` is of a later life.

        A member that only comes back does not end it: what it has staged may still be committed, and it is to hear so.
        """
        comes_back = hello.session == self.token and hello.rank not in self.departed
        if (self.closed and not comes_back) or hello.incarnation > self.incarnation:
            return True
        if self.taken_up and not hello.session and (self._has_ended_saves() or hello.rank in self.spoken):
            return True
        return self._is_replaced_by(hello)

    def _is_replaced_by(self, hello: Hello) -> bool:
        """Whether another process has taken a member's place.

        Its node says so: the member is gone, and its sidecar was gone too and could not tell. Another node may say so
        only if the member's does not answer; else two processes have the same rank.
        """
        member = self.members.get(hello.rank)
        if member is None or (member.pid, member.process_start_s) == (hello.pid, hello.process_start_s):
            return False
        return member.node == hello.node or hello.rank in self.silent

    def _has_ended_saves(self) -> bool:
        """Whether a member knows the end of a save: then every rank was here, also one whose death was not told."""
        return any(member.next_seq > len(member.in_flight) for member in self.members.values())

    def join(self, hello: Hello) -> None:
        """Take a rank in."""
        self.members[hello.rank] = self.hellos[hello.rank] = hello
        self.nodes[hello.rank] = hello.node

    def leave(self, rank: int, reason: str = "") -> bool:
        """Let a member go, which closes the session; returns whether it was one."""
        if self.members.pop(rank, None) is None:
            return False
        self.closed = True
        self.departed[rank] = reason
        return True

    def bury(self, rank: int, reason: str) -> bool:
        """A rank that was a member before this coordinator lived is gone, which closes the session; returns whether
        that is news."""
        if rank in self.members or rank in self.departed:
            return False
        self.closed = True
        self.departed[rank] = reason
        return True

    def name(self, rank: int) -> str:
        """``rank 5 on node-b`` as far as known."""
        node = self.nodes.get(rank)
        return f"rank {rank} on {node}" if node else f"rank {rank}"
