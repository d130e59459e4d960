"""From a sealed region to a durable data file and its manifest, in one pass over the bytes."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path

from ckpt_proto.checkpoint_layout import checkpoint_id, data_file_name, manifest_name
from ckpt_proto.codec import encode
from ckpt_proto.errors import CheckpointError, RegionError, StorageError
from ckpt_proto.region import round_to_pages
from ckpt_proto.shard_manifest import StoredManifest, pack_crcs
from ckpt_sidecar.actions import WriteShard
from ckpt_sidecar.crc_sweep import CrcSweep
from ckpt_sidecar.data_file import DataFile
from ckpt_sidecar.dcp_layout import ShardLayout
from ckpt_sidecar.durable_fs import make_dirs, sync_dir, write_file
from ckpt_sidecar.ledger import durable_shard
from ckpt_sidecar.progress import Progress
from ckpt_sidecar.throttle import Throttle
from ckpt_sidecar.write_cost import WriteCost

WINDOW_BYTES = 8 << 20
WINDOWS_IN_FLIGHT = 2
"""Two writes in flight keep the device busy while the next window's CRC is computed; more gained nothing when
measured."""


class ShardCancelled(CheckpointError):
    """The attempt was aborted while its shard was being written."""


class ShardWriter:
    """Writes shards. One instance serves all writer threads; it keeps no state of a job."""

    def __init__(
        self, io: Executor, throttle: Throttle, clock: Callable[[], float], cost: WriteCost | None = None
    ) -> None:
        self._io = io
        self._throttle = throttle
        self._clock = clock
        self._cost = cost or WriteCost()

    def write(self, action: WriteShard, layout: ShardLayout, mapping: mmap.mmap, progress: Progress) -> int:
        """Write the region in ``mapping`` as the rank's data file and the manifest beside it; both durable on return.

        Returns:
            The data file's length in bytes.

        Raises:
            StorageError: the storage refused or failed.
            ShardCancelled: ``progress.cancelled`` was set; partial files may be left for the caller to remove.
        """
        with self._cost.measured():
            return self._write(action, layout, mapping, progress)

    def _write(self, action: WriteShard, layout: ShardLayout, mapping: mmap.mmap, progress: Progress) -> int:
        submit = action.submit
        before = durable_shard(action.directory, submit.rank, submit.save)
        if before is not None:
            return before.file_bytes  # an earlier sidecar died between writing it and saying so: it may be committed
        directory = Path(checkpoint_id(action.directory, submit.save.step))
        name = data_file_name(submit.rank, submit.save.save_id)
        nbytes = layout.file_bytes(submit.byte_lengths)
        if nbytes > len(mapping):
            raise RegionError(f"{name} would have {nbytes} bytes, its region has {len(mapping)}")
        progress.total_bytes = nbytes
        sweep = CrcSweep(layout, submit.byte_lengths, mapping)
        try:
            self._write_data(directory / name, nbytes, sweep, mapping, progress)
            crcs, byte_places = pack_crcs(sweep.crcs()), sweep.byte_places()
        finally:
            sweep.close()
        sync_dir(directory)
        manifest = StoredManifest(
            submit.save,
            submit.rank,
            action.world_size,
            submit.plan_id,
            name,
            nbytes,
            action.torch_version,
            submit.overwrite,
            layout.packed,
            byte_places,
            crcs,
        )
        write_file(directory / manifest_name(submit.rank, submit.save.save_id), encode(manifest))
        return nbytes

    def _write_data(self, path: Path, nbytes: int, sweep: CrcSweep, mapping: mmap.mmap, progress: Progress) -> None:
        file = _create(path, nbytes)
        try:
            with memoryview(mapping) as view:
                self._stream(file, nbytes, sweep, view, progress)
            file.finish()
        finally:
            file.close()

    def _stream(self, file: DataFile, nbytes: int, sweep: CrcSweep, view: memoryview, progress: Progress) -> None:
        in_flight: deque[Future[None]] = deque()
        try:
            window_bytes = self._throttle.window_bytes(WINDOW_BYTES)
            for start in range(0, nbytes, window_bytes):
                stop = min(start + window_bytes, nbytes)
                sweep.advance(stop)
                while len(in_flight) >= WINDOWS_IN_FLIGHT:
                    in_flight.popleft().result()
                if progress.cancelled.wait(self._throttle.delay_s(stop - start)):
                    raise ShardCancelled(f"writing stopped at {start} of {nbytes} bytes")
                in_flight.append(self._io.submit(self._write_window, file, view, start, stop, progress))
            sweep.advance(nbytes)
            while in_flight:
                in_flight.popleft().result()
        finally:
            for future in in_flight:
                future.exception()

    def _write_window(self, file: DataFile, view: memoryview, start: int, stop: int, progress: Progress) -> None:
        # A direct write needs whole blocks: what lies behind the end of the file in the last one is cut off again.
        # A slice is released before the mapping may be closed.
        with (
            self._cost.measured(stop - start),
            view[start : round_to_pages(stop) if file.is_direct else stop] as window,
        ):
            file.write_at(window, start)
        progress.advance(stop - start, self._clock())


def _create(path: Path, nbytes: int) -> DataFile:
    """The data file, in a directory that another attempt's clean-up may be removing because it was empty."""
    while True:
        try:
            make_dirs(path.parent)
        except OSError as error:
            raise StorageError(f"cannot make {path.parent}: {error}") from error
        try:
            return DataFile(path, nbytes)
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
