"""What to read from where: (pieces that sources hold, pieces that this rank wants) -> runs of elements. Pure, no I/O.

Each wanted element is read exactly once, whatever layout the sources were written in.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from regrow.errors import CheckpointError
from regrow.plan.boxes import ITEM_BYTES, Box, Piece, Runs, common_runs
from regrow.state.checksums import CHUNK_BYTES, whole_chunks

Copy = TypeVar("Copy")


@dataclass(frozen=True)
class Source:
    """A piece of a box and the file that holds it."""

    file: str
    piece: Piece


@dataclass(frozen=True)
class Read:
    """Copy runs of elements from `source` to the box of the wanted piece at index `want`."""

    source: Source
    want: int
    runs: Runs


def plan_reads(have: Iterable[Source], want: Sequence[Piece]) -> list[Read]:
    """Cover every wanted piece from the sources, which do not overlap.

    Raises CheckpointError naming a box of which no source holds some elements.
    """
    by_name: dict[str, list[Source]] = defaultdict(list)
    for source in have:
        if source.piece.num_elements:
            by_name[source.piece.box.name].append(source)
    tables = {name: _Table(sources) for name, sources in by_name.items()}
    known = dict[tuple[object, ...], Runs]()  # blocks of a model are alike, and moments as their parameters
    reads = []
    for index, piece in enumerate(want):
        missing = piece.num_elements
        for source in tables[piece.box.name].near(piece.box) if missing and piece.box.name in tables else ():
            key = (*_place_of(source.piece), *_place_of(piece))
            runs = known.get(key)
            if runs is None:
                runs = known[key] = common_runs(source.piece, piece)
            if len(runs.length):
                reads.append(Read(source, index, runs))
                missing -= runs.num_elements
        if missing > 0:
            raise CheckpointError(
                f"no file holds elements of {piece.box}: {missing:,} of {piece.num_elements:,} are missing"
            )
    return reads


def _place_of(piece: Piece) -> tuple[object, ...]:
    """Where a piece lies in its tensor."""
    return piece.box.offsets, piece.box.sizes, piece.start, piece.stop


class _Table:
    """The sources of one tensor, in order of their first rows."""

    def __init__(self, sources: list[Source]) -> None:
        self.sources = sorted(sources, key=lambda source: (source.piece.box.offsets, source.piece.start))
        rows = [_rows(source.piece.box) for source in self.sources]
        self.first = [first for first, _ in rows]
        self.last = list(accumulate((last for _, last in rows), max))

    def near(self, box: Box) -> list[Source]:
        """Those that may have rows in common with a box, and few others."""
        first, last = _rows(box)
        return self.sources[bisect_right(self.last, first) : bisect_left(self.first, last)]


def _rows(box: Box) -> tuple[int, int]:
    """The first row of a box, and the one after its last; a scalar is one row."""
    return (box.offsets[0], box.offsets[0] + box.sizes[0]) if box.sizes else (0, 1)


class Window(NamedTuple):
    """Whole chunks of a source that are read at once, and what is wanted of them: one run, as most have, or several."""

    begin: int  # bytes from the source's first
    end: int
    run: tuple[int, int, int]  # source, target, length of the first one; elements, counted from `begin` in the source
    several: Runs | None = None  # all of them

    @property
    def runs(self) -> Runs:
        return Runs.one(*self.run) if self.several is None else self.several


def windows(read: Read, most_bytes: int) -> Iterator[Window]:
    """A read as windows of about so many bytes, at whose borders no chunk is read twice unless a run begins there."""
    runs, item = read.runs, ITEM_BYTES[read.source.piece.box.dtype]
    num_bytes = read.source.piece.num_bytes
    if len(runs.length) == 1:
        yield from _windows_of_one(runs, item, num_bytes, most_bytes)
        return
    first, last = runs.source * item, (runs.source + runs.length) * item
    apart = (first[1:] - last[:-1] >= CHUNK_BYTES) | (first[1:] // most_bytes != first[:-1] // most_bytes)
    for a, b in pairwise([0, *(np.flatnonzero(apart) + 1).tolist(), len(first)]):
        some = runs[a:b]
        if b - a == 1:
            yield from _windows_of_one(some, item, num_bytes, most_bytes)
            continue
        begin, end, _ = whole_chunks(int(first[a]), int(last[b - 1]), num_bytes)
        several = Runs(some.source - begin // item, some.target, some.length)
        yield Window(begin, end, several.first, several)


def _windows_of_one(runs: Runs, item: int, num_bytes: int, most_bytes: int) -> Iterator[Window]:
    """Of one run in a source of so many bytes."""
    source, target, length = runs.first
    at, end = source * item, (source + length) * item
    while at < end:
        stop = min(end, (at // most_bytes + 1) * most_bytes)
        begin, aligned_end, _ = whole_chunks(at, stop, num_bytes)
        yield Window(begin, aligned_end, ((at - begin) // item, target + at // item - source, (stop - at) // item))
        at = stop


def share(box: Box, index: int, count: int) -> Piece:
    """The rows of a box that one of several ranks that hold it reads, so that each is read once.

    >>> share(Box.whole("w", (10, 7)), 1, 3)
    Piece(box=Box(name='w', shape=(10, 7), offsets=(0, 0), sizes=(10, 7), dtype='float32'), start=21, stop=42)
    """
    rows = box.sizes[0] if box.sizes else 1
    start, stop = (rows * part // count for part in (index, index + 1))
    width = box.num_elements // max(rows, 1)
    return Piece(box, start * width, stop * width)


def nearest(copies: Sequence[tuple[int, Copy]], *, reader: int) -> Copy:
    """One of several (distance, copy), at least one: of the nearest, each `reader` takes another, to share them out.

    >>> [nearest([(1, "a"), (1, "b"), (2, "c")], reader=reader) for reader in range(3)]
    ['a', 'b', 'a']
    """
    least = min(distance for distance, _ in copies)
    near = [copy for distance, copy in copies if distance == least]
    return near[reader % len(near)]
