import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.plan.order import ORDER_VERSION, Order, derive_keys, permute, unpermute

GOLDEN = Path(__file__).parents[1] / "golden" / f"order_v{ORDER_VERSION}.json"

seeds = st.integers(0, 2**64 - 1)
relaxed = settings(max_examples=50)


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Any shape: short last groups, one group, groups larger than the corpus, windows larger than an epoch."""
    return Order.of_one(
        num_rows=draw(st.integers(1, 400)),
        rows_per_group=draw(st.integers(1, 70)),
        window_rows=draw(st.integers(1, 900)),
        seed=draw(seeds),
    )


@relaxed
@given(size=st.integers(1, 3000), seed=seeds)
def test_permute_is_a_bijection_and_unpermute_its_inverse(size: int, seed: int) -> None:
    keys = derive_keys(seed, 1, np.array([7]))
    image = permute(np.arange(size), size, keys)
    assert np.array_equal(np.sort(image), np.arange(size))
    assert np.array_equal(unpermute(image, size, keys), np.arange(size))


@relaxed
@given(size=st.integers(2**33, 2**60), seed=seeds, values=st.lists(st.integers(0, 2**33 - 1), min_size=1, max_size=20))
def test_permute_round_trips_in_domains_too_large_to_list(size: int, seed: int, values: list[int]) -> None:
    keys = derive_keys(seed, 2, np.arange(len(values)))
    image = permute(np.array(values), size, keys)
    assert image.min() >= 0
    assert image.max() < size
    assert unpermute(image, size, keys).tolist() == values


@pytest.mark.parametrize("size", [2, 3, 5, 8, 24, 192])
def test_every_value_reaches_every_place_about_equally_often(size: int) -> None:
    num_keys = 4000
    keys = derive_keys(0, 1, np.arange(num_keys))
    image = permute(np.tile(np.arange(size), num_keys), size, np.repeat(keys, size)).reshape(num_keys, size)
    counts = np.stack([np.bincount(image[:, place], minlength=size) for place in range(size)])
    expected = num_keys / size
    chi2 = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 10, (
        chi2
    )  # mean + 5 standard deviations, and room for freedom = 1


@relaxed
@given(order=orders(), first_epoch=st.integers(0, 3))
def test_each_epoch_lays_out_every_row_exactly_once(order: Order, first_epoch: int) -> None:
    corpus = order.corpora[0]
    offsets = np.arange(corpus.num_rows)
    rows = corpus.locate(first_epoch * corpus.num_rows + offsets, seed=order.seed, domain=2)
    assert np.array_equal(np.sort(rows), offsets)


@relaxed
@given(order=orders())
def test_a_window_shuffles_its_own_places_and_no_others(order: Order) -> None:
    for k in range(3):
        places = np.arange(k * order.window_rows, (k + 1) * order.window_rows)
        laid_out = order.corpora[0].locate(places, seed=order.seed, domain=2)
        assert np.array_equal(np.sort(order.locate(places)), np.sort(laid_out))


@relaxed
@given(order=orders(), num_epochs=st.integers(1, 3))
def test_no_row_is_seen_twice_more_than_another_beyond_window_straddling(order: Order, num_epochs: int) -> None:
    """After n whole windows every row was seen floor or ceil of the epochs that they cover."""
    num_windows = -(-num_epochs * order.first_rows[-1] // order.window_rows)
    seen = np.bincount(order.locate(np.arange(num_windows * order.window_rows)), minlength=order.first_rows[-1])
    whole_epochs = num_windows * order.window_rows // order.first_rows[-1]
    assert seen.min() >= whole_epochs
    assert seen.max() <= whole_epochs + 1


@relaxed
@given(num_rows=st.integers(1, 50), epochs_per_window=st.integers(1, 5), seed=seeds)
def test_windows_of_whole_epochs_hold_each_row_equally_often(num_rows: int, epochs_per_window: int, seed: int) -> None:
    order = Order.of_one(num_rows=num_rows, rows_per_group=7, window_rows=num_rows * epochs_per_window, seed=seed)
    rows = order.locate(np.arange(order.window_rows))
    assert np.array_equal(np.bincount(rows, minlength=num_rows), np.full(num_rows, epochs_per_window))


@relaxed
@given(order=orders(), data=st.data())
def test_seeking_equals_scanning(order: Order, data: st.DataObject) -> None:
    scan = order.locate(np.arange(1500))
    at = data.draw(st.lists(st.integers(0, 1499), max_size=30))
    assert order.locate(np.array(at, np.int64)).tolist() == scan[at].tolist()


@relaxed
@given(order=orders(), position=st.integers(0, 2**62 - 1))
def test_any_position_of_the_far_future_has_a_row(order: Order, position: int) -> None:
    assert 0 <= order.locate(np.array([position]))[0] < order.first_rows[-1]


def test_epochs_windows_and_seeds_differ() -> None:
    order = Order.of_one(num_rows=640, rows_per_group=16, window_rows=64, seed=0)
    epochs = order.locate(np.arange(3 * 640)).reshape(3, 640)
    assert all(not np.array_equal(a, b) for a, b in itertools.combinations(epochs, 2))
    reseeded = Order.of_one(num_rows=640, rows_per_group=16, window_rows=64, seed=1)
    assert not np.array_equal(reseeded.locate(np.arange(640)), epochs[0])
    windows = epochs[0].reshape(10, 64) // 16
    assert len({tuple(np.unique(groups)) for groups in windows}) == 10  # row groups change from window to window


def test_a_window_reads_few_row_groups() -> None:
    order = Order.of_one(num_rows=100_000, rows_per_group=64, window_rows=192, seed=3)
    rows = order.locate(np.arange(50 * 192)).reshape(50, 192)
    assert max(len(np.unique(window // 64)) for window in rows) <= 192 // 64 + 1


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()) if GOLDEN.exists() else [])
def test_order_is_the_one_that_checkpoints_were_made_with(case: dict) -> None:
    start = case["start"]
    rows = Order.of_one(**case["order"]).locate(np.arange(start, start + len(case["rows"])))
    assert rows.tolist() == case["rows"], "a changed order breaks resuming: raise ORDER_VERSION and add a golden file"


def test_golden_file_of_this_order_version_exists() -> None:
    assert len(json.loads(GOLDEN.read_text())) >= 5
