"""Restoring from snapshots: this node's by memory map, other nodes' from their keepers, exactly the ranges needed.

Every byte is checked against the checksums that a keeper made when the snapshot was sealed. A holder that is gone or
whose bytes are damaged is left out, and what it was to give comes from another copy.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from regrow.checkpoint.format import ITEM_BYTES
from regrow.checkpoint.keeper_node import CHUNK_BYTES, Crc, Holder, checksum, read_checksums
from regrow.checkpoint.ranges import connected
from regrow.checkpoint.reshard import Read, Source, plan_reads
from regrow.checkpoint.slots import SlotHeader, open_slot
from regrow.checkpoint.state import Entry
from regrow.errors import CheckpointError

OWN, PEER = 0, 1  # distances


@dataclass(frozen=True)
class _Open:
    """A holder's file, ready to be read."""

    holder: Holder
    header: SlotHeader
    crc: Crc
    path: Path | None  # on this node; None: from its keeper


@dataclass(frozen=True)
class Restored:
    """What a restore read."""

    scalars: dict[str, int]
    own_bytes: int  # from this node's memory
    peer_bytes: int
    problems: tuple[str, ...]  # holders that were left out, and why


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
    missing, extra, reshaped or retyped entry is a CheckpointError that names it, and so is an element that no holder
    gives; the entries hold a mixture then.
    """
    left, problems = list(holders), []
    while True:
        sources: dict[Source, _Open] = {}
        for holder in list(left):
            try:
                opened = _open(holder, node, folder, secret)
            except CheckpointError as error:
                left.remove(holder)
                problems.append(f"{holder.name}: {error}")
                continue
            distance = OWN if opened.path else PEER
            for span in opened.header.spans:
                sources[Source(holder.name, span, distance)] = opened
        if not left:
            raise CheckpointError(f"no snapshot can be read: {problems[0] if problems else 'nobody holds one'}")
        any_header = next(iter(sources.values())).header
        _check_same(entries, any_header)
        try:
            reads = plan_reads(sources, [entry.span for entry in entries], reader=reader)
        except CheckpointError as error:
            raise CheckpointError("; ".join([str(error), *problems])) from error
        by_file: dict[str, list[Read]] = defaultdict(list)
        for read in reads:
            by_file[read.source.file].append(read)
        num_bytes, failed = {OWN: 0, PEER: 0}, None
        for same_file in by_file.values():
            opened = sources[same_file[0].source]
            try:
                num_bytes[OWN if opened.path else PEER] += _read(opened, same_file, entries, secret)
            except CheckpointError as error:
                problems.append(f"{opened.holder.name}: {error}")
                failed = opened.holder
                break
        if failed is None:
            return Restored(any_header.scalars, num_bytes[OWN], num_bytes[PEER], tuple(problems))
        left.remove(failed)


def _open(holder: Holder, node: str, folder: Path, secret: bytes) -> _Open:
    if holder.node == node:
        path = folder / holder.held.file
        header, stored = open_slot(path), read_checksums(path)
        if header is None or stored is None or {header.sha256, stored[0]} != {holder.held.header_sha256}:
            raise CheckpointError("it is not the snapshot that was committed")
        return _Open(holder, header, stored[1], path)
    with connected(holder.address, secret) as connection:
        connection.send({"op": "describe", "file": holder.held.file})
        answer = connection.receive()
        if not answer or "error" in answer:
            raise CheckpointError(answer.get("error", "its keeper is gone"))
        header = SlotHeader.decode(connection.receive_bytes(answer["header"]))
        crc = np.frombuffer(connection.receive_bytes(answer["crc"]), np.uint32)
        if {header.sha256, answer["sha256"]} != {holder.held.header_sha256}:
            raise CheckpointError("it is not the snapshot that was committed")
        return _Open(holder, header, crc, None)


def _read(opened: _Open, reads: Sequence[Read], entries: Sequence[Entry], secret: bytes) -> int:
    """Carry out the reads from one file; returns the bytes read, the rest of chunks included."""
    header = opened.header
    begins = dict(zip(header.spans, header.offsets, strict=False))
    end_of_payload = header.offsets[-1]
    bounds = []  # of each read in the file: (begin, end), and of the chunks that cover it
    for read in reads:
        item = ITEM_BYTES[read.source.span.dtype]
        begin = begins[read.source.span] + (read.start - read.source.span.start) * item
        end = begin + (read.stop - read.start) * item
        first = (begin - header.payload_offset) // CHUNK_BYTES
        last = -(-(end - header.payload_offset) // CHUNK_BYTES)
        aligned = (
            header.payload_offset + first * CHUNK_BYTES,
            min(header.payload_offset + last * CHUNK_BYTES, end_of_payload),
        )
        bounds.append((begin, end, first, *aligned))

    def take(k: int, chunks: memoryview) -> None:
        begin, end, first, aligned_begin, aligned_end = bounds[k]
        found = checksum(chunks)
        whole = len(chunks) == aligned_end - aligned_begin
        if not whole or not np.array_equal(found, opened.crc[first : first + len(found)]):
            raise CheckpointError(f"{reads[k].source.span.name} fails its checksum")
        entry, read = entries[reads[k].want], reads[k]
        target = entry.memory[read.start - entry.span.start : read.stop - entry.span.start]
        data = torch.frombuffer(bytearray(chunks[begin - aligned_begin : end - aligned_begin]), dtype=target.dtype)
        target.copy_(data)

    if opened.path is not None:
        try:
            memory = np.memmap(opened.path, np.uint8, "r").data
        except (OSError, ValueError) as error:
            raise CheckpointError(f"it cannot be mapped: {error}") from error
        for k, (_, _, _, begin, end) in enumerate(bounds):
            take(k, memory[begin:end])
    else:
        ranges = [(begin, end - begin) for _, _, _, begin, end in bounds]
        with connected(opened.holder.address, secret) as connection:
            connection.send({"op": "get", "file": opened.holder.held.file, "ranges": ranges})
            for k, (_, size) in enumerate(ranges):
                take(k, memoryview(connection.receive_bytes(size)))
    return sum(end - begin for _, _, _, begin, end in bounds)


def _check_same(entries: Sequence[Entry], header: SlotHeader) -> None:
    have = {span.name: (span.dtype, span.shape) for span in header.spans}
    want = {entry.span.name: (entry.span.dtype, entry.span.shape) for entry in entries}
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            raise CheckpointError(
                f"{name}: the snapshot has {have.get(name, 'no such tensor')}, the model {want.get(name, 'none')}"
            )
