"""The order of a checkpoint's bytes: tensors of equal row counts lie side by side in a stack, row after row. Pure.

Row r of a stack is row r of each of its tensors, so that a rank's rows of all of them are one run of bytes, whatever
the number of ranks. A tensor without dimensions is one row of one column; of more than two dimensions, the columns are
all but the first.
"""

import hashlib
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from regrow.plan.boxes import ITEM_BYTES, Box
from regrow.plan.mesh import Coordinates
from regrow.plan.placement import dims_of, is_second, num_copies

BLOCKS = 8  # of columns that tensor parallelism would cut: block by block, then tensor by tensor, for so many ranks


class Column(NamedTuple):
    """Columns [first, first + size) of a tensor."""

    name: str
    first: int
    size: int


@dataclass(frozen=True)
class Stack:
    """Columns of tensors of one dtype and row count, side by side."""

    dtype: str
    rows: int
    columns: tuple[Column, ...]

    @cached_property
    def offsets(self) -> list[int]:
        """Where each column begins in a row, in elements, and where a row ends."""
        return list(accumulate((column.size for column in self.columns), initial=0))

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.offsets[-1]

    @property
    def num_elements(self) -> int:
        return self.rows * self.width

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]

    @cached_property
    def key(self) -> str:
        """Names the stack: 16 hex digits of what it is."""
        return hashlib.sha256(json.dumps(self.to_plain()).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return self.columns[0].name + (" or others of its row count" if len(self.columns) > 1 else "")

    def to_plain(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {"dtype": self.dtype, "rows": self.rows, "columns": [list(column) for column in self.columns]}

    @staticmethod
    def of_plain(plain: Any) -> "Stack":
        """What `to_plain` gave."""
        return Stack(plain["dtype"], plain["rows"], tuple(Column(*column) for column in plain["columns"]))


@dataclass(frozen=True)
class Part:
    """What a rank holds of a stack, whole rows, and what it writes of them."""

    stack: Stack
    members: tuple[int, ...]  # of each column, the number of the box that it is of
    rows: range
    start: int  # elements [start, stop) of the stack, row by row, are written by this rank
    stop: int

    @property
    def num_bytes(self) -> int:
        """That are written."""
        return (self.stop - self.start) * ITEM_BYTES[self.stack.dtype]

    def rectangles(self, start: int, stop: int) -> Iterator[tuple[int, range, range]]:
        """Elements [start, stop) of the stack: (the first one's distance from `start`, rows of the stack, columns)."""
        width, at = self.stack.width, start
        while at < stop:
            row, column = divmod(at, width)
            if column or stop - at < width:
                end = min(width, column + stop - at)
                yield at - start, range(row, row + 1), range(column, end)
                at += end - column
            else:
                rows = (stop - at) // width
                yield at - start, range(row, row + rows), range(width)
                at += rows * width

    def columns_in(self, columns: range) -> Iterator[tuple[int, range, int]]:
        """(number of a column, which of its elements, their distance from the first) of columns of a row."""
        offsets = self.stack.offsets
        for number in range(bisect_right(offsets, columns.start) - 1, len(self.stack.columns)):
            first, last = max(offsets[number], columns.start), min(offsets[number + 1], columns.stop)
            if first >= columns.stop:
                return
            if last > first:
                yield number, range(first - offsets[number], last - offsets[number]), first - columns.start


def rows_of(box: Box) -> range:
    """The rows of the whole tensor in which a box lies."""
    return range(box.offsets[0], box.offsets[0] + box.sizes[0]) if box.sizes else range(1)


def columns_of(box: Box) -> range:
    """The same of columns, counted over all dimensions but the first."""
    if len(box.shape) < 2:
        return range(1)
    inner = prod(box.shape[2:])
    assert box.sizes[2:] == box.shape[2:], f"{box}: only rows and columns are split"
    return range(box.offsets[1] * inner, (box.offsets[1] + box.sizes[1]) * inner)


def num_rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def num_columns(shape: tuple[int, ...]) -> int:
    return prod(shape[1:])


def parts_of(boxes: Sequence[Box], at: Coordinates) -> list[Part]:
    """How a rank writes its boxes: every element is written by one of the ranks that hold it.

    The same stacks come out on every rank that holds rows of them: they follow from names, shapes and placement. What
    is placed in another way is in another stack, for ranks of another layout take other rows of it.
    """
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, box in enumerate(boxes):
        if box.num_elements and not is_second(box.name, at):
            groups[num_rows(box.shape), box.dtype, tuple(dims_of(box.name).items())].append(number)
    parts = []
    for (rows, dtype, dims), numbers in groups.items():
        is_cut = ("tp", 1) in dims and "tp" not in at.mesh.axes
        columns = [
            (block, _natural(boxes[number].name), number, Column(boxes[number].name, cut.start, len(cut)))
            for number in numbers
            for block, cut in enumerate(_blocks(columns_of(boxes[number]), is_cut))
        ]
        columns.sort(key=lambda each: each[:2])
        stack = Stack(dtype, rows, tuple(column for *_, column in columns))
        held = rows_of(boxes[numbers[0]])
        assert all(rows_of(boxes[number]) == held for number in numbers), f"rows other than {held} in one stack"
        index, count = num_copies(boxes[numbers[0]].name, at)
        first, size = held.start * stack.width, len(held) * stack.width
        start, stop = first + size * index // count, first + size * (index + 1) // count
        if stop > start:
            parts.append(Part(stack, tuple(number for _, _, number, _ in columns), held, start, stop))
    return parts


def _blocks(columns: range, is_cut: bool) -> list[range]:
    if not is_cut or len(columns) % BLOCKS:
        return [columns]
    size = len(columns) // BLOCKS
    return [columns[block * size : (block + 1) * size] for block in range(BLOCKS)]


def _natural(name: str) -> list[Any]:
    """Sorts block 10 behind block 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
