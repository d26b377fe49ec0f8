"""Bytes of snapshots between nodes: a small range server in each keeper, and its client. Plain sockets, sendfile.

A connection begins with a challenge: whoever does not know the run's secret is shown nothing. After it, requests follow
one another; each is a frame (4 bytes of length, JSON) that may be followed by as many raw bytes as it says.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import socketserver
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from regrow.errors import CheckpointError, first_line

TIMEOUT_S = 20.0  # without a byte, of either side
BLOCK = 1 << 20  # bytes that are received at once
_MOST_JSON = 64 << 20

Address = tuple[str, int]
Ranges = Sequence[tuple[int, int]]  # (offset, bytes)


class RangeServer:
    """Answers for a keeper. `answer(request, connection)` does what a request says, on a thread of its own."""

    def __init__(
        self, host: str, secret: Callable[[], bytes], answer: Callable[[dict[str, Any], "Connection"], None]
    ) -> None:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, CheckpointError):
                    connection = Connection(self.request)
                    nonce = secrets.token_bytes(16)
                    connection.send_bytes(nonce)
                    if not hmac.compare_digest(connection.receive_bytes(32), _proof(secret(), nonce)):
                        return
                    while request := connection.receive():
                        answer(request, connection)

        self._server = socketserver.ThreadingTCPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self._serving = False
        self.address: Address = self._server.server_address[:2]  # type: ignore[assignment]

    def serve(self) -> None:
        """Until `close`."""
        self._serving = True
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        if self._serving:  # or it would wait for ever
            self._server.shutdown()
        self._server.server_close()


class Connection:
    """Frames and raw bytes over a socket. Raises OSError when the other side is gone or silent."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(TIMEOUT_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._least = connected, 1

    @staticmethod
    def to(address: Address, secret: bytes) -> "Connection":
        connection = Connection(socket.create_connection(address, timeout=TIMEOUT_S))
        connection.send_bytes(_proof(secret, connection.receive_bytes(16)))
        return connection

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        self._socket.sendall(len(data).to_bytes(4, "little") + data)

    def receive(self) -> dict[str, Any]:
        """The next frame; empty where the other side has closed between frames."""
        self._wait_for(1)
        first = self._socket.recv(4)
        if not first:
            return {}
        length = int.from_bytes(first + self.receive_bytes(4 - len(first)), "little")
        if length > _MOST_JSON:
            raise ConnectionError(f"a message of {length} bytes")
        message: dict[str, Any] = json.loads(self.receive_bytes(length))
        return message

    def send_bytes(self, data: bytes | memoryview) -> None:
        self._socket.sendall(data)

    def send_file(self, file: BinaryIO, ranges: Ranges) -> None:
        """Ranges of a file one after another, without a copy in this process."""
        for offset, size in ranges:
            if size and self._socket.sendfile(file, offset, size) != size:
                raise ConnectionError("the file ends within the range")

    def receive_bytes(self, num_bytes: int) -> bytes:
        return bytes(self.receive_view(num_bytes))

    def receive_view(self, num_bytes: int) -> memoryview:
        """As many bytes in memory of their own, written once."""
        data: memoryview = np.empty(num_bytes, np.uint8).data
        self.receive_into(data)
        return data

    def receive_into(self, target: memoryview) -> None:
        at = 0
        while at < len(target):
            with target[at : at + BLOCK] as block:
                self._wait_for(len(block))
                got = self._socket.recv_into(block)
            if not got:
                raise ConnectionError("the other side closed the connection")
            at += got

    def _wait_for(self, num_bytes: int) -> None:
        """Have the next `recv` wake for so much, or the end; woken for each packet it takes twice the CPU."""
        if num_bytes != self._least:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._least = num_bytes

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def connected(address: Address, secret: bytes) -> Iterator[Connection]:
    """A connection for a while. What goes wrong within is a CheckpointError that names the peer."""
    connection: Connection | None = None
    try:
        connection = Connection.to(address, secret)
        yield connection
    except (OSError, ValueError) as error:
        raise CheckpointError(f"keeper at {address[0]}:{address[1]}: {first_line(error)}") from error
    finally:
        if connection is not None:
            connection.close()


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, nonce, hashlib.sha256)
