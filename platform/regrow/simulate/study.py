"""What is asked of the engines: policies next to each other, spares, a tornado, the budget that a goal leaves. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regrow.simulate.estimate import ORIGINS, PARTS, Costs, Estimate, estimate
from regrow.simulate.faults import BURSTS, DAY, Draws, draw
from regrow.simulate.inputs import KINDS, TAKES_NODE, Figure, Inputs, Origin, at

Z_90 = 1.645
SWEEP_EVENTS = 2500.0  # faults of a replica in a sweep: of runs with more, fewer days are played
SWEEP_DAYS = 10.0  # but not fewer: nodes are away for days
BUDGETED = (
    ("communicators_s", "communicators"),
    ("build_s", "rebuilding on a GPU"),
    ("restore_s", "loading state"),
    ("notice_hang_s", "noticing a hang"),
    ("notice_network_s", "noticing a network fault"),
    ("sdc_unnoticed_s", "noticing wrong results"),
)
OWN = (  # what regrow itself could do better
    *("communicators_", "form_", "build_", "restore_", "first_step_", "notice_", "join_", "sdc_unnoticed_", "durable_"),
    *("lost_", "stop_", "slow_evict_", "verify_", "snapshot_every_"),
)
BEFALLS = (
    "rate_",
    "share_",
    "nodes_",
    "burst_",
    "lemon_",
    "away_",
    "respawn_",
    "slow_factor",
    "slow_lasts_",
    "slow_away_",
    "storage_",
)


@dataclass(frozen=True)
class Loss:
    """Seconds that are not useful, of one cause and part, and the figures that they follow from."""

    cause: str  # a kind of fault, grow, stop, slow, head, shrunk, snapshot, verify, wait
    part: str
    seconds: float
    figures: tuple[str, ...]
    is_assumed: bool


@dataclass(frozen=True)
class Swing:
    """What `effective` is where one input is at either end of its range."""

    name: str
    figure: Figure
    low: float  # the input's
    high: float
    at_low: float  # effective
    at_high: float

    @property
    def width(self) -> float:
        return abs(self.at_high - self.at_low)

    @property
    def best(self) -> float:
        return max(self.at_low, self.at_high)

    @property
    def is_own(self) -> bool:
        """Whether it is regrow's to improve, not the world's."""
        return self.name.startswith(OWN)


@dataclass(frozen=True)
class Budget:
    """The most seconds that a phase may take so that the goal is reached; None: it is not, whatever it takes."""

    name: str
    words: str
    now_s: float
    most_s: float | None


def compare(all_inputs: Sequence[Inputs], replicas: int, seed: int) -> list[Estimate]:
    """Each policy under the same faults, where their worlds are the same."""
    found, kept = list[Estimate](), list[tuple[Any, Draws]]()
    for inputs in all_inputs:
        same = next((each for each in found if replace(each.inputs, policy=inputs.policy) == inputs), None)
        if same is not None and replace(same.inputs.policy, name=inputs.policy.name) == inputs.policy:
            found.append(replace(same, inputs=inputs))
            continue
        world = (inputs.job, inputs.days, inputs.known, {n: f for n, f in inputs.figures.items() if _befalls(n)})
        draws = next((each for key, each in kept if key == world), None)
        if draws is None:
            draws = draw(inputs, replicas, seed)
            kept.append((world, draws))
        found.append(estimate(inputs, replicas, seed, draws))
    return found


def losses(result: Estimate) -> list[Loss]:
    """Mean seconds by cause and part, largest first; they add up to all that is not useful."""
    inputs, found = result.inputs, []
    for origin in ORIGINS:
        for part in PARTS:
            seconds = result.seconds(part, origin)
            for names, share in _figures_of(inputs, origin, part) if seconds > 0 else ():
                found.append(_loss(inputs, origin, part, seconds * share, names))
    idle: dict[str, tuple[str, ...]] = {
        "shrunk": ("away_short_s", "away_long_s", "away_short_share"),
        "slow": ("slow_factor", "slow_lasts_s"),
        "snapshot": ("snapshot_stall_s",),
        "verify": ("verify_share",),
        "wait": ("away_short_s", "away_long_s", "away_short_share"),
    }
    for state, each in result.idle.items():
        found.append(_loss(inputs, state, state, float(each.mean()), idle[state]))
    return sorted((each for each in found if each.seconds > 0), key=lambda each: -each.seconds)


def interval(result: Estimate) -> tuple[float, float]:
    """Between which the mean `effective` is with 90%, as far as rates and durations are known; not a run's luck.

    To first order, by what is lost to each figure of which a count or samples are known; or, where that is more, by
    how far pairs of replicas, which share their rates and means, differ beyond what two of one pair do.
    """
    values, effective = result.effective, float(result.effective.mean())
    pairs = len(values) // 2
    error = float(values.var(ddof=1)) / len(values) if len(values) > 1 else 0.0
    by_figure: dict[str, float] = {}
    for loss in losses(result):
        for name in loss.figures:
            by_figure[name] = by_figure.get(name, 0.0) + loss.seconds / result.wall_s
    figures = {} if result.inputs.known else result.inputs.figures
    spread = effective**2 * math.fsum((by_figure[name] * _unknown(each)) ** 2 for name, each in figures.items()
                                      if name in by_figure)  # fmt: skip
    if pairs > 1:
        table = values[: 2 * pairs].reshape(pairs, 2)
        luck = float(np.square(table[:, 0] - table[:, 1]).mean() / 2)
        spread = max(spread, float(table.mean(1).var(ddof=1)) - luck / 2)
    width = Z_90 * math.sqrt(spread + error)
    return max(0.0, effective - width), min(1.0, effective + width)


def _unknown(figure: Figure) -> float:
    """Standard error of a figure over its value, as far as that is known: of a count, or of the mean of samples."""
    if len(figure.samples) > 1 and figure.value:
        samples = np.array(figure.samples)
        return float(samples.std(ddof=1) / math.sqrt(len(samples)) / abs(figure.value))
    is_count = figure.n > 0 and not figure.samples and figure.origin != Origin.assumed
    return 1 / math.sqrt(figure.n) if is_count else 0.0


def assumed_share(found: Iterable[Loss]) -> float:
    """Of what is lost, what follows from an input that is assumed."""
    kept = list(found)
    total = math.fsum(each.seconds for each in kept)
    return math.fsum(each.seconds for each in kept if each.is_assumed) / total if total > 0 else 0.0


def to_json(result: Estimate) -> dict[str, Any]:
    """One policy's figures, as `policies` of simulate.json has them."""
    job, wall_s = result.inputs.job, result.wall_s
    low, high = interval(result)
    mean, square = float(result.away_mean.mean()), float(result.away_square.mean())
    count = len(result.effective)
    return {
        "name": result.inputs.policy.name,
        "goodput": float(result.goodput.mean()),
        "effective": float(result.effective.mean()),
        "paid": float(result.paid.mean()),
        "interval": [low, high],
        "runs": list(result.runs()),
        "standard_error": float(result.effective.std(ddof=1) / math.sqrt(count)) if count > 1 else None,
        "wall_s": wall_s,
        "lost_s": result.lost_s,
        "lost_parts_s": {part: float(each.sum(0).mean()) for part, each in result.lost.items()},
        "assumed_share": assumed_share(losses(result)),
        "changes": float(result.generations.mean()),
        "spares": job.spares,
        "away_nodes": {"mean": mean, "variance": max(0.0, square - mean * mean)},
    }


