"""A torch.distributed backend with NCCL's manners on CPU tensors, for what has to survive them and has no GPU to try.

A stream is a thread that does what it is given, in order. A collective that the host calls is enqueued on it, and to
wait for its work is to wait for nothing. What the stream itself calls, such as a step submitted as one function, is
done there and then. A dead peer raises nothing: the stream hangs. An abort ends that with what is in the buffers, also
on peers that were told nothing; only the next enqueue raises. Messages between two ranks have a communicator and a
stream of their own, where each waits for the one before it.

Sources: torch's ProcessGroupNCCL.cpp and NCCLUtils.cpp (`WorkNCCL::wait`, `abort`, `getNcclComm`, `Watchdog::runLoop`),
NCCL's init.cc (`ncclCommAbort`), prims_simple.h and primitives.h (a kernel after an abort). Importing this registers
`init_process_group("asynchronous")`. Left out: batches of messages, the monitor thread, connecting without blocking.
"""

import contextlib
import itertools
import json
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import cache, reduce
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType

from regrow.config.schema import Backend
from regrow.process_log import say

NAME = Backend.asynchronous.value
ID_KEY = "unique id"
SPIN_S = 0.01  # without a byte, before a kernel looks at the abort flag: 10,000 spins in primitives.h
WATCH_S = 0.1  # between two looks of the watchdog, as torch's

_FRAME = struct.Struct("!QBQ")  # number of the collective, kind, bytes that follow
_DATA, _OLD, _BROKEN = range(3)  # kinds: with data; a post without; what is still awaited counts as posted, too

_ProcessGroup: Any = dist.ProcessGroup  # its declared methods are overloaded
Parts = Sequence[Tensor | None]  # one of, or for, each rank; None: nothing


class Event(Future[Any]):
    """What torch.cuda.Event is; `result()` has what the function returned or raised."""

    def query(self) -> bool:
        return self.done()

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Wait, and raise nothing; whether it came to pass in time."""
        return not wait([self], timeout_s).not_done


class Stream:
    """A thread that stands for a device: it does what is submitted, in order. One that hangs keeps no process alive."""

    num_ahead = 1  # as on a GPU, see `stream.Stream`

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, Callable[[], Any], Event]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_submitted = self._running = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"{NAME} stream", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[[], Any]) -> Event:
        event = Event()
        with self._lock:
            self._num_submitted += 1
            self._queue.put((self._num_submitted, fn, event))
        return event

    def record(self) -> Event:
        """The event of everything submitted so far being done."""
        return self.submit(lambda: None)

    def synchronize(self) -> None:
        self.record().synchronize()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is done; whether it was in time."""
        return self.record().synchronize(timeout_s)

    def is_current(self) -> bool:
        """Whether the caller runs on the stream."""
        return threading.current_thread() is self._thread

    def position(self) -> int:
        """The newest submission; on the stream, the one that is running."""
        return self._running if self.is_current() else self._num_submitted

    def end(self) -> None:
        """Be gone once everything is done."""

        def leave() -> None:
            self._ended = True

        self.submit(leave)

    def _run(self) -> None:
        while not self._ended:
            self._running, fn, event = self._queue.get()
            try:
                event.set_result(fn())
            except BaseException as error:  # for the thread that asks the event
                event.set_exception(error)
            del fn, event  # tensors


def default_stream() -> Stream:
    """This process' stream."""
    with _making:  # groups are made side by side
        return _stream()


_making = threading.Lock()


@cache
def _stream() -> Stream:
    return Stream()


