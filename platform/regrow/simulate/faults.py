"""What befalls a cluster, drawn once for all policies: arrays of (event, replica). Pure, but for the seed.

Each kind of fault is a stream of its own, so that a sweep that changes one leaves the others as they were. A burst, of
nodes or in time, leaves the rate of nodes that fail as it was.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrow.simulate.inputs import KINDS, TAKES_NODE, Figure, Inputs

Floats = NDArray[np.floating[Any]]
DAY = 86400.0
BURSTS = ("rack", "pod", "power")


@dataclass(frozen=True)
class Fault:
    """One fault, for a player or a table of given ones. Times in seconds from the run's beginning."""

    at: float
    kind: str  # of KINDS; or "slow" (a node becomes so), "stop" (a planned one), "head" (it dies)
    where: float  # in [0, 1): which node of all, those in the group first, spares behind them
    nodes: int = 1
    notice_s: float = 0.0
    away_s: float = 0.0  # from the notice, until it is ready to join again
    unnoticed_s: float = 0.0  # sdc: work before it that is wrong
    lasts_s: float = 0.0  # slow: until it is as fast as before, or has left
    excess: float = 0.0  # slow: of the job's step time
    vary: float = 1.0  # of the time that the group takes to form


@dataclass(frozen=True)
class Draws:
    """What befalls each replica of the cluster. Rows are faults, in no order; those beyond the end are at infinity."""

    at: Floats
    kind: NDArray[np.intp]  # of KINDS
    where: Floats
    nodes: Floats
    away_s: Floats
    normal: Floats  # of a delay without samples
    uniform: Floats  # of a delay with samples
    heavy: Floats  # exponential of mean 1: how long wrong results go unseen
    vary: Floats  # normal, of the forming
    lemon: Floats  # uniform: whose fault it is, of nodes that fail far more often than others
    planned: Floats
    head: Floats
    slow_at: Floats
    slow_lasts_s: Floats
    slow_excess: Floats  # of the job's step time
    slow_where: Floats
    slow_away_s: Floats
    storage_at: Floats
    storage_lasts_s: Floats

    @property
    def replicas(self) -> int:
        return self.at.shape[1]


def draw(inputs: Inputs, replicas: int, seed: int) -> Draws:
    """Faults of `inputs.days` for each replica. Pairs of replicas share what is not known exactly, the rates."""
    job, days = inputs.job, inputs.days
    members = job.nodes + job.spares
    sizes, shares = _bursts(inputs)
    per_event = 1 + float(shares @ (sizes - 1))  # nodes; faults of a process take one
    times, kinds = [], []
    for number, kind in enumerate(KINDS):
        figure = inputs.figures[f"rate_{kind}"]
        rate = figure.value * members / (per_event if kind in TAKES_NODE else 1.0)
        rng = np.random.default_rng([seed, number])
        each = _arrivals(rng, rate * _posterior(inputs, figure, replicas, seed, number), days, replicas)
        times.append(each)
        kinds.append(np.full(each.shape, number))
    at, kind_of = np.concatenate(times), np.concatenate(kinds)
    rng = np.random.default_rng([seed, 100])
    at = _follow(inputs, rng, at)
    takes = np.isin(kind_of, [KINDS.index(kind) for kind in TAKES_NODE])
    edges = np.cumsum(shares[::-1])[::-1]  # the largest first
    dice = rng.random(at.shape)
    nodes = np.ones(at.shape)
    for size, edge in zip(sizes, edges, strict=True):
        nodes[takes & (dice < edge)] = size
    away = np.where(takes, _away(inputs, rng, at.shape), inputs["respawn_s"])
    where, normal, uniform = rng.random(at.shape), rng.standard_normal(at.shape), rng.random(at.shape)
    heavy, vary, lemon = rng.exponential(1.0, at.shape), rng.standard_normal(at.shape), rng.random(at.shape)
    return Draws(
        at, kind_of, where, nodes, away, normal, uniform, heavy, vary, lemon, *_others(inputs, replicas, seed, members)
    )


