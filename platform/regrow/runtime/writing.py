"""The part of a keeper by which checkpoints are written and read back: its own part, and of an order for all the
answers of the nodes that it speaks for, too."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray

from regrow.errors import CheckpointError, first_line
from regrow.state.disk.format import DataFile
from regrow.state.disk.gather import read_back
from regrow.state.disk.packed import PackedFiles
from regrow.state.disk.upload import IndexOrder, Joined, OrderForAll, Published, WriteOrder, Written
from regrow.state.memory.node import KeeperNode
from regrow.storage import Storage

if TYPE_CHECKING:
    from regrow.runtime.keeper import Place

STORAGE, DEVICES, OF_ALL = "storage", "devices", "of all"  # calls that may hang, and keep no others from being answered
GROUPS = {STORAGE: 4, DEVICES: 2, OF_ALL: 4}
KEPT = 3  # orders for all of which a node remembers what it has written: one may be read back when the next ones come
FETCH_S = 60.0  # for what nodes have told of their files to come from where it is held

Method = TypeVar("Method", bound=Callable[..., Any])


def on_threads_of(group: str) -> Callable[[Method], Method]:
    return cast("Callable[[Method], Method]", ray.method(concurrency_group=group))


class Own:
    """What this node has written for an order for all."""

    def __init__(self) -> None:
        self.written: Future[Written] = Future()
        self.is_read = False  # or is being read back

    def write(self, work: Callable[[], Written]) -> None:
        try:
            self.written.set_result(work())
        except Exception as error:  # storage raises many kinds
            self.written.set_exception(error)

    def is_there(self) -> bool:
        """Whether an order that repeats that one has its answer here, or will have."""
        return not (self.written.done() and self.written.exception())


class Writing:
    """All but the small calls wait for storage, or for other keepers."""

    node_id: str
    lock: threading.Lock
    place: "Place"
    _own: dict[str, Own]  # by token, of the newest orders for all

    @property
    def _keeper(self) -> KeeperNode: ...  # type: ignore[empty-body]

    @on_threads_of(STORAGE)
    def write(self, order: WriteOrder) -> Written:
        """Write what the node holds of a step to storage."""
        own = self._own.get(order.repeats)
        return own.written.result() if own is not None and own.is_there() else self._keeper.write(order)

    @on_threads_of(OF_ALL)
    def write_all(self, order: OrderForAll) -> Joined:
        """Its own part, and what members come to in time. Of one order the first call has the answer."""
        with self.lock:
            members, own = self.place.members, Own()
            is_new = self._own.setdefault(order.token, own) is own
            for token in [*self._own][:-KEPT]:
                del self._own[token]
        if not is_new:
            return Joined.of({})
        calls = [member.write_all.remote(order) for member in members]
        own.write(lambda: self._keeper.write(order.of(self.node_id)))
        if (error := own.written.exception()) is None:
            mine = Joined.of({self.node_id: own.written.result()})
        else:
            mine = Joined.of({}, {self.node_id: (first_line(error), isinstance(error, CheckpointError))})
        joined = Joined.together([mine, *_answers(calls, order.timeout_s)])
        return joined if self.place.leader is not None else replace(joined, files=ray.put(joined.files))

    @on_threads_of(STORAGE)
    def read_back(self, folder: str, files: Sequence[DataFile] | PackedFiles, origin: str) -> str:
        """Read what a keeper has written of an origin's, and compare; what is wrong, or empty. Raises OSError."""
        return _wrong(folder, files.of_origin(origin) if isinstance(files, PackedFiles) else files)

    @on_threads_of(OF_ALL)
    def read_back_all(self, order: OrderForAll) -> dict[str, str]:
        """The same of what this node has written for this order, and of what members have for it, by node."""
        with self.lock:
            own, members = self._own.get(order.token), self.place.members
            if own is None or own.is_read:
                return {}
            own.is_read = True
        calls, found = [member.read_back_all.remote(order) for member in members], dict[str, str]()
        with contextlib.suppress(Exception):  # storage raises many kinds: then it is left out
            found[self.node_id] = _wrong(order.folder, own.written.result().files)
        for each in _answers(calls, order.timeout_s):
            found |= each
        return found

    @on_threads_of(OF_ALL)
    def put_together(self, order: IndexOrder) -> Published:
        """Write the metadata file of a checkpoint."""
        return order.carry_out(Storage.at(order.folder), fetch)


def fetch(files: Any) -> PackedFiles:
    """What many nodes have told of their files, from where the one that speaks for them holds it."""
    return files if isinstance(files, PackedFiles) else cast(PackedFiles, ray.get(files, timeout=FETCH_S))


def _wrong(folder: str, files: Sequence[DataFile]) -> str:
    try:
        for file in files:
            read_back(Storage.at(folder), file)
    except CheckpointError as error:
        return first_line(error)
    return ""


def _answers(calls: Sequence[Any], timeout_s: float) -> list[Any]:
    """Of the members that answer in time."""
    if not calls:
        return []
    done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
    found = []
    for call in done:
        with contextlib.suppress(ray.exceptions.RayError):  # it is gone, or what it came to is
            found.append(ray.get(call, timeout=FETCH_S))
    return found
