"""Copies by several flows, memory that comes in, and threads that nothing waits for."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from regrow.control.values import Peer, Version
from regrow.errors import CheckpointError
from regrow.state.memory import incoming, link, mapping, transport
from regrow.state.memory.held import COPY
from regrow.state.memory.incoming import Incomings, Memory
from regrow.state.memory.node import KeeperNode
from regrow.state.memory.ranges import BLOCK, Address, Connection, RangeServer
from regrow.state.memory.slots import MAGIC, Committed
from regrow.state.memory.threads import Threads
from regrow.state.memory.transport import FILL, Place, Registered, TcpSession, TcpTransport
from regrow.state.memory.unneeded import Unneeded
from support.keepers import RUN, SECRET, assert_copies_arrive, cluster, large_slots, peers_of, scalars_of, wait_until
from support.sockets import connected_sockets

MANY = 3 * BLOCK + 12345


@contextmanager
def serving(answer: Callable[..., None]) -> Iterator[RangeServer]:
    server = RangeServer("127.0.0.1", lambda: SECRET, answer)
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def threads_of(most: int) -> Iterator[Threads]:
    threads = Threads(most, "test")
    try:
        yield threads
    finally:
        threads.close()


@pytest.mark.parametrize("size", [1, 100, BLOCK - 1, BLOCK, BLOCK + 1, MANY])
def test_many_bytes_arrive_whole_and_what_comes_after_them_does_too(size: int) -> None:
    data, got = os.urandom(size), bytearray(size)

    def answer(request: dict[str, int], connection: Connection) -> None:
        connection.receive_all(memoryview(got))
        connection.send({"then": connection.receive()["then"]})

    with serving(answer) as server:
        connection = Connection.to(server.address, SECRET)
        connection.send({"op": "take"})
        for at in range(0, size, 300_000):  # in parts, so that no call finds all of them
            connection.send_bytes(data[at : at + 300_000])
            time.sleep(0.001)
        connection.send({"then": 7})
        assert connection.receive() == {"then": 7}
        assert got == data
        connection.close()


def test_a_file_is_put_by_several_flows_at_once_into_the_peers_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "PIECE", BLOCK)
    (source := tmp_path / "source").write_bytes(data := os.urandom(8 * BLOCK + 99))
    incomings, used = Incomings(TcpTransport()), set[Connection]()

    def answer(request: dict[str, int], connection: Connection) -> None:
        assert request["op"] == FILL
        used.add(connection)
        incomings.fill(request, connection)

    with serving(answer) as server, incomings.open(tmp_path / "copy", len(data)) as incoming:
        session = TcpSession(server.address, SECRET, lambda peer, secret: 3)
        with open(source, "rb") as file:
            session.put(file, len(MAGIC), len(data), incoming.place)
        session.close()
        assert (tmp_path / "copy").read_bytes() == bytes(len(MAGIC)) + data[len(MAGIC) :]
        assert 1 < len(used) <= 3
        with pytest.raises(CheckpointError, match="no peer any more"), open(source, "rb") as file:
            session.put(file, len(MAGIC), len(data), incoming.place)


def test_files_that_are_put_at_once_take_turns_on_the_flows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PIECE", BLOCK)
    (source := tmp_path / "source").write_bytes(bytes(16 * BLOCK))
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()

    def answer(request: dict[str, Any], connection: Connection) -> None:
        begun.set()
        go_on.wait(20)
        left = [min(2, 16 - order.count(each)) for each in ("first", "second")]  # this one, too
        wait_until(lambda: session._threads is not None and session._threads._tasks.qsize() == sum(left) - 1)
        order.append(request["into"])
        connection.receive_all(memoryview(bytearray(request["bytes"])))
        connection.send({"ok": True})

    with serving(answer) as server, open(source, "rb") as file, threads_of(2) as threads:
        session = TcpSession(server.address, SECRET, lambda peer, secret: 1)
        puts = [threads.submit(session.put, file, 0, 16 * BLOCK, {"into": "first"})]
        assert begun.wait(20)
        puts += [threads.submit(session.put, file, 0, 16 * BLOCK, {"into": "second"})]
        wait_until(lambda: session._threads is not None and session._threads._tasks.qsize() >= 3)
        go_on.set()
        for each in puts:
            each.result(20)
        session.close()
    assert order.count("first") == order.count("second") == 16
    assert order.index("second") < 4
    assert "first" in order[-4:]


def test_a_put_whose_peers_change_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PIECE", BLOCK)
    (source := tmp_path / "source").write_bytes(bytes(8 * BLOCK))
    begun, go_on = threading.Event(), threading.Event()

    def answer(request: dict[str, Any], connection: Connection) -> None:
        begun.set()
        go_on.wait(20)
        connection.receive_all(memoryview(bytearray(request["bytes"])))
        connection.send({"ok": True})

    with serving(answer) as server, open(source, "rb") as file, threads_of(1) as threads:
        session = TcpSession(server.address, SECRET, lambda peer, secret: 1)
        put = threads.submit(session.put, file, 0, 8 * BLOCK, {})
        assert begun.wait(20)
        session.close()
        go_on.set()
        with pytest.raises(CheckpointError, match="no peer any more"):
            put.result(20)


def test_a_copy_whose_turn_has_not_come_is_not_given_up_while_others_of_its_host_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(incoming, "LOOK_S", 0.02)
    incomings = Incomings(TcpTransport())
    looked = 0

    def answer(request: dict[str, Any], connection: Connection) -> None:
        if request["op"] == FILL:
            incomings.fill(request, connection)
        else:
            incomings.receive(tmp_path / request["file"], request, connection)

    def is_silent(self: Incomings, host: str, since: float) -> bool:
        nonlocal looked
        looked += time.monotonic() - since > 3 * incoming.TIMEOUT_S
        return silent(self, host, since)

    silent = Incomings._is_silent
    monkeypatch.setattr(Incomings, "_is_silent", is_silent)
    put = {"op": "put", "bytes": 2 * BLOCK, "by": "tcp", "header_sha256": ""}
    with serving(answer) as server:
        first, second, flow = (Connection.to(server.address, SECRET) for _ in range(3))
        first.send(put | {"file": "first"})
        second.send(put | {"file": "second"})
        place, _ = first.receive()["place"], second.receive()
        flow.send({"op": FILL, "at": len(MAGIC), "bytes": BLOCK, **place})
        wait_until(lambda: looked)
        flow.send_bytes(bytes(BLOCK))
        assert flow.receive() == {"ok": True}
        second.send({"op": "seal"})
        assert "error" in second.receive()  # it is no snapshot; but it was waited for
        assert first.receive() == {}  # nothing comes of any any more
        for each in (first, second, flow):
            each.close()


def test_memory_that_is_given_up_takes_nothing_more(tmp_path: Path) -> None:
    incomings = Incomings(TcpTransport())
    ours, theirs = connected_sockets()
    with incomings.open(tmp_path / "copy", 4 * BLOCK) as old, ours, theirs:
        failed = threading.Event()

        def fill() -> None:
            try:
                old.fill({"at": len(MAGIC), "bytes": 2 * BLOCK}, Connection(theirs))
            except OSError:
                failed.set()

        filling = threading.Thread(target=fill)
        filling.start()
        wait_until(lambda: old._filling)
        with incomings.open(tmp_path / "copy", 4 * BLOCK) as new:
            wait_until(failed.is_set)
            filling.join()
            with pytest.raises(ConnectionError, match="no such range"):
                old.fill({"at": len(MAGIC), "bytes": 1}, Connection(ours))
            assert "takes its place" in old.seal(b"", "")
            assert (tmp_path / "copy").exists()
            assert incomings.find(new.token) is new
    with pytest.raises(ConnectionError, match="no such copy"):
        incomings.find(old.token)


@pytest.mark.parametrize(("at", "size"), [(0, 8), (len(MAGIC), 4 * BLOCK), (4 * BLOCK, 1), (100, -1)])
def test_a_range_that_is_not_of_the_copy_is_refused(tmp_path: Path, at: int, size: int) -> None:
    ours, theirs = connected_sockets()
    with ours, theirs, Incomings(TcpTransport()).open(tmp_path / "copy", 4 * BLOCK) as incoming:
        connection = Connection(ours)
        with pytest.raises(ConnectionError, match="no such range"):
            incoming.fill({"at": at, "bytes": size}, connection)


def test_slots_of_all_ranks_are_copied_side_by_side_and_checked_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a piece each, so that what fills the link is measured; flows are few on any machine."""
    monkeypatch.setattr(transport, "PIECE", BLOCK)
    with cluster(tmp_path, 3, copies=2) as nodes:
        assert_copies_arrive(nodes, num_ranks=4, elements=(3 * BLOCK + 4096) // 4)


def test_what_fills_a_link_is_measured_and_is_at_least_one_flow(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as nodes:
        (peer,) = peers_of(nodes, 0)
        assert link.flows_that_fill(peer.address, SECRET) in link.FLOWS


def test_a_peer_with_another_transport_is_told_apart(tmp_path: Path) -> None:
    class Other(TcpTransport):
        name = "other"

    with cluster(tmp_path, 2) as nodes:
        nodes[1].keeper._incoming._transport = Other()
        complaints: list[str] = []
        nodes[0].keeper.complain = lambda text, peer, tried_s: complaints.append(text)
        writer = large_slots(nodes[0], num_ranks=1, elements=64)[0]
        assert writer.begin(1, scalars_of(1))
        writer.wait()
        writer.confirm(1)
        wait_until(lambda: complaints)
        assert "transport other, not tcp" in complaints[0]
        assert not nodes[0].reports


def test_threads_do_all_of_it_on_at_most_so_many_and_nothing_once_they_are_closed() -> None:
    threads, seen = Threads(3, "some"), set[int]()
    gate = threading.Barrier(3)

    def work(number: int) -> int:
        seen.add(threading.get_ident())
        if number < 3:
            gate.wait(20)
        return number

    assert [each.result(20) for each in [threads.submit(work, number) for number in range(50)]] == list(range(50))
    assert len(seen) == 3
    threads.close()
    assert threads.submit(work, 1).cancelled()


def test_what_waits_for_a_task_is_told_that_it_is_never_done() -> None:
    threads, begun, go_on = Threads(1, "some"), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(20)

    first, second = threads.submit(work), threads.submit(work)
    assert begun.wait(20)
    threads.close()
    assert wait([second], 20).done == {second}
    assert second.cancelled()
    go_on.set()
    first.result(20)
    assert wait([threads.submit(work)], 20).not_done == set()


class Cut(TcpTransport):
    """Its link to a peer breaks, once it is `cut`, where memory is there for a copy."""

    cut = False

    def connect(self, peer: Address, secret: bytes) -> TcpSession:
        transport = self

        class Session(TcpSession):
            def put(self, file: BinaryIO, begin: int, end: int, place: Place) -> None:
                if transport.cut:
                    raise CheckpointError("the link broke")
                super().put(file, begin, end, place)

        return Session(peer, secret, self.flows_to)


@pytest.mark.parametrize("before", ["all of them came", "one was cut off", "the keeper began anew"])
def test_copies_of_a_node_that_has_other_peers_by_now_go_with_what_they_were_of(before: str, tmp_path: Path) -> None:
    link = Cut()
    with cluster(tmp_path, 3, transport=lambda node: link if node == "node-0" else None) as nodes:
        ranks = large_slots(nodes[0], num_ranks=2, elements=64)

        def seal(step: int) -> None:
            for each in ranks:
                assert each.begin(step, scalars_of(step))
                each.wait()
            for each in ranks:
                each.confirm(step)

        def commit(step: int) -> None:
            wait_until(lambda: nodes[0].reports and nodes[0].reports[-1].version == Version(1, step))
            for node in nodes:
                node.keeper.committed(Committed(newest=Version(1, step), number=step))

        def copies() -> list[int]:
            return [len(list(node.keeper.folder.glob(f"*{COPY}"))) for node in nodes]

        for step in (1, 2, 3):
            seal(step)
            commit(step)
        assert copies() == [0, 4, 0]
        if before == "the keeper began anew":
            nodes[1].keeper.close(delete=False)
            folder, report = nodes[1].keeper.folder, nodes[1].reports.append
            nodes[1].keeper = KeeperNode(
                folder, node="node-1", host="127.0.0.1", secret=SECRET, run_id=RUN, report=report
            )
            nodes[1].keeper.start()
        if before == "one was cut off":
            told: list[str] = []
            nodes[0].keeper.complain = lambda text, peer, tried_s: told.append(text)
            link.cut = True
            seal(4)
            wait_until(lambda: len(told) == 2)
            link.cut = False
        nodes[0].keeper.set_peers((Peer("node-2", nodes[2].keeper.address),))
        if before != "one was cut off":
            seal(4)
        commit(4)
        wait_until(lambda: copies() == [0, 0, 2])  # the keeper may have yet to see that a copy was cut off
        seal(5)
        commit(5)
        assert copies() == [0, 0, 4]
        for each in ranks:
            each.close()


def test_a_copy_that_another_one_takes_the_place_of_is_let_go_of_once(tmp_path: Path) -> None:
    closed: list[str] = []

    class Counted(TcpTransport):
        def register(self, memory: memoryview) -> Registered:
            found = super().register(memory)
            found.close = lambda: closed.append(memory.hex())  # type: ignore[method-assign]
            return found

    incomings = Incomings(Counted())
    with incomings.open(tmp_path / "copy", 4 * BLOCK), incomings.open(tmp_path / "copy", 4 * BLOCK):
        assert len(closed) == 1
    assert len(closed) == 2, "what was registered since may lie at the same address"


def test_a_copy_that_comes_is_not_given_back_and_one_that_was_cut_off_is(tmp_path: Path) -> None:
    committed, path, size = Committed(newest=Version(1, 9), number=1), tmp_path / f"g1-0.slot.node-0{COPY}", 4 * BLOCK
    there: list[bool] = []

    class GivingBack(TcpTransport):
        def register(self, memory: memoryview) -> Registered:
            unneeded.give_back(committed)
            there.append(path.exists())
            return super().register(memory)

    incomings = Incomings(transport := GivingBack())
    unneeded = Unneeded(tmp_path, transport, incomings)
    with incomings.open(path, size):
        unneeded.give_back(committed)
        assert path.exists()
    assert there == [True], "its file was made just then"
    unneeded.give_back(committed)
    assert not path.exists()


def test_memory_of_copies_is_mapped_once_and_let_go_of_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: list[int] = []

    def map_all(descriptor: int, num_bytes: int) -> mmap.mmap:
        mapped.append(num_bytes)
        return mapping.map_all(descriptor, num_bytes)

    def maps() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if COPY in line]

    monkeypatch.setattr(incoming, "map_all", map_all)
    with cluster(tmp_path, 2) as nodes:
        assert_copies_arrive(nodes, num_ranks=2, elements=BLOCK)
        copies = list(nodes[1].keeper.folder.glob(f"*{COPY}"))
        assert 0 < len(copies) < 6, "of three steps"
        assert len(mapped) == len(copies)
        assert len(maps()) == len(copies)
        nodes[1].keeper.committed(Committed(newest=Version(2, 4), number=4))
        assert not list(nodes[1].keeper.folder.glob(f"*{COPY}"))
        wait_until(lambda: not maps())  # it is memory


@pytest.mark.parametrize("then", ["another size", "deleted"])
def test_memory_that_no_longer_fits_its_file_is_not_used_for_the_next_copy(tmp_path: Path, then: str) -> None:
    incomings, path, size = Incomings(TcpTransport()), tmp_path / "copy", 4 * BLOCK

    def kept(size: int) -> Memory:
        with incomings.open(path, size) as copy:
            copy.version = Version(1, 1)
        return copy.memory

    first = kept(size)
    assert kept(size) is first
    if then == "deleted":
        path.unlink()
    second = kept(size + BLOCK if then == "another size" else size)
    assert second is not first
    assert path.stat().st_size == second.size
    with pytest.raises(ValueError, match="closed"):
        first.map.size()
    incomings.forget(deleted_only=False)
    with pytest.raises(ValueError, match="closed"):
        second.map.size()
