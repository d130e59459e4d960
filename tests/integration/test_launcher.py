"""The wrappers as real processes: their exit codes, the signals they pass on, and how they look after the sidecar.

First ckpt-torchrun around stand-ins for both children, which do on request what real ones do only by accident; then
around the real sidecar and the real torchrun; then deploy/ckpt-launch.sh. Nothing sleeps: a test waits for a line that
one of the processes prints.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckpt_proto.runtime_dir import lock_owner, lock_path, runtime_dir

LIMIT_S = 60.0

# Prints every signal it gets. Its words: ready | late (READY after SIGUSR1) | mute | exit:N; then what SIGTERM does:
# drain (exit 0) | hang (until the second one) | deaf | hang-once:FILE (drain, from the second process on) | fail.
STAND_IN_SIDECAR = """
import argparse, os, pathlib, signal, sys
parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["run", "status"])
for name in ("--job-id", "--shm-root", "--start", "--end", "--timeout-s"):
    parser.add_argument(name)
for name in ("--ready-fd", "--supervisor-pid"):
    parser.add_argument(name, type=int)
args = parser.parse_args()
def note(text):
    os.write(2, f"SIDECAR {text}\\n".encode())
if args.command == "status":
    note("status: step 7 of rank 0")
    sys.exit()
def take(*names):
    found = signal.sigwaitinfo({getattr(signal, name) for name in names})
    note(f"got {signal.Signals(found.si_signo).name}")
    return signal.Signals(found.si_signo).name
watched = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
signal.pthread_sigmask(signal.SIG_BLOCK, {getattr(signal, name) for name in watched})
note(f"up pid={os.getpid()} sid={os.getsid(0)} cuda={os.environ['CUDA_VISIBLE_DEVICES']!r} in {os.getcwd()}")
start, _, code = args.start.partition(":")
if start == "exit":
    sys.exit(int(code))
if start == "late":
    take("SIGUSR1")
if start in ("ready", "late"):
    os.write(args.ready_fd, b"READY\\n")
while take(*watched) != "SIGTERM":
    pass
end, _, path = args.end.partition(":")
if end == "hang-once":
    first = not pathlib.Path(path).exists()
    pathlib.Path(path).touch()
    end = "hang" if first else "drain"
if end == "hang":
    take("SIGTERM")
    sys.exit(1)
while end == "deaf":
    take(*watched)
sys.exit(1 if end == "fail" else 0)
"""

# Prints every signal with its si_code until it gets SIGUSR2 (words: wait), then ends (exit:N | die:N).
STAND_IN_TORCHRUN = """
import os, signal, sys
watched = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
names = ("CKPT_SIDECAR_JOB_ID", "CKPT_SIDECAR_SHM_ROOT", "CKPT_SIDECAR_SUPERVISED")
os.write(2, f"TORCHRUN up pid={os.getpid()} pgid={os.getpgid(0)} env={[os.environ.get(n) for n in names]}\\n".encode())
for word in sys.argv[1:]:
    word, _, number = word.partition(":")
    while word == "wait":
        found = signal.sigwaitinfo(watched)
        os.write(2, f"TORCHRUN got {signal.Signals(found.si_signo).name} code={found.si_code}\\n".encode())
        if found.si_signo == signal.SIGUSR2:
            break
    if word == "mask":
        os.write(2, f"TORCHRUN mask {sorted(mask)}\\n".encode())
    if word == "exit":
        sys.exit(int(number))
    if word == "die":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        os.kill(os.getpid(), int(number))
