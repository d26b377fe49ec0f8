"""Small values between all ranks of a generation, over a tree of TCP connections: a rank has one to its parent and at
most FAN_OUT below it, however many ranks there are. Gloo and NCCL carry what is large, along an axis of the mesh each.

All that a value passes are ranks of the group, which say hello with what they have of the coordinator alone. A peer
that is gone is an error at once, which closes this rank's own connections when it leaves: so all hear of it, one after
another.
"""

import contextlib
import itertools
import json
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch.distributed as dist

from regrow.plan.tree import children_of, parent_of

Address = tuple[str, int]  # host, port

CALL_S = 2.0  # for a host to answer, before it is looked whether the generation is over
LOOK_S = 0.2  # between looks whether the generation is over, while others are waited for
MOST_BYTES = 1 << 30  # of all ranks' values
HELLO = struct.Struct("!32sI")  # the generation's secret, rank
FRAME = struct.Struct("!Q")  # bytes that follow
VALUE = struct.Struct("!II")  # rank, bytes of its value


class Tree:
    """One rank's connections. Collective to connect; every call is collective, and raises DistNetworkError where a rank
    is gone or says nothing for `timeout_s`."""

    def __init__(self, listener: socket.socket, *, rank: int, size: int, secret: bytes, timeout_s: float) -> None:
        """`listener` is closed with the tree."""
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._listener, self._secret = listener, secret
        self._parent: socket.socket | None = None
        self._children: dict[int, socket.socket] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> Address:
        """Where this rank listens for those below it."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def connections(self) -> list[socket.socket]:
        return [*([self._parent] if self._parent is not None else []), *self._children.values()]

    def connect(self, parent: Address | None, *, is_over: Callable[[], bool] = lambda: False) -> None:
        """Come together with the parent, None for rank 0, and with those below, which listened before any was told of
        the group. Where `is_over`, which another thread may decide, none is waited for."""
        if parent is not None:
            self.call(parent, is_over)
        self.take(is_over)

    def call(self, parent: Address, is_over: Callable[[], bool] = lambda: False) -> None:
        """Connect to the parent, which need not have looked yet."""
        give_up_at = time.monotonic() + self.timeout_s
        with _explained(f"rank {parent_of(self.rank)} at {parent[0]}:{parent[1]}"):
            while self._parent is None:
                try:
                    self._parent = _prepared(socket.create_connection(parent, timeout=CALL_S))
                except TimeoutError:  # its host does not answer
                    if is_over() or time.monotonic() > give_up_at:
                        raise
            self._parent.sendall(HELLO.pack(self._secret, self.rank))

    def take(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until all below have connected, and said which they are: one may stand still between the two."""
        missing, give_up_at = set(children_of(self.rank, self.size)), time.monotonic() + self.timeout_s
        self._listener.settimeout(LOOK_S)
        with contextlib.ExitStack() as silent, selectors.DefaultSelector() as waiting:
            waiting.register(self._listener, selectors.EVENT_READ)
            while missing:
                if is_over():
                    raise dist.DistNetworkError(f"the generation was over before ranks {sorted(missing)} had come")
                if time.monotonic() > give_up_at:
                    raise dist.DistNetworkError(f"ranks {sorted(missing)} did not come within {self.timeout_s:g} s")
                for ready in [cast(socket.socket, key.fileobj) for key, _ in waiting.select(LOOK_S)]:
                    with contextlib.suppress(OSError):  # it has gone again
                        if ready is self._listener:
                            link = silent.enter_context(_prepared(self._listener.accept()[0]))
                            waiting.register(link, selectors.EVENT_READ)
                            continue
                        waiting.unregister(ready)
                        ready.settimeout(LOOK_S)
                        secret, rank = HELLO.unpack(_read(ready, HELLO.size))
                        if secret == self._secret and rank in missing:  # else it is a stranger's
                            self._children[rank] = ready.dup()
                            missing.remove(rank)

    def gather(self, value: bytes) -> list[bytes]:
        """Every rank's, in rank order, on every rank."""
        with self._calling():
            self.up(value)
            return self.down()

    def broadcast(self, value: bytes | None) -> bytes:
        """Rank 0's, on every rank; the others give none."""
        with self._calling():
            self._packed = value or b""
            return self._hand_down()

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        try:
            with self._lock, _recorded():
                yield
        except BaseException:
            self.close()  # what is on its way would be taken for the next call's
            raise

    def up(self, value: bytes) -> None:
        """The first half of `gather`: take what comes from below, and hand it on with this rank's."""
        parts = [VALUE.pack(self.rank, len(value)) + value]
        for child, link in self._children.items():
            with _explained(f"rank {child}"):
                link.settimeout(self.timeout_s)
                parts.append(bytes(_frame(link)))
        self._packed = b"".join(parts)
        if self._parent is not None:
            with _explained(f"rank {parent_of(self.rank)}"):
                self._parent.settimeout(self.timeout_s)
                _send(self._parent, self._packed)

    def down(self) -> list[bytes]:
        """The second half: take everything from above, and hand it down."""
        packed, at = self._hand_down(), 0
        values: list[bytes] = [b""] * self.size
        while at < len(packed):
            rank, num_bytes = VALUE.unpack_from(packed, at)
            at += VALUE.size
            values[rank], at = packed[at : at + num_bytes], at + num_bytes
        return values

    def _hand_down(self) -> bytes:
        packed = self._packed
        if self._parent is not None:
            with _explained(f"rank {parent_of(self.rank)}"):
                self._parent.settimeout(self.timeout_s)
                packed = bytes(_frame(self._parent))
        for child, link in self._children.items():
            with _explained(f"rank {child}"):
                link.settimeout(self.timeout_s)
                _send(link, packed)
        self._packed = b""
        return packed

    def close(self) -> None:
        """Give the connections up: peers that wait for this rank see them end."""
        for link in [*self.connections, self._listener]:
            with contextlib.suppress(OSError):  # its peer's end was first
                link.shutdown(socket.SHUT_RDWR)
            link.close()


