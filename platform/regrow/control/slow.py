"""Which rank, or which link, slows the whole group down, from what ranks say that they spend their time on. Pure.

All ranks end a step together, so a slow one shows by waiting least: its own time, a step less the waits in collectives,
is longer than the others'. How much longer is summed up from reading to reading, less half of what is to be found
(Page's CUSUM), until the sum is beyond what the readings' own noise would reach by chance: steadier runs name sooner.
Where collectives take longer than they did, also the rank that waits for no other, it is what joins the nodes: keepers
measure links.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import chain
from operator import attrgetter
from statistics import median

import numpy as np

from regrow.plan.topology import Topology

READ_S, READ_PER_S = 5.0, 750.0  # between readings, and more where there are more keepers: seven are two minutes
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


FIELDS = tuple(each.name for each in fields(Spent))
VALUES = attrgetter(*FIELDS)
STEPS, STEP = FIELDS.index("steps"), FIELDS.index("step_s")  # columns of all FIELDS
TIMES, WAITS = slice(STEP, FIELDS.index("all_s") + 1), slice(FIELDS.index("shard_s"), FIELDS.index("all_s") + 1)
NOWHERE = -1


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
class Sums:
    """Of some things, how much of each there is beyond what is to be expected; one reading after the other."""

    value: np.ndarray
    since: np.ndarray  # of the present rise
    noise: np.ndarray  # sum of the squares of half the differences between readings: what lasts does not count
    found: np.ndarray
    taken: np.ndarray  # readings so far
    readings: np.ndarray  # [n, KEPT], the newest ones, each in the place of one that is KEPT older

    @staticmethod
    def of(count: int) -> "Sums":
        """With no reading."""
        return Sums(
            value=np.zeros(count),
            since=np.zeros(count),
            noise=np.zeros(count),
            found=np.zeros(count, bool),
            taken=np.zeros(count, int),
            readings=np.zeros((count, KEPT)),
        )

    def taken_over(self, before: Sequence[int]) -> "Sums":
        """Of other things, for which those at these places are known; below 0: not."""
        made, places = Sums.of(len(before)), np.array(before, int)
        known = places >= 0
        for name in ("value", "since", "noise", "found", "taken", "readings"):
            getattr(made, name)[known] = getattr(self, name)[places[known]]
        return made

    def add(self, excess: np.ndarray, at: float, most: float = MOST) -> None:
        excess = np.clip(excess, LEAST, most)
        self.since[self.value <= 0.0] = at
        each, place = np.arange(len(excess)), self.taken % KEPT
        full, begun = self.taken >= KEPT, self.taken > 0
        oldest = self.readings[each, (place + 1) % KEPT] - self.readings[each, place]
        self.noise = np.where(full, np.maximum(0.0, self.noise - oldest**2 / 2), self.noise)
        self.noise += np.where(begun, (excess - self.readings[each, place - 1]) ** 2 / 2, 0.0)
        self.readings[each, place] = excess
        self.taken += 1
        self.value = np.maximum(0.0, self.value + excess - DRIFT)

    def judge(self) -> np.ndarray:
        """Where this changes what is found: beyond chance, or back at nothing. Places."""
        limit = max(LEAST_SUM, SURE * self._variance() / DRIFT)
        self.value = np.minimum(self.value, 1.5 * limit)  # that what has passed is forgotten soon
        found = np.where(self.found, self.value > 0.0, self.value >= limit)
        changed = np.flatnonzero(found != self.found)
        self.found = found
        return changed

    def _variance(self) -> float:
        """Of a reading, by all of them; much while there are few."""
        differences = int(np.clip(self.taken - 1, 0, KEPT - 1).sum())
        return float(self.noise.sum()) / differences if differences >= 3 else 1.0


@dataclass(frozen=True)
class Duties:
    """What ranks have to do in a step, by their places: int64 [n] each."""

    stages: np.ndarray  # of their unit's pipeline
    units: np.ndarray
    slices: np.ndarray  # that go through them

    @staticmethod
    def alike(count: int) -> "Duties":
        """All have the same."""
        return Duties(np.zeros(count, int), np.arange(count), np.ones(count, int))

    @staticmethod
    def of(ranks: np.ndarray, topology: Topology) -> "Duties":
        """Those of `ranks`, int64 [n]."""
        mesh, width = topology.mesh, topology.mesh.tp * topology.mesh.cp
        parts = np.array([mesh.part_of(rank) for rank in range(0, mesh.world_size, width)])
        units, stages = np.divmod(parts[ranks // width], mesh.pp)
        slices = np.array([topology.batch.num_computed(unit) for unit in range(mesh.num_units)])
        return Duties(stages, units, slices[units])

    def different(self) -> Iterator[tuple[int, int]]:
        """Stages and numbers of slices that there are, each pair once."""
        for stage in np.unique(self.stages).tolist():
            for slices in np.unique(self.slices[self.stages == stage]).tolist():
                yield stage, slices

    def equal(self, stage: int, slices: int) -> np.ndarray:
        """Which ranks have these to do."""
        return (self.stages == stage) & (self.slices == slices)

    def compared(self, stage: int, slices: int) -> tuple[np.ndarray, np.ndarray]:
        """Which ranks one of a stage with so many slices is compared with, and by what their times are multiplied.

        They have as many. A unit that has them alone is compared with all of its stage: with more slices these take no
        less time; with fewer their time grows with the slices at the most, as a part of a step is the same for all.
        """
        equal, of_stage = self.equal(stage, slices), self.stages == stage
        compared = equal if len(np.unique(self.units[equal])) > 1 else of_stage
        return compared, np.maximum(1.0, slices / self.slices[compared])


@dataclass
class Means:
    """What ranks spent a step's time on, of one reading: seconds."""

    workers: Sequence[Worker] = ()
    parts: np.ndarray = field(default_factory=lambda: np.zeros((0, len(FIELDS))))  # FIELDS of each; steps are a number

    @property
    def step_s(self) -> np.ndarray:
        return self.parts[:, STEP]

    @property
    def wait_s(self) -> np.ndarray:
        return self.parts[:, WAITS].sum(axis=1)

    @property
    def own_s(self) -> np.ndarray:
        return self.step_s - self.wait_s

    def of(self, place: int) -> Spent:
        """A step's mean of the rank at this place."""
        steps, *seconds = self.parts[place].tolist()
        return Spent(int(steps), *seconds)

    def slowest(self, count: int) -> list[tuple[Worker, Spent]]:
        """So many that take longest by themselves, the slowest first."""
        return [(self.workers[each], self.of(each)) for each in np.argsort(-self.own_s, kind="stable")[:count]]


