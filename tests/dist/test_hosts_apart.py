"""Hosts apart: what is a host's own, what can part or break, and that nothing of it stays on the machine."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from regrow.drill.breakable import KINDS
from regrow.drill.hosts import Host, HostsApart, control_groups, hosts_apart, why_impossible

pytestmark = [
    pytest.mark.skipif(bool(why_impossible()), reason=f"no hosts apart: {why_impossible()}"),
    pytest.mark.timeout(300),
]
PORT = 22022
SERVE = f"""
import socket
server = socket.create_server(("0.0.0.0", {PORT}))
while True:
    connection, _ = server.accept()
    connection.sendall(b"x")
"""
ASK = f"""
import socket, sys
socket.create_connection((sys.argv[1], {PORT}), 1.5).recv(1)
"""


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def apart(storage: Path) -> Iterator[HostsApart]:
    with hosts_apart(storage=storage, shm_mb=32) as hosts:
        yield hosts
    assert hosts.left() == []


@pytest.fixture(scope="module")
def pair(apart: HostsApart, storage: Path) -> tuple[Host, Host]:
    first, second = apart.add("first"), apart.add("second")
    for host in (first, second):
        host.start([sys.executable, "-c", SERVE], storage / "served", os.environ, Path("/"))
    for asks, host in ((first, second), (second, first)):
        until(lambda asks=asks, host=host: reaches(asks, host))
    return first, second


def until(condition, patience_s: float = 60.0) -> None:
    give_up_at = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < give_up_at


def run(host: Host, program: str, *arguments: str) -> tuple[int, str]:
    """A Python program there: its status, and what it printed."""
    output = host.tmp.parent / f"out-{time.monotonic_ns()}"
    process = host.start([sys.executable, "-c", textwrap.dedent(program), *arguments], output, os.environ, Path("/"))
    status = process.wait(60.0)
    return status, output.read_text().strip()


def reaches(host: Host, other: Host) -> bool:
    return run(host, ASK, other.address)[0] == 0


def test_a_host_has_its_own_name_address_memory_processes_and_temporary_folder(pair: tuple[Host, Host]) -> None:
    for host in pair:
        _, printed = run(
            host,
            """
            import json, os, shutil, socket
            print(json.dumps({
                "name": socket.gethostname(),
                "resolves": socket.gethostbyname(socket.gethostname()),
                "shm": shutil.disk_usage("/dev/shm").total,
                "pids": len([name for name in os.listdir("/proc") if name.isdigit()]),
                "tmp": sorted(os.listdir("/tmp")),
                "interfaces": sorted(name for _, name in socket.if_nameindex()),
            }))
            """,
        )
        seen = json.loads(printed)
        assert (seen["name"], seen["resolves"], seen["shm"]) == (host.name, "127.0.1.1", 32 << 20)
        assert seen["pids"] < 10
        assert "hosts" in seen["tmp"]
        assert {"docker0", "eth0", "lo"} <= set(seen["interfaces"])


@pytest.mark.long
def test_a_partition_may_be_one_way_and_heals(apart: HostsApart, pair: tuple[Host, Host]) -> None:
    first, second = pair
    talk = """
    import socket, sys
    mine = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    mine.bind(("0.0.0.0", 22023)); mine.settimeout(float(sys.argv[2])); print("ready", flush=True)
    if sys.argv[1]:
        mine.sendto(b"x", (sys.argv[1], 22023))
    else:
        mine.recv(1)
    """

    def arrives(sender: Host, receiver: Host) -> bool:
        """A datagram: what TCP does needs both directions."""
        output = receiver.tmp.parent / f"heard-{time.monotonic_ns()}"
        hears = receiver.start(
            [sys.executable, "-c", textwrap.dedent(talk), "", "2"], output, os.environ, Path("/")
        )  # fmt: skip
        until(lambda: "ready" in output.read_text())
        run(sender, talk, receiver.address, "2")
        return hears.wait(60.0) == 0

    assert reaches(first, second)
    assert reaches(second, first)
    apart.partition(first, [second], one_way=True)
    assert (arrives(first, second), arrives(second, first)) == (False, True)
    assert not reaches(second, first), "TCP takes both directions"
    apart.partition(first, [second], on=False, one_way=True)
    apart.partition(first, [second])
    apart.partition(second, [first])  # again: a soak draws two that overlap
    assert (arrives(first, second), arrives(second, first)) == (False, False)
    apart.partition(first, [second], on=False)
    assert (arrives(first, second), arrives(second, first)) == (False, False), "the other one is not over"
    apart.partition(second, [first], on=False)
    assert reaches(first, second)


@pytest.mark.parametrize("by", ["name", "address"])
def test_ranks_that_torchrun_started_meet_though_a_hosts_name_is_its_own_loopback_address(
    by: str, pair: tuple[Host, Host]
) -> None:
    """As Debian has names: gloo told the other host to connect to 127.0.1.1. torchrun gives the first host's name."""
    program = """
    import os, sys
    rank, master, names = sys.argv[1:]
    with open("/etc/hosts", "w") as file:
        file.write("127.0.0.1 localhost\\n" + names)
    os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": master, "MASTER_PORT": "22024"}
    import torch
    import torch.distributed as dist
    from regrow.runtime.torchrun import process_group
    with process_group(60.0):
        mine = torch.ones(1)
        dist.all_reduce(mine)
        print(int(mine), os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
    """
    first, second = pair
    processes = []
    for rank, host in enumerate(pair):
        output = host.tmp.parent / f"{host.name}-by-{by}"
        names = f"127.0.1.1 {host.name}\n" + (f"{first.address} {first.name}\n" if host is second else "")
        arguments = [str(rank), first.name if by == "name" else first.address, names]
        argv = [sys.executable, "-c", textwrap.dedent(program), *arguments]
        processes.append((host.start(argv, output, os.environ, Path("/")), output))
    for process, output in processes:
        assert process.wait(120.0) == 0, output.read_text()
        assert output.read_text().split()[-3:] == ["2", "eth0", "=eth0"]


