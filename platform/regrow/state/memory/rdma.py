"""Copies by RDMA, for nodes with InfiniBand, RoCE or EFA: NIXL, by UCX, moves the bytes of `transport`.

The keeper that has a snapshot says where it lies in its memory, over flows like TCP's, and its peer reads it from
there: what reads knows when it has ended, so memory that was given up is not written to any more. Ranges that ranks
read for a restore go over TCP.

UCX's endpoints know neither the run's secret nor, on TCP, keys of memory: what reaches one can read and write all of
its process. So UCX gets no TCP unless UCX_TLS says so, and a node without a device for RDMA is refused.
"""

import base64
import contextlib
import importlib
import mmap
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from regrow.errors import first_line
from regrow.state.memory.mapping import address_of, map_all
from regrow.state.memory.ranges import TIMEOUT_S, Address, Connection
from regrow.state.memory.transport import Place, Registered, Session, TcpSession, TransportError

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12", "nixl_rocm")  # the first picks among the others
WITHOUT_TCP = "^tcp,cuda"  # of UCX_TLS; what is copied is in host memory
BACKEND, MEMORY = "UCX", "DRAM"
FLOWS = 8  # pieces that are read at once
READ_S = TIMEOUT_S / 2  # for a piece, less than its sender waits for an answer
POLL_S = 2e-4

Source = Mapping[str, Any]  # where a file lies in a peer's memory, as JSON has it


