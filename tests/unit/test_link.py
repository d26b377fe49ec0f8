"""A newcomer measures its link: real sockets, between real keepers and ones that damage what they pass on."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from regrow.errors import CheckpointError
from regrow.state.memory import link as module
from regrow.state.memory.link import Damaged, measure
from regrow.state.memory.node import KeeperNode
from regrow.state.memory.ranges import BLOCK, Address, Connection, RangeServer

SECRET = b"secret"


@contextlib.contextmanager
def neighbour(answer: Callable[[dict[str, Any], Connection], None]) -> Iterator[Address]:
    """A node whose keeper answers so."""
    server = RangeServer("127.0.0.1", lambda: SECRET, answer)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server.address
    finally:
        server.close()
        thread.join()


def test_a_keeper_answers_with_what_it_was_sent(tmp_path: Path) -> None:
    keeper = KeeperNode(
        tmp_path / "memory", node="n", host="127.0.0.1", secret=SECRET, run_id="run", report=lambda sealed: None
    )
    keeper.start()
    try:
        link = measure("n", keeper.address, SECRET)
    finally:
        keeper.close(delete=True)
    assert link.node == "n"
    assert min(link.sent, link.received) > 1e6


def test_a_slow_link_is_measured_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As slow as the other side is with every block."""
    monkeypatch.setattr(module, "BUDGET_S", 0.4)

    def slowly(request: dict[str, Any], connection: Connection) -> None:
        time.sleep(0.1 * request["blocks"])
        module.answer(request, connection)

    with neighbour(slowly) as address:
        begun = time.monotonic()
        link = measure("n", address, SECRET)
    assert time.monotonic() - begun < 30
    assert link.sent < BLOCK / 0.1 < link.received


def test_a_link_that_training_waits_for_is_measured_with_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 Mbit/s, half of it others': four blocks were 14 s, in which no other node's link was known either."""
    sent = []
    receive_into = Connection.receive_into

    def slowly(self: Connection, target: memoryview) -> None:
        receive_into(self, target)
        sent.append(len(target))
        time.sleep(len(target) / 1.25e6)

    monkeypatch.setattr(Connection, "receive_into", slowly)
    with neighbour(module.answer) as address:
        link = measure("n", address, SECRET)
    assert sum(sent) < BLOCK
    assert 0.5e6 < max(link.sent, link.received) < 1.25e6


@pytest.mark.parametrize(("way", "expected"), [("there", "on the way there"), ("back", "on the way back")])
def test_one_damaged_byte_is_found(way: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: dict[str, Any], connection: Connection) -> None:
        receive, send = connection.receive_into, connection.send_bytes

        def receive_damaged(target: memoryview) -> None:
            receive(target)
            target[len(target) // 2] ^= 1

        def send_damaged(data: bytes | memoryview) -> None:
            damaged = bytearray(data)
            damaged[len(damaged) // 2] ^= 1
            send(damaged)

        if way == "there":
            monkeypatch.setattr(connection, "receive_into", receive_damaged)
        else:
            monkeypatch.setattr(connection, "send_bytes", send_damaged)
        module.answer(request, connection)

    with neighbour(answer) as address, pytest.raises(Damaged, match=expected):
        measure("n", address, SECRET)


def test_a_neighbour_that_is_gone_is_not_called_damaged() -> None:
    with (
        neighbour(lambda request, connection: connection.close()) as address,
        pytest.raises(CheckpointError, match="keeper at 127") as hung_up,
    ):
        measure("n", address, SECRET)
    with pytest.raises(CheckpointError, match="keeper at 127") as refused:
        measure("n", address, SECRET)
    assert not isinstance(hung_up.value, Damaged)
    assert not isinstance(refused.value, Damaged)
