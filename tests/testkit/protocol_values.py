"""Values of the protocol: one readable example of every message, and hypothesis strategies for all of them.

The strategies are derived from the type hints of the dataclasses. Where a class accepts less than its hints say, the
field has a strategy of its own below; a new field needs nothing here unless it is validated.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ckpt_proto import messages as m
from ckpt_proto import status
from ckpt_proto.errors import FailureReport
from ckpt_proto.identity import MAX_RANKS, MAX_STEP, SaveKey
from ckpt_proto.peer_messages import MAX_NUMBER, Parcel, PeerEnd, PeerPing, PeerRefused
from ckpt_proto.plan_items import PlanItem
from ckpt_proto.region_journal import RegionJournal
from ckpt_proto.shard_manifest import ManifestEntry, ShardManifest, StoredManifest, pack_crcs

REPEATABLE = settings(
    derandomize=True, database=None, deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
"""The same examples in every run, no time limit."""

SAVE = SaveKey("9f3ac1d2", 3, 300)
TENSOR = PlanItem(
    fqn="model.weight",
    kind="shard",
    path=("model", "weight"),
    offsets=(4, 0),
    sizes=(4, 8),
    global_sizes=(8, 8),
    dtype="bfloat16",
    requires_grad=True,
    index_hint=1,
)
SCALAR = PlanItem(fqn="optim.step", kind="tensor", dtype="float32")
BYTES = PlanItem(fqn="rng", kind="bytes", path=("rng", 0))
OPAQUE = PlanItem(
    fqn="quantised", kind="tensor", offsets=(0,), sizes=(2,), global_sizes=(2,), dtype="uint8", opaque=True
)
FAILURE = FailureReport("StorageError", "no room on /data", hint="make room", rank=1, node="node-b")
STATUS = status.SidecarStatus(
    sidecar_id="0123456789abcdef",
    job_id="job-1",
    node="node-a",
    pid=4242,
    uptime_s=12.5,
    draining=False,
    directory="/data/run",
    world_size=2,
    shm_root="/dev/shm",
    shm_used_bytes=8192,
    shm_free_bytes=1 << 30,
    written_bytes=4096,
    last_committed_step=200,
    last_committed_age_s=1.5,
    committed_count=2,
    failed_count=1,
    skipped_count=0,
    consecutive_failures=1,
    ranks=(status.RankStatus(0, 17, True, (status.SlotStatus(0, "free", 4096), status.SlotStatus(1, "sealed", 4096))),),
    shards=(status.ShardStatus(0, 300, "9f3ac1d2-3", "writing", 1024, 4096, 0.5, 0.25),),
    checkpoints=(
        status.CheckpointStatus(
            300, "9f3ac1d2-3", "open", 1, 0, 2, 0.75, ("rank 1 on node-b has not staged",), ("+0.000s rank 0 staged",)
        ),
    ),
    failures=(status.FailureStatus(100, "9f3ac1d2-1", 60.0, (FAILURE,)),),
    torch_ready=True,
    torch_version="2.13.0+cpu",
    manners=status.MannersStatus(3.5, 0.25, 1048576.0, 1.25, (2, 3)),
)

HELLO = m.Hello(
    job_id="job-1",
    rank=1,
    world_size=2,
    pid=4243,
    process_start_s=123.5,
    node="node-b",
    incarnation=0,
    session="",
    torch_version="2.13.0",
    directory="/data/run",
    slots=2,
    stage_timeout_s=600.0,
    next_seq=4,
    in_flight=(2, 3),
    coordinator="node-a:29431",
    degrades=True,
)

EXAMPLES: tuple[m.Message, ...] = (
    HELLO,
    m.Heartbeat(0.25),
    m.Goodbye(),
    m.ProposePlan(SAVE, (TENSOR, SCALAR, BYTES, OPAQUE), (b"\x00\x01\x02\x03\x04\x05\x06\x07",), ("model.weight",)),
    m.GlobalPlan(SAVE, ((TENSOR, BYTES), (SCALAR,))),
    m.SubmitShard(SAVE, 1, "9f3ac1d2-p1", 1, 5, (17, 0), True),
    m.Resubmit(m.SubmitShard(SAVE, 1, "9f3ac1d2-p1", 1, 5, (17, 0), True)),
    m.GrowRegion("9f3ac1d2-p1", 1, 1 << 20),
    m.ReportSkip(SAVE, "no free region"),
    m.ReportFailure(SAVE, FAILURE),
    m.DecideCommit(SAVE, False, "loss is NaN"),
    m.AskRestoreStep(2),
    m.Welcome("9f3ac1d2", "0123456789abcdef", "node-a", "2.13.0", (100, 200), "9f3ac1d2-p1", 4243),
    m.Refused(FAILURE, 4243),
    m.Pong("0123456789abcdef", True),
    m.Farewell(),
    m.MakeGlobalPlan(SAVE, ((TENSOR, BYTES), (SCALAR,))),
    m.FinalPlan(SAVE, "9f3ac1d2-p1", (TENSOR, BYTES), ("the values of 1 keys differ",)),
    m.RegionReady("9f3ac1d2-p1", 1, 5, "/dev/shm/x/rank-1.slot-1.region", 8192, (4096,), 4352, 3840),
    m.RegionRefused("9f3ac1d2-p1", 0, FAILURE),
    m.SlotFreed(1, 5, 3),
    m.ShardPersisted(SAVE, 1, 4369),
    m.AskCommit(SAVE, "/data/run/step-300"),
    m.Committed(SAVE, "/data/run/step-300"),
    m.Aborted(SAVE, (FAILURE,), True, True),
    m.RestoreStep(2, None),
    m.ShardStaged(SAVE, 1, "9f3ac1d2-p1", True, 2, "/data/run"),
    m.RankLeft(1, "its process 4243 has ended", "9f3ac1d2", "/data/run"),
    m.AskStatus(),
    m.Status(STATUS),
    PeerPing("job-1", "node-b", PeerEnd("fedcba9876543210", 2), PeerEnd("0123456789abcdef", 1), 7),
    Parcel(
        job_id="job-1",
        node="node-b",
        sender=PeerEnd("fedcba9876543210", 2),
        receiver=PeerEnd("0123456789abcdef", 1),
        number=8,
        acked=7,
        rank=1,
        frame=b"\x93\x01\xa9Heartbeat\x80",
    ),
    PeerRefused("job-1", "node-a", FAILURE),
    StoredManifest.of(
        ShardManifest(
            save=SAVE,
            rank=1,
            world_size=2,
            plan_id="9f3ac1d2-p1",
            file_name="__1_9f3ac1d2-3.distcp",
            file_bytes=4369,
            torch_version="2.13.0",
            overwrite=True,
            entries=(ManifestEntry(TENSOR, 0, 4352, 0xDEADBEEF), ManifestEntry(BYTES, 4352, 17, 0)),
        )
    ),
    RegionJournal(
        owner=HELLO,
        other_namespace=True,
        planned_by=SAVE,
        items=(TENSOR, BYTES),
        ready=m.RegionReady("9f3ac1d2-p4", 1, 5, "/dev/shm/x/rank-1.slot-1.region", 8192, (4096,), 4352, 3840),
    ),
)
"""One message of every type, no field left at a default that could hide it."""

MESSAGE_TYPES: tuple[type[m.Message], ...] = tuple(type(example) for example in EXAMPLES)

_SESSIONS = st.text(alphabet="0123456789abcdef", min_size=8, max_size=8)
_COUNTS = st.integers(0, 2**63 - 1)
_NAMES = st.text(max_size=12)
_JOB_IDS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", fullmatch=True)
_NODES = st.from_regex(r"[a-z0-9.-]{1,20}", fullmatch=True)
_FROM_1 = st.integers(1, MAX_NUMBER)

_FIELDS: dict[tuple[type, str], st.SearchStrategy[Any]] = {
    (SaveKey, "session"): _SESSIONS,
    (SaveKey, "seq"): st.integers(0, 2**31 - 1),
    (SaveKey, "step"): st.integers(0, MAX_STEP),
    (m.Hello, "job_id"): _JOB_IDS,
    (m.Hello, "rank"): st.just(0),
    (m.Hello, "world_size"): st.integers(1, MAX_RANKS),
    (m.Hello, "pid"): st.integers(1, 2**31 - 1),
    (m.Hello, "session"): st.just("") | _SESSIONS,
    (m.Hello, "directory"): st.builds("/{}".format, st.text(st.characters(exclude_characters="\0", codec="utf-8"))),
    (m.Hello, "coordinator"): st.sampled_from(["", "node-a:29431", "10.0.0.1:20000", "[fd00::1]:29999"]),
    (m.Hello, "slots"): st.integers(1, m.MAX_SLOTS),
    (m.Hello, "stage_timeout_s"): st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    (m.SubmitShard, "slot"): st.integers(0, m.MAX_SLOTS - 1),
    (m.GrowRegion, "slot"): st.integers(0, m.MAX_SLOTS - 1),
    (m.GrowRegion, "byte_capacity"): st.integers(0, 2**50 - 1),
    (m.RestoreStep, "step"): st.none() | st.integers(0, MAX_STEP),
    (PeerEnd, "life"): st.text(alphabet="0123456789abcdef", min_size=16, max_size=16),
    (PeerEnd, "call"): _FROM_1,
    (PeerPing, "job_id"): _JOB_IDS,
    (PeerPing, "node"): _NODES,
    (Parcel, "job_id"): _JOB_IDS,
    (Parcel, "node"): _NODES,
    (Parcel, "number"): _FROM_1,
    (Parcel, "rank"): st.integers(-1, MAX_RANKS - 1),
    (Parcel, "frame"): st.binary(min_size=1, max_size=40),
    (PeerRefused, "job_id"): _JOB_IDS,
    (PeerRefused, "node"): _NODES,
    (StoredManifest, "rank"): st.just(0),
    (StoredManifest, "world_size"): st.integers(1, MAX_RANKS),
    (StoredManifest, "file_name"): st.just("__0_9f3ac1d2-3.distcp"),
    (StoredManifest, "file_bytes"): st.just(2**41),
    (StoredManifest, "byte_places"): st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40))).map(
        lambda pairs: tuple(number for pair in pairs for number in pair)
    ),
    (StoredManifest, "crcs"): st.lists(st.integers(0, 2**32 - 1)).map(pack_crcs),
}


@st.composite
def plan_items(draw: st.DrawFn) -> PlanItem:
    """Any valid plan item."""
    kind = draw(st.sampled_from(["tensor", "shard", "bytes"]))
    path = draw(st.none() | st.lists(_NAMES | _COUNTS, max_size=3).map(tuple))
    if kind == "bytes":
        return PlanItem(draw(_NAMES), kind, path)
    chunk = st.tuples(st.integers(0, 2**31), st.integers(0, 2**31), st.integers(0, 2**31))
    dimensions = draw(st.lists(chunk, max_size=4))
    return PlanItem(
        draw(_NAMES),
        kind,
        path,
        offsets=tuple(offset for offset, _, _ in dimensions),
        sizes=tuple(size for _, size, _ in dimensions),
        global_sizes=tuple(sum(dimension) for dimension in dimensions),
        dtype=draw(st.sampled_from(["bfloat16", "float32", "uint8"])),
        requires_grad=draw(st.booleans()),
        pin_memory=draw(st.booleans()),
        layout=draw(_NAMES),
        memory_format=draw(_NAMES),
        index_hint=draw(st.integers(-1, 100)),
        opaque=draw(st.booleans()),
    )


@cache
def instances(cls: type) -> st.SearchStrategy[Any]:
    """Valid instances of a record or message class."""
    if cls is PlanItem:
        return plan_items()
    hints = typing.get_type_hints(cls)
    fields = {}
    for name in (field.name for field in dataclasses.fields(cls)):
        fields[name] = _FIELDS[cls, name] if (cls, name) in _FIELDS else _of_hint(hints[name])
    return st.builds(cls, **fields)


def any_message() -> st.SearchStrategy[m.Message]:
    """Valid messages of every type."""
    return st.sampled_from(MESSAGE_TYPES).flatmap(instances)


def _of_hint(hint: Any) -> st.SearchStrategy[Any]:
    scalars = {
        bool: st.booleans(),
        int: _COUNTS,
        float: st.floats(allow_nan=False),
        str: _NAMES,
        bytes: st.binary(max_size=12),
        type(None): st.none(),
    }
    if hint in scalars:
        return scalars[hint]
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([_of_hint(member) for member in typing.get_args(hint)])
    if origin is tuple:
        return st.lists(_of_hint(typing.get_args(hint)[0]), max_size=3).map(tuple)
    return instances(hint)