class SlowRanks:
    """Which ranks of the group are slow. What is known of survivors is carried over from one generation to the next."""

    def __init__(self) -> None:
        self._places: dict[Worker, int] = {}
        self._workers: tuple[Worker, ...] = ()
        self._sums = Sums.of(0)
        self._spent: np.ndarray | None = None  # FIELDS of each, totals; None: of this generation nothing
        self._duties = Duties.alike(0)
        self.means = Means()  # of the newest reading

    def begin(self) -> None:
        """Another generation: totals begin anew."""
        self._spent, self.means = None, Means()

    def read(
        self,
        spent: Mapping[Worker, Spent],
        now: float,
        *,
        ranks: Mapping[Worker, int] | None = None,
        topology: Topology | None = None,
    ) -> bool:
        """Take a reading, of all ranks; whether it counts: each has done a step since the one before.

        Ranks are compared with those that have as much to do, by `topology` and their numbers in it; without, all have.
        """
        if self._places.keys() != spent.keys():
            self._take_over(tuple(spent))
        each = (spent[worker] for worker in self._workers)
        totals = np.fromiter(chain.from_iterable(map(VALUES, each)), float, len(spent) * len(FIELDS))
        totals, before = totals.reshape(len(spent), len(FIELDS)), self._spent
        if before is None or (totals[:, STEPS] < 1).any():
            self._spent = totals
            return False
        steps = totals[:, STEPS] - before[:, STEPS]
        if (steps <= 0).any():
            return False
        self._spent, parts = totals, totals.copy()
        parts[:, TIMES] = (totals[:, TIMES] - before[:, TIMES]) / steps[:, None]
        parts[:, STEPS] = steps
        self.means = Means(self._workers, parts)
        self._duties = Duties.alike(len(spent))
        if ranks is not None and topology is not None:
            numbers = np.fromiter((ranks[worker] for worker in self._workers), int, len(spent))
            self._duties = Duties.of(numbers, topology)
        self._sums.add(self._excess(), now)
        return True

    def _take_over(self, workers: tuple[Worker, ...]) -> None:
        self._sums = self._sums.taken_over([self._places.get(worker, NOWHERE) for worker in workers])
        self._workers, self._places = workers, {worker: place for place, worker in enumerate(workers)}
        self._spent = None

    def _excess(self) -> np.ndarray:
        """By how much of a step each takes longer by itself than the others, which have the same to do."""
        own_s, step_s = self.means.own_s, float(self.means.step_s.mean())
        late_s = np.zeros(len(own_s))
        for duty in self._duties.different():
            equal, (compared, times) = self._duties.equal(*duty), self._duties.compared(*duty)
            more = own_s[compared] * times
            more -= np.median(more)
            near = np.clip(more, LEAST * step_s, MOST * step_s)
            late = more - (near.sum() - near) / max(1, len(near) - 1)  # than the others' mean
            late_s[equal] = late[equal[compared]]
        return late_s / np.maximum(step_s - np.maximum(0.0, late_s), 1e-9)

    def judge(self) -> list[Worker]:
        """Workers of which it has changed whether they are slow."""
        return [self._workers[place] for place in self._sums.judge()]

    def is_slow(self, worker: Worker) -> bool:
        return worker in self._places and bool(self._sums.found[self._places[worker]])

    @property
    def found(self) -> list[Worker]:
        return [self._workers[place] for place in np.flatnonzero(self._sums.found)]

    def suspicion(self, worker: Worker, rank: int | None) -> Suspicion:
        """What it is suspected of, by what it spends more on than the others."""
        place, means, duties = self._places[worker], self.means, self._duties
        mean = means.of(place)
        compared, times = duties.compared(int(duties.stages[place]), int(duties.slices[place]))
        others = (means.parts[compared] * times[:, None])[np.flatnonzero(compared) != place]
        data_s, copy_s = (others[:, FIELDS.index(name)] for name in ("data_s", "copy_s"))
        own_s = others[:, STEP] - others[:, WAITS].sum(axis=1)
        more = {
            Kind.slow_compute: mean.compute_s - float(np.median(np.maximum(0.0, own_s - data_s - copy_s))),
            Kind.slow_data: mean.data_s - float(np.median(data_s)),
            Kind.slow_copy: mean.copy_s - float(np.median(copy_s)),
        }
        kind = max(more, key=lambda each: more[each])
        own, usual = mean.own_s, float(np.median(own_s))
        doing = {Kind.slow_compute: "computes", Kind.slow_data: "waits for data", Kind.slow_copy: "waits for snapshots"}
        detail = (
            f"{doing[kind]} {more[kind]:.3g} s a step longer than the others; its own time is {own:.3g} s a step, "
            f"theirs {usual:.3g} s; it waits for others {mean.wait_s:.3g} s"
        )
        factor = mean.step_s / max(mean.step_s - max(0.0, own - usual), 1e-9)
        return Suspicion(kind, worker[0], worker[1], rank, float(self._sums.since[place]), factor, detail)