class NixlTransport:
    """Of one keeper."""

    name = "nixl"

    def __init__(self, node: str) -> None:
        """Raises TransportError where NIXL, or a device for RDMA, is not there."""
        os.environ.setdefault("UCX_TLS", WITHOUT_TCP)
        nixl = _imported()
        settings = nixl.nixl_agent_config(backends=[BACKEND], sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        try:
            self.agent = nixl.nixl_agent(f"{node}-{secrets.token_hex(8)}", settings)
        except Exception as error:
            raise TransportError(
                f"snapshot.transport=nixl: UCX finds no device for RDMA ({first_line(error)}) with "
                f"UCX_TLS={os.environ['UCX_TLS']}; set snapshot.transport=tcp, or UCX_TLS on every node"
            ) from error
        self.offers = Offers(self.agent)
        self._remotes = _Remotes(self.agent)

    def connect(self, peer: Address, secret: bytes) -> Session:
        return _NixlSession(peer, secret, self.offers)

    def register(self, memory: memoryview) -> Registered:
        return _Landing(self.agent, self._remotes, memory)

    def forget_deleted(self) -> None:
        self.offers.forget(deleted_only=True)

    def close(self) -> None:
        self.offers.forget(deleted_only=False)


def _imported() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it tells of itself
    for name in PACKAGES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise TransportError(
        "snapshot.transport=nixl needs NIXL on every node: pip install 'regrow[rdma]', or set snapshot.transport=tcp"
    )


class _NixlSession(TcpSession):
    """Says what is to be read, over flows to a peer; the peer answers once it has read it."""

    def __init__(self, peer: Address, secret: bytes, offers: "Offers") -> None:
        super().__init__(peer, secret, lambda peer, secret: FLOWS)
        self._offers = offers

    def put(self, file: BinaryIO, begin: int, end: int, place: Place) -> None:
        with self._offers.of(file) as source:
            super().put(file, begin, end, {**place, "source": source})

    def _send_bytes(self, connection: Connection, file: BinaryIO, at: int, size: int) -> None: ...


@dataclass
class Offer:
    """A file that peers may read, mapped and registered."""

    descriptor: int
    map: mmap.mmap
    registered: Any
    source: Source
    num_puts: int = 0  # on their way

    @property
    def is_deleted(self) -> bool:
        return os.fstat(self.descriptor).st_nlink == 0


class Offers:
    """The files of one keeper that peers may read. Slots are used again and again: each is registered once."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._by_file: dict[tuple[int, int, int], Offer] = {}  # by file system, number and size
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, file: BinaryIO) -> Iterator[Source]:
        """Where a file lies, which stays there meanwhile. Raises TransportError where it cannot be registered."""
        status = os.fstat(file.fileno())
        key = status.st_dev, status.st_ino, status.st_size
        self.forget(deleted_only=True)
        with self._lock:
            offer = self._by_file.get(key)
            if offer is None:
                offer = self._by_file[key] = offer_of(self._agent, file, status.st_size)
            offer.num_puts += 1
        try:
            yield offer.source
        finally:
            with self._lock:
                offer.num_puts -= 1

    def forget(self, *, deleted_only: bool) -> None:
        """Give the memory of files back, unless they are being put."""
        with self._lock:
            for key, offer in list(self._by_file.items()):
                if not offer.num_puts and (offer.is_deleted or not deleted_only):
                    del self._by_file[key]
                    self._agent.deregister_memory(offer.registered)
                    offer.map.close()
                    os.close(offer.descriptor)


def offer_of(agent: Any, file: BinaryIO, size: int) -> Offer:
    """Raises TransportError where it cannot be registered."""
    descriptor = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR)  # registered memory is writable
    try:
        mapped = map_all(descriptor, size)
        at = address_of(mapped)
        registered = _register(agent, at, size)
    except BaseException:
        os.close(descriptor)
        raise
    metadata = agent.get_partial_agent_metadata(registered, True, [BACKEND])
    source = {"agent": agent.name, "at": at, "bytes": size, "metadata": base64.b64encode(metadata).decode()}
    return Offer(descriptor, mapped, registered, source)


@dataclass
class _Remote:
    """Another keeper's agent."""

    name: Any  # NIXL's
    known: dict[tuple[int, int], str] = field(default_factory=dict)  # metadata of its memory, by first byte and end
    failed: bool = False

    def contradicts(self, where: tuple[int, int], metadata: str) -> bool:
        """Whether something else was there."""
        begin, end = where
        return any(
            known != metadata or (at, to) != where for (at, to), known in self.known.items() if at < end and begin < to
        )


class _Remotes:
    """Agents that were met."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._by_name: dict[str, _Remote] = {}
        self._reads = Counter[str]()  # on their way
        self.stuck: list[tuple[_Landing, Any]] = []  # reads that do not end, and what they may yet write to
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def reading(self, source: Source) -> Iterator[Any]:
        """NIXL's name of the agent that has this memory, for as long as it is read."""
        name, at, metadata = source["agent"], int(source["at"]), source["metadata"]
        where = at, at + int(source["bytes"])
        with self._changed:
            remote = self._by_name.get(name)
            # NIXL keeps to what it was told of an address first, and a connection that broke stays broken
            if remote is not None and (remote.failed or remote.contradicts(where, metadata)):
                remote.failed = True  # others wait, too
                if not self._changed.wait_for(lambda: not self._reads[name], READ_S):
                    raise TransportError("memory of a peer is registered anew, and still read as it was before")
                if self._by_name.get(name) is remote:
                    del self._by_name[name]
                    with contextlib.suppress(Exception):  # it is gone already
                        self._agent.remove_remote_agent(remote.name)
                remote = self._by_name.get(name)
            if remote is None or where not in remote.known:
                added = self._agent.add_remote_agent(base64.b64decode(metadata))
                remote = self._by_name.setdefault(name, _Remote(added))
                remote.known[where] = metadata
            self._reads[name] += 1
        try:
            yield remote.name
        except OSError:  # it was given up
            raise
        except BaseException:
            remote.failed = True
            raise
        finally:
            with self._changed:
                self._reads[name] -= 1
                self._changed.notify_all()


class _Landing:
    """Memory of this keeper that copies are read into."""

    def __init__(self, agent: Any, remotes: _Remotes, memory: memoryview) -> None:
        self._agent, self._remotes, self._memory = agent, remotes, memory
        self._at = address_of(memory)
        self._registered = _register(agent, self._at, len(memory))

    @property
    def is_idle(self) -> bool:
        return not any(landing is self for landing, _ in self._remotes.stuck)

    def receive(self, target: memoryview, request: Mapping[str, Any], connection: Connection) -> None:
        source = request["source"]
        try:
            with self._remotes.reading(source) as remote:
                here = self._agent.get_xfer_descs([(self._at + request["at"], len(target), 0)], MEMORY)
                there = self._agent.get_xfer_descs([(int(source["at"]) + request["at"], len(target), 0)], MEMORY)
                self._read(self._agent.initialize_xfer("READ", here, there, remote), connection)
        except (OSError, TransportError):
            raise
        except Exception as error:  # each of NIXL's is a class of its own
            raise TransportError(f"NIXL: {first_line(error) or type(error).__name__}") from error

    def close(self) -> None:
        if not self.is_idle:
            return
        self._agent.deregister_memory(self._registered)
        self._memory.release()

    def _read(self, read: Any, connection: Connection) -> None:
        give_up_at = time.monotonic() + READ_S
        try:
            state = self._agent.transfer(read)
            while state == "PROC":
                time.sleep(POLL_S)
                if connection.readable(0):  # it says nothing before it is answered
                    raise ConnectionError("it was given up")
                if time.monotonic() > give_up_at:
                    raise TransportError(f"a read of the peer's memory takes more than {READ_S:.0f} s")
                state = self._agent.check_xfer_state(read)
            if state != "DONE":
                raise TransportError("a read of the peer's memory failed")
        finally:
            self._release(read)

    def _release(self, read: Any) -> None:
        """Once it has ended. NIXL would cancel it before, and what comes all the same then crashes this process: UCX's
        reads cannot be taken back."""
        give_up_at = time.monotonic() + READ_S
        while self._is_on_its_way(read):
            if time.monotonic() > give_up_at:
                self._remotes.stuck.append((self, read))
                return
            time.sleep(POLL_S)
        with contextlib.suppress(Exception):  # of an agent that is gone
            self._agent.release_xfer_handle(read)

    def _is_on_its_way(self, read: Any) -> bool:
        try:
            return bool(self._agent.check_xfer_state(read) == "PROC")
        except Exception:  # it has failed, each time in a class of its own
            return False


def _register(agent: Any, at: int, size: int) -> Any:
    try:
        return agent.register_memory([(at, size, 0, "")], MEMORY, backends=[BACKEND])
    except Exception as error:
        raise TransportError(
            f"NIXL cannot register {size:,} bytes ({first_line(error)}): let keepers lock memory (ulimit -l)"
        ) from error
