"""One rank's part of every global batch, straight from the shards. Imports neither Ray nor Arrow, as training does not.

Step s (0-based) covers positions [s * B, (s + 1) * B) of the run's order, B = global_batch_seqs. Slice k of it is its
k-th of `num_slices` equal runs. A window is `window_steps` steps, the unit that `Order` shuffles and readers read.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from regrow.config.schema import PretrainConfig
from regrow.plan.order import Order

MOST_BLOCKS = 512  # of a window

Positions = NDArray[np.int64]  # [n], in the run's order
Rows = NDArray[np.uint32]  # [n, seq_len + 1] token ids


class RowReader(Protocol):
    """What can read rows by their number: `shards.ShardReader`, `corpora.CorporaReader`."""

    def read(self, row_ids: NDArray[np.int64]) -> Rows: ...


@dataclass(frozen=True)
class RankBatch:
    """A rank's rows of one global batch, in the order of their positions."""

    step: int  # 0-based: optimizer steps done before it
    positions: Positions
    rows: Rows

    def digest(self) -> int:
        """A 64-bit checksum over (position, tokens) of every row.

        The digests of a batch's parts add up, modulo 2**64, to that of the whole, however it was split.
        """
        positions, rows = self.positions.astype("<i8"), np.ascontiguousarray(self.rows, "<u4")
        total = 0
        for position, row in zip(positions, rows, strict=True):
            row_hash = hashlib.blake2b(position.tobytes(), digest_size=8)
            row_hash.update(row)
            total += int.from_bytes(row_hash.digest(), "little")
        return total % 2**64


@dataclass(frozen=True)
class BatchLayout:
    """How positions make steps, slices and windows; the same for the whole run, whatever the world size."""

    global_batch_seqs: int
    num_slices: int
    window_steps: int

    def __post_init__(self) -> None:
        assert self.global_batch_seqs % self.num_slices == 0, self
        assert min(self.global_batch_seqs, self.num_slices, self.window_steps) >= 1, self

    @property
    def slice_seqs(self) -> int:
        return self.global_batch_seqs // self.num_slices

    @property
    def window_rows(self) -> int:
        return self.global_batch_seqs * self.window_steps

    @property
    def num_blocks(self) -> int:
        """Parts that a window travels in: a slice each, or a run of slices where there are many.

        Each costs the stream's actor some 1.5 ms of CPU time (benchmarks/stream_owner.py).
        """
        return min(self.num_slices, MOST_BLOCKS)

    def slices_of_block(self, block: int) -> range:
        return range(block * self.num_slices // self.num_blocks, (block + 1) * self.num_slices // self.num_blocks)

    def blocks_of(self, slices: range) -> range:
        """The blocks that hold these slices, and perhaps others beside them."""
        return range(self._block_of(slices.start), self._block_of(slices.stop - 1) + 1)

    def _block_of(self, slice_number: int) -> int:
        return ((slice_number + 1) * self.num_blocks - 1) // self.num_slices

    def window_of(self, step: int) -> int:
        return step // self.window_steps

    def steps_of(self, window: int) -> range:
        return range(window * self.window_steps, (window + 1) * self.window_steps)

    def positions(self, step: int, slices: range) -> Positions:
        """Positions of these slices of one step: a run of consecutive numbers."""
        begin = step * self.global_batch_seqs
        return np.arange(begin + slices.start * self.slice_seqs, begin + slices.stop * self.slice_seqs)


def layout_of(config: PretrainConfig) -> BatchLayout:
    """The layout of a run."""
    return BatchLayout(config.optim.global_batch_seqs, config.optim.num_slices, config.data.window_steps)


def direct_batches(
    order: Order,
    reader: RowReader,
    layout: BatchLayout,
    *,
    slices: range,
    start_step: int,
    stop_step: int | None = None,
) -> Iterator[RankBatch]:
    """A rank's batches of steps [start_step, stop_step), or for ever, read from the shards as they are needed.

    The same batches as the stream's, for `torchrun`, benchmarks and where the stream fails. What is left of a window is
    read at once, so that each of its row groups is decoded once by this rank.
    """
    step = start_step
    while stop_step is None or step < stop_step:
        steps = range(step, layout.steps_of(layout.window_of(step)).stop)
        if stop_step is not None:
            steps = range(step, min(steps.stop, stop_step))
        yield from read_steps(order, reader, layout, slices=slices, steps=steps)
        step = steps.stop


def read_steps(
    order: Order, reader: RowReader, layout: BatchLayout, *, slices: range, steps: range
) -> Iterator[RankBatch]:
    """A rank's batches of some steps of one window, read together."""
    positions = [layout.positions(step, slices) for step in steps]
    rows = reader.read(order.locate(np.concatenate(positions)))
    per_step = len(slices) * layout.slice_seqs
    for k, step in enumerate(steps):
        yield RankBatch(step, positions[k], rows[k * per_step : (k + 1) * per_step])
