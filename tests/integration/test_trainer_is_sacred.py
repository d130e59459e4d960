"""What saving must never do to training: keep its memory, take its descriptors, touch its groups, stop it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckpt_trainer_client import CheckpointClient, ClientClosed, UnsupportedLeaf
from testkit.ranks import RankStarter
from testkit.sidecars import Sidecar
from testkit.states import differences
from testkit.waiting import LIMIT_S, wait_until

# ---------------------------------------------------------------- memory


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Only reference counts free anything while this lasts: what stays alive is in a cycle or still held."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class KeepingPlanner(DefaultSavePlanner):
    """A user's planner, which lives as long as the client."""


def fresh_state(step: int) -> tuple[dict[str, Any], list[weakref.ref[torch.Tensor]]]:
    """A state and weak references to its tensors."""
    tensors = [torch.full((100,), float(step)), torch.tensor(step), torch.empty(0), torch.ones(2, 3).t()]
    state = {"a": tensors[0], "nested": [{"b": tensors[1]}, tensors[2]], "c": tensors[3], "text": "x"}
    return state, [weakref.ref(tensor) for tensor in tensors]


@pytest.mark.parametrize("planner", [None, KeepingPlanner()], ids=["default planner", "user's planner"])
def test_saved_tensors_are_freed_without_the_garbage_collector(
    tmp_path: Path, sidecar: Sidecar, planner: DefaultSavePlanner | None
) -> None:
    with CheckpointClient(tmp_path, planner=planner) as client, no_garbage_collection():
        for step in (1, 2, 3):
            state, references = fresh_state(step)
            handle = client.save(state, step=step)
            del state
            assert [reference() for reference in references] == [None] * 4
            handle.result()


def wait_for_region(client: CheckpointClient) -> None:
    """Wait until a save would not be skipped."""
    wait_until(lambda: not client._connection.pool.all_busy, "a region is free")


def test_tensors_of_failed_saves_are_freed_too(tmp_path: Path, sidecar: Sidecar) -> None:
    with (
        CheckpointClient(tmp_path, slots=1, backpressure="skip", pre_commit=[lambda step, where: step != 2]) as client,
        no_garbage_collection(),
    ):
        client.save(fresh_state(1)[0], step=1).result()
        state, vetoed = fresh_state(2)
        handle = client.save(state, step=2)
        handle.committed.exception(LIMIT_S)
        with sidecar.hanging(1):
            client.save(fresh_state(3)[0], step=3)
            state, skipped = fresh_state(4)
            failed = client.save(state, step=4)
        failed.committed.exception(LIMIT_S)
        assert failed.skipped
        wait_for_region(client)
        state, unsupported = fresh_state(5)
        state["bad"] = lambda: 1
        with pytest.raises(UnsupportedLeaf) as raised:
            client.save(state, step=5)
        del state, raised
        for references in (vetoed, skipped, unsupported):
            assert [reference() for reference in references] == [None] * 4
        assert handle.error() is not None


def test_the_second_save_allocates_no_shared_memory(tmp_path: Path, sidecar: Sidecar) -> None:
    def allocated() -> list[tuple[int, int, int]]:
        return [(stat.st_ino, stat.st_size, stat.st_blocks) for stat in map(os.stat, sidecar.regions)]

    def mapped() -> list[str]:
        return [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if ".region" in line]

    def state(step: int) -> dict[str, Any]:
        return {"x": torch.full((50_000,), float(step)), "step": step, "text": "x" * 1000}

    with CheckpointClient(tmp_path) as client:
        client.save(state(0), step=0).result()
        with sidecar.hanging():  # once into each of the two regions
            for step in (1, 2):
                client.save(state(step), step=step)
        client.wait()
        before = allocated(), mapped()
        assert len(before[0]) == len(before[1]) == 2
        assert all(blocks * 512 >= size for _, size, blocks in before[0])
        for step in range(3, 9):
            client.save(state(step), step=step)
            if step % 2:
                client.wait()
        assert (allocated(), mapped()) == before
    assert not mapped()


