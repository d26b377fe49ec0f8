"""Properties of the pure half of checkpoints: who holds what, and what to read from where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.errors import CheckpointError
from regrow.state.layout import Span, replica_part, shard_rows
from regrow.state.reshard import Source, plan_reads


def spans(num_rows: int, row: int, num_shards: int) -> list[Span]:
    parts = [shard_rows(num_rows, rank, num_shards) for rank in range(num_shards)]
    return [Span("w", (num_rows, row), "float32", rows.start * row, rows.stop * row) for rows in parts]


@given(st.integers(0, 300), st.integers(1, 40))
def test_shards_hold_every_row_once_in_order(num_rows: int, num_shards: int) -> None:
    rows = [row for rank in range(num_shards) for row in shard_rows(num_rows, rank, num_shards)]
    assert rows == list(range(num_rows))


@given(st.integers(0, 1000), st.integers(1, 9))
def test_replicas_write_every_element_once(num_elements: int, num_replicas: int) -> None:
    span = Span("w", (2000,), "float32", 500, 500 + num_elements)
    parts = [replica_part(span, replica, num_replicas) for replica in range(num_replicas)]
    assert [e for part in parts for e in range(part.start, part.stop)] == list(range(span.start, span.stop))


@given(st.integers(1, 100), st.integers(1, 7), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.randoms())
def test_resharding_reads_each_needed_element_once_from_a_file_that_holds_it(
    num_rows: int, row: int, before: int, after: int, num_replicas: int, random: object
) -> None:
    have = [
        Source(f"file {rank}/{replica}", replica_part(span, replica, num_replicas))
        for rank, span in enumerate(spans(num_rows, row, before))
        for replica in range(num_replicas)
    ]
    random.shuffle(have)  # type: ignore[attr-defined]
    want = spans(num_rows, row, after)
    got: dict[int, list[int]] = {index: [] for index in range(after)}
    for read in plan_reads(have, want):
        assert read.source.span.start <= read.start < read.stop <= read.source.span.stop
        got[read.want] += range(read.start, read.stop)
    assert got == {index: list(range(span.start, span.stop)) for index, span in enumerate(want)}


def test_an_element_that_no_file_holds_is_named() -> None:
    have = [Source("a", Span("w", (10,), "float32", 0, 4)), Source("b", Span("w", (10,), "float32", 6, 10))]
    with pytest.raises(CheckpointError, match=r"w: no file holds elements 4 and on \(wanted 0:10\)"):
        plan_reads(have, [Span("w", (10,), "float32", 0, 10)])
