"""Restoring from snapshots: this node's by memory map, other nodes' from their keepers, exactly the ranges needed.

Which rank of the old layout holds what follows from shapes alone, so that only those files are opened that have
something to give. Every byte is checked against the checksums that a keeper made when the snapshot was sealed. A holder
that is gone or whose bytes are damaged is left out, and what it was to give comes from another copy.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from regrow.checkpoint.checksums import Crc, checksums, whole_chunks
from regrow.checkpoint.held import Holder, Snapshot, open_snapshot
from regrow.checkpoint.layout import ITEM_BYTES, shard_span, shards_that_hold
from regrow.checkpoint.ranges import Connection, connected
from regrow.checkpoint.reshard import Read, Source, nearest, plan_reads
from regrow.checkpoint.slots import SlotHeader
from regrow.checkpoint.state import Entry, tensor_over
from regrow.errors import CheckpointError

OWN, PEER = 0, 1  # distances


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


def _choose(holders: Sequence[Holder], node: str, reader: int) -> dict[int, Holder]:
    """For each shard of the old layout the copy that this reader takes."""
    copies: dict[int, list[tuple[int, Holder]]] = defaultdict(list)
    for holder in sorted(holders, key=lambda holder: holder.name):
        copies[holder.held.part.shard].append((OWN if holder.node == node else PEER, holder))
    return {shard: nearest(same, reader=reader + shard) for shard, same in copies.items()}


def _plan(entries: Sequence[Entry], chosen: dict[int, Holder]) -> dict[Holder, list[Read]]:
    """What to read from whom. Raises CheckpointError where a shard is missing."""
    if not chosen:
        raise CheckpointError("no snapshot can be read: nobody holds one")
    num_shards = next(iter(chosen.values())).held.part.num_shards
    by_name = {holder.name: holder for holder in chosen.values()}
    sources = [
        Source(chosen[shard].name, shard_span(entry.span, shard, num_shards))
        for entry in entries
        for shard in shards_that_hold(entry.span, num_shards)
        if shard in chosen
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
        payload = snapshot.payload()
        pieces = _pieces(snapshot, reads)
        for piece in pieces:
            piece.put(payload[piece.begin : piece.end], entries)
        return snapshot.header.scalars, sum(piece.end - piece.begin for piece in pieces), 0
    with connected(holder.address, secret) as connection:
        snapshot = _describe(connection, holder)
        _check(snapshot, holder, entries)
        pieces = _pieces(snapshot, reads)
        ranges = [(piece.begin, piece.end - piece.begin) for piece in pieces]
        connection.send({"op": "get", "file": holder.held.file, "ranges": ranges})
        for piece, (_, size) in zip(pieces, ranges, strict=True):
            piece.put(connection.receive_view(size), entries)
    return snapshot.header.scalars, 0, sum(size for _, size in ranges)


@dataclass(frozen=True)
class _Piece:
    """A read, and the whole chunks of the file that it lies in."""

    read: Read
    begin: int  # byte in the file
    end: int
    crc: Crc
    inner: slice  # of the bytes between them

    def put(self, chunks: memoryview, entries: Sequence[Entry]) -> None:
        """Check the chunks, and copy what is wanted of them."""
        read = self.read
        if not np.array_equal(checksums(chunks), self.crc):
            raise CheckpointError(f"{read.source.span.name} fails its checksum")
        entry = entries[read.want]
        target = entry.memory[read.start - entry.span.start : read.stop - entry.span.start]
        target.copy_(tensor_over(chunks[self.inner], target.dtype))


def _pieces(snapshot: Snapshot, reads: Sequence[Read]) -> list[_Piece]:
    header, pieces = snapshot.header, []
    where = zip(header.offsets, header.first_chunks, strict=True)
    places = {span.name: place for span, place in zip(header.spans, where, strict=False)}
    for read in reads:
        span = read.source.span
        offset, first = places[span.name]
        item = ITEM_BYTES[span.dtype]
        begin, end = (read.start - span.start) * item, (read.stop - span.start) * item
        chunks_begin, chunks_end, chunks = whole_chunks(begin, end, span.num_bytes)
        crc = snapshot.crc[first + chunks.start : first + chunks.stop]
        inner = slice(begin - chunks_begin, end - chunks_begin)
        pieces.append(_Piece(read, offset + chunks_begin, offset + chunks_end, crc, inner))
    return pieces


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
    want = {entry.span.name: shard_span(entry.span, part.shard, part.num_shards) for entry in entries}
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            raise CheckpointError(
                f"{name}: the snapshot has {have.get(name, 'no such tensor')}, the model {want.get(name, 'none')}"
            )
