"""What is to become of what dead jobs left in a step, decided without touching anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_proto.checkpoint_layout import data_file_name, manifest_name
from ckpt_proto.identity import SaveKey
from ckpt_sidecar.recovery_plan import (
    Fate,
    FoundAttempt,
    FoundCommit,
    FoundFile,
    FoundManifest,
    FoundStep,
    Policy,
    StepPlan,
    plan_step,
    what_lacks,
)
from testkit.protocol_values import REPEATABLE

STEP, NOW_S, SIZE = 5, 1_000.0, 4096
OURS, THEIRS, ALIVE = "0a1b2c3d", "ffffffff", "5eed5eed"
EAGER = Policy(reap_older_than_s=0.0, now_s=NOW_S)
PATIENT = Policy(reap_older_than_s=NOW_S, now_s=NOW_S)


def file(name: str, at_s: float, nbytes: int = SIZE) -> FoundFile:
    return FoundFile(name, nbytes, at_s, at_s)


def attempt(
    seq: int = 0,
    session: str = OURS,
    *,
    at_s: float = 100.0,
    world_size: int = 2,
    manifests: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    overwrite: bool = False,
    damage: str = "",
) -> FoundAttempt:
    """Of ranks ``manifests`` (all) there is a manifest; ``sizes`` are those of the data files (as they should be)."""
    save = SaveKey(session, seq, STEP)
    there = range(world_size) if manifests is None else manifests
    data = [file(data_file_name(r, save.save_id), at_s, n) for r, n in enumerate(sizes or [SIZE] * world_size) if n]
    return FoundAttempt(
        save,
        (*data, *(file(manifest_name(rank, save.save_id), at_s) for rank in there)),
        tuple(FoundManifest(rank, world_size, "p1", SIZE, overwrite, "2.13.0") for rank in there),
        damage,
    )


def commit_of(by: FoundAttempt, at_s: float = 200.0) -> FoundCommit:
    names = frozenset(each.name for each in by.files if each.name.endswith(".distcp"))
    return FoundCommit(by.save.save_id, names, at_s)


def step(*attempts: FoundAttempt, commit: FoundCommit | None = None) -> FoundStep:
    return FoundStep(STEP, 0.0, not attempts, attempts, (), commit)


def published(plan: StepPlan) -> FoundAttempt | None:
    return plan.publish.attempt if plan.publish else None


def with_fate(plan: StepPlan, fate: Fate) -> list[FoundAttempt]:
    return [decision.attempt for decision in plan.others if decision.fate is fate]


def reason(plan: StepPlan) -> str:
    [decision] = plan.others
    return decision.reason


# ---------------------------------------------------------------- uncommitted steps


@pytest.mark.parametrize("policy", [EAGER, PATIENT], ids=["eager", "patient"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_complete_attempt_is_published_however_old_it_is(policy: Policy, overwrite: bool) -> None:
    plan = plan_step(step(whole := attempt(overwrite=overwrite)), policy)
    assert published(plan) == whole
    assert not plan.overwrite
    assert plan.others == ()


@pytest.mark.parametrize(
    ("broken", "lack"),
    [
        (attempt(manifests=[]), "no shard manifest"),
        (attempt(world_size=3, manifests=[1]), r"no shard manifest of ranks [0, 2] of 3"),
        (attempt(sizes=[SIZE, 0]), "__1_0a1b2c3d-0.distcp has None bytes, its manifest says 4096"),
        (attempt(sizes=[SIZE, SIZE - 1]), "__1_0a1b2c3d-0.distcp has 4095 bytes, its manifest says 4096"),
        (
            replace(attempt(), manifests=(attempt().manifests[0], replace(attempt().manifests[1], plan_id="p2"))),
            "disagree about world size, plan or overwrite",
        ),
        (
            replace(attempt(), manifests=(attempt().manifests[0], replace(attempt().manifests[1], world_size=3))),
            "disagree",
        ),
    ],
)
def test_what_an_incomplete_attempt_lacks_is_named(broken: FoundAttempt, lack: str) -> None:
    old, young = plan_step(step(broken), EAGER), plan_step(step(broken), PATIENT)
    assert published(old) is published(young) is None
    assert with_fate(old, Fate.REAP) == with_fate(young, Fate.LEAVE) == [broken]
    assert lack in reason(old)
    assert reason(young) == f"{reason(old)}; last changed 900 s ago"


def test_a_world_of_a_million_ranks_names_only_some_of_those_that_lack() -> None:
    claimed = replace(attempt(), manifests=tuple(replace(m, world_size=1 << 20) for m in attempt().manifests))
    assert len(what_lacks(claimed)) < 200


def test_the_youngest_file_of_an_attempt_counts() -> None:
    begun = attempt(manifests=[0], at_s=100.0)
    going_on = replace(begun, files=(*begun.files[:-1], replace(begun.files[-1], changed_s=NOW_S)))
    assert with_fate(plan_step(step(going_on), Policy(60.0, NOW_S)), Fate.LEAVE) == [going_on]
    assert with_fate(plan_step(step(begun), Policy(60.0, NOW_S)), Fate.REAP) == [begun]


def test_of_several_complete_attempts_the_newest_is_published() -> None:
    first, second = attempt(1, at_s=300.0), attempt(2, at_s=200.0)
    plan = plan_step(step(first, second), EAGER)
    assert published(plan) == second  # of one session the order of the saves is known
    assert with_fate(plan, Fate.REAP) == [first]
    assert reason(plan) == "superseded by attempt 0a1b2c3d-2"
    other = attempt(0, THEIRS, at_s=250.0)
    assert published(plan_step(step(first, second, other), EAGER)) == second
    later = attempt(0, THEIRS, at_s=301.0)
    assert published(plan_step(step(first, second, later), EAGER)) == later


def test_a_newer_attempt_that_is_incomplete_does_not_count() -> None:
    plan = plan_step(step(whole := attempt(1), torn := attempt(2, manifests=[0])), EAGER)
    assert published(plan) == whole
    assert with_fate(plan, Fate.REAP) == [torn]


def test_an_attempt_that_cannot_be_judged_is_for_a_person() -> None:
    plan = plan_step(step(attempt(damage="unreadable")), EAGER)
    assert published(plan) is None
    assert [(each.fate, each.reason) for each in plan.others] == [(Fate.PROBLEM, "unreadable")]


def test_one_that_was_refused_gives_way_to_the_next_and_is_for_a_person() -> None:
    first, second = attempt(1), attempt(2)
    plan = plan_step(step(first, second), EAGER, {second.save.save_id: "does not add up"})
    assert published(plan) == first
    assert [(each.attempt, each.fate, each.reason) for each in plan.others] == [
        (second, Fate.PROBLEM, "does not add up")
    ]


# ---------------------------------------------------------------- committed steps


def test_a_committed_attempt_is_nobodys_business() -> None:
    whole = attempt(manifests=[0])  # even if it has lost files since
    assert plan_step(step(whole, commit=commit_of(whole)), EAGER) == StepPlan(overwrite=True)


def test_what_the_metadata_refers_to_stays_whoever_made_it() -> None:
    whole = attempt()
    for save_id in ("", "45e847cb-d5c0-4aa2-98de-63992af8fd9d", "ffffffff-3"):
        copied = replace(commit_of(whole), save_id=save_id)
        assert plan_step(step(whole, commit=copied), EAGER).others == ()


def test_another_attempt_of_a_committed_step_is_superseded() -> None:
    done, other = attempt(1), attempt(2, at_s=900.0)
    plan = plan_step(step(done, other, commit=commit_of(done)), EAGER)
    assert published(plan) is None
    assert with_fate(plan, Fate.REAP) == [other]
    assert reason(plan) == "superseded by attempt 0a1b2c3d-1"


@pytest.mark.parametrize(
    ("other", "wins"),
    [
        (attempt(0, THEIRS, at_s=200.1, overwrite=True), True),
        (attempt(0, THEIRS, at_s=200.0, overwrite=True), False),
        (attempt(0, THEIRS, at_s=200.1), False),
        (attempt(2, at_s=150.0, overwrite=True), True),  # in flight beside the one that is committed, and after it
        (attempt(0, at_s=300.0, overwrite=True), False),
        (attempt(0, THEIRS, at_s=300.0, overwrite=True, manifests=[1]), False),
        (attempt(0, THEIRS, at_s=300.0, overwrite=True, damage="unreadable"), False),
    ],
)
def test_only_a_newer_complete_attempt_with_the_order_to_replaces_a_checkpoint(other: FoundAttempt, wins: bool) -> None:
    done = attempt(1)
    plan = plan_step(step(done, other, commit=commit_of(done, 200.0)), EAGER)
    assert published(plan) == (other if wins else None)
    if wins:
        assert plan.overwrite
        assert with_fate(plan, Fate.REAP) == [done]


def test_a_checkpoint_is_as_new_as_its_manifests_if_clocks_disagree() -> None:
    done, other = attempt(1, at_s=300.0), attempt(0, THEIRS, at_s=250.0, overwrite=True)
    assert published(plan_step(step(done, other, commit=commit_of(done, 200.0)), EAGER)) is None


@pytest.mark.parametrize("save_id", ["", "45e847cb-d5c0-4aa2-98de-63992af8fd9d"])
def test_a_checkpoint_of_another_program_is_never_replaced(save_id: str) -> None:
    theirs = FoundCommit(save_id, frozenset({"__0_0.distcp"}), 0.0)
    plan = plan_step(step(ours := attempt(at_s=900.0, overwrite=True), commit=theirs), EAGER)
    assert published(plan) is None
    assert with_fate(plan, Fate.REAP) == [ours]
    assert reason(plan) == "superseded: another program has saved this step"


# ---------------------------------------------------------------- living jobs, temporary files


def test_a_living_job_is_left_alone_and_is_not_overtaken() -> None:
    mine, torn, old = attempt(0, ALIVE), attempt(1, ALIVE, manifests=[0]), attempt(0)
    plan = plan_step(step(mine, torn, old), replace(EAGER, spare=frozenset({ALIVE})))
    assert published(plan) is None
    assert {each.attempt.save.save_id: (each.fate, each.reason) for each in plan.others} == {
        mine.save.save_id: (Fate.LEAVE, "in flight: its job lives"),
        torn.save.save_id: (Fate.LEAVE, "in flight: its job lives"),
        old.save.save_id: (Fate.LEAVE, "complete, but a living job is saving this step"),
    }


def test_old_temporary_files_go_unless_their_job_lives() -> None:
    names = [f"{manifest_name(0, f'{session}-0')}.01234567.tmp" for session in (OURS, ALIVE)]
    old = [file(name, 0.0) for name in (*names, ".metadata.01234567.tmp")]
    young = file(".metadata.89abcdef.tmp", NOW_S)
    plan = plan_step(replace(step(), temporaries=(*old, young)), Policy(60.0, NOW_S, frozenset({ALIVE})))
    assert plan.temporaries == (old[0], old[2])


def test_an_empty_directory_goes_when_it_has_been_empty_for_long() -> None:
    assert plan_step(FoundStep(STEP, 940.0, is_empty=True), Policy(60.0, NOW_S)).remove_empty
    assert not plan_step(FoundStep(STEP, 941.0, is_empty=True), Policy(60.0, NOW_S)).remove_empty
    assert not plan_step(FoundStep(STEP, 0.0, is_empty=False), Policy(60.0, NOW_S)).remove_empty


# ---------------------------------------------------------------- anything


@dataclass(frozen=True)
class Case:
    found: FoundStep
    policy: Policy
    complete: frozenset[SaveKey]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any step; which of its attempts are complete is known from how they were made."""
    keys = draw(st.lists(st.tuples(st.sampled_from([OURS, THEIRS, ALIVE]), st.integers(0, 3)), max_size=5, unique=True))
    attempts, complete = [], set()
    for session, seq in keys:
        world_size = draw(st.integers(1, 3))
        there = draw(st.sets(st.integers(0, world_size - 1))) if draw(st.booleans()) else set(range(world_size))
        broken = draw(st.integers(-world_size, world_size - 1))
        sizes = [draw(st.sampled_from([0, 1])) if rank == broken else SIZE for rank in range(world_size)]
        damage = draw(st.sampled_from(["", "", "", "unreadable"]))
        made = attempt(
            seq,
            session,
            at_s=draw(st.integers(0, 10)) * 100.0,
            world_size=world_size,
            manifests=sorted(there),
            sizes=sizes,
            overwrite=draw(st.booleans()),
            damage=damage,
        )
        if not made.files:
            continue
        attempts.append(made)
        if len(there) == world_size and set(sizes) == {SIZE} and not damage:
            complete.add(made.save)
    at_s = draw(st.integers(0, 10)) * 100.0
    commits = [None, FoundCommit("", frozenset({"__0_0.distcp"}), at_s), FoundCommit("eeeeeeee-1", frozenset(), at_s)]
    commit = draw(st.sampled_from([*commits, *(commit_of(each, at_s) for each in attempts)]))
    policy = Policy(draw(st.integers(0, 11)) * 100.0, NOW_S, frozenset(draw(st.sets(st.sampled_from([ALIVE, THEIRS])))))
    return Case(step(*attempts, commit=commit), policy, frozenset(complete))


