"""Asking a sidecar how it is, from another process. Torch-free: a probe answers in milliseconds."""

from __future__ import annotations

from pathlib import Path

import zmq

from ckpt_proto.codec import decode, encode
from ckpt_proto.errors import RemoteProtocolError, SidecarUnreachable
from ckpt_proto.messages import AskStatus, Refused, Status
from ckpt_proto.runtime_dir import endpoint, lock_owner, runtime_dir
from ckpt_proto.status import SidecarStatus

DEFAULT_TIMEOUT_S = 5.0


def ask_status(shm_root: str | Path, job_id: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> SidecarStatus:
    """The status of the sidecar that serves ``job_id`` on this node.

    Raises:
        SidecarUnreachable: none runs, or it has not answered within ``timeout_s``; the text says which.
        RemoteProtocolError: it speaks another protocol version.
    """
    directory = runtime_dir(shm_root, job_id)
    owner = lock_owner(directory)
    if owner is None:
        raise SidecarUnreachable(f"no sidecar serves job {job_id} on this node (nobody holds the lock in {directory})")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(endpoint(directory))
        socket.send(encode(AskStatus()))
        if not socket.poll(round(timeout_s * 1000)):
            raise SidecarUnreachable(f"the sidecar of job {job_id} (pid {owner}) has not answered within {timeout_s} s")
        answer = decode(socket.recv())
    if isinstance(answer, Refused):
        raise RemoteProtocolError(f"the sidecar of job {job_id} (pid {owner}) refused: {answer.failure}")
    if not isinstance(answer, Status):
        raise RemoteProtocolError(f"the sidecar of job {job_id} answered {type(answer).__name__} to AskStatus")
    return answer.status
