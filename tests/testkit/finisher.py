"""The sidecar that another process starts to finish a dead job, as the real one, but told where to die.

``python -m testkit.finisher ORDER ARGUMENTS`` is ``ckpt-sidecar ARGUMENTS`` with an order as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testkit.kill_points import KillOrder, arm, find, set_constants
from testkit.ranks import TESTS

ENVIRONMENT = {"PYTHONPATH": str(TESTS)}
"""What a process needs whose finishers are armed, so that they find this module."""


def arm_finishers(order: KillOrder, constants: Mapping[str, Any]) -> None:
    """Let every sidecar that this process starts for a dead job die, or stop, at a point."""
    owner, name, real = find("ckpt_sidecar.orphans", "adopt_command")
    told = json.dumps({"order": dataclasses.asdict(order), "constants": dict(constants)})

    def deadly(directory: Path, shm_root: Path) -> list[str]:
        python, *entry = real(directory, shm_root)
        assert entry[:2] == ["-m", "ckpt_sidecar"], entry
        return [python, "-m", "testkit.finisher", told, *entry[2:]]

    setattr(owner, name, deadly)


def run(told: Mapping[str, Any], arguments: list[str]) -> int:
    """Be ``ckpt-sidecar`` with these arguments, armed. Returns its exit code."""
    from ckpt_sidecar.__main__ import main

    set_constants(told["constants"])
    arm(KillOrder(**told["order"]))
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1]), sys.argv[2:]))
