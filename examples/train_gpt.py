"""Train a small GPT with FSDP2 on CPU, saving through the checkpoint sidecar.

    ckpt-torchrun -- --standalone --nproc-per-node 2 examples/train_gpt.py --directory checkpoints

Stop it at any moment and start it again: it resumes from the last committed step, with the same
batches in the same order, so that the loss curve is the one an uninterrupted run would have drawn.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digests import full_tensor_digests
from tables import markdown_table
from tiny_gpt import VOCABULARY, Corpus, GPTConfig, TinyGPT
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from ckpt_trainer_client import CheckpointClient, SaveHandle

WARMUP_STEPS = 10
SAVE_TIMES = ("stall_s", "wait_s", "staged_at_s", "persisted_at_s", "committed_at_s")
"""Attributes of a save handle: seconds in the call of `save()`, in waits for its copy, and from the call on."""


@dataclass
class Training:
    """Everything a resumed run needs, and the step that changes it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        scheduler = self.scheduler.state_dict()
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]

    def advance(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """One optimizer step; the loss is the mean over all ranks."""
        logits = self.model(inputs)
        loss = nn.functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        mean = loss.detach()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()


def train(args: argparse.Namespace) -> None:
    """Resume if there is something to resume from, train, save every K steps, report."""
    training = build_training(args)
    corpus = Corpus()
    last_step = min(args.steps, args.stop_after or args.steps)
    saves: list[SaveHandle] = []
    with (
        closing(RunLog(args.loss_log, args.digests)) as log,
        CheckpointClient(args.directory, overlap=args.overlap) as client,
    ):
        client.guard(training.optimizer, training.model)
        if client.latest() is not None:
            state = training.state_dict()
            client.load(state)
            training.load_state_dict(state)
        first_step = training.step + 1
        while training.step < last_step:
            seed = args.seed + training.step * dist.get_world_size() + dist.get_rank()
            loss = training.advance(*corpus.batch(args.batch_size, args.context, seed))
            log.step(training.step, loss)
            if args.save_every and training.step == first_step:
                client.prepare(training.state_dict())  # not before: a new optimizer gets its state in its first step
            if args.save_every and training.step % args.save_every == 0:
                state = training.state_dict()
                saves.append(client.save(state, step=training.step))
                if saves[-1].staged.done():
                    log.staged(training.step)
                log.state(training.step, state)
        client.wait()
        log.saves(saves)


def build_training(args: argparse.Namespace) -> Training:
    """Model, optimizer and schedule, the same on every rank and in every life of the job."""
    torch.manual_seed(args.seed)
    model = TinyGPT(GPTConfig(args.layers, args.width, args.heads, args.context))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = LambdaLR(optimizer, warmup_then_cosine(args.steps))
    return Training(model, optimizer, scheduler)


def warmup_then_cosine(steps: int) -> Callable[[int], float]:
    """Factor of the peak learning rate at a step."""

    def factor(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0)))
        return min((step + 1) / WARMUP_STEPS, 1.0) * cosine

    return factor


class RunLog:
    """What rank 0 writes down: one JSON line per step and per save, and digests of saved states."""

    def __init__(self, log: Path | None, digests: Path | None) -> None:
        self._rank_0 = dist.get_rank() == 0
        self._lines = log.open("a", buffering=1) if log and self._rank_0 else None
        self._digests_path = digests
        self._digests: dict[int, dict[str, str]] = {}

    def step(self, step: int, loss: float) -> None:
        self._write({"step": step, "loss": loss})
        if self._rank_0 and step % 10 == 0:
            print(f"step {step:5d}  loss {loss:.4f}", flush=True)

    def staged(self, step: int) -> None:
        """From here on the save survives the death of this process."""
        self._write({"staged_step": step})

    def state(self, step: int, state: dict[str, Any]) -> None:
        """Digests of the state just saved: only asked for by the demo, which compares them."""
        if self._digests_path:
            self._digests[step] = full_tensor_digests(state)

    def saves(self, handles: list[SaveHandle]) -> None:
        """Report every save: for each time, the slowest rank's."""
        records = [slowest_rank(handle) for handle in handles]
        for failure in filter(None, (handle.error() for handle in handles)):
            print(failure, file=sys.stderr)
        for record in records:
            self._write(record)
        if self._rank_0 and records:
            rows = [[str(cell) for cell in record.values()] for record in records]
            print(markdown_table(list(records[0]), rows), flush=True)
        self._write_digests()

    def _write_digests(self) -> None:
        if self._rank_0 and self._digests_path:
            self._digests_path.write_text(json.dumps(self._digests))

    def _write(self, record: dict[str, Any]) -> None:
        if self._lines:
            print(json.dumps(record), file=self._lines)

    def close(self) -> None:
        if self._lines:
            self._lines.close()


def slowest_rank(handle: SaveHandle) -> dict[str, Any]:
    """The times of one save, in seconds from the call of `save()`; None where it failed."""
    mine = [getattr(handle, name) for name in SAVE_TIMES]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    slowest = [None if None in times else round(max(times), 4) for times in zip(*ranks, strict=True)]
    return {"saved_step": handle.step, **dict(zip(SAVE_TIMES, slowest, strict=True))}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="checkpoints", help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=100, help="length of the whole training")
    parser.add_argument("--save-every", type=int, default=20, help="steps; 0 never saves")
    parser.add_argument("--overlap", action="store_true", help="copy behind forward and backward")
    parser.add_argument("--stop-after", type=int, help="stop at this step, as if preempted")
    parser.add_argument("--loss-log", type=Path, help="JSON lines: loss per step, times per save")
    parser.add_argument("--digests", type=Path, help="JSON: SHA-256 of each saved full tensor")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--context", type=int, default=128, help="bytes a prediction may look at")
    parser.add_argument("--batch-size", type=int, default=4, help="windows per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    dist.init_process_group("gloo")
    try:
        train(parse_args())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
