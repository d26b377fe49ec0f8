"""One node's keeper, as far as it needs no Ray: it holds the node's snapshots and copies of another node's.

    trainer --datagram: sealed--> checksums -> copy to the peer -> report (one a node and step) -> commit -> file

Everything that it knows is in its folder, and is found there again by a keeper that starts anew. Per snapshot:

    <name>.slot        the trainer's slot (`slots`)
    <name>.slot.copy   the same of a rank on the node whose peer this is
    <file>.crc         beside each: sha256 of the header it belongs to, then a crc32 of each CHUNK_BYTES of payload
    committed          the newest commit, for the node's trainers
"""

import contextlib
import fcntl
import json
import logging
import os
import queue
import shutil
import socket
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrow.checkpoint.ranges import Address, Connection, RangeServer, connected
from regrow.checkpoint.slots import MAGIC, NOTICES, SLOT, SlotHeader, generation_of, open_slot, write_commit
from regrow.errors import CheckpointError

COPY, CHECKSUMS = ".copy", ".crc"
LOCK = "lock"  # held by the folder's keeper
CHUNK_BYTES = 16 << 10  # that one checksum covers: what a read at any offset may read too much

Crc = NDArray[np.uint32]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """A verified snapshot file that a keeper holds."""

    file: str
    generation: int
    step: int
    header_sha256: str

    @property
    def is_copy(self) -> bool:
        return self.file.endswith(COPY)

    def copy(self) -> "Held":
        """The same snapshot as its peer holds it."""
        return replace(self, file=self.file + COPY)


@dataclass(frozen=True)
class Holder:
    """A snapshot file of a committed step, and where it is."""

    node: str
    address: Address  # of the node's keeper
    held: Held

    @property
    def name(self) -> str:
        return f"{self.node}/{self.held.file}"


@dataclass(frozen=True)
class Sealed:
    """All snapshots of a step that a node's ranks wrote are checked, and copied if there is anybody to copy to."""

    node: str
    generation: int
    step: int
    files: tuple[Held, ...]
    peer: str  # the node that holds the copies; empty: no other node


Report = Callable[[Sealed], None]


