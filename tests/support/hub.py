"""A Hugging Face hub on this machine's loopback: folders as repositories, what `HfFileSystem` asks for and no more."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0" * 40


@contextmanager
def hub(repositories: Mapping[str, Path]) -> Iterator[str]:
    """The endpoint of a hub that has these folders as repositories: `datasets/OWNER/NAME`, or `models/OWNER/NAME`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"repositories": dict(repositories)}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    repositories: Mapping[str, Path]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._serve(b"")

    def do_GET(self) -> None:
        self._serve(b"")

    def do_POST(self) -> None:
        self._serve(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _serve(self, body: bytes) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        api = parts[0] == "api"
        parts = parts[1:] if api else parts if parts[0] == "datasets" else ["models", *parts]
        name, rest = "/".join(parts[:3]), parts[3:]
        folder = self.repositories.get(name)
        if folder is None:
            return self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        if not api and rest[:1] == ["resolve"]:
            return self._file(folder.joinpath(*rest[2:]))
        if rest[:1] == ["tree"]:
            return self._tree(folder, "/".join(rest[2:]))
        if rest[:1] == ["paths-info"]:
            asked = json.loads(body)["paths"]
            return self._answer(200, [_entry(folder, folder / path) for path in asked if (folder / path).exists()])
        self._answer(200, {"id": "/".join(parts[1:3]), "sha": COMMIT, "siblings": []})

    def _tree(self, folder: Path, below: str) -> None:
        if not (folder / below).is_dir():
            return self._answer(404, {"error": "not there"}, {"X-Error-Code": "EntryNotFound"})
        deep = "recursive=true" in self.path.lower()
        found = sorted((folder / below).rglob("*") if deep else (folder / below).iterdir())
        self._answer(200, [_entry(folder, path) for path in found])

    def _file(self, path: Path) -> None:
        if not path.is_file():
            return self._answer(404, {"error": "not there"}, {"X-Error-Code": "EntryNotFound"})
        data, status, extra = path.read_bytes(), 200, {"ETag": f'"{path.stat().st_size}"', "X-Repo-Commit": COMMIT}
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            stop = min(int(last) + 1 if last else len(data), len(data))
            extra["Content-Range"] = f"bytes {first}-{stop - 1}/{len(data)}"
            data, status = data[int(first) : stop], 206
        self._answer(status, data, extra)

    def _answer(self, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    kind, size = ("directory", 0) if path.is_dir() else ("file", path.stat().st_size)
    return {"type": kind, "path": path.relative_to(folder).as_posix(), "size": size, "oid": COMMIT}