def spares_curve(inputs: Inputs, counts: Sequence[int], replicas: int, seed: int) -> list[dict[str, float]]:
    """`effective` and `paid` by how many nodes wait."""
    found = []
    for count in counts:
        result = estimate(replace(inputs, job=replace(inputs.job, spares=count)), replicas, seed)
        effective, paid = float(result.effective.mean()), float(result.paid.mean())
        found.append({"spares": count, "effective": effective, "paid": paid})
    return found


def spare_counts(inputs: Inputs, result: Estimate) -> list[int]:
    """Worth looking at: none, up to twice the nodes that are away at once 99.9% of the time."""
    mean, square = float(result.away_mean.mean()), float(result.away_square.mean())
    most = max(2.0, mean + 3.1 * math.sqrt(max(0.0, square - mean * mean)))
    counts = {0, inputs.job.spares, *(round(most * share) for share in (0.25, 0.5, 0.75, 1.0, 1.5))}
    return sorted(count for count in counts if count <= inputs.job.nodes)


def tornado(inputs: Inputs, replicas: int, seed: int) -> tuple[float, list[Swing]]:
    """`effective` at both ends of every input's range, the widest swing first; and what it is in the middle.

    Assumed ones have the range that was given; rates and measured means 90% of what they may be.
    """
    inputs = for_sweeps(inputs)
    middle = mean_effective(inputs, replicas, seed)
    found = []
    for name, figure in inputs.figures.items():
        low, high = range_of(figure)
        if low == high or name.endswith("_sigma"):
            continue
        ends = [mean_effective(inputs.override({name: at(figure, x)}), replicas, seed) for x in (low, high)]
        found.append(Swing(name, figure, low, high, *ends))
    return middle, sorted((each for each in found if each.width > 0), key=lambda each: -each.width)


