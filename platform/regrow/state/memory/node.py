"""One node's keeper, as far as it needs no Ray: it holds the node's snapshots and copies of other nodes'.

    trainer --datagram: sealed--> checksums -> copy to each peer -> report (one a node and step) -> commit -> file

Slots go side by side, each as soon as it is sealed: the first are on their way while others are still copied.

Everything that it knows is in its folder (`held`), and is found there again by a keeper that starts anew.
"""

import contextlib
import fcntl
import logging
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regrow.control.values import NEVER, CopyTimes, Digest, Peer, SnapshotAck, Version
from regrow.errors import CheckpointError, first_line
from regrow.state.disk.upload import WriteOrder, Written, write_parts
from regrow.state.memory import held as files
from regrow.state.memory import link
from regrow.state.memory.arenas import remove_abandoned
from regrow.state.memory.held import Held
from regrow.state.memory.incoming import Incomings
from regrow.state.memory.outgoing import Outgoing
from regrow.state.memory.ranges import Address, Connection, RangeServer, connected
from regrow.state.memory.slots import (
    HELD_BY_ALL,
    NOTICES,
    SLOT,
    Committed,
    open_slot,
    reading,
    tell_safe,
)
from regrow.state.memory.threads import Threads
from regrow.state.memory.transport import FILL, TcpTransport, Transport
from regrow.state.memory.unneeded import Unneeded

LOCK = "lock"  # held by the folder's keeper
MAKING_S = 60.0  # for a keeper to lock its folder once it is there, or to delete what is in it
UNHEARD_S = 1.0  # without work, and without a commit of what was reported: peers are asked
RETRY_S = 2.0  # after a snapshot could not be copied to a peer
DELETE_S, AGAIN_S = 5.0, 0.05  # for a folder to be gone once its run is over; between attempts
AT_ONCE = 8  # slots that are checked and copied side by side

Complain = Callable[[str, str, float], None]  # what is wrong; to which peer it cannot copy, and how long it tried
Work = queue.Queue[str | None]  # names of slots that were sealed; None: no more

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Ready:
    """A slot that is checked and copied, and what that took."""

    held: Held
    num_bytes: int
    digest: Digest | None
    begun: float
    check_s: float
    send_s: float


