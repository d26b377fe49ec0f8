"""Raylets on this machine that can be killed, silenced and added while a job runs on them, as hosts can.

`LocalNodes` start them beside each other, as Ray's own tests do; `NodesApart` (nodes_apart.py) each on a host apart.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from regrow.drill.processes import of_ray, send, title, tree, wait_until_gone
from regrow.errors import first_line
from regrow.runtime.cluster import patient_start
from regrow.train.orders import ORDERS

ROOT = Path(__file__).parents[3]
GONE_S = 20.0  # for killed processes to be gone
REACH_S = 60.0  # for a node that was cut off to be reached again
DRAIN_REASON = 2  # DRAIN_NODE_REASON_PREEMPTION of Ray's autoscaler.proto


class Process(Protocol):
    """The job's process: a Popen, or one on a host apart. `pid` is as this process sees it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class Node(Protocol):
    """A raylet that is up."""

    @property
    def node_id(self) -> str: ...


class Nodes(ABC):
    """A head without room for workers, and nodes with it. Nodes are numbered from 0, the oldest that is up first."""

    folder: str  # Ray's
    nodes: Sequence[Node]
    state: Any  # Ray's view of its cluster, ray._private.state.GlobalState

    @property
    @abstractmethod
    def address(self) -> str:
        """Of the head, for `cluster.address`."""

    @abstractmethod
    def add(self) -> str:
        """Start one more; its id."""

    @abstractmethod
    def kill(self, number: int) -> list[int]:
        """The node goes at once, with all its processes and what it holds in memory; its processes."""

    @abstractmethod
    def pids(self, number: int) -> list[int]:
        """The raylet's, and those of all that it started."""

    @abstractmethod
    def pid(self, node_id: str, pid: int) -> int:
        """A process of a node, by the pid that it has there, as this process sees it; 0 where it has ended."""

    @abstractmethod
    def memory_folders(self) -> list[Path]:
        """Where the nodes' snapshots are, for each file system in memory."""

    @abstractmethod
    def memory_of(self, node_id: str) -> list[Path]:
        """The folders of a node's snapshots."""

    @abstractmethod
    def orders(self, node_id: str) -> Path:
        """Where orders are left for a node's workers: `train.orders`."""

    @abstractmethod
    def processes(self) -> list[int]:
        """Every process of these nodes and of jobs on them."""

    @abstractmethod
    def start_job(self, arguments: list[str], output: Path) -> Process:
        """Start `python -m jobs.pretrain` where the head is; what it prints is added to `output`."""

    @abstractmethod
    def logs(self) -> dict[str, Path]:
        """Ray's folders of logs, by the names that they are to be kept under."""

    @abstractmethod
    def close(self) -> None:
        """End them, and whatever a job has left."""

    @abstractmethod
    def left(self) -> list[str]:
        """What is still there once they are closed."""

    def number_of(self, node_id: str) -> int | None:
        return next((number for number, node in enumerate(self.nodes) if node.node_id == node_id), None)

    def drain(self, number: int, *, deadline_s: float, message: str) -> None:
        """Tell Ray that the node will go. Raises RuntimeError where Ray does not take it."""
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.exceptions import RpcError

        client, give_up_at = GcsClient(address=self.address), time.monotonic() + REACH_S
        while True:
            until_ms = int((time.time() + deadline_s) * 1000)
            try:
                accepted, problem = client.drain_node(self.nodes[number].node_id, DRAIN_REASON, message, until_ms)
                break
            except RpcError as error:  # an earlier fault has cut the node off, for a while
                if time.monotonic() > give_up_at:
                    raise RuntimeError(f"the drain was not accepted: {first_line(error)}") from error
                time.sleep(1.0)
        if not accepted:
            raise RuntimeError(f"the drain was not accepted: {problem}")

    def actors(self) -> list[dict[str, Any]]:
        """Every actor that is not dead, as Ray's actor table shows it."""
        found = self.state.actor_table(None).values()
        return [actor for actor in found if actor["State"] != "DEAD"]

    def placement_groups(self) -> list[str]:
        """Names or ids of those that still hold or wait for room."""
        table = self.state.placement_group_table().values()
        return [each["name"] or each["placement_group_id"] for each in table if each["state"] != "REMOVED"]

    def titles(self) -> list[tuple[int, str]]:
        """Every process of these nodes and of jobs on them, with what it calls itself."""
        return [(pid, title(pid)) for pid in self.processes()]