def _prepared(link: socket.socket) -> socket.socket:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def _send(link: socket.socket, packed: bytes) -> None:
    link.sendall(FRAME.pack(len(packed)) + packed)


def _frame(link: socket.socket) -> bytearray:
    (num_bytes,) = FRAME.unpack(_read(link, FRAME.size))
    if num_bytes > MOST_BYTES:
        raise ConnectionError(f"announces {num_bytes} bytes; at most {MOST_BYTES} are taken")
    return _read(link, num_bytes)


def _read(link: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    left = memoryview(data)
    while left:
        if not (came := link.recv_into(left)):
            raise ConnectionError("its end of the connection has ended")
        left = left[came:]
    return data


@contextlib.contextmanager
def _explained(peer: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise dist.DistNetworkError(f"waited for {peer}, for a small value of all ranks: {error}") from error


# ---- what was begun, for those that look from another thread whether a rank waits for others


class _Record:
    def __init__(self) -> None:
        self.number, self.began_ns, self.ended = next(_numbers), time.time_ns(), False


_numbers = itertools.count()
_newest: deque[_Record] = deque(maxlen=100)


@contextlib.contextmanager
def _recorded() -> Iterator[None]:
    record = _Record()
    _newest.append(record)
    yield
    record.ended = True  # one that fails never ends, as in torch's


def flight_record() -> bytes:
    """This process' newest calls, as torch's flight recorder has collectives (JSON)."""
    entries: Sequence[dict[str, object]] = [
        {
            "record_id": each.number,
            "time_created_ns": each.began_ns,
            "state": "completed" if each.ended else "started",
            "retired": each.ended,
        }
        for each in list(_newest)
    ]
    return json.dumps({"entries": entries}).encode()
