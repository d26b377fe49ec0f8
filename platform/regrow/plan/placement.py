"""Which rank holds which box of a parameter: one table, in closed form, the same on every rank. Pure.

AdamW's moments lie where their parameters do. What an axis does not split, all its ranks hold; of a pipeline, those of
one stage do.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regrow.plan.boxes import Box, chunk
from regrow.plan.mesh import Coordinates, MeshShape

Dims = Mapping[str, int]  # mesh axis -> the dimension that it splits; outer splits first
MOST_KEPT = 1024  # of what is worked out once: blocks of a model are alike


class Row(NamedTuple):
    pattern: str  # of a parameter's name
    dims: Dims


ROWS, COLUMNS = {"tp": 0, "dp_shard": 0}, {"tp": 1, "dp_shard": 0}
TABLE = (  # the first row that matches counts
    Row("layers.*.attention.w[qkv].weight", ROWS),
    Row("layers.*.attention.wo.weight", COLUMNS),
    Row("layers.*.ffn.w[13].weight", ROWS),
    Row("layers.*.ffn.w2.weight", COLUMNS),
    Row("embed.weight", ROWS),
    Row("output.weight", ROWS),
    Row("*", {"dp_shard": 0}),  # norms: tensor parallelism leaves them whole
)


@cache
def dims_of(name: str) -> Dims:
    """Which axis splits which dimension of a parameter, or of a moment of it: `optim/exp_avg/<parameter>`."""
    parameter = name.rpartition("/")[2]
    return next(row.dims for row in TABLE if fnmatchcase(parameter, row.pattern))


def placed(whole: Box, at: Coordinates) -> Box:
    """What a rank holds of the tensor that `whole`, any box of it, is of.

    >>> mesh = MeshShape(dp_replicate=1, dp_shard=4, tp=2)
    >>> str(placed(Box.whole("layers.0.ffn.w2.weight", (5, 10)), Coordinates(mesh, rank=5)))
    'layers.0.ffn.w2.weight[4:5,5:10]'
    """
    offsets, sizes = _placed(whole.shape, tuple(dims_of(whole.name).items()), at)
    return Box(whole.name, whole.shape, offsets, sizes, whole.dtype)


def placed_all(wholes: Iterable[Box], at: Coordinates) -> list[Box]:
    """`placed` of many tensors: what is alike is worked out once, as blocks of a model are."""
    known: dict[tuple[Any, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}
    found = []
    for whole in wholes:
        key = whole.shape, tuple(dims_of(whole.name).items())
        if key not in known:
            known[key] = _placed(*key, at)
        found.append(Box(whole.name, whole.shape, *known[key], whole.dtype))
    return found


def kind_of(box: Box, mesh: MeshShape) -> Hashable:
    """Equal for boxes of which the same ranks of a mesh hold the same elements."""
    return box.shape, box.offsets, box.sizes, tuple(dims_of(box.name).items()), stage_of(box.name, mesh)


def stage_of(name: str, mesh: MeshShape) -> int | None:
    """Where along `pp` a parameter, or a moment of it, is; None where no stage has a block of its number. An embedding
    that is the output, too, is counted where it comes first.

    >>> [stage_of(f"layers.{block}.ffn.w1.weight", MeshShape(1, 1, pp=2, blocks=(2, 1))) for block in range(4)]
    [0, 0, 1, None]
    """
    if mesh.pp == 1:
        return 0
    first, _, rest = name.rpartition("/")[2].partition(".")
    if first != "layers":
        return 0 if first == "embed" else mesh.pp - 1
    return stage_of_blocks(mesh.pp, mesh.blocks).get(int(rest.partition(".")[0]))


@cache
def stage_of_blocks(pp: int, blocks: tuple[int, ...]) -> Mapping[int, int]:
    """The rank of a pipeline that has each block; `blocks` are those of its stages."""
    assert blocks, f"{pp} ranks, and it is not known which blocks each of them has"
    ranks = [stage % pp for stage, count in enumerate(blocks) for _ in range(count)]
    return dict(enumerate(ranks))


def that_hold(box: Box, mesh: MeshShape) -> list[dict[str, int]]:
    """Which ranks of a mesh hold elements of a box: coordinates along the axes that split its tensor, and that of the
    stage which has it.

    >>> that_hold(Box("layers.0.ffn.w1.weight", (12, 10), (4, 0), (4, 10)), MeshShape(1, 2, 2))
    [{'tp': 0, 'dp_shard': 1}, {'tp': 1, 'dp_shard': 0}]
    """
    if (stage := stage_of(box.name, mesh)) is None:
        return []
    place = {"pp": stage} if mesh.pp > 1 else {}
    dims = tuple(dims_of(box.name).items())
    return [{**place, **at} for at in _that_hold(box.shape, box.offsets, box.sizes, dims, mesh)]


def is_whole(mesh: MeshShape, ranks: NDArray[np.int64]) -> bool:
    """Whether these ranks of a mesh hold between them every element of every parameter that the table places."""
    return all(  # all places along these axes have to be there
        len(np.unique(places(mesh, ranks, axes))) == prod(mesh.stride(axis)[1] for axis in axes)
        for axes in {("pp", *row.dims) for row in TABLE}
    )


def places(mesh: MeshShape, ranks: NDArray[np.int64], axes: Sequence[str]) -> NDArray[np.int64]:
    """Where ranks are along some axes of their mesh, as one number each, the last axis counting fastest.

    >>> places(MeshShape(dp_replicate=2, dp_shard=3, tp=2), np.arange(12), ("tp", "dp_shard")).tolist()
    [0, 3, 1, 4, 2, 5, 0, 3, 1, 4, 2, 5]
    """
    found = np.zeros_like(ranks)
    for inner, size in map(mesh.stride, axes):
        found = found * size + ranks // inner % size
    return found


def place_number(mesh: MeshShape, place: Mapping[str, int]) -> int:
    """What `places` gives for ranks with these coordinates along these axes."""
    found = 0
    for axis, index in place.items():
        found = found * mesh.stride(axis)[1] + index
    return found


def num_copies(name: str, at: Coordinates) -> tuple[int, int]:
    """Which of the ranks that hold the same box a rank is, and how many they are: a parameter is in one stage.

    >>> num_copies("norm.weight", Coordinates(MeshShape(dp_replicate=2, dp_shard=3, tp=2), rank=7))
    (3, 4)
    """
    index, count = 0, 1
    for axis in at.mesh.axes:
        if axis not in dims_of(name) and axis != "pp":
            coordinate, size = at.along(axis)
            index, count = index * size + coordinate, count * size
    return index, count


def is_second(name: str, at: Coordinates) -> bool:
    """Whether a rank of a pipeline has a copy of what an earlier stage has: of an embedding that is the output, too."""
    return name.rpartition("/")[2] == "embed.weight" and at.along("pp")[0] > 0


def is_first_of_stage(at: Coordinates) -> bool:
    """Whether a rank is the first of those that have its stages."""
    return not any(at.along(axis)[0] for axis in at.mesh.axes if axis != "pp")


@lru_cache(MOST_KEPT)
def _placed(
    shape: tuple[int, ...], dims: tuple[tuple[str, int], ...], at: Coordinates
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of what a rank holds of a tensor."""
    box = Box.whole("", shape)
    for axis, dim in dims:
        box = box.narrow(dim, chunk(box.sizes[dim], *at.along(axis)))
    return box.offsets, box.sizes


@lru_cache(MOST_KEPT)
def _that_hold(
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    dims: tuple[tuple[str, int], ...],
    mesh: MeshShape,
) -> list[dict[str, int]]:
    """Coordinates along the axes that split a tensor, of ranks that hold elements of this box of it."""
    box = Box("", shape, offsets, sizes)
    found: list[tuple[dict[str, int], Box]] = [({}, Box.whole("", shape))]
    for axis, dim in dims:
        size = mesh.axes.get(axis, 1)
        found = [
            ({**at, axis: index}, held.narrow(dim, chunk(held.sizes[dim], index, size)))
            for at, held in found
            for index in _touching(held, dim, size, box)
        ]
    return [at for at, held in found if held.intersection(box)]


def _touching(held: Box, dim: int, count: int, box: Box) -> range:
    """Which of so many chunks of a box hold elements of another one, as far as one dimension tells."""
    most = -(-held.sizes[dim] // count)
    first, last = (at - held.offsets[dim] for at in (box.offsets[dim], box.offsets[dim] + box.sizes[dim]))
    return range(max(0, first // most), min(count, -(-last // most))) if most else range(0)
