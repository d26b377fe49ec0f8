"""Rectangles of tensors: what a rank, a file or a message holds. Pure.

Offsets and sizes as in `ChunkStorageMetadata` of torch.distributed.checkpoint; elements in row-major order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from operator import add, sub
from typing import Any

import numpy as np
from numpy.typing import NDArray

ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int64": 8}

Ints = NDArray[np.int64]


def chunk(size: int, index: int, count: int) -> range:
    """Chunk `index` of `count` as FSDP2 and `torch.chunk` cut: ceil(size / count) each, the last ones fewer or none.

    >>> [chunk(5, index, 4) for index in range(4)]
    [range(0, 2), range(2, 4), range(4, 5), range(5, 5)]
    """
    most = -(-size // count)
    return range(min(index * most, size), min((index + 1) * most, size))


@dataclass(frozen=True)
class Box:
    """Elements [offsets, offsets + sizes) of a named tensor, in every dimension."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str = "float32"  # torch's name without the prefix

    @staticmethod
    def whole(name: str, shape: tuple[int, ...], dtype: str = "float32") -> "Box":
        """All of a tensor."""
        return Box(name, shape, (0,) * len(shape), shape, dtype)

    @property
    def num_elements(self) -> int:
        return prod(self.sizes)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box in the whole tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))

    def __str__(self) -> str:
        """
        >>> str(Box("w", (5, 10), (2, 0), (1, 10)))
        'w[2:3,0:10]'
        """
        return f"{self.name}[{','.join(f'{each.start}:{each.stop}' for each in self.slices)}]"

    def narrow(self, dim: int, part: range) -> "Box":
        """These indices of one dimension, counted from the box's first.

        >>> Box("w", (5, 10), (2, 0), (3, 10)).narrow(0, range(1, 3)).slices
        (slice(3, 5, None), slice(0, 10, None))
        """
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + part.start, len(part)
        return Box(
            self.name, self.shape, tuple(offsets), tuple(sizes), self.dtype
        )  # `replace` takes five times as long

    def intersection(self, other: "Box") -> "Box | None":
        """What two boxes of one tensor have in common; None where that is nothing."""
        first = tuple(map(max, self.offsets, other.offsets))
        last = map(min, map(add, self.offsets, self.sizes), map(add, other.offsets, other.sizes))
        sizes = tuple(map(sub, last, first))
        return Box(self.name, self.shape, first, sizes, self.dtype) if min(sizes, default=1) > 0 else None

    def slabs(self, most_bytes: int) -> Iterator["Box"]:
        """The box in runs of whole rows, of so many bytes at most or one row each."""
        if not self.sizes or not self.num_elements:
            yield self
            return
        rows = max(1, most_bytes * self.sizes[0] // self.num_bytes)
        for first in range(0, self.sizes[0], rows):
            yield self.narrow(0, range(first, min(first + rows, self.sizes[0])))


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a box in row-major order: replicas write and read pieces of the box that they hold."""

    box: Box
    start: int
    stop: int

    @staticmethod
    def all_of(box: Box) -> "Piece":
        return Piece(box, 0, box.num_elements)

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.box.dtype]


@dataclass(frozen=True)
class Runs:
    """Runs of neighbouring elements that lie both in a source and in a target, in the order of both."""

    source: Ints  # first element of each
    target: Ints
    length: Ints

    @staticmethod
    def one(source: int, target: int, length: int) -> "Runs":
        return Runs(*np.array([[source], [target], [length]]))

    @property
    def first(self) -> tuple[int, int, int]:
        """Source, target and length of the first one."""
        return int(self.source[0]), int(self.target[0]), int(self.length[0])

    @property
    def num_elements(self) -> int:
        return int(self.length.sum())

    def __getitem__(self, some: Any) -> "Runs":
        return Runs(self.source[some], self.target[some], self.length[some])


NO_RUNS = Runs(*np.empty((3, 0), np.int64))


def common_runs(source: Piece, target: Piece) -> Runs:
    """What two pieces of one tensor have in common: counted in the source from the piece's first element, in the
    target from its box's."""
    common = source.box.intersection(target.box)
    if common is None:
        return NO_RUNS
    inner = max(len(common.sizes) - 1, 0)  # the dimensions from here on are neighbours in both
    while inner > 0 and common.sizes[inner] == source.box.sizes[inner] == target.box.sizes[inner]:
        inner -= 1
    length = prod(common.sizes[inner:])
    if inner == 0:  # all of it is one run, as where rows alone are split
        at, to = _first_element(source.box, common), _first_element(target.box, common)
        first, last = max(0, source.start - at, target.start - to), min(length, source.stop - at, target.stop - to)
        return Runs.one(at + first - source.start, to + first, last - first) if last > first else NO_RUNS
    a, b = (_first_elements(piece.box, common, inner) for piece in (source, target))
    begin = np.maximum(0, np.maximum(source.start - a, target.start - b))
    end = np.minimum(length, np.minimum(source.stop - a, target.stop - b))
    return Runs(a + begin - source.start, b + begin, end - begin)[end > begin]


def _first_elements(box: Box, common: Box, inner: int) -> Ints:
    """The number in `box` of the first element of every row of `common`, rows of the dimensions from `inner` on."""
    found = np.array([_first_element(box, common)], np.int64)
    for dim, size in enumerate(common.sizes[:inner]):
        found = (found[:, None] + prod(box.sizes[dim + 1 :]) * np.arange(size)).reshape(-1)
    return found


def _first_element(box: Box, common: Box) -> int:
    """The number in `box` of the first element of `common`."""
    number = 0
    for at, of, size in zip(common.offsets, box.offsets, box.sizes, strict=True):
        number = number * size + at - of
    return number