def budgets(inputs: Inputs, goal: float, replicas: int, seed: int) -> list[Budget]:
    """How long each phase may take so that `effective` is at the goal, all others as they are."""
    inputs = for_sweeps(inputs)
    found = []
    for name, words in BUDGETED:
        figure = inputs.figures[name]

        def over(seconds: float, name: str = name, figure: Figure = figure) -> float:
            return mean_effective(inputs.override({name: at(figure, seconds)}), replicas, seed) - goal

        size = (
            inputs.communicators_s(inputs.job.gpus) / figure.value if name == "communicators_s" and figure.value else 1
        )
        most = _crossing(over, figure.value)
        found.append(Budget(name, words, figure.value * size, None if most is None else most * size))
    return found


def for_sweeps(inputs: Inputs) -> Inputs:
    """The same, over fewer days where many faults come."""
    per_day = sum(inputs[f"rate_{kind}"] for kind in KINDS) * (inputs.job.nodes + inputs.job.spares)
    days = min(inputs.days, max(SWEEP_DAYS, SWEEP_EVENTS / 2 / per_day if per_day > 0 else inputs.days))
    return replace(inputs, days=days)


def mean_effective(inputs: Inputs, replicas: int, seed: int) -> float:
    return float(estimate(inputs, replicas, seed).effective.mean())


def range_of(figure: Figure) -> tuple[float, float]:
    """Between which an input may be."""
    if figure.low is not None and figure.high is not None:
        return figure.low, figure.high
    if figure.origin == Origin.assumed or figure.n <= 0 or not math.isfinite(figure.value):
        return figure.value, figure.value
    spread = Z_90 * _unknown(figure)
    return figure.value * max(0.0, 1 - spread), figure.value * (1 + spread)


def _crossing(over: Callable[[float], float], now: float) -> float | None:
    """Where a falling, nearly straight line goes through zero; None: below it from the beginning."""
    low, at_low = 0.0, over(0.0)
    if at_low < 0:
        return None
    high = max(2 * now, 10.0)
    at_high = over(high)
    while at_high >= 0 and high < 1e5:
        high *= 8
        at_high = over(high)
    if at_high >= 0:
        return math.inf
    for _ in range(4):
        middle = low + (high - low) * min(0.9, max(0.1, at_low / (at_low - at_high)))
        found = over(middle)
        low, at_low, high, at_high = (middle, found, high, at_high) if found >= 0 else (low, at_low, middle, found)
    return low + (high - low) * at_low / (at_low - at_high)


