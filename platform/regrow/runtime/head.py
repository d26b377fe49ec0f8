"""Does a Ray head answer at an address? Asked over a plain socket: Ray's own clients wait minutes and print warnings.

A head's GCS is a gRPC server: HTTP/2 (RFC 9113), where a server's first frame is SETTINGS, whatever a client wants. A
proxy says that much for a server that is gone, so that a call is made as well.
"""

import os
import socket
import time

from regrow.errors import first_line

CONNECT_S = 6.0  # for the head to answer: Ray itself waits for minutes, and for ever for one that has been stopped
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and empty SETTINGS of our own
FRAME_HEADER_BYTES, SETTINGS = 9, 4
CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"
MODE = "RAY_AUTH_MODE"
MISMATCH = "Version mismatch"  # Ray's words, before lines of what the cluster has and what this process has
NOT_GRPC = "Received http2 header with status"  # gRPC's words for a status of HTTP where it expects its own


class NotLetIn(ConnectionError):
    """A head is there, and takes no calls of ours."""


def answering_head(address: str, *, timeout_s: float = CONNECT_S) -> str:
    """HOST:PORT of the head that a Ray address means, once it has answered; `auto` as Ray itself understands it.

    Where it wants a token and one is there, Ray in this process uses it from then on, as with `auto`; never elsewhere:
    processes with a token refuse those without. Raises ConnectionError, naming the address, where none is known or none
    answers within `timeout_s`, NotLetIn where it wants another token; ValueError for what is no address.
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
        _get_in(found, give_up_at)
    except NotLetIn:
        raise
    except TimeoutError as error:
        raise ConnectionError(f"the head at {found} does not answer: nothing within {timeout_s:g} s") from error
    except OSError as error:
        raise ConnectionError(f"the head at {found} does not answer: {error}") from error
    return found


def other_versions(address: str, error: Exception) -> str:
    """What to say where Ray refuses a cluster of another Ray or Python, a line; empty for any other error."""
    if not str(error).startswith(MISMATCH):
        return ""
    words = " ".join(str(error).split())
    return f"the Ray cluster at {address!r} has other versions than this process; install here what it has. {words}"


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


def _get_in(address: str, give_up_at: float) -> None:
    """Use the token that is here where the head wants one. Raises NotLetIn."""
    if _with_tls():
        return
    mode = os.environ.get(MODE, "").lower()
    if _call(address, give_up_at):
        if mode == "token":
            raise NotLetIn(
                f"the head at {address} has no token, and {MODE}=token is set here: its processes and ours would "
                f"refuse one another; start it with a token, or unset {MODE}"
            )
        return
    headers = _token_headers(address, mode) if mode != "disabled" else ()
    if not headers:
        raise NotLetIn(f"the head at {address} wants its token; set {MODE}=token and RAY_AUTH_TOKEN_PATH")
    if not _call(address, give_up_at, headers):
        raise NotLetIn(
            f"the head at {address} refuses the token that is here (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or "
            "~/.ray/auth_token); set RAY_AUTH_TOKEN_PATH to its own"
        )


def _token_headers(address: str, mode: str) -> tuple[tuple[str, str], ...]:
    """Of the token that is here, which Ray in this process uses from now on; none without one."""
    from ray._private.authentication.authentication_token_setup import _enable_token_auth
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
    from ray.exceptions import RayError

    loader = AuthenticationTokenLoader.instance()
    try:
        if not loader.has_token(ignore_auth_mode=True):
            return ()
        if not mode:
            _enable_token_auth()
        return tuple(loader.get_token_for_http_header().items())
    except (RuntimeError, RayError) as error:  # a file that is not there, or empty
        raise NotLetIn(f"the head at {address} wants its token: {first_line(error)}") from error


def _call(address: str, give_up_at: float, headers: tuple[tuple[str, str], ...] = ()) -> bool:
    """Whether it lets us in. Raises ConnectionError where it is not Ray's GCS that answers a call."""
    import grpc  # which ray[default] comes with

    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:  # as Ray's own clients
        try:
            channel.unary_unary(CALL)(b"", timeout=_left_s(give_up_at), metadata=headers)
        except grpc.RpcError as error:
            words = (error.details() or error.code().name).splitlines()[0]
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED) or NOT_GRPC in words:
                raise ConnectionError(f"what listens there is no Ray head: {words}") from error
            return bool(error.code() is not grpc.StatusCode.UNAUTHENTICATED)
    return True


def _with_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _left_s(give_up_at: float) -> float:
    return max(give_up_at - time.monotonic(), 1e-3)
