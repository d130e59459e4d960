"""Ours and the peers behind one face: begin a save, say when tensors may change, wait until it is done.

Peers get what their documentation tells a CPU user to do, and the same durability where they can be told to.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

State = dict[str, Any]


class System:
    """One way to save. ``durable``: what is done when :meth:`finish` returns is fsynced."""

    name = "none"
    durable = True

    def __init__(self, directory: Path, sharded: State) -> None:
        self.directory = directory
        self.sharded = sharded
        self.state = {"model": sharded}

    @property
    def local(self) -> dict[str, torch.Tensor]:
        """This rank's own tensors."""
        return {key: value.to_local() for key, value in self.sharded.items()}

    def prepare(self) -> None:
        """Before the first save, if there is something to prepare."""

    def save(self, step: int) -> Any:
        """Begin a save; what it returns goes to :meth:`finish`."""

    def before_update(self) -> None:
        """The optimizer is about to change the tensors."""

    def is_done(self, pending: Any) -> bool:
        """Whether a save is done; looked at after every step."""
        return pending is None or pending.done()

    def finish(self, pending: Any) -> dict[str, float]:
        """Wait until a save is done; what it says of itself."""
        return {}

    def close(self) -> None:
        """End everything that was started."""

    def path(self, step: int) -> str:
        return str(self.directory / f"step-{step}")


class Ours(System):
    name = "ckpt-sidecar"
    overlap = False

    def __init__(self, directory: Path, sharded: State) -> None:
        super().__init__(directory, sharded)
        from ckpt_trainer_client import CheckpointClient

        self.client = CheckpointClient(directory, overlap=self.overlap)
        self.client.before_optimizer_step()

    def prepare(self) -> None:
        self.client.prepare(self.state).result()

    def save(self, step: int) -> Any:
        return self.client.save(self.state, step=step)

    def before_update(self) -> None:
        self.client.before_optimizer_step()

    def finish(self, pending: Any) -> dict[str, float]:
        pending.result()
        return {"stall_s": pending.stall_s, "wait_s": pending.wait_s, "committed_s": pending.committed_at_s}

    def close(self) -> None:
        self.client.close()


class OursHidden(Ours):
    name = "ckpt-sidecar, copy hidden"
    overlap = True


class DcpSave(System):
    name = "dcp.save"

    def save(self, step: int) -> Any:
        dcp.save(self.state, checkpoint_id=self.path(step))


class DcpThread(System):
    name = "dcp.async_save, thread"
    kind = "thread"

    def __init__(self, directory: Path, sharded: State) -> None:
        super().__init__(directory, sharded)
        self.group = dist.new_group()  # its thread must not share one with the training

    def options(self) -> dict[str, Any]:
        return {"process_group": self.group}

    def save(self, step: int) -> Any:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kind = AsyncCheckpointerType(self.kind)
        writer = dcp.FileSystemWriter(self.path(step))
        return dcp.async_save(self.state, storage_writer=writer, async_checkpointer_type=kind, **self.options())

    def is_done(self, pending: Any) -> bool:
        return bool(getattr(pending, "upload_completion", pending).done())

    def finish(self, pending: Any) -> dict[str, float]:
        getattr(pending, "upload_completion", pending).result()
        return {}


class DcpProcess(DcpThread):
    name = "dcp.async_save, process"
    kind = "process"


class DcpProcessStager(DcpProcess):
    name = "dcp.async_save, process, shared-memory stager"

    def __init__(self, directory: Path, sharded: State) -> None:
        super().__init__(directory, sharded)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
            )
        )

    def options(self) -> dict[str, Any]:
        return {**super().options(), "async_stager": self.stager}


class TorchSnapshot(System):
    name = "torchsnapshot-nightly async_take"
    durable = False

    def save(self, step: int) -> Any:
        from torchsnapshot import Snapshot, StateDict

        return Snapshot.async_take(self.path(step), {"model": StateDict(**self.local)})

    def finish(self, pending: Any) -> dict[str, float]:
        pending.wait()
        return {}


class TorchCheckpointing(System):
    name = "torch-checkpointing"
    durable = False

    def __init__(self, directory: Path, sharded: State) -> None:
        super().__init__(directory, sharded)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        # Its direct writes are not of whole blocks, which Linux file systems refuse.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))

    def prepare(self) -> None:
        self.manager.prewarm_staging({"model": self.local})

    def save(self, step: int) -> Any:
        return self.manager.save(self.path(step), {"model": self.local})

    def before_update(self) -> None:
        with self.manager.lock():  # waits for staging
            pass

    def finish(self, pending: Any) -> dict[str, float]:
        pending.result()
        return {}

    def close(self) -> None:
        self.manager.close()


SYSTEMS: dict[str, Callable[[Path, State], System]] = {
    system.name: system
    for system in (
        System, Ours, OursHidden, DcpSave, DcpThread, DcpProcess, DcpProcessStager, TorchCheckpointing, TorchSnapshot,
    )
}  # fmt: skip


def forget(directory: Path) -> None:
    """Rank 0 removes what was saved: the disk is not what is measured here."""
    if dist.get_rank() == 0:
        for path in directory.glob("step-*"):
            shutil.rmtree(path)
