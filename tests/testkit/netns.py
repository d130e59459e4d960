"""Several machines on one: network namespaces on a bridge, whose cables can be pulled.

Nothing is named and nothing is seen from outside: each namespace, that of the bridge too, is held by a process that
ends when its standard input does. Whatever happens to the test, the kernel then takes namespaces, cables and addresses
back. Needs root, or a kernel that lets everybody make user namespaces.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from testkit.leaks import processes_in_network
from testkit.waiting import LIMIT_S

_TOOLS = ("ip", "unshare", "nsenter")


class Network:
    """``count`` nodes, each with a loopback and one cable to a bridge. Made by :func:`network`."""

    def __init__(self, count: int, stack: ExitStack) -> None:
        self._entering = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
        self._hub = stack.enter_context(_held(unshare))
        self._nodes = [stack.enter_context(_held([*self._enter(self._hub), "unshare", "--net"])) for _ in range(count)]
        # By name and read now: the pid of a holder that somebody has killed may be another process's by then.
        self._namespaces = [os.readlink(f"/proc/{pid}/ns/net") for pid in self._nodes]
        assert os.readlink("/proc/self/ns/net") not in self._namespaces
        self._run(self._hub, "ip", "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        self._run(self._hub, "ip", "link", "set", "bridge", "up")
        for node, pid in enumerate(self._nodes):
            cable = ("name", "eth0", "netns", str(pid))
            self._run(self._hub, "ip", "link", "add", f"node{node}", "type", "veth", "peer", *cable)
            self._run(self._hub, "ip", "link", "set", f"node{node}", "master", "bridge", "up")
            self._run(pid, "ip", "link", "set", "lo", "up")
            self._run(pid, "ip", "address", "add", f"{self.address(node)}/24", "dev", "eth0")
            self._run(pid, "ip", "-6", "address", "add", f"{self.address6(node)}/64", "dev", "eth0", "nodad")
            self._run(pid, "ip", "link", "set", "eth0", "up")

    @staticmethod
    def address(node: int) -> str:
        """IPv4 address of a node."""
        return f"10.77.0.{node + 1}"

    @staticmethod
    def address6(node: int) -> str:
        """IPv6 address of a node."""
        return f"fd77::{node + 1:x}"

    def command(self, node: int, arguments: Sequence[str]) -> list[str]:
        """``arguments`` as a command that runs in the network of ``node``; the process that is started becomes it."""
        return [*self._enter(self._nodes[node]), *arguments]

    def popen(self, node: int, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on ``node``; the caller ends it. What it leaves there is killed at the end."""
        return subprocess.Popen(self.command(node, arguments), **options)

    def run(self, node: int, arguments: Sequence[str]) -> str:
        """Run a command on ``node`` to its end; what it has printed."""
        done = subprocess.run(self.command(node, arguments), capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, f"{arguments} on node {node}: {done.stderr}"
        return done.stdout

    def cut(self, node: int, *, silently: bool = False) -> None:
        """Pull the node's cable. ``silently``: somewhere on the way, so that the node's own interface stays up."""
        state = ("nomaster",) if silently else ("down",)
        self._run(self._hub, "ip", "link", "set", f"node{node}", *state)

    def heal(self, node: int) -> None:
        """Undo :meth:`cut`."""
        self._run(self._hub, "ip", "link", "set", f"node{node}", "master", "bridge", "up")

    def kill_all(self) -> None:
        """End whatever runs on the nodes but the holders."""
        for pid, namespace in zip(self._nodes, self._namespaces, strict=True):
            for other in processes_in_network(namespace):
                if other != pid:
                    os.kill(other, signal.SIGKILL)

    def _enter(self, pid: int) -> list[str]:
        return ["nsenter", f"--target={pid}", *self._entering, "--net", "--"]

    def _run(self, pid: int, *arguments: str) -> None:
        done = subprocess.run([*self._enter(pid), *arguments], capture_output=True, text=True)
        if done.returncode != 0:
            raise OSError(f"{' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def network(count: int) -> Iterator[Network]:
    """A network of ``count`` nodes; the test is skipped, with the reason, where none can be made."""
    with ExitStack() as stack:
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            pytest.skip(f"needs network namespaces: no {', '.join(missing)} here")
        try:
            made = Network(count, stack)
        except OSError as error:
            pytest.skip(f"needs network namespaces: {error}")
        stack.callback(made.kill_all)
        yield made


@contextmanager
def _held(unshare: Sequence[str]) -> Iterator[int]:
    """Pid of a process that holds the namespaces that ``unshare`` makes, until the end or this process's death."""
    with subprocess.Popen(
        [*unshare, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None and holder.stderr is not None
        try:
            try:
                holder.stdin.write(b"?")
            except BrokenPipeError:
                pass  # it has failed already and says why
            if holder.stdout.read(1) != b"?":  # comes back once unshare has become cat
                raise OSError(f"{' '.join(unshare)}: {holder.stderr.read().decode().strip()}")
            yield holder.pid
        finally:
            holder.stdin.close()