"""

# ckpt-torchrun with shorter bounds; its first arguments are the commands of the sidecar and of torchrun.
DRIVER = """
import json, os, sys
from ckpt_sidecar import sidecar_supervisor
from ckpt_sidecar.launch_options import parse_command_line
from ckpt_sidecar.launcher import Commands, Launch
sidecar_supervisor.REPORT_EVERY_S = 0.02
sidecar_supervisor.STOP_TIMEOUT_S = 0.3
commands = Commands(*(tuple(command) for command in json.loads(sys.argv[1])))
options = parse_command_line(sys.argv[2:], os.environ, lambda: "drawn")
sys.exit(Launch(options, commands, os.environ, lambda: "step 7 of rank 0").run())
"""


class Wrapper:
    """A running ckpt-torchrun; everything that it and its children print arrives in ``seen``."""

    def __init__(self, command: list[str], **popen_options: object) -> None:
        read_fd, write_fd = os.pipe()
        self.process = subprocess.Popen(  # type: ignore[call-overload]
            command, stdin=subprocess.DEVNULL, stdout=write_fd, stderr=write_fd, **popen_options
        )
        os.close(write_fd)
        self._read_fd = read_fd
        self._open = True
        self.seen = ""

    def wait_for(self, pattern: str, count: int = 1) -> re.Match[str]:
        """The ``count``-th place where ``pattern`` is printed, waited for within the limit."""
        deadline_s = time.monotonic() + LIMIT_S
        while len(found := list(re.finditer(pattern, self.seen))) < count:
            assert self._open, f"ended without printing {pattern!r}:\n{self.seen}"
            self._read(deadline_s, pattern)
        return found[count - 1]

    def finish(self) -> int:
        """The exit code; all output has been read, so every process that held stderr has ended."""
        deadline_s = time.monotonic() + LIMIT_S
        while self._open:
            self._read(deadline_s, "its end")
        return self.process.wait(LIMIT_S)

    def send(self, signo: int) -> None:
        """A signal to the wrapper alone."""
        self.process.send_signal(signo)

    def close(self) -> None:
        """Leave nothing behind, however the test went."""
        if self._open:
            printed = [int(pid) for pid in re.findall(r" up pid=(\d+)", self.seen)]
            for pid in {*_descendants(self.process.pid), *filter(_is_python, printed)}:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
        self.process.wait(LIMIT_S)
        os.close(self._read_fd)

    def _read(self, deadline_s: float, what: str) -> None:
        left_s = deadline_s - time.monotonic()
        assert left_s > 0, f"waited {LIMIT_S} s for {what}:\n{self.seen}"
        if select.select([self._read_fd], [], [], left_s)[0]:
            chunk = os.read(self._read_fd, 65536)
            self.seen += chunk.decode()
            self._open = bool(chunk)


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return children + [below for child in children for below in _descendants(child)]


def _is_python(pid: int) -> bool:
    try:
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


Launcher = Callable[..., Wrapper]


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """The folder with the two stand-ins."""
    (tmp_path / "sidecar.py").write_text(STAND_IN_SIDECAR)
    (tmp_path / "torchrun.py").write_text(STAND_IN_TORCHRUN)
    return tmp_path


@pytest.fixture
def run() -> Iterator[Launcher]:
    """Starts a :class:`Wrapper`, and leaves nothing of it behind."""
    started: list[Wrapper] = []

    def start(command: list[str], **popen_options: object) -> Wrapper:
        started.append(Wrapper(command, **popen_options))
        return started[-1]

    yield start
    for wrapper in started:
        wrapper.close()


@pytest.fixture
def launch(run: Launcher, stand_ins: Path) -> Launcher:
    """Starts ckpt-torchrun around the two stand-ins: ``launch("<own options> -- <torchrun's words>")``."""

    def start(line: str, *, start: str = "ready", end: str = "drain", **popen_options: object) -> Wrapper:
        words = f"--start {start} --end {end} {line}"
        return run(
            _driver(_python(stand_ins / "sidecar.py"), _python(stand_ins / "torchrun.py"), words), **popen_options
        )

    return start


def _python(script: Path) -> list[str]:
    return [sys.executable, str(script)]


def _driver(sidecar: list[str], torchrun: list[str], line: str) -> list[str]:
    return [sys.executable, "-c", DRIVER, json.dumps([sidecar, torchrun]), *line.split()]


# ---------------------------------------------------------------- exit codes


@pytest.mark.parametrize(("words", "code"), [("exit:0", 0), ("exit:7", 7), ("die:9", 137), ("die:15", 143)])
def test_exit_code_is_torchruns(launch: Launcher, words: str, code: int) -> None:
    wrapper = launch(f"-- {words}")
    assert wrapper.finish() == code
    assert wrapper.seen.count("SIDECAR got SIGTERM") == 1


@pytest.mark.parametrize(("words", "code"), [("exit:0", 76), ("exit:7", 7)])
def test_a_failed_drain_has_its_own_exit_code_unless_torchrun_failed(launch: Launcher, words: str, code: int) -> None:
    wrapper = launch(f"-- {words}", end="fail")
    assert wrapper.finish() == code
    assert "the sidecar could not finish: it exited with code 1" in wrapper.seen


@pytest.mark.parametrize(("start", "code"), [("exit:1", 3), ("exit:4", 3), ("exit:0", 3), ("exit:2", 2)])
def test_no_torchrun_without_a_sidecar(launch: Launcher, start: str, code: int) -> None:
    wrapper = launch("-- exit:0", start=start)
    assert wrapper.finish() == code
    assert f"the sidecar exited with code {start[5:]} before it served" in wrapper.seen
    assert "TORCHRUN" not in wrapper.seen


def test_a_refused_sidecar_option_is_reported(launch: Launcher) -> None:
    wrapper = launch("--bogus 1 -- exit:0")
    assert wrapper.finish() == 2
    assert "unrecognized arguments: --bogus 1" in wrapper.seen
    assert re.search("does not accept its options: --job-id drawn .*--bogus 1", wrapper.seen)


def test_the_end_of_the_log_file_is_shown_when_the_sidecar_does_not_come_up(launch: Launcher, tmp_path: Path) -> None:
    log = tmp_path / "sidecar.log"
    log.write_text("an earlier life\n")
    wrapper = launch(f"--log-file {log} --bogus 1 -- exit:0")
    assert wrapper.finish() == 2
    assert "unrecognized arguments: --bogus 1" in wrapper.seen
    assert "an earlier life" not in wrapper.seen
    assert log.read_text().startswith("an earlier life\n")


def test_a_log_file_that_cannot_be_opened_is_reported(launch: Launcher, tmp_path: Path) -> None:
    wrapper = launch(f"--log-file {tmp_path}/none/sidecar.log -- exit:0")
    assert wrapper.finish() == 3
    assert f"{tmp_path}/none/sidecar.log" in wrapper.seen


def test_a_sidecar_that_never_serves_is_ended(launch: Launcher) -> None:
    wrapper = launch("--ready-timeout-s 0.2 -- exit:0", start="mute")
    assert wrapper.finish() == 3
    assert "does not serve after 0.2 s" in wrapper.seen
    assert "TORCHRUN" not in wrapper.seen


# ---------------------------------------------------------------- children


def test_sidecar_has_its_own_session_and_no_gpu_torchrun_has_the_wrappers_group(launch: Launcher) -> None:
    wrapper = launch("--job-id j7 --shm-root /x -- exit:0", env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"})
    sidecar = wrapper.wait_for(r"SIDECAR up pid=(\d+) sid=(\d+) cuda='' in /\n")
    torchrun = wrapper.wait_for(r"TORCHRUN up pid=\d+ pgid=(\d+) env=(.*)")
    assert sidecar[1] == sidecar[2]
    assert int(torchrun[1]) == os.getpgid(0)
    assert torchrun[2] == "['j7', '/x', '1']"
    assert wrapper.finish() == 0


def test_children_get_the_signal_mask_that_the_wrapper_was_given(launch: Launcher) -> None:
    wrapper = launch("-- mask exit:0")
    assert wrapper.finish() == 0
    assert "TORCHRUN mask []" in wrapper.seen


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"])
def test_a_signal_is_passed_on_once_and_to_torchrun_only(launch: Launcher, name: str) -> None:
    wrapper = launch("-- wait exit:5")
    wrapper.wait_for("TORCHRUN up")
    wrapper.send(signal.Signals[name])
    wrapper.wait_for(f"TORCHRUN got {name}")
    wrapper.send(signal.SIGUSR2)
    assert wrapper.finish() == 5
    assert re.findall(r"TORCHRUN got (\w+) code=0", wrapper.seen) == [name, "SIGUSR2"]
    assert re.findall(r"SIDECAR got (\w+)", wrapper.seen) == ["SIGTERM"]


def test_a_signal_that_ends_the_job_before_torchrun_started_is_not_lost(launch: Launcher) -> None:
    wrapper = launch("-- exit:0", start="late")
    wrapper.wait_for("SIDECAR up")
    wrapper.send(signal.SIGTERM)
    wrapper.wait_for("got SIGTERM before torchrun was started")
    assert wrapper.finish() == 143
    assert "TORCHRUN" not in wrapper.seen


def test_another_signal_before_torchrun_started_reaches_it(launch: Launcher) -> None:
    def block_usr1() -> None:  # torchrun inherits it, so the signal cannot hit it before it is listening
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

    wrapper = launch("-- wait exit:0", start="late", preexec_fn=block_usr1)
    sidecar_pid = int(wrapper.wait_for(r"SIDECAR up pid=(\d+)")[1])
    wrapper.send(signal.SIGUSR1)
    os.kill(sidecar_pid, signal.SIGUSR1)
    wrapper.wait_for("TORCHRUN got SIGUSR1 code=0")
    wrapper.send(signal.SIGUSR2)
    assert wrapper.finish() == 0


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a pseudo-terminal: the one that types, and the one that a process controls."""
    keyboard, screen = pty.openpty()
    yield keyboard, screen
    for fd in (keyboard, screen):
        with suppress(OSError):  # the test may have hung up itself
            os.close(fd)