def save_2000_tensors(directory: str) -> int:
    """Rank code: with at most 256 descriptors, also for the sidecar that the client starts; how many were open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    before = len(os.listdir("/proc/self/fd"))
    with CheckpointClient(directory) as client:
        for step in (1, 2):
            state = {f"layer {index}": torch.full((index % 7, 3), float(step)) for index in range(2_000)}
            client.save(state, step=step).result()
        opened = len(os.listdir("/proc/self/fd")) - before
        target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        client.load(target)
    assert differences(target, state) == []
    return opened


def test_2000_tensors_with_256_descriptors(tmp_path: Path, shm_root: Path, ranks: RankStarter) -> None:
    [opened] = ranks.run(save_2000_tensors, 1, str(tmp_path), environment={"CKPT_SIDECAR_SHM_ROOT": str(shm_root)})
    assert opened < 20


def save_many_times(directory: str, sidecar_pid: int) -> list[tuple[int, int]]:
    """Rank code: growth of memory in bytes and of descriptors, of this process and of the sidecar, over 150 saves."""

    def measured() -> list[tuple[int, int]]:
        return [
            (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096, len(os.listdir(f"/proc/{pid}/fd")))
            for pid in (os.getpid(), sidecar_pid)
        ]

    with CheckpointClient(directory) as client:
        for step in range(200):
            if step == 50:
                client.wait()
                before = measured()
            client.save({"x": torch.full((100_000,), float(step)), "step": step}, step=7, overwrite=True).result()
        after = measured()
    return [(now[0] - then[0], now[1] - then[1]) for then, now in zip(before, after, strict=True)]


def test_memory_and_descriptors_do_not_grow_with_the_number_of_saves(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter
) -> None:
    arguments = (str(tmp_path), sidecar.pid)
    [growth] = ranks.run(save_many_times, 1, *arguments, environment=sidecar.environment)
    for grown_bytes, grown_descriptors in growth:
        assert grown_bytes < 12_000_000  # a fifth of what the states of these saves take together
        assert grown_descriptors <= 1


# ---------------------------------------------------------------- modules, modes and generators


def test_the_client_brings_four_packages_into_the_trainer() -> None:
    code = """
import sys, torch, torch.distributed.checkpoint, torch.distributed.tensor
before = set(sys.modules)
import ckpt_trainer_client
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True)
    support = {name for name in done.stdout.split() if name.startswith(("_cython", "cython_runtime"))}
    assert set(done.stdout.split()) - support == {"ckpt_proto", "ckpt_trainer_client", "msgpack", "zmq"}


def test_saving_draws_no_random_number_and_changes_no_setting(tmp_path: Path, sidecar: Sidecar) -> None:
    def settings() -> list[Any]:
        return [
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            os.getcwd(),
            dict(os.environ),
        ]

    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate(), settings()
    with CheckpointClient(tmp_path) as client:
        for step in (1, 2):
            client.save({"x": torch.ones(3), "step": step}, step=step).result()
    after = torch.get_rng_state(), random.getstate(), settings()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad], ids=["inference mode", "no grad"])
@pytest.mark.parametrize("inside", [{1, 3}, {2, 3}], ids=["first", "second"])
def test_saves_inside_and_outside_of_a_mode_of_torch(
    tmp_path: Path, sidecar: Sidecar, mode: Callable[[], Any], inside: set[int]
) -> None:
    with CheckpointClient(tmp_path, slots=1) as client:
        for step in (1, 2, 3, 4):
            state = {"x": torch.full((5,), float(step), requires_grad=True), "empty": torch.empty(0)}
            if step in inside:
                with mode():
                    handle = client.save(state, step=step)
            else:
                handle = client.save(state, step=step)
            handle.result()
            target = {"x": torch.zeros(5), "empty": torch.empty(0)}
            client.load(target, step)
            assert bool((target["x"] == step).all())


def test_gradients_and_autograd_history_are_left_alone(tmp_path: Path, sidecar: Sidecar) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    with CheckpointClient(tmp_path) as client:
        for step in (1, 2):
            product = (weight * 2).exp()
            client.save({"weight": weight, "product": product}, step=step).result()
            product.sum().backward()
            assert weight.grad is not None
            assert torch.allclose(weight.grad, step * 2 * torch.exp(torch.tensor(2.0)).expand(3))


# ---------------------------------------------------------------- forks


def use_in_child(client: CheckpointClient, results: Any) -> None:
    """What a data loader's worker might do with a client that it has inherited."""
    try:
        client.save({"x": torch.ones(1)}, step=99)
    except ClientClosed as error:
        results.put(str(error))
    client.close()
    results.put([line for line in Path("/proc/self/maps").read_text().splitlines() if ".region" in line])


class Numbers(torch.utils.data.Dataset[int]):
    """Something for a data loader."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def save_between_forks(directory: str) -> tuple[str, list[str], int]:
    """Rank code: children that end in every way, between saves."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with CheckpointClient(directory) as client:
        client.save({"x": torch.tensor(1)}, step=1).result()
        child = context.Process(target=use_in_child, args=(client, results))
        child.start()
        text, regions = results.get(), results.get()
        child.join(LIMIT_S)
        assert child.exitcode == 0
        client.save({"x": torch.tensor(2)}, step=2).result()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork")
        for number in loader:
            client.save({"x": number}, step=10 + int(number)).result()
        assert client.steps() == [1, 2, *range(10, 18)]
        target = {"x": torch.tensor([-1])}
        client.load(target)
    return text, regions, int(target["x"])


