"""Copies that come in: memory for each, filled by several flows, and not a snapshot before all of it has been checked.

A copy's file is used again and again, as the slot that it is of: its pages are there, stay mapped, so that what the
kernel receives goes where it stays, and registered with the transport. To do either anew takes as long as the copy.
"""

import contextlib
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from regrow.control.values import Version
from regrow.errors import CheckpointError, first_line
from regrow.state.memory import held as files
from regrow.state.memory.mapping import map_all
from regrow.state.memory.ranges import TIMEOUT_S, Connection
from regrow.state.memory.slots import MAGIC, open_slot
from regrow.state.memory.transport import Place, Transport, TransportError

LOOK_S = 1.0  # between two looks at whether a copy still comes
_CLOSE_S = 2 * TIMEOUT_S  # for flows to leave memory that is given up


class Memory:
    """A copy's file, mapped and registered."""

    def __init__(self, path: Path, size: int, transport: Transport) -> None:
        """Raises CheckpointError where memory does not hold it."""
        self.path, self.size = path, size
        files.forget(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, bytes(len(MAGIC)), 0)
            os.ftruncate(descriptor, size)
            os.posix_fallocate(descriptor, 0, size)  # or a page that is not there would kill this process
            self.map = map_all(descriptor, size)
            self._inode = os.fstat(descriptor).st_ino
        except (OSError, ValueError) as error:
            files.remove(path)
            raise CheckpointError(f"no room for a copy of {size:,} bytes ({first_line(error)})") from error
        finally:
            os.close(descriptor)
        try:
            self.registered = transport.register(memoryview(self.map))
        except CheckpointError:
            files.remove(path)
            raise

    def is_there(self) -> bool:
        """Whether its file still is: it holds memory otherwise."""
        with contextlib.suppress(FileNotFoundError):
            return os.stat(self.path).st_ino == self._inode
        return False

    def empty(self) -> None:
        """Another copy comes: what it holds is no snapshot any more."""
        files.forget(self.path)
        self.map[: len(MAGIC)] = bytes(len(MAGIC))

    def close(self) -> None:
        self.registered.close()
        with contextlib.suppress(BufferError):  # a flow that hangs; its mapping goes with it
            self.map.close()


class Incoming:
    """One copy. It has no magic, and no checksums beside it, until it is sealed."""

    def __init__(self, memory: Memory) -> None:
        """`memory` is empty, and this copy's until it is closed."""
        self.memory, self.path, self.size, self.token = memory, memory.path, memory.size, secrets.token_hex(16)
        self.version: Version | None = None  # that it is of, once it is sealed
        self._given_up, self._is_closed = False, False
        self._filling: set[Connection] = set()
        self._changed = threading.Condition()

    @property
    def place(self) -> Place:
        return {"into": self.token}

    @property
    def is_done(self) -> bool:
        """Whether it is sealed and nothing can come any more: the memory may be another copy's."""
        return self.version is not None and not self._filling and self.memory.registered.is_idle

    def fill(self, request: dict[str, Any], connection: Connection) -> None:
        """Receive a range. Raises ConnectionError where the copy was given up, or the range is not of it."""
        at, size = request["at"], request["bytes"]
        with self._changed:
            if self._given_up or at < len(MAGIC) or size < 0 or at + size > self.size:
                raise ConnectionError("no such range of a copy is wanted")
            self._filling.add(connection)
        try:
            with memoryview(self.memory.map) as memory, memory[at : at + size] as target:
                self.memory.registered.receive(target, request, connection)
        finally:
            with self._changed:
                self._filling.discard(connection)
                self._changed.notify_all()

    def seal(self, beside: bytes, header_sha256: str) -> str:
        """Make it a snapshot: what is wrong with it, or empty. What is not right is deleted."""
        with self._changed:
            if self._given_up:
                return "another copy takes its place"
            try:
                problem = self._seal(beside, header_sha256)
            except (OSError, CheckpointError) as error:  # no room, or damaged on the way
                problem = first_line(error)
            if problem:
                files.remove(self.path)
            return problem

    def _seal(self, beside: bytes, header_sha256: str) -> str:
        self.memory.map[: len(MAGIC)] = MAGIC
        header = open_slot(self.path)
        if header is None or header.sha256 != header_sha256:
            return "it is not the snapshot that it is said to be"
        crc = files.checksums_in(beside, header, self.path)
        with memoryview(self.memory.map) as memory:
            if not files.all_hold(memory, header, crc):
                return f"{self.path}: fails its checksums"
        files.write_beside(self.path, beside)
        self.version = Version(header.generation, header.step)
        return ""

    def close(self) -> None:
        """Nothing of it comes any more; flows that are about to fill it are cut. Memory of one that is done stays."""
        with self._changed:
            self._given_up = True
            for connection in self._filling:
                connection.cut()
            self._changed.wait_for(lambda: not self._filling, _CLOSE_S)
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed and not self.is_done:  # by now another copy's memory may be where this one's was
            self.memory.close()