class KeeperNode:
    """Runs on threads of its own from `start` to `close`."""

    def __init__(
        self,
        folder: Path,
        *,
        node: str,
        host: str,
        secret: bytes,
        run_id: str,
        report: Callable[[SnapshotAck], None],
        complain: Complain = lambda text, peer, tried_s: log.warning(text),
        transport: Transport | None = None,
    ) -> None:
        """`report` is told of steps that are safe, `complain` of what keeps one from it; both on a keeper's thread.
        Bytes of copies go by `transport`, TCP where it is None."""
        self.folder, self.node, self.secret, self.run_id = folder, node, secret, run_id
        self.report, self.complain = report, complain
        files.claim(folder)
        remove_abandoned(folder)
        self.server = RangeServer(host, lambda: self.secret, self._answer)
        self._transport = transport or TcpTransport()
        self._incoming = Incomings(self._transport)
        self._unneeded = Unneeded(folder, self._transport, self._incoming)
        self._outgoing = Outgoing(node, self._transport, lambda: self.secret)
        self._peers: tuple[Peer, ...] = ()
        self._work: Work = queue.Queue()  # of the thread that copies to the peers
        self._ready: dict[Version, dict[str, _Ready]] = {}  # by file
        self._heard = Committed.read(folder)  # of the coordinator, or by way of a peer
        self._agreed = NEVER  # the newest step that ranks, in its place, have said to be held by all
        self._failed = False  # something waits to be tried again
        self._running = False
        self._lock, self._checking = threading.Lock(), threading.Lock()
        self._serving = open(folder / LOCK, "wb")  # noqa: SIM115 (held open for as long as the lock is)
        fcntl.flock(self._serving, fcntl.LOCK_SH)
        notices = folder / NOTICES
        notices.unlink(missing_ok=True)
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notices.bind(str(notices))
        self._notices.settimeout(RETRY_S)
        self._threads = [
            threading.Thread(target=target, name=f"keeper-{target.__name__}", daemon=True)
            for target in (self.server.serve, self._listen)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        with self._lock:
            self._running = True
            self._start_to_process()

    @property
    def address(self) -> Address:
        return self.server.address

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        """Copy to these from now on, what was sealed and is not committed too; it is reported again."""
        with self._lock:
            same, self._peers = peers == self._peers, peers
            ready = list(self._ready.items()) if same else []
            if not same:
                self._ready = {}
                if self._running:  # one of those before may have gone dark, and the thread wait for it: let it
                    self._work.put(None)
                    self._work = queue.Queue()
                    self._start_to_process()
            self._outgoing.keep(peers)
        for moment, found in ready:
            if len(found) == next(iter(found.values())).held.writers:
                self._report(moment, peers, again=True)
        self._look_again()

    def holdings(self) -> list[Held]:
        """Every sealed snapshot of the run in the folder whose checksums are there."""
        return files.holdings(self.folder, self.run_id)

    def held_by_all(self, version: Version) -> None:
        """Every node of the group does, say the ranks: as good as a commit, where none comes."""
        with self._lock:
            if version > self._heard.newest:
                heard = replace(self._heard, newest=version)
                heard.write(self.folder)  # where memory is full, the next notice is to try again
                self._agreed, self._heard = version, heard

    def committed(self, state: Committed) -> None:
        """The coordinator says what is committed: tell the trainers, drop the snapshots of older generations."""
        with self._lock:
            if state.number < self._heard.number:
                return
            said = state.newest
            state = replace(state, newest=max(said, self._agreed))  # it may have yet to hear what nodes hold by now
            state.write(self.folder)
            self._heard, self._agreed = state, NEVER if said == state.newest else self._agreed
            self._ready = {moment: found for moment, found in self._ready.items() if moment > state.newest}
        self._unneeded.give_back(state)

    def write(self, order: WriteOrder) -> Written:
        """Write this node's part of a committed snapshot to storage. Takes as long as that does; CheckpointError."""
        return write_parts(self.folder, self.holdings(), order, run_id=self.run_id)

    def close(self, *, delete: bool) -> None:
        """End; `delete`: leave nothing in memory."""
        self._put(None)
        self.server.close()
        self._outgoing.keep(())
        self._incoming.forget(deleted_only=False)
        self._transport.close()
        with contextlib.suppress(OSError):
            self._notices.shutdown(socket.SHUT_RDWR)
        self._notices.close()
        (self.folder / NOTICES).unlink(missing_ok=True)
        self._serving.close()
        if delete:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _listen(self) -> None:
        while (notice := _received(self._notices)) is not None:
            with self._going_on("is told of a snapshot in vain"):
                self._heed(notice)

    @contextlib.contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        """Whatever fails of this, as where memory is full: it is said, and the thread goes on."""
        try:
            yield
        except Exception as error:
            self._failed = True
            self.complain(f"node {self.node[:12]} {what}: {first_line(error)}", "", 0.0)

    def _heed(self, notice: bytes) -> None:
        if not notice:
            self._unneeded.give_back()
            if self._failed:
                self._look_again()
        elif notice.startswith(HELD_BY_ALL.encode()):
            self.held_by_all(Version(*map(int, notice.split()[-2:])))
        else:
            self._put(notice.decode())

    def _look_again(self) -> None:
        """Take up what is sealed, not ready and not committed, as if it had been sealed just now."""
        self._failed = False
        for name, version in _sealed(self.folder):
            if name not in self._ready.get(version, ()):
                self._put(name)

    def _put(self, name: str | None) -> None:
        with self._lock:
            self._work.put(name)

    def _start_to_process(self) -> None:
        threading.Thread(target=self._process, args=(self._work,), name="keeper-_process", daemon=True).start()

    def _process(self, work: Work) -> None:
        going, again = set[str](), set[str]()  # slots that are being taken; those that are to be, once more

        def take(name: str) -> None:
            try:
                self.take(self.folder / Path(name).name)
            except Exception as error:  # of one snapshot; the keeper goes on with the others
                if work is self._work:
                    self._failed = True
                    text = f"the snapshot in {name} on node {self.node[:12]} is not safe: {first_line(error)}"
                    self.complain(text, getattr(error, "peer", ""), getattr(error, "tried_s", 0.0))
            finally:
                with self._lock:
                    going.discard(name)
                    if name in again:
                        again.discard(name)
                        work.put(name)

        slots = Threads(AT_ONCE, "keeper-slot")
        while work is self._work:
            try:
                name = work.get(timeout=UNHEARD_S)
            except queue.Empty:
                with self._going_on("asks in vain what is committed"):
                    self._ask_what_is_committed()
                continue
            if name is None:
                break
            with self._lock:
                is_going = name in going
                (again if is_going else going).add(name)
            if not is_going:
                slots.submit(take, name)
        slots.close()

    def _ask_what_is_committed(self) -> None:
        """Where something was reported and nothing of it is: peers may hear a coordinator that this node does not."""
        for peer in self._peers if self._ready else ():
            with contextlib.suppress(CheckpointError):
                state = _what_is_committed(peer, self.secret)
                if state.number > self._heard.number:
                    self.committed(state)

    def take(self, path: Path) -> None:
        """Check a slot that was sealed, copy it to the peers, and report the node's step once all its ranks' are."""
        begun = time.monotonic()
        with self._checking:
            checking = time.monotonic()
            snapshot = files.take_checksums(path)
            check_s = time.monotonic() - checking
        if snapshot is None or snapshot.header.run_id != self.run_id:  # overwritten meanwhile
            return
        held = snapshot.held
        with self._lock:
            peers = self._peers
        sending = time.monotonic()
        if not self._outgoing.push(snapshot, peers):
            return
        send_s = time.monotonic() - sending
        with self._lock:
            if peers != self._peers:  # all of it again, for others
                return
            ready = self._ready.setdefault(held.moment, {})
            ready[held.file] = _Ready(held, snapshot.num_bytes, snapshot.digest, begun, check_s, send_s)
            if len(ready) < held.writers:
                return
        self._report(held.moment, peers)

    def _report(self, moment: Version, peers: tuple[Peer, ...], *, again: bool = False) -> None:
        ready = list(self._ready.get(moment, {}).values())
        digests = tuple(each.digest for each in ready if each.digest is not None)
        times = None if again or not ready else _times_of(ready)
        with self._lock, contextlib.suppress(OSError):  # for want of a coordinator alone
            tell_safe(self.folder, moment)
        self.report(SnapshotAck(self.node, moment, tuple(peer.node for peer in peers), digests=digests, times=times))

    def _answer(self, request: dict[str, Any], connection: Connection) -> None:
        """One request of a peer, of a newcomer or of a rank that restores."""
        if request["op"] == link.OP:
            link.answer(request, connection)
            return
        if request["op"] == "committed":
            connection.send(self._heard.to_plain())
            return
        if request["op"] == FILL:
            self._incoming.fill(request, connection)
            return
        path = self.folder / Path(request["file"]).name
        if request["op"] == "put":
            self._incoming.receive(path, request, connection)
        elif request["op"] == "describe":
            _describe(path, connection)
        elif request["op"] == "get":
            with reading(path) as file:  # the client has the checksums of what it asked for
                connection.send_file(file, [(offset, size) for offset, size in request["ranges"]])


def _sealed(folder: Path) -> Iterator[tuple[str, Version]]:
    """The slots of a keeper's folder that hold what is not committed, as far as the folder tells, and of which step."""
    newest = Committed.read(folder).newest
    for path in folder.glob(f"*{SLOT}"):
        header = None
        with contextlib.suppress(CheckpointError):
            header = open_slot(path)
        if header is not None and (version := Version(header.generation, header.step)) > newest:
            yield path.name, version


def _received(notices: socket.socket) -> bytes | None:
    """What a rank says; empty where none says anything for a while, None once this is closed."""
    try:
        return notices.recv(4096) or None
    except TimeoutError:
        return b""
    except OSError:
        return None


def _times_of(ready: Sequence[_Ready]) -> CopyTimes:
    """Of what has just become safe."""
    return CopyTimes(
        seconds=time.monotonic() - min(each.begun for each in ready),
        check_s=sum(each.check_s for each in ready),
        send_s=max(each.send_s for each in ready),
        bytes=sum(each.num_bytes for each in ready),
    )


def _describe(path: Path, connection: Connection) -> None:
    try:
        found = files.encoded(path)
    except CheckpointError as error:
        connection.send({"error": str(error)})
        return
    if found is None:
        connection.send({"error": f"{path.name} is not here"})
        return
    header, beside = found  # the client counts the checksums
    connection.send({"header": len(header)}, header + beside[files.SHA256_DIGITS :])


def _what_is_committed(peer: Peer, secret: bytes) -> Committed:
    """As far as a peer has heard. Raises CheckpointError where it does not say."""
    with connected(peer.address, secret) as connection:
        connection.send({"op": "committed"})
        answer = connection.receive()
    if not answer:
        raise CheckpointError("the peer is gone")
    return Committed.of_plain(answer)


def is_served(folder: Path) -> bool:
    """Whether a keeper's process has this folder. One without a lock that was used lately is being made or deleted."""
    try:
        with open(folder / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return not folder.exists() or time.time() - last_used(folder) < MAKING_S


def _is_left(folder: Path) -> bool:
    """Whether a keeper of this user made a folder and is gone. In another user's nothing is opened."""
    with contextlib.suppress(FileNotFoundError):  # it went just now
        return files.is_mine(folder) and not is_served(folder)
    return False


def take_over_leftovers(mine: Path, pattern: str, alive: Callable[[], set[str]]) -> None:
    """What keepers of the same run left on this host, as nodes that are gone: the newest is this one's now.

    The others are deleted: snapshots need the room. `pattern` are the run's folders, by whose ends `alive` tells nodes.
    """
    left = [folder for folder in mine.parent.glob(pattern) if folder != mine and _is_left(folder)]
    for folder in sorted(left, key=last_used, reverse=True) if left else ():
        if not any(folder.name.endswith(node) for node in alive()):
            with contextlib.suppress(OSError):
                if not mine.exists():
                    for signs in folder.glob("pulse-*"):  # of processes that are gone, too
                        signs.unlink()
                    folder.rename(mine)
            shutil.rmtree(folder, ignore_errors=True)


def delete_run(mine: Path, pattern: str) -> None:
    """A run is over: this keeper's folder goes, and what keepers that are gone have left of it on this host.

    Again, for a while, where something came to be in it meanwhile: a copy that was on its way, or a rank that begins.
    """
    give_up_at = time.monotonic() + DELETE_S
    while True:
        left = [folder for folder in mine.parent.glob(pattern) if folder == mine or _is_left(folder)]
        for folder in left:
            with contextlib.suppress(OSError):
                if files.is_mine(folder):
                    shutil.rmtree(folder)
        if not mine.exists() or time.monotonic() > give_up_at:
            return
        time.sleep(AGAIN_S)


def last_used(folder: Path) -> float:
    """When something in a keeper's folder last came or went, unix time; 0 for one that is gone."""
    newest = 0.0
    with contextlib.suppress(FileNotFoundError):
        for path in [folder, *folder.iterdir()]:
            with contextlib.suppress(FileNotFoundError):  # it went just now
                newest = max(newest, path.stat().st_mtime)
    return newest