def test_the_client_outlives_forked_children_which_cannot_use_it(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter
) -> None:
    [(text, regions, last)] = ranks.run(save_between_forks, 1, str(tmp_path), environment=sidecar.environment)
    assert "forked child" in text
    assert regions == []
    assert last == 7


# ---------------------------------------------------------------- process groups


def forbid_collectives() -> None:
    """From now on every collective and every point-to-point call of torch.distributed raises, however it is reached."""
    import torch.distributed as dist

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a collective was started")

    words = ("reduce", "gather", "scatter", "broadcast", "barrier", "all_to_all", "send", "recv", "new_group")
    for module in (dist, dist.distributed_c10d):
        for name in dir(module):
            value = getattr(module, name)
            if any(word in name for word in words) and callable(value) and not isinstance(value, type):
                setattr(module, name, forbidden)
    methods = (
        "allreduce",
        "allgather",
        "gather",
        "scatter",
        "broadcast",
        "barrier",
        "alltoall",
        "send",
        "recv",
        "reduce",
    )
    for name in methods:
        setattr(dist.ProcessGroup, name, forbidden)


def save_without_collectives(directory: str) -> None:
    """Rank code: DTensors, a change of structure, everything that plans, while no collective works."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    states = [
        {"x": distribute_tensor(torch.arange(float(size)), mesh, [Shard(0)]), "plain": torch.ones(2), "step": size}
        for size in (5, 5, 6)
    ]
    forbid_collectives()
    with pytest.raises(AssertionError, match="collective"):
        dist.all_reduce(torch.ones(1))
    with CheckpointClient(directory) as client:
        for step, state in enumerate(states):
            client.save(state, step=step, per_rank={"rank": step}).result()
        client.save(states[0], step=9, blocking=True)
        assert client.latest() == 9
        client.wait()


def test_saving_starts_no_collective(tmp_path: Path, sidecar: Sidecar, ranks: RankStarter) -> None:
    ranks.run(save_without_collectives, 2, str(tmp_path), group=True, environment=sidecar.environment)


def save_between_barriers(directory: str) -> None:
    """Rank code: saves in the background while the training group is busy."""
    import torch.distributed as dist

    with CheckpointClient(directory) as client:
        for step in range(30):
            client.save({"x": torch.tensor(step)}, step=step)
            dist.barrier()
            total = torch.tensor(1)
            dist.all_reduce(total)
            assert total == 2
        client.wait()
        assert client.steps() == list(range(30))


def test_saves_and_collectives_of_training_do_not_meet(tmp_path: Path, sidecar: Sidecar, ranks: RankStarter) -> None:
    ranks.run(save_between_barriers, 2, str(tmp_path), group=True, environment=sidecar.environment)


# ---------------------------------------------------------------- failures


def test_a_storage_that_fails_does_not_stop_training(tmp_path: Path, sidecar: Sidecar) -> None:
    with CheckpointClient(tmp_path) as client:
        client.save({"x": torch.tensor(1)}, step=1).result()
        (tmp_path / "step-2").write_text("in the way")
        handle = client.save({"x": torch.tensor(2)}, step=2)
        assert handle.staged.exception() is None
        handle.committed.exception(LIMIT_S)
        failure = handle.error().failures[0]
        assert "step-2" in failure.message
        client.save({"x": torch.tensor(3)}, step=3).result()
        assert client.steps() == [1, 3]
    assert (tmp_path / "step-2").read_text() == "in the way"


def test_a_directory_that_vanishes_is_made_again(tmp_path: Path, sidecar: Sidecar) -> None:
    directory = tmp_path / "checkpoints"
    with CheckpointClient(directory) as client:
        directory.rmdir()
        client.save({"x": torch.tensor(1)}, step=1).result()
        assert client.steps() == [1]


class Interrupted:
    """A value during whose serialisation the user presses Ctrl-C."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_in_the_middle_of_a_save_leaves_nothing_pending(tmp_path: Path, sidecar: Sidecar) -> None:
    with CheckpointClient(tmp_path, slots=1) as client:
        for step, bad in ((1, Interrupted()), (2, 5), (3, Interrupted()), (4, 5)):
            state = {"x": torch.tensor(step), "value": bad}
            if bad == 5:
                client.save(state, step=step).result()
            else:
                with pytest.raises(KeyboardInterrupt):
                    client.save(state, step=step)
                client.wait(LIMIT_S)
        assert client.steps() == [2, 4]


def test_callbacks_that_raise_are_only_logged(
    tmp_path: Path, sidecar: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    def callback(future: object) -> None:
        raise RuntimeError("a callback's own trouble")

    with CheckpointClient(tmp_path) as client:
        handle = client.save({"x": torch.tensor(1)}, step=1)
        handle.committed.add_done_callback(callback)
        handle.result()
        client.save({"x": torch.tensor(2)}, step=2).result()
