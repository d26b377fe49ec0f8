"""Does a Ray head answer at an address? Asked over a plain socket: Ray's own clients wait minutes and print warnings.

A head's GCS is a gRPC server: HTTP/2 (RFC 9113), where a server's first frame is SETTINGS, whatever a client wants.
"""

import os
import socket
import time

CONNECT_S = 6.0  # for the head to answer: Ray itself waits for minutes, and for ever for one that has been stopped
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and empty SETTINGS of our own
FRAME_HEADER_BYTES, SETTINGS = 9, 4


def answering_head(address: str, *, timeout_s: float = CONNECT_S) -> str:
    """HOST:PORT of the head that a Ray address means, once it has answered; `auto` as Ray itself understands it.

    Raises ConnectionError, naming the address, where none is known or none answers within `timeout_s`; ValueError for
    what is no address.
    """
    from ray._private.services import canonicalize_bootstrap_address

    found = canonicalize_bootstrap_address(address)
    if found is None:
        raise ConnectionError("none is running on this machine and RAY_ADDRESS is not set")
    host, _, port = found.rpartition(":")
    try:
        _shake_hands(host.strip("[]"), int(port), timeout_s)
    except TimeoutError as error:
        raise ConnectionError(f"the head at {found} does not answer: nothing within {timeout_s:g} s") from error
    except OSError as error:
        raise ConnectionError(f"the head at {found} does not answer: {error}") from error
    return found


def _shake_hands(host: str, port: int, timeout_s: float) -> None:
    """Raises TimeoutError or another OSError unless a gRPC server is there. With Ray's TLS, a connection is enough."""
    give_up_at = time.monotonic() + timeout_s
    with socket.create_connection((host, port), timeout_s) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        connection.sendall(PREFACE)
        header = b""
        while len(header) < FRAME_HEADER_BYTES:
            connection.settimeout(max(give_up_at - time.monotonic(), 1e-3))
            received = connection.recv(FRAME_HEADER_BYTES - len(header))
            if not received:
                raise ConnectionError("it hung up")
            header += received
        if header[3] != SETTINGS:
            raise ConnectionError(f"what listens there is no Ray head, it says {header!r}")
