"""The crc32 of each chunk of a box's bytes: made once, when a snapshot is sealed, and checked wherever they travel.

Chunks are counted from a box's first byte, so that a box keeps its checksums from a slot in memory to a file in
storage.
"""

import numpy as np
from isal import isal_zlib  # the same crc32 as zlib's, three times as fast, and seven where threads share a process
from numpy.typing import NDArray

CHUNK_BYTES = 16 << 10  # that one checksum covers: what a read at any offset may read too much

Crc = NDArray[np.uint32]


def checksums(data: memoryview, chunk_bytes: int = CHUNK_BYTES) -> Crc:
    """crc32 of each `chunk_bytes` of `data`, whose items are bytes."""
    starts = range(0, len(data), chunk_bytes)
    return np.array([isal_zlib.crc32(data[at : at + chunk_bytes]) for at in starts], "<u4")


def num_chunks(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK_BYTES)


def whole_chunks(begin: int, end: int, num_bytes: int) -> tuple[int, int, slice]:
    """The chunks that cover bytes [begin, end) of a box of `num_bytes`: first byte, last byte, and which they are.

    >>> whole_chunks(20_000, 30_000, 100_000)
    (16384, 32768, slice(1, 2, None))
    """
    first, last = begin // CHUNK_BYTES, num_chunks(end)
    return first * CHUNK_BYTES, min(last * CHUNK_BYTES, num_bytes), slice(first, last)
