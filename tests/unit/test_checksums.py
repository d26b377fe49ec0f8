"""Checksums of chunks, alone and of many chunks at once, against zlib's of the same bytes."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.state.checksums import CHUNK_BYTES, FEW_GROUPS, GROUP, checksums, crc_of_runs, hold, together

CHUNK = 8
GROUP_BYTES = GROUP * CHUNK


def some_bytes(size: int, seed: int = 0) -> bytearray:
    return bytearray(np.random.default_rng(seed).integers(256, size=size, dtype=np.uint8).tobytes())


@given(st.data())
def test_what_chunks_have_together_is_the_crc32_of_their_bytes(data: st.DataObject) -> None:
    chunk_bytes = data.draw(st.integers(1, 40))
    chunks = 2 ** data.draw(st.integers(0, 7))
    rows = data.draw(st.integers(0, 3))
    content = bytes(some_bytes(rows * chunks * chunk_bytes, data.draw(st.integers(0, 99))))
    row_bytes = chunks * chunk_bytes
    expected = [zlib.crc32(content[at : at + row_bytes]) for at in range(0, len(content), row_bytes)]
    of_chunks = checksums(memoryview(content), chunk_bytes).reshape(rows, chunks)
    assert together(of_chunks, chunk_bytes).tolist() == expected


@given(st.data())
def test_the_crc32_of_runs_of_chunks_follows_from_theirs_the_last_one_being_short_or_not(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 9 * CHUNK_BYTES))
    content = memoryview(bytes(some_bytes(size, data.draw(st.integers(0, 99)))))
    crc = checksums(content)
    ends = st.integers(0, len(crc))
    chunks = [
        tuple(sorted(each)) for each in data.draw(st.lists(st.tuples(ends, ends).filter(lambda at: at[0] != at[1])))
    ]
    runs = [content[first * CHUNK_BYTES : last * CHUNK_BYTES] for first, last in chunks]
    assert crc_of_runs(crc, chunks, [len(run) for run in runs]) == [zlib.crc32(run) for run in runs]


SIZES = [0, 1, CHUNK, GROUP_BYTES, FEW_GROUPS * GROUP_BYTES, FEW_GROUPS * GROUP_BYTES + 3, 7 * GROUP_BYTES - 5]


@pytest.mark.parametrize("size", SIZES)
def test_checksums_hold_and_one_bit_anywhere_breaks_them(size: int) -> None:
    content = some_bytes(size)
    crc = checksums(memoryview(content), CHUNK)
    assert hold(memoryview(content), crc, CHUNK)
    edges = [edge + by for edge in range(0, size + 1, GROUP_BYTES) for by in (-1, 0, CHUNK)]
    for at in {each for each in (*edges, size - 1) if 0 <= each < size}:
        content[at] ^= 4
        assert not hold(memoryview(content), crc, CHUNK), at
        content[at] ^= 4
    for number in range(len(crc)):
        crc[number] ^= 1 << (number % 32)
        assert not hold(memoryview(content), crc, CHUNK), number
        crc[number] ^= 1 << (number % 32)


@pytest.mark.parametrize("size", SIZES[1:])
def test_checksums_of_fewer_or_more_chunks_do_not_hold(size: int) -> None:
    content = some_bytes(size)
    crc = checksums(memoryview(content), CHUNK)
    assert not hold(memoryview(content), crc[:-1], CHUNK)
    assert not hold(memoryview(content), np.append(crc, crc[-1:]), CHUNK)


def test_chunks_that_changed_places_do_not_hold() -> None:
    content = some_bytes(FEW_GROUPS * GROUP_BYTES)
    crc = checksums(memoryview(content), CHUNK)
    content[:CHUNK], content[CHUNK : 2 * CHUNK] = content[CHUNK : 2 * CHUNK], content[:CHUNK]
    assert not hold(memoryview(content), crc, CHUNK)
