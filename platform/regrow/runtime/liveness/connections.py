"""One connection held to each node: a node that dies closes it.

Its end is a suspicion and no proof, for the keeper at the other end may have died alone: whether the node's workers are
there still is then asked of their ports (`runtime.liveness.probe`). A host that goes dark closes nothing: its kernel
stops answering the probes of this one's, which costs no program anything.
"""

import errno
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass

Address = tuple[str, int]  # host, port

PROBE_S, PROBES = 1, 3  # of an idle connection, by the kernels
SILENT_MS = 1000 * PROBE_S * PROBES  # what was sent, and a connection that begins, are answered by then
AGAIN_S, ATTEMPTS = 1.0, 100  # to connect to a host that does not answer


@dataclass
class _Held:
    node: str
    address: Address
    socket: socket.socket
    attempt: int
    is_taken: bool = False


class HeldConnections:
    """All of a coordinator, watched by one thread that wakes when one of them begins or ends."""

    def __init__(self) -> None:
        self._wanted: deque[tuple[str, Address]] = deque()
        self._lost: deque[str] = deque()
        self.held: dict[str, _Held] = {}
        self._again: dict[str, tuple[float, Address, int]] = {}  # node -> when, where, which attempt
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake, self._woken = socket.socketpair()

    def hold(self, node: str, address: Address) -> None:
        """To where a node's keeper listens now."""
        self._wanted.append((node, address))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="held-connections", daemon=True)
                self._thread.start()
        self._wake.send(b"\0")

    def lost(self) -> list[str]:
        """Nodes whose connections have ended since the last call."""
        return [self._lost.popleft() for _ in range(len(self._lost))]

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._wake.send(b"\0")
            self._thread.join()
        self._wake.close()
        self._woken.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._woken, selectors.EVENT_READ)
            while not self._closed:
                soonest = min((at for at, _, _ in self._again.values()), default=None)
                for key, _ in waiting.select(None if soonest is None else max(0.0, soonest - time.monotonic())):
                    if key.fileobj is self._woken:
                        self._woken.recv(4096)
                    else:
                        self._look(waiting, key.data)
                while self._wanted:
                    node, address = self._wanted.popleft()
                    held = self.held.get(node)
                    if held is None or held.address != address:
                        self._connect(waiting, node, address, 1)
                for node, (at, address, attempt) in list(self._again.items()):
                    if at <= time.monotonic():
                        self._connect(waiting, node, address, attempt)
            for held in list(self.held.values()):
                self._drop(waiting, held)

    def _connect(self, waiting: selectors.BaseSelector, node: str, address: Address, attempt: int) -> None:
        self._again.pop(node, None)
        if node in self.held:
            self._drop(waiting, self.held[node])
        try:
            held = _Held(node, address, _watched(address), attempt)
        except OSError as error:
            self._failed(node, address, attempt, error.errno)
            return
        self.held[node] = held
        waiting.register(held.socket, selectors.EVENT_WRITE, held)

    def _look(self, waiting: selectors.BaseSelector, held: _Held) -> None:
        """A connection has begun, or failed to, or ended."""
        if not held.is_taken:
            error = held.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._drop(waiting, held)
                self._failed(held.node, held.address, held.attempt, error)
            else:
                held.is_taken = True
                waiting.modify(held.socket, selectors.EVENT_READ, held)
        elif _has_ended(held.socket):
            self._lost.append(held.node)
            self._drop(waiting, held)
            self._failed(held.node, held.address, 0, None)  # its network may be back in a moment

    def _failed(self, node: str, address: Address, attempt: int, error: int | None) -> None:
        if error != errno.ECONNREFUSED and attempt < ATTEMPTS:  # a keeper that comes back says where it listens then
            self._again[node] = time.monotonic() + AGAIN_S, address, attempt + 1

    def _drop(self, waiting: selectors.BaseSelector, held: _Held) -> None:
        waiting.unregister(held.socket)
        held.socket.close()
        del self.held[held.node]


def _watched(address: Address) -> socket.socket:
    """A connection that begins, and that ends by itself once the other host answers no more. Raises OSError."""
    connection = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)
        error = connection.connect_ex(address)
        if error not in (0, errno.EINPROGRESS):
            raise OSError(error, "not taken")
    except OSError:
        connection.close()
        raise
    return connection


def _has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
