"""Bad input gets a named error, on every rank, before anything is touched; the next save works."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_proto.codec import encode
from ckpt_proto.messages import AskStatus, Heartbeat, Refused, Status
from ckpt_proto.region import Seal, seal_path
from ckpt_proto.version import PROTOCOL_VERSION
from ckpt_trainer_client import (
    CheckpointClient,
    CheckpointError,
    CheckpointFailed,
    NoCheckpoint,
    SidecarRefused,
    UnsupportedLeaf,
)
from testkit.leaks import files_below
from testkit.ranks import RankStarter
from testkit.sidecars import Sidecar, exchange_frames
from testkit.states import differences
from testkit.waiting import LIMIT_S

# ---------------------------------------------------------------- shared memory


@contextmanager
def small_tmpfs(mount_point: Path, *options: str) -> Iterator[None]:
    """A file system of its own at ``mount_point``; skips the test where mounting is not allowed."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(["mode=0700", *options]), "tmpfs", str(mount_point)],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(mount_point)], check=True)


@pytest.fixture
def small_shm(shm_root: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The test's shared memory, 2 MiB large unless the test says otherwise."""
    with small_tmpfs(shm_root, f"size={getattr(request, 'param', '2m')}"):
        yield shm_root


# Three times the small shared memory, most of it, a little of it.
TOO_MUCH, MOST, LITTLE = ({"x": torch.ones(size)} for size in (1_500_000, 300_000, 1_000))


def failure_of(client: CheckpointClient, state: dict[str, Any], step: int) -> Any:
    """The one failure of a save that cannot succeed; ``save()`` itself must not raise."""
    handle = client.save(state, step=step)
    assert isinstance(handle.committed.exception(LIMIT_S), CheckpointFailed)
    [failure] = handle.error().failures.values()
    return failure


def test_a_state_larger_than_shared_memory_is_refused_with_both_numbers(
    tmp_path: Path, small_shm: Path, start_sidecar: Callable[..., Sidecar]
) -> None:
    start_sidecar()
    with CheckpointClient(tmp_path / "checkpoints") as client:
        failure = failure_of(client, TOO_MUCH, 1)
        assert failure.kind == "NotEnoughSharedMemory"
        free, needed = map(int, re.search(r"has (\d+) bytes free, .* needs (\d+) more", failure.message).groups())
        assert 0 < free < 2 << 20
        assert needed > 6_000_000
        assert "slots=1" in failure.message
        assert failure.rank == 0
        client.save(LITTLE, step=2).result()
        assert client.steps() == [2]
        assert not (tmp_path / "checkpoints" / "step-1").exists()


def test_what_does_not_fit_cannot_be_prepared_and_one_region_is_enough(
    tmp_path: Path, small_shm: Path, start_sidecar: Callable[..., Sidecar], caplog: pytest.LogCaptureFixture
) -> None:
    start_sidecar()
    with CheckpointClient(tmp_path / "checkpoints") as client:
        with pytest.raises(CheckpointError, match=r"has \d+ bytes free"):
            client.prepare(TOO_MUCH).result(LIMIT_S)
        client.prepare(MOST).result(LIMIT_S)
        assert "only 1 of 2 regions could be made" in caplog.text
        client.save(MOST, step=1).result(LIMIT_S)
        assert client.steps() == [1]


def test_one_region_is_used_where_there_is_no_room_for_two(
    tmp_path: Path, small_shm: Path, start_sidecar: Callable[..., Sidecar]
) -> None:
    sidecar = start_sidecar()
    with CheckpointClient(tmp_path, slots=2) as client:
        for step in (1, 2, 3):
            client.save(MOST, step=step).result()
        assert len(sidecar.regions) == 1
        client.save(LITTLE, step=4).result()


def test_a_save_into_full_shared_memory_needs_no_more_of_it(
    tmp_path: Path, small_shm: Path, start_sidecar: Callable[..., Sidecar]
) -> None:
    start_sidecar()
    with CheckpointClient(tmp_path, slots=1) as client:
        client.save(MOST, step=1).result()
        with filled_up(small_shm):
            for step in (2, 3):
                client.save({"x": torch.full((300_000,), float(step))}, step=step).result()
        target = {"x": torch.zeros(300_000)}
        client.load(target, 3)
        assert bool((target["x"] == 3).all())


@pytest.mark.parametrize("small_shm", ["20m"], indirect=True)
def test_a_seal_is_whole_or_the_save_fails(
    tmp_path: Path, small_shm: Path, start_sidecar: Callable[..., Sidecar]
) -> None:
    # The seal's record has a length for each byte entry: so many do not fit into the seal's first page. The region is
    # large enough for them since the first save.
    many = {f"value {index}": index for index in range(2_000)}
    sidecar = start_sidecar()
    with CheckpointClient(tmp_path, slots=1, backpressure_timeout_s=5) as client:
        client.save({"blob": bytes(4_000_000)}, step=1).result()
        with filled_up(small_shm):
            handle = client.save(many, step=2)
            failed = handle.committed.exception(LIMIT_S) is not None
            seal = Seal(seal_path(sidecar.regions[0]))
            try:
                assert failed or seal.read() is not None
            finally:
                seal.close()
        assert failed == (handle.error() is not None)
        client.save(many, step=3).result()  # the region is free again, however the save before ended


@contextmanager
def filled_up(directory: Path) -> Iterator[None]:
    """While this lasts the file system of ``directory`` has no byte left."""
    path = directory / "filler"
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError:
            assert os.statvfs(directory).f_bavail == 0
    try:
        yield
    finally:
        path.unlink()


# ---------------------------------------------------------------- directories


def refusal(directory: Path) -> str:
    """Why a client for ``directory`` is refused."""
    with pytest.raises(SidecarRefused) as caught:
        CheckpointClient(directory)
    assert caught.value.failure.kind == "StorageError"
    return str(caught.value)


def test_a_directory_that_cannot_be_made(sidecar: Sidecar) -> None:
    text = refusal(Path("/proc/checkpoints"))
    assert "checkpoint directory /proc/checkpoints cannot be used" in text


def test_a_read_only_directory(tmp_path: Path, sidecar: Sidecar) -> None:
    with small_tmpfs(tmp_path, "ro"):
        assert "Read-only file system" in refusal(tmp_path)


def test_a_directory_that_is_a_file(tmp_path: Path, sidecar: Sidecar) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    assert str(path) in refusal(path)
    assert str(path) in refusal(path / "below")
    assert path.read_text() == "text"


def test_a_directory_that_is_itself_a_checkpoint(tmp_path: Path, sidecar: Sidecar) -> None:
    with CheckpointClient(tmp_path) as client:
        client.save(LITTLE, step=1).result()
    before = files_below(tmp_path)
    text = refusal(tmp_path / "step-1")
    assert "is itself a checkpoint" in text
    assert "the directory above it" in text
    assert files_below(tmp_path) == before


def test_something_else_where_a_checkpoint_would_be(tmp_path: Path, sidecar: Sidecar) -> None:
    (tmp_path / "step-3").write_text("not a checkpoint")
    assert "step-3 is no directory but has the name of a checkpoint" in refusal(tmp_path)


def test_other_files_in_the_directory_do_no_harm(tmp_path: Path, sidecar: Sidecar) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-one").mkdir()
    (tmp_path / "step-7").mkdir()
    with CheckpointClient(tmp_path) as client:
        assert client.steps() == []
        client.save(LITTLE, step=7).result()
        assert client.steps() == [7]
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket", "file:///tmp/x"])
def test_a_url_is_not_taken_for_a_folder(url: str, sidecar: Sidecar) -> None:
    with pytest.raises(ValueError, match="is a URL"):
        CheckpointClient(url)
    assert not Path(url.partition("/")[0]).exists()


def test_loading_what_is_no_checkpoint(tmp_path: Path, sidecar: Sidecar) -> None:
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "__0_0.distcp").write_bytes(b"data without .metadata")
    (tmp_path / "step-6").mkdir()
    (tmp_path / "step-6" / ".metadata").write_bytes(b"no pickle at all")
    with CheckpointClient(tmp_path) as client:
        with pytest.raises(NoCheckpoint, match="step-5 exists but was never committed"):
            client.load({"x": torch.zeros(1)}, 5)
        with pytest.raises(NoCheckpoint, match="step-9 does not exist"):
            client.load({"x": torch.zeros(1)}, 9)
        with pytest.raises(CheckpointError, match="step-6"):
            client.load({"x": torch.zeros(1)}, 6)


def test_loading_a_key_or_shape_that_was_not_saved(tmp_path: Path, sidecar: Sidecar) -> None:
    with CheckpointClient(tmp_path) as client:
        client.save({"x": torch.zeros(3)}, step=1).result()
        with pytest.raises(CheckpointError, match="other"):
            client.load({"other": torch.zeros(3)}, 1)
        with pytest.raises(CheckpointError, match="x"):
            client.load({"x": torch.zeros(4)}, 1)


# ---------------------------------------------------------------- state dicts


class Unpicklable:
    """Refuses to be serialised."""

    def __reduce__(self) -> Any:
        raise RuntimeError("I hold a socket")


UNSUPPORTED = {
    "function": lambda: 1,
    "generator": (number for number in range(3)),
    "Unpicklable": Unpicklable(),
    "meta": torch.empty(3, device="meta"),
    "UninitializedParameter": torch.nn.UninitializedParameter(),
    "sparse_coo": torch.eye(3).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("kind", UNSUPPORTED)
@pytest.mark.parametrize("planned", [False, True], ids=["first save", "known plan"])
def test_a_value_that_cannot_be_saved_is_named_with_its_type(
    tmp_path: Path, sidecar: Sidecar, kind: str, planned: bool
) -> None:
    usual = {"model": {"x": torch.ones(2), "bad": 3}}
    with CheckpointClient(tmp_path) as client:
        if planned:
            client.save(usual, step=1).result()
        with pytest.raises(UnsupportedLeaf, match=r"model\.bad") as caught:
            client.save({"model": {"x": torch.ones(2), "bad": UNSUPPORTED[kind]}}, step=2)
        assert kind in str(caught.value)
        client.save(usual, step=3).result()
        assert client.steps() == ([1, 3] if planned else [3])
    assert not (tmp_path / "step-2").exists()


def save_bad_value_on_rank_1(directory: str) -> list[tuple[str, str]]:
    """Rank code: rank 1 has a lambda, in the first save and in a later one; how each ended on this rank."""
    rank = int(os.environ["RANK"])
    ends = []
    with CheckpointClient(directory) as client:
        for step in (1, 3):
            state = {"x": torch.ones(2), "hook": (lambda: 1) if rank == 1 else 3}
            try:
                handle = client.save(state, step=step)
                handle.committed.exception(60)
                ends.append(("handle", str(handle.error())))
            except UnsupportedLeaf as error:
                ends.append(("raised", str(error)))
            client.save({"x": torch.ones(2), "hook": 3}, step=step + 1).result()
    return ends


def test_a_value_that_one_rank_cannot_save_fails_the_save_of_all(
    tmp_path: Path, sidecar: Sidecar, ranks: RankStarter
) -> None:
    other, own = ranks.run(save_bad_value_on_rank_1, 2, str(tmp_path), environment=sidecar.environment)
    assert [how for how, _ in own] == ["raised", "raised"]
    assert [how for how, _ in other] == ["handle", "handle"]
    for _, text in (*own, *other):
        assert "hook is a builtins.function" in text
    assert all("rank 1" in text for _, text in other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-4"]


def test_two_keys_that_flatten_to_one_name(tmp_path: Path, sidecar: Sidecar) -> None:
    with CheckpointClient(tmp_path) as client:
        with pytest.raises(ValueError, match=r"a\.b"):
            client.save({"a": {"b": 1}, "a.b": 2}, step=1)
        client.save({"a": {"b": 1}}, step=2).result()


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (True, TypeError),
        ("3", TypeError),
        (3.0, TypeError),
        (None, TypeError),
        (-1, ValueError),
        (2**63 - 1, ValueError),
    ],
    ids=repr,
)
def test_a_step_that_is_none(tmp_path: Path, sidecar: Sidecar, step: Any, error: type[Exception]) -> None:
    with CheckpointClient(tmp_path) as client:
        with pytest.raises(error, match="step"):
            client.save(LITTLE, step=step)
        client.save(LITTLE, step=1).result()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"slots": 9}, "slots is 9"),
        ({"backpressure": "hope"}, "'hope'"),
        ({"backpressure_timeout_s": 0}, "backpressure_timeout_s"),
        ({"stage_timeout_s": -1.0}, "stage_timeout_s"),
        ({"rank": 2, "world_size": 2}, "rank 2"),
    ],
    ids=str,
)
def test_a_client_option_out_of_bounds(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        CheckpointClient(tmp_path, **options)


# ---------------------------------------------------------------- clients that do not belong together


def test_a_second_client_of_the_same_rank_is_refused(tmp_path: Path, sidecar: Sidecar, ranks: RankStarter) -> None:
    with CheckpointClient(tmp_path) as client:
        with pytest.raises(SidecarRefused, match=f"pid {os.getpid()} .rank 0. has an open CheckpointClient already"):
            CheckpointClient(tmp_path)
        [text] = ranks.run(refused_text, 1, str(tmp_path), environment=sidecar.environment)
        assert f"already served for living pid {os.getpid()}" in text
        client.save(LITTLE, step=1).result()


def refused_text(directory: str) -> str:
    """Rank code: why this process gets no client."""
    try:
        CheckpointClient(directory)
    except SidecarRefused as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"world_size": 3, "rank": 1}, "WorldSizeDiffers"),
        ({"world_size": 2, "rank": 1, "other": True}, "DirectoryDiffers"),
    ],
    ids=["world size", "directory"],
)
def test_ranks_that_disagree_are_refused(
    tmp_path: Path, sidecar: Sidecar, options: dict[str, Any], reason: str
) -> None:
    directory = tmp_path / ("other" if options.pop("other", False) else "one")
    with CheckpointClient(tmp_path / "one", world_size=2, rank=0):
        with pytest.raises(SidecarRefused) as caught:
            CheckpointClient(directory, **options)
        assert caught.value.failure.kind == reason
        assert "rank 1" in str(caught.value)


