"""Copies that go out: a slot to each peer, side by side; to a peer by as many flows as fill the link to it."""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from regrow.control.values import Peer
from regrow.errors import CheckpointError, first_line
from regrow.state.memory import held as files
from regrow.state.memory.held import Snapshot, copy_name
from regrow.state.memory.ranges import Address, Connection, connected
from regrow.state.memory.slots import MAGIC, open_slot, reading
from regrow.state.memory.threads import Threads
from regrow.state.memory.transport import Session, Transport

MAP_S = 60.0  # for a peer to map the memory of all slots of a node, one after another


class Outgoing:
    """Of one keeper."""

    def __init__(self, node: str, transport: Transport, secret: Callable[[], bytes]) -> None:
        self._node, self._transport, self._secret = node, transport, secret
        self._sessions: dict[tuple[Address, bytes], Session] = {}  # by what they prove: the secret of one driver
        self._meeting = threading.Lock()

    def keep(self, peers: Iterable[Peer]) -> None:
        """Sessions with all others end, and those of an earlier driver."""
        current = {(peer.address, self._secret()) for peer in peers}
        with self._meeting:
            over = [self._sessions.pop(each) for each in self._sessions.keys() - current]
        for session in over:
            session.close()

    def push(self, snapshot: Snapshot, peers: tuple[Peer, ...]) -> bool:
        """Copy a slot to the peers, side by side; whether it is still the same: training may go on in it, where nothing
        of its step was committed. Raises Refused."""

        def push(peer: Peer) -> None:
            begun = time.monotonic()
            try:
                self._push(snapshot, peer)
            except CheckpointError as error:
                if not _is_overwritten(snapshot):  # else what was sent of it is torn, and no fault of the peer
                    raise Refused(peer.node, time.monotonic() - begun, first_line(error)) from error

        copies = Threads(len(peers), "keeper-copy")
        try:
            pushing = [copies.submit(push, peer) for peer in peers[1:]]
            for peer in peers[:1]:
                push(peer)
            for each in pushing:
                each.result()
        finally:
            copies.close()
        return not _is_overwritten(snapshot)

    def _push(self, snapshot: Snapshot, peer: Peer) -> None:
        """Copy a slot with its checksums to the peer, which checks them. Raises CheckpointError.

        A copy that is there is left alone: its step may be committed by now, and no other node have it.
        """
        path, size = snapshot.path, snapshot.header.offsets[-1]
        beside = files.read_beside(path)
        # until the peer has all of it: what is sent of a file is not copied, and may wait in the socket
        with reading(path) as file, connected(peer.address, self._secret()) as connection:
            name = copy_name(path.name, self._node)
            if _has_copy(connection, name, beside):
                return
            put = {"op": "put", "file": name, "bytes": size, "header_sha256": snapshot.held.header_sha256}
            connection.send(put | {"by": self._transport.name}, beside)
            if not connection.readable(MAP_S):
                raise CheckpointError(f"the peer has no memory for it after {MAP_S:.0f} s")
            place = _unless_refused(connection.receive())
            self._session(peer).put(file, len(MAGIC), size, place["place"])
            connection.send({"op": "seal"})
            _unless_refused(connection.receive())

    def _session(self, peer: Peer) -> Session:
        """With the secret of now."""
        key = peer.address, self._secret()
        with self._meeting:
            session = self._sessions.get(key)
            if session is None:
                session = self._sessions[key] = self._transport.connect(*key)
        return session


def _is_overwritten(snapshot: Snapshot) -> bool:
    with contextlib.suppress(CheckpointError):
        return open_slot(snapshot.path) != snapshot.header
    return False


class Refused(CheckpointError):
    """A peer does not take a copy."""

    def __init__(self, peer: str, tried_s: float, why: str) -> None:
        super().__init__(why)
        self.peer, self.tried_s = peer, tried_s


def _has_copy(connection: Connection, file: str, beside: bytes) -> bool:
    """Whether a peer holds a file whole, with these very checksums."""
    connection.send({"op": "describe", "file": file})
    answer = connection.receive()
    if "header" not in answer:
        return False
    header, crc = connection.body[: answer["header"]], connection.body[answer["header"] :]
    return hashlib.sha256(header).hexdigest().encode() + crc == beside


def _unless_refused(answer: dict[str, Any]) -> dict[str, Any]:
    """A peer's answer. Raises CheckpointError where it is none, or an error."""
    if "error" in answer or not answer:
        raise CheckpointError(f"the peer refused it: {answer.get('error', 'it is gone')}")
    return answer
