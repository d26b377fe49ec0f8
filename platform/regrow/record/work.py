"""How much work a run's time was worth: beside the seconds that trained, those that the full-size job would have taken.

A global batch never depends on the world size, so every step that counts is the same work: as many useful seconds as a
step takes the undisturbed full-size job. A shrunk group, a slow rank and a group's first step take longer for it, and
steps that were taken back are none. Decision 45 has how long such a step takes, and what follows. Pure.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from regrow.plan.batch import BatchPlan
from regrow.plan.pipeline import bubble_share
from regrow.record.events import Cleared, CoordinatorRestarted, Event, Generation, Row, Submitted, Suspected
from regrow.record.ledger import Ledger, of_kind, on_one_clock

RATIOS = ("goodput", "effective", "paid", "capacity_goodput")  # of report.json, as they are told of while it runs
LEAST = 3  # undisturbed steps of a world size whose median is believed: it withstands one that is not like the others
SLOW = "slow_"  # suspicions of this begin have kept the others waiting


@dataclass(frozen=True)
class Work:
    """What a run's productive seconds were worth. They are `useful_s` and what `slower_s` has, by why."""

    effective: float | None = None  # useful seconds over wall time; None where no step is known
    paid: float | None = None  # the same, ranks that wait beyond the full size counted as lost
    full_step_s: float | None = None  # of the newest job: a step of its full size, undisturbed
    is_measured: bool = False  # by steps of this size; else by the batch plan, from steps of another one
    capacity_goodput: float | None = None  # goodput, absent ranks and idle passes counted as lost
    useful_s: float = 0.0
    slower_s: Mapping[str, float] = field(default_factory=dict)  # shrunk, first_step, slow: productive, and not useful