@pytest.mark.parametrize(("key", "name"), [(b"\x03", "SIGINT"), (b"\x1c", "SIGQUIT")])
def test_a_key_of_the_terminal_reaches_torchrun_once(
    launch: Launcher, terminal: tuple[int, int], key: bytes, name: str
) -> None:
    keyboard, screen = terminal
    wrapper = launch("-- wait exit:0", start_new_session=True, preexec_fn=lambda: _control(screen))
    wrapper.wait_for("TORCHRUN up")
    os.write(keyboard, key)
    wrapper.wait_for(f"TORCHRUN got {name}")
    wrapper.send(signal.SIGUSR2)
    assert wrapper.finish() == 0
    assert re.findall(r"TORCHRUN got (\w+) code=(\d+)", wrapper.seen) == [(name, "128"), ("SIGUSR2", "0")]
    assert re.findall(r"SIDECAR got (\w+)", wrapper.seen) == ["SIGTERM"]


def test_a_hangup_of_the_terminal_is_passed_on_by_the_session_leader(
    launch: Launcher, terminal: tuple[int, int]
) -> None:
    keyboard, screen = terminal
    wrapper = launch("-- wait exit:0", start_new_session=True, preexec_fn=lambda: _control(screen))
    wrapper.wait_for("TORCHRUN up")
    os.close(screen)
    os.close(keyboard)
    wrapper.wait_for("TORCHRUN got SIGHUP code=0")
    wrapper.send(signal.SIGUSR2)
    assert wrapper.finish() == 0


