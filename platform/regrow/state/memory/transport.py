"""How the bytes of copies travel between two keepers: what a transport does, and TCP's, with several flows a peer.

What is said about copies (`node`) goes over connections of its own, authenticated both ways (`ranges`): a keeper
announces a file, its peer makes memory for it (`incoming`) and registers that with the transport, the bytes come by
the transport's `put`, and the peer checks all of it before it counts. So a transport moves bytes and nothing else: it
need not be trusted with order, wholeness or damage.

    connect    a session with a peer's keeper, for as long as that is a peer
    register   memory that bytes of one copy after another are put into
    put        a range of a file into the peer's registered memory
    receive    what is put there
    get        ranges of a file that the peer has
    close      a session, or registered memory

`snapshot.transport` names one: TCP, or `rdma`. TCP has as many flows as fill the link when two keepers meet: one flow
is bounded by its congestion window, and in some clouds by a rate of its own. Slots share them, piece by piece.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from itertools import islice
from queue import Empty, LifoQueue
from typing import Any, BinaryIO, Protocol

from regrow.errors import CheckpointError
from regrow.state.memory import link
from regrow.state.memory.ranges import TIMEOUT_S, Address, Connection, Ranges, connected, keeper_at
from regrow.state.memory.threads import Threads

FILL = "fill"  # a request: bytes for memory that the keeper has registered; TCP's follow it
PIECE = 16 << 20  # bytes of a request: flows take turns with those of all slots
IDLE_S = TIMEOUT_S / 4  # after which a flow is not used again: the other side will close it

Place = Mapping[str, Any]  # of a copy in a peer's registered memory, as JSON has it


class TransportError(CheckpointError):
    """A transport does not work here, or has failed."""


class Registered(Protocol):
    """Memory that a peer may put bytes into, by requests that name a copy: one after another uses it."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing that was begun may still come."""

    def receive(self, target: memoryview, request: Mapping[str, Any], connection: Connection) -> None:
        """Have the bytes of a `FILL` come into their part of it; returns once they are there.

        Raises OSError where they do not come, TransportError where something else can.
        """

    def close(self) -> None:
        """Nothing is put there any more."""


class Session(Protocol):
    """With one peer's keeper. Its methods are called on any thread, and raise CheckpointError."""

    def put(self, file: BinaryIO, begin: int, end: int, place: Place) -> None:
        """Have bytes [begin, end) of a file at the same place of the peer's memory; returns once they are there."""

    def get(self, file: str, ranges: Ranges) -> contextlib.AbstractContextManager[Callable[[memoryview], None]]:
        """Ranges of a file that the peer has: what is given is filled with the next bytes of them."""

    def close(self) -> None: ...


class Transport(Protocol):
    """Of one keeper."""

    name: str

    def connect(self, peer: Address, secret: bytes) -> Session:
        """Raises CheckpointError where the peer is gone or silent."""

    def register(self, memory: memoryview) -> Registered:
        """Memory of this keeper."""

    def forget_deleted(self) -> None:
        """Hold nothing of files that were deleted: it is memory."""

    def close(self) -> None: ...


class _Named:
    """Memory of a copy that `FILL` names by its token, which the keeper looks up: nothing is to be done."""

    is_idle = True

    def receive(self, target: memoryview, request: Mapping[str, Any], connection: Connection) -> None:
        connection.receive_all(target)

    def close(self) -> None: ...


class TcpTransport:
    """Keepers' own sockets."""

    name = "tcp"

    def __init__(self) -> None:
        self._flows: dict[Address, int] = {}  # that fill the link to a keeper that was met
        self._measuring = threading.Lock()

    def connect(self, peer: Address, secret: bytes) -> "TcpSession":
        return TcpSession(peer, secret, self.flows_to)

    def flows_to(self, peer: Address, secret: bytes) -> int:
        """As many as fill the link, measured when there is first more than a piece to send."""
        with self._measuring:
            if peer not in self._flows:
                self._flows[peer] = link.flows_that_fill(peer, secret)
            return self._flows[peer]

    def register(self, memory: memoryview) -> Registered:
        return _Named()

    def forget_deleted(self) -> None: ...

    def close(self) -> None: ...


class TcpSession:
    """Flows to one peer. They are opened when there is something to send, and kept for a while."""

    def __init__(self, peer: Address, secret: bytes, flows_to: Callable[[Address, bytes], int]) -> None:
        self._peer, self._secret, self._flows_to = peer, secret, flows_to
        self._threads: Threads | None = None  # a flow each
        self._idle: LifoQueue[tuple[float, Connection]] = LifoQueue()
        self._closed, self._lock = threading.Event(), threading.Lock()

    def put(self, file: BinaryIO, begin: int, end: int, place: Place) -> None:
        if end - begin <= PIECE:
            self._send(file, begin, end - begin, place)
            return
        threads, pieces = self._flows(), iter(range(begin, end, PIECE))

        def some(most: int) -> set[Future[None]]:
            return {threads.submit(self._send, file, at, min(PIECE, end - at), place) for at in islice(pieces, most)}

        sending = some(2 * threads.most)  # no more of one slot at a time: other slots are to have their turns
        try:
            while sending:
                done, sending = wait(sending, return_when=FIRST_COMPLETED)
                for each in done:
                    each.result()
                sending |= some(len(done))
        except CancelledError as error:
            raise CheckpointError("it is no peer any more") from error
        finally:
            wait([each for each in sending if not each.cancel()])  # the file is not to be closed before

    @contextlib.contextmanager
    def get(self, file: str, ranges: Ranges) -> Iterator[Callable[[memoryview], None]]:
        with connected(self._peer, self._secret) as connection:
            connection.send({"op": "get", "file": file, "ranges": list(ranges)})
            yield connection.receive_into

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            if self._threads is not None:
                self._threads.close()
        with contextlib.suppress(Empty):
            while True:
                self._idle.get_nowait()[1].close()

    def _flows(self) -> Threads:
        num_flows = self._flows_to(self._peer, self._secret)
        with self._lock:
            if self._closed.is_set():
                raise CheckpointError("it is no peer any more")
            self._threads = self._threads or Threads(num_flows, "flow")
            return self._threads

    def _send(self, file: BinaryIO, at: int, size: int, place: Place) -> None:
        with self._flow() as connection:
            connection.send({"op": FILL, "at": at, "bytes": size, **place})
            self._send_bytes(connection, file, at, size)
            answer = connection.receive()
            if "ok" not in answer:
                raise CheckpointError(f"the peer refused it: {answer.get('error', 'it is gone')}")

    def _send_bytes(self, connection: Connection, file: BinaryIO, at: int, size: int) -> None:
        connection.send_file(file, [(at, size)])

    @contextlib.contextmanager
    def _flow(self) -> Iterator[Connection]:
        """One that nothing else uses meanwhile; a new one where there is none. Not again once something failed."""
        with contextlib.suppress(Empty):
            used_at, kept = self._idle.get_nowait()
            if time.monotonic() - used_at < IDLE_S:
                yield from self._used(kept)
                return
            kept.close()
        try:
            opened = Connection.to(self._peer, self._secret)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{keeper_at(self._peer)}: {error}") from error
        yield from self._used(opened)

    def _used(self, connection: Connection) -> Iterator[Connection]:
        try:
            yield connection
        except (OSError, ValueError) as error:
            connection.close()
            raise CheckpointError(f"{keeper_at(self._peer)}: {error}") from error
        except BaseException:
            connection.close()
            raise
        if self._closed.is_set():
            connection.close()
        else:
            self._idle.put((time.monotonic(), connection))