def after(found: FoundStep, plan: StepPlan, lost: Sequence[str] = ()) -> FoundStep:
    """The step when a plan has been carried out; or when it has been begun and only ``lost`` have been removed."""
    commit = found.commit
    if plan.publish:
        commit = commit_of(plan.publish.attempt, NOW_S)
    removed = set(lost) or {each.name for reaped in with_fate(plan, Fate.REAP) for each in reaped.files}
    attempts = []
    for each in found.attempts:
        files = tuple(file for file in each.files if file.name not in removed)
        save_id = each.save.save_id
        manifests = tuple(m for m in each.manifests if manifest_name(m.rank, save_id) not in removed)
        attempts.append(replace(each, files=files, manifests=manifests))
    return replace(found, attempts=tuple(each for each in attempts if each.files), commit=commit)


MANY = settings(REPEATABLE, max_examples=250)


@MANY
@given(case=cases())
def test_only_a_complete_attempt_of_no_living_job_is_published(case: Case) -> None:
    winner = published(plan_step(case.found, case.policy))
    if winner is not None:
        assert winner.save in case.complete
        assert winner.save.session not in case.policy.spare
        if case.found.commit is not None:
            assert case.found.commit.save_id not in ("", winner.save.save_id)
            assert all(manifest.overwrite for manifest in winner.manifests)


