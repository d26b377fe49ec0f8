"""Raylets on hosts apart: a node's loss is a power cut, a partition one of the network, memory each node's own."""

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow.drill.hosts import Host, HostProcess, HostsApart
from regrow.drill.nodes import ROOT, Nodes, Process, environment, pretrain_command
from regrow.drill.processes import send, tree
from regrow.train.orders import ORDERS

PORT = 6379
HEAD_SHM_MB = 512
OBJECT_STORE_BYTES = 100 << 20  # of a node, in its /dev/shm
START_S = 90.0  # for a raylet to be in Ray's table
RAYLET_GONE_S = 20.0


@dataclass
class NodeApart:
    """A raylet and its host."""

    host: Host
    node_id: str
    ray: HostProcess


class NodesApart(Nodes):
    """Nodes on hosts of their own, the head on another, the job beside the head."""

    def __init__(
        self,
        *,
        cpus: int,
        storage: Path,
        carried: Sequence[Path] = (),
        memory_mb: int,
        host_memory_mb: int | None = None,
        snapshot_folder: str = "/dev/shm",
        system_config: dict[str, Any] | None = None,
    ) -> None:
        """Start the head. `memory_mb` is each node's /dev/shm, `storage` the folder that faults can break.

        Raises ConfigError where this machine cannot have hosts apart.
        """
        self.cpus, self.snapshot_folder, self.memory_mb = cpus, snapshot_folder, memory_mb
        self.hosts = HostsApart(storage=storage, carried=carried, shm_mb=memory_mb, memory_mb=host_memory_mb)
        self.folder = str(self.hosts.folder)
        self.nodes: list[NodeApart] = []
        self._started = 0
        self._job: HostProcess | None = None
        try:
            self.head = self.hosts.add("head", shm_mb=HEAD_SHM_MB)
            settings = ["--head", f"--port={PORT}", "--num-cpus=1", "--include-dashboard=false"]
            if system_config:
                settings.append(f"--system-config={json.dumps(system_config)}")
            self.state = self._state()
            self.head_id = self._join(self.head, settings).node_id
        except BaseException:
            self.hosts.close()
            raise

    @property
    def address(self) -> str:
        return f"{self.head.address}:{PORT}"

    def add(self, *, shm_mb: int | None = None, broken: str = "") -> str:
        """Start one more; its id. It may have a smaller /dev/shm than the others, or storage that is broken."""
        self._started += 1
        host = self.hosts.add(f"node{self._started}", shm_mb=shm_mb)
        if broken:
            self.hosts.break_storage(host, broken)
        self.nodes.append(self._join(host, self._as_node))
        return self.nodes[-1].node_id

    def restart_raylet(self, number: int) -> str:
        """The raylet and all that it started are killed and a new one starts, with what is left in memory; its id."""
        node = self.nodes[number]
        send(signal.SIGKILL, self.pids(number))
        node.ray.wait(RAYLET_GONE_S)
        self.nodes[number] = self._join(node.host, self._as_node)
        return self.nodes[number].node_id

    def kill(self, number: int) -> list[int]:
        node = self.nodes.pop(number)
        pids = tree(node.host.pid)
        self.hosts.power_off(node.host)
        return pids

    def pids(self, number: int) -> list[int]:
        found = tree(self.nodes[number].ray.pid)
        others = [pid for pid in tree(self.nodes[number].host.pid)[1:] if pid not in found]
        return [*found, *others]  # what a raylet's end has left to the host's first process

    def pid(self, node_id: str, pid: int) -> int:
        host = self._host(node_id)
        return 0 if host is None else host.pid_outside(pid)

    def memory_folders(self) -> list[Path]:
        return [self._memory(node.host) for node in self.nodes]

    def memory_of(self, node_id: str) -> list[Path]:
        host = self._host(node_id)
        return [] if host is None else sorted(self._memory(host).glob(f"regrow-*-{node_id[:12]}"))

    def orders(self, node_id: str) -> Path:
        host = self._host(node_id)
        return (host or self.head).tmp

    def processes(self) -> list[int]:
        return self.hosts.processes()

    def start_job(self, arguments: list[str], output: Path) -> Process:
        self._job = self.head.start(pretrain_command(arguments), output, environment(RAY_TMPDIR="/tmp"), ROOT)
        return self._job

    def logs(self) -> dict[str, Path]:
        found = sorted(Path(self.folder).glob("[0-9]*/ray/session_2*/logs"))  # session_latest is a link of theirs
        return {f"host{logs.parents[2].name}": logs for logs in found}

    def close(self) -> None:
        send(signal.SIGCONT, self.processes())
        with suppress(Exception):  # the head may not answer any more
            self.state.disconnect()
        self.hosts.close()

    def left(self) -> list[str]:
        return [f"process {pid}" for pid in self.processes()] + self.hosts.left()

    def _host(self, node_id: str) -> Host | None:
        if node_id == self.head_id:
            return self.head
        return next((node.host for node in self.nodes if node.node_id == node_id), None)

    def _memory(self, host: Host) -> Path:
        return host.root / self.snapshot_folder.lstrip("/")

    @property
    def _as_node(self) -> list[str]:
        return [f"--address={self.address}", f"--num-cpus={self.cpus}"]

    def _join(self, host: Host, settings: list[str]) -> NodeApart:
        """Start Ray on a host: again where it gave up, as it does after 30 s on a machine that is busy."""
        for last in (False, False, True):
            ray = self._ray(host, settings)
            try:
                return NodeApart(host, self._id_of(host, ray), ray)
            except RuntimeError:
                if last:
                    raise
                send(signal.SIGKILL, tree(host.pid)[1:])
        raise AssertionError

    def _ray(self, host: Host, settings: list[str]) -> HostProcess:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [f"--node-ip-address={host.address}", f"--object-store-memory={OBJECT_STORE_BYTES}", *settings]
        known = environment(RAY_TMPDIR="/tmp") | {ORDERS: "/tmp"}
        return host.start(command, host.tmp / "ray.out", known, Path("/"))

    def _state(self) -> Any:
        from ray._private.authentication import authentication_token_setup as tokens
        from ray._private.state import GlobalState
        from ray._raylet import GcsClientOptions  # type: ignore[attr-defined]

        tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # as `ray start` does there
        state = GlobalState()
        state._initialize_global_state(
            GcsClientOptions.create(self.address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
        )
        return state

    def _id_of(self, host: Host, ray: HostProcess) -> str:
        """The id of a host's raylet, once Ray knows it. Raises RuntimeError with what `ray start` printed."""
        known = {node.node_id for node in self.nodes}
        give_up_at = time.monotonic() + START_S
        while time.monotonic() < give_up_at and ray.poll() is None:
            with suppress(Exception):  # not there yet
                for node in self.state.node_table():
                    node_id = str(node["NodeID"])
                    if node["Alive"] and node["NodeManagerAddress"] == host.address and node_id not in known:
                        return node_id
            time.sleep(0.1)
        printed = (host.tmp / "ray.out").read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"no raylet on {host.name}: {' / '.join(printed[-3:])}")


@contextmanager
def nodes_apart(count: int, **options: Any) -> Iterator[NodesApart]:
    """So many nodes for as long as the context lasts; `options` as NodesApart's."""
    nodes = NodesApart(**options)
    try:
        for _ in range(count):
            nodes.add()
        yield nodes
    finally:
        nodes.close()
