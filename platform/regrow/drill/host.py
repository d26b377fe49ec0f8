"""The first process of a host apart: sets up what is the host's own, and starts commands there.

Started by `regrow.drill.switch` as process 1 of new PID, mount, UTS, IPC and network namespaces. A message of JSON on
its socket starts a command; one back has its pid, and a later one its exit status. With it all processes of the host
end.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostPlan:
    """What a host is to be. Paths are the machine's."""

    name: str
    address: str  # with the length of its network's prefix: 10.213.7.2/24
    tmp: str  # becomes /tmp
    shm_mb: int
    carried: tuple[str, ...] = ()  # paths below /tmp and /dev/shm that are to be seen under the same names
    storage: tuple[str, str] = ("", "")  # a file system that can break, and where it is to be seen


def run(command: list[str]) -> None:
    """Raises RuntimeError with what the command printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def set_up(plan: HostPlan) -> None:
    """Mounts and names. The name resolves to 127.0.1.1, as Debian has it; all hosts have the same second interface."""
    socket.sethostname(plan.name)
    held = [(os.open(path, os.O_PATH), path) for path in plan.carried]
    storage = (os.open(plan.storage[0], os.O_PATH), plan.storage[1]) if plan.storage[0] else None
    names = Path(plan.tmp) / "hosts"
    names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {plan.name}\n")
    run(["mount", "--bind", str(names), "/etc/hosts"])
    run(["mount", "-t", "tmpfs", "-o", f"size={plan.shm_mb}m,mode=1777", "regrow-drill", "/dev/shm"])
    run(["mount", "--bind", plan.tmp, "/tmp"])
    for descriptor, path in [*held, *([storage] if storage else [])]:
        source = f"/proc/self/fd/{descriptor}"
        Path(path).mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--no-canonicalize", "--bind", source, path], check=True, pass_fds=[descriptor])
        os.close(descriptor)
    run(["ip", "link", "set", "lo", "up"])
    run(["ip", "link", "add", "docker0", "type", "bridge"])  # as on a machine with Docker
    run(["ip", "address", "add", "172.17.0.1/16", "dev", "docker0"])
    run(["ip", "link", "set", "docker0", "up"])


def connect(plan: HostPlan) -> None:
    """Take the address, once the switch has put eth0 here. What comes in can be refused by its sender.

    Rules are asked before the local table, and for each packet: a socket remembers no route (ip_early_demux).
    """
    run(["ip", "address", "add", plan.address, "dev", "eth0"])
    run(["ip", "link", "set", "eth0", "up"])
    run(["ip", "rule", "add", "pref", "100", "lookup", "local"])
    run(["ip", "rule", "del", "pref", "0"])
    Path("/proc/sys/net/ipv4/ip_early_demux").write_text("0")


class Commands:
    """Children by their pids, and what is told of them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._started: set[int] = set()

    def tell(self, **message: object) -> None:
        with self._lock:
            self._connection.send(json.dumps(message).encode())

    def start(self, output: int, argv: list[str], env: dict[str, str], cwd: str) -> int:
        """What it prints goes to a descriptor of the caller."""
        try:
            child = subprocess.Popen(
                argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        finally:
            os.close(output)
        child.returncode = 0  # it is waited for here, not by Popen
        return child.pid

    def wait_for_all(self) -> None:
        """Process 1 inherits orphans, and waits for each so that none is left as a zombie."""
        while True:
            try:
                pid, status = os.wait()
            except ChildProcessError:
                threading.Event().wait(0.05)
                continue
            self.tell(exited=pid, status=os.waitstatus_to_exitcode(status))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plan = HostPlan(**json.loads(sys.argv[1]))
    connection = socket.socket(fileno=int(sys.argv[2]))
    commands = Commands(connection)
    try:
        set_up(plan)
        commands.tell(ready=True)
        connection.recv(1 << 16)  # eth0 is here
        connect(plan)
        commands.tell(ready=True)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        commands.tell(error=str(error))
        return
    threading.Thread(target=commands.wait_for_all, daemon=True).start()
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, 1 << 17, 1)
        if not request:  # the caller has ended
            return
        try:
            commands.tell(started=commands.start(descriptors[0], **json.loads(request)))
        except OSError as error:
            commands.tell(error=str(error))


if __name__ == "__main__":
    main()
