"""The crc32 of each chunk of a box's bytes: made once, when a snapshot is sealed, and checked wherever they travel.

Chunks are counted from a box's first byte, so that a box keeps its checksums from a slot in memory to a file in
storage.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from isal.isal_zlib import (  # the same as zlib's, three times as fast, and seven where threads share a process
    crc32,
    crc32_combine,
)
from numpy.typing import NDArray

CHUNK_BYTES = 16 << 10  # that one checksum covers: what a read at any offset may read too much
GROUP = 64  # chunks that are checked by one call: for one of them, the call is most of what it costs
FEW_GROUPS = 4  # below so many, their checksums are not worth putting together

Crc = NDArray[np.uint32]


def checksums(data: memoryview, chunk_bytes: int = CHUNK_BYTES) -> Crc:
    """crc32 of each `chunk_bytes` of `data`, whose items are bytes."""
    starts = range(0, len(data), chunk_bytes)
    return np.array([crc32(data[at : at + chunk_bytes]) for at in starts], "<u4")


def hold(data: memoryview, crc: Crc, chunk_bytes: int = CHUNK_BYTES) -> bool:
    """Whether these are the checksums of the chunks of `data`, all of them."""
    if len(crc) != -(-len(data) // chunk_bytes):
        return False
    group_bytes = GROUP * chunk_bytes
    num_groups = len(data) // group_bytes
    if num_groups < FEW_GROUPS:
        return np.array_equal(checksums(data, chunk_bytes), crc)
    of_groups, rest = np.split(crc, [num_groups * GROUP])
    at = num_groups * group_bytes
    return np.array_equal(
        checksums(data[:at], group_bytes), together(of_groups.reshape(-1, GROUP), chunk_bytes)
    ) and np.array_equal(checksums(data[at:], chunk_bytes), rest)


def together(crc: Crc, chunk_bytes: int = CHUNK_BYTES) -> Crc:
    """The crc32 of all bytes of each row of chunks, from the chunks' own: [n, a power of 2] -> [n].

    A crc32 is linear: that of two parts is the first one's, as zeros in the place of the second make it, plus the
    second one's, modulo 2.
    """
    while crc.shape[1] > 1:
        crc = _followed(crc[:, 0::2], chunk_bytes) ^ crc[:, 1::2]
        chunk_bytes *= 2
    return crc[:, 0]


def crc_of_runs(crc: Crc, chunks: Sequence[tuple[int, int]], sizes: Sequence[int]) -> list[int]:
    """The crc32 of all bytes of runs of chunks, [first, last) with so many bytes each: the last one may be short."""
    first, last = np.array(chunks, int).reshape(-1, 2).T
    num_full = np.array(sizes, int) // CHUNK_BYTES
    width = 1 << (max(num_full.tolist(), default=1) - 1).bit_length()
    number = (first + num_full)[:, None] + np.arange(-width, 0)  # those before the first count as nothing
    of_full = together(np.where(number >= first[:, None], crc[np.maximum(number, 0)], 0)).tolist()
    short = [size % CHUNK_BYTES for size in sizes]
    return [
        crc32_combine(full, int(crc[end - 1]), rest) if rest else full
        for full, end, rest in zip(of_full, last.tolist(), short, strict=True)
    ]


def _followed(crc: Crc, num_bytes: int) -> Crc:
    """What checksums become where so many zeros follow, but for what those alone add."""
    of_byte = _tables(num_bytes)
    return of_byte[0][crc & 255] ^ of_byte[1][crc >> 8 & 255] ^ of_byte[2][crc >> 16 & 255] ^ of_byte[3][crc >> 24]


@cache
def _tables(num_bytes: int) -> Crc:
    """The same of each value of each of the four bytes of a checksum, which follows from its bits: [4, 256]."""
    of_bit = np.array([crc32_combine(1 << bit, 0, num_bytes) for bit in range(32)], "<u4").reshape(4, 1, 8)
    is_set = np.arange(256)[:, None] >> np.arange(8) & 1
    return np.bitwise_xor.reduce(np.where(is_set, of_bit, np.uint32(0)), axis=2).astype("<u4")


def num_chunks(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK_BYTES)


def whole_chunks(begin: int, end: int, num_bytes: int) -> tuple[int, int, slice]:
    """The chunks that cover bytes [begin, end) of a box of `num_bytes`: first byte, last byte, and which they are.

    >>> whole_chunks(20_000, 30_000, 100_000)
    (16384, 32768, slice(1, 2, None))
    """
    first, last = begin // CHUNK_BYTES, num_chunks(end)
    return first * CHUNK_BYTES, min(last * CHUNK_BYTES, num_bytes), slice(first, last)
