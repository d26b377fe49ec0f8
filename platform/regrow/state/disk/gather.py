"""A data file's bytes from a rank's boxes in memory: rows of many tensors side by side, with checksums. No torch."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrow.errors import CheckpointError
from regrow.plan.boxes import ITEM_BYTES, Box
from regrow.state.checksums import checksums
from regrow.state.disk.format import SPAN, STORED_CHUNK_BYTES, Content, DataFile, encode_header
from regrow.state.disk.metadata import num_chunks
from regrow.state.disk.stacks import Part, columns_of
from regrow.storage import Storage, in_threads

PIECE_BYTES = 64 * STORED_CHUNK_BYTES  # gathered at once, checked, then given to storage
FILE_BYTES = 64 * 10**9  # of data in a file, at most: Arrow writes to S3 in parts of 10 MiB, of which S3 takes 10,000
UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}  # by bytes of an element: bits, whatever they mean

Matrix = NDArray[Any]


def in_files(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts of stacks, cut so that none of these files has more than FILE_BYTES of them; no file where there is none.

    >>> from regrow.state.disk.stacks import Column, Stack
    >>> part = Part(Stack("int64", 5, (Column("w", 0, 10**10),)), (0,), range(2), 0, 2 * 10**10)
    >>> [[(each.start, each.stop) for each in file] for file in in_files([part])]
    [[(0, 8000000000)], [(8000000000, 16000000000)], [(16000000000, 20000000000)]]
    """
    files, room = list[list[Part]](), 0
    for part in parts:
        size, at = ITEM_BYTES[part.stack.dtype], part.start
        while at < part.stop:
            if room < size:
                files.append([])
                room = FILE_BYTES
            stop = min(part.stop, at + room // size)
            files[-1].append(replace(part, start=at, stop=stop))
            room -= (stop - at) * size
            at = stop
    return files


def write_parts(
    target: Storage,
    name: str,
    parts: Sequence[Part],
    boxes: Sequence[Box],
    memory: Mapping[int, memoryview],
    checked: Callable[[], object] = lambda: None,
    **of: Any,
) -> DataFile:
    """Write parts of stacks as one file; `memory` is each box's, by its number, `of` what `encode_header` names.

    `checked` is called before the file is complete: what it raises leaves none. Raises OSError.
    """
    content = _Bytes(encode_header(parts, **of), parts, boxes, memory, checked)
    num_bytes = target.write_chunks(name, content)
    return DataFile(
        name, num_bytes, len(content.head), hashlib.sha256(content.head).hexdigest(), _described(parts, content)
    )


def _check_piece(target: Storage, name: str, crc: NDArray[np.uint32], piece: tuple[int, int, int]) -> None:
    """Read it, and keep nothing of it."""
    begin, size, first = piece
    read_checked(target, name, begin, begin + size, crc[first:])


def read_back(target: Storage, file: DataFile) -> None:
    """Older checkpoints are deleted for this one: storage has what it was given. Raises OSError, and CheckpointError
    where it has not."""
    assert file.content is not None
    crc, where = np.frombuffer(file.content.crc, "<u4"), str(target / file.name)
    spans = np.frombuffer(file.content.spans, SPAN)[["offset", "crc"]].tolist()
    ends = [*(each for each, _ in spans[1:]), file.num_bytes]
    pieces = [  # where each begins, its bytes, its first checksum
        (begin, min(PIECE_BYTES, end - begin), first + (begin - offset) // STORED_CHUNK_BYTES)
        for (offset, first), end in zip(spans, ends, strict=True)
        for begin in range(offset, end, PIECE_BYTES)
    ]
    try:
        check_header(target, file)
        if target.is_local:
            buffer = memoryview(np.empty(min(PIECE_BYTES, file.num_bytes), np.uint8).data)
            for begin, size, first in pieces:
                check(buffer[: target.read_into(file.name, begin, buffer[:size])], crc[first:], size, where)
        else:  # one request after another would take minutes for what is written in one
            in_threads(partial(_check_piece, target, file.name, crc), pieces)
    except CheckpointError as error:
        raise CheckpointError(f"what was written is not what is read: {error}; is that file system sound?") from error


def check_header(source: Storage, file: DataFile) -> None:
    """Raises CheckpointError where a data file does not begin as it was written."""
    try:
        head = source.read_range(file.name, 0, file.header_bytes)
    except FileNotFoundError as error:
        raise CheckpointError(f"{source / file.name}: named by the index but not there") from error
    if hashlib.sha256(head).hexdigest() != file.header_sha256:
        raise CheckpointError(
            f"{source / file.name}: the header's sha256 is not the one in the index; the file is damaged or swapped"
        )


def read_checked(
    source: Storage, name: str, begin: int, end: int, crc: NDArray[np.uint32], what: str = ""
) -> memoryview:
    """Bytes [begin, end) of a data file, whole chunks from the first of `crc` on. Raises CheckpointError."""
    try:
        data = memoryview(source.read_range(name, begin, end - begin))
    except FileNotFoundError as error:
        raise CheckpointError(f"{source / name}: named by the index but not there") from error
    check(data, crc, end - begin, str(source / name), what)
    return data


def check(data: memoryview, crc: NDArray[np.uint32], num_bytes: int, where: str, what: str = "") -> None:
    """Raises CheckpointError where data has not so many bytes, or other ones."""
    found = checksums(data, STORED_CHUNK_BYTES)
    if data.nbytes != num_bytes or not np.array_equal(found, crc[: len(found)]):
        raise CheckpointError(f"{where}: {what or 'its data'} fails its checksum; the file is damaged")


class _Bytes:
    """The file, made anew whenever it is iterated; `crc` is that of the last time."""

    def __init__(
        self,
        head: bytes,
        parts: Sequence[Part],
        boxes: Sequence[Box],
        memory: Mapping[int, memoryview],
        checked: Callable[[], object],
    ) -> None:
        self.head, self._parts, self._boxes, self._checked, self.crc = head, parts, boxes, checked, b""
        self._matrices = {
            number: np.frombuffer(data, UNSIGNED[ITEM_BYTES[boxes[number].dtype]]).reshape(
                -1, len(columns_of(boxes[number]))
            )
            for number, data in memory.items()
        }

    def __iter__(self) -> Iterator[bytes | memoryview]:
        found, buffer = [], np.empty(PIECE_BYTES, np.uint8)  # used again: new memory costs more than what fills it
        yield self.head
        for part in self._parts:
            step = PIECE_BYTES // ITEM_BYTES[part.stack.dtype]
            for start in range(part.start, part.stop, step):
                data = self._gathered(part, start, min(start + step, part.stop), buffer)
                found.append(checksums(data, STORED_CHUNK_BYTES).tobytes())
                yield data
        self.crc = b"".join(found)
        self._checked()

    def _gathered(self, part: Part, start: int, stop: int, buffer: NDArray[np.uint8]) -> memoryview:
        """Elements [start, stop) of the stack."""
        out = buffer.view(UNSIGNED[ITEM_BYTES[part.stack.dtype]])[: stop - start]
        for at, rows, columns in part.rectangles(start, stop):
            target = out[at : at + len(rows) * len(columns)].reshape(len(rows), len(columns))
            held = slice(rows.start - part.rows.start, rows.stop - part.rows.start)
            for number, within, distance in part.columns_in(columns):
                member = part.members[number]
                first = part.stack.columns[number].first - columns_of(self._boxes[member]).start
                target[:, distance : distance + len(within)] = self._matrices[member][
                    held, first + within.start : first + within.stop
                ]
        return memoryview(out.view(np.uint8).data)


def _described(parts: Sequence[Part], content: _Bytes) -> Content:
    spans, at, crc = [], len(content.head), 0
    for part in parts:
        count = part.stop - part.start
        spans.append((part.stack.key.encode(), part.start, count, at, crc))
        at, crc = at + part.num_bytes, crc + num_chunks(part.stack, count)
    assert len(content.crc) == 4 * crc
    return Content(np.array(spans, SPAN).tobytes(), content.crc, tuple(part.stack for part in parts if not part.start))
