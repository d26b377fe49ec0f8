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
from typing import Any, NamedTuple

from regrow.plan.batch import BatchPlan
from regrow.plan.pipeline import bubble_share
from regrow.record.events import Cleared, CoordinatorRestarted, Event, Generation, Row, Submitted, Suspected
from regrow.record.ledger import Ledger, of_kind, on_one_clock

RATIOS = ("goodput", "effective", "paid", "capacity_goodput")  # of report.json, as they are told of while it runs
LEAST = 3  # undisturbed steps of a shape whose median is believed: it withstands one that is not like the others
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


class Shape(NamedTuple):
    """How many ranks a group has, and how they share a step."""

    size: int
    width: int = 1  # tp x cp: ranks that share the same rows, of each stage
    pp: int = 1  # stages of a pipeline

    @property
    def units(self) -> int:
        """One of fewer ranks than a unit's, of a row that does not tell its axes, counts as 1."""
        return max(1, self.size // (self.width * self.pp))


@dataclass(frozen=True)
class Shapes:
    """Of a run's groups, by what they say themselves; where one does not, by the configuration of the newest job."""

    width: int
    pp: int
    told: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # width and pp by generation
    other_pp: Mapping[tuple[int, int], int] = field(default_factory=dict)  # by world size and width, of those that told

    def of(self, size: int, width: int | None = None) -> Shape:
        """Of a group of this size, whether it trained or not; `width` is its job's, where that is another one's."""
        width = width or self.width
        return Shape(size, width, self.other_pp.get((size, width), self.pp))

    def of_rows(self, rows: Sequence[Row]) -> list[Shape]:
        """Of the group that trained each step."""
        groups = {(row.get("generation", -1), row["world_size"]) for row in rows}
        known = {
            (generation, size): Shape(size, *self.told[generation]) if generation in self.told else self.of(size)
            for generation, size in groups
        }
        return [known[row.get("generation", -1), row["world_size"]] for row in rows]


@dataclass(frozen=True)
class StepTimes:
    """How long a step takes undisturbed, without its waits, by the group's shape."""

    measured: Mapping[Shape, float]  # medians, seconds
    num_slices: int
    shapes: Shapes
    stages_per_rank: int = 1
    slices_per_pass: int = 1

    def cost(self, shape: Shape) -> float:
        """How long a step takes by the plan, in the time of one slice through all blocks on one rank; see
        `Topology.step_cost`. Stages count as even, and so do the ranks that share rows."""
        batch = BatchPlan(self.num_slices, shape.units, self.slices_per_pass)
        bubble = bubble_share(shape.pp, self.stages_per_rank, batch.num_micro_batches)
        return batch.most_slices / (shape.width * shape.pp) / (1 - bubble)

    def seconds(self, shape: Shape) -> float | None:
        """The median, of one that is laid out to take as long, or scaled by the plan from the most similar one."""
        if shape in self.measured:
            return self.measured[shape]
        cost = self.cost(shape)

        def unlike(other: Shape) -> tuple[bool, float, int]:
            return other.width != shape.width, abs(self.cost(other) - cost), -other.size

        nearest = min(self.measured, key=unlike, default=None)
        return None if nearest is None else self.measured[nearest] * cost / self.cost(nearest)


def work_of(ledger: Ledger, rows: Sequence[Row], events: Sequence[Event], config: Mapping[str, Any]) -> Work:
    """The work of a run, by its ledger, and the rows that this is made of. `config` is nested, of any version."""
    rows, events = on_one_clock(rows, events)
    wall_s = ledger.end - ledger.begin
    times = step_times(ledger, rows, events, config)
    shapes = times.shapes.of_rows(rows)
    asked = list(_asked(rows, events, config))
    capacity_goodput = _capacity_goodput(ledger, shapes, asked, config)
    full = [_full_shape(times.shapes, shape, ranks) for shape, ranks in zip(shapes, asked, strict=True)]
    full_s = {shape: times.seconds(shape) for shape in set(full)}
    if times.measured == {} or wall_s <= 0:
        return Work(capacity_goodput=capacity_goodput)
    useful, slower = 0.0, dict.fromkeys(("shrunk", "first_step", "slow"), 0.0)
    for shape, whole, is_first, spent in zip(shapes, full, firsts(rows), ledger.productive_s.tolist(), strict=True):
        worth = full_s[whole] or 0.0
        usual = worth if shape == whole else times.seconds(shape) or worth
        useful += worth
        slower["shrunk"] += usual - worth
        slower["first_step" if is_first else "slow"] += spent - usual
    ranks, spares = full[-1].size, spare_ranks(config)
    effective = useful / wall_s
    return Work(
        effective=effective,
        paid=effective * ranks / (ranks + spares),
        full_step_s=full_s[full[-1]],
        is_measured=full[-1] in times.measured,
        capacity_goodput=capacity_goodput,
        useful_s=useful,
        slower_s=slower,
    )


def _capacity_goodput(
    ledger: Ledger, shapes: Sequence[Shape], asked: Sequence[int], config: Mapping[str, Any]
) -> float | None:
    """Productive seconds weighted by the share of the ranks asked for that was there and not idle, over wall time."""
    num_slices, wall_s = _group(config, "optim").get("num_slices"), ledger.end - ledger.begin
    if num_slices is None or wall_s <= 0:
        return None
    busy = {shape: BatchPlan(num_slices, shape.units, 1).busy_share for shape in set(shapes)}
    spent = zip(ledger.productive_s.tolist(), shapes, asked, strict=True)
    return math.fsum(s * shape.size / max(ranks, shape.size) * busy[shape] for s, shape, ranks in spent) / wall_s


def shapes_of(events: Sequence[Event], config: Mapping[str, Any]) -> Shapes:
    """As the groups that trained say, and the configuration."""
    told: dict[int, tuple[int, int]] = {}
    other_pp: dict[tuple[int, int], int] = {}
    for each in of_kind(events, Generation):
        if each.axes:
            width, pp = _width_and_pp(each.axes)
            told[each.generation] = width, pp
            other_pp[each.world_size, width] = pp
    return Shapes(*_width_and_pp(_group(config, "parallel")), told, other_pp)


def _width_and_pp(axes: Mapping[str, Any]) -> tuple[int, int]:
    tp, cp, pp = (int(axes.get(axis) or 1) for axis in ("tp", "cp", "pp"))
    return tp * cp, pp


def step_times(ledger: Ledger, rows: Sequence[Row], events: Sequence[Event], config: Mapping[str, Any]) -> StepTimes:
    """Medians over steps that are not a group's first, and during which no rank or link was found slow.

    Of a shape with fewer than three of these none, unless none has more.
    """
    slow, shapes = slow_times(events), shapes_of(events, config)
    begins = [begin for begin, _ in slow]
    found: dict[Shape, list[float]] = defaultdict(list)
    of_rows, productive_s = shapes.of_rows(rows), ledger.productive_s.tolist()
    for row, shape, is_first, spent in zip(rows, of_rows, firsts(rows), productive_s, strict=True):
        at = bisect_right(begins, row["time"]) - 1
        if not is_first and not (at >= 0 and row["time"] <= slow[at][1]):
            found[shape].append(spent)
    if not found:
        for shape, spent in zip(of_rows, productive_s, strict=True):
            found[shape].append(spent)
    many = {shape: each for shape, each in found.items() if len(each) >= LEAST} or found
    measured = {shape: middle for shape, each in many.items() if (middle := median(each)) > 0}
    parallel, optim = _group(config, "parallel"), _group(config, "optim")
    interleaved = str(parallel.get("schedule") or "").endswith("interleaved")
    per_rank = int(parallel.get("stages_per_rank") or 1) if interleaved else 1
    slices = int(optim.get("num_slices") or max([1, *(row["world_size"] for row in rows)]))
    return StepTimes(measured, slices, shapes, per_rank, int(parallel.get("slices_per_pass") or 1))


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


def _full_shape(shapes: Shapes, shape: Shape, asked: int) -> Shape:
    """Of the job whose group this is: the ranks that it asked for, in whole units."""
    size = max(asked // shape.width * shape.width, shape.size)
    return shape if size == shape.size else shapes.of(size, shape.width)


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}