def _others(inputs: Inputs, replicas: int, seed: int, members: int) -> tuple[Floats, ...]:
    """Planned stops, deaths of the head, slow nodes, outages of storage."""

    def stream(name: str, number: int, per_day: float | None = None) -> tuple[np.random.Generator, Floats]:
        rng, figure = np.random.default_rng([seed, number]), inputs.figures[name]
        rate = figure.value if per_day is None else per_day
        return rng, _arrivals(rng, rate * _posterior(inputs, figure, replicas, seed, number), inputs.days, replicas)

    failures = sum(inputs[f"rate_{kind}"] for kind in KINDS if kind != "drain") * members
    _, planned = stream("rate_planned", 201)
    _, head = stream("rate_head", 202)
    rng, slow_at = stream("share_slow", 203, failures * inputs["share_slow"])
    lasts = inputs["slow_lasts_s"] * rng.exponential(1.0, slow_at.shape)
    excess = (inputs["slow_factor"] - 1) * rng.exponential(1.0, slow_at.shape)
    where, away = rng.random(slow_at.shape), np.full(slow_at.shape, inputs["slow_away_s"])
    rng, storage_at = stream("rate_storage", 204)
    storage_lasts = inputs["storage_lasts_s"] * rng.exponential(1.0, storage_at.shape)
    return planned, head, slow_at, lasts, excess, where, away, storage_at, storage_lasts


def given(faults: Sequence[Fault]) -> tuple[Draws, Floats, Floats]:
    """A table of faults as one replica's, with their own seconds of notice and of work that is wrong."""

    def column(name: str, *kinds: str) -> Floats:
        """One of infinity, where there is none of these kinds: it never comes."""
        values = [[getattr(each, name)] for each in faults if each.kind in kinds]
        return np.array(values or [[np.inf if name == "at" else 1.0]], dtype=np.float64)

    kinds = [KINDS.index(each.kind) for each in faults if each.kind in KINDS] or [0]
    kind = np.array(kinds, dtype=np.intp)[:, None]
    zero, none = np.zeros(kind.shape), np.zeros((1, 1))
    draws = Draws(
        at=column("at", *KINDS),
        kind=kind,
        where=column("where", *KINDS),
        nodes=column("nodes", *KINDS),
        away_s=column("away_s", *KINDS),
        normal=zero,
        uniform=zero,
        heavy=zero,
        vary=np.log(column("vary", *KINDS)),
        lemon=1 + zero,
        planned=column("at", "stop"),
        head=column("at", "head"),
        slow_at=column("at", "slow"),
        slow_lasts_s=column("lasts_s", "slow"),
        slow_excess=column("excess", "slow"),
        slow_where=column("where", "slow"),
        slow_away_s=column("away_s", "slow"),
        storage_at=np.full((1, 1), np.inf),
        storage_lasts_s=none,
    )
    return draws, column("notice_s", *KINDS), column("unnoticed_s", *KINDS)


def drawn(inputs: Inputs, seed: int) -> list[Fault]:
    """One run's faults in their order, with delays of this policy, as a player takes them; outages of storage are not
    among them.
    """
    draws = draw(inputs, 1, seed)
    found = []
    for row in np.argsort(draws.at[:, 0], kind="stable"):
        at, kind = float(draws.at[row, 0]), KINDS[int(draws.kind[row, 0])]
        if not math.isfinite(at):
            break
        delay = delays(inputs.figures[f"notice_{kind}_s"], inputs, draws.normal[row], draws.uniform[row])
        wrong = inputs["sdc_unnoticed_s"] * float(draws.heavy[row, 0]) if kind == "sdc" else 0.0
        vary = float(lognormal(draws.vary[row], inputs.spread)[0])
        where, nodes, away = (float(each[row, 0]) for each in (draws.where, draws.nodes, draws.away_s))
        found.append(Fault(at, kind, where, int(nodes), float(delay[0]), away, wrong, vary=vary))
    slow = (draws.slow_at, draws.slow_where, draws.slow_away_s, draws.slow_lasts_s, draws.slow_excess)
    for at, where, away, lasts, excess in zip(*(each[:, 0].tolist() for each in slow), strict=True):
        found.append(Fault(at, "slow", where, away_s=away, lasts_s=lasts, excess=excess))
    found += [Fault(at, "stop", 0.0) for at in draws.planned[:, 0].tolist()]
    found += [Fault(at, "head", 0.0) for at in draws.head[:, 0].tolist()]
    return sorted((each for each in found if math.isfinite(each.at)), key=lambda each: each.at)


def delays(figure: Figure, inputs: Inputs, normal: Floats, uniform: Floats) -> Floats:
    """Seconds of a delay: of its samples, else a lognormal of its mean."""
    if figure.samples:
        samples = np.array(figure.samples)
        return samples[np.minimum((uniform * len(samples)).astype(np.intp), len(samples) - 1)]
    return figure.value * lognormal(normal, inputs.spread)


