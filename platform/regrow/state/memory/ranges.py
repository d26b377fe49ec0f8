"""Bytes of snapshots between nodes: a small range server in each keeper, and its client. Plain sockets, sendfile.

A connection begins with a proof of both sides that they know the run's secret, and mean each other:

    client: HELLO, nonce   server: nonce, proof   client: proof

A proof is an HMAC over its maker's role, the address that the client meant to reach, and both nonces: relayed to
another keeper, or turned back, it holds no more. Until then lengths are fixed, and time and the connections of a server
are bounded. After it requests follow one another, in frames:

    bytes of JSON, of the body | JSON | body | HMAC of that and of the frame's number, under a key of the connection

A frame may be followed by as many raw bytes as it says; their checksums are in a frame, and the receiver's to check.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from regrow.errors import CheckpointError, first_line

TIMEOUT_S = 20.0  # without a byte, of either side
DARK_S = 5.0  # for the other host's kernel to take a connection, or what was sent
PROOF_S = 5.0  # for a client's whole proof
MOST_UNPROVED = 128  # connections to one server whose client has proved nothing yet: of more the oldest is cut
TAKE_AGAIN_S = 0.01  # between connections at that bound, so that each has 1 s, and after one that could not be taken
BLOCK = 1 << 20  # bytes that are received at once
HELLO = b"rgkeeper"
WAITING = 128  # connections that are not accepted yet: with the 5 of socketserver, flows of several ranks wait seconds
MOST_JSON, MOST_BODY = 64 << 20, 1 << 30  # bytes of a frame
_NONCE, _MAC = 32, 32
_LENGTHS = struct.Struct("<II")  # of a frame's JSON and body

Address = tuple[str, int]
Ranges = Sequence[tuple[int, int]]  # (offset, bytes)
Answer = Callable[[dict[str, Any], "Connection"], None]


class RangeServer:
    """Answers for a keeper. `answer(request, connection)` does what a request says, on a thread of its own."""

    def __init__(self, host: str, secret: Callable[[], bytes], answer: Answer) -> None:
        server, unproved = self, _Unproved()

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, CheckpointError):
                    connection = Connection(self.request)
                    connection.let_in(server.address, secret())
                    unproved.remove(self.request)
                    while request := connection.receive():
                        answer(request, connection)

        class Server(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True
            request_queue_size = WAITING

            def get_request(self) -> tuple[socket.socket, Any]:
                if unproved.is_full():
                    time.sleep(TAKE_AGAIN_S)
                try:
                    taken = super().get_request()
                except OSError:  # no descriptor or memory for it now
                    time.sleep(TAKE_AGAIN_S)
                    raise
                unproved.add(taken[0])
                return taken

            def service_actions(self) -> None:
                unproved.cut()

            def shutdown_request(self, request: Any) -> None:
                unproved.remove(request)
                super().shutdown_request(request)

        self._server = Server((host, 0), Handler)
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


class _Unproved:
    """A server's connections whose clients have proved nothing yet: they may be anybody's."""

    def __init__(self) -> None:
        self._since: dict[socket.socket, float] = {}  # the oldest first
        self._lock = threading.Lock()  # what is cut is open

    def is_full(self) -> bool:
        return len(self._since) >= MOST_UNPROVED

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            self._since[connection] = time.monotonic()

    def remove(self, connection: socket.socket) -> None:
        """It has proved itself, or is about to be closed."""
        with self._lock:
            self._since.pop(connection, None)

    def cut(self) -> None:
        """End those that are too many or too old: their threads fail, and close them."""
        with self._lock:
            for connection, since in list(self._since.items()):
                if len(self._since) <= MOST_UNPROVED and time.monotonic() - since < PROOF_S:
                    return
                del self._since[connection]
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Direction:
    """What one side sends: each frame under the connection's key and the frame's number."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def mac(self, *parts: bytes) -> bytes:
        """Of the next frame."""
        made = hmac.new(self._key, self._number.to_bytes(8, "little"), hashlib.sha256)
        for part in parts:
            made.update(part)
        self._number += 1
        return made.digest()


