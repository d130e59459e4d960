"""For every test: a clean environment before it, nothing left behind after it. For some: real sidecars and ranks.

One sidecar serves all tests of a file that need nothing special of it, each with its own directory and so its own
session. It and most others are forked with torch imported, as ranks are, and spare the two seconds of that. What
imports torch is imported by the fixtures that need it, so that tests without it stay quick.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from testkit.leaks import left_since, private_shm_root, snapshot
from testkit.outcomes import Outcomes

if TYPE_CHECKING:
    from testkit.ranks import RankStarter
    from testkit.sidecars import Sidecar

_LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_LAUNCHER_PREFIXES = ("CKPT_SIDECAR_", "TORCHELASTIC_", "PET_")
_OUTCOMES = pytest.StashKey[Outcomes]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """What ``make faults ARGS=...`` may say."""
    group = parser.getgroup("faults")
    group.addoption("--outcomes", type=Path, metavar="FILE", help="write the table of outcomes there too, as Markdown")
    group.addoption("--schedules", type=int, default=1_000_000, help="how many simulated jobs (%(default)s)")


def pytest_configure(config: pytest.Config) -> None:
    """Stock ``dcp.load`` warns where there is no process group."""
    config.addinivalue_line("filterwarnings", "ignore:torch.distributed is disabled:UserWarning")
    config.stash[_OUTCOMES] = Outcomes()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what became of disturbed saves, if any test has told."""
    told = config.stash[_OUTCOMES]
    failed = {report.nodeid for end in ("failed", "error") for report in terminalreporter.getreports(end)}
    if lines := told.lines(failed):
        terminalreporter.section("outcomes of faults")
        terminalreporter.write_line("\n".join(lines))
    if (path := config.getoption("outcomes")) is not None:
        path.write_text(told.markdown(failed))


@pytest.fixture
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    """Where a fault test tells what became of its saves; a table of all of them is printed at the end."""
    found = request.config.stash[_OUTCOMES]
    found.test = request.node.nodeid
    return found


@pytest.fixture
def tell(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Prints a line at once, past pytest's capture: a test of many minutes says how far it is."""
    reporter = pytestconfig.pluginmanager.getplugin("terminalreporter")
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def write(line: str) -> None:
        with capture.global_and_fixture_disabled():
            reporter.write_line(line)
            reporter.flush()

    return write


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees a launcher's variables of the shell that runs the tests."""
    for name in list(os.environ):
        if name in _LAUNCHER_VARIABLES or name.startswith(_LAUNCHER_PREFIXES):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After each test this process has the descriptors, threads and children that it had before."""
    before = snapshot()
    yield
    left = left_since(before)
    assert not left, f"the test has left behind: {left}"


@pytest.fixture
def shm_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This test's own shared memory, for clients and sidecars alike; empty again and served by nobody at the end."""
    with private_shm_root() as root:
        monkeypatch.setenv("CKPT_SIDECAR_SHM_ROOT", str(root))
        monkeypatch.setenv("CKPT_SIDECAR_NICE", "0")  # a test waits for it, and the machine may be busy with others
        yield root


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankStarter]:
    """Starts ranks that may import everything, and sidecars: both begin with our packages and torch imported."""
    from testkit.ranks import RankStarter

    preload = ("ckpt_sidecar.__main__", "ckpt_sidecar.daemon", "ckpt_sidecar.torch_work", "ckpt_trainer_client")
    starter = RankStarter(tmp_path_factory.mktemp("ranks"), preload=preload)
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def stock_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankStarter]:
    """Starts ranks that cannot import our packages."""
    from testkit.ranks import RankStarter

    starter = RankStarter(tmp_path_factory.mktemp("stock"), stock=True)
    yield starter
    starter.close()


@pytest.fixture(scope="module")
def file_sidecar(tmp_path_factory: pytest.TempPathFactory, ranks: RankStarter) -> Iterator[Sidecar]:
    """The sidecar of one test file; tests use it through ``sidecar``."""
    from testkit.forked_sidecars import ForkedSidecar

    with private_shm_root() as root:
        sidecar = ForkedSidecar(ranks, root, tmp_path_factory.mktemp("sidecar") / "sidecar.log")
        try:
            yield sidecar
        finally:
            code = sidecar.stop()
    assert code == 0, sidecar.log.read_text()[-4000:]


@pytest.fixture
def sidecar(file_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> Sidecar:
    """The file's sidecar; a client made in this test uses it."""
    for name, value in file_sidecar.environment.items():
        monkeypatch.setenv(name, value)
    return file_sidecar


@pytest.fixture
def start_sidecar(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: RankStarter
) -> Iterator[Callable[..., Sidecar]]:
    """Starts sidecars of this test alone, with options; the last one is used by clients made in this test. They are
    forked, unless the test is about one that a command line starts: ``as_command``, or an ``entry`` of its own."""
    from testkit.forked_sidecars import ForkedSidecar
    from testkit.sidecars import Sidecar

    started: list[Sidecar] = []

    def start(*, as_command: bool = False, **options: Any) -> Sidecar:
        log = tmp_path / "sidecar.log"
        if as_command or "entry" in options:
            sidecar = Sidecar(shm_root, log, **options)
        else:
            sidecar = ForkedSidecar(ranks, shm_root, log, **options)
        started.append(sidecar)
        for name, value in sidecar.environment.items():
            monkeypatch.setenv(name, value)
        return sidecar

    yield start
    for sidecar in started:
        sidecar.stop()
        print(sidecar.log.read_text()[-4000:])


@pytest.fixture(scope="session")
def sharded_saves(tmp_path_factory: pytest.TempPathFactory, ranks: RankStarter) -> dict[str, tuple[Path, Path]]:
    """``(ours, stock's)`` of the same sharded state, saved on a 1-D mesh of two ranks and on a 2x2 mesh."""
    from testkit.forked_sidecars import ForkedSidecar
    from testkit.sharded_states import SAVED_1D, SAVED_2D, save_sharded

    found = {}
    with private_shm_root() as root:
        sidecar = ForkedSidecar(ranks, root, tmp_path_factory.mktemp("sidecar") / "sidecar.log")
        try:
            for name, mesh_shape, placements in (("1d", (2,), SAVED_1D), ("2d", (2, 2), SAVED_2D)):
                folder = tmp_path_factory.mktemp(name)
                ours, stock = folder / "ours", folder / "stock"
                arguments = (str(ours), str(stock), mesh_shape, placements)
                world_size = len(mesh_shape) * 2
                ranks.run(save_sharded, world_size, *arguments, group=True, environment=sidecar.environment)
                found[name] = (ours / "step-2", stock)
        finally:
            sidecar.stop()
    return found