class Communicator:
    """The connections among a group's ranks, and what kernels do over them. Making it is collective, and waits."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.aborted = rank, False
        self.lost: int | None = None  # a rank whose connection ended while a kernel waited for it
        self._number = 0  # of the next collective
        self._broken: set[int] = set()  # those that a peer gave up in the middle
        self._came: dict[tuple[int, int], bytearray | None] = {}  # by collective and rank; None: posted without data
        self._fifo: dict[tuple[int, int], bytearray] = {}  # by rank and size, what came last
        self._ended: set[int] = set()  # ranks from which nothing will come any more
        self._deaf: set[int] = set()  # ranks to which nothing can be sent any more
        self._moved = threading.Condition()
        self._links = _connect(store, rank, size)
        for peer, link in self._links.items():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, int(SPIN_S * 1e6)))
            threading.Thread(target=self._receive, args=(peer, link), name=f"{NAME} link", daemon=True).start()

    def exchange(self, outgoing: Parts, incoming: Parts) -> list[Tensor | None]:
        """Send each rank its part, and get from each a part like the one given. On the stream; hangs where a peer does.

        Once aborted it posts without data, and waits no longer than it takes to notice. Parts that are there are right,
        others are what was in the buffers; peers go on as if they had been served.
        """
        number, self._number = self._number, self._number + 1
        awaited = {rank: like for rank, like in enumerate(incoming) if like is not None and rank != self.rank}
        for rank, part in enumerate(outgoing):
            if part is not None and rank != self.rank:
                data = memoryview(part.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
                self._post(rank, number, *((_OLD, b"") if self.aborted else (_DATA, data)))
        gave_up, parts = False, [part if rank == self.rank else None for rank, part in enumerate(outgoing)]
        with self._moved:
            # a ring: what others have for this rank comes by way of a peer, and no more once that one has given up
            while number not in self._broken and (missing := {r for r in awaited if (number, r) not in self._came}):
                self.lost = next(iter(missing & self._ended), self.lost)
                if gave_up := not self._moved.wait(SPIN_S) and self.aborted:
                    break
            for rank, like in awaited.items():
                came, num_bytes = self._came.get((number, rank)), like.nbytes
                assert came is None or len(came) == num_bytes, f"sizes differ in collective {number}"
                came = came or self._fifo.get((rank, num_bytes)) or bytearray(num_bytes or 1)
                self._fifo[rank, num_bytes] = came
                parts[rank] = torch.frombuffer(came, dtype=torch.uint8)[:num_bytes].view(like.dtype).view(like.shape)
            self._came = {key: data for key, data in self._came.items() if key[0] > number}
            self._broken = {each for each in self._broken if each > number}
        for rank in self._links if gave_up else ():
            self._post(rank, number, _BROKEN, b"")
        return parts

    def close(self) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):  # the peer's end was first
                link.shutdown(socket.SHUT_RDWR)

    def _post(self, rank: int, number: int, kind: int, data: memoryview | bytes) -> None:
        for left in (memoryview(_FRAME.pack(number, kind, len(data))), memoryview(data)):
            while left and rank not in self._deaf:
                try:
                    left = left[self._links[rank].send(left) :]
                except OSError as error:  # a stopped peer's buffers are full, or the connection has ended
                    if self.aborted or not isinstance(error, BlockingIOError):
                        self._deaf.add(rank)

    def _receive(self, rank: int, link: socket.socket) -> None:
        with contextlib.suppress(OSError), link:
            while True:
                number, kind, num_bytes = _FRAME.unpack(_read(link, _FRAME.size))
                data = _read(link, num_bytes)
                with self._moved:
                    if kind == _BROKEN:
                        self._broken.add(number)
                    else:
                        self._came[number, rank] = data if kind == _DATA else None
                    self._moved.notify_all()
        with self._moved:
            self._ended.add(rank)
            self._moved.notify_all()


class Work(dist.Work):
    """A collective or a message that was enqueued. Only a barrier's makes the host wait, as NCCL's; for a message,
    which has a stream of its own, it is the process' stream that waits."""

    def __init__(self, *, is_barrier: bool = False, waits: Stream | None = None) -> None:
        super().__init__()
        self.event, self.began_s, self.is_barrier, self._waits = Event(), time.monotonic(), is_barrier, waits
        self.is_message = waits is not None
        self.began_ns, self.record_id = time.time_ns(), next(_record_ids)
        _newest.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.is_barrier or (self._waits is not None and self._waits.is_current()):
            return self.event.synchronize()
        if self._waits is not None:
            self._waits.submit(self.event.synchronize)
        return True

    def is_completed(self) -> bool:
        return self.event.query()


_record_ids = itertools.count()
_newest: deque[Work] = deque(maxlen=2000)  # as many as torch's flight recorder keeps


def flight_record() -> bytes:
    """This process' newest collectives, as torch's flight recorder has those of its own backends (JSON)."""
    works = [(work, work.is_completed()) for work in list(_newest)]
    entries = [
        {
            "record_id": work.record_id,
            "time_created_ns": work.began_ns,
            "state": "completed" if ended else "started",
            "retired": ended,
            "is_p2p": work.is_message,
        }
        for work, ended in works
    ]
    return json.dumps({"entries": entries}).encode()