class Incomings:
    """All of a keeper, by token; one a file."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._by_token: dict[str, Incoming] = {}
        self._in: Path | None = None  # the file that memory is just made in
        self._done: dict[Path, Incoming] = {}  # whose memory the next copy in the same file gets
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._filling: Counter[str] = Counter()  # ranges that are on their way, by host
        self._heard_at: dict[str, float] = {}  # when the newest of a host came

    @contextlib.contextmanager
    def open(self, path: Path, size: int) -> Iterator[Incoming]:
        """For a copy in this file. One that was on its way there, as from a keeper that began anew, is given up."""
        with self._opening:
            with self._lock:
                unfinished, self._in = [each for each in self._by_token.values() if each.path == path], path
            try:
                for each in unfinished:
                    each.close()
                incoming = Incoming(self._memory(path, size))
                with self._lock:
                    self._by_token[incoming.token] = incoming
            finally:
                self._in = None
        try:
            yield incoming
        finally:
            with self._lock:
                del self._by_token[incoming.token]
            incoming.close()
            if incoming.is_done:
                with self._lock:
                    before, self._done[path] = self._done.get(path), incoming
                if before is not None:  # of one that was opened before this one, and ended later
                    before.memory.close()

    def _memory(self, path: Path, size: int) -> Memory:
        """Empty: the file's from the copy before, where that has so many bytes, or new."""
        with self._lock:
            done = self._done.pop(path, None)
        if done is not None and done.size == size and done.memory.is_there():
            done.memory.empty()
            return done.memory
        if done is not None:
            done.memory.close()
        return Memory(path, size, self._transport)

    def remove(self, paths: Collection[Path], lets_go_of: Callable[[Version], bool]) -> None:
        """Delete copies, all of them or none: none where one comes just now, or is of a version that is needed."""
        with contextlib.ExitStack() as unused, self._lock:
            coming = {self._in, *(each.path for each in self._by_token.values())}
            if any(path in coming or self._is_needed(path, lets_go_of) for path in paths):
                return
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    unused.enter_context(open(path, "rb"))  # or the kernel would clear its memory under the lock
                files.remove(path)

    def _is_needed(self, path: Path, lets_go_of: Callable[[Version], bool]) -> bool:
        """Not one that was given up half-way, or is damaged; it may be of a keeper before this one."""
        done = self._done.get(path)
        if done is not None and done.version is not None:
            return not lets_go_of(done.version)
        try:
            header = open_slot(path)
        except CheckpointError:
            return False
        return header is not None and not lets_go_of(Version(header.generation, header.step))

    def forget(self, *, deleted_only: bool) -> None:
        """Let go of the memory of copies whose files were deleted, or of all that are sealed."""
        with self._lock:
            gone = [path for path, done in self._done.items() if not (deleted_only and done.memory.is_there())]
            memories = [self._done.pop(path).memory for path in gone]
        for memory in memories:
            memory.close()

    def find(self, token: str) -> Incoming:
        """Raises ConnectionError where there is none."""
        with self._lock:
            found = self._by_token.get(token)
        if found is None:
            raise ConnectionError("no such copy is wanted")
        return found

    def fill(self, request: dict[str, Any], connection: Connection) -> None:
        """Receive a range of one of them, and say so."""
        try:
            with self._hearing(connection.host):
                self.find(request["into"]).fill(request, connection)
        except TransportError as error:
            connection.send({"error": first_line(error)})
            return
        connection.send({"ok": True})

    @contextlib.contextmanager
    def _hearing(self, host: str) -> Iterator[None]:
        with self._lock:
            self._filling[host] += 1
        try:
            yield
            self._heard_at[host] = time.monotonic()
        finally:
            with self._lock:
                self._filling[host] -= 1

    def _is_silent(self, host: str, since: float) -> bool:
        """Whether nothing came from a host for long: of any copy, as those of many slots take turns on its flows."""
        silent_s = time.monotonic() - max(since, self._heard_at.get(host, since))
        return silent_s > TIMEOUT_S and not self._filling[host]

    def receive(self, path: Path, request: dict[str, Any], connection: Connection) -> None:
        """Take a copy, as a request says, into a file: visible only once all of it is there and its checksums hold."""
        beside, problem = connection.body, ""
        if request.get("by") != self._transport.name:
            problem = f"transport {self._transport.name}, not {request.get('by')}: snapshot.transport differs"
            connection.send({"error": problem})
            return
        try:
            with self.open(path, int(request["bytes"])) as incoming:
                connection.send({"place": dict(incoming.place)})
                begun = time.monotonic()
                while not connection.readable(LOOK_S):
                    if self._is_silent(connection.host, begun):
                        raise ConnectionError("nothing comes of a copy")
                if connection.receive().get("op") != "seal":
                    raise ConnectionError("a copy that was given up")
                problem = incoming.seal(beside, request["header_sha256"])
        except CheckpointError as error:  # no room
            problem = first_line(error)
        connection.send({"error": problem} if problem else {"ok": True})
