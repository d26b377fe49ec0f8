"""Whether boxes hold all of a tensor, cell by cell: what `plan.placement.is_whole` says in closed form."""

from collections.abc import Iterable

import numpy as np

from regrow.plan.boxes import Box


def covers(boxes: Iterable[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes, which may overlap, hold every element of a tensor of this shape."""
    held = {(box.offsets, tuple(map(sum, zip(box.offsets, box.sizes, strict=True)))) for box in boxes}
    borders = [sorted({0, size, *(end[dim] for ends in held for end in ends)}) for dim, size in enumerate(shape)]
    cell = [{border: number for number, border in enumerate(each)} for each in borders]
    cells = np.zeros([len(each) - 1 for each in borders], bool)
    for first, last in held:
        cells[tuple(slice(of[a], of[b]) for of, a, b in zip(cell, first, last, strict=True))] = True
    return bool(cells.all())