def _befalls(name: str) -> bool:
    """Whether a figure is of what befalls a cluster, not of what is done about it."""
    return name.startswith(BEFALLS)


def _loss(inputs: Inputs, cause: str, part: str, seconds: float, names: tuple[str, ...]) -> Loss:
    rate = {"stop": "rate_planned", "slow": "share_slow"}.get(cause, f"rate_{cause}")
    known = tuple(name for name in (rate, *names) if name in inputs.figures)
    is_assumed = any(inputs.figures[name].origin == Origin.assumed for name in known)
    return Loss(cause, part, seconds, known, is_assumed)


def _figures_of(inputs: Inputs, origin: str, part: str) -> list[tuple[tuple[str, ...], float]]:
    """Which figures a part of a change follows from, and in which shares."""
    gpus, nodes = inputs.job.gpus, inputs.job.nodes
    forming = {
        ("form_base_s",): inputs["form_base_s"],
        ("form_per_node_s",): inputs["form_per_node_s"] * nodes,
        ("communicators_s", "communicators_power"): inputs.communicators_s(gpus),
        ("build_s",): inputs["build_s"],
        ("restore_s",): inputs["restore_s"],
        ("first_step_s",): inputs["first_step_s"],
    }
    costs = Costs.of(inputs)
    parts: Mapping[tuple[str, ...], float]
    begun: tuple[str, ...]
    if part == "notice":
        parts = {(f"notice_{origin}_s",): 1.0}
    elif part == "form" and origin == "head":
        parts = {("restart_s",): 1.0}
    elif part == "form":
        parts = forming
    elif part == "join":
        joins = {
            ("join_s",): inputs["join_s"],
            ("communicators_s", "communicators_power"): inputs.communicators_s(gpus),
        }
        parts = joins if inputs.policy.in_place else forming
    elif part == "stop":
        parts = {("stop_fixed_s",): inputs["stop_fixed_s"], ("stop_per_gpu_s",): inputs["stop_per_gpu_s"] * gpus}
    elif origin == "sdc":
        parts = {("sdc_unnoticed_s",): 1.0}
    else:
        begun, lost = ("snapshot_interval_s",), costs.segment_s * 0.5
        if not costs.interval_s:
            begun = ("step_s", "snapshot_every_steps", "lost_committed_steps")
            lost = costs.step_s * (costs.every_steps * 0.5 + inputs["lost_committed_steps"])
        parts = {begun: lost, ("durable_back_s", *_bursts(inputs)): _copies_lost(inputs, origin) * costs.durable_back_s}
    total = sum(parts.values())
    return [(names, each / total) for names, each in parts.items() if each > 0] if total > 0 else [((), 1.0)]


def _bursts(inputs: Inputs) -> tuple[str, ...]:
    return tuple(f"share_{name}" for name in BURSTS if inputs[f"share_{name}"] > 0)


def _copies_lost(inputs: Inputs, origin: str) -> float:
    """The share of faults that take a snapshot and its copies."""
    if origin == "head":
        return 1.0
    if origin not in TAKES_NODE:
        return 0.0
    lost_at = inputs.policy.copies_lost_at
    if lost_at <= 1:
        return 1.0
    return sum(inputs[f"share_{name}"] for name in BURSTS if inputs[f"nodes_{name}"] >= lost_at)


def faults_a_day(inputs: Inputs) -> float:
    """Of the job and its spares."""
    return sum(inputs[f"rate_{kind}"] for kind in KINDS) * (inputs.job.nodes + inputs.job.spares)


def mtbf_s(inputs: Inputs) -> float:
    """Seconds between failures of the job's own nodes."""
    per_day = sum(inputs[f"rate_{kind}"] for kind in KINDS) * inputs.job.nodes
    return DAY / per_day if per_day > 0 else math.inf