def _control(screen: int) -> None:
    fcntl.ioctl(screen, termios.TIOCSCTTY, 0)


# ---------------------------------------------------------------- supervision and drain


def test_a_dead_sidecar_is_reported_and_started_again(launch: Launcher) -> None:
    wrapper = launch("-- wait exit:0")
    wrapper.wait_for("TORCHRUN up")
    os.kill(int(wrapper.wait_for(r"SIDECAR up pid=(\d+)")[1]), signal.SIGKILL)
    wrapper.wait_for(r"the sidecar was killed by SIGKILL; starting it again in 0\.5 s")
    wrapper.wait_for("SIDECAR up", count=2)
    wrapper.wait_for("the sidecar serves again")
    wrapper.send(signal.SIGUSR2)
    assert wrapper.finish() == 0
    assert wrapper.seen.count("SIDECAR got SIGTERM") == 1


def test_a_sidecar_that_is_down_when_torchrun_ends_is_started_again_to_finish(launch: Launcher) -> None:
    wrapper = launch("-- wait exit:0")
    wrapper.wait_for("TORCHRUN up")
    os.kill(int(wrapper.wait_for(r"SIDECAR up pid=(\d+)")[1]), signal.SIGKILL)
    wrapper.wait_for("starting it again")
    wrapper.send(signal.SIGUSR2)
    assert wrapper.finish() == 0
    assert wrapper.seen.count("SIDECAR up") == 2
    assert wrapper.seen.count("SIDECAR got SIGTERM") == 1