def test_a_connection_that_is_held_ends_with_its_link_and_is_held_again(
    apart: HostsApart, pair: tuple[Host, Host]
) -> None:
    """Nothing closes it but the kernel, whose probes are not answered; a coordinator then knocks."""
    first, second = pair
    holds = f"""
    import sys, time
    from regrow.runtime.liveness.connections import HeldConnections
    connections = HeldConnections()
    connections.hold("second", (sys.argv[1], {PORT}))

    def is_held():
        return any(held.is_taken for held in list(connections.held.values()))

    for condition in (is_held, connections.lost, is_held):
        while not condition():
            time.sleep(0.01)
        print(condition.__name__, flush=True)
    """
    output = first.tmp.parent / "holds"
    process = first.start([sys.executable, "-c", textwrap.dedent(holds), second.address], output, os.environ, Path("/"))
    until(lambda: "is_held" in output.read_text())
    apart.partition(first, [second])
    until(lambda: "lost" in output.read_text())
    apart.partition(first, [second], on=False)
    assert process.wait(120.0) == 0


def test_storage_breaks_for_one_host_and_heals(apart: HostsApart, pair: tuple[Host, Host], storage: Path) -> None:
    first, second = pair
    write = """
    import os, sys
    try:
        with open(sys.argv[1], "a") as file:
            file.write("x" * 10)
            file.flush()
            os.fsync(file.fileno())
        with open(sys.argv[1]) as file:
            file.read()
    except OSError as error:
        sys.exit(error.errno)
    """
    expected = {"full": errno.ENOSPC, "read_only": errno.EROFS, "failing": errno.EIO}
    assert set(expected) < set(KINDS)
    for kind, number in expected.items():
        apart.break_storage(first, kind)
        assert run(first, write, f"{storage}/file")[0] == number
        assert run(second, write, f"{storage}/file")[0] == 0
    apart.break_storage(first, "hung")
    command = [sys.executable, "-c", textwrap.dedent(write), f"{storage}/file"]
    process = first.start(command, storage / "out", os.environ, Path("/"))
    time.sleep(1.0)
    assert process.poll() is None, "it waits for storage"
    apart.break_storage(first)
    assert process.wait(60.0) == 0
    assert run(first, write, f"{storage}/file")[0] == 0
    assert (storage / "file").stat().st_size >= 10 * len(expected)


