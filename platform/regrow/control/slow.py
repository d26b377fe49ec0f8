"""Which rank, or which link, slows the whole group down, from what ranks say that they spend their time on. Pure.

All ranks end a step together, so a slow one shows by waiting least: its own time, a step less the waits in collectives,
is longer than the others'. How much longer is summed up from reading to reading, less half of what is to be found
(Page's CUSUM), until the sum is beyond what the readings' own noise would reach by chance: steadier runs name sooner.
Where collectives take longer than they did, also the rank that waits for no other, it is what joins the nodes: keepers
measure links.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import fmean, median

READ_S, READ_PER_S = 5.0, 200.0  # between readings, and more where there are more keepers
DRIFT = 0.075  # of a step: half of the slowdown that is to be named
MOST, LEAST = 0.15, -0.3  # that one reading counts for: a single one proves nothing
LEAST_SUM = 5 * DRIFT  # five readings of a slowdown by 15%
SURE = 14.0  # of a false alarm, exp(-2 * SURE) a rank and reading
KEPT = 24  # readings whose noise is looked at
LEARNED = 6  # readings before it is known how long collectives take
OTHER_SIZES = 5.0  # times as long as in groups of other sizes they may take
SLOW_LINK = 0.67  # of the other nodes' median rate

Worker = tuple[str, int]  # node, pid


class Kind(StrEnum):
    """Of what a rank or node is suspected."""

    slow_compute = "slow_compute"
    slow_data = "slow_data"  # it waits for its rows
    slow_copy = "slow_copy"  # it waits for its snapshots to be copied
    slow_link = "slow_link"
    hung = "hung"
    corrupt = "corrupt"  # it came to something else than the others, from the same
    differing = "differing"  # of a few that came to different things, one


@dataclass(frozen=True)
class Spent:
    """What a rank has spent its time on in one generation, its first step left out: totals, seconds."""

    steps: int = 0
    step_s: float = 0.0
    data_s: float = 0.0
    copy_s: float = 0.0  # waiting for snapshots
    shard_s: float = 0.0  # in collectives, from its own arrival: with the other ranks of its copy of the model
    replicate_s: float = 0.0  # with the other copies
    all_s: float = 0.0  # with all ranks
    memory_bytes: float = 0.0  # the most so far of its device's; no total

    @property
    def wait_s(self) -> float:
        return self.shard_s + self.replicate_s + self.all_s

    @property
    def own_s(self) -> float:
        return self.step_s - self.wait_s

    @property
    def compute_s(self) -> float:
        return max(0.0, self.own_s - self.data_s - self.copy_s)

    def since(self, before: "Spent") -> "Spent":
        """A step's mean of what came after `before`."""
        steps = max(1, self.steps - before.steps)
        parts = ("step_s", "data_s", "copy_s", "shard_s", "replicate_s", "all_s")
        means = {part: (getattr(self, part) - getattr(before, part)) / steps for part in parts}
        return replace(self, steps=self.steps - before.steps, **means)


@dataclass(frozen=True)
class Suspicion:
    """Of a worker, or of a node's links; `pid` is 0 where it is the node, `node` empty where no link stands out."""

    kind: Kind
    node: str
    pid: int
    rank: int | None
    since: float  # when it began, as far as is known
    factor: float  # of a step's time without it
    detail: str

    @property
    def key(self) -> tuple[Kind, str, int]:
        return self.kind, self.node, self.pid