def test_a_sidecar_that_crashes_while_draining_is_started_again_to_finish(launch: Launcher, tmp_path: Path) -> None:
    wrapper = launch("-- exit:0", end=f"hang-once:{tmp_path / 'hung'}")
    pid = int(wrapper.wait_for(r"SIDECAR up pid=(\d+)")[1])
    wrapper.wait_for("SIDECAR got SIGTERM")
    wrapper.wait_for("waiting up to")
    os.kill(pid, signal.SIGKILL)
    assert wrapper.finish() == 0
    assert wrapper.seen.count("SIDECAR got SIGTERM") == 2


def test_a_sidecar_that_somebody_else_told_to_drain_has_lost_nothing(launch: Launcher) -> None:
    wrapper = launch("-- wait exit:0")
    wrapper.wait_for("TORCHRUN up")
    os.kill(int(wrapper.wait_for(r"SIDECAR up pid=(\d+)")[1]), signal.SIGTERM)
    wrapper.wait_for("the sidecar exited with code 0; starting it again")
    wrapper.send(signal.SIGUSR2)
    assert wrapper.finish() == 0


def test_a_long_drain_says_what_it_waits_for(launch: Launcher) -> None:
    wrapper = launch("-- exit:0", end="hang")
    wrapper.wait_for(r"waiting up to \d+ s more for the sidecar: step 7 of rank 0", count=2)
    wrapper.send(signal.SIGTERM)
    wrapper.finish()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_while_draining_ends_the_drain(launch: Launcher, name: str) -> None:
    wrapper = launch("-- exit:0", end="hang")
    wrapper.wait_for("SIDECAR got SIGTERM")
    wrapper.wait_for("waiting up to")
    wrapper.send(signal.Signals[name])
    assert wrapper.finish() == 76
    assert f"got {name} while the sidecar was finishing: ending it. Not durable: step 7 of rank 0" in wrapper.seen
    assert wrapper.seen.count("SIDECAR got SIGTERM") == 2


def test_other_signals_while_draining_change_nothing(launch: Launcher) -> None:
    wrapper = launch("-- exit:0", end="hang")
    wrapper.wait_for("waiting up to")
    for signo in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        wrapper.send(signo)
    wrapper.wait_for("waiting up to", count=3)
    wrapper.send(signal.SIGTERM)
    assert wrapper.finish() == 76


def test_a_drain_past_its_bound_is_ended(launch: Launcher) -> None:
    wrapper = launch("--drain-timeout-s 0.1 -- exit:0", end="hang")
    assert wrapper.finish() == 76
    assert "has not finished within 0.1 s: ending it. Not durable: step 7 of rank 0" in wrapper.seen
    assert wrapper.seen.count("SIDECAR got SIGTERM") == 2


def test_a_sidecar_that_ignores_everything_is_killed(launch: Launcher) -> None:
    wrapper = launch("--drain-timeout-s 0.1 -- exit:3", end="deaf")
    assert wrapper.finish() == 3
    assert re.search(r"does not end within 0\.3 s: killing it", wrapper.seen)


# ---------------------------------------------------------------- the real sidecar, the real torchrun

