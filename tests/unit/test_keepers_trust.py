"""Keepers and those who ask them prove themselves to each other, over real sockets, with others in between."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from regrow.control.values import Version
from regrow.errors import CheckpointError
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.state.memory import node as node_module
from regrow.state.memory import ranges, transport
from regrow.state.memory.ranges import HELLO, Address, Connection, RangeServer, connected
from regrow.state.memory.writer import Snapshots
from support.keepers import RUN, SECRET, cluster, entries_of, state, wait_until
from support.keepers import snapshot as take_snapshot

NONCE, PROOF = 32, 32
Meddle = Callable[[str, bytes], bytes]  # what becomes of bytes of "client" or "server" on their way


class Served:
    """A server that knows the secret, and the requests that it has believed."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.requests: list[dict[str, Any]] = []
        self.server = RangeServer(host, lambda: SECRET, self._answer)
        self.thread = threading.Thread(target=self.server.serve)
        self.thread.start()

    def _answer(self, request: dict[str, Any], connection: Connection) -> None:
        self.requests.append(request)
        connection.send({"heard": request["say"]}, connection.body)

    def close(self) -> None:
        self.server.close()
        self.thread.join()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


@contextlib.contextmanager
def man_in_the_middle(target: Address, meddle: Meddle) -> Iterator[tuple[Address, dict[str, bytearray]]]:
    """Passes on what comes, to a server that it can reach; its address, and what each side has sent to it."""
    seen = {"client": bytearray(), "server": bytearray()}
    listening = socket.create_server(("127.0.0.1", 0))
    open_sockets = [listening]

    def pass_on(who: str, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen[who] += data
                sink.sendall(meddle(who, data))
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                client = listening.accept()[0]
                server = socket.create_connection(target)
                open_sockets.extend([client, server])
                for side in (("client", client, server), ("server", server, client)):
                    threading.Thread(target=pass_on, args=side, daemon=True).start()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield listening.getsockname()[:2], seen
    finally:
        for each in open_sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def as_it_is(who: str, data: bytes) -> bytes:
    return data


def closed_by(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            found += data
    return found


def test_both_sides_that_know_the_secret_are_heard_frame_by_frame(served: Served) -> None:
    with connected(served.server.address, SECRET) as connection:
        for number in range(3):
            connection.send({"say": number}, b"body" * number)
            assert connection.receive() == {"heard": number}
            assert connection.body == b"body" * number
    assert [request["say"] for request in served.requests] == [0, 1, 2]


def test_a_keeper_listens_at_the_address_of_a_host_that_has_ipv6_alone() -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("a kernel without IPv6")
    served = Served("::1")
    try:
        host, port = served.server.address
        with connected(served.server.address, SECRET) as connection:
            assert connection.host == host == "::1"
            connection.send({"say": 6})
            assert connection.receive() == {"heard": 6}
    finally:
        served.close()
    with pytest.raises(CheckpointError, match=rf"keeper at \[::1\]:{port}: "), connected((host, port), SECRET):
        pass


STRANGERS = (b"", HELLO, b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(1 << 20), HELLO + b"\xff" * 500)


@pytest.mark.parametrize("hello", STRANGERS)
def test_a_stranger_is_shown_nothing_and_believed_nothing(
    served: Served, hello: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "TIMEOUT_S", 0.3)
    with socket.create_connection(served.server.address) as stranger:
        with contextlib.suppress(OSError):  # it may hang up while we speak
            stranger.sendall(hello)
        shown = closed_by(stranger)
    assert len(shown) <= NONCE + PROOF
    assert SECRET not in shown
    assert served.requests == []


def test_a_stranger_that_says_something_is_cut_at_the_deadline_of_its_proof(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "TIMEOUT_S", 600.0)
    monkeypatch.setattr(ranges, "PROOF_S", 0.3)
    with (
        connected(served.server.address, SECRET) as proved,
        socket.create_connection(served.server.address, timeout=60.0) as stranger,
    ):
        for byte in HELLO:
            stranger.sendall(bytes([byte]))
        assert closed_by(stranger) == b""
        proved.send({"say": "still"})  # it is older
        assert proved.receive() == {"heard": "still"}


WITH_FEW_DESCRIPTORS = """
import resource
from regrow.state.memory import ranges
from support.keepers import SECRET

resource.setrlimit(resource.RLIMIT_NOFILE, (192, 192))
ranges.PROOF_S = ranges.TIMEOUT_S = 600.0
server = ranges.RangeServer("127.0.0.1", lambda: SECRET, lambda request, connection: connection.send({"heard": 1}))
print(server.address[1], flush=True)
server.serve()
"""


def test_silent_strangers_of_more_than_its_descriptors_keep_no_client_from_a_keeper() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", WITH_FEW_DESCRIPTORS], stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as held,
    ):
        held.callback(process.kill)
        assert process.stdout is not None
        address = ("127.0.0.1", int(process.stdout.readline()))
        silent = [held.enter_context(socket.create_connection(address, timeout=60.0)) for _ in range(220)]
        with connected(address, SECRET) as connection:
            connection.send({"say": 1})
            assert connection.receive() == {"heard": 1}
        num_closed = len(silent) + 1 - 128  # the client was one of those that have proved nothing
        assert [closed_by(each) for each in silent[:num_closed]] == [b""] * num_closed
        for each in silent[num_closed:]:
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)


def test_a_client_with_another_secret_learns_so_before_it_asks(served: Served) -> None:
    with (
        pytest.raises(CheckpointError, match="does not prove that it is this keeper, and of this run"),
        connected(served.server.address, b"guessed") as connection,
    ):
        connection.send({"say": "never"})
    assert served.requests == []


