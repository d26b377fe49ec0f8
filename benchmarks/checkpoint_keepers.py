"""Keepers in processes of their own and a coordinator for them: what becomes of a snapshot once it is sealed."""

import contextlib
import multiprocessing
import multiprocessing.connection
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from regrow.control.commits import CommitTracker
from regrow.control.values import Peer, SnapshotAck, Version
from regrow.state.disk.catalog import step_folder
from regrow.state.disk.format import COMMIT
from regrow.state.disk.upload import Upload, WriteOrder
from regrow.state.memory.held import holdings, is_whole
from regrow.state.memory.holders import Holder
from regrow.state.memory.node import KeeperNode
from regrow.state.memory.ranges import Address
from regrow.state.memory.slots import Committed
from regrow.storage import LocalStorage, Storage

RUN_ID, SECRET = "0123456789abcdef", b"of this benchmark"
GENERATION = 1
JOIN_S = 20.0


@dataclass(frozen=True)
class Place:
    """A node: its name, and its keeper's folder in memory."""

    node: str
    folder: Path


class Ended(Protocol):
    """A process, as far as it is needed."""

    def join(self, timeout: float | None = None) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[Place], tuple[Connection, Ended]]


class Keepers:
    """A keeper process a node, each the next one's peer, where there are to be copies; a thread here is their
    coordinator, without Ray.

    It commits what all of them have reported. With `checkpoints`, it has every step that is committed while none is on
    its way written there. `start` makes the processes; without it they are this machine's.
    """

    def __init__(
        self,
        folder: Path,
        num_nodes: int,
        checkpoints: Path | None = None,
        start: Start | None = None,
        copies: bool = True,
    ) -> None:
        start = start or _spawn
        self.places = [Place(f"node-{number}", folder / f"node-{number}") for number in range(num_nodes)]
        self._checkpoints: Storage | None = LocalStorage(checkpoints) if checkpoints else None
        self._upload: Upload | None = None
        self._pipes: dict[str, Connection] = {}
        self._processes = []
        for place in self.places:
            ours, process = start(place)
            self._pipes[place.node] = ours
            self._processes.append(process)
        self._addresses: dict[str, Address] = {node: pipe.recv() for node, pipe in self._pipes.items()}
        peers: dict[str, tuple[str, ...]] = {}
        for number, place in enumerate(self.places):
            peer = self.places[(number + 1) % num_nodes].node
            peers[place.node] = (peer,) if copies and num_nodes > 1 else ()
            self._pipes[place.node].send(
                ("peers", tuple(Peer(each, self._addresses[each]) for each in peers[place.node]))
            )
        self._board = CommitTracker(is_whole)
        self._board.begin(GENERATION, 0, peers)
        self._thread = threading.Thread(target=self._coordinate, daemon=True)
        self._thread.start()

    def holders(self) -> list[Holder]:
        """Of the newest committed step, copies included."""
        assert self._board.newest is not None, "nothing is committed"
        moment = self._board.newest.version
        return [
            Holder(place.node, self._addresses[place.node], held)
            for place in self.places
            for held in holdings(place.folder, RUN_ID)
            if held.moment == moment
        ]

    def close(self) -> None:
        """Leave nothing in memory."""
        for pipe in self._pipes.values():
            with contextlib.suppress(OSError):
                pipe.send(("close", None))
        for process in self._processes:
            process.join(JOIN_S)
            process.kill()

    def _coordinate(self) -> None:
        pipes: list[Any] = list(self._pipes.values())
        while pipes:
            for pipe in multiprocessing.connection.wait(pipes):
                try:
                    message = pipe.recv()  # type: ignore[union-attr,call-arg]
                except (EOFError, OSError):
                    pipes.remove(pipe)
                    continue
                if isinstance(message, SnapshotAck):
                    self._sealed(message)
                else:
                    self._written(*message)

    def _sealed(self, report: SnapshotAck) -> None:
        commit = self._board.sealed(report)
        if commit is None:
            return
        if self._checkpoints is not None and self._upload is None:
            target = self._checkpoints / step_folder(commit.version.step)
            self._upload = Upload(commit.version, tuple(commit.peers), target, RUN_ID)
            for node, order in self._upload.orders():
                self._pipes[node].send(("write", order))
        self._tell(commit.version)

    def _written(self, order: WriteOrder, outcome: Any) -> None:
        upload = self._upload
        assert upload is not None
        assert not isinstance(outcome, str), outcome
        upload.done(order, outcome)
        if upload.complete:
            upload.folder.write_bytes(COMMIT, upload.index_order.carry_out(upload.folder, lambda files: files).commit)
            self._upload = None
            assert self._board.newest is not None
            self._tell(self._board.newest.version)

    def _tell(self, newest: Version) -> None:
        for pipe in self._pipes.values():
            pipe.send(("committed", Committed(newest, self._upload.moment if self._upload else Version())))


def _spawn(place: Place) -> tuple[Connection, "Ended"]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=keep, args=(theirs, place), daemon=True)
    process.start()
    theirs.close()
    return ours, process


@contextlib.contextmanager
def keepers(
    memory_folder: str,
    num_nodes: int,
    checkpoints: Path | None = None,
    start: Start | None = None,
    copies: bool = True,
) -> Iterator[Keepers]:
    """Keepers for a while, in a folder of their own below `memory_folder`."""
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-bench-", dir=memory_folder))
    started = None
    try:
        started = Keepers(folder, num_nodes, checkpoints, start, copies)
        yield started
    finally:
        if started is not None:
            started.close()
        shutil.rmtree(folder, ignore_errors=True)


def place_of(rank: int, world_size: int, places: Sequence[Place]) -> Place:
    """Neighbouring ranks share a node."""
    return places[rank * len(places) // world_size]


def writers_on(place: Place, world_size: int, places: Sequence[Place]) -> int:
    return sum(place_of(rank, world_size, places) == place for rank in range(world_size))


def keep(pipe: Connection, place: Place, host: str = "127.0.0.1") -> None:
    """The process of one keeper, which others reach at this address."""
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock:
            pipe.send(message)

    def write(order: WriteOrder) -> None:
        try:
            outcome: Any = keeper.write(order)
        except Exception as error:
            outcome = f"{place.node}: {type(error).__name__}: {error}"
        send((order, outcome))

    keeper = KeeperNode(place.folder, node=place.node, host=host, secret=SECRET, run_id=RUN_ID, report=send)
    keeper.start()
    send(keeper.address)
    with contextlib.suppress(EOFError, OSError):  # the process that started it is gone
        while True:
            what, value = pipe.recv()
            if what == "peers":
                keeper.set_peers(value)
            elif what == "committed":
                keeper.committed(value)
            elif what == "write":
                threading.Thread(target=write, args=(value,), daemon=True).start()
            else:
                break
    keeper.close(delete=True)
