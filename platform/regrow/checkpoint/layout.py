"""Who holds which elements of a tensor, in closed form: no gather, at any world size. Pure."""

from dataclasses import dataclass
from math import prod


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


def replica_part(span: Span, replica: int, num_replicas: int) -> Span:
    """The part of a span that one of several replicas writes, so that each element is written once.

    >>> replica_part(Span("w", (10,), "float32", 0, 10), 1, 3)
    Span(name='w', shape=(10,), dtype='float32', start=3, stop=6)
    """
    start = span.start + span.num_elements * replica // num_replicas
    stop = span.start + span.num_elements * (replica + 1) // num_replicas
    return Span(span.name, span.shape, span.dtype, start, stop)
