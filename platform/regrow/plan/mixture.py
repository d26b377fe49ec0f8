"""Which corpus each sample comes from: weights that change with the tokens seen, in closed form for any sample.

Within a stage the corpora's samples are interleaved as evenly as their weights allow, and each corpus is read on where
it was left: its n-th sample of the run is number n of its own order, whatever the weights are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from regrow.errors import ConfigError

UNIT = 1 << 20  # weights are multiples of its inverse
MOST_SAMPLES = 1 << 42  # of a run that mixes: products with UNIT fit into 63 bits

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Stage:
    """A part of the run with weights of its own, up to where the next one begins."""

    first_sample: int
    shares: tuple[int, ...]  # of each corpus; they add up to UNIT

    def __post_init__(self) -> None:
        assert sum(self.shares) == UNIT, self
        assert min(self.shares) >= 0, self

    def counts(self, num_samples: Ints) -> Ints:
        """How many of the stage's first n samples come from each corpus, int64[num_corpora, len(num_samples)].

        Each corpus takes its share of what those before it left, rounded down: all counts grow with n by 0 or 1, and
        differ from n times the share by less than the number of corpora.
        """
        left, units, counts = num_samples, UNIT, []
        for share in self.shares:
            counts.append(left * share // max(units, 1))
            left, units = left - counts[-1], units - share
        return np.stack(counts)


@dataclass(frozen=True)
class Mixture:
    """The stages of a run; the first begins with sample 0."""

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        starts = [stage.first_sample for stage in self.stages]
        assert starts == sorted({0, *starts}), starts
        assert len({len(stage.shares) for stage in self.stages}) == 1, self

    @staticmethod
    def of_one() -> "Mixture":
        """No mixture: one corpus."""
        return Mixture((Stage(0, (UNIT,)),))

    @property
    def num_corpora(self) -> int:
        return len(self.stages[0].shares)

    def draw(self, samples: Ints) -> tuple[Ints, Ints]:
        """The corpus that each sample comes from, and its number among the samples of that corpus (int64[n] each)."""
        if self.num_corpora == 1:
            return np.zeros_like(samples), samples
        assert samples.size == 0 or samples.max() < MOST_SAMPLES, f"a mixture ends at {MOST_SAMPLES} samples"
        stages = np.searchsorted(self._starts, samples, side="right") - 1
        corpus, numbers = np.empty_like(samples), np.empty_like(samples)
        for k in np.unique(stages):
            here = stages == k
            before = samples[here] - self._starts[k]
            counts = self.stages[k].counts(before)
            taken = np.argmax(self.stages[k].counts(before + 1) - counts, axis=0)
            corpus[here] = taken
            numbers[here] = self._drawn_before[k][taken] + np.take_along_axis(counts, taken[None], axis=0)[0]
        return corpus, numbers

    def drawn(self, num_samples: int) -> list[int]:
        """How many of the run's first samples come from each corpus."""
        if self.num_corpora == 1:
            return [num_samples]
        k = int(np.searchsorted(self._starts, num_samples, side="right")) - 1
        counts = self.stages[k].counts(np.array([num_samples - self._starts[k]]))[:, 0]
        return list(map(int, self._drawn_before[k] + counts))

    @cached_property
    def _starts(self) -> Ints:
        return np.array([stage.first_sample for stage in self.stages])

    @cached_property
    def _drawn_before(self) -> Ints:
        """Samples of each corpus before each stage, int64[num_stages, num_corpora]."""
        lengths = np.diff(self._starts)
        counts = [stage.counts(np.array([n]))[:, 0] for stage, n in zip(self.stages, lengths, strict=False)]
        return np.cumsum([np.zeros(self.num_corpora, np.int64), *counts], axis=0)


def plan_mixture(stages: Sequence[tuple[float, Mapping[str, float]]], names: Sequence[str], *, seq_len: int) -> Mixture:
    """The mixture of corpora `names` with weights from a number of tokens on: [(from_tokens, {name: weight})].

    A stage begins with the first sample that lies behind so many tokens. Weights are relative; a corpus that is not
    named has none. Raises ConfigError for what makes no mixture.
    """
    planned: list[Stage] = []
    for from_tokens, weights in stages:
        unknown = sorted(set(weights) - set(names))
        if unknown:
            raise ConfigError(f"data.mixture weighs {unknown[0]!r}, which is none of data.corpora: {', '.join(names)}")
        first = math.ceil(from_tokens / seq_len)
        in_order = first > planned[-1].first_sample if planned else first == 0
        if not in_order:
            raise ConfigError(
                f"data.mixture: a stage with from_tokens={from_tokens:,.0f} is out of order; the first begins with 0, "
                f"each other one at least data.seq_len={seq_len} tokens after the one before"
            )
        planned.append(Stage(first, _shares(from_tokens, [weights.get(name, 0.0) for name in names], names)))
    return Mixture(tuple(planned))


def _shares(from_tokens: float, weights: Sequence[float], names: Sequence[str]) -> tuple[int, ...]:
    """Weights as multiples of 1/UNIT that add up to 1: rounded down, the largest remainders up."""
    total = sum(weights)
    if not 0 < total < float("inf") or min(weights) < 0:
        raise ConfigError(
            f"data.mixture from_tokens={from_tokens:,.0f}: weights {list(weights)} must not be negative, "
            "and not all be 0"
        )
    exact = [weight / total * UNIT for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: (shares[k] - exact[k], k))
    for k in by_remainder[: UNIT - sum(shares)]:
        shares[k] += 1
    for weight, share, name in zip(weights, shares, names, strict=True):
        if weight > 0 and share == 0:
            raise ConfigError(
                f"data.mixture: the weight of {name!r} is less than a {UNIT:,}th of all; raise it or drop it"
            )
    return tuple(shares)
