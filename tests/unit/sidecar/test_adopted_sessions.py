"""Sessions of ranks that a sidecar finds in shared memory, told to a coordinator."""

from __future__ import annotations

from dataclasses import replace

from ckpt_proto.messages import Hello, RankLeft
from ckpt_proto.region_journal import RegionJournal
from ckpt_sidecar.actions import PrepareRegion, ToCoordinator
from ckpt_sidecar.events import FoundRegion, RegionsFound
from testkit.tables import ITEMS, PLAN_ID, SESSION, Node, hello, key, of_type, ready_for

NEW_SESSION = "0000000b"


def region(session: str, start_s: float, slot: int, *, alive: bool) -> FoundRegion:
    """A region that nothing is sealed in."""
    owner = hello(0, 2, session=session, process_start_s=start_s)
    order = PrepareRegion(0, slot, 1, PLAN_ID, ITEMS, 1 << 16, owner, key(session=session))
    return FoundRegion(RegionJournal(owner, False, key(session=session), ITEMS, ready_for(order)), alive, None)


def test_who_has_gone_is_told_before_who_is_here() -> None:
    node = Node()
    found = (region(SESSION, 50.0, 0, alive=False), region(NEW_SESSION, 60.0, 1, alive=True))
    told = [action.message for action in of_type(node.do(RegionsFound(found)), ToCoordinator)]
    assert [type(message) for message in told] == [RankLeft, Hello]
    again = [action.message for action in of_type(node.table.say_again(), ToCoordinator)]
    assert [replace(message, reason="") for message in again[:1]] == [RankLeft(0, "", SESSION)]
    assert again[1:] == told[1:]


def test_nobody_says_hello_for_the_dead() -> None:
    told = of_type(Node().do(RegionsFound((region(SESSION, 50.0, 0, alive=False),))), ToCoordinator)
    assert [type(action.message) for action in told] == [RankLeft]
