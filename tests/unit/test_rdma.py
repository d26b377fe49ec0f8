"""Copies by NIXL. Without devices for RDMA it reads over TCP and shared memory here, which is the same to it."""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from regrow.accept import checks_rdma
from regrow.accept.claims import NotTested, Report, read_report
from regrow.state.memory import rdma, transport
from regrow.state.memory.held import COPY
from regrow.state.memory.incoming import Incoming, Memory
from regrow.state.memory.ranges import BLOCK, Connection
from regrow.state.memory.rdma import NixlTransport
from regrow.state.memory.transport import Registered, TransportError
from support.keepers import assert_copies_arrive, cluster, wait_until
from support.sockets import connected_sockets

SIZE = 8 * BLOCK
OFFER = """
import sys, json
from regrow.state.memory.rdma import NixlTransport
transport = NixlTransport("node-a")
file = open(sys.argv[1], "rb")
with transport.offers.of(file) as source:
    print(json.dumps(source), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any device, TCP too."""
    try:
        rdma._imported()
    except TransportError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("UCX_TLS", "sm,self,tcp")


@contextmanager
def offered(path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", Mapping[str, Any]]]:
    """A process that lets its peers read a file, and where."""
    command = [sys.executable, "-c", OFFER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def read(incoming: Incoming, source: Mapping[str, Any], at: int = BLOCK, size: int = SIZE - BLOCK) -> None:
    ours, theirs = connected_sockets()
    with ours, theirs:
        incoming.fill({"at": at, "bytes": size, "source": source}, Connection(theirs))


def test_slots_of_all_ranks_are_copied_and_checked_and_no_byte_of_them_goes_over_keepers_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "PIECE", BLOCK)
    monkeypatch.delattr(Connection, "send_file")
    registered: list[memoryview] = []

    def register(self: NixlTransport, memory: memoryview) -> Registered:
        registered.append(memory)
        return inner(self, memory)

    inner = NixlTransport.register
    monkeypatch.setattr(NixlTransport, "register", register)
    with cluster(tmp_path, 2, transport=NixlTransport) as nodes:
        assert_copies_arrive(nodes, num_ranks=3, elements=(3 * BLOCK + 4096) // 4)
        assert len(registered) == len(list(nodes[1].keeper.folder.glob(f"*{COPY}"))) < 9, "once for each of their files"


def test_what_is_read_is_what_the_file_has_where_another_one_had_been_registered_too(tmp_path: Path) -> None:
    """NIXL goes by what it heard of an address first."""
    sender, receiver, places = NixlTransport("a"), NixlTransport("b"), []
    for number in range(4):
        (path := tmp_path / f"file-{number}").write_bytes(data := os.urandom(SIZE))
        incoming = Incoming(Memory(tmp_path / "copy", SIZE, receiver))
        with open(path, "rb") as file, sender.offers.of(file) as source:
            places.append(source["at"])
            read(incoming, source)
        incoming.close()
        assert (tmp_path / "copy").read_bytes()[BLOCK:] == data[BLOCK:]
        path.unlink()
        sender.forget_deleted()
        assert f"{path} (deleted)" not in Path("/proc/self/maps").read_text()
    assert len(set(places)) < len(places), "no address was used twice"
    receiver.close()
    sender.close()


def test_a_sender_that_dies_is_a_failed_read_and_the_next_one_is_read_from(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(data := os.urandom(SIZE))
    receiver = NixlTransport("b")
    incoming = Incoming(Memory(tmp_path / "copy", SIZE, receiver))
    for _ in range(2):
        with offered(path) as (process, source):
            read(incoming, source)
            assert (tmp_path / "copy").read_bytes()[BLOCK:] == data[BLOCK:]
            process.kill()
            process.wait()
            begun = time.monotonic()
            with pytest.raises(TransportError):
                read(incoming, source)
            assert time.monotonic() - begun < rdma.READ_S
    incoming.close()
    receiver.close()


def threads_of(pid: int) -> set[str]:
    """The states that they are in."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}


def test_memory_that_is_given_up_while_it_is_read_into_is_not_given_back_before_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # a stopped process can be read in shared memory
    (path := tmp_path / "file").write_bytes(os.urandom(SIZE))
    receiver = NixlTransport("b")
    with offered(path) as (process, source):
        incoming = Incoming(Memory(tmp_path / "copy", SIZE, receiver))
        read(incoming, source, size=1)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: threads_of(process.pid) == {"T"})  # else it may serve the read first
        failed: list[BaseException] = []

        def reading() -> None:
            try:
                read(incoming, source)
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=reading)
        thread.start()
        wait_until(lambda: incoming._filling)
        closing = threading.Thread(target=incoming.close)
        closing.start()
        time.sleep(0.5)
        assert closing.is_alive()
        assert str(tmp_path / "copy") in Path("/proc/self/maps").read_text(), "the read may yet write there"
        process.send_signal(signal.SIGCONT)
        thread.join()
        closing.join()
        assert "given up" in str(failed[0])
        again = Incoming(Memory(tmp_path / "copy", SIZE, receiver))
        read(again, source)
        again.close()
        assert (tmp_path / "copy").read_bytes()[BLOCK:] == path.read_bytes()[BLOCK:]
    receiver.close()


def test_a_node_without_nixl_or_a_device_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "self")
    with pytest.raises(TransportError, match=r"no device for RDMA .* UCX_TLS=self; set snapshot.transport=tcp"):
        NixlTransport("a")

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(TransportError, match=r"pip install 'regrow\[rdma\]'"):
        NixlTransport("a")


def test_acceptance_tells_a_device_that_refuses_deregistered_memory_from_tcp_which_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setattr(checks_rdma, "NUM_BYTES", SIZE)
    checks_rdma.copies(Report(tmp_path / "report"))
    found = read_report(tmp_path / "report")
    assert found["rdma_equal"]["state"] == "proved"
    assert (found["rdma_refuses"]["state"], found["rdma_refuses"]["figure"]) == ("refused", "it was read")
    assert "rdma_rate" in found


def test_acceptance_tests_no_copies_by_rdma_where_there_is_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "self")
    with pytest.raises(NotTested, match="no device for RDMA"):
        checks_rdma.copies(Report(tmp_path / "report"))
