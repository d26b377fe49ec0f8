"""Restoring from snapshots: this node's from its memory, other nodes' from their keepers, exactly the ranges needed.

Which rank of the old layout holds which boxes follows from the placement table, so that only those files are opened
that have something to give. Every byte is checked against the checksums that a keeper made when the snapshot was
sealed. A holder that is gone or whose bytes are damaged is left out, and what it was to give comes from another copy.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regrow.control.values import Scalar
from regrow.errors import CheckpointError
from regrow.plan.boxes import ITEM_BYTES, Box, Piece
from regrow.plan.mesh import ALONE, Coordinates
from regrow.plan.placement import kind_of, place_number, placed, placed_all, stage_of, that_hold
from regrow.state.checksums import CHUNK_BYTES, GROUP, crc32, crc_of_runs, num_chunks
from regrow.state.entries import Entry, bytes_of, fill
from regrow.state.memory.held import Snapshot, open_snapshot
from regrow.state.memory.holders import Holder, Holders
from regrow.state.memory.ranges import Connection, connected
from regrow.state.memory.slots import SlotHeader
from regrow.state.memory.transport import TcpTransport, Transport
from regrow.state.reshard import Read, Source, Window, nearest, plan_reads, windows

OWN, PEER = 0, 1  # distances
PIECE_BYTES = GROUP * CHUNK_BYTES  # read and checked at once


@dataclass
class Restored:
    """What a restore read."""

    scalars: dict[str, Scalar]
    own_bytes: int = 0  # from this node's memory
    peer_bytes: int = 0
    problems: tuple[str, ...] = ()  # holders that were left out, and why


class Unrestorable(CheckpointError):
    """No snapshot gives the state."""


def restore_snapshot(
    entries: Sequence[Entry],
    holders: Holders,
    *,
    node: str,
    folder: Path,
    secret: bytes,
    reader: int = 0,
    place: Coordinates = ALONE,
    transport: Transport | None = None,
) -> Restored:
    """Fill this rank's entries from the holders of one committed step, whatever layout it was taken in. Local.

    Bytes of other nodes come by `transport`, TCP where it is None.

    `node` and `folder` are this node and its keeper's folder, `reader` spreads ranks over equal copies, `place` is
    this rank's in the new layout, which says what other stages have. Strict: a missing, extra, reshaped or retyped
    entry is an Unrestorable that names it, and so is an element that no holder gives. Entries may hold parts of it
    then.
    """
    left, by = holders, transport or TcpTransport()
    problems: list[str] = []
    while True:
        try:
            by_holder = plan_from([entry.box for entry in entries], left, node, reader)
        except CheckpointError as error:
            raise Unrestorable("; ".join([str(error), *problems])) from error
        restored = Restored({}, problems=tuple(problems))
        for holder, reads in by_holder.items():
            try:
                taken = _take(holder, reads, entries, node, folder, secret=secret, place=place, transport=by)
            except CheckpointError as error:
                problems.append(f"{holder.name}: {error}")
                left = left.without(holder)
                break
            restored.scalars = taken.scalars
            restored.own_bytes += taken.own_bytes
            restored.peer_bytes += taken.peer_bytes
        else:
            return restored


def plan_from(boxes: Sequence[Box], holders: Holders, node: str, reader: int) -> dict[Holder, list[Read]]:
    """What of these boxes to read from which node. Raises CheckpointError where elements are missing."""
    if not holders:
        raise CheckpointError("no snapshot can be read: no node holds one")
    mesh = holders.mesh

    @cache
    def by_place(axes: tuple[str, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The places along these axes of all files, in order, and which files these are."""
        found = holders.places(axes)
        order = np.argsort(found, kind="stable")
        return found[order], order

    taken: dict[tuple[tuple[str, int], ...], Holder] = {}
    read_anyway: set[Holder] = set()

    def sources_of(wanted: Box) -> Iterator[Source]:
        for place in that_hold(wanted, mesh):
            key = tuple(place.items())
            if key not in taken:
                found, order = by_place(tuple(place))
                at = place_number(mesh, place)
                first, last = np.searchsorted(found, [at, at + 1])
                same = [holders[int(each)] for each in order[first:last]]
                if same:  # nearest: of this node, then those that are read anyway
                    far = [2 * (holder.node != node) + (holder not in read_anyway) for holder in same]
                    taken[key] = nearest(list(zip(far, same, strict=True)), reader=reader + place["dp_shard"])
                    read_anyway.add(taken[key])
            if key in taken:
                box = placed(wanted, taken[key].held.coordinates)
                yield Source(taken[key].name, Piece.all_of(box))

    planned: dict[Hashable, list[Read]] = {}  # once for each kind: blocks of a model are alike
    by_file: dict[str, list[Read]] = defaultdict(list)
    for want, box in enumerate(boxes):
        kind = kind_of(box, mesh)
        if kind not in planned:
            planned[kind] = plan_reads(sources_of(box), [Piece.all_of(box)])
        for read in planned[kind]:
            by_file[read.source.file].append(_like(read, box, want))
    by_name = {holder.name: holder for holder in read_anyway}
    by_holder = {by_name[file]: reads for file, reads in by_file.items()}
    if not by_holder:  # this rank holds nothing; the scalars are for it too
        by_holder[min(holders, key=lambda holder: holder.node != node)] = []
    return by_holder


