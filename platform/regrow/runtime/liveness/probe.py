"""Which members of a broken group are dead: known from the network at once, seconds before Ray says so.

Each worker listens at a port for as long as its process lives. Where a connection is refused that once was taken, the
process is gone: its host says so, whether a worker or everything on the node was killed. A host that does not answer
proves nothing, and is left to others (`control.health`, Ray itself). A connection that is taken proves only that
the host's kernel runs; the one byte that the process then sends proves that it does. Keepers listen in the same way,
for the connection that is held to each (`runtime.liveness.connections`).
"""

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from regrow.control.membership import Member

AT_ONCE = 512  # connections
ANSWER_S = 0.5  # for a host to take or refuse one
ASK_AGAIN_S, ASKED_PER_S = 0.1, 4000.0  # between roll calls, and more where many are asked
OLD_S = 5.0  # an answer that was not taken by then is of another time
MOST_HELD = 64  # connections to one process
TAKE_AGAIN_S = 0.05  # after a connection could not be taken, as by a process that has no descriptor left
RUNS = b"\x01"  # said to what connects


class Lifeline:
    """Takes connections and holds them, as long as this process lives. One that is stopped takes them still, and says
    nothing."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self._closed = False
        threading.Thread(target=self._run, name="lifeline", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._socket, selectors.EVENT_READ)
            while not self._closed:
                for ready in [key.fileobj for key, _ in waiting.select()]:
                    if ready is self._socket:
                        self._take(waiting)
                    else:  # its other end has closed it
                        waiting.unregister(ready)
                        ready.close()  # type: ignore[union-attr]
            for key in list(waiting.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]

    def _take(self, waiting: selectors.BaseSelector) -> None:
        """A connection that waits; later, where there is no descriptor or memory for it now."""
        try:
            connection = self._socket.accept()[0]
        except OSError:
            time.sleep(TAKE_AGAIN_S)
            return
        if len(waiting.get_map()) > MOST_HELD:
            connection.close()
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(OSError):  # it has gone again
            connection.send(RUNS)
        waiting.register(connection, selectors.EVENT_READ)


class RollCall:
    """Asks on a thread of its own: no method waits."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="roll-call")
        self.reached: dict[str, Member] = {}  # by id: a member that was never reached cannot be missed
        self.asked: Future[set[str]] | None = None
        self.ask_at = 0.0
        self.hailed: tuple[float, Future[set[str]]] | None = None  # and when

    def meet(self, members: Iterable[Member]) -> None:
        """A group trains: see whether its members can be reached."""
        members = list(members)
        for gone in self.reached.keys() - {member.id for member in members}:
            del self.reached[gone]
        new = [member for member in members if member.lifeline and member.id not in self.reached]
        if new:
            self.thread.submit(self._meet, new)

    def gone(self, missing: Sequence[Member], now: float) -> set[str]:
        """Those of the members asked last that are dead, by id. Call often, for as long as one is missing."""
        asked = self.asked
        if asked is None:
            known = [member for member in missing if member.id in self.reached]
            if known and now >= self.ask_at:
                self.asked = self.thread.submit(_refused, known)
            return set()
        if not asked.done():
            return set()
        self.asked, self.ask_at = None, now + max(ASK_AGAIN_S, len(missing) / ASKED_PER_S)
        return asked.result()

    def running(self, nodes: Collection[str]) -> set[str]:
        """Those of the nodes asked last on which some member said that it runs. Call often, as for `gone`."""
        hailed, self.hailed = self.hailed, None
        if hailed is None or (hailed[1].done() and time.monotonic() - hailed[0] > OLD_S):
            those = frozenset(nodes)  # a tuple of all nodes, where the coordinator's own network is away
            known = [member for member in self.reached.values() if member.node in those]
            if known:
                self.hailed = time.monotonic(), self.thread.submit(_running, known)
            return set()
        if hailed[1].done():
            return hailed[1].result()
        self.hailed = hailed
        return set()

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)

    def _meet(self, members: Sequence[Member]) -> None:
        for member, error in _knock(members):
            if not error:
                self.reached[member.id] = member


def _refused(members: Sequence[Member]) -> set[str]:
    return {member.id for member, error in _knock(members) if error == errno.ECONNREFUSED}


def _running(members: Sequence[Member]) -> set[str]:
    """The nodes of those whose processes say that they run."""
    return {member.node for member, error in _knock(members, until=selectors.EVENT_READ) if not error}


def _knock(members: Sequence[Member], *, until: int = selectors.EVENT_WRITE) -> list[tuple[Member, int]]:
    """Connect to each; the errors, 0 where there was none, of those whose host answered in time, or which said
    something in time, where it is waited `until` they can be read."""
    answers = []
    for begin in range(0, len(members), AT_ONCE):
        with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as sockets:
            for member in members[begin : begin + AT_ONCE]:
                family = socket.AF_INET6 if ":" in member.host else socket.AF_INET
                connection = sockets.enter_context(socket.socket(family, socket.SOCK_STREAM))
                connection.setblocking(False)
                error = connection.connect_ex((member.host, member.lifeline))
                if error == errno.EINPROGRESS or not error:
                    waiting.register(connection, until, member)
                else:
                    answers.append((member, error))
            give_up_at = time.monotonic() + ANSWER_S
            while waiting.get_map() and (left_s := give_up_at - time.monotonic()) > 0:
                for key, _ in waiting.select(left_s):
                    answers.append((key.data, _error(key.fileobj, until)))  # type: ignore[arg-type]
                    waiting.unregister(key.fileobj)
    return answers


def _error(connection: socket.socket, until: int) -> int:
    """Of a connection that is ready; one that ended without a word was not taken by a process that runs."""
    error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error or until == selectors.EVENT_WRITE:
        return error
    try:
        return 0 if connection.recv(1) == RUNS else errno.ECONNRESET
    except OSError as problem:
        return problem.errno or errno.ECONNRESET