def test_files_are_what_they_are_elsewhere(pair: tuple[Host, Host], storage: Path) -> None:
    """Appended, renamed, linked, locked, mapped, truncated, unlinked while open, 500 in a folder."""
    status, printed = run(
        pair[0],
        """
        import fcntl, mmap, os, sys
        os.chdir(sys.argv[1])
        os.makedirs("a/b", exist_ok=True)
        for number in range(500):
            with open(f"a/b/{number}", "w") as file:
                file.write(str(number))
        assert sorted(os.listdir("a/b"), key=int) == [str(number) for number in range(500)]
        with open("log", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for number in range(100):
                file.write(b"%03d" % number); file.flush()
        assert open("log", "rb").read() == b"".join(b"%03d" % number for number in range(100))
        os.rename("a", "c"); assert open("c/b/7").read() == "7"
        os.replace("log", "c/log"); assert not os.path.exists("log")
        os.symlink("c/log", "link"); assert len(open("link", "rb").read()) == 300
        os.link("c/log", "hard"); assert os.stat("hard").st_nlink == 2
        with open("big", "wb+") as file:
            file.write(os.urandom(3 << 20)); file.flush()
            with mmap.mmap(file.fileno(), 0) as mapped:
                mapped[1 << 20] = 7; mapped.flush()
            file.seek(1 << 20); assert file.read(1) == b"\\x07"
            file.truncate(5); assert os.fstat(file.fileno()).st_size == 5
            os.unlink("big"); file.write(b"still"); file.flush(); assert os.fstat(file.fileno()).st_size > 5
        os.chmod("hard", 0o600); assert os.stat("c/log").st_mode & 0o777 == 0o600
        """,
        str(storage),
    )
    assert status == 0, printed


def test_a_power_cut_takes_all_processes_and_tells_no_peer(apart: HostsApart, storage: Path) -> None:
    victim, peer = apart.add("victim", memory_mb=512), apart.add("peer")
    victim.start([sys.executable, "-c", SERVE], storage / "served", os.environ, Path("/"))
    until(lambda: reaches(peer, victim))
    wait = f"""
    import socket, sys
    connection = socket.create_connection((sys.argv[1], {PORT}))
    connection.recv(1); print("connected", flush=True)
    connection.settimeout(4.0)
    try:
        sys.exit(10 if connection.recv(1) == b"" else 11)
    except TimeoutError:
        sys.exit(12)
    """
    output = peer.tmp.parent / "waits"
    command = [sys.executable, "-c", textwrap.dedent(wait), victim.address]
    process = peer.start(command, output, os.environ, Path("/"))
    until(lambda: "connected" in output.read_text())
    apart.power_off(victim)
    assert process.wait(60.0) == 12, "neither an end nor a reset came"
    with pytest.raises(RuntimeError, match="victim is off"):
        victim.start(["true"], output, os.environ, Path("/"))


def test_nothing_is_left_of_a_laboratory_whose_owner_is_killed(tmp_path: Path) -> None:
    program = """
    import json, sys, time
    from pathlib import Path
    from regrow.drill.hosts import HostsApart
    hosts = HostsApart(storage=Path(sys.argv[1]), shm_mb=16, memory_mb=512)
    hosts.add("one")
    print(json.dumps([hosts.cable, str(hosts.folder), hosts.switch.pid]), flush=True)
    time.sleep(600)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    cable, folder, switch = json.loads(owner.stdout.readline())
    assert Path("/sys/class/net", cable).exists()
    owner.send_signal(signal.SIGKILL)
    owner.wait()

    def left() -> list[str]:
        found = [cable] if Path("/sys/class/net", cable).exists() else []
        found += [folder] if Path(folder).exists() or folder in Path("/proc/mounts").read_text() else []
        found += control_groups(switch)
        return found + ([str(switch)] if Path(f"/proc/{switch}").exists() else [])

    until(lambda: left() == [])