@dataclass(frozen=True)
class Units:
    """Ranks that share the same rows, and how many units of them a group has."""

    axes: Mapping[str, int]  # of a unit: tp cp pp
    other_pp: Mapping[int, int] = field(default_factory=dict)  # by world size, where groups had another one

    def pp(self, size: int) -> int:
        """Stages of a pipeline at this world size."""
        return self.other_pp.get(size, self.axes["pp"])

    def count(self, size: int) -> int:
        """Units of a group of this size; one of fewer ranks than a unit's, under another configuration, counts as 1."""
        return max(1, size // (self.axes["tp"] * self.axes["cp"] * self.pp(size)))


@dataclass(frozen=True)
class StepTimes:
    """How long a step takes undisturbed, without its waits, by world size."""

    measured: Mapping[int, float]  # medians, seconds
    num_slices: int
    units: Units
    stages_per_rank: int = 1
    slices_per_pass: int = 1

    def cost(self, size: int) -> float:
        """How long a step takes by the plan, in the time of one slice through all blocks; see `Topology.step_cost`.
        Stages count as even."""
        pp, batch = self.units.pp(size), BatchPlan(self.num_slices, self.units.count(size), self.slices_per_pass)
        return batch.most_slices / pp / (1 - bubble_share(pp, self.stages_per_rank, batch.num_micro_batches))

    def seconds(self, size: int) -> float | None:
        """The median, of a size that is laid out to take as long, or scaled by the plan from the most similar one."""
        if size in self.measured:
            return self.measured[size]
        cost = self.cost(size)
        nearest = min(self.measured, key=lambda each: (abs(self.cost(each) - cost), -each), default=None)
        return None if nearest is None else self.measured[nearest] * cost / self.cost(nearest)


def work_of(ledger: Ledger, rows: Sequence[Row], events: Sequence[Event], config: Mapping[str, Any]) -> Work:
    """The work of a run, by its ledger, and the rows that this is made of. `config` is nested, of any version."""
    rows, events = on_one_clock(rows, events)
    wall_s = ledger.end - ledger.begin
    times = step_times(ledger, rows, events, config)
    asked = list(_asked(rows, events, config))
    capacity_goodput = _capacity_goodput(ledger, rows, asked, times.units, config)
    sizes = list(_full_sizes(rows, asked, config))
    full_s = {size: times.seconds(size) for size in set(sizes)}
    if times.measured == {} or wall_s <= 0:
        return Work(capacity_goodput=capacity_goodput)
    useful, slower = 0.0, dict.fromkeys(("shrunk", "first_step", "slow"), 0.0)
    for row, size, is_first, spent in zip(rows, sizes, firsts(rows), ledger.productive_s.tolist(), strict=True):
        worth = full_s[size] or 0.0
        usual = worth if row["world_size"] == size else times.seconds(row["world_size"]) or worth
        useful += worth
        slower["shrunk"] += usual - worth
        slower["first_step" if is_first else "slow"] += spent - usual
    ranks, spares = sizes[-1], spare_ranks(config)
    effective = useful / wall_s
    return Work(
        effective=effective,
        paid=effective * ranks / (ranks + spares),
        full_step_s=full_s[ranks],
        is_measured=ranks in times.measured,
        capacity_goodput=capacity_goodput,
        useful_s=useful,
        slower_s=slower,
    )


def _capacity_goodput(
    ledger: Ledger, rows: Sequence[Row], asked: Sequence[int], units: Units, config: Mapping[str, Any]
) -> float | None:
    """Productive seconds weighted by the share of the ranks asked for that was there and not idle, over wall time."""
    num_slices, wall_s = _group(config, "optim").get("num_slices"), ledger.end - ledger.begin
    if num_slices is None or wall_s <= 0:
        return None
    world_sizes = [row["world_size"] for row in rows]
    busy = {size: BatchPlan(num_slices, units.count(size), 1).busy_share for size in set(world_sizes)}
    spent = zip(ledger.productive_s.tolist(), world_sizes, asked, strict=True)
    return math.fsum(s * size / max(ranks, size) * busy[size] for s, size, ranks in spent) / wall_s


def units_of(events: Sequence[Event], config: Mapping[str, Any]) -> Units:
    """As the configuration has them, and the groups that trained."""
    parallel = _group(config, "parallel")
    axes = {axis: int(parallel.get(axis) or 1) for axis in ("tp", "cp", "pp")}
    return Units(axes, {each.world_size: each.axes.get("pp", 1) for each in of_kind(events, Generation) if each.axes})


def step_times(ledger: Ledger, rows: Sequence[Row], events: Sequence[Event], config: Mapping[str, Any]) -> StepTimes:
    """Medians over steps that are not a group's first, and during which no rank or link was found slow.

    Of a size with fewer than three of these none, unless no size has more.
    """
    slow = slow_times(events)
    begins = [begin for begin, _ in slow]
    found: dict[int, list[float]] = defaultdict(list)
    for row, is_first, spent in zip(rows, firsts(rows), ledger.productive_s.tolist(), strict=True):
        at = bisect_right(begins, row["time"]) - 1
        if not is_first and not (at >= 0 and row["time"] <= slow[at][1]):
            found[row["world_size"]].append(spent)
    if not found:
        for row, spent in zip(rows, ledger.productive_s.tolist(), strict=True):
            found[row["world_size"]].append(spent)
    many = {size: each for size, each in found.items() if len(each) >= LEAST} or found
    measured = {size: middle for size, each in many.items() if (middle := median(each)) > 0}
    parallel, optim = _group(config, "parallel"), _group(config, "optim")
    interleaved = str(parallel.get("schedule") or "").endswith("interleaved")
    per_rank = int(parallel.get("stages_per_rank") or 1) if interleaved else 1
    slices = int(optim.get("num_slices") or max([1, *(row["world_size"] for row in rows)]))
    return StepTimes(measured, slices, units_of(events, config), per_rank, int(parallel.get("slices_per_pass") or 1))


def firsts(rows: Sequence[Row]) -> Iterator[bool]:
    """Whether each row is its group's first that counts: it holds what happens once, as compiling."""
    before: object = None
    for row in rows:
        yield row.get("generation") != before
        before = row.get("generation")


def slow_times(events: Sequence[Event]) -> list[tuple[float, float]]:
    """From and to, apart and in order: when a rank or a link was slow, as far as that was found."""
    begun: dict[tuple[str, str, int], float] = {}
    spans: list[tuple[float, float]] = []
    for event in events:
        match event:
            case Suspected() if event.kind.startswith(SLOW):
                begun[event.kind, event.node, event.pid] = event.since or event.time
            case Cleared():
                begin = begun.pop((event.kind, event.node, event.pid), None)
                spans += [] if begin is None else [(begin, event.time)]
            case Submitted() | CoordinatorRestarted():  # which begin anew; a rank that survives its group stays slow
                spans += [(begin, event.time) for begin in begun.values()]
                begun.clear()
    spans += [(begin, math.inf) for begin in begun.values()]
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def spare_ranks(config: Mapping[str, Any]) -> int:
    """Ranks beyond the full size that were asked for."""
    spares = _group(config, "cluster").get("spare_workers")
    return spares if isinstance(spares, int) and not isinstance(spares, bool) else 0


def _asked(rows: Sequence[Row], events: Sequence[Event], config: Mapping[str, Any]) -> Iterator[int]:
    """The ranks that each row's job asked for; of one that does not tell, the most that were."""
    jobs = [(each.time, each.max_workers) for each in of_kind(events, Submitted) if each.max_workers]
    begins, most = [begin for begin, _ in jobs], max([1, *(row["world_size"] for row in rows)])
    configured = _group(config, "cluster").get("max_workers")
    for row in rows:
        at = bisect_right(begins, row["time"]) - 1
        yield (jobs[at][1] if at >= 0 else configured) or most


def _full_sizes(rows: Sequence[Row], asked: Sequence[int], config: Mapping[str, Any]) -> Iterator[int]:
    """Of each row's job: the ranks that it asked for, in whole units."""
    parallel = _group(config, "parallel")
    unit = int(parallel.get("tp") or 1) * int(parallel.get("cp") or 1)
    for row, ranks in zip(rows, asked, strict=True):
        yield max(ranks // unit * unit, row["world_size"])


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}