class ProcessGroupAsynchronous(_ProcessGroup):
    """A group whose collectives are enqueued on this process' stream; its first one makes its communicator.

    Settings are torch's, read here. TORCH_NCCL_ASYNC_ERROR_HANDLING: in modes 1 and 3, the default, the watchdog ends
    the process after a collective has failed or taken longer than the group's timeout (2 counts as 0); before it does,
    it sleeps for four times TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC (15,000). `abort` waits for the group's timeout, too.
    """

    group_name = ""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._members = store, rank, size
        self._set_default_timeout(timeout)
        self._tears_down = int(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")) in (1, 3)
        self._dump_s = 4 * int(os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000")) / 1000
        self._stream = default_stream()
        self._connecting = threading.Lock()
        self._communicator: Communicator | None = None
        self._pairs: dict[int, tuple[Communicator, Stream]] = {}  # by peer
        self._is_shut_down = False
        self._aborted_at: int | None = None  # submission; kernels up to it had been launched
        self._works: deque[Work] = deque()
        self._error = ErrorType.SUCCESS
        self._terminated = threading.Event()

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _get_backend(self, device: torch.device) -> "ProcessGroupAsynchronous":
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Make the communicator now. Collective; an abort does not end it, as that of ncclCommInitRank."""
        with self._connecting:
            if self._communicator is None:
                self._communicator = self._watched(Communicator(*self._members))

    def _watched(self, communicator: Communicator) -> Communicator:
        communicator.aborted = self._aborted_at is not None  # meanwhile
        threading.Thread(target=self._watch, args=(communicator,), daemon=True).start()
        return communicator

    @property
    def options(self) -> SimpleNamespace:
        """As torch's own have it."""
        return SimpleNamespace(_timeout=timedelta(seconds=self._timeout_s))

    @property
    def is_aborted(self) -> bool:
        return self._aborted_at is not None

    def get_error(self) -> ErrorType:
        """What the watchdog has seen."""
        return self._error

    def abort(self) -> None:
        """Have kernels give up, running ones and queued ones; returns when the stream is through, as cudaFree does.

        It waits for kernels of other groups, too: abort them side by side. Raises DistBackendError after the timeout.
        """
        if self._is_shut_down:
            say(f"abort of {self} after its shutdown: NCCL frees twice", sys.stderr)
            os.abort()
        if self._aborted_at is None:
            self._aborted_at = self._stream.position()
        self._terminated.set()
        pairs = [communicator for communicator, _ in list(self._pairs.values())]
        for communicator in [*pairs, *([self._communicator] if self._communicator is not None else [])]:
            communicator.aborted = True
        if not self._stream.is_current() and not self._stream.record().synchronize(self._timeout_s):
            raise dist.DistBackendError(f"abort timed out after {self._timeout_s:g} s: the stream hangs elsewhere")

    def shutdown(self) -> None:
        """Wait for the stream, at most for the timeout, and end the connections behind it."""
        self._is_shut_down = self._aborted_at is None
        self._terminated.set()
        own = [(self._communicator, self._stream)] if self._communicator is not None else []
        for communicator, stream in [*list(self._pairs.values()), *own]:
            closed = stream.submit(communicator.close)
            if self._aborted_at is None and not self._stream.is_current():
                closed.synchronize(self._timeout_s)
            if stream is not self._stream:
                stream.end()

    def _enqueue(self, outgoing: Parts, incoming: Parts, *, total: Any = None, barrier: bool = False) -> Work:
        """What each rank has for this one in `outgoing` goes into its part of `incoming`; or all into `total`."""
        if self._aborted_at is None:
            self.eager_connect_single_device()
        else:
            self._raise_if_aborted()
        work = Work(is_barrier=barrier)
        self._works.append(work)

        def kernel() -> None:
            try:
                parts = self._communicator.exchange(outgoing, incoming) if self._communicator else []
                if total is not None and parts:  # none where it was aborted before there was a communicator
                    parts = [_reduce(parts, total[1])]
                for into, part in zip(total[:1] if total else incoming, parts, strict=False):
                    if into is not None and part is not None:
                        into.data.copy_(part.reshape(into.shape))
            finally:
                work.event.set_result(None)

        if self._stream.is_current():
            kernel()
        else:
            self._stream.submit(kernel)
        return work

    def _raise_if_aborted(self) -> None:
        """But for what was launched before the abort, and goes on to its end."""
        at = self._aborted_at
        if at is not None and (not self._stream.is_current() or self._stream.position() > at):
            raise dist.DistBackendError(f"communicator was aborted on rank {self.rank()} of {self.group_name}")

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._message(peer, [tensors[0], None])

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._message(peer, [None, tensors[0]])

    def _message(self, peer: int, ways: list[Tensor | None]) -> Work:
        """Out or in, on the pair's stream, after what this process' stream was given before it."""
        self._raise_if_aborted()
        communicator, stream = self._pair(peer)
        ready = None if self._stream.is_current() else self._stream.record()
        work = Work(waits=self._stream)
        self._works.append(work)

        def kernel() -> None:
            try:
                if ready is not None:
                    ready.synchronize()
                outgoing, incoming = ([each, None] if communicator.rank else [None, each] for each in ways)
                for came in communicator.exchange(outgoing, incoming):
                    if ways[1] is not None and came is not None:
                        ways[1].data.copy_(came)
            finally:
                work.event.set_result(None)

        stream.submit(kernel)
        return work

    def _pair(self, peer: int) -> tuple[Communicator, Stream]:
        """Made by the first message, which waits for the peer's."""
        store, rank, _ = self._members
        with self._connecting:
            if peer not in self._pairs:
                pair = dist.PrefixStore(f"{min(rank, peer)}:{max(rank, peer)}", store)
                made = Communicator(pair, int(rank > peer), 2)
                self._pairs[peer] = self._watched(made), Stream()
            return self._pairs[peer]

    def _watch(self, communicator: Communicator) -> None:
        while self._error == ErrorType.SUCCESS:
            if self._terminated.wait(WATCH_S):
                return
            while self._works and self._works[0].is_completed():
                self._works.popleft()
            if communicator.lost is not None:
                self._error = ErrorType.REMOTE_ERROR
            elif self._works and time.monotonic() - self._works[0].began_s > self._timeout_s:
                self._error = ErrorType.TIMEOUT
        if self._tears_down:
            say(f"{NAME} watchdog, group {self.group_name}: {self._error}, this process ends", sys.stderr)
            time.sleep(self._dump_s)  # whatever becomes of the group meanwhile
            os.abort()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return [self._enqueue(*([[each] * self.size()] * 2), total=(each, opts)) for each in tensors][-1]

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        return self.scatter(tensors, [tensors * self.size()], opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        nothing: list[Tensor | None] = [None] * self.size()
        outgoing = inputs[0] if self.rank() == opts.rootRank else nothing
        return self._enqueue(outgoing, [*nothing[: opts.rootRank], outputs[0], *nothing[opts.rootRank + 1 :]])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._enqueue(inputs * self.size(), outputs[0])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._enqueue([input] * self.size(), output.view(-1).tensor_split(self.size()))

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return [self.all_gather_single(*each) for each in zip(outputs, inputs, strict=True)][-1]

    def all_to_all_single(self, output: Tensor, input: Tensor, into: Any, of: Any, opts: Any = None) -> Work:
        cut = [t.split(sizes) if sizes else t.tensor_split(self.size()) for t, sizes in ((input, of), (output, into))]
        return self._enqueue(*cut)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        return self._enqueue(inputs[0], outputs * self.size(), total=(outputs[0], opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        rows = input.view(-1) if len(input) % self.size() else input  # which need not be contiguous
        return self.reduce_scatter([output], [list(rows.tensor_split(self.size()))], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return [self.reduce_scatter_single(*each, opts) for each in zip(outputs, inputs, strict=True)][-1]

    def barrier(self, opts: Any = None) -> Work:
        return self._enqueue(*([[torch.zeros(1)] * self.size()] * 2), barrier=True)


def _reduce(parts: Parts, opts: Any) -> Tensor:
    """In the order of the ranks, so that the same comes out everywhere and every time."""
    kind, factor = opts.reduceOp.__getstate__() if opts is not None else (dist.ReduceOp.SUM, None)
    combine = {dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum}.get(kind, torch.add)
    flat = [part.detach().reshape(-1) for part in parts if part is not None]
    total = reduce(combine, flat if factor is None else [part * factor for part in flat])
    return total / len(parts) if kind == dist.ReduceOp.AVG else total


def _connect(store: dist.Store, rank: int, size: int) -> dict[int, socket.socket]:
    """Connections to all other ranks, through addresses in the store under the unique id."""
    server = store
    while isinstance(server, dist.PrefixStore):
        server = server.underlying_store
    with socket.socket(type=socket.SOCK_DGRAM) as probe:  # for this machine's address towards the store
        probe.connect((server.host, server.port) if isinstance(server, dist.TCPStore) else ("127.0.0.1", 1))
        host = probe.getsockname()[0]
    if rank == 0:
        store.set(ID_KEY, secrets.token_hex(16))
    try:
        unique_id = store.get(ID_KEY)
    except RuntimeError as error:
        raise dist.DistBackendError(f"rank {rank} got no unique id from rank 0 through the store: {error}") from error
    links: dict[int, socket.socket] = {}
    with socket.create_server((host, 0), backlog=size) as listener:
        store.set(f"{unique_id.decode()}/{rank}", f"{host} {listener.getsockname()[1]}")
        for peer in range(rank):
            key = f"{unique_id.decode()}/{peer}"
            while not store.check([key]):
                time.sleep(SPIN_S)
            peer_host, port = store.get(key).decode().split()
            links[peer] = socket.create_connection((peer_host, int(port)))
            links[peer].sendall(unique_id + struct.pack("!I", rank))
        while len(links) < size - 1:
            link, _ = listener.accept()
            with contextlib.suppress(OSError):  # a stranger's
                hello = _read(link, len(unique_id) + 4)
                if hello[:-4] == unique_id:
                    links[int.from_bytes(hello[-4:], "big")] = link
    return links


def _read(link: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    if num_bytes and link.recv_into(data, num_bytes, socket.MSG_WAITALL) < num_bytes:
        raise ConnectionError("the peer's end of the connection has ended")
    return data


dist.Backend.register_backend(NAME, ProcessGroupAsynchronous, devices=["cpu"])
