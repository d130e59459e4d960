"""``ckpt-sidecar``: run, start, status, health, recover, stand-in, keygen. None of those that answer imports torch.

Exit codes: 0 done / healthy; 1 drain cut short / degraded / recover found problems; 2 wrong arguments / unreachable /
recover cannot use the directory; 3 could not start; 4 another sidecar serves this job on this node.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from pathlib import Path

from ckpt_proto.errors import CheckpointError, SidecarUnreachable
from ckpt_proto.runtime_dir import DEFAULT_SHM_ROOT, job_dirs, lock_owner
from ckpt_proto.status import SidecarStatus
from ckpt_sidecar.config import add_option, add_run_options, config_from
from ckpt_sidecar.recover_command import add_recover_command
from ckpt_sidecar.stand_in_command import add_stand_in_command

EXIT_OK, EXIT_DEGRADED, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_NOT_STARTED, EXIT_LOCK_TAKEN = 0, 1, 2, 2, 3, 4


def main(arguments: list[str] | None = None) -> int:
    """The console script."""
    parsed = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if parsed.verbose else logging.INFO,
        format="%(asctime)s ckpt-sidecar %(levelname)s %(threadName)s %(message)s",
        stream=sys.stderr,
    )
    try:
        code: int = parsed.command(parsed)
    except (ValueError, CheckpointError) as error:
        print(f"ckpt-sidecar: {error}", file=sys.stderr)
        return EXIT_NOT_STARTED if isinstance(error, SidecarUnreachable) else EXIT_USAGE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ckpt-sidecar", description="The per-node checkpoint writer.")
    parser.add_argument("--verbose", action="store_true", help="log every message")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="serve a job on this node in the foreground; SIGTERM drains and exits")
    add_run_options(run)
    run.add_argument("--ready-fd", type=int, help="descriptor on which READY is written")
    run.add_argument("--supervisor-pid", type=int, help="drain and exit, as on SIGTERM, when this process is gone")
    run.add_argument("--no-orphans", action="store_true", help="leave other jobs that nobody serves alone")
    run.set_defaults(command=_run)
    start = commands.add_parser("start", help="start a sidecar in the background unless one serves the job already")
    add_run_options(start)
    start.set_defaults(command=_start)
    for name, command, text in (
        ("status", _status, "what the sidecars of this node are doing"),
        ("health", _health, "one line; exit code 0 healthy, 1 degraded, 2 unreachable"),
    ):
        query = commands.add_parser(name, help=text)
        add_option(query, "--job-id", help="the job; by default every job of this user on this node")
        add_option(
            query, "--shm-root", type=Path, default=Path(DEFAULT_SHM_ROOT), help="where shared memory is mounted"
        )
        add_option(query, "--timeout-s", type=float, default=5.0, help="how long to wait for an answer")
        query.set_defaults(command=command)
        if name == "status":
            query.add_argument("--json", action="store_true", help="machine-readable: a list of sidecars")
    add_recover_command(commands)
    add_stand_in_command(commands)
    keygen = commands.add_parser("keygen", help="draw the key with which sidecars of several nodes know each other")
    keygen.add_argument("file", type=Path, metavar="FILE", help="a new file, mode 0600; the same goes to every node")
    keygen.set_defaults(command=_keygen)
    return parser


def _run(parsed: argparse.Namespace) -> int:
    from ckpt_sidecar.daemon import Daemon
    from ckpt_sidecar.job_lock import JobLockTaken

    try:
        daemon = Daemon(config_from(parsed))
    except JobLockTaken as error:
        print(f"ckpt-sidecar: {error}", file=sys.stderr)
        return EXIT_LOCK_TAKEN
    return daemon.run()


def _start(parsed: argparse.Namespace) -> int:
    from ckpt_sidecar.daemon_start import start_detached

    config = config_from(parsed)
    arguments = ["--job-id", config.job_id, "--shm-root", str(config.shm_root), "--writers", str(config.writers)]
    arguments += ["--nice", str(config.nice), "--storage-retry-s", str(config.storage_retry_s)]
    arguments += ["--reap-older-than-s", str(config.reap_older_than_s), "--write-stall-s", str(config.write_stall_s)]
    arguments += ["--node-timeout-s", str(config.node_timeout_s)]
    arguments += ["--cpu-affinity", config.cpu_affinity, "--polite-within-s", str(config.polite_within_s)]
    if config.peer_key_file is not None:
        arguments += ["--peer-key-file", str(config.peer_key_file.absolute())]
    if config.peer_insecure:
        arguments.append("--peer-insecure")
    if config.max_write_bytes_per_s is not None:
        arguments += ["--max-write-bytes-per-s", str(config.max_write_bytes_per_s)]
    if config.idle_exit_s is not None:
        arguments += ["--idle-exit-s", str(config.idle_exit_s)]
    pid = start_detached(arguments, config.runtime_dir)
    print(f"sidecar of job {config.job_id}: " + (f"pid {pid}" if pid else "one is running already"))
    return EXIT_OK


def _asked(parsed: argparse.Namespace) -> tuple[list[SidecarStatus], list[str]]:
    """The statuses of the sidecars asked for, and why others gave none."""
    from ckpt_sidecar.status_query import ask_status

    jobs = (
        [parsed.job_id]
        if parsed.job_id
        else [path.name for path in job_dirs(parsed.shm_root) if lock_owner(path) is not None]
    )
    if not jobs:
        return [], [f"no sidecar of this user runs on this node (under {parsed.shm_root})"]
    statuses: list[SidecarStatus] = []
    problems: list[str] = []
    for job in jobs:
        try:
            statuses.append(ask_status(parsed.shm_root, job, parsed.timeout_s))
        except CheckpointError as error:
            problems.append(str(error))
    return statuses, problems


def _status(parsed: argparse.Namespace) -> int:
    from ckpt_sidecar.status_view import describe

    statuses, problems = _asked(parsed)
    if parsed.json:
        print(json.dumps([dataclasses.asdict(status) for status in statuses], indent=1))
    elif statuses:
        print("\n\n".join(describe(status) for status in statuses))
    for problem in problems:
        print(f"ckpt-sidecar status: {problem}", file=sys.stderr)
    return EXIT_UNREACHABLE if problems else EXIT_OK


def _health(parsed: argparse.Namespace) -> int:
    from ckpt_sidecar.health import degradations

    statuses, problems = _asked(parsed)
    reasons = [f"job {status.job_id}: {reason}" for status in statuses for reason in degradations(status)]
    if problems:
        print(f"unreachable: {' | '.join([*problems, *reasons])}")
        return EXIT_UNREACHABLE
    if reasons:
        print(f"degraded: {' | '.join(reasons)}")
        return EXIT_DEGRADED
    last = ", ".join(f"job {status.job_id} last committed step {status.last_committed_step}" for status in statuses)
    print(f"healthy: {last}")
    return EXIT_OK


def _keygen(parsed: argparse.Namespace) -> int:
    from ckpt_sidecar.peer_keys import write_new_keys

    keys = write_new_keys(parsed.file)
    print(f"{parsed.file}: a new key, public half {keys.public.decode()}; give this file to every node of the job")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
