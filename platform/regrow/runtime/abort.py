"""Break a process' collectives off from another thread: what waits in one gets an error at once, not at a timeout.

NCCL can be told to abort; what waits then completes with garbage and raises nothing, so all that read results must be
told first (`train.certificate`). Gloo cannot be told (torch 2.13: `abort` returns and the collective goes on waiting),
so its connections are shut down underneath it. They are found by the addresses that gloo listens at, which every rank
learns from the others: nothing else of the process, Ray's connections neither, is touched. A process that waits for
another one to form a group with waits at the group's store.

They are shut down for reading alone, and held open: gloo sees an end, and lets go of all that waits. Were a write to
fail before it sees that, here or, as the connection closes, at a peer, then what it is of would not be let go: gloo
puts it to those that wait after it has told them (`Pair::sendAsyncMode`), and it waits for its timeout.
"""

import contextlib
import datetime
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from regrow.process_log import say

Address = tuple[str, int]  # host, port

ABORT_S = 10.0  # for a communicator to be aborted, and for a process to come out of making one
LEAVE_S = 45.0  # for a process to come out of a generation that was broken off
HELD_S = 3.0  # that connections are held open for peers, which are told, too
LOOK_S = 0.5  # between looks for groups that were made meanwhile
SETTLE_S = 1.0  # for gloo to let go of connections that were shut down
POLL_S = 0.002
STDERR = 2  # sys.stderr may be no file

_ABORTABLE = {"nccl": "cuda", "asynchronous": "cpu"}  # backends, and their devices


class Breaker:
    """Breaks off what this process waits for in one generation. From any thread; again is nothing."""

    def __init__(self) -> None:
        self._listeners: set[Address] = set()
        self._first: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._begun = False
        self._aborts: dict[int, threading.Thread] = {}  # by group
        self._held: dict[str, socket.socket] = {}  # that were shut down, by the kernel's name
        self._shut, self._left = threading.Event(), threading.Event()
        self._is_connecting = self._stands_down = False

    @property
    def begun(self) -> bool:
        """Whether the generation is over."""
        return self._begun

    def watch(self, listeners: Iterable[Address]) -> None:
        """Shut down connections to these addresses, where the ranks' gloo or the group's store listens, too."""
        with self._lock:
            self._listeners = self._listeners | set(listeners)  # another thread may go through them

    def first(self, tell: Callable[[], None]) -> None:
        """Have this called before anything is broken off; at once where that has begun."""
        with self._lock:
            if not self._begun:
                self._first.append(tell)
                return
        tell()

    @contextlib.contextmanager
    def connecting(self, timeout_s: float) -> Iterator[None]:
        """While communicators are made, which nothing can break off: a process that stays in that for so long ends."""
        late = threading.Timer(timeout_s, self.start)
        late.daemon = True
        late.start()
        self._is_connecting = True
        try:
            yield
        finally:
            self._is_connecting = False
            late.cancel()

    def start(self) -> None:
        """Break off. Returns before it is done; a process that does not come out, to `left`, ends."""
        with self._lock:
            if self._begun:
                return
            self._begun = True
            for tell in self._first:
                tell()
        threading.Thread(target=self._run, name="break-off", daemon=True).start()

    def stand_down(self) -> bool:
        """Groups are destroyed from here on, in good order: nothing is broken off any more, as an abort frees what its
        group has freed. Whether that is so: not where breaking off has begun. A process that stays ends still."""
        with self._lock:
            self._stands_down = not self._begun
            return self._stands_down

    def settle(self) -> None:
        """Where it has begun, wait until groups are aborted, ABORT_S at most, and gloo has let go of what was shut
        down, SETTLE_S at most. Before groups are destroyed: NCCL frees twice what is aborted after that, and a
        connection that is closed just as gloo is told of its end ends the process (`state_ <= CONNECTED` in its
        pair.cc)."""
        if self._begun and self._shut.wait(SETTLE_S):
            deadline = time.monotonic() + ABORT_S
            for each in list(self._aborts.values()):
                each.join(max(0.0, deadline - time.monotonic()))
            deadline = time.monotonic() + SETTLE_S
            while _watched().intersection(list(self._held)) and time.monotonic() < deadline:
                time.sleep(POLL_S)

    def left(self) -> None:
        """This process has come out of the generation: nothing of it is left to break off."""
        self._left.set()

    def _run(self) -> None:
        begun_at = time.monotonic()
        self._break_off(begun_at)
        time.sleep(max(0.0, begun_at + HELD_S - time.monotonic()))  # peers may be about to write
        for connection in self._held.values():
            connection.close()

    def _break_off(self, begun_at: float) -> None:
        while True:
            if not self._stands_down:
                self._abort_all()
                how = socket.SHUT_RD if time.monotonic() - begun_at < HELD_S else socket.SHUT_RDWR
                _shut_down_all(self._listeners, how, self._held)
            self._shut.set()
            if self._left.wait(LOOK_S):
                return
            waited_s, connecting = time.monotonic() - begun_at, self._is_connecting
            if waited_s > (ABORT_S if connecting else LEAVE_S):
                what = "making communicators" if connecting else "a collective or on its device"
                say(f"regrow: {waited_s:.0f} s after its group was over it hangs in {what}: ends", sys.stderr)
                with contextlib.suppress(OSError):
                    faulthandler.dump_traceback(STDERR, all_threads=True)
                os._exit(1)

    def _abort_all(self) -> None:
        """Groups that were made meanwhile, too."""
        for group in list(distributed_c10d._world.pg_map):
            if id(group) not in self._aborts:
                # side by side: an abort may wait for a kernel that another group's abort ends (pytorch#119797)
                abort = self._aborts[id(group)] = threading.Thread(target=_abort, args=(group,), daemon=True)
                abort.start()


