"""One rank of the benchmark: floors and saves in turns. Started by `bench.py` under the launcher."""

import argparse
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from floors import RankFloor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckpt_trainer_client import CheckpointClient

TENSOR_BYTES = 16_000_000
REGION_BYTES = 1 << 20
"""Files in shared memory from this size on are regions; smaller ones are control pages."""

Times = dict[str, float]


def sharded_state(nbytes: int) -> dict[str, DTensor]:
    """About `nbytes` over all ranks, in tensors of 16 MB, each split evenly over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = 1000
    rows = TENSOR_BYTES // 4 // columns // dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    return {
        f"layers.{index}.weight": DTensor.from_local(torch.randn(rows, columns), mesh, [Shard(0)])
        for index in range(max(1, nbytes // TENSOR_BYTES))
    }


def regions(job_id: str) -> dict[Path, tuple[int, int]]:
    """Inode and allocated bytes of every region of this job on this node."""
    found = {}
    for path in Path("/dev/shm").glob(f"ckpt-sidecar-*/{job_id}/**/*"):
        if path.is_file() and (stat := path.stat()).st_size >= REGION_BYTES:
            found[path] = stat.st_ino, stat.st_blocks * 512
    return found


def timed_floors(floor: RankFloor, *, copy_first: bool) -> Times:
    """Both floors, in alternating order: a copy is up to a tenth faster just after one of the same tensors."""
    floors = [("copy_s", floor.copy_s), ("write_s", floor.write_s)]
    times = {}
    for name, measure_s in floors if copy_first else reversed(floors):
        dist.barrier()
        times[name] = measure_s()
    return times


def timed_save(client: CheckpointClient, state: dict[str, DTensor], step: int) -> Times:
    dist.barrier()
    start = time.perf_counter()
    handle = client.save(state, step=step)
    stall_s = time.perf_counter() - start
    handle.result()
    staged_s, persisted_s, committed_s = handle.staged_at_s, handle.persisted_at_s, handle.committed_at_s
    assert staged_s is not None
    assert persisted_s is not None
    assert committed_s is not None
    return {
        "stall_s": stall_s,
        "write_s": persisted_s - staged_s,
        "persisted_s": persisted_s,
        "committed_s": committed_s,
    }


def timed_load(client: CheckpointClient, state: dict[str, DTensor], floor: RankFloor, step: int) -> Times:
    """A checkpoint read back from the disk: direct writes have left nothing of it in the page cache. Its floor reads
    as many raw bytes, in the other order each time."""
    times: Times = {}

    def load_s() -> float:
        start = time.perf_counter()
        client.load(state, step)
        return time.perf_counter() - start

    parts = [("load_s", load_s), ("read_s", floor.read_s)]
    for name, measure_s in parts if step % 2 else reversed(parts):
        dist.barrier()
        times[name] = measure_s()
    return times


def slowest_rank(times: Times) -> Times:
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, times)
    return {name: max(rank[name] for rank in ranks) for name in times}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """First save, then floors and later saves in turns; times in seconds, of the slowest rank."""
    state = sharded_state(args.mb * 1_000_000)
    locals_ = [tensor.to_local() for tensor in state.values()]
    args.directory.mkdir(parents=True, exist_ok=True)
    floors, saves, held = [], [], []
    with closing(RankFloor(locals_, args.directory)) as floor, CheckpointClient(args.directory / "saves") as client:
        client.prepare(state).result()
        for step in range(args.repeats + 1):
            saves.append(slowest_rank(timed_save(client, state, step)))
            held.append(regions(args.job_id))
            floors.append(slowest_rank(timed_floors(floor, copy_first=step % 2 == 0)))
        loads = [slowest_rank(timed_load(client, state, floor, step)) for step in range(args.repeats)]
    return {
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "nbytes": floor.nbytes * dist.get_world_size(),
        "second_save_allocated_bytes": sum(size for _, size in held[1].values())
        - sum(size for _, size in held[0].values()),
        "second_save_keeps_regions": held[0] == held[1] != {},
        "repeats": {"floors": floors, "saves": saves, "loads": loads},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, required=True, help="state of all ranks together, in 10^6 bytes")
    parser.add_argument("--repeats", type=int, required=True, help="later saves, and floors between them")
    parser.add_argument("--job-id", required=True, help="as the launcher was told")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="JSON, written by rank 0")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        measured = measure(args)
        if dist.get_rank() == 0:
            args.output.write_text(json.dumps(measured))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