REAL_SIDECAR = [sys.executable, "-m", "ckpt_sidecar"]
REAL_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def test_around_the_real_torchrun(run: Launcher, shm_root: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\n"
        "from ckpt_proto.runtime_dir import lock_owner, runtime_dir\n"
        "owner = lock_owner(runtime_dir(os.environ['CKPT_SIDECAR_SHM_ROOT'], os.environ['CKPT_SIDECAR_JOB_ID']))\n"
        'print(f\'RANK {os.environ["RANK"]} of {os.environ["TORCHELASTIC_RUN_ID"]} has sidecar {owner}\', flush=True)\n'
    )
    command = [sys.executable, "-m", "ckpt_sidecar.launcher", "--shm-root", str(shm_root), "--nice", "0", "--"]
    wrapper = run([*command, "--nproc-per-node", "2", "--rdzv-id", "run7", "--master-port", "0", str(script)])
    owners = {wrapper.wait_for(rf"RANK {rank} of run7 has sidecar (\d+)")[1] for rank in range(2)}
    assert wrapper.finish() == 0
    assert "serves job run7" in wrapper.seen
    assert len(owners) == 1
    assert "stopping after a complete drain" in wrapper.seen
    assert list(shm_root.iterdir()) == []


def test_sigterm_through_the_real_torchrun_to_a_rank(run: Launcher, shm_root: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal\n"
        "def end(signo, frame):\n"
        "    print('RANK got', signo, flush=True)\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('RANK up', flush=True)\n"
        "while True:\n"
        "    signal.pause()\n"
    )
    command = [sys.executable, "-m", "ckpt_sidecar.launcher", "--shm-root", str(shm_root), "--"]
    wrapper = run([*command, "--master-port", "0", str(script)])
    wrapper.wait_for("RANK up")
    wrapper.send(signal.SIGTERM)
    wrapper.wait_for("RANK got 15")
    assert wrapper.finish() == 1, "torchrun's own exit code after SIGTERM"
    assert wrapper.seen.count("RANK got 15") == 1
    assert "stopping after a complete drain" in wrapper.seen


def test_the_real_sidecar_is_started_again(run: Launcher, shm_root: Path, stand_ins: Path) -> None:
    torchrun = _python(stand_ins / "torchrun.py")
    wrapper = run(_driver(REAL_SIDECAR, torchrun, f"--job-id j --shm-root {shm_root} -- wait exit:0"))
    wrapper.wait_for("TORCHRUN up")
    owner = lock_owner(runtime_dir(shm_root, "j"))
    assert owner is not None
    os.kill(owner, signal.SIGKILL)
    again = wrapper.wait_for(r"the sidecar serves again \(pid (\d+)\)")
    assert lock_owner(runtime_dir(shm_root, "j")) == int(again[1])
    wrapper.send(signal.SIGUSR2)
    assert wrapper.finish() == 0


def test_the_real_sidecar_of_a_killed_wrapper_drains_and_goes(run: Launcher, shm_root: Path, stand_ins: Path) -> None:
    line = f"--job-id j --shm-root {shm_root} -- wait exit:0"
    wrapper = run(_driver(REAL_SIDECAR, _python(stand_ins / "torchrun.py"), line))
    torchrun = int(wrapper.wait_for(r"TORCHRUN up.*pid=(\d+)")[1])
    wrapper.send(signal.SIGKILL)
    wrapper.wait_for(rf"the supervisor \(pid {wrapper.process.pid}\) is gone")
    wrapper.wait_for("stopping after a complete drain")
    os.kill(torchrun, signal.SIGUSR2)
    assert wrapper.finish() == -signal.SIGKILL
    assert not runtime_dir(shm_root, "j").exists()


