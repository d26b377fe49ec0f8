"""Who holds which elements of a tensor, in closed form: no gather, at any world size. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from regrow.state.checksums import CHUNK_BYTES

ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int64": 8}


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of a tensor flattened; what a rank holds of it, or a file.

    The order is row-major, but for a tensor that tensor parallelism cuts by columns: one block of them after another.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str  # torch's name without the prefix: "float32"
    start: int
    stop: int
    blocks: tuple[int, int] = (1, 1)  # of rows, or of columns, that tensor parallelism cuts the tensor into

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]

    @property
    def whole_elements(self) -> int:
        return prod(self.shape)


def shard_rows(num_rows: int, shard_rank: int, num_shards: int) -> range:
    """Rows of dim 0 of a shard under FSDP2's rule: ceil(num_rows / num_shards) each, the last ones fewer or none.

    Source: `Shard(0)` in `torch/distributed/tensor/placement_types.py`, which splits as `torch.chunk` does.

    >>> [shard_rows(5, rank, 4) for rank in range(4)]
    [range(0, 2), range(2, 4), range(4, 5), range(5, 5)]
    """
    size = -(-num_rows // num_shards)
    return range(min(shard_rank * size, num_rows), min((shard_rank + 1) * size, num_rows))


@dataclass(frozen=True)
class Part:
    """Which part of the training state a rank holds: of every tensor a shard, as do the other replicas' same ranks; of
    those that tensor parallelism cuts, a shard of a block."""

    shard: int = 0
    num_shards: int = 1
    replica: int = 0
    num_replicas: int = 1
    block: int = 0
    num_blocks: int = 1


WHOLE = Part()


def shard_span(whole: Span, part: Part) -> Span:
    """What a part has of the tensor that `whole`, any span of it, is of.

    >>> shard_span(Span("w", (5, 10), "float32", 0, 50), Part(shard=1, num_shards=4))
    Span(name='w', shape=(5, 10), dtype='float32', start=20, stop=40, blocks=(1, 1))
    >>> shard_span(Span("w", (5, 10), "float32", 0, 50, (1, 2)), Part(1, 4, block=1, num_blocks=2))
    Span(name='w', shape=(5, 10), dtype='float32', start=35, stop=45, blocks=(1, 2))
    """
    num_rows, row = _rows_of_block(whole)
    rows = shard_rows(num_rows, part.shard, part.num_shards)
    first = part.block * num_rows * row if is_cut(whole) else 0
    return replace(whole, start=first + rows.start * row, stop=first + rows.stop * row)


def parts_that_hold(span: Span, num_shards: int) -> list[tuple[int, int]]:
    """The (block, shard) that hold elements of a span; of a tensor that is not cut every block does, and 0 is named.

    >>> parts_that_hold(Span("w", (5, 10), "float32", 15, 45), 4)
    [(0, 0), (0, 1), (0, 2)]
    >>> parts_that_hold(Span("w", (6, 10), "float32", 15, 45, (2, 1)), 2)
    [(0, 0), (0, 1), (1, 0)]
    """
    num_rows, row = _rows_of_block(span)
    size, block = -(-num_rows // num_shards) * row, num_rows * row
    held = []
    if span.num_elements:
        for number in range(span.start // block, -(-span.stop // block)):
            start, stop = max(span.start - number * block, 0), min(span.stop - number * block, block)
            held += [(number, shard) for shard in range(start // size, -(-stop // size))]
    return held


def column_blocks(spans: Iterable[Span]) -> dict[str, int]:
    """Of those tensors that are stored as blocks of columns, by name, how many."""
    return {span.name: span.blocks[1] for span in spans if span.blocks[1] > 1}


def is_cut(span: Span) -> bool:
    """Whether tensor parallelism cuts the tensor: the ranks that share a shard's arithmetic hold a block each."""
    return span.blocks != (1, 1)


def _rows_of_block(span: Span) -> tuple[int, int]:
    """(rows of dim 0, elements of each) of a block."""
    num_rows, row = (span.shape[0], prod(span.shape[1:])) if span.shape else (1, 1)
    return num_rows // span.blocks[0], row // span.blocks[1]


def replica_part(span: Span, replica: int, num_replicas: int) -> Span:
    """The part of a span that one of several replicas writes or reads, so that each element is moved once.

    Parts begin at borders of the span's chunks, whose checksums they keep.

    >>> replica_part(Span("w", (10_000,), "float32", 0, 10_000), 1, 3)
    Span(name='w', shape=(10000,), dtype='float32', start=0, stop=4096, blocks=(1, 1))
    """
    chunk = CHUNK_BYTES // ITEM_BYTES[span.dtype]
    chunks = -(-span.num_elements // chunk)
    begin, end = (min(chunks * part // num_replicas * chunk, span.num_elements) for part in (replica, replica + 1))
    return replace(span, start=span.start + begin, stop=span.start + end)


def written_part(span: Span, part: Part) -> Span:
    """What of a span that it holds a part writes: every element is written by one rank.

    >>> written_part(Span("norm", (8,), "float32", 0, 8), Part(block=1, num_blocks=2)).num_elements
    0
    """
    if part.block and not is_cut(span):
        return replace(span, stop=span.start)
    return replica_part(span, part.replica, part.num_replicas)