def lognormal(normal: Floats, sigma: float) -> Floats:
    """Of mean 1."""
    return np.exp(sigma * normal - sigma**2 / 2)


def resampled(figure: Figure, pairs: int, seed: int) -> Floats:
    """What the mean of a figure's samples may be, over the one that was seen: a bootstrap; 1 without samples."""
    if len(figure.samples) < 2 or not figure.value:
        return np.ones(pairs)
    rng, samples = np.random.default_rng(seed), np.array(figure.samples)
    return rng.choice(samples, (pairs, len(samples))).mean(1) / samples.mean()


def doubled(pairs: Floats, replicas: int) -> Floats:
    """Of pairs of replicas, for each replica."""
    return np.repeat(pairs, 2)[:replicas]


def _posterior(inputs: Inputs, figure: Figure, replicas: int, seed: int, number: int) -> Floats:
    """What a rate may be, over its mean: a Gamma of as many events as were counted."""
    if inputs.known or figure.n <= 0:
        return np.ones(replicas)
    rng = np.random.default_rng([seed, number, 1])
    return doubled(rng.gamma(figure.n, 1 / figure.n, (replicas + 1) // 2), replicas)


def _arrivals(rng: np.random.Generator, per_day: Floats, days: float, replicas: int) -> Floats:
    """Times of a Poisson process, in seconds: (most, replicas), infinite beyond the end.

    Gaps of a unit process, stretched: another rate moves the same arrivals.
    """
    most = float(np.max(per_day, initial=0.0)) * days
    if most <= 0:
        return np.full((1, replicas), np.inf)
    count = math.ceil(most + 6 * math.sqrt(most) + 12)
    times = np.cumsum(rng.exponential(1.0, (replicas, count)).T, axis=0) / np.maximum(per_day, 1e-300) * DAY
    return np.where(times < days * DAY, times, np.inf)


def _bursts(inputs: Inputs) -> tuple[Floats, Floats]:
    """How many nodes, smallest first, and the share of faults that take so many."""
    found = sorted((inputs[f"nodes_{name}"], inputs[f"share_{name}"]) for name in BURSTS)
    return np.array([size for size, _ in found]), np.array([share for _, share in found])


def _follow(inputs: Inputs, rng: np.random.Generator, at: Floats) -> Floats:
    """Some faults follow the one before them at once: as many as before, closer together."""
    if inputs["share_burst"] <= 0:
        return at
    order = np.argsort(at, axis=0)
    times = np.take_along_axis(at, order, axis=0)
    close = rng.random(at.shape) < inputs["share_burst"]
    close[0] = False
    delay = rng.random(at.shape) * inputs["burst_within_s"]
    for row in range(1, len(times)):
        times[row] = np.where(close[row] & np.isfinite(times[row]), times[row - 1] + delay[row], times[row])
    found = np.empty_like(times)
    np.put_along_axis(found, order, times, axis=0)
    return found


def retired(inputs: Inputs, draws: Draws, after: int) -> NDArray[np.bool_]:
    """Faults that do not come where a node is replaced for good after so many: those of lemons, beyond these.

    Lemons are a share of the nodes, each with so many times the others' rate; all together fail as often as without.
    """
    share, times = inputs["lemon_share"], inputs["lemon_times"]
    of_lemons = share * times / (share * times + 1 - share)
    gone = np.zeros(draws.at.shape, dtype=bool)
    if not after or of_lemons <= 0:
        return gone
    count = max(1, round(share * inputs.job.nodes))
    number = np.floor(draws.lemon / of_lemons * count)
    for replica in range(draws.replicas):
        rows = np.flatnonzero((draws.lemon[:, replica] < of_lemons) & np.isfinite(draws.at[:, replica]))
        rows = rows[np.lexsort((draws.at[rows, replica], number[rows, replica]))]
        which = number[rows, replica]
        first = np.searchsorted(which, which)  # of the same node
        gone[rows, replica] = np.arange(len(rows)) - first >= after
    return gone


def _away(inputs: Inputs, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """How long a node is away, in seconds: soon back, or repaired."""
    short = inputs.figures["away_short_s"]
    if short.samples:  # a run's own, whatever they are of
        return rng.choice(np.array(short.samples), shape)
    soon = short.value * rng.lognormal(0, inputs["away_short_sigma"], shape)
    late = inputs["away_long_s"] * rng.lognormal(0, inputs["away_long_sigma"], shape)
    return np.where(rng.random(shape) < inputs["away_short_share"], soon, late)
