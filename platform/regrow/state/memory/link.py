"""How fast bytes travel between two nodes' keepers, and whether they arrive as they were sent.

Both sides know the bytes: every one is compared. A newcomer's keeper measures before its workers join a group.
"""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from regrow.errors import CheckpointError
from regrow.state.memory.ranges import BLOCK, Address, Connection, connected

OP = "link"
FLOWS = (1, 2, 4, 8)  # that are tried
FLOWS_S = 0.1  # that each trial takes, about
GAIN = 1.15  # times the rate of fewer flows, for more to be worth their connections
BUDGET_S = 1.0  # that a measurement may take each way, about
MOST_BLOCKS = 32
SLOW_S = 0.25  # for a block: then less is sent, in smaller ones
SMALL = BLOCK >> 4


@dataclass(frozen=True)
class Link:
    """What one TCP connection between two nodes carried, in bytes per second."""

    node: str  # the other one
    sent: float
    received: float


class Damaged(CheckpointError):
    """Bytes did not arrive as they were sent."""


def measure(node: str, address: Address, secret: bytes) -> Link:
    """Exchange bytes with the keeper of a node.

    Raises Damaged; CheckpointError where the keeper is gone or silent.
    """
    with connected(address, secret) as connection:
        small_s = max(max(_exchange(connection, 1, SMALL)), 1e-6)
        if small_s * BLOCK > SLOW_S * SMALL:  # training waits for it, too
            size, num_blocks = SMALL, max(1, int(SLOW_S / small_s))
        else:
            first_s = max(max(_exchange(connection, 1, BLOCK)), 1e-6)  # slow start is over then, too
            size, num_blocks = BLOCK, max(1, min(MOST_BLOCKS, int(BUDGET_S / first_s)))
        sent_s, received_s = _exchange(connection, num_blocks, size)
    return Link(node, num_blocks * size / sent_s, num_blocks * size / received_s)


def flows_that_fill(address: Address, secret: bytes) -> int:
    """How many connections at once fill the link to a keeper: the fewest after which more carry no more.

    Half a second or so, once for each peer. Raises CheckpointError where the keeper is gone or silent.
    """
    best, rate = FLOWS[0], 0.0
    num_blocks = 1
    for flows in FLOWS:
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(connected(address, secret)) for _ in range(flows)]
            if flows == FLOWS[0]:
                _send(connections[0], 1)  # slow start is over then
                num_blocks = max(1, min(MOST_BLOCKS, int(FLOWS_S / max(_send(connections[0], 1), 1e-6))))
            each = max(1, round(num_blocks * max(1.0, GAIN * flows / 2) / flows))
            with ThreadPoolExecutor(flows) as threads:
                begun = time.perf_counter()
                list(threads.map(_send, connections, [each] * flows))
                found = flows * each * BLOCK / (time.perf_counter() - begun)
        if rate and found < GAIN * rate:
            break
        best, rate = flows, found
    return best


def _send(connection: Connection, num_blocks: int) -> float:
    """Seconds until the other side has so many blocks."""
    begun = time.perf_counter()
    connection.send({"op": OP, "blocks": num_blocks, "bytes": BLOCK, "back": False})
    for _ in range(num_blocks):
        connection.send_bytes(_block().data)
    if "sound" not in connection.receive():
        raise ConnectionError("the other side closed the connection")
    return time.perf_counter() - begun


def answer(request: dict[str, Any], connection: Connection) -> None:
    """A keeper's side of an exchange."""
    size = request["bytes"]
    connection.send({"sound": _receive(connection, request["blocks"], size)})
    for _ in range(request["blocks"] if request.get("back", True) else 0):
        connection.send_bytes(_block()[:size].data)


def _exchange(connection: Connection, num_blocks: int, size: int) -> tuple[float, float]:
    """Seconds that so many blocks took there, and back."""
    times = [time.perf_counter()]
    connection.send({"op": OP, "blocks": num_blocks, "bytes": size})
    for _ in range(num_blocks):
        connection.send_bytes(_block()[:size].data)
    there = connection.receive().get("sound")
    times.append(time.perf_counter())
    if there is None:
        raise ConnectionError("the other side closed the connection")
    back = _receive(connection, num_blocks, size)
    times.append(time.perf_counter())
    if not (there and back):
        raise Damaged(f"bytes were damaged on the way {'back' if there else 'there'}")
    there_s, back_s = (max(later - earlier, 1e-9) for earlier, later in pairwise(times))
    return there_s, back_s


def _receive(connection: Connection, num_blocks: int, size: int) -> bool:
    """All of them; whether they are sound."""
    received, sound = np.empty(size, np.uint8), True
    for _ in range(num_blocks):
        connection.receive_into(received.data)
        sound = sound and np.array_equal(received, _block()[:size])  # memoryviews compare ten times as slowly
    return sound


@cache
def _block() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(np.random.default_rng(0).bytes(BLOCK), np.uint8)