@MANY
@given(case=cases())
def test_some_complete_attempt_becomes_the_checkpoint_of_an_uncommitted_step(case: Case) -> None:
    if case.found.commit is None and not case.policy.spare:
        assert (published(plan_step(case.found, case.policy)) is not None) == bool(case.complete)


@MANY
@given(case=cases())
def test_no_file_of_the_checkpoint_is_ever_removed_nor_of_a_living_job_nor_a_young_one(case: Case) -> None:
    plan = plan_step(case.found, case.policy)
    standing = after(case.found, plan).commit
    for reaped in with_fate(plan, Fate.REAP):
        assert standing is None or reaped.save.save_id != standing.save_id
        assert standing is None or not standing.files & {each.name for each in reaped.files}
        assert reaped.save.session not in case.policy.spare
        assert not reaped.damage
        assert all(NOW_S - each.changed_s >= case.policy.reap_older_than_s for each in reaped.files)
        if reaped.save in case.complete:
            assert standing is not None


@MANY
@given(case=cases())
def test_a_plan_that_was_carried_out_leaves_nothing_to_do(case: Case) -> None:
    done = after(case.found, plan_step(case.found, case.policy))
    again = plan_step(done, case.policy)
    assert again.publish is None
    assert with_fate(again, Fate.REAP) == []


@MANY
@given(case=cases(), data=st.data())
def test_a_plan_that_was_cut_short_is_finished_by_the_next(case: Case, data: st.DataObject) -> None:
    """The files of an attempt go manifests first, in any order otherwise; the cut may come after each of them."""
    plan = plan_step(case.found, case.policy)
    reaped = with_fate(plan, Fate.REAP)
    files = [each.name for one in reaped for each in sorted(one.files, key=lambda file: file.name[-1], reverse=True)]
    lost = files[: data.draw(st.integers(0, len(files)))]
    cut = after(case.found, plan, lost or ["nothing"])
    for each in cut.attempts:
        before = next(one for one in case.found.attempts if one.save == each.save)
        assert each.files == before.files or what_lacks(each)
    again = plan_step(cut, case.policy)
    assert again.publish is None
    assert after(cut, again) == after(case.found, plan)
