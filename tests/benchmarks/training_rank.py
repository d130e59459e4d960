"""One rank of a training run that saves by one system: what saving costs it. Started by `bench.py` under torchrun.

A step is matrix products, then an update of every tensor in place. Stretches of steps without a save and with one take
turns, in one process: what the second take longer is what the save has cost training.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_rank import sharded_state
from floors import RankFloor
from processes import cpu_s, pss_bytes
from systems import SYSTEMS, System, forget

MATRIX = 768
SAVE_AT = 4
"""The save begins before this step of a stretch."""


class Training:
    """Steps of one system."""

    def __init__(self, system: System, products: int) -> None:
        self.system = system
        self.products = products
        self.tensors = list(system.local.values())
        self.left, self.right = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)

    def step(self) -> None:
        for _ in range(self.products):
            torch.mm(self.left, self.right)
        self.system.before_update()
        torch._foreach_add_(self.tensors, 1e-3)

    def stretch(self, steps: int, save_step: int | None) -> dict[str, Any]:
        """Steps in a row, with a save if told to; the times are counted from its call."""
        dist.barrier()
        ends, pending, called_s, blocked_s, done_s = [], None, 0.0, 0.0, 0.0
        began_s = time.perf_counter()
        for index in range(steps):
            if index == SAVE_AT and save_step is not None:
                called_s = time.perf_counter()
                pending = self.system.save(save_step)
                blocked_s = time.perf_counter() - called_s
            self.step()
            ends.append(time.perf_counter())
            if called_s and not done_s and self.system.is_done(pending):
                done_s = ends[-1]
        took_s = ends[-1] - began_s
        found: dict[str, Any] = {"took_s": took_s, "began_s": began_s - called_s, "ends_s": ends}
        if save_step is not None:
            found |= self.system.finish(pending)
            found |= {"blocked_s": blocked_s, "done_s": (done_s or time.perf_counter()) - called_s}
            found["ends_s"] = [end - called_s for end in ends]
        else:
            found["ends_s"] = [end - began_s for end in ends]
        return found


def quiet_cpu_s(system: System, mark: str, step: int) -> float:
    """CPU seconds of a save that nothing else is done beside, of all processes of the run."""
    dist.barrier()
    before = cpu_s(mark)
    system.finish(system.save(step))
    dist.barrier()
    used = cpu_s(mark) - before
    forget(system.directory)
    return used


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of a stretch without and one with a save, of this rank."""
    sharded = sharded_state(args.mb * 1_000_000)
    args.directory.mkdir(parents=True, exist_ok=True)
    system = SYSTEMS[args.system](args.directory, sharded)
    training = Training(system, args.products)
    training.step()
    began_s = time.perf_counter()
    system.prepare()
    prepared_s = time.perf_counter() - began_s
    first = training.stretch(SAVE_AT + 2, 0)
    rounds, step = [], 1
    for _ in range(args.rounds):
        found = {}
        turns = [("plain", None), ("saving", step)]
        for name, save_step in turns if step % 2 else reversed(turns):
            dist.barrier()
            before = cpu_s(args.mark)
            found[name] = training.stretch(args.steps, save_step)
            dist.barrier()
            found[name]["cpu_s"] = cpu_s(args.mark) - before
        forget(args.directory)
        rounds.append(found)
        step += 1
    dist.barrier()
    memory = pss_bytes(args.mark)
    quiet = [quiet_cpu_s(system, args.mark, step + index) for index in range(3)]
    floor = RankFloor(training.tensors, args.directory)
    copies = []
    for _ in range(5):
        dist.barrier()
        copies.append(floor.copy_s())
    floor.close()
    dist.barrier()
    system.close()
    return {
        "system": system.name,
        "durable": system.durable,
        "nbytes": sum(tensor.nbytes for tensor in training.tensors),
        "tensors": len(training.tensors),
        "prepared_s": prepared_s,
        "first": first,
        "rounds": rounds,
        "pss_bytes": memory,
        "quiet_cpu_s": quiet,
        "copy_s": statistics.median(copies),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", required=True, choices=list(SYSTEMS))
    parser.add_argument("--mb", type=int, required=True, help="state of all ranks together, in 10^6 bytes")
    parser.add_argument("--steps", type=int, required=True, help="in a stretch")
    parser.add_argument("--products", type=int, required=True, help="of matrices, in a step")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--mark", required=True, help="the mark of this run's processes")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="JSON of all ranks, written by rank 0")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, measure(args))
        if dist.get_rank() == 0:
            args.output.write_text(json.dumps(ranks))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
