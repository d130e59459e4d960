"""A rank that does what it is told, a line at a time: ``python node_rank.py DIRECTORY``.

Orders come as JSON on standard input, answers go as JSON to standard output: for ranks in another network.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from ckpt_trainer_client import CheckpointClient, SaveHandle
from ckpt_trainer_client.errors import CheckpointFailed


def state_of(rank: int, step: int, elements: int) -> dict[str, Any]:
    """What a rank saves: every value tells rank and step."""
    return {f"weight.{rank}": torch.full((elements,), 1000.0 * rank + step), "step": step}


def main() -> None:
    """Obey until the input ends or ``close`` was told."""
    client = CheckpointClient(
        sys.argv[1],
        connect_timeout_s=float(os.environ.get("NODE_RANK_CONNECT_TIMEOUT_S", "90")),
        close_timeout_s=60,
        no_sidecar=os.environ.get("NODE_RANK_NO_SIDECAR"),
    )
    rank = client._config.rank
    handles: dict[int, SaveHandle] = {}
    answer(welcomed=client.latest())
    for line in sys.stdin:
        order = json.loads(line)
        match order["do"]:
            case "save":
                step = order["step"]
                handles[step] = client.save(state_of(rank, step, order.get("elements", 1000)), step=step)
                answer(staged=handles[step].staged.done() and handles[step].error() is None)
            case "result":
                answer(**result_of(handles[order["step"]], order.get("timeout_s", 60.0)))
            case "latest":
                answer(latest=client.latest())
            case "close":
                client.close()
                answer(closed=True)
                return


def result_of(handle: SaveHandle, timeout_s: float) -> dict[str, Any]:
    """How a save has ended."""
    try:
        return {"committed": handle.result(timeout_s)}
    except CheckpointFailed as error:
        return {"failed": str(error), "ranks": sorted(error.failures)}
    except TimeoutError as error:
        return {"late": str(error)}


def answer(**facts: Any) -> None:
    """One line of JSON."""
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