def test_a_second_real_sidecar_of_the_job_is_refused(run: Launcher, shm_root: Path, stand_ins: Path) -> None:
    line = f"--job-id j --shm-root {shm_root} -- wait exit:0"
    first = run(_driver(REAL_SIDECAR, _python(stand_ins / "torchrun.py"), line))
    first.wait_for("TORCHRUN up")
    second = run(_driver(REAL_SIDECAR, _python(stand_ins / "torchrun.py"), line))
    assert second.finish() == 3
    assert "another sidecar serves job j on this node" in second.seen
    assert "TORCHRUN" not in second.seen
    first.send(signal.SIGUSR2)
    assert first.finish() == 0


def test_an_option_that_the_real_sidecar_does_not_know(run: Launcher, shm_root: Path) -> None:
    wrapper = run(_driver(REAL_SIDECAR, REAL_TORCHRUN, f"--shm-root {shm_root} --bogus 1 -- train.py"))
    assert wrapper.finish() == 2
    assert "unrecognized arguments: --bogus 1" in wrapper.seen


# ---------------------------------------------------------------- deploy/ckpt-launch.sh

_NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
SCRIPT = Path(__file__).parents[2] / "deploy" / "ckpt-launch.sh"


@pytest.fixture
def launch_by_script(run: Launcher, stand_ins: Path) -> Launcher:
    """Starts ckpt-launch.sh around the two stand-ins."""
    program = stand_ins / "ckpt-sidecar"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(_python(stand_ins / "sidecar.py"))} "$@"\n')
    program.chmod(0o755)
    environ = {**os.environ, "PATH": f"{stand_ins}:{os.environ['PATH']}"}
    torchrun = _python(stand_ins / "torchrun.py")

    def start(words: str, *, options: str = "", start: str = "ready", end: str = "drain", screen: int = -1) -> Wrapper:
        def prepare() -> None:
            for signo in (signal.SIGINT, signal.SIGQUIT):  # ignored in what a script runs in the background
                signal.signal(signo, signal.SIG_DFL)
            if screen >= 0:
                _control(screen)

        options = f"--start {start} --end {end} {options}"
        command = ["bash", str(SCRIPT), *options.split(), "--", *torchrun, *words.split()]
        return run(command, env=environ, preexec_fn=prepare, start_new_session=screen >= 0)

    return start


@pytest.mark.parametrize(("words", "code"), [("exit:0", 0), ("exit:7", 7), ("die:9", 137), ("die:15", 143)])
def test_script_keeps_the_exit_code(launch_by_script: Launcher, words: str, code: int) -> None:
    wrapper = launch_by_script(words, options="--job-id j7 --shm-root /x")
    assert wrapper.finish() == code
    assert wrapper.seen.count("SIDECAR got SIGTERM") == 1
    assert "env=['j7', '/x', None]" in wrapper.seen
    sidecar = wrapper.wait_for(r"SIDECAR up pid=(\d+) sid=(\d+) cuda=''")
    assert sidecar[1] == sidecar[2]


@pytest.mark.parametrize(("words", "code"), [("exit:0", 76), ("exit:7", 7)])
def test_script_after_a_failed_drain(launch_by_script: Launcher, words: str, code: int) -> None:
    wrapper = launch_by_script(words, end="fail")
    assert wrapper.finish() == code
    assert "the sidecar could not finish (exit code 1)" in wrapper.seen


@pytest.mark.parametrize(("start", "code"), [("exit:1", 3), ("exit:4", 3), ("exit:2", 2)])
def test_script_without_a_sidecar(launch_by_script: Launcher, start: str, code: int) -> None:
    wrapper = launch_by_script("exit:0", start=start)
    assert wrapper.finish() == code
    assert "TORCHRUN" not in wrapper.seen