def listening() -> set[Address]:
    """Where this process listens for TCP connections.

    Its own sockets are asked: /proc/net/tcp is read in parts, and sockets that come and go meanwhile shift the rest.
    """
    found = set()
    for _, mine in _sockets():
        with mine:
            if mine.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(mine.getsockname()[:2])
    return found


def _abort(group: Any) -> None:
    with contextlib.suppress(Exception):  # another thread has given it up meanwhile, or it takes too long
        names = dist.get_backend(group)
        for name, device in _ABORTABLE.items():
            if name in names:
                backend = group._get_backend(torch.device(device))
                backend._set_default_timeout(datetime.timedelta(seconds=ABORT_S))  # for which `abort` itself may wait
                backend.abort()


def _shut_down_all(listeners: set[Address], how: int, held: dict[str, socket.socket]) -> None:
    """Shut down this process' connections to and from these addresses; they stay open by what is put into `held`, once
    each, by the kernel's name."""
    ends = {_plain(*address) for address in listeners}
    for connection in held.values():
        with contextlib.suppress(OSError):  # its peer's end was first
            connection.shutdown(how)
    for name, connection in _sockets():
        if name in held or not _joins(connection, ends):
            connection.close()
            continue
        held[name] = connection
        with contextlib.suppress(OSError):  # its peer has gone meanwhile
            connection.shutdown(how)


def _sockets() -> Iterator[tuple[str, socket.socket]]:
    """This process' TCP sockets by the kernel's name, a duplicate of each, which the caller is to close."""
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            name = os.readlink(entry.path)
            if name.startswith("socket:"):
                mine = socket.socket(fileno=os.dup(int(entry.name)))
                if mine.family in (socket.AF_INET, socket.AF_INET6) and mine.type == socket.SOCK_STREAM:
                    yield name, mine
                else:
                    mine.close()


def _watched() -> set[str]:
    """This process' sockets that something waits for by epoll, as gloo does, by the kernel's name."""
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(entry.path) == "anon_inode:[eventpoll]":
                for line in Path(f"/proc/self/fdinfo/{entry.name}").read_text().splitlines():
                    if line.startswith("tfd:"):
                        found.add(os.readlink(f"/proc/self/fd/{line.split()[1]}"))
    return found


def _joins(connection: socket.socket, listeners: set[Address]) -> bool:
    """Whether it is a connection that one of these took, or was asked for."""
    try:
        ends = {_plain(*connection.getsockname()[:2]), _plain(*connection.getpeername()[:2])}
    except OSError:  # it listens, or its peer has gone
        return False
    return not ends.isdisjoint(listeners)


def _plain(host: str, port: int) -> Address:
    """A socket for both of IPv6 and IPv4 shows the latter's addresses within the former's."""
    return host.removeprefix("::ffff:"), port
