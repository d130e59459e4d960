"""The command line of ``ckpt-torchrun``: its own options, those of the sidecar, and torchrun's, which stay untouched.

Nothing here starts, reads or writes anything: text in, one frozen value out.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ckpt_proto.identity import job_id_from
from ckpt_proto.runtime_dir import DEFAULT_SHM_ROOT

DEFAULT_DRAIN_TIMEOUT_S = 600.0
DEFAULT_READY_TIMEOUT_S = 30.0

_USAGE = "ckpt-torchrun [options] [options of 'ckpt-sidecar run'] -- <torchrun's arguments>"
_EPILOG = """\
Starts a checkpoint sidecar in its own session, waits until it serves, runs torchrun with everything after '--', and
lets the sidecar finish its writes at the end. An option is also read from CKPT_SIDECAR_<NAME>; the flag wins. Options
that are not listed here go to 'ckpt-sidecar run', which lists them with --help.

exit code: torchrun's own (128+N if signal N killed it), or
   2  the command line is wrong
   3  the sidecar did not come up; torchrun was not started
  76  torchrun succeeded, but a staged checkpoint did not become durable
"""

# torchrun's options that take no value; every other one is followed by one.
_TORCHRUN_FLAGS = frozenset(
    {"-h", "--help", "-m", "--module", "--standalone", "--no-python", "--run-path", "--virtual-local-rank"}
)


class UsageError(Exception):
    """The command line cannot be carried out; the text says which part and why."""


@dataclass(frozen=True)
class LaunchOptions:
    """What one ``ckpt-torchrun`` is asked to do.

    Attributes:
        job_id: valid as a directory name, the same on every node of the job.
        shm_root: where the regions lie.
        drain_timeout_s: how long the sidecar may go on writing after torchrun has ended, in seconds.
        ready_timeout_s: how long the sidecar may take until it serves, in seconds.
        log_file: takes the sidecar's output; None: the launcher's stderr.
        verbose: the sidecar logs every message.
        sidecar_args: passed on to ``ckpt-sidecar run``.
        torchrun_args: passed on to torchrun unchanged.
    """

    job_id: str
    shm_root: str
    drain_timeout_s: float
    ready_timeout_s: float
    log_file: Path | None
    verbose: bool
    sidecar_args: tuple[str, ...]
    torchrun_args: tuple[str, ...]


def parse_command_line(
    argv: Sequence[str], environ: Mapping[str, str], draw_job_id: Callable[[], str]
) -> LaunchOptions:
    """The options in ``argv`` (without the program's name), completed from ``environ``.

    ``draw_job_id`` gives the id of a job on one node that nobody has named.

    Raises:
        UsageError: nothing to launch, or an own option has no valid value.
    """
    parser = _parser()
    own, torchrun_args = split_at_separator(argv)
    if not torchrun_args:
        if {"-h", "--help"} & set(own):
            parser.parse_args(["--help"])
        raise UsageError(f"nothing to launch: torchrun's arguments belong after '--'\nusage: {_USAGE}")
    found, sidecar_args = parser.parse_known_args(own)
    name = _text(found, environ, "job_id")
    log_file = _text(found, environ, "log_file")
    return LaunchOptions(
        job_id=job_id_from(name) if name else derive_job_id(torchrun_args, environ, draw_job_id),
        shm_root=os.path.abspath(_text(found, environ, "shm_root") or DEFAULT_SHM_ROOT),
        drain_timeout_s=_seconds(found, environ, "drain_timeout_s", DEFAULT_DRAIN_TIMEOUT_S),
        ready_timeout_s=_seconds(found, environ, "ready_timeout_s", DEFAULT_READY_TIMEOUT_S),
        log_file=Path(log_file) if log_file else None,
        verbose=found.verbose or environ.get(_variable("verbose"), "0") not in ("", "0"),
        sidecar_args=tuple(sidecar_args),
        torchrun_args=torchrun_args,
    )


def split_at_separator(argv: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What stands before and after the first ``--``; all of it before if there is none."""
    if "--" not in argv:
        return tuple(argv), ()
    at = list(argv).index("--")
    return tuple(argv[:at]), tuple(argv[at + 1 :])


def derive_job_id(torchrun_args: Sequence[str], environ: Mapping[str, str], draw_job_id: Callable[[], str]) -> str:
    """A job id that every node of this torchrun job arrives at without talking.

    It is torchrun's rendezvous id; else, on several nodes, a hash of the rendezvous endpoint as it was typed
    (so type it alike on all of them, or give ``--job-id``); else a drawn one.
    """
    options = torchrun_options(torchrun_args)

    def setting(name: str, default: str) -> str:
        return options.get(name) or environ.get("PET_" + name[2:].replace("-", "_").upper()) or default

    rdzv_id = setting("--rdzv-id", "none")
    if rdzv_id != "none":
        return job_id_from(rdzv_id)
    if _max_nodes(setting("--nnodes", "1")) > 1:
        static_endpoint = f"{setting('--master-addr', '127.0.0.1')}:{setting('--master-port', '29500')}"
        endpoint = setting("--rdzv-endpoint", static_endpoint)
        return f"job-{hashlib.sha256(endpoint.encode()).hexdigest()[:12]}"
    return draw_job_id()


def torchrun_options(args: Sequence[str]) -> dict[str, str]:
    """torchrun's own options by their name in kebab-case; what follows the script's name belongs to the script."""
    found: dict[str, str] = {}
    rest = iter(args)
    for arg in rest:
        if not arg.startswith("-") or arg == "--":
            break
        name, equals, value = arg.partition("=")
        name = name.replace("_", "-")
        holds_value = bool(equals) or (len(name) > 2 and not name.startswith("--"))
        if not holds_value and name not in _TORCHRUN_FLAGS:
            value = next(rest, "")
        found[name] = value
    return found


def _max_nodes(nnodes: str) -> int:
    """The upper end of torchrun's ``MIN:MAX``; 1 for what torchrun itself will refuse in a moment."""
    top = nnodes.rpartition(":")[2]
    return int(top) if top.isdigit() else 1


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that the caller owns every exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\nusage: {_USAGE}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ckpt-torchrun",
        usage=_USAGE,
        epilog=_EPILOG,
        allow_abbrev=False,  # an abbreviation here may be a whole option of the sidecar
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--job-id", metavar="ID", help="default: torchrun's --rdzv-id, else made up")
    parser.add_argument("--shm-root", metavar="DIR", help=f"where regions lie (default {DEFAULT_SHM_ROOT})")
    parser.add_argument(
        "--drain-timeout-s",
        metavar="S",
        help=f"longest time to finish writes after torchrun has ended (default {DEFAULT_DRAIN_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--ready-timeout-s",
        metavar="S",
        help=f"longest time until the sidecar serves (default {DEFAULT_READY_TIMEOUT_S:g})",
    )
    parser.add_argument("--log-file", metavar="FILE", help="append the sidecar's output to FILE (default: stderr)")
    parser.add_argument("--verbose", action="store_true", help="the sidecar logs every message")
    return parser


def _text(found: argparse.Namespace, environ: Mapping[str, str], name: str) -> str | None:
    value: str | None = getattr(found, name)
    return (environ.get(_variable(name)) or None) if value is None else value


def _seconds(found: argparse.Namespace, environ: Mapping[str, str], name: str, default: float) -> float:
    text = _text(found, environ, name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        flag = "--" + name.replace("_", "-")
        raise UsageError(f"{flag} (or {_variable(name)}) must be a number of seconds, not {text!r}")
    return seconds


def _variable(name: str) -> str:
    return "CKPT_SIDECAR_" + name.upper()