def _like(read: Read, box: Box, want: int) -> Read:
    """The same read for another box of its kind."""
    source = read.source.piece
    its = Box(box.name, box.shape, source.box.offsets, source.box.sizes, box.dtype)
    return Read(Source(read.source.file, Piece(its, source.start, source.stop)), want, read.runs)


def _take(
    holder: Holder,
    reads: Sequence[Read],
    entries: Sequence[Entry],
    node: str,
    folder: Path,
    *,
    secret: bytes,
    place: Coordinates,
    transport: Transport,
) -> Restored:
    """Carry out the reads from one holder."""
    if holder.node == node:
        snapshot = open_snapshot(folder / holder.held.file)
        if snapshot is None:
            raise CheckpointError("it is not there any more")
        _check(snapshot, holder, entries, place)
        with snapshot.opened() as file:
            num_bytes = _fill(entries, _pieces(snapshot, reads), lambda piece, data: _read(file, piece.begin, data))
        return Restored(snapshot.header.scalars, own_bytes=num_bytes)
    with connected(holder.address, secret) as connection:
        snapshot = _describe(connection, holder)
        _check(snapshot, holder, entries, place)
    pieces = _pieces(snapshot, reads)
    with (
        closing(transport.connect(holder.address, secret)) as session,
        session.get(holder.held.file, _joined(pieces)) as receive_into,
    ):
        num_bytes = _fill(entries, pieces, lambda _, data: receive_into(data))
    return Restored(snapshot.header.scalars, peer_bytes=num_bytes)


def _fill(
    entries: Sequence[Entry],
    pieces: Sequence["PieceOfSnapshot"],
    read: Callable[["PieceOfSnapshot", memoryview], None],
) -> int:
    """Read pieces one after another, each checked while a processor's cache has it, to where they are wanted: right
    there where all of a piece is. Returns the bytes read."""
    buffer: memoryview = np.empty(max((piece.num_bytes for piece in pieces), default=0), np.uint8).data
    targets = {want: bytes_of(entries[want].memory) for want in {piece.want for piece in pieces}}
    for piece in pieces:
        place, target = piece.place, targets[piece.want]
        data = buffer[: piece.num_bytes] if place is None or target is None else target[place]
        read(piece, data)
        piece.check(data)
        if place is None or target is None:
            fill(entries[piece.want].memory, piece.window.runs, data)
    return sum(piece.num_bytes for piece in pieces)


def _read(file: BinaryIO, at: int, data: memoryview) -> None:
    """Bytes of a file from `at` on. Raises CheckpointError, also where the hardware has given up a page of them."""
    got = 0
    while got < len(data):
        try:
            with data[got:] as rest:
                now = os.preadv(file.fileno(), [rest], at + got)
        except OSError as error:
            raise CheckpointError(f"{file.name}: cannot be read: {error.strerror}") from error
        if not now:
            raise CheckpointError(f"{file.name}: is cut short")
        got += now