def test_a_server_that_does_not_know_the_secret_is_told_nothing() -> None:
    """As one that has taken a dead keeper's address has it."""
    told = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as false_server:

        def run() -> None:
            client = false_server.accept()[0]
            with client:
                client.sendall(os.urandom(NONCE + PROOF))
                told.extend(closed_by(client))

        thread = threading.Thread(target=run)
        thread.start()
        with (
            pytest.raises(CheckpointError, match="does not prove"),
            connected(false_server.getsockname()[:2], SECRET) as connection,
        ):
            connection.send({"say": "weights"})
        thread.join()
    assert len(told) == len(HELLO) + NONCE
    assert told.startswith(HELLO)


def test_a_relay_to_another_keeper_is_refused_and_gets_no_proof(served: Served) -> None:
    """It has a dead keeper's address, and passes on what that would be asked to a keeper that lives."""
    with man_in_the_middle(served.server.address, as_it_is) as (address, seen):
        with pytest.raises(CheckpointError, match="does not prove"), connected(address, SECRET) as connection:
            connection.send({"say": "never"})
        assert len(seen["client"]) == len(HELLO) + NONCE
        assert len(seen["server"]) == NONCE + PROOF
    assert served.requests == []


def test_a_servers_own_proof_turned_back_is_none_of_a_client(served: Served) -> None:
    with socket.create_connection(served.server.address) as stranger:
        stranger.sendall(HELLO + os.urandom(NONCE))
        shown = b""
        while len(shown) < NONCE + PROOF:
            shown += stranger.recv(1 << 16)
        stranger.sendall(shown[NONCE:] + b"\x00" * 100)
        assert closed_by(stranger) == b""
    assert served.requests == []


def through(middle: Address, served: Served) -> Connection:
    """A client that means the server itself, and whose packets somebody holds."""
    connection = Connection(socket.create_connection(middle))
    connection.prove(served.server.address, SECRET)
    return connection


def test_a_session_that_was_recorded_cannot_be_played_again(served: Served) -> None:
    with man_in_the_middle(served.server.address, as_it_is) as (middle, seen):
        connection = through(middle, served)
        connection.send({"say": 1})
        assert connection.receive() == {"heard": 1}
        connection.close()
        recorded = bytes(seen["client"])
    assert len(served.requests) == 1
    with socket.create_connection(served.server.address) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(recorded)
        assert len(closed_by(stranger)) <= NONCE + PROOF
    assert len(served.requests) == 1


def receive_twice(connection: Connection) -> None:
    for _ in range(2):
        if not connection.receive():
            raise ConnectionError("never came")


@pytest.mark.parametrize("who", ["client", "server"])
@pytest.mark.parametrize("how", ["a byte of the body", "the length", "played twice", "another's number"])
def test_frames_that_are_changed_or_played_twice_on_the_way_are_refused(served: Served, who: str, how: str) -> None:
    before: dict[str, bytes] = {}

    def meddle(sender: str, data: bytes) -> bytes:
        if sender != who or b"meddle" not in data:
            before[sender] = data
            return data
        if how == "a byte of the body":
            return data.replace(b"meddle", b"puddle")
        if how == "the length":
            return b"\xff\xff\xff\xff" + data[4:]
        return data + data if how == "played twice" else before[sender]

    with man_in_the_middle(served.server.address, meddle) as (middle, _):
        connection = through(middle, served)
        connection.send({"say": "before"}, b"body")
        assert connection.receive() == {"heard": "before"}
        connection.send({"say": "this"}, b"meddle")
        with pytest.raises(OSError, match=r"not what the other side sent|a message of|closed|reset|never came"):
            receive_twice(connection)  # the first of two that are the same is sound
        connection.close()
    sound = how == "played twice" or who == "server"
    assert [request["say"] for request in served.requests] == ["before", "this"][: 1 + sound]


@pytest.mark.parametrize("idle_s", [transport.IDLE_S, 0.0], ids=["flows are kept", "flows are opened anew"])
def test_with_two_secrets_at_a_drivers_change_a_slow_keeper_is_waited_for(
    idle_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new driver's keepers hear its secret one after another; what was sealed meanwhile is copied once both know."""
    monkeypatch.setattr(node_module, "RETRY_S", 0.2)
    monkeypatch.setattr(transport, "IDLE_S", idle_s)
    with cluster(tmp_path, 2) as (quick, slow):
        take_snapshot([quick, slow], 1, 2)
        complaints: list[str] = []
        quick.keeper.complain = slow.keeper.complain = lambda text, *peer: complaints.append(text)
        quick.keeper.secret = b"of the next driver"
        old_reports = len(quick.reports), len(slow.reports)
        writers = [(each, rank_of(each.keeper.folder, shard)) for shard, each in enumerate((quick, slow))]
        for each, writer in writers:
            assert writer.begin(2, {})
            writer.wait()
            writer.confirm(2)
            wait_until(lambda: any(each.keeper.node in text for text in complaints))  # noqa: B023
        assert (len(quick.reports), len(slow.reports)) == old_reports
        assert all("does not prove that it is this keeper" in text for text in complaints)
        slow.keeper.secret = b"of the next driver"
        for each, _ in writers:
            wait_until(lambda: any(report.version == Version(1, 2) for report in each.reports))  # noqa: B023
        for each, _ in writers:
            copied = [held for held in each.keeper.holdings() if held.is_copy and held.moment.step == 2]
            assert len(copied) == 1


def rank_of(folder: Path, shard: int) -> Snapshots:
    """A rank that takes snapshots, one a node."""
    place = Coordinates(MeshShape(1, 2), shard)
    return Snapshots(folder, entries_of(shard, 2, state(2)), coordinates=place, run_id=RUN, generation=1)