class KeeperNode:
    """Runs on threads of its own from `start` to `close`."""

    def __init__(self, folder: Path, *, node: str, host: str, secret: bytes, run_id: str, report: Report) -> None:
        self.folder, self.node, self.secret, self.run_id, self.report = folder, node, secret, run_id, report
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.server = RangeServer(host, lambda: self.secret, self._answer)
        self._peer: tuple[str, Address] | None = None
        self._work: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._ready: dict[tuple[int, int], dict[str, Held]] = {}  # (generation, step) -> file -> checked and copied
        self._lock = threading.Lock()
        self._serving = open(folder / LOCK, "wb")  # noqa: SIM115 (held open for as long as the lock is)
        fcntl.flock(self._serving, fcntl.LOCK_SH)
        notices = folder / NOTICES
        notices.unlink(missing_ok=True)
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notices.bind(str(notices))
        self._threads = [
            threading.Thread(target=target, name=f"keeper-{target.__name__}", daemon=True)
            for target in (self.server.serve, self._listen, self._process)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> Address:
        return self.server.address

    def set_peer(self, peer: tuple[str, Address] | None) -> None:
        """The node, in another failure domain where there is one, that holds copies of this one's snapshots."""
        with self._lock:
            self._peer = peer

    def holdings(self) -> list[Held]:
        """Every sealed snapshot in the folder whose checksums are there; damaged or half-written ones are not."""
        held = []
        for path in sorted(self.folder.glob(f"*{SLOT}*")):
            if path.name.endswith((SLOT, COPY)):
                with contextlib.suppress(CheckpointError):
                    found = self._held(path)
                    if found is not None:
                        held.append(found)
        return held

    def committed(self, generation: int, step: int) -> None:
        """The coordinator committed this step: tell the trainers, drop the snapshots of older generations."""
        write_commit(self.folder, generation, step)
        with self._lock:
            for key in [key for key in self._ready if key <= (generation, step)]:
                del self._ready[key]
        for path in self.folder.glob("g*"):  # what was never sealed too
            if generation_of(path.name) < generation:
                path.unlink(missing_ok=True)

    def close(self, *, delete: bool) -> None:
        """End; `delete`: leave nothing in memory."""
        self._work.put(None)
        self.server.close()
        with contextlib.suppress(OSError):
            self._notices.shutdown(socket.SHUT_RDWR)
        self._notices.close()
        (self.folder / NOTICES).unlink(missing_ok=True)
        self._serving.close()
        if delete:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _listen(self) -> None:
        while True:
            try:
                data = self._notices.recv(65536)
            except OSError:
                return
            if not data:
                return
            with contextlib.suppress(ValueError):
                self._work.put(json.loads(data))

    def _process(self) -> None:
        while (notice := self._work.get()) is not None:
            try:
                self._take(self.folder / notice["file"], int(notice["writers"]))
            except Exception as error:  # of one snapshot; the keeper goes on with the next
                log.warning("snapshot %s: %s", notice, error)

    def _take(self, path: Path, writers: int) -> None:
        """Check a slot that was sealed, copy it to the peer, and report the node's step once all its ranks' are."""
        header = open_slot(path)
        if header is None or header.run_id != self.run_id:
            return
        with self._lock:
            peer = self._peer
        write_checksums(path, header)
        held = self._held(path)
        if held is None:  # overwritten meanwhile
            return
        if peer is not None:
            self._push(path, held, peer[1])
        key = (held.generation, held.step)
        with self._lock:
            ready = self._ready.setdefault(key, {})
            ready[held.file] = held
            if len(ready) < writers:
                return
        self.report(Sealed(self.node, *key, tuple(ready.values()), peer[0] if peer else ""))

    def _push(self, path: Path, held: Held, address: Address) -> None:
        """Copy a slot with its checksums to the peer, which checks them. Raises CheckpointError."""
        size = path.stat().st_size
        checksums = (self.folder / (path.name + CHECKSUMS)).read_bytes()
        with connected(address, self.secret) as connection, open(path, "rb") as file:
            put = {"op": "put", "file": path.name + COPY, "bytes": size, "checksums": len(checksums)}
            connection.send(put | {"header_sha256": held.header_sha256})
            connection.send_bytes(checksums)
            connection.send_file(file, [(0, size)])
            answer = connection.receive()
            if "error" in answer or not answer:
                raise CheckpointError(f"the peer refused {path.name}: {answer.get('error', 'it is gone')}")

    def _held(self, path: Path) -> Held | None:
        header = open_slot(path)
        stored = read_checksums(path)
        if header is None or stored is None or header.run_id != self.run_id:
            return None
        if stored[0] != header.sha256:
            return None
        return Held(path.name, header.generation, header.step, header.sha256)

    def _answer(self, request: dict[str, Any], connection: Connection) -> None:
        """One request of a peer or of a rank that restores."""
        path = self.folder / Path(request["file"]).name
        if request["op"] == "put":
            self._receive(path, request, connection)
        elif request["op"] == "describe":
            self._describe(path, connection)
        elif request["op"] == "get":
            with open(path, "rb") as file:
                connection.send_file(file, [(offset, size) for offset, size in request["ranges"]])

    def _describe(self, path: Path, connection: Connection) -> None:
        header, stored = open_slot(path), read_checksums(path)
        if header is None or stored is None:
            connection.send({"error": f"{path.name} is not here"})
            return
        data, crc = header.encode(), stored[1].tobytes()
        connection.send({"header": len(data), "crc": len(crc), "sha256": stored[0]})
        connection.send_bytes(data + crc)

    def _receive(self, path: Path, request: dict[str, Any], connection: Connection) -> None:
        """Take a copy: visible only once all of it is there and its checksums hold."""
        checksums = connection.receive_bytes(request["checksums"])
        size = int(request["bytes"])
        crc_path = path.with_name(path.name + CHECKSUMS)
        crc_path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            os.pwrite(descriptor, bytes(len(MAGIC)), 0)
            first = connection.receive_bytes(min(size, 4096))
            offset, block = len(first), bytearray(1 << 20)
            while offset < size:
                part = memoryview(block)[: min(len(block), size - offset)]
                connection.receive_into(part)
                os.pwrite(descriptor, part, offset)
                offset += len(part)
            os.pwrite(descriptor, first[len(MAGIC) :], len(MAGIC))
            os.pwrite(descriptor, first[: len(MAGIC)], 0)
        except OSError as error:
            with contextlib.suppress(OSError):
                connection.send({"error": f"{error}"})
            raise
        finally:
            os.close(descriptor)
        header = open_slot(path)
        problem = "it is not a sealed snapshot"
        if header is not None:
            crc = np.frombuffer(checksums[64:], "<u4")
            problem = "it changed on the way"
            if header.sha256 == request["header_sha256"] == checksums[:64].decode() and _payload_holds(
                path, header, crc
            ):
                _write(crc_path, checksums)
                connection.send({"ok": True})
                return
        path.unlink(missing_ok=True)
        connection.send({"error": problem})


def is_served(folder: Path) -> bool:
    """Whether a keeper's process has this folder."""
    try:
        with open(folder / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True


def last_used(folder: Path) -> float:
    """When something in a keeper's folder last came or went."""
    return max(path.stat().st_mtime for path in [folder, *folder.iterdir()])


def checksum(payload: memoryview) -> Crc:
    """crc32 of each CHUNK_BYTES."""
    return np.array(
        [zlib.crc32(payload[at : at + CHUNK_BYTES]) for at in range(0, len(payload), CHUNK_BYTES)], np.uint32
    )


def write_checksums(path: Path, header: SlotHeader) -> None:
    """Write the checksums of a sealed slot beside it."""
    payload = np.memmap(path, np.uint8, "r")[header.payload_offset : header.offsets[-1]]
    crc = checksum(payload.data)
    _write(path.with_name(path.name + CHECKSUMS), header.sha256.encode() + crc.astype("<u4").tobytes())


def read_checksums(path: Path) -> tuple[str, Crc] | None:
    """(sha256 of the header that they belong to, checksums) of a snapshot file; None where there are none."""
    try:
        data = path.with_name(path.name + CHECKSUMS).read_bytes()
    except FileNotFoundError:
        return None
    if len(data) % 4:
        return None
    return data[:64].decode("ascii", "replace"), np.frombuffer(data[64:], "<u4")


def _payload_holds(path: Path, header: SlotHeader, crc: Crc) -> bool:
    payload = np.memmap(path, np.uint8, "r")[header.payload_offset : header.offsets[-1]]
    return np.array_equal(checksum(payload.data), crc)


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)
