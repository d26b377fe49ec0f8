"""Which row stands at which position of the run: a keyed permutation in closed form, free of the world size.

Positions 0, 1, 2, ... are the samples of a run in the order they are trained on, through as many epochs as it takes.
Four steps lead from a position to a row, each computed for any position alone:

    position --shuffled in its window--> place --drawn from the mixture--> (corpus, number in the corpus)
             --split by epoch--> (epoch, offset) --row groups permuted--> row

Row groups are shuffled over the whole epoch, rows inside windows: a reader that produces window after window decodes
each row group about once. The permutations are Feistel networks of our own, because NumPy does not promise that its
shuffles stay the same between versions; `tests/golden/order_*.json` pins the result.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from regrow.plan.mixture import Mixture

ORDER_VERSION = 1  # recorded in manifests and checkpoints; any change to what `Order.locate` returns must raise it

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # splitmix64's increment
_NUM_ROUNDS = 8
_WINDOW, _EPOCH = 1, 2  # domains: the window shuffle and the epoch shuffle draw unrelated keys

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]


def _mix(x: Words) -> Words:
    """Output function of splitmix64 (Steele, Lea, Flood 2014): a bijection on 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _draw(key: Words, counter: Words) -> Words:
    """Output number `counter` of the splitmix64 generator seeded with `key`."""
    return _mix(key + (counter + np.uint64(1)) * np.uint64(_GOLDEN_GAMMA))


def derive_keys(seed: int, domain: int, index: Ints) -> Words:
    """One 64-bit permutation key per entry of `index`, unrelated between seeds, domains and indices."""
    base = np.array([seed & (2**64 - 1)], np.uint64)
    return _draw(_draw(base, np.array([domain], np.uint64)), index.astype(np.uint64))


def permute(values: Ints, size: int, keys: Words) -> Ints:
    """Map each value to its image under the permutation of range(size) that its key names.

    Pure and vectorised: `keys` holds one key per value, or one for all. A Feistel network permutes the next power of
    two, and values that fall outside are walked on until they are back (Black and Rogaway 2002), fewer than 2 rounds
    on average.
    """
    return _walk(values, size, keys, range(_NUM_ROUNDS))


def unpermute(values: Ints, size: int, keys: Words) -> Ints:
    """The inverse of `permute`."""
    return _walk(values, size, keys, range(_NUM_ROUNDS - 1, -1, -1))


def _walk(values: Ints, size: int, keys: Words, rounds: range) -> Ints:
    assert size >= 1, size
    assert values.size == 0 or (values.min() >= 0 and values.max() < size), "values must lie in range(size)"
    num_bits = (size - 1).bit_length()
    out = values.astype(np.uint64)
    keys = np.broadcast_to(keys, out.shape)
    pending = np.arange(len(out))
    while len(pending):
        walked = _feistel(out[pending], num_bits, keys[pending], rounds)
        out[pending] = walked
        pending = pending[walked >= size]
    return out.astype(np.int64)


def _feistel(x: Words, num_bits: int, keys: Words, rounds: range) -> Words:
    """Permute the integers of `num_bits` bits; with the rounds reversed, the inverse."""
    low_bits = (num_bits + 1) // 2
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << (num_bits - low_bits)) - 1)
    low, high = x & low_mask, x >> np.uint64(low_bits)
    for i in rounds:
        counter = np.uint64(i << 32)  # halves have at most 32 bits: no two rounds share a counter
        if i % 2:
            high ^= _draw(keys, counter | low) & high_mask
        else:
            low ^= _draw(keys, counter | high) & low_mask
    return (high << np.uint64(low_bits)) | low


@dataclass(frozen=True)
class CorpusOrder:
    """The epochs of one corpus, in each of which every row stands once; row groups lie one after another, permuted."""

    num_rows: int  # the last row group may be short
    rows_per_group: int  # rows of a row group, the unit of reading

    def __post_init__(self) -> None:
        assert min(self.num_rows, self.rows_per_group) >= 1, self

    @property
    def num_groups(self) -> int:
        return -(-self.num_rows // self.rows_per_group)

    def locate(self, numbers: Ints, *, seed: int, domain: int) -> Ints:
        """Rows in [0, num_rows) that stand at these numbers, counted through all epochs."""
        epoch, offset = np.divmod(numbers, self.num_rows)
        epochs, which = np.unique(epoch, return_inverse=True)
        keys = derive_keys(seed, domain, epochs)
        # Only group num_groups - 1 may be short. Moving the offsets behind it on by the rows that it lacks gives every
        # group rows_per_group offsets, so that a division finds the place.
        last = self.num_groups - 1
        missing = self.num_groups * self.rows_per_group - self.num_rows
        last_place = unpermute(np.full_like(epochs, last), self.num_groups, keys)[which]
        behind_last = offset >= (last_place + 1) * self.rows_per_group - missing
        place, row = np.divmod(offset + np.where(behind_last, missing, 0), self.rows_per_group)
        return permute(place, self.num_groups, keys[which]) * self.rows_per_group + row


@dataclass(frozen=True)
class Order:
    """The order of a run's samples, a pure function of (corpora, mixture, window_rows, seed).

    Window k holds positions [k * window_rows, (k + 1) * window_rows) and may straddle epochs and stages of the mixture:
    it mixes the places on both sides. Rows are numbered through all corpora, one corpus after another.
    """

    corpora: tuple[CorpusOrder, ...]
    mixture: Mixture
    window_rows: int  # positions shuffled together
    seed: int

    def __post_init__(self) -> None:
        assert self.window_rows >= 1, self
        assert self.mixture.num_corpora == len(self.corpora), self

    @staticmethod
    def of_one(*, num_rows: int, rows_per_group: int, window_rows: int, seed: int) -> "Order":
        """The order of a run on one corpus."""
        return Order((CorpusOrder(num_rows, rows_per_group),), Mixture.of_one(), window_rows, seed)

    @cached_property
    def first_rows(self) -> Ints:
        """Number of each corpus' first row, and of all rows."""
        return np.cumsum([0, *(corpus.num_rows for corpus in self.corpora)])

    def locate(self, positions: Ints) -> Ints:
        """Row numbers of these positions (int64[n], any order, 0 <= position < 2**62)."""
        positions = np.asarray(positions, np.int64)
        assert positions.ndim == 1, positions.shape
        assert positions.size == 0 or positions.min() >= 0, "positions start at 0"
        window, within = np.divmod(positions, self.window_rows)
        shuffled = permute(within, self.window_rows, derive_keys(self.seed, _WINDOW, window))
        corpus, numbers = self.mixture.draw(window * self.window_rows + shuffled)
        rows = np.empty_like(positions)
        for k in range(len(self.corpora)):
            here = corpus == k
            found = self.corpora[k].locate(numbers[here], seed=self.seed, domain=_EPOCH + (k << 8))
            rows[here] = self.first_rows[k] + found
        return rows