class LocalNodes(Nodes):
    """Raylets beside each other, with one address and one memory."""

    def __init__(
        self, folder: str, *, cpus: int, memory_folder: str = "/dev/shm", system_config: dict[str, Any] | None = None
    ) -> None:
        """Start the head. `folder` is Ray's, its path short; `cpus` are each node's."""
        from ray.cluster_utils import Cluster

        self.folder, self.cpus, self.memory_folder = folder, cpus, memory_folder
        head: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False, "temp_dir": folder}  # for data, not workers
        if system_config:
            head["_system_config"] = system_config
        self.nodes: list[Any] = []
        self.orders("").mkdir()
        (Path(folder) / "ray").mkdir()  # where Ray notes the address, as RAY_TMPDIR says
        with self._starting():
            self.raylets = Cluster(initialize_head=True, head_node_args=head)
        self.state = self.raylets.global_state

    @property
    def address(self) -> str:
        return str(self.raylets.address)

    def add(self) -> str:
        with self._starting():
            self.nodes.append(self.raylets.add_node(num_cpus=self.cpus, wait=True))
        return str(self.nodes[-1].node_id)

    def pids(self, number: int) -> list[int]:
        (raylet,) = self.nodes[number].all_processes["raylet"]
        return tree(raylet.process.pid)

    def pid(self, node_id: str, pid: int) -> int:
        return pid

    def kill(self, number: int) -> list[int]:
        pids = send(signal.SIGKILL, self.pids(number))
        wait_until_gone(pids[1:], GONE_S)
        node = self.nodes.pop(number)
        self.raylets.remove_node(node, allow_graceful=False)
        give_up_at = time.monotonic() + GONE_S
        while (folders := self.memory_of(node.node_id)) and time.monotonic() < give_up_at:
            for folder in folders:  # a process may be alive for a moment
                shutil.rmtree(folder, ignore_errors=True)
        return pids

    def memory_folders(self) -> list[Path]:
        return [Path(self.memory_folder)]

    def memory_of(self, node_id: str) -> list[Path]:
        return sorted(Path(self.memory_folder).glob(f"regrow-*-{node_id[:12]}"))

    def orders(self, node_id: str) -> Path:
        return Path(self.folder) / "orders"

    def processes(self) -> list[int]:
        return of_ray(self.folder)

    def start_job(self, arguments: list[str], output: Path) -> Process:
        return start_pretrain(arguments, output, self.folder)

    def logs(self) -> dict[str, Path]:
        return {"": Path(self.folder) / "session_latest/logs"}

    def close(self) -> None:
        send(signal.SIGCONT, self.processes())  # the stopped cannot end
        self.raylets.shutdown()
        self.raylets.global_state.disconnect()
        wait_until_gone(send(signal.SIGKILL, self.processes()), GONE_S)

    def left(self) -> list[str]:
        return [f"process {pid}: {title}" for pid, title in self.titles()]

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """Ray's folder is ours, and SIGTERM stays what it is: with each node Ray would take it, to drain that one."""
        from ray._private import utils

        before, take_sigterm = os.environ.get("RAY_TMPDIR"), utils.set_sigterm_handler
        os.environ["RAY_TMPDIR"], utils.set_sigterm_handler = self.folder, lambda handler: None
        os.environ[ORDERS] = str(self.orders(""))
        try:
            with patient_start():
                yield
        finally:
            utils.set_sigterm_handler = take_sigterm
            del os.environ[ORDERS]
            if before is None:
                del os.environ["RAY_TMPDIR"]
            else:
                os.environ["RAY_TMPDIR"] = before


@contextmanager
def local_nodes(count: int, *, cpus: int, **options: Any) -> Iterator[LocalNodes]:
    """So many nodes for as long as the context lasts, in a folder of their own; `options` as LocalNodes'."""
    with tempfile.TemporaryDirectory(prefix="rgn", dir="/tmp", ignore_cleanup_errors=True) as folder:
        nodes = LocalNodes(folder, cpus=cpus, **options)
        try:
            for _ in range(count):
                nodes.add()
            yield nodes
        finally:
            nodes.close()


def start_pretrain(arguments: list[str], output: Path, ray_folder: str) -> subprocess.Popen[bytes]:
    """`python -m jobs.pretrain` as a process of its own on this machine."""
    with open(output, "ab") as file:
        return subprocess.Popen(
            pretrain_command(arguments),
            cwd=ROOT,
            env=environment(RAY_TMPDIR=ray_folder),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def pretrain_command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "jobs.pretrain", *arguments]


def environment(**more: str) -> dict[str, str]:
    """This process's, without the address of another Ray."""
    return {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | more
