"""Reading a checkpoint from version 5 on: what is wanted as runs of its stacks, then as few, large requests as serve.

Adjacent runs are one request, whole chunks of data are read and checked, several requests at a time.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regrow.errors import CheckpointError
from regrow.plan.boxes import ITEM_BYTES, Box, Ints, Piece
from regrow.state.disk.format import STORED_CHUNK_BYTES, Index, Spans
from regrow.state.disk.gather import check
from regrow.state.disk.metadata import Metadata, Records
from regrow.state.disk.stacks import Column, Stack, columns_of, rows_of
from regrow.storage import Storage

READ_BYTES = 64 << 20  # by one request at most
READERS = 4  # requests to a store at a time: READERS x READ_BYTES are in memory
LOCAL_READERS = 1  # of files: a rank beside others has no core for more


class Wanted(NamedTuple):
    """Rows and columns of a stack that a wanted piece takes from it."""

    piece: int  # its number
    rows: range  # of the stack
    columns: range  # of the stack
    first: int  # of the tensor's columns, the one at columns.start


class Extent(NamedTuple):
    """Whole chunks that lie beside each other in a file and in a stack."""

    stack: int
    file: str
    offset: int  # in the file
    num_bytes: int
    first: int  # of the stack's bytes
    crc: int  # number of its first checksum


class Rectangle(NamedTuple):
    """Rows of neighbouring elements, at equal distances in what was read and in a box."""

    source: int  # the first element
    source_width: int  # from one row to the next
    target: int
    target_width: int
    num_rows: int
    num_columns: int


@dataclass(frozen=True)
class Request:
    """One read of a file."""

    extents: tuple[Extent, ...]  # beside each other

    @property
    def file(self) -> str:
        return self.extents[0].file

    @property
    def offset(self) -> int:
        return self.extents[0].offset

    @property
    def num_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self.extents)


class Reader:
    """An opened checkpoint of version 5 or newer. `source`: the step's folder."""

    def __init__(self, source: Storage, index: Index) -> None:
        self._source, self._metadata = source, Metadata(source, index)
        self.stacks = self._metadata.layout.stacks

    @cached_property
    def _columns(self) -> dict[str, list[tuple[int, int, Column]]]:
        """(stack, where its columns begin in a row, which they are) of each tensor."""
        found: dict[str, list[tuple[int, int, Column]]] = defaultdict(list)
        for number, spans in enumerate(self.stacks):
            for column, offset in zip(spans.stack.columns, spans.stack.offsets, strict=False):
                found[column.name].append((number, offset, column))
        return found

    def stack_of(self, name: str) -> int:
        """The number of the first stack that has columns of a tensor."""
        return self._columns[name][0][0]

    def neighbours(self, name: str, most_bytes: int) -> list[str]:
        """A tensor and those that lie behind it in its stack, of so many bytes in all, or that one alone."""
        stack = self.stacks[self.stack_of(name)].stack
        widths: dict[str, int] = {}
        for column in stack.columns:
            widths[column.name] = widths.get(column.name, 0) + column.size
        names = list(widths)
        found, num_bytes = [name], widths[name]
        for other in names[names.index(name) + 1 :]:
            num_bytes += widths[other]
            if num_bytes * stack.rows * ITEM_BYTES[stack.dtype] > most_bytes:
                break
            found.append(other)
        return found

    def plan(self, pieces: Sequence[Piece]) -> tuple[list[Request], dict[int, list[Wanted]]]:
        """What to read for whole rows of boxes, and what is wanted of each stack. Reads metadata alone.

        Raises CheckpointError where that is damaged.
        """
        wanted = self._wanted(pieces)
        runs = {number: _runs_of(self.stacks[number], each) for number, each in wanted.items()}
        asked = [(self.stacks[n], int(first[0]), int(last.max())) for n, (first, last) in runs.items()]
        extents: list[Extent] = []
        for number, placed in zip(runs, self._metadata.spans(asked), strict=True):
            extents += _extents(number, self.stacks[number], placed, *runs[number])
        return list(_requests(extents)), wanted

    def read(self, want: Sequence[tuple[Piece, Tensor]]) -> int:
        """Fill whole rows of boxes, each the memory of its whole box; the bytes of data read.

        Raises CheckpointError where something is missing or damaged; memory holds a mixture then.
        """
        requests, wanted = self.plan([piece for piece, _ in want])
        checks = self.checksums_of(requests)
        bounds = {
            stack: np.array([(w.rows.start, w.rows.stop, w.columns.start, w.columns.stop) for w in each])
            for stack, each in wanted.items()
        }
        buffers, most = SimpleQueue[memoryview](), max((request.num_bytes for request in requests), default=0)
        readers = LOCAL_READERS if self._source.is_local else READERS
        _in_threads(
            lambda request: self._serve(request, buffers, most, checks, wanted, bounds, want), requests, readers
        )
        return sum(request.num_bytes for request in requests)

    def checksums_of(self, requests: Sequence[Request]) -> dict[Extent, NDArray[np.uint32]]:
        """Of each chunk of what is to be read. Raises CheckpointError."""
        extents = [extent for request in requests for extent in request.extents]
        ranges = [(each.crc, each.crc - (-each.num_bytes // STORED_CHUNK_BYTES)) for each in extents]
        return dict(zip(extents, self._metadata.crc(ranges), strict=True))

    def _serve(
        self,
        request: Request,
        buffers: "SimpleQueue[memoryview]",
        most: int,
        checks: dict[Extent, NDArray[np.uint32]],
        wanted: dict[int, list[Wanted]],
        bounds: dict[int, Ints],
        want: Sequence[tuple[Piece, Tensor]],
    ) -> None:
        where = str(self._source / request.file)
        try:
            buffer = buffers.get_nowait()
        except Empty:
            buffer = memoryview(np.empty(most, np.uint8).data)
        try:
            num_bytes = self._source.read_into(request.file, request.offset, buffer[: request.num_bytes])
        except FileNotFoundError as error:
            raise CheckpointError(f"{where}: named by the index but not there") from error
        data = buffer[:num_bytes]
        at = 0
        for extent in request.extents:
            part = data[at : at + extent.num_bytes]
            stack = self.stacks[extent.stack].stack
            check(part, checks[extent], extent.num_bytes, where, str(stack))
            elements = torch.frombuffer(part, dtype=getattr(torch, stack.dtype))
            for number in _near(extent, stack, bounds[extent.stack]):
                each = wanted[extent.stack][number]
                piece, memory = want[each.piece]
                for rectangle in _common(extent, stack.width, each, piece.box):
                    _fill(memory, elements, rectangle)
            at += extent.num_bytes
        buffers.put(buffer)

    def _wanted(self, pieces: Sequence[Piece]) -> dict[int, list[Wanted]]:
        found: dict[int, list[Wanted]] = defaultdict(list)
        for number, piece in enumerate(pieces):
            columns, rows = columns_of(piece.box), rows_of(piece.box)
            if not piece.num_elements:
                continue
            assert piece.start % len(columns) == piece.stop % len(columns) == 0, f"{piece}: whole rows are read"
            rows = rows[piece.start // len(columns) : piece.stop // len(columns)]
            missing = len(columns)
            for stack, offset, column in self._columns.get(piece.box.name, ()):
                first, last = max(columns.start, column.first), min(columns.stop, column.first + column.size)
                if first < last:
                    at = offset + first - column.first
                    found[stack].append(Wanted(number, rows, range(at, at + last - first), first))
                    missing -= last - first
            if missing:
                raise CheckpointError(f"no file holds elements of {piece.box}: {missing:,} columns are missing")
        return dict(sorted(found.items()))


def _runs_of(spans: Spans, wanted: Sequence[Wanted]) -> tuple[Ints, Ints]:
    """First elements of a stack that are wanted, and where each run ends: sorted, apart from each other."""
    width, firsts, lasts = spans.stack.width, [], []
    by_rows: dict[range, list[range]] = defaultdict(list)
    for each in wanted:
        by_rows[each.rows].append(each.columns)
    for rows, columns in by_rows.items():
        for begin, end in _joined(sorted((each.start, each.stop) for each in columns)):
            if end - begin == width:
                firsts.append(np.array([rows.start * width]))
                lasts.append(np.array([rows.stop * width]))
            else:
                starts = np.arange(rows.start, rows.stop, dtype=np.int64) * width
                firsts.append(starts + begin)
                lasts.append(starts + end)
    return _union(np.concatenate(firsts), np.concatenate(lasts))


def _joined(ranges: Iterable[tuple[int, int]]) -> list[list[int]]:
    found: list[list[int]] = []
    for begin, end in ranges:
        if found and begin <= found[-1][1]:
            found[-1][1] = max(end, found[-1][1])
        else:
            found.append([begin, end])
    return found


def _union(firsts: Ints, lasts: Ints) -> tuple[Ints, Ints]:
    """Of ranges that may touch and overlap."""
    order = np.argsort(firsts, kind="stable")
    firsts, lasts = firsts[order], np.maximum.accumulate(lasts[order])
    apart = np.flatnonzero(firsts[1:] > lasts[:-1])
    return firsts[[0, *(apart + 1)]], lasts[[*apart, len(lasts) - 1]]


def _extents(number: int, spans: Spans, placed: Records, firsts: Ints, lasts: Ints) -> Iterator[Extent]:
    """Whole chunks, of the spans of one stack, that hold ranges of its elements."""
    item = ITEM_BYTES[spans.stack.dtype]
    borders = placed["first"].tolist()
    for (begin, offset, crc, file), end in zip(placed.tolist(), borders[1:], strict=False):
        some = slice(int(np.searchsorted(lasts, begin, "right")), int(np.searchsorted(firsts, end, "left")))
        if some.start >= some.stop:
            continue
        first = (np.maximum(firsts[some], begin) - begin) * item
        last = (np.minimum(lasts[some], end) - begin) * item
        chunks = _union(first // STORED_CHUNK_BYTES, -(-last // STORED_CHUNK_BYTES))
        for a, b in zip(*(each.tolist() for each in chunks), strict=True):
            at, stop = a * STORED_CHUNK_BYTES, min(b * STORED_CHUNK_BYTES, (end - begin) * item)
            yield Extent(number, file.decode(), offset + at, stop - at, begin * item + at, crc + a)


def _requests(extents: Sequence[Extent]) -> Iterator[Request]:
    """Extents in order of files and bytes, adjacent ones together up to READ_BYTES, longer ones in parts."""
    held: list[Extent] = []
    num_bytes = 0
    for extent in (part for each in sorted(extents, key=lambda each: each[1:3]) for part in _parts(each)):
        beside = held and (extent.file, extent.offset) == (held[-1].file, held[-1].offset + held[-1].num_bytes)
        if held and (not beside or num_bytes + extent.num_bytes > READ_BYTES):
            yield Request(tuple(held))
            held, num_bytes = [], 0
        held.append(extent)
        num_bytes += extent.num_bytes
    if held:
        yield Request(tuple(held))


def _parts(extent: Extent) -> Iterator[Extent]:
    """An extent cut at whole chunks."""
    for at in range(0, extent.num_bytes, READ_BYTES):
        yield extent._replace(
            offset=extent.offset + at,
            num_bytes=min(READ_BYTES, extent.num_bytes - at),
            first=extent.first + at,
            crc=extent.crc + at // STORED_CHUNK_BYTES,
        )


def _near(extent: Extent, stack: Stack, bounds: Ints) -> list[int]:
    """Which of those wanted, by their first and last rows and columns, may have elements in an extent."""
    item = ITEM_BYTES[stack.dtype]
    first, last = extent.first // item, (extent.first + extent.num_bytes) // item - 1
    (row, column), (last_row, last_column) = divmod(first, stack.width), divmod(last, stack.width)
    near = (bounds[:, 0] <= last_row) & (bounds[:, 1] > row)
    if row == last_row:
        near &= (bounds[:, 2] <= last_column) & (bounds[:, 3] > column)
    return np.flatnonzero(near).tolist()


def _common(extent: Extent, width: int, wanted: Wanted, box: Box) -> Iterator[Rectangle]:
    """What an extent has of what is wanted: rows that are whole there, and those that its ends cut."""
    item = ITEM_BYTES[box.dtype]
    begin, end = extent.first // item, (extent.first + extent.num_bytes) // item
    first_row, stop_row = max(wanted.rows.start, begin // width), min(wanted.rows.stop, -(-end // width))
    columns, inner = wanted.columns, len(columns_of(box))

    def rectangle(row: int, num_rows: int, cut: range) -> Rectangle:
        source = row * width + cut.start - begin
        target = (row - rows_of(box).start) * inner + wanted.first - columns_of(box).start + cut.start - columns.start
        return Rectangle(source, width, target, inner, num_rows, len(cut))

    whole = range(
        first_row + (first_row * width + columns.start < begin),
        stop_row - ((stop_row - 1) * width + columns.stop > end),
    )
    for row in sorted({first_row, stop_row - 1} - {*whole[:1], *whole[-1:]}) if first_row < stop_row else ():
        cut = range(max(columns.start, begin - row * width), min(columns.stop, end - row * width))
        if cut:
            yield rectangle(row, 1, cut)
    if whole:
        yield rectangle(whole.start, len(whole), columns)


def _fill(target: Tensor, source: Tensor, at: Rectangle) -> None:
    """Both flat, the target on any device."""
    size, first = (at.num_rows, at.num_columns), target.storage_offset() + at.target
    to = target.as_strided(size, (at.target_width, 1), first)
    to.copy_(source.as_strided(size, (at.source_width, 1), source.storage_offset() + at.source))


def _in_threads(work: Any, items: Sequence[Any], num_threads: int) -> None:
    """The first error is raised, once all are over; no more begin after it."""
    if len(items) < 2:
        for item in items:
            work(item)
        return
    threads = ThreadPoolExecutor(num_threads, thread_name_prefix="read")
    device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def on_device(item: Any) -> None:
        if device is not None:
            torch.cuda.set_device(device)
        work(item)

    try:
        for _ in threads.map(on_device, items):
            pass
    finally:
        threads.shutdown(cancel_futures=True)
