"""A window of the token stream as an Arrow table, and its blocks back."""

from typing import Any

import numpy as np
import pyarrow as pa

from regrow.data.read.batch import BatchLayout, Positions, RowReader, Rows
from regrow.plan.order import Order

Block = tuple[Positions, Rows]  # of one window: slice after slice, each of them step after step


def window_table(window: int, order: Order, reader: RowReader, layout: BatchLayout) -> pa.Table:
    """A window as an Arrow table with a row for each block: the bytes of its positions and of its tokens.

    Within a block slice after slice, each of them step after step. Each row group is decoded once.
    """
    first = window * layout.window_rows
    shape = (layout.window_steps, layout.num_slices, layout.slice_seqs)
    positions = np.arange(first, first + layout.window_rows).reshape(shape).swapaxes(0, 1).ravel()
    rows = reader.read(order.locate(positions))

    def column(values: np.ndarray) -> Any:
        data = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        firsts = [layout.slices_of_block(block).start for block in range(layout.num_blocks)]
        ends = np.array([*firsts, layout.num_slices], np.int64) * (data.nbytes // layout.num_slices)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
        return pa.LargeBinaryArray.from_buffers(pa.large_binary(), layout.num_blocks, buffers)

    return pa.table({"positions": column(positions), "rows": column(rows)})


def block_of(table: pa.Table) -> Block:
    """A block as it comes from the object store: positions and rows that share its memory."""
    positions = np.frombuffer(table["positions"][0].as_buffer(), "<i8")
    return positions, np.frombuffer(table["rows"][0].as_buffer(), "<u4").reshape(len(positions), -1)