class SlowCollectives:
    """Whether collectives take longer than they did in groups of the same size, or far longer than in other ones."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, bool], deque[float]] = {}  # by world size, and whether it is of several nodes
        self.begin()

    def begin(self) -> None:
        """Another generation."""
        self._sum, self._newest = Sums.of(1), deque[float](maxlen=LEARNED)
        self._read, self._began_at = 0, 0.0  # readings, when the first one was taken
        self.excess = 0.0

    @property
    def are_slow(self) -> bool:
        return bool(self._sum.found[0])

    @property
    def since(self) -> float:
        """When they began to take longer."""
        return float(self._sum.since[0])

    def read(self, means: Means, now: float) -> bool:
        """After a reading; whether it has changed that collectives are slow. A slow rank waits for no other."""
        (first, _), *_ = means.workers
        group = len(means.workers), any(node != first for node, _ in means.workers)
        step_s = float(means.step_s.mean())
        taken_s = float(means.wait_s.min())  # by the one that waits least
        self._read += 1
        self._began_at = now if self._read == 1 else self._began_at
        self._learn(self._seen.setdefault(group, deque(maxlen=KEPT)), taken_s)
        usual_s = self._most_usual_s(group, step_s - taken_s)
        if usual_s is None:
            return False
        more_s = taken_s - usual_s
        self.excess = more_s / max(step_s - max(0.0, more_s), 1e-9)
        self._sum.add(np.array([self.excess]), now, most=2 * MOST if self.excess > 1.0 else MOST)
        # a process that starts beside it slows its first ones
        settled = self._read >= LEARNED or now - self._began_at >= LEARNED * READ_S
        return settled and len(self._sum.judge()) > 0

    def _learn(self, seen: deque[float], taken_s: float) -> None:
        """What is read while nothing seems to rise; and far less, whenever: what slowed that is over."""
        if self._sum.value[0] <= 2 * DRIFT:
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