# ---------------------------------------------------------------- no sidecar to be had


def unreachable(directory: Path, **options: Any) -> str:
    """Why no sidecar can be had."""
    with pytest.raises(CheckpointError) as caught:
        CheckpointClient(directory, **options)
    return str(caught.value)


def test_a_sidecar_that_nobody_starts_is_waited_for_within_a_bound(
    tmp_path: Path, shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_SIDECAR_SUPERVISED", "1")
    text = unreachable(tmp_path, connect_timeout_s=0.2)
    assert "nobody has started a sidecar" in text
    assert "CKPT_SIDECAR_SUPERVISED" in text


def test_a_shared_memory_root_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_SIDECAR_SHM_ROOT", str(tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in unreachable(tmp_path)


def test_a_shared_memory_root_whose_sockets_would_have_too_long_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_SIDECAR_SHM_ROOT", str(tmp_path / ("x" * 90)))
    assert "longer than 107 bytes" in unreachable(tmp_path)


@pytest.mark.parametrize("what", ["open to others", "link"])
def test_a_runtime_directory_that_is_not_ours_alone(tmp_path: Path, shm_root: Path, what: str) -> None:
    place = shm_root / f"ckpt-sidecar-{os.geteuid()}"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    if what == "link":
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir()
        place.chmod(0o777)
    text = unreachable(tmp_path / "checkpoints")
    assert f"{place} is not a private directory" in text
    assert files_below(tmp_path / "elsewhere") == []
    place.unlink() if what == "link" else place.rmdir()


# ---------------------------------------------------------------- versions


def test_a_frame_of_another_protocol_version_is_refused_by_name(sidecar: Sidecar) -> None:
    other = PROTOCOL_VERSION + 1
    frames = [encode(Heartbeat(), version=other), b"no frame", encode(AskStatus())]
    refused, not_msgpack, status = exchange_frames(sidecar.directory, frames, 3)
    assert isinstance(refused, Refused)
    assert refused.failure.kind == "RemoteProtocolError"
    assert f"protocol version {other}, this side {PROTOCOL_VERSION}" in refused.failure.message
    assert isinstance(not_msgpack, Refused)
    assert isinstance(status, Status)


def test_a_client_of_another_protocol_version_is_refused(
    tmp_path: Path, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = functools.partial(encode, version=PROTOCOL_VERSION + 1)
    with monkeypatch.context() as patch:
        patch.setattr("ckpt_trainer_client.sidecar_link.encode", other)
        with pytest.raises(
            SidecarRefused, match=f"protocol version {PROTOCOL_VERSION + 1}, this side {PROTOCOL_VERSION}"
        ):
            CheckpointClient(tmp_path)
    with CheckpointClient(tmp_path) as client:
        client.save(LITTLE, step=1).result()


NEWER_TORCH = """
import importlib.metadata, sys
real = importlib.metadata.version
importlib.metadata.version = lambda name: "99.1.0" if name == "torch" else real(name)
from ckpt_sidecar.__main__ import main
sys.exit(main())
"""


def test_a_sidecar_with_a_newer_torch_is_refused_naming_both(
    tmp_path: Path, start_sidecar: Callable[..., Sidecar]
) -> None:
    start_sidecar(entry=("-c", NEWER_TORCH))
    with pytest.raises(
        SidecarRefused, match=re.escape(f"the sidecar has torch 99.1.0, the trainer {torch.__version__}")
    ):
        CheckpointClient(tmp_path)
    assert files_below(tmp_path) == ["sidecar.log"]


def test_a_failed_save_leaves_the_last_good_checkpoint_alone(tmp_path: Path, sidecar: Sidecar) -> None:
    with CheckpointClient(tmp_path) as client:
        client.save({"x": torch.ones(3)}, step=1).result()
        with pytest.raises(UnsupportedLeaf):
            client.save({"x": lambda: 1}, step=1, overwrite=True)
        client.wait()
        target = {"x": torch.zeros(3)}
        assert client.load(target) == 1
        assert differences(target, {"x": torch.ones(3)}) == []
        client.save({"x": torch.zeros(3)}, step=2).result()
