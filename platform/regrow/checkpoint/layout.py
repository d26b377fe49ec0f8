"""Who holds which elements of a tensor, in closed form: no gather, at any world size. Pure."""

from dataclasses import dataclass
from math import prod

from regrow.checkpoint.checksums import CHUNK_BYTES

ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int64": 8}


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of a tensor flattened in row-major order; what a rank holds of it, or a file."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str  # torch's name without the prefix: "float32"
    start: int
    stop: int

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
    """Which part of the training state a rank holds: a shard of every tensor, as do the other replicas' same ranks."""

    shard: int = 0
    num_shards: int = 1
    replica: int = 0
    num_replicas: int = 1


WHOLE = Part()


def shard_span(whole: Span, shard: int, num_shards: int) -> Span:
    """What a shard holds of the tensor that `whole`, any span of it, is of.

    >>> shard_span(Span("w", (5, 10), "float32", 0, 50), 1, 4)
    Span(name='w', shape=(5, 10), dtype='float32', start=20, stop=40)
    """
    num_rows, row = _rows(whole.shape)
    rows = shard_rows(num_rows, shard, num_shards)
    return Span(whole.name, whole.shape, whole.dtype, rows.start * row, rows.stop * row)


def shards_that_hold(span: Span, num_shards: int) -> range:
    """The shards that hold elements of a span.

    >>> shards_that_hold(Span("w", (5, 10), "float32", 15, 45), 4)
    range(0, 3)
    """
    num_rows, row = _rows(span.shape)
    size = -(-num_rows // num_shards) * row
    return range(span.start // size, -(-span.stop // size)) if span.num_elements else range(0)


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows of dim 0, elements of each)."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def replica_part(span: Span, replica: int, num_replicas: int) -> Span:
    """The part of a span that one of several replicas writes or reads, so that each element is moved once.

    Parts begin at borders of the span's chunks, whose checksums they keep.

    >>> replica_part(Span("w", (10_000,), "float32", 0, 10_000), 1, 3)
    Span(name='w', shape=(10000,), dtype='float32', start=0, stop=4096)
    """
    chunk = CHUNK_BYTES // ITEM_BYTES[span.dtype]
    chunks = -(-span.num_elements // chunk)
    begin, end = (min(chunks * part // num_replicas * chunk, span.num_elements) for part in (replica, replica + 1))
    return Span(span.name, span.shape, span.dtype, span.start + begin, span.start + end)
