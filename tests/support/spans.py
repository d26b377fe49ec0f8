"""What a data file of stand-ins holds, as the metadata of a checkpoint has it."""

import numpy as np

from regrow.state.disk.format import SPAN, Content
from regrow.state.disk.metadata import num_chunks
from regrow.state.disk.stacks import Column, Stack


def content_of(name: str, dtype: str, rows: int, row: int, *, columns: int = 1, offset: int = 4) -> Content:
    """One row of one tensor."""
    stack = Stack(dtype, rows, (Column(name, 0, columns),))
    spans = np.array([(stack.key.encode(), row * columns, columns, offset, 0)], SPAN)
    return Content(spans.tobytes(), bytes(4 * num_chunks(stack, columns)), () if row else (stack,))
