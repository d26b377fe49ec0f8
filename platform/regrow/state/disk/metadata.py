"""The metadata file: JSON, then where every element is and what checks it, in blocks that are read and checked alone.

    JSON | spans, of each stack in order of their elements | data files, by name | a crc32 of each chunk, file by file

A rank reads the JSON and the few blocks that concern it. No torch.
"""

import base64
import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from regrow.errors import CheckpointError
from regrow.plan.boxes import ITEM_BYTES
from regrow.state.checksums import checksums
from regrow.state.disk.format import STORED_CHUNK_BYTES, DataFile, Index, Spans
from regrow.state.disk.packed import FILE, NAME_BYTES, PackedFiles, Records
from regrow.state.disk.stacks import Stack, num_columns, num_rows
from regrow.storage import Storage

BLOCK_BYTES = 64 << 10  # that one checksum covers: the least that is read
FENCE = 512  # spans that are read at once, about a block

PLACED = np.dtype([("first", "<i8"), ("offset", "<i8"), ("crc", "<i8"), ("file", f"S{NAME_BYTES}")])


def encode(index: Index, packed: PackedFiles) -> tuple[bytes, bytes]:
    """(the JSON, what follows it) of a checkpoint whose files are written.

    Raises CheckpointError where they do not hold every element of every tensor once, or two have one name.
    """
    by_name = packed.files[np.argsort(packed.files["name"])]
    for name in by_name["name"][1:][by_name["name"][1:] == by_name["name"][:-1]].tolist():
        raise CheckpointError(f"{name.decode()} is the name of two files, of which one has replaced the other")
    stacks = {stack.key: stack for stack in packed.stacks}
    spans, each, chunks = packed.spans, packed.files["num_spans"], packed.files["num_chunks"]
    placed = np.empty(len(spans), PLACED)
    placed["first"], placed["offset"] = spans["first"], spans["offset"]
    placed["crc"] = spans["crc"] + np.repeat(chunks.cumsum() - chunks, each)
    placed["file"] = np.repeat(packed.files["name"], each)
    order = np.lexsort((spans["first"], spans["stack"]))
    spans, placed = spans[order], placed[order]
    described, found = [], 0
    for key, begin, end in _groups(spans["stack"]):
        stack = stacks.get(key)
        if stack is None or not _is_whole(stack, spans[begin:end]):
            raise CheckpointError(f"the files do not hold every element of {stack or 'a tensor'} once")
        fences = placed["first"][begin:end:FENCE].tolist()
        described.append({**stack.to_plain(), "spans": [begin, end], "fences": fences})
        found += stack.num_bytes
    _check_columns(index, [stacks[key] for key, *_ in _groups(spans["stack"])], found)
    rows = np.empty(len(by_name), FILE)
    for name in FILE.names or ():
        rows[name] = by_name[name]
    rest = b"".join([placed.tobytes(), rows.tobytes(), packed.crc.tobytes()])
    layout = {
        "chunk_bytes": STORED_CHUNK_BYTES,
        "num_bytes": len(rest),
        "num_files": len(rows),
        "num_chunks": int(chunks.sum()),
        "blocks": base64.b64encode(checksums(memoryview(rest), BLOCK_BYTES).tobytes()).decode(),
        "stacks": described,
    }
    return json.dumps({**index.to_plain(), "layout": layout}, separators=(",", ":")).encode() + b"\n", rest