@dataclass
class Sum:
    """How much of something there is beyond what is to be expected; one reading after the other."""

    value: float = 0.0
    since: float = 0.0  # of the present rise
    readings: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    noise: float = 0.0  # sum of the squares of half the differences between readings: what lasts does not count
    found: bool = False

    def add(self, excess: float, at: float, most: float = MOST) -> None:
        excess = min(most, max(LEAST, excess))
        if self.value <= 0.0:
            self.since = at
        if len(self.readings) == KEPT:
            self.noise = max(0.0, self.noise - (self.readings[1] - self.readings[0]) ** 2 / 2)
        if self.readings:
            self.noise += (excess - self.readings[-1]) ** 2 / 2
        self.readings.append(excess)
        self.value = max(0.0, self.value + excess - DRIFT)

    def judge(self, variance: float) -> bool:
        """Whether this changes what is found: beyond chance, or back at nothing."""
        limit = max(LEAST_SUM, SURE * variance / DRIFT)
        self.value = min(self.value, 1.5 * limit)  # that what has passed is forgotten soon
        found = self.value > 0.0 if self.found else self.value >= limit
        changed, self.found = found != self.found, found
        return changed


def variance_of(sums: Collection[Sum]) -> float:
    """Of a reading, by all of them; much while there are few."""
    differences = sum(len(each.readings) - 1 for each in sums)
    return sum(each.noise for each in sums) / differences if differences >= 3 else 1.0


class SlowRanks:
    """Which ranks of the group are slow. What is known of survivors is carried over from one generation to the next."""

    def __init__(self) -> None:
        self._sums: dict[Worker, Sum] = {}
        self._spent: dict[Worker, Spent] = {}
        self._stages: Mapping[Worker, int] = {}
        self.means: dict[Worker, Spent] = {}  # of the newest reading

    def begin(self) -> None:
        """Another generation: totals begin anew."""
        self._spent, self.means = {}, {}

    def read(self, spent: Mapping[Worker, Spent], now: float, stages: Mapping[Worker, int] | None = None) -> bool:
        """Take a reading, of all ranks; whether it counts: each has done a step since the one before.

        Ranks of one of the `stages` of a pipeline are compared with one another: others have more or fewer blocks.
        """
        self._stages = stages or dict.fromkeys(spent, 0)
        self._sums = {worker: each for worker, each in self._sums.items() if worker in spent}
        if self._spent.keys() != spent.keys() or any(each.steps < 1 for each in spent.values()):
            self._spent = dict(spent)
            return False
        if any(each.steps <= self._spent[worker].steps for worker, each in spent.items()):
            return False
        self.means = {worker: each.since(self._spent[worker]) for worker, each in spent.items()}
        self._spent = dict(spent)
        step_s = fmean(mean.step_s for mean in self.means.values())
        for stage in set(self._stages.values()):
            self._add({worker: mean.own_s for worker, mean in self._of(stage).items()}, step_s, now)
        return True

    def _of(self, stage: int) -> dict[Worker, Spent]:
        return {worker: mean for worker, mean in self.means.items() if self._stages[worker] == stage}

    def _add(self, own: Mapping[Worker, float], step_s: float, now: float) -> None:
        """How long some ranks, which have the same to do, take by themselves."""
        usual = median(own.values())
        near = {worker: min(MOST * step_s, max(LEAST * step_s, each - usual)) for worker, each in own.items()}
        total = sum(near.values())
        for worker, each in own.items():
            late_s = each - usual - (total - near[worker]) / max(1, len(own) - 1)  # than the others' mean
            self._sums.setdefault(worker, Sum()).add(late_s / max(step_s - max(0.0, late_s), 1e-9), now)

    def judge(self) -> list[Worker]:
        """Workers of which it has changed whether they are slow."""
        variance = variance_of(self._sums.values())
        return [worker for worker, found in self._sums.items() if found.judge(variance)]

    def is_slow(self, worker: Worker) -> bool:
        return worker in self._sums and self._sums[worker].found

    @property
    def found(self) -> list[Worker]:
        return [worker for worker, each in self._sums.items() if each.found]

    def suspicion(self, worker: Worker, rank: int | None) -> Suspicion:
        """What it is suspected of, by what it spends more on than the others."""
        mean, found = self.means[worker], self._sums[worker]
        others = [each for other, each in self._of(self._stages[worker]).items() if other != worker]
        more = {
            kind: getattr(mean, part) - median(getattr(each, part) for each in others)
            for kind, part in (
                (Kind.slow_compute, "compute_s"),
                (Kind.slow_data, "data_s"),
                (Kind.slow_copy, "copy_s"),
            )
        }
        kind = max(more, key=lambda each: more[each])
        own, usual = mean.own_s, median(each.own_s for each in others)
        doing = {Kind.slow_compute: "computes", Kind.slow_data: "waits for data", Kind.slow_copy: "waits for snapshots"}
        detail = (
            f"{doing[kind]} {more[kind]:.3g} s a step longer than the others; its own time is {own:.3g} s a step, "
            f"theirs {usual:.3g} s; it waits for others {mean.wait_s:.3g} s"
        )
        factor = mean.step_s / max(mean.step_s - max(0.0, own - usual), 1e-9)
        return Suspicion(kind, worker[0], worker[1], rank, found.since, factor, detail)


