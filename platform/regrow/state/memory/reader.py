"""Restoring from snapshots: this node's by memory map, other nodes' from their keepers, exactly the ranges needed.

Which rank of the old layout holds what follows from shapes alone, so that only those files are opened that have
something to give. Every byte is checked against the checksums that a keeper made when the snapshot was sealed. A holder
that is gone or whose bytes are damaged is left out, and what it was to give comes from another copy.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from regrow.errors import CheckpointError
from regrow.state.checksums import CHUNK_BYTES, Crc, checksums, whole_chunks
from regrow.state.entries import Entry, fill
from regrow.state.layout import ITEM_BYTES, Span, parts_that_hold, shard_span
from regrow.state.memory.held import Holder, Snapshot, open_snapshot
from regrow.state.memory.ranges import Connection, Ranges, connected
from regrow.state.memory.slots import SlotHeader
from regrow.state.reshard import Read, Source, nearest, plan_reads

OWN, PEER = 0, 1  # distances
PIECE_BYTES = 64 * CHUNK_BYTES  # that are checked, then copied


@dataclass
class Restored:
    """What a restore read."""

    scalars: dict[str, int]
    own_bytes: int = 0  # from this node's memory
    peer_bytes: int = 0
    problems: tuple[str, ...] = ()  # holders that were left out, and why


class Unrestorable(CheckpointError):
    """No snapshot gives the state."""


def restore_snapshot(
    entries: Sequence[Entry],
    holders: Sequence[Holder],
    *,
    node: str,
    folder: Path,
    secret: bytes,
    reader: int = 0,
) -> Restored:
    """Fill this rank's entries from the holders of one committed step, whatever layout it was taken in. Local.

    `node` and `folder` are this node and its keeper's folder, `reader` spreads ranks over equal copies. Strict: a
    missing, extra, reshaped or retyped entry is an Unrestorable that names it, and so is an element that no holder
    gives. Entries may hold parts of it then.
    """
    left = list(holders)
    problems: list[str] = []
    while True:
        try:
            chosen = _choose(left, node, reader)
            by_holder = _plan(entries, chosen)
        except CheckpointError as error:
            raise Unrestorable("; ".join([str(error), *problems])) from error
        restored = Restored({}, problems=tuple(problems))
        for holder, reads in by_holder.items():
            try:
                scalars, own, peer = _take(holder, reads, entries, node=node, folder=folder, secret=secret)
            except CheckpointError as error:
                problems.append(f"{holder.name}: {error}")
                left.remove(holder)
                break
            restored.scalars = scalars
            restored.own_bytes += own
            restored.peer_bytes += peer
        else:
            return restored


def _choose(holders: Sequence[Holder], node: str, reader: int) -> dict[tuple[int, int], Holder]:
    """For each (block, shard) of the old layout the copy that this reader takes."""
    copies: dict[tuple[int, int], list[tuple[int, Holder]]] = defaultdict(list)
    for holder in sorted(holders, key=lambda holder: holder.name):
        part = holder.held.part
        copies[part.block, part.shard].append((OWN if holder.node == node else PEER, holder))
    return {place: nearest(same, reader=reader + place[1]) for place, same in copies.items()}


def _plan(entries: Sequence[Entry], chosen: dict[tuple[int, int], Holder]) -> dict[Holder, list[Read]]:
    """What to read from whom. Raises CheckpointError where a shard is missing."""
    if not chosen:
        raise CheckpointError("no snapshot can be read: nobody holds one")
    num_shards = next(iter(chosen.values())).held.part.num_shards
    by_name = {holder.name: holder for holder in chosen.values()}
    sources = [
        Source(chosen[place].name, shard_span(entry.span, chosen[place].held.part))
        for entry in entries
        for place in parts_that_hold(entry.span, num_shards)
        if place in chosen
    ]
    by_holder: dict[Holder, list[Read]] = defaultdict(list)
    for read in plan_reads(sources, [entry.span for entry in entries]):
        by_holder[by_name[read.source.file]].append(read)
    if not by_holder:  # this rank holds nothing; the scalars are for it too
        by_holder[next(iter(chosen.values()))] = []
    return by_holder


def _take(
    holder: Holder, reads: Sequence[Read], entries: Sequence[Entry], *, node: str, folder: Path, secret: bytes
) -> tuple[dict[str, int], int, int]:
    """Carry out the reads from one holder: (scalars, bytes read here, bytes read from a peer)."""
    if holder.node == node:
        snapshot = open_snapshot(folder / holder.held.file)
        if snapshot is None:
            raise CheckpointError("it is not there any more")
        _check(snapshot, holder, entries)
        num_bytes = 0
        with snapshot.payload() as payload:
            for piece in _pieces(snapshot, reads):
                piece.put(payload[piece.begin : piece.end], entries)
                num_bytes += piece.end - piece.begin
        return snapshot.header.scalars, num_bytes, 0
    with connected(holder.address, secret) as connection:
        snapshot = _describe(connection, holder)
        _check(snapshot, holder, entries)
        pieces = list(_pieces(snapshot, reads))
        ranges = [(piece.begin, piece.end - piece.begin) for piece in pieces]
        connection.send({"op": "get", "file": holder.held.file, "ranges": _joined(ranges)})
        buffer: memoryview = np.empty(max((size for _, size in ranges), default=0), np.uint8).data
        for piece, (_, size) in zip(pieces, ranges, strict=True):
            connection.receive_into(buffer[:size])
            piece.put(buffer[:size], entries)
    return snapshot.header.scalars, 0, sum(size for _, size in ranges)


def _joined(ranges: Ranges) -> list[tuple[int, int]]:
    """The same bytes in the same order, neighbours as one range."""
    joined: list[tuple[int, int]] = []
    for offset, size in ranges:
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((offset, size))
    return joined


class _Piece(NamedTuple):
    """Some elements of a read, and the whole chunks of the file that they lie in."""

    source: Span
    want: int  # index of the entry
    start: int  # elements of the tensor
    stop: int
    begin: int  # byte in the file
    end: int
    crc: Crc
    inner: slice  # of the bytes between them

    def put(self, chunks: memoryview, entries: Sequence[Entry]) -> None:
        """Check the chunks, and copy what is wanted of them."""
        if checksums(chunks).tobytes() != self.crc.tobytes():
            raise CheckpointError(f"{self.source.name} fails its checksum")
        entry = entries[self.want]
        fill(entry.memory[self.start - entry.span.start : self.stop - entry.span.start], chunks[self.inner])


def _pieces(snapshot: Snapshot, reads: Sequence[Read]) -> Iterator[_Piece]:
    """Reads in pieces that a processor's cache holds: they are copied right after they were checked."""
    header = snapshot.header
    where = zip(header.offsets, header.first_chunks, strict=True)
    places = {span.name: place for span, place in zip(header.spans, where, strict=False)}
    for read in reads:
        span = read.source.span
        offset, first = places[span.name]
        item = ITEM_BYTES[span.dtype]
        at, end = (read.start - span.start) * item, (read.stop - span.start) * item
        while at < end:
            stop = min(end, (at // PIECE_BYTES + 1) * PIECE_BYTES)
            begin_chunks, end_chunks, chunks = whole_chunks(at, stop, span.num_bytes)
            yield _Piece(
                source=span,
                want=read.want,
                start=span.start + at // item,
                stop=span.start + stop // item,
                begin=offset + begin_chunks,
                end=offset + end_chunks,
                crc=snapshot.crc[first + chunks.start : first + chunks.stop],
                inner=slice(at - begin_chunks, stop - begin_chunks),
            )
            at = stop


def _describe(connection: Connection, holder: Holder) -> Snapshot:
    connection.send({"op": "describe", "file": holder.held.file})
    answer = connection.receive()
    if not answer or "error" in answer:
        raise CheckpointError(answer.get("error", "its keeper is gone"))
    header = SlotHeader.decode(connection.receive_bytes(answer["header"]))
    crc = np.frombuffer(connection.receive_bytes(answer["crc"]), "<u4")
    return Snapshot(Path(holder.held.file), header, crc)


def _check(snapshot: Snapshot, holder: Holder, entries: Sequence[Entry]) -> None:
    """Raises CheckpointError unless the file is the committed one and holds what follows from the entries' shapes."""
    if snapshot.held != holder.held:
        raise CheckpointError("it is not the snapshot that was committed")
    have = {span.name: span for span in snapshot.header.spans}
    part = holder.held.part
    want = {entry.span.name: shard_span(entry.span, part) for entry in entries}
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            raise CheckpointError(
                f"{name}: the snapshot has {have.get(name, 'no such tensor')}, the model {want.get(name, 'none')}"
            )