def _groups(keys: Records) -> list[tuple[str, int, int]]:
    """(stack, first span, last span + 1) of sorted spans."""
    borders = [0, *(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist(), len(keys)]
    return [(keys[a].decode(), a, b) for a, b in pairwise(borders) if b > a]


def _is_whole(stack: Stack, spans: Records) -> bool:
    ends = spans["first"] + spans["count"]
    return bool(spans["first"][0] == 0 and ends[-1] == stack.num_elements and (spans["first"][1:] == ends[:-1]).all())


def _check_columns(index: Index, stacks: Sequence[Stack], found: int) -> None:
    """Every column of every tensor is in one stack. Raises CheckpointError."""
    held = dict.fromkeys(index.tensors, 0)
    for stack in stacks:
        for column in stack.columns:
            dtype, shape = index.tensors.get(column.name, ("", ()))
            if (dtype, num_rows(shape)) != (stack.dtype, stack.rows):
                raise CheckpointError(f"{column.name} is not the tensor that another node holds")
            held[column.name] += column.size
    for name, count in held.items():
        need = num_columns(index.tensors[name][1])
        if count != need and num_rows(index.tensors[name][1]):
            raise CheckpointError(f"the files hold {count:,} of {need:,} columns of {name}")
    assert found == index.tensor_bytes, f"{found:,} of {index.tensor_bytes:,} bytes"


class Metadata:
    """A committed checkpoint's metadata file, read block by block; every byte is checked."""

    def __init__(self, source: Storage, index: Index) -> None:
        """`source`: the step's folder. The index is of version 5 or newer."""
        assert index.layout is not None
        self.source, self.layout = source, index.layout
        self._num_spans = max((each.end for each in self.layout.stacks), default=0)
        self._files_at = self._num_spans * PLACED.itemsize
        self._crc_at = self._files_at + self.layout.num_files * FILE.itemsize

    def files(self) -> tuple[DataFile, ...]:
        """All data files. Raises CheckpointError, as all here."""
        (data,) = self._read([(self._files_at, self._crc_at)])
        return tuple(
            DataFile(name.decode(), num_bytes, header_bytes, sha256.hex())
            for name, num_bytes, header_bytes, sha256 in np.frombuffer(data, FILE).tolist()
        )

    def spans(self, wanted: Sequence[tuple[Spans, int, int]]) -> list[Records]:
        """Of each (stack, first element, last + 1), of which there is at least one: the spans that hold them.

        A record of PLACED each, and one more where the last of them ends: of `first`, nothing else in it counts.
        """
        ranges = []
        for of, first, last in wanted:
            begin = of.begin + max(0, int(np.searchsorted(of.fences, first, "right")) - 1) * FENCE
            end = of.begin + int(np.searchsorted(of.fences, last, "left")) * FENCE
            ranges.append((begin, min(end + 1, of.end)))
        found = []
        data = self._read([(a * PLACED.itemsize, b * PLACED.itemsize) for a, b in ranges])
        for (of, first, last), (_, end), each in zip(wanted, ranges, data, strict=True):
            placed = np.frombuffer(each, PLACED)
            if end == of.end:
                placed = np.append(placed, np.zeros(1, PLACED))
                placed["first"][-1] = of.stack.num_elements
            begin = int(np.searchsorted(placed["first"], first, "right")) - 1
            found.append(placed[begin : int(np.searchsorted(placed["first"], last, "left")) + 1])
        return found

    def crc(self, wanted: Sequence[tuple[int, int]]) -> list[NDArray[np.uint32]]:
        """Checksums [first, last) of all, for each of these."""
        data = self._read([(self._crc_at + 4 * first, self._crc_at + 4 * last) for first, last in wanted])
        return [np.frombuffer(each, "<u4") for each in data]

    def _read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Bytes [begin, end) behind the JSON, for each of these; blocks beside each other by one request."""
        merged: list[list[int]] = []  # blocks [first, last)
        for begin, end in sorted((a // BLOCK_BYTES, -(-b // BLOCK_BYTES)) for a, b in ranges if b > a):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([begin, end])
        held = [(first * BLOCK_BYTES, self._blocks(first, last)) for first, last in merged]
        starts = [at for at, _ in held]
        found = []
        for begin, end in ranges:
            at, data = (
                held[int(np.searchsorted(starts, begin, "right")) - 1] if end > begin else (begin, memoryview(b""))
            )
            found.append(data[begin - at : end - at])
        return found

    def _blocks(self, first: int, last: int) -> memoryview:
        where, layout = str(self.source / self.layout.name), self.layout
        begin = layout.begin + first * BLOCK_BYTES
        end = min(layout.begin + last * BLOCK_BYTES, layout.num_bytes)
        try:
            data = memoryview(self.source.read_range(layout.name, begin, end - begin))
        except FileNotFoundError as error:
            raise CheckpointError(f"{where}: it was there, and is not any more") from error
        if data.nbytes != end - begin:
            raise CheckpointError(f"{where}: has fewer than its {layout.num_bytes:,} bytes; the file is damaged")
        if not np.array_equal(checksums(data, BLOCK_BYTES), layout.blocks[first:last]):
            raise CheckpointError(f"{where}: bytes {begin:,} to {end:,} fail their checksum; the file is damaged")
        return data


def num_chunks(stack: Stack, num_elements: int) -> int:
    """That hold so many elements."""
    return -(-num_elements * ITEM_BYTES[stack.dtype] // STORED_CHUNK_BYTES)