class SlowCollectives:
    """Whether collectives take longer than they did in groups of the same size, or far longer than in other ones."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, bool], deque[float]] = {}  # by world size, and whether it is of several nodes
        self.begin()

    def begin(self) -> None:
        """Another generation."""
        self.sum, self._newest = Sum(), deque[float](maxlen=LEARNED)
        self._read, self._began_at = 0, 0.0  # readings, when the first one was taken
        self.excess = 0.0

    def read(self, means: Mapping[Worker, Spent], now: float) -> bool:
        """After a reading; whether it has changed that collectives are slow. A slow rank waits for no other."""
        group = len(means), len({node for node, _ in means}) > 1
        step_s = fmean(mean.step_s for mean in means.values())
        taken_s = min(mean.wait_s for mean in means.values())  # by the one that waits least
        self._read += 1
        self._began_at = now if self._read == 1 else self._began_at
        self._learn(self._seen.setdefault(group, deque(maxlen=KEPT)), taken_s)
        usual_s = self._most_usual_s(group, step_s - taken_s)
        if usual_s is None:
            return False
        more_s = taken_s - usual_s
        self.excess = more_s / max(step_s - max(0.0, more_s), 1e-9)
        self.sum.add(self.excess, now, most=2 * MOST if self.excess > 1.0 else MOST)
        # a process that starts beside it slows its first ones
        settled = self._read >= LEARNED or now - self._began_at >= LEARNED * READ_S
        return settled and self.sum.judge(variance_of([self.sum]))

    def _learn(self, seen: deque[float], taken_s: float) -> None:
        """What is read while nothing seems to rise; and far less, whenever: what slowed that is over."""
        if self.sum.value <= 2 * DRIFT:
            seen.append(taken_s)
        self._newest.append(taken_s)
        if len(self._newest) == LEARNED and median(self._newest) < median(seen) / 2:
            seen.clear()
            seen.extend(self._newest)

    def _most_usual_s(self, group: tuple[int, bool], own_s: float) -> float | None:
        """What is known of its size, or the most of other ones of several nodes with room for how they differ."""
        usual_s = {each: median(seen) for each, seen in self._seen.items() if len(seen) >= LEARNED}
        others = [each for other, each in usual_s.items() if other != group and other[1] and group[1]]
        known = [OTHER_SIZES * max(others) + own_s / 2] if others else []
        return min([*known, *([usual_s[group]] if group in usual_s else [])], default=None)


def slow_node(links: Mapping[str, float]) -> str:
    """The node whose link is slow, by the best rate at which each reaches another one; empty where none stands out.

    A node at a slow link's other end reaches others as fast as ever. Of two nodes, neither.
    """
    if len(links) < 3:
        return ""
    slowest = min(links, key=lambda node: links[node])
    others = median(rate for node, rate in links.items() if node != slowest)
    return slowest if links[slowest] < SLOW_LINK * others else ""