def test_script_drains_the_sidecar_that_a_client_has_started_in_place_of_a_dead_one(
    launch_by_script: Launcher, run: Launcher, stand_ins: Path
) -> None:
    first = launch_by_script("wait exit:0", options=f"--job-id j --shm-root {stand_ins}")
    pid = int(first.wait_for(r"SIDECAR up pid=(\d+)")[1])
    first.wait_for("TORCHRUN up")
    os.kill(pid, signal.SIGKILL)
    second = run([*_python(stand_ins / "sidecar.py"), "run", "--start", "mute", "--end", "drain"], env=_NO_GPU)
    pid = int(second.wait_for(r"SIDECAR up pid=(\d+)")[1])
    lock = lock_path(runtime_dir(stand_ins, "j"))
    lock.parent.mkdir(parents=True)
    lock.write_text(f"{pid}\n")
    first.send(signal.SIGUSR2)
    second.wait_for("SIDECAR got SIGTERM")
    assert second.finish() == 0
    assert first.finish() == 0
    assert f"a client has started another one (pid {pid})" in first.seen


def test_script_after_its_sidecar_has_died(launch_by_script: Launcher, stand_ins: Path) -> None:
    wrapper = launch_by_script("wait exit:0", options=f"--job-id j --shm-root {stand_ins}")
    pid = int(wrapper.wait_for(r"SIDECAR up pid=(\d+)")[1])
    wrapper.wait_for("TORCHRUN up")
    os.kill(pid, signal.SIGKILL)
    wrapper.send(signal.SIGUSR2)
    assert wrapper.finish() == 76
    assert "the sidecar had ended before the command did" in wrapper.seen


@pytest.mark.parametrize("options", ["--job-id", "--drain-timeout-s soon"])
def test_script_with_wrong_options(launch_by_script: Launcher, options: str) -> None:
    wrapper = launch_by_script("exit:0", options=options)
    assert wrapper.finish() == 2
    assert "TORCHRUN" not in wrapper.seen


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"])
def test_script_passes_a_signal_on_once(launch_by_script: Launcher, name: str) -> None:
    wrapper = launch_by_script("wait exit:5")
    wrapper.wait_for("TORCHRUN up")
    wrapper.send(signal.Signals[name])
    wrapper.wait_for(f"TORCHRUN got {name}")
    wrapper.send(signal.SIGUSR2)
    assert wrapper.finish() == 5
    assert re.findall(r"TORCHRUN got (\w+) code=0", wrapper.seen) == [name, "SIGUSR2"]
    assert re.findall(r"SIDECAR got (\w+)", wrapper.seen) == ["SIGTERM"]


def test_script_passes_ctrl_c_on_once(launch_by_script: Launcher, terminal: tuple[int, int]) -> None:
    keyboard, screen = terminal
    wrapper = launch_by_script("wait exit:0", screen=screen)
    wrapper.wait_for("TORCHRUN up")
    os.write(keyboard, b"\x03")
    wrapper.wait_for("TORCHRUN got SIGINT")
    wrapper.send(signal.SIGUSR2)
    assert wrapper.finish() == 0
    assert re.findall(r"TORCHRUN got (\w+)", wrapper.seen) == ["SIGINT", "SIGUSR2"]


def test_script_does_not_lose_an_early_sigterm(launch_by_script: Launcher) -> None:
    wrapper = launch_by_script("exit:0", start="late")
    pid = int(wrapper.wait_for(r"SIDECAR up pid=(\d+)")[1])
    wrapper.send(signal.SIGTERM)
    os.kill(pid, signal.SIGUSR1)
    assert wrapper.finish() == 143
    assert "TORCHRUN" not in wrapper.seen


def test_script_ends_the_drain_on_a_signal(launch_by_script: Launcher) -> None:
    wrapper = launch_by_script("exit:0", end="hang")
    wrapper.wait_for("SIDECAR got SIGTERM")
    wrapper.send(signal.SIGTERM)
    assert wrapper.finish() == 76
    assert "got SIGTERM while the sidecar was finishing" in wrapper.seen
    assert "status: step 7 of rank 0" in wrapper.seen


def test_script_ends_a_drain_past_its_bound(launch_by_script: Launcher) -> None:
    wrapper = launch_by_script("exit:0", options="--drain-timeout-s 1", end="hang")
    assert wrapper.finish() == 76
    assert "has not finished within 1 s" in wrapper.seen
    assert wrapper.seen.count("SIDECAR got SIGTERM") == 2
