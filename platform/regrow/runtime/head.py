"""Does a Ray head answer at an address? Asked over a plain socket: Ray's own clients wait minutes and print warnings.

A head's GCS is a gRPC server: HTTP/2 (RFC 9113), where a server's first frame is SETTINGS, whatever a client wants. A
proxy says that much for a server that is gone, so that a call is made as well.
"""

import os
import socket
import time

CONNECT_S = 6.0  # for the head to answer: Ray itself waits for minutes, and for ever for one that has been stopped
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and empty SETTINGS of our own
FRAME_HEADER_BYTES, SETTINGS = 9, 4
CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"
NOT_GRPC = "Received http2 header with status"  # gRPC's words for a status of HTTP where it expects its own


def answering_head(address: str, *, timeout_s: float = CONNECT_S) -> str:
    """HOST:PORT of the head that a Ray address means, once it has answered; `auto` as Ray itself understands it.

    Raises ConnectionError, naming the address, where none is known or none answers within `timeout_s`; ValueError for
    what is no address.
    """
    from ray._private.services import canonicalize_bootstrap_address

    try:
        found = canonicalize_bootstrap_address(address)
    except ConnectionError:  # in words of Ray's own command
        found = None
    if found is None:
        raise ConnectionError("none is running on this machine and RAY_ADDRESS is not set")
    host, _, port = found.rpartition(":")
    give_up_at = time.monotonic() + timeout_s
    try:
        _shake_hands(host.strip("[]"), int(port), give_up_at)
        _call(found, give_up_at)
    except TimeoutError as error:
        raise ConnectionError(f"the head at {found} does not answer: nothing within {timeout_s:g} s") from error
    except OSError as error:
        raise ConnectionError(f"the head at {found} does not answer: {error}") from error
    return found


def _shake_hands(host: str, port: int, give_up_at: float) -> None:
    """Raises TimeoutError or another OSError unless a gRPC server is there. With Ray's TLS, a connection is enough."""
    with socket.create_connection((host, port), _left_s(give_up_at)) as connection:
        if _with_tls():
            return
        connection.sendall(PREFACE)
        header = b""
        while len(header) < FRAME_HEADER_BYTES:
            connection.settimeout(_left_s(give_up_at))
            received = connection.recv(FRAME_HEADER_BYTES - len(header))
            if not received:
                raise ConnectionError("it hung up")
            header += received
        if header[3] != SETTINGS:
            raise ConnectionError(f"what listens there is no Ray head, it says {header!r}")


def _call(address: str, give_up_at: float) -> None:
    """Raises ConnectionError where it is not Ray's GCS that answers a call; whether it lets us in is not asked here."""
    if _with_tls():
        return
    import grpc  # which ray[default] comes with

    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:  # as Ray's own clients
        try:
            channel.unary_unary(CALL)(b"", timeout=_left_s(give_up_at))
        except grpc.RpcError as error:
            words = (error.details() or error.code().name).splitlines()[0]
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED) or NOT_GRPC in words:
                raise ConnectionError(f"what listens there is no Ray head: {words}") from error


def _with_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _left_s(give_up_at: float) -> float:
    return max(give_up_at - time.monotonic(), 1e-3)
