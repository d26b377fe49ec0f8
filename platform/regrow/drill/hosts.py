"""Hosts apart on this machine: namespaces with an address, a name, a /dev/shm, a /tmp and links of their own.

`HostsApart` is what the drill and the tests hold. The hosts live below a process of their own, `regrow.drill.switch`,
and end with it, and it with the process that started it.
"""

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from regrow.drill.breakable import Fault as StorageFault
from regrow.drill.host import HostPlan, run
from regrow.drill.processes import is_alive, tree, wait_until_gone
from regrow.errors import ConfigError

TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}
START_S = 60.0  # for a host to be set up, on a machine that is busy
GONE_S = 30.0
OUTSIDE = 254  # of the network's addresses: the machine's own
PRIVATE = ("/tmp", "/dev/shm")


@dataclass
class HostProcess:
    """A command that runs on a host: a Popen's methods, as far as they are needed."""

    host: "Host"
    pid_there: int
    pid: int  # as seen from outside
    status: int | None = None

    def poll(self) -> int | None:
        self.host.listen()
        if self.status is None:
            self.status = self.host.ended.get(self.pid_there)
        return self.status

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutError."""
        give_up_at = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while self.poll() is None:
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"process {self.pid} on {self.host.name} has not ended within {timeout} s")
            time.sleep(0.02)
        assert self.status is not None
        return self.status

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


@dataclass
class Host:
    """One host, from outside."""

    number: int
    name: str
    address: str
    pid: int  # of its first process
    tmp: Path  # its /tmp
    connection: socket.socket
    ended: dict[int, int] = field(default_factory=dict)  # pid there -> exit status; -9 of all once it is off
    up: bool = True
    _answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def root(self) -> Path:
        """Its file system, as seen from outside."""
        return Path(f"/proc/{self.pid}/root")

    def start(self, argv: Sequence[str], output: Path, env: Mapping[str, str], cwd: Path) -> HostProcess:
        """Run a command there; what it prints is added to a file of this machine. Raises RuntimeError."""
        with open(output, "ab") as file:
            self._send({"argv": list(argv), "env": dict(env), "cwd": str(cwd)}, [file.fileno()])
            pid = self.answer()["started"]
        return HostProcess(self, pid, self.pid_outside(pid))

    def pid_outside(self, pid_there: int) -> int:
        """The pid here of a process there; 0 where it has ended."""
        for each in tree(self.pid):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{each}/status").read_text()
                if status.partition("NSpid:")[2].partition("\n")[0].split()[-1:] == [str(pid_there)]:
                    return each
        return 0

    def answer(self) -> dict[str, Any]:
        """The next answer. Raises RuntimeError where it is of a failure, or none comes."""
        give_up_at = time.monotonic() + START_S
        while not self._answers:
            if time.monotonic() > give_up_at or not self.up:
                raise RuntimeError(f"host {self.name} does not answer")
            self.listen(0.1)
        answer = self._answers.pop(0)
        if "error" in answer:
            raise RuntimeError(f"host {self.name}: {answer['error']}")
        return answer

    def listen(self, wait_s: float = 0.0) -> None:
        """Take what it says."""
        while self.up and select.select([self.connection], [], [], wait_s)[0]:
            wait_s = 0.0
            try:
                received = self.connection.recv(1 << 17)
            except OSError:
                received = b""
            if not received:
                self.is_off()
                return
            message = json.loads(received)
            if "exited" in message:
                self.ended[message["exited"]] = message["status"]
            else:
                self._answers.append(message)

    def go_on(self) -> None:
        """Set up is what needs no link; now there is one."""
        self._send({})
        self.answer()

    def is_off(self) -> None:
        self.up = False
        self.ended = _Killed()
        self.connection.close()

    def _send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self.connection, [json.dumps(message).encode()], list(descriptors))
        except OSError as error:
            raise RuntimeError(f"host {self.name} is off: {error}") from error


class _Killed(dict[int, int]):
    """Of a host that is off: every process was killed."""

    def get(self, key: int, default: Any = None) -> int:
        return -signal.SIGKILL


class HostsApart:
    """A network of hosts. Raises ConfigError, in one line, where this machine cannot have one."""

    def __init__(
        self, *, storage: Path | None, carried: Sequence[Path] = (), shm_mb: int, memory_mb: int | None = None
    ) -> None:
        """`storage` is a folder that faults can break; `carried` are folders below /tmp that hosts are to see."""
        check_possible()
        self.shm_mb, self.memory_mb = shm_mb, memory_mb
        self.storage = None if storage is None else storage.resolve()
        self.carried = tuple(_below_private([*_python(), *carried]))
        self.folder = Path(tempfile.mkdtemp(prefix="rga", dir="/tmp"))
        self.hosts: dict[int, Host] = {}
        self._next, self._network, self._newest_address, self.cable = 1, "", "", ""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "regrow.drill.switch", str(theirs.fileno()), str(self.folder)]
        self.switch = subprocess.Popen(
            ["unshare", "--net", "--mount", *command], pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()
        self._connection = ours
        try:
            self._answer()
            self._link_to_the_machine()
        except BaseException:
            self.close()
            raise

    @property
    def outside(self) -> str:
        """The machine's own address in the network."""
        return f"{self._network}.{OUTSIDE}"

    def add(self, name: str, *, shm_mb: int | None = None, memory_mb: int | None = None) -> Host:
        """Start one more. Raises RuntimeError."""
        number, self._next = self._next, self._next + 1
        taken = [host.address for host in self.hosts.values()]
        self._newest_address = free_address(self._newest_address, taken)
        tmp = self.folder / f"{number}"
        tmp.mkdir()
        tmp.chmod(0o1777)
        plan = HostPlan(
            name=name,
            address=f"{self._newest_address}/24",
            tmp=str(tmp),
            shm_mb=self.shm_mb if shm_mb is None else shm_mb,
            carried=self.carried,
            storage=("", "") if self.storage is None else (str(self.storage), str(self.storage)),
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            memory_mb = self.memory_mb if memory_mb is None else memory_mb
            pid = self._ask("start", [theirs.fileno()], number=number, plan=asdict(plan), memory_mb=memory_mb)
        host = Host(number, name, plan.address.partition("/")[0], pid, tmp, ours)
        host.answer()
        self._ask("connect", number=number)
        host.go_on()
        self.hosts[number] = host
        return host

    def power_off(self, host: Host) -> None:
        """Gone at once, with processes, memory and link: its peers are told nothing."""
        self.hosts.pop(host.number, None)
        self._ask("power_off", number=host.number)
        host.is_off()

    def partition(self, host: Host, others: Sequence[Host], *, on: bool = True, one_way: bool = False) -> None:
        """Drop, in silence, what goes between a host and others; with `one_way`, only what the host sends."""
        for other in others:
            self._ask("refuse", number=other.number, sources=[host.address], on=on)
        if not one_way and others:
            self._ask("refuse", number=host.number, sources=[other.address for other in others], on=on)

    def shape(
        self, host: Host, *, rate_mbit: float | None = None, delay_ms: float = 0.0, loss_percent: float = 0.0
    ) -> None:
        """Slow a host's link down, in both directions. Raises RuntimeError where the kernel has no netem for it."""
        self._ask("shape", number=host.number, rate_mbit=rate_mbit, delay_ms=delay_ms, loss_percent=loss_percent)

    def break_storage(self, host: Host, kind: str = "", delay_s: float = 0.0) -> None:
        """Let a host's storage be `full`, `read_only`, `failing`, `slow` or `hung`; healed without a kind."""
        self._ask("break_storage", number=host.number, fault=asdict(StorageFault(kind, delay_s)))

    def processes(self) -> list[int]:
        """All that run on the hosts, but their first ones."""
        return [pid for host in self.hosts.values() for pid in tree(host.pid)[1:] if is_alive(pid)]

    def close(self) -> None:
        """End all of them. What they had in /tmp goes too."""
        for host in self.hosts.values():
            host.is_off()
        if self.cable:  # else it goes with the other end, a moment later
            subprocess.run(["ip", "link", "delete", self.cable], check=False, capture_output=True)
        self._connection.close()
        try:
            self.switch.wait(GONE_S)
        except subprocess.TimeoutExpired:
            pids = tree(self.switch.pid)
            self.switch.kill()
            self.switch.wait()
            wait_until_gone(pids, GONE_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def left(self) -> list[str]:
        """What is still on the machine once this is closed."""
        found = [f"process {pid}" for pid in tree(self.switch.pid) if is_alive(pid)]
        found += [f"link {self.cable}"] if Path("/sys/class/net", self.cable or "-").exists() else []
        found += [
            f"mount {line.split()[1]}"
            for line in Path("/proc/mounts").read_text().splitlines()
            if self.folder.name in line
        ]
        found += [f"control group {path}" for path in control_groups(self.switch.pid)]
        return found + ([f"folder {self.folder}"] if self.folder.exists() else [])

    def _link_to_the_machine(self) -> None:
        """One end of a cable here, the other at the bridge; it goes with the bridge."""
        taken = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True).stdout
        free = [number for number in range(256) if f" 10.213.{number}." not in taken]
        for number in sorted(free, key=lambda each: (each * 2654435761 + os.getpid()) % 997):
            self._network = f"10.213.{number}"
            self._newest_address = f"{self._network}.0"
            self.cable, there = f"rg{secrets.token_hex(4)}", "outside0"
            peer = ["type", "veth", "peer", "name", there, "netns", str(self.switch.pid)]
            run(["ip", "link", "add", self.cable, *peer])
            run(["ip", "address", "add", f"{self.outside}/24", "dev", self.cable])
            run(["ip", "link", "set", self.cable, "up"])
            self._ask("outside", link=there)
            return
        raise ConfigError("all networks of 10.213.0.0/16 are taken: too many laboratories on this machine")

    def _ask(self, do: str, descriptors: Sequence[int] = (), **arguments: Any) -> Any:
        request = json.dumps({"do": do} | arguments).encode()
        socket.send_fds(self._connection, [request], list(descriptors))
        return self._answer()

    def _answer(self) -> Any:
        ready, _, _ = select.select([self._connection], [], [], START_S)
        received = self._connection.recv(1 << 16) if ready else b""
        if not received:
            raise RuntimeError("the hosts' network does not answer")
        answer = json.loads(received)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer.get("answer")


def free_address(newest: str, taken: Collection[str]) -> str:
    """The free one of a network that has been free for longest: they are given in turn. Raises RuntimeError."""
    network, _, last = newest.rpartition(".")
    most = OUTSIDE - 1
    tries = (f"{network}.{(int(last) + beyond) % most + 1}" for beyond in range(most))
    found = next((address for address in tries if address not in taken), None)
    if found is None:
        raise RuntimeError(f"{network}.0/24 has addresses for {most} hosts at once, and all are taken")
    return found


def control_groups(switch: int) -> list[str]:
    """Control groups of the hosts whose first process is `switch`; others may come and go meanwhile."""
    folders = (path for path, _, _ in os.walk("/sys/fs/cgroup"))
    return [path for path in folders if os.path.basename(path).startswith(f"regrow-drill-{switch}-")]


@contextmanager
def hosts_apart(**options: Any) -> Iterator[HostsApart]:
    """Hosts for as long as the context lasts; `options` as HostsApart's."""
    hosts = HostsApart(**options)
    try:
        yield hosts
    finally:
        hosts.close()


def why_impossible() -> str:
    """Why this machine cannot have hosts apart, or empty."""
    if os.geteuid():
        return "it needs root, for namespaces and links"
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if missing:
        return f"it needs {' and '.join(missing)}: apt-get install {' '.join(missing)}"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "it needs /dev/fuse, for storage that can break"
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "true"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"namespaces are refused: {done.stderr.strip()}" if done.returncode else ""


def check_possible() -> None:
    """Raises ConfigError where it is not."""
    problem = why_impossible()
    if problem:
        raise ConfigError(
            f"drill.hosts=apart cannot be on this machine: {problem}; drill.hosts=together needs none of it"
        )


def _python() -> list[Path]:
    """The interpreter, its packages, and this checkout."""
    return [Path(sys.prefix), Path(sys.base_prefix), *(Path(each) for each in sys.path if each)]


def _below_private(paths: Sequence[Path]) -> list[str]:
    """Those that a private /tmp and /dev/shm would hide, without those below another."""
    hidden = sorted(
        {str(each.resolve()) for each in paths if str(each.resolve()).startswith(tuple(f"{p}/" for p in PRIVATE))}
    )
    kept: list[str] = []
    for path in hidden:
        if Path(path).is_dir() and not any(path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept
