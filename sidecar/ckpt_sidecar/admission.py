"""Whether a client may be served, and whether what it submits is what its region holds. Pure questions."""

from __future__ import annotations

from ckpt_proto.errors import FailureReport, LocalProtocolError
from ckpt_proto.lifecycles import RegionState
from ckpt_proto.messages import FinalPlan, Hello, SubmitShard
from ckpt_sidecar.compatibility import torch_mismatch
from ckpt_sidecar.events import UNKNOWN_PID
from ckpt_sidecar.rank_record import RankRecord


def refusal(
    hello: Hello, kernel_pid: int, old: RankRecord | None, job_id: str, torch_version: str, *, draining: bool
) -> FailureReport | None:
    """Why a client must not be served, or None.

    ``kernel_pid`` is what the kernel says of the sender, ``old`` what is known of the rank's earlier client.
    """
    if hello.job_id != job_id:
        return FailureReport("WrongJob", f"this sidecar serves job {job_id}, the client is of {hello.job_id}")
    if kernel_pid not in (UNKNOWN_PID, hello.pid):
        return FailureReport("WrongProcess", f"the client says it is pid {hello.pid}, the kernel says {kernel_pid}")
    mismatch = torch_mismatch(torch_version, hello.torch_version)
    if mismatch:
        return FailureReport("TorchMismatch", mismatch)
    if old is not None and old.alive:
        taken = _taken(hello, old)
        if taken is not None:
            return taken
    if draining and not hello.session:
        return FailureReport("SidecarDraining", f"the sidecar of job {job_id} is draining and takes no new clients")
    return None


def _taken(hello: Hello, old: RankRecord) -> FailureReport | None:
    same = (old.hello.pid, old.hello.process_start_s) == (hello.pid, hello.process_start_s)
    if not same:
        return FailureReport(
            "RankTaken",
            f"rank {hello.rank} of job {hello.job_id} is already served for living pid {old.hello.pid}; "
            f"pid {hello.pid} asked too",
            hint="one CheckpointClient per rank and job: close the first, or give the second job its own "
            "CKPT_SIDECAR_JOB_ID",
        )
    if not hello.session:
        return FailureReport(
            "RankTaken",
            f"pid {hello.pid} (rank {hello.rank}) has an open CheckpointClient already",
            hint="close the first client before making a second one",
        )
    return None


def check_submission(record: RankRecord, submit: SubmitShard) -> FinalPlan:
    """The plan that a submission was filled by.

    Raises:
        LocalProtocolError: it does not fit what the rank was given; the text names both sides.
    """
    plan = record.plan
    slot = record.slots[submit.slot] if submit.slot < len(record.slots) else None
    if submit.rank != record.hello.rank or submit.save.session != record.session:
        raise LocalProtocolError(
            f"rank {submit.rank} of session {submit.save.session} submitted on the connection of rank "
            f"{record.hello.rank} of session {record.session}"
        )
    if plan is None or slot is None or slot.ready is None or submit.plan_id != plan.plan_id:
        raise LocalProtocolError(
            f"slot {submit.slot} was filled for plan {submit.plan_id}, which has been given up since, because the "
            "structures of the ranks differed or a rank was restarted"
        )
    if slot.state is not RegionState.FREE or submit.generation != slot.generation:
        raise LocalProtocolError(
            f"slot {submit.slot} (generation {slot.generation}, {slot.state.value}) was submitted as generation "
            f"{submit.generation}"
        )
    expected = sum(not item.is_framed for item in plan.items)
    if len(submit.byte_lengths) != expected or sum(submit.byte_lengths) > slot.ready.byte_capacity:
        raise LocalProtocolError(
            f"{len(submit.byte_lengths)} byte entries of {sum(submit.byte_lengths)} bytes; the plan has {expected} "
            f"and the region room for {slot.ready.byte_capacity} bytes"
        )
    return plan
