"""Jobs of this user on this node that nobody serves: their sidecar was killed and not started again.

What such a job has staged lies sealed in its directory in shared memory. A sidecar is started for it that takes it
over, writes it, commits what is complete, and goes, removing the directory: as after any death of a sidecar.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ckpt_proto.errors import RegionError
from ckpt_proto.process import process_start_s, sidecar_environment
from ckpt_proto.region_journal import RegionJournal, read_journal
from ckpt_proto.runtime_dir import job_dirs, lock_owner
from ckpt_sidecar.leftovers import read_seal

YOUNG_S = 30.0
"""A directory without regions that was made so short ago may be of a sidecar that has not taken its lock yet."""

FINISH_TIMEOUT_S = 60.0
FINISH_POLL_S = 0.1
"""Another process removes the files when it is done: there is nothing to be woken by."""

logger = logging.getLogger(__name__)


def journals_in(directory: Path) -> list[RegionJournal]:
    """The journals of a job's regions; those that cannot be read are left out."""
    found = []
    for path in sorted(directory.glob("*.region")):
        try:
            journal = read_journal(path)
        except RegionError as error:
            logger.warning("%s", error)
            continue
        if journal is not None:
            found.append(journal)
    return found


def owners_live(journals: list[RegionJournal]) -> bool:
    """Whether the process of a rank that owns a region lives, as far as can be seen from here."""
    return any(
        journal.other_namespace or process_start_s(journal.owner.pid) == journal.owner.process_start_s
        for journal in journals
    )


def orphaned_jobs(shm_root: Path, own: Path | None = None, young_s: float = YOUNG_S) -> list[Path]:
    """Directories of jobs that have neither a sidecar nor a living rank; ``own`` is not looked at."""
    orphans = []
    for directory in job_dirs(shm_root):
        try:
            age_s = time.time() - directory.stat().st_mtime
        except FileNotFoundError:
            continue  # its sidecar has just ended in order
        if directory == own or lock_owner(directory) is not None:
            continue
        journals = journals_in(directory)
        if (journals or age_s >= young_s) and not owners_live(journals):
            orphans.append(directory)
    return orphans


def adopt_command(directory: Path, shm_root: Path) -> list[str]:
    """The command that takes a job over, finishes it and ends."""
    command = [sys.executable, "-m", "ckpt_sidecar", "run", "--job-id", directory.name, "--shm-root", str(shm_root)]
    return [*command, "--idle-exit-s", "0", "--no-orphans"]


def await_finishing_jobs(
    shm_root: Path, own: Path, directory: str, wait: Callable[[float], bool], timeout_s: float = FINISH_TIMEOUT_S
) -> None:
    """Wait until dead jobs that saved to ``directory`` have been finished on this node: a job that is started again
    right after it was killed resumes from what the killed one had staged.

    ``wait`` sleeps for that many seconds and returns whether to give up.
    """
    finishing = [job for job in job_dirs(shm_root) if job != own and _is_finishing(job, directory)]
    deadline_s = time.monotonic() + timeout_s
    for job in finishing:
        logger.info("waiting for what the dead job %s had staged for %s", job.name, directory)
        while any(job.glob("*.journal")):
            if wait(FINISH_POLL_S) or time.monotonic() > deadline_s:
                logger.warning("job %s is not finished after %.0f s: going on without it", job.name, timeout_s)
                return


def _is_finishing(job: Path, directory: str) -> bool:
    journals = journals_in(job)
    if not any(journal.owner.directory == directory for journal in journals) or owners_live(journals):
        return False
    return any(read_seal(region) is not None for region in job.glob("*.region"))


class OrphanSweep:
    """Sidecars started for orphaned jobs. Owned by the daemon's main thread."""

    def __init__(self, shm_root: Path, own: Path) -> None:
        self._shm_root = shm_root
        self._own = own
        self._running: dict[Path, subprocess.Popen[bytes]] = {}

    def begin(self) -> None:
        """Have every job finished that is orphaned now."""
        for directory in orphaned_jobs(self._shm_root, self._own):
            logger.warning("job %s has neither a sidecar nor a living rank: finishing it", directory.name)
            self._running[directory] = subprocess.Popen(
                adopt_command(directory, self._shm_root),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=sidecar_environment(),
                cwd="/",
            )

    def look(self) -> None:
        """Take note of those that have ended."""
        for directory, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[directory]
                logger.info("the sidecar that finished job %s has ended with exit code %d", directory.name, code)
