"""Who trains on which rows, and the checksum that proves it."""

import functools
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.data.read.batch import BatchLayout, RankBatch, Rows, direct_batches
from regrow.data.read.shards import ShardReader
from regrow.plan.batch import plan_batch
from regrow.plan.order import Order
from support.corpus import write_rows

LAYOUT = BatchLayout(global_batch_seqs=24, num_slices=12, window_steps=4)
relaxed = settings(max_examples=50)


class FakeReader:
    """Rows that say which they are, and how often they were asked for."""

    def __init__(self) -> None:
        self.reads: list[np.ndarray] = []

    def read(self, row_ids: np.ndarray) -> Rows:
        self.reads.append(row_ids)
        return np.stack([row_ids, row_ids * 7], axis=1).astype(np.uint32)


def batch(start: int, stop: int) -> RankBatch:
    positions = np.arange(start, stop)
    return RankBatch(0, positions, np.stack([positions + 5, positions * 3], axis=1).astype(np.uint32))


def test_digest_is_the_one_that_metrics_files_hold() -> None:
    assert f"{batch(0, 3).digest():016x}" == "a84013d79cc0ed9f"


@relaxed
@given(cuts=st.lists(st.integers(0, 40), max_size=5))
def test_digests_of_parts_add_up_to_that_of_the_whole(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), 40]
    parts = [batch(a, b).digest() for a, b in itertools.pairwise(bounds)]
    assert sum(parts) % 2**64 == batch(0, 40).digest()


def test_digest_sees_a_changed_token_a_changed_position_and_exchanged_rows() -> None:
    whole = batch(0, 10)
    digests = {whole.digest(), batch(0, 9).digest(), batch(1, 11).digest()}
    token = RankBatch(0, whole.positions, whole.rows.copy())
    token.rows[4, 1] ^= 1
    exchanged = RankBatch(0, whole.positions, whole.rows[::-1])
    shifted = RankBatch(0, whole.positions + 1, whole.rows)
    digests |= {token.digest(), exchanged.digest(), shifted.digest()}
    assert len(digests) == 6


def test_digest_does_not_depend_on_memory_layout_or_byte_order() -> None:
    whole = batch(0, 10)
    strided = np.asfortranarray(whole.rows).astype(">u4")
    assert RankBatch(0, whole.positions.astype(">i8"), strided).digest() == whole.digest()


@relaxed
@given(world_size=st.integers(1, 12), step=st.integers(0, 10**6))
def test_ranks_share_out_the_positions_of_a_step_in_order(world_size: int, step: int) -> None:
    plan = plan_batch(num_slices=12, world_size=world_size)
    positions = np.concatenate([LAYOUT.positions(step, slices) for slices in plan.ranges])
    assert np.array_equal(positions, np.arange(step * 24, (step + 1) * 24))


ORDER = Order.of_one(num_rows=333, rows_per_group=10, window_rows=LAYOUT.window_rows, seed=1)
SLICES = range(2, 7)


@functools.cache
def scan() -> list[RankBatch]:
    return list(direct_batches(ORDER, FakeReader(), LAYOUT, slices=SLICES, start_step=0, stop_step=50))


@relaxed
@given(start=st.integers(0, 30), num_steps=st.integers(0, 20))
def test_direct_batches_from_any_step_are_those_of_a_scan(start: int, num_steps: int) -> None:
    steps = range(start, start + num_steps)
    part = list(
        direct_batches(ORDER, FakeReader(), LAYOUT, slices=SLICES, start_step=steps.start, stop_step=steps.stop)
    )
    assert [b.step for b in part] == list(steps)
    for mine, theirs in zip(part, scan()[steps.start : steps.stop], strict=True):
        assert np.array_equal(mine.positions, LAYOUT.positions(mine.step, SLICES))
        assert np.array_equal(mine.rows[:, 0], ORDER.locate(mine.positions))
        assert np.array_equal(mine.rows, theirs.rows)


def test_direct_batches_read_what_is_left_of_a_window_at_once() -> None:
    reader = FakeReader()
    list(direct_batches(ORDER, reader, LAYOUT, slices=range(6), start_step=3, stop_step=10))
    assert [len(read) // 12 for read in reader.reads] == [1, 4, 2]


def test_direct_batches_run_through_epochs_for_ever() -> None:
    order = Order.of_one(num_rows=100, rows_per_group=10, window_rows=LAYOUT.window_rows, seed=1)
    batches = direct_batches(order, FakeReader(), LAYOUT, slices=range(12), start_step=0)
    seen = np.concatenate([next(batches).rows[:, 0] for _ in range(100)])  # 25 windows, exactly 24 epochs
    assert np.array_equal(np.bincount(seen), np.full(100, 24))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_sum_of_digests_over_ranks_is_the_same_at_every_world_size(world_size: int, tmp_path: Path) -> None:
    write_rows(tmp_path, num_rows=250)
    order = Order.of_one(num_rows=250, rows_per_group=8, window_rows=LAYOUT.window_rows, seed=9)
    ranks = [
        [b.digest() for b in direct_batches(order, reader, LAYOUT, slices=slices, start_step=2, stop_step=14)]
        for slices in plan_batch(num_slices=12, world_size=world_size).ranges
        for reader in [ShardReader(tmp_path, "train")]
    ]
    sums = [sum(parts) % 2**64 for parts in zip(*ranks, strict=True)]
    assert [f"{total:016x}" for total in sums[:2]] == ["8201ecc3895d61a6", "84392d5d7c9c0e38"]
    assert len(set(sums)) == 12


def test_batches_import_neither_arrow_nor_ray() -> None:
    code = "import regrow.data.read.batch, sys; assert not {'ray', 'pyarrow', 'torch', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("num_slices", "most"), [(12, 512), (521, 512), (4096, 512), (7, 3), (16384, 512)])
def test_blocks_are_runs_of_slices_that_cover_each_once(
    num_slices: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.data.read.batch.MOST_BLOCKS", most)
    layout = BatchLayout(num_slices, num_slices, 2)
    assert layout.num_blocks == min(num_slices, most)
    held = [k for block in range(layout.num_blocks) for k in layout.slices_of_block(block)]
    assert held == list(range(num_slices))
    for start, stop in [(0, 1), (num_slices // 3, num_slices // 2), (num_slices - 1, num_slices), (0, num_slices)]:
        blocks = layout.blocks_of(range(start, stop))
        assert start in layout.slices_of_block(blocks[0])
        assert stop - 1 in layout.slices_of_block(blocks[-1])
