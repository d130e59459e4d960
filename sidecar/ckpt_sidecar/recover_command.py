"""``ckpt-sidecar recover DIR``: finish on storage what dead jobs left there, and say what became of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_proto.process import sidecar_environment
from ckpt_proto.runtime_dir import DEFAULT_SHM_ROOT
from ckpt_sidecar.config import add_option

if TYPE_CHECKING:
    from ckpt_sidecar.recovery import Finding, RecoveryReport

DEFAULT_REAP_OLDER_THAN_S = 3600.0
EXIT_OK, EXIT_PROBLEMS = 0, 1

_OUTCOMES = {"committed": "committed", "reaped": "removed", "left": "left", "problems": "PROBLEM"}
_WOULD_BE = {"committed": "would commit", "reaped": "would remove"}
_HEADINGS = ("outcome", "step", "attempt", "size", "reason")


def add_recover_command(commands: Any) -> None:
    """Add the command to the subparsers of ``ckpt-sidecar``."""
    parser = commands.add_parser(
        "recover", help="after everything died: commit complete attempts, remove garbage; exit code 1 on problems"
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory given to CheckpointClient")
    parser.add_argument(
        "--reap-older-than-s",
        type=float,
        default=DEFAULT_REAP_OLDER_THAN_S,
        help="remove what cannot be finished if nothing in it has changed for so long (%(default)s)",
    )
    add_option(parser, "--shm-root", type=Path, default=Path(DEFAULT_SHM_ROOT), help="where shared memory is mounted")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, change nothing")
    parser.add_argument("--json", action="store_true", help="machine-readable: the report as one object")
    parser.set_defaults(command=_recover)


def _recover(parsed: argparse.Namespace) -> int:
    from ckpt_sidecar.recovery import recover_directory  # late: health probes import this module too

    if not parsed.dry_run:
        _finish_orphans(parsed.directory, parsed.shm_root)
    report = recover_directory(
        parsed.directory,
        reap_older_than_s=parsed.reap_older_than_s,
        now_s=time.time(),
        dry_run=parsed.dry_run,
    )
    if parsed.json:
        print(json.dumps({"dry_run": parsed.dry_run, **dataclasses.asdict(report)}, indent=1))
    else:
        print(describe_report(report, dry_run=parsed.dry_run))
    return EXIT_PROBLEMS if report.problems else EXIT_OK


def _finish_orphans(directory: Path, shm_root: Path) -> None:
    """Have what dead jobs of this user on this node have staged for ``directory`` written first."""
    from ckpt_sidecar.orphans import adopt_command, journals_in, orphaned_jobs

    for job in orphaned_jobs(shm_root, young_s=0.0):
        journals = journals_in(job)
        if journals and str(directory.absolute()) not in {journal.owner.directory for journal in journals}:
            continue
        done = subprocess.run(
            adopt_command(job, shm_root), stdin=subprocess.DEVNULL, env=sidecar_environment(), cwd="/", check=False
        )
        told = f"job {job.name}: what it had left in shared memory is finished (exit code {done.returncode})"
        print(told, file=sys.stderr)


def describe_report(report: RecoveryReport, *, dry_run: bool = False) -> str:
    """The report as a table for a person, one line for each thing that was found."""
    from ckpt_sidecar.status_view import readable_bytes

    rows: list[tuple[str, ...]] = [_HEADINGS]
    for name, outcome in _OUTCOMES.items():
        findings: tuple[Finding, ...] = getattr(report, name)
        text = _WOULD_BE.get(name, outcome) if dry_run else outcome
        rows += [
            (text, _step(each), each.save_id or "-", readable_bytes(each.nbytes), each.reason) for each in findings
        ]
    if len(rows) == 1:
        return f"{report.directory}: nothing was left behind"
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS) - 1)]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows)


def _step(finding: Finding) -> str:
    return "-" if finding.step is None else str(finding.step)