class Connection:
    """Frames and raw bytes over a socket. Raises OSError when the other side is gone, silent, or not to be believed."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(TIMEOUT_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * DARK_S))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(TIMEOUT_S), 0))
        self._socket, self._least = connected, 1
        self.host = (connected.getpeername() or ("",))[0]  # of the other side
        self._sent: _Direction | None = None  # None: the other side has proved nothing yet
        self._received: _Direction | None = None
        self.body = b""  # of the newest frame that was received

    @staticmethod
    def to(address: Address, secret: bytes) -> "Connection":
        connection = Connection(socket.create_connection(address, timeout=DARK_S))
        try:
            connection.prove(address, secret)
        except BaseException:
            connection.close()
            raise
        return connection

    def prove(self, address: Address, secret: bytes) -> None:
        """As the client: have the server at `address` prove itself, then do so. Raises ConnectionError."""
        mine = secrets.token_bytes(_NONCE)
        self.send_bytes(HELLO + mine)
        theirs, proof = self.receive_bytes(_NONCE), self.receive_bytes(_MAC)
        derive = _derivation(secret, address, mine, theirs)
        if not hmac.compare_digest(proof, derive(b"server proves")):
            raise ConnectionError("it does not prove that it is this keeper, and of this run")
        self.send_bytes(derive(b"client proves"))
        self._sent, self._received = _Direction(derive(b"client sends")), _Direction(derive(b"server sends"))

    def let_in(self, address: Address, secret: bytes) -> None:
        """As the server at `address`: prove that, then have the client prove itself. Raises ConnectionError."""
        hello = self.receive_bytes(len(HELLO) + _NONCE)
        if not hello.startswith(HELLO):
            raise ConnectionError("not a keeper's client")
        mine = secrets.token_bytes(_NONCE)
        derive = _derivation(secret, address, hello[len(HELLO) :], mine)
        self.send_bytes(mine + derive(b"server proves"))
        if not hmac.compare_digest(self.receive_bytes(_MAC), derive(b"client proves")):
            raise ConnectionError("a client that does not know this run's secret")
        self._sent, self._received = _Direction(derive(b"server sends")), _Direction(derive(b"client sends"))

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        """A frame; its body is what is too large for JSON, and covered by the frame's HMAC."""
        assert self._sent is not None
        data = json.dumps(message, separators=(",", ":")).encode()
        lengths = _LENGTHS.pack(len(data), len(body))
        self._socket.sendall(b"".join((lengths, data, body, self._sent.mac(lengths, data, body))))

    def receive(self) -> dict[str, Any]:
        """The next frame, its body in `body`; empty where the other side has closed between frames."""
        assert self._received is not None
        self._wait_for(1)
        first = self._socket.recv(_LENGTHS.size)
        if not first:
            return {}
        lengths = first + self.receive_bytes(_LENGTHS.size - len(first))
        num_data, num_body = _LENGTHS.unpack(lengths)
        if num_data > MOST_JSON or num_body > MOST_BODY:
            raise ConnectionError(f"a message of {num_data} and {num_body} bytes")
        data, self.body = self.receive_bytes(num_data), self.receive_bytes(num_body)
        if not hmac.compare_digest(self.receive_bytes(_MAC), self._received.mac(lengths, data, self.body)):
            raise ConnectionError("a message is not what the other side sent")
        message: dict[str, Any] = json.loads(data)
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

    def receive_all(self, target: memoryview) -> None:
        """The same for many bytes, which the kernel puts there in one call, woken for each block and not for more.

        The last block is waited for before any of it is taken: nothing comes after it that would make up a block.
        """
        at, end = 0, max(0, len(target) - BLOCK)
        while at < end:
            with target[at:end] as part:
                self._wait_for(BLOCK)
                self._socket.setblocking(True)
                try:
                    got = self._socket.recv_into(part, len(part), socket.MSG_WAITALL)
                finally:
                    self._socket.settimeout(TIMEOUT_S)
            if not got:
                raise ConnectionError("the other side closed the connection")
            at += got
        with target[at:] as rest:
            self.receive_into(rest)

    def readable(self, timeout_s: float) -> bool:
        """Whether something came within so long, be it the end."""
        self._wait_for(1)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def _wait_for(self, num_bytes: int) -> None:
        """Have the next `recv` wake for so much, or the end; woken for each packet it takes twice the CPU."""
        if num_bytes != self._least:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._least = num_bytes

    def cut(self) -> None:
        """End it, from another thread: whatever waits for it fails."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def keeper_at(address: Address) -> str:
    """A keeper in messages.

    >>> keeper_at(("fd00::2", 7000))
    'keeper at [fd00::2]:7000'
    """
    host, port = address
    return f"keeper at [{host}]:{port}" if ":" in host else f"keeper at {host}:{port}"


@contextlib.contextmanager
def connected(address: Address, secret: bytes) -> Iterator[Connection]:
    """A connection for a while. What goes wrong within is a CheckpointError that names the peer."""
    connection: Connection | None = None
    try:
        connection = Connection.to(address, secret)
        yield connection
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{keeper_at(address)}: {first_line(error)}") from error
    finally:
        if connection is not None:
            connection.close()


def _derivation(secret: bytes, address: Address, client_nonce: bytes, server_nonce: bytes) -> Callable[[bytes], bytes]:
    """Proofs and keys of one connection, by what they are for."""
    where = f"{address[0]}:{address[1]}".encode()

    def derive(purpose: bytes) -> bytes:
        parts = (HELLO, purpose, where, client_nonce, server_nonce)
        return hmac.digest(secret, b"".join(len(part).to_bytes(4, "little") + part for part in parts), "sha256")

    return derive
