"""The process that owns a laboratory of hosts apart: its bridge, its hosts, their links and file systems.

Started by `regrow.drill.hosts` in network and mount namespaces of its own, so that nothing of it is seen outside and
all of it is gone with it. It does what the messages of JSON on its socket say, and ends, with all hosts, when that
closes, as it does where the process that started it is killed. Needs root, `ip`, `tc`, `unshare` and `setpriv`.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from regrow.drill.host import HostPlan, run
from regrow.drill.processes import tree, wait_until_gone

BRIDGE = "switch0"
GONE_S = 20.0
CGROUPS = Path("/sys/fs/cgroup")


@dataclass
class Host:
    """A host that is up."""

    plan: HostPlan
    number: int
    outer: subprocess.Popen[bytes]  # `unshare`, whose child is the host's first process
    storage: subprocess.Popen[str] | None
    cgroup: Path | None
    refused: Counter[str] = field(default_factory=Counter)  # by how many partitions it does not hear an address

    @property
    def pid(self) -> int:
        """The first process, as seen from outside."""
        return tree(self.outer.pid)[1]

    @property
    def link(self) -> str:
        """Its port of the bridge."""
        return f"port{self.number}"

    def inside(self, command: list[str]) -> None:
        run(["nsenter", "--target", str(self.pid), "--net", *command])


class Switch:
    """Hosts by their numbers, and what is wrong between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: dict[int, Host] = {}
        run(["ip", "link", "set", "lo", "up"])
        run(["ip", "link", "add", BRIDGE, "type", "bridge"])
        run(["ip", "link", "set", BRIDGE, "up"])

    def outside(self, link: str) -> None:
        """A cable from the machine, whose end the starting process has brought here."""
        run(["ip", "link", "set", link, "master", BRIDGE])
        run(["ip", "link", "set", link, "up"])

    def start(self, number: int, plan: dict[str, Any], memory_mb: int | None, connection: int) -> int:
        """Start a host; the pid of its first process. Raises RuntimeError or OSError."""
        wanted = HostPlan(**plan)
        storage = None
        if wanted.storage[0]:
            storage = self._breakable(wanted.storage[0], Path(wanted.tmp).with_suffix(".storage"))
            wanted = replace(wanted, storage=(str(Path(wanted.tmp).with_suffix(".storage")), wanted.storage[1]))
        namespaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        program = [sys.executable, "-m", "regrow.drill.host", json.dumps(asdict(wanted)), str(connection)]
        outer = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, *program], pass_fds=[connection]
        )
        os.close(connection)
        while len(tree(outer.pid)) < 2:
            if outer.poll() is not None:
                raise RuntimeError(f"a host's namespaces could not be made: status {outer.returncode}")
        host = self.hosts[number] = Host(wanted, number, outer, storage, None)
        if memory_mb is not None:
            host.cgroup = _limited(f"regrow-drill-{os.getpid()}-{number}", memory_mb, host.pid)
        return host.pid

    def connect(self, number: int) -> None:
        host = self.hosts[number]
        peer = ["type", "veth", "peer", "name", "eth0", "netns", str(host.pid)]
        run(["ip", "link", "add", host.link, *peer])
        run(["ip", "link", "set", host.link, "master", BRIDGE])
        run(["ip", "link", "set", host.link, "up"])

    def power_off(self, number: int) -> None:
        """The link goes first: no peer is told that a connection has ended."""
        host = self.hosts.pop(number)
        with contextlib.suppress(RuntimeError):  # its first process may be gone
            run(["ip", "link", "set", host.link, "down"])
        self._end(host)

    def refuse(self, number: int, sources: list[str], on: bool) -> None:
        """Whether a host drops what comes from these addresses; what two partitions drop, until both are over."""
        host = self.hosts[number]
        before = set(+host.refused)
        (host.refused.update if on else host.refused.subtract)(sources)
        for source in sorted(before ^ set(+host.refused)):
            host.inside(["ip", "rule", "add" if on else "del", "pref", "10", "from", source, "blackhole"])

    def shape(self, number: int, rate_mbit: float | None, delay_ms: float, loss_percent: float) -> None:
        """What a host sends and what it receives. All None or 0: as the machine can."""
        host = self.hosts[number]
        shaped = _shapes(rate_mbit, delay_ms, loss_percent)
        for place, device in ((host.inside, "eth0"), (run, host.link)):
            with contextlib.suppress(RuntimeError):  # nothing was there
                place(["tc", "qdisc", "del", "dev", device, "root"])
            for words in shaped:
                place(["tc", "qdisc", "add", "dev", device, *words])

    def break_storage(self, number: int, fault: dict[str, Any]) -> None:
        server = self.hosts[number].storage
        if server is not None and server.stdin is not None and server.stdout is not None:
            server.stdin.write(json.dumps(fault) + "\n")
            server.stdin.flush()
            server.stdout.readline()

    def close(self) -> None:
        for host in self.hosts.values():
            self._end(host)
        for mounted in self.folder.glob("*.storage"):
            subprocess.run(["umount", "--lazy", str(mounted)], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _breakable(self, folder: str, mount_point: Path) -> "subprocess.Popen[str]":
        mount_point.mkdir()
        command = [sys.executable, "-m", "regrow.drill.breakable", folder, str(mount_point)]
        server = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        if not server.stdout.readline():
            raise RuntimeError(f"{mount_point}: a file system in user space could not be mounted (/dev/fuse)")
        return server

    def _end(self, host: Host) -> None:
        processes = tree(host.outer.pid)
        if host.storage is not None:  # first: a process that waits for it cannot end
            host.storage.kill()
            host.storage.wait()
        for pid in processes[1:2]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        host.outer.kill()
        host.outer.wait()
        wait_until_gone(processes, GONE_S)
        give_up_at = time.monotonic() + GONE_S
        while host.cgroup is not None and time.monotonic() < give_up_at:
            try:
                host.cgroup.rmdir()
                return
            except OSError:  # a process is still on its way out
                time.sleep(0.02)


def _shapes(rate_mbit: float | None, delay_ms: float, loss_percent: float) -> list[list[str]]:
    """Arguments of `tc qdisc add dev DEVICE`, one or two disciplines."""
    lossy = ["netem", "limit", "100000", "delay", f"{delay_ms}ms", "loss", f"{loss_percent}%"]
    # a bucket for as long as a slow kernel's tick (HZ=250), as tc-tbf(8) has it, or fast links stay below their rate
    burst = max(256 << 10, int((rate_mbit or 0.0) * 1e6 / 8 / 250))
    slow = ["tbf", "rate", f"{rate_mbit}mbit", "burst", f"{burst}", "latency", "200ms"]
    if delay_ms or loss_percent:
        first = ["root", "handle", "1:", *lossy]
        return [first, ["parent", "1:", *slow]] if rate_mbit is not None else [first]
    return [["root", *slow]] if rate_mbit is not None else []


def _limited(name: str, memory_mb: int, pid: int) -> Path:
    """A control group with a limit of memory, version 1 or 2, and the process in it. Raises OSError."""
    old = CGROUPS / "memory"
    group = (old if old.is_dir() else CGROUPS) / name
    group.mkdir()
    (group / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")).write_text(str(memory_mb << 20))
    (group / "cgroup.procs").write_text(str(pid))
    return group


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    switch = Switch(Path(sys.argv[2]))
    connection.sendall(b"{}\n")
    try:
        while True:
            data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
            if not data:
                return
            request = json.loads(data)
            do = getattr(switch, request.pop("do"))
            try:
                answer = {"answer": do(**request, **({"connection": descriptors[0]} if descriptors else {}))}
            except (OSError, RuntimeError, KeyError, IndexError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            connection.sendall(json.dumps(answer).encode() + b"\n")
    finally:
        switch.close()


if __name__ == "__main__":
    main()
