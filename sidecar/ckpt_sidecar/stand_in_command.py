"""``ckpt-sidecar stand-in``: write, publish or withdraw for a client that has no sidecar; one JSON line per outcome.

Started by the client with policy ``degraded``, not by people. Exit codes: 0 all done; 1 something was not, as its line
says; 4 a sidecar serves the job again, or another stand-in does not end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_proto.identity import SaveKey, save_key_of
from ckpt_proto.runtime_dir import DEFAULT_SHM_ROOT, runtime_dir
from ckpt_sidecar.config import add_option

if TYPE_CHECKING:
    from ckpt_sidecar.stand_in import Outcome

EXIT_OK, EXIT_FAILED, EXIT_LOCK_TAKEN = 0, 1, 4


def add_stand_in_command(commands: Any) -> None:
    """Add the command to the subparsers of ``ckpt-sidecar``."""
    parser = commands.add_parser("stand-in", help="used by clients without a sidecar: write or publish one thing")
    works = parser.add_subparsers(required=True, metavar="WORK")
    write = _add(works, "write", "write what is sealed on this node and not durable", _write)
    write.add_argument("--session", required=True, help="the session of the client")
    write.add_argument("--next-seq", type=int, required=True, help="the number of its next save")
    write.add_argument("--pending", type=int, nargs="*", default=[], help="numbers of its saves that have not ended")
    add_option(write, "--max-write-bytes-per-s", type=float, help="bandwidth cap; none by default")
    for name, text, command in (
        ("publish", "commit an attempt whose shards are all durable", _publish),
        ("withdraw", "take the rank's part of an attempt back, unless it is committed", _withdraw),
    ):
        work = _add(works, name, text, command)
        work.add_argument("--directory", required=True, help="the checkpoint directory")
        work.add_argument("--save", required=True, help="the attempt, such as 9f3ac1d2-3")
        work.add_argument("--step", type=int, required=True)


def _add(works: Any, name: str, text: str, command: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = works.add_parser(name, help=text)
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--rank", type=int, required=True, help="the rank whose client asks")
    parser.add_argument("--wait-s", type=float, default=30.0, help="how long other stand-ins are waited for")
    add_option(parser, "--shm-root", type=Path, default=Path(DEFAULT_SHM_ROOT), help="where shared memory is mounted")
    add_option(parser, "--nice", type=int, default=10, help="CPU niceness")
    parser.set_defaults(command=command)
    return parser


def _write(parsed: argparse.Namespace) -> int:
    import ckpt_sidecar.torch_work  # noqa: F401 - takes seconds, during which others may have the lock
    from ckpt_sidecar.priority import lower_priority
    from ckpt_sidecar.stand_in import Client, write_shards
    from ckpt_sidecar.throttle import Throttle

    lower_priority(parsed.nice)
    client = Client(parsed.rank, parsed.session, parsed.next_seq, frozenset(parsed.pending))
    directory = runtime_dir(parsed.shm_root, parsed.job_id)
    return _locked(parsed, lambda: write_shards(directory, client, Throttle(parsed.max_write_bytes_per_s)))


def _publish(parsed: argparse.Namespace) -> int:
    import ckpt_sidecar.torch_work  # noqa: F401 - as above
    from ckpt_sidecar.stand_in import publish_attempt

    save = _save_of(parsed)
    return _locked(parsed, lambda: [publish_attempt(parsed.directory, save)])


def _withdraw(parsed: argparse.Namespace) -> int:
    from ckpt_sidecar.stand_in import withdraw_shard

    save, directory = _save_of(parsed), runtime_dir(parsed.shm_root, parsed.job_id)
    work = partial(withdraw_shard, directory, parsed.directory, parsed.rank, save)
    return _locked(parsed, lambda: [work()], needs_regions=False)


def _save_of(parsed: argparse.Namespace) -> SaveKey:
    save = save_key_of(parsed.save, parsed.step)
    if save is None:
        raise ValueError(f"--save {parsed.save} --step {parsed.step} is no attempt")
    return save


def _locked(parsed: argparse.Namespace, work: Any, *, needs_regions: bool = True) -> int:
    from ckpt_sidecar.job_lock import JobLockTaken
    from ckpt_sidecar.stand_in import holding_the_lock

    try:
        directory = runtime_dir(parsed.shm_root, parsed.job_id)
        with holding_the_lock(directory, parsed.wait_s, needs_regions=needs_regions):
            outcomes: Sequence[Outcome] = work()
    except JobLockTaken as error:
        print(f"ckpt-sidecar stand-in: {error}", file=sys.stderr)
        return EXIT_LOCK_TAKEN
    for outcome in outcomes:
        print(json.dumps(line_of(outcome)))
    return EXIT_FAILED if any(outcome.failure for outcome in outcomes) else EXIT_OK


def line_of(outcome: Outcome) -> dict[str, object]:
    """An outcome as the client reads it."""
    failure = outcome.failure
    return {
        "did": outcome.did,
        "rank": outcome.rank,
        "save": outcome.save.save_id,
        "step": outcome.save.step,
        "bytes": outcome.nbytes,
        "kind": failure.kind if failure else "",
        "message": failure.message if failure else "",
    }
