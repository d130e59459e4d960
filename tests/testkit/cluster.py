"""Nodes with a sidecar and ranks each, on network namespaces of one machine; storage is shared, as on a cluster."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ckpt_proto.runtime_dir import runtime_dir
from testkit import node_rank
from testkit.leaks import private_shm_root
from testkit.netns import Network, network
from testkit.waiting import LIMIT_S

JOB_ID = "job"
PORT = 23_451


class NodeRank:
    """One rank in its process; :meth:`ask` sends an order, :meth:`hear` waits for the answer."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        self._text = b""

    def tell(self, **order: Any) -> None:
        """Send an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, timeout_s: float = LIMIT_S) -> dict[str, Any]:
        """The next answer."""
        assert self.process.stdout is not None
        while b"\n" not in self._text:
            readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
            assert readable, f"rank {self.rank} has not answered within {timeout_s} s"
            chunk = os.read(self.process.stdout.fileno(), 65536)
            assert chunk, f"rank {self.rank} has ended with exit code {self.process.wait()}"
            self._text += chunk
        line, _, self._text = self._text.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """SIGKILL, unless it has ended, and wait."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.kill()
        self.process.wait()


class Node:
    """One node: its network, shared memory, sidecar and ranks."""

    def __init__(self, index: int, net: Network, shm_root: Path, log: Path, environment: dict[str, str]) -> None:
        self.index = index
        self.name = f"node-{'abcdefgh'[index]}"
        self.shm_root = shm_root
        self.log = log
        self._net = net
        self._environment = {
            **environment,
            "CKPT_SIDECAR_SHM_ROOT": str(shm_root),
            "CKPT_SIDECAR_NODE": self.name,
        }
        self.ranks: list[NodeRank] = []
        self.sidecar: subprocess.Popen[bytes] | None = None

    def start_sidecar(self, *options: str) -> None:
        """Start the node's sidecar and wait until it serves."""
        self.begin_sidecar(*options)()

    def begin_sidecar(self, *options: str) -> Callable[[], None]:
        """Start the node's sidecar; what is returned waits until it serves, and must be called."""
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "ckpt_sidecar", "--verbose", "run", "--ready-fd", str(writer), *options]
        command += ["--job-id", JOB_ID, "--shm-root", str(self.shm_root), "--nice", "0"]
        with open(self.log, "ab") as log:
            self.sidecar = self._net.popen(
                self.index,
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[writer],
                start_new_session=True,
            )
        os.close(writer)

        def await_ready() -> None:
            with open(reader, "rb") as pipe:
                assert pipe.read1(16) == b"READY\n", self.log.read_text()[-2000:]

        return await_ready

    def kill_sidecar(self) -> None:
        """SIGKILL, and wait."""
        assert self.sidecar is not None
        self.sidecar.kill()
        self.sidecar.wait()

    def stop_sidecar(self) -> int:
        """SIGTERM; the exit code."""
        assert self.sidecar is not None
        self.sidecar.terminate()
        return self.sidecar.wait(LIMIT_S)

    def start_rank(self, rank: int, world_size: int, directory: Path, log: Path, **variables: str) -> NodeRank:
        """Start a rank as torchrun would, but for NODE_RANK, which nobody may need."""
        environment = {**self._environment, "RANK": str(rank), "WORLD_SIZE": str(world_size), **variables}
        with open(log, "ab") as errors:
            process = self._net.popen(
                self.index,
                [sys.executable, node_rank.__file__, str(directory)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self.ranks.append(NodeRank(rank, process))
        return self.ranks[-1]

    def regions(self) -> list[str]:
        """Names of the files in the job's directory."""
        directory = runtime_dir(self.shm_root, JOB_ID)
        return sorted(path.name for path in directory.iterdir()) if directory.exists() else []

    def close(self) -> None:
        """End everything of this node, however the test went."""
        for rank in self.ranks:
            rank.kill()
        if self.sidecar is not None and self.sidecar.poll() is None:
            self.sidecar.kill()
            self.sidecar.wait()


class Cluster:
    """Nodes, and the ranks of one life of a job on them."""

    def __init__(self, net: Network, nodes: Sequence[Node], folder: Path) -> None:
        self.net = net
        self.nodes = list(nodes)
        self.directory = folder / "checkpoints"
        self._folder = folder

    @property
    def ranks(self) -> list[NodeRank]:
        """All ranks that were started, in the order of nodes."""
        return [rank for node in self.nodes for rank in node.ranks]

    def start_ranks(self, per_node: int, nodes: Sequence[Node] | None = None, **variables: str) -> None:
        """``per_node`` ranks on every node, or on these; returns when each has been welcomed."""
        chosen = self.nodes if nodes is None else list(nodes)
        for node in self.nodes:
            node.ranks.clear()
        for node in chosen:
            self.launch(node, per_node, per_node * len(chosen), **variables)
        for each in self.ranks:
            assert "welcomed" in each.hear()

    def launch(self, node: Node, per_node: int, world_size: int, **variables: str) -> None:
        """Start the ranks of one node; nobody waits for their welcome."""
        for local in range(per_node):
            rank = node.index * per_node + local
            log = self._folder / f"rank-{rank}.log"
            node.start_rank(rank, world_size, self.directory, log, LOCAL_WORLD_SIZE=str(per_node), **variables)

    def all(self, **order: Any) -> list[dict[str, Any]]:
        """The same order to every rank; the answers in order."""
        return together(self.ranks, **order)

    def logs(self) -> str:
        """What everybody has logged, for a failed test."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self._folder.glob("*.log")))


def together(ranks: Sequence[NodeRank], **order: Any) -> list[dict[str, Any]]:
    """The same order to these ranks at once; the answers in order."""
    for rank in ranks:
        rank.tell(**order)
    return [rank.hear() for rank in ranks]


@contextmanager
def cluster(count: int, folder: Path, make_key: Callable[[Path], object], *options: str) -> Iterator[Cluster]:
    """``count`` nodes with a sidecar each; ``options`` are the sidecars'. Every sidecar must end well in the end."""
    key = folder / "peer.key"
    make_key(key)
    with ExitStack() as stack:
        net = stack.enter_context(network(count))
        environment = {
            **os.environ,
            "CKPT_SIDECAR_JOB_ID": JOB_ID,
            "CKPT_SIDECAR_SUPERVISED": "1",
            "CKPT_SIDECAR_PEER_KEY_FILE": str(key),
            "CKPT_SIDECAR_COORDINATOR": f"{net.address(0)}:{PORT}",
        }
        nodes = []
        for index in range(count):
            root = stack.enter_context(private_shm_root())
            nodes.append(Node(index, net, root, folder / f"sidecar-{index}.log", environment))
            stack.callback(nodes[-1].close)
        for await_ready in [node.begin_sidecar(*options) for node in nodes]:
            await_ready()
        made = Cluster(net, nodes, folder)
        try:
            yield made
        except BaseException:
            print(made.logs())
            raise
        codes = [node.stop_sidecar() for node in nodes]
        assert codes == [0] * count, made.logs()
