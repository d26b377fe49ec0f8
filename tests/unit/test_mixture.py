"""Mixtures: every corpus is read on in its own order, in the shares asked for, from wherever one looks."""

import itertools
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.errors import ConfigError
from regrow.plan.mixture import UNIT, Mixture, plan_mixture
from regrow.plan.order import CorpusOrder, Order

relaxed = settings(max_examples=60)
NAMES = ["web", "code", "books", "math"]


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    """Up to four corpora in up to three stages; corpora without weight, and with very little of it."""
    names = NAMES[: draw(st.integers(2, 4))]
    starts = sorted({0, *draw(st.lists(st.integers(1, 1500), max_size=2))})
    weight = st.one_of(st.just(0.0), st.floats(1e-4, 1.0))
    stages = []
    for start in starts:
        weights = {name: draw(weight) for name in names}
        weights[draw(st.sampled_from(names))] = 1.0
        stages.append((start * 16, weights))
    return plan_mixture(stages, names, seq_len=16)


@relaxed
@given(mixtures())
def test_each_corpus_is_drawn_in_its_own_order_without_gaps_or_repeats(mixture: Mixture) -> None:
    corpus, numbers = mixture.draw(np.arange(2500))
    for k in range(mixture.num_corpora):
        assert numbers[corpus == k].tolist() == list(range(int((corpus == k).sum())))


@relaxed
@given(mixtures())
def test_any_run_of_samples_has_its_shares(mixture: Mixture) -> None:
    corpus, _ = mixture.draw(np.arange(2500))
    starts = [*(stage.first_sample for stage in mixture.stages), 2500]
    for stage, (begin, end) in zip(mixture.stages, itertools.pairwise(starts), strict=True):
        for k, share in enumerate(stage.shares):
            drawn = np.cumsum(corpus[begin:end] == k)
            wanted = np.arange(1, end - begin + 1) * (share / UNIT)
            assert np.abs(drawn - wanted).max(initial=0) < mixture.num_corpora


@relaxed
@given(mixtures(), st.lists(st.integers(0, 2499), max_size=40))
def test_seeking_equals_scanning(mixture: Mixture, at: list[int]) -> None:
    corpus, numbers = mixture.draw(np.arange(2500))
    found = mixture.draw(np.array(at, np.int64))
    assert found[0].tolist() == corpus[at].tolist()
    assert found[1].tolist() == numbers[at].tolist()
    assert mixture.drawn(len(at) * 50) == np.bincount(corpus[: len(at) * 50], minlength=mixture.num_corpora).tolist()


def test_a_corpus_joins_and_leaves_with_its_stage() -> None:
    stages = [(0, {"web": 1.0}), (1600, {"web": 3.0, "code": 1.0}), (4800, {"code": 2.0})]
    mixture = plan_mixture(stages, ["web", "code"], seq_len=16)
    corpus, numbers = mixture.draw(np.arange(400))
    assert not corpus[:100].any()
    assert corpus[100:300].sum() == 50
    assert corpus[300:].all()
    assert numbers[300:302].tolist() == [50, 51]  # code goes on where the second stage left it
    assert mixture.drawn(400) == [250, 150]


def test_the_order_of_a_mixture_holds_every_row_of_a_corpus_once_an_epoch() -> None:
    corpora = (CorpusOrder(300, 8), CorpusOrder(40, 8))
    mixture = plan_mixture([(0, {"a": 3.0, "b": 1.0})], ["a", "b"], seq_len=1)
    order = Order(corpora, mixture, window_rows=100, seed=5)
    rows = order.locate(np.arange(400))  # one epoch of a, two and a half of b
    assert np.bincount(rows, minlength=340)[:300].tolist() == [1] * 300
    assert set(np.bincount(rows, minlength=340)[300:].tolist()) == {2, 3}
    again = np.random.default_rng(0).permutation(400)
    assert order.locate(again).tolist() == rows[again].tolist()


def test_a_corpus_more_does_not_reshuffle_those_before_it() -> None:
    one = Order.of_one(num_rows=300, rows_per_group=8, window_rows=1, seed=5)
    mixture = plan_mixture([(0, {"a": 1.0, "b": 1.0})], ["a", "b"], seq_len=1)
    two = Order((CorpusOrder(300, 8), CorpusOrder(300, 8)), mixture, window_rows=1, seed=5)
    rows = two.locate(np.arange(600))
    assert rows[rows < 300].tolist() == one.locate(np.arange(300)).tolist()
    assert (rows[rows >= 300] - 300).tolist() != one.locate(np.arange(300)).tolist()


def test_the_order_is_the_one_that_runs_were_begun_with() -> None:
    stages = [(0, {"a": 3.0, "b": 1.0}), (320, {"a": 0.1, "b": 0.7, "c": 0.2})]
    mixture = plan_mixture(stages, ["a", "b", "c"], seq_len=16)
    order = Order((CorpusOrder(100, 8), CorpusOrder(20, 8), CorpusOrder(30, 4)), mixture, window_rows=8, seed=7)
    rows = [42, 41, 44, 45, 43, 101, 100, 40, 50, 47, 102, 103, 51, 48, 46, 49, 52, 53, 104, 124]
    rows += [107, 106, 105, 54, 110, 126, 55, 111, 108, 125, 112, 109, 116, 127, 118, 117, 115, 8, 113, 114]
    assert order.locate(np.arange(40)).tolist() == rows, "a changed order breaks resuming: raise ORDER_VERSION"


def test_a_plan_over_more_than_a_trillion_tokens_takes_little_time_and_memory() -> None:
    corpora = tuple(CorpusOrder(num_rows, 64) for num_rows in (100_000_000, 40_000_000, 20_000_000, 1_000_000))
    stages = [(k * 300_000_000_000, dict(zip(NAMES, (8.0, 2.0 + k, 1.0, 0.1), strict=True))) for k in range(4)]
    mixture = plan_mixture(stages, NAMES, seq_len=8192)
    order = Order(corpora, mixture, window_rows=8192, seed=0)
    window = 1_250_000_000_000 // 8192 // order.window_rows  # far into the last stage: 8 steps of 1024 samples
    positions = window * order.window_rows + np.arange(order.window_rows)
    tracemalloc.start()
    rows = order.locate(positions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.unique(rows // 64)) <= 8192 / 64 + 2 * len(corpora)  # few row groups of each
    assert peak < 50e6
    begun = time.process_time()
    for _ in range(5):
        order.locate(positions)
    print(f"{(time.process_time() - begun) / 5 / 8 * 1e3:.2f} ms a step of 1024 samples")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([(0, {"wbe": 1.0})], "'wbe', which is none of data.corpora: web, code"),
        ([(100, {"web": 1.0})], "from_tokens=100 is out of order; the first begins with 0"),
        ([(0, {"web": 1.0}), (8, {"web": 1.0}), (9, {"code": 1.0})], "from_tokens=9 is out of order"),
        ([(0, {"web": 0.0})], "must not be negative, and not all be 0"),
        ([(0, {"web": -1.0, "code": 2.0})], "must not be negative"),
        ([(0, {"web": float("nan")})], "must not be negative"),
        ([(0, {"web": 1.0, "code": 1e-9})], "'code' is less than a 1,048,576th"),
    ],
)
def test_what_is_no_mixture_is_refused(stages: list[tuple[int, dict[str, float]]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_mixture(stages, ["web", "code"], seq_len=16)