class PieceOfSnapshot(NamedTuple):
    """A window of a read, where its chunks lie in the file, and what checks them."""

    name: str  # of its tensor
    want: int  # index of the wanted box
    window: Window
    begin: int  # byte in the file
    num_bytes: int
    place: slice | None  # the bytes of the wanted box that all of it is; None where parts of it are wanted, or apart
    crc: int  # of all its bytes

    def check(self, chunks: memoryview) -> None:
        """Raises CheckpointError where these are not its bytes."""
        if crc32(chunks) != self.crc:
            raise CheckpointError(f"{self.name} fails its checksum")


def _joined(pieces: Sequence[PieceOfSnapshot]) -> list[tuple[int, int]]:
    """Their (offset, bytes) in the file, in the same order, neighbours as one range."""
    joined: list[tuple[int, int]] = []
    for piece in pieces:
        if joined and sum(joined[-1]) == piece.begin:
            joined[-1] = (joined[-1][0], joined[-1][1] + piece.num_bytes)
        else:
            joined.append((piece.begin, piece.num_bytes))
    return joined


def _pieces(snapshot: Snapshot, reads: Sequence[Read]) -> list[PieceOfSnapshot]:
    """Reads in pieces that a processor's cache holds."""
    header = snapshot.header
    where = zip(header.offsets, header.first_chunks, strict=True)
    places = {box.name: place for box, place in zip(header.boxes, where, strict=False)}
    found: list[tuple[str, int, Window, int, int, slice | None]] = []
    chunks: list[tuple[int, int]] = []  # first and last of each
    for read in reads:
        box = read.source.piece.box
        (offset, first), item = places[box.name], ITEM_BYTES[box.dtype]
        for window in windows(read, PIECE_BYTES):
            begin, end, (_, target, length), several = window
            is_all = several is None and length * item == end - begin
            place = slice(target * item, (target + length) * item) if is_all else None
            found.append((box.name, read.want, window, offset + begin, end - begin, place))
            chunks.append((first + begin // CHUNK_BYTES, first + num_chunks(end)))
    crc = crc_of_runs(snapshot.crc, chunks, [num_bytes for *_, num_bytes, _ in found])
    return [PieceOfSnapshot(*each, of_it) for each, of_it in zip(found, crc, strict=True)]


def _describe(connection: Connection, holder: Holder) -> Snapshot:
    connection.send({"op": "describe", "file": holder.held.file})
    answer = connection.receive()
    if not answer or "error" in answer:
        raise CheckpointError(answer.get("error", "its keeper is gone"))
    header = SlotHeader.decode(connection.body[: answer["header"]])
    crc = np.frombuffer(connection.body[answer["header"] :], "<u4")
    if len(crc) != header.first_chunks[-1]:
        raise CheckpointError(f"its keeper has {len(crc)} checksums of {header.first_chunks[-1]}")
    return Snapshot(Path(holder.held.file), header, crc)


def _check(snapshot: Snapshot, holder: Holder, entries: Sequence[Entry], place: Coordinates) -> None:
    """Raises CheckpointError unless the file is the committed one and holds what follows from the entries' shapes.

    Of what it holds besides, other stages of the reader's pipeline have to have it; of what it lacks, other stages of
    its own.
    """
    if snapshot.held != holder.held:
        raise CheckpointError("it is not the snapshot that was committed")
    there = holder.held.coordinates
    expected = placed_all((entry.box for entry in entries), there)
    if list(snapshot.header.boxes) == expected:
        return
    have, want = ({box.name: box for box in boxes} for boxes in (snapshot.header.boxes, expected))
    for name in sorted(have.keys() | want.keys()):
        if name not in want and stage_of(name, place.mesh) not in (None, place.along("pp")[0]):
            continue
        if name not in have and stage_of(name, there.mesh) not in (None, there.along("pp")[0]):
            continue
        if have.get(name) != want.get(name):
            have_it, want_it = (f"{of[name]!r}" if name in of else "no such tensor" for of in (have, want))
            raise CheckpointError(f"{name}: the snapshot has {have_it}, the model {want_it}")
