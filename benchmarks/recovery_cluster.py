"""A Ray cluster on this machine whose nodes can be killed and added: a head without room for workers, and raylets.

A node that is killed loses everything at once: raylet, workers, and what they held in memory.
"""

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from regrow.drill.processes import of_ray, send, tree, wait_until_gone

LOOK_S = 0.02
MEMORY = Path("/dev/shm")
HEAD_CPUS, WORKER_CPUS = 1, 2  # logical ones: the head's do not do for a worker, a node's for one
GONE_S = 10.0  # for killed processes to be gone


class Cluster:
    """Raylets as separate hosts would run them, all with `environment`. A context manager: no process outlives it."""

    def __init__(self, num_nodes: int, environment: Mapping[str, str]) -> None:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.cluster_utils import Cluster as Raylets

        self.folder = Path(tempfile.mkdtemp(prefix="rgb", dir="/tmp"))  # short: sockets have their names below it
        self.keep = False  # the folder, with Ray's logs
        self.environment = {**environment, "RAY_TMPDIR": str(self.folder)}
        self._nodes: dict[str, Any] = {}
        self._killed: list[Any] = []
        self._raylets: Any = None
        try:
            with set_in_environment(self.environment):
                head = {"num_cpus": HEAD_CPUS, "include_dashboard": False}
                self._raylets = Raylets(initialize_head=True, head_node_args=head)
            self._gcs = GcsClient(address=self.address)
            for _ in range(num_nodes):
                self.add_node()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return str(self._raylets.address)

    def add_node(self) -> float:
        """Start one more node; when it was there."""
        self._forget_killed()
        with set_in_environment(self.environment):
            node = self._raylets.add_node(num_cpus=WORKER_CPUS, wait=True)
        self._nodes[node.node_id] = node
        return time.time()

    def kill_node(self, node_id: str) -> float:
        """End all of its processes at once, and remove what they held in memory; when the processes were killed."""
        from ray._private.ray_constants import PROCESS_TYPE_RAYLET

        node = self._nodes.pop(node_id)
        raylet = node.all_processes[PROCESS_TYPE_RAYLET][0].process
        processes = send(signal.SIGKILL, tree(raylet.pid))
        killed_at = time.time()
        raylet.wait(GONE_S)
        wait_until_gone(processes, GONE_S)
        for folder in MEMORY.glob(f"regrow-*-{node_id[:12]}"):
            shutil.rmtree(folder, ignore_errors=True)
        self._killed.append(node)
        return killed_at

    def _forget_killed(self) -> None:
        """Tell Ray's bookkeeping, which takes a moment that there is not when a node has just been killed."""
        while self._killed:
            self._raylets.remove_node(self._killed.pop(), allow_graceful=False)

    def knows_dead(self, node_id: str) -> bool:
        """Whether Ray's GCS has noticed."""
        from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

        nodes = self._gcs.get_all_node_info(timeout=5)
        return all(key.hex() != node_id or info.state != GcsNodeInfo.ALIVE for key, info in nodes.items())

    def close(self) -> None:
        raylets, self._raylets = self._raylets, None
        if raylets is not None:
            with contextlib.suppress(Exception):  # a process that Ray finds hard to end is ended below
                raylets.shutdown()
        wait_until_gone(send(signal.SIGKILL, of_ray(str(self.folder))), GONE_S)
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Watch(threading.Thread):
    """Notes when something is first so, looking every 20 ms from now on."""

    def __init__(self, is_so: Callable[[], bool]) -> None:
        super().__init__(name="watch", daemon=True)
        self.at: float | None = None
        self._is_so, self._over = is_so, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(Exception):  # the GCS may take long to answer
                if self._is_so():
                    self.at = time.time()
                    return
            time.sleep(LOOK_S)

    def end(self) -> None:
        self._over.set()
        self.join()


@contextlib.contextmanager
def set_in_environment(values: Mapping[str, str]) -> Iterator[None]:
    """For what is started meanwhile. Ray's own answer to SIGTERM, half a minute's drain, is not taken over."""
    before, on_sigterm = dict(os.environ), signal.getsignal(signal.SIGTERM)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        signal.signal(signal.SIGTERM, on_sigterm)
