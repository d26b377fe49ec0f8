"""One rank's part of a global batch, and where every row of it comes from. No Ray."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regrow.config.schema import PretrainConfig
from regrow.data.shards import Rows, ShardReader
from regrow.plan.order import Order


@dataclass(frozen=True)
class RankBatch:
    """A rank's rows of one global batch, slices in order."""

    step: int  # 0-based: optimizer steps done before it
    positions: NDArray[np.int64]  # [n] of the rows in the run's order
    rows: Rows  # [n, seq_len + 1]

    def digest(self) -> int:
        """A 64-bit checksum over (position, tokens) of every row.

        Digests of parts add up modulo 2**64 to the digest of the whole, however it was split.
        """
        total = 0
        for position, row in zip(self.positions.astype("<i8"), self.rows.astype("<u4", copy=False), strict=True):
            row_hash = hashlib.blake2b(position.tobytes(), digest_size=8)
            row_hash.update(np.ascontiguousarray(row).data)
            total += int.from_bytes(row_hash.digest(), "little")
        return total % 2**64


@dataclass(frozen=True)
class BatchLayout:
    """How positions make global batches, slices and windows; the same for the whole run."""

    global_batch_seqs: int
    num_slices: int
    window_steps: int  # global batches of a window

    @property
    def slice_seqs(self) -> int:
        return self.global_batch_seqs // self.num_slices

    @property
    def window_rows(self) -> int:
        return self.global_batch_seqs * self.window_steps

    def positions(self, step: int, slices: range) -> NDArray[np.int64]:
        """Positions, int64 [n], of these slices of the batch of a step (0-based); one run of numbers."""
        begin = step * self.global_batch_seqs
        return np.arange(begin + slices.start * self.slice_seqs, begin + slices.stop * self.slice_seqs)


def layout_of(config: PretrainConfig) -> BatchLayout:
    return BatchLayout(config.optim.global_batch_seqs, config.optim.num_slices, config.data.window_steps)


def order_of(config: PretrainConfig, reader: ShardReader) -> Order:
    """The order of a run over the split that the reader reads."""
    return Order(
        num_rows=reader.num_rows,
        rows_per_group=reader.rows_per_group,
        window_rows=layout_of(config).window_rows,
        seed=config.run.seed,
    )


def read_batch(order: Order, reader: ShardReader, layout: BatchLayout, step: int, slices: range) -> RankBatch:
    """The rows of these slices of one step, straight from the shards."""
    positions = layout.positions(step, slices)
    return RankBatch(step, positions, reader.read(order.locate(positions)))


def direct_batches(
    order: Order, reader: ShardReader, layout: BatchLayout, *, slices: range, start_step: int, stop_step: int
) -> Iterator[RankBatch]:
    """This rank's batches of steps [start_step, stop_step) with no stream: for `torchrun`, benchmarks and tests."""
    for step in range(start_step, stop_step):
        yield read_batch(order, reader, layout, step, slices)
