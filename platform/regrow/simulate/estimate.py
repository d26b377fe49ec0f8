"""Goodput under failures: the next event of all replicas at once, in numpy. Pure, but for the seed.

Nothing happens per step. Between faults, nodes that come back, slow nodes and planned stops the group trains at one
speed; a change costs notice, forming and what is done again. Every second of a replica is in one part, by cause; what
is useful are seconds of the undisturbed full-size job.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrow.control.cadence import daly_interval
from regrow.record.events import Cause
from regrow.simulate.faults import (
    DAY,
    Draws,
    Fault,
    Floats,
    delays,
    doubled,
    draw,
    given,
    lognormal,
    resampled,
    retired,
)
from regrow.simulate.inputs import KINDS, TAKES_NODE, Inputs, Job

FAULT, BACK, REJOIN, SLOW, SLOW_ENDS, PLANNED, HEAD, END = range(8)
PARTS = ("notice", "form", "join", "redo", "stop")
CAUSE_OF = {
    "gpu": Cause.worker_died,
    "network": Cause.node_silent,
    "host": Cause.node_silent,
    "software": Cause.worker_failed,
    "hang": Cause.worker_hung,
    "sdc": Cause.corrupted,
    "drain": Cause.drain,
}  # as regrow's events would have it
ORIGINS = (*KINDS, "grow", "stop", "slow", "head")  # why a group changes
NODE_GOES = np.array([origin in TAKES_NODE for origin in ORIGINS])
IDLE = ("shrunk", "slow", "snapshot", "verify", "wait")  # states that no change of the group causes
WARM_SHARE = 0.25  # of a run, before nodes that are away are counted: at its beginning none is
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Estimate:
    """What became of each replica, seconds. `lost[part]` is by origin and replica; `idle` are states with no change."""

    inputs: Inputs
    wall_s: float
    useful_s: Floats
    lost: dict[str, Floats]
    idle: dict[str, Floats]  # of IDLE
    away_mean: Floats
    away_square: Floats
    generations: Floats  # changes of the group

    @property
    def effective(self) -> Floats:
        return self.useful_s / self.wall_s

    @property
    def goodput(self) -> Floats:
        """What a ledger calls productive: shrunk and slowed steps too, and those that verify."""
        return self.effective + sum(self.idle[state] for state in ("shrunk", "slow", "verify")) / self.wall_s

    @property
    def paid(self) -> Floats:
        job = self.inputs.job
        return self.effective * job.nodes / (job.nodes + job.spares)

    def seconds(self, part: str, origin: str) -> float:
        """Mean over replicas."""
        return float(self.lost[part][ORIGINS.index(origin)].mean())

    @property
    def lost_s(self) -> dict[str, float]:
        """Mean seconds that are not useful, by the ledger's causes, and those of no interruption by their states."""
        found: dict[str, float] = {}
        for origin in ORIGINS:
            cause = str(cause_of(origin, self.inputs.policy.rolling))
            found[cause] = found.get(cause, 0.0) + sum(self.seconds(part, origin) for part in PARTS)
        found |= {state: float(each.mean()) for state, each in self.idle.items()}
        return {cause: seconds for cause, seconds in found.items() if seconds > 0}

    def runs(self) -> tuple[float, float]:
        """Between which 90% of runs are."""
        low, high = np.quantile(self.effective, (0.05, 0.95))
        return float(low), float(high)


def cause_of(origin: str, rolling: bool = False) -> Cause:
    """The ledger's name of what a group changed for."""
    stop = Cause.drain if rolling else Cause.resume
    others = {"grow": Cause.grow, "stop": stop, "slow": Cause.drain, "head": Cause.resume}  # which is submitted anew
    return CAUSE_OF.get(origin) or others[origin]


@dataclass(frozen=True)
class Costs:
    """What changes of a group cost at the job's size, in seconds on average."""

    form_s: float
    join_s: float
    stop_s: float
    restart_s: float
    durable_back_s: float
    step_s: float
    every_steps: float  # between snapshots in memory
    interval_s: float  # between checkpoints, where only they count; 0: snapshots do
    stall_s: float
    verify_share: float

    @staticmethod
    def of(inputs: Inputs) -> "Costs":
        job, interval_s = inputs.job, _interval_s(inputs)
        form_s = inputs.form_s(job.gpus)
        return Costs(
            form_s=form_s,
            join_s=inputs["join_s"] + inputs.communicators_s(job.gpus) if inputs.policy.in_place else form_s,
            stop_s=inputs["stop_fixed_s"] + inputs["stop_per_gpu_s"] * job.gpus,
            restart_s=inputs["restart_s"],
            durable_back_s=inputs["durable_back_s"],
            step_s=inputs["step_s"],
            every_steps=max(1.0, inputs["snapshot_every_steps"]),
            interval_s=interval_s,
            stall_s=inputs["snapshot_stall_s"] if interval_s else 0.0,
            verify_share=inputs["verify_share"],
        )

    @property
    def segment_s(self) -> float:
        return self.interval_s + self.stall_s

    @property
    def stall_share(self) -> float:
        return self.stall_s / self.segment_s if self.interval_s else 0.0


def _interval_s(inputs: Inputs) -> float:
    """Between checkpoints; 0 where snapshots are in memory."""
    if inputs.policy.memory:
        return 0.0
    if not inputs.policy.automatic:
        return inputs["snapshot_interval_s"]
    rate = sum(inputs[f"rate_{kind}"] for kind in KINDS) * inputs.job.nodes
    stall_s = inputs["snapshot_stall_s"]
    return (
        max(daly_interval(stall_s, DAY / rate), stall_s) if rate > 0 and stall_s > 0 else inputs["snapshot_interval_s"]
    )


def speeds(job: Job) -> tuple[Floats, Floats]:
    """By how many nodes are up: the speed next to all of them, and how many nodes the fewest such units take."""
    up = np.arange(job.nodes + job.spares + 1)
    units = np.minimum(job.units, up * job.gpus_per_node // job.unit_gpus)
    passes0 = passes_of(job, np.array([job.units]))[0]
    passes = passes_of(job, np.maximum(units, 1))
    speed = np.where(units >= max(1, job.least_units), passes0 / passes, 0.0)
    per_unit = -(-job.num_slices // (passes * job.slices_per_pass))
    fewest = np.minimum(np.maximum(units, 1), per_unit)
    return speed, np.ceil(fewest * job.unit_gpus / job.gpus_per_node)


def passes_of(job: Job, units: NDArray[np.intp]) -> NDArray[np.intp]:
    """Of a step, as `plan.batch` has it: what the unit with most slices runs."""
    most = -(-job.num_slices // units)
    return -(-most // job.slices_per_pass)


def estimate(inputs: Inputs, replicas: int = 32, seed: int = 0, draws: Draws | None = None) -> Estimate:
    """What becomes of `replicas` runs under this policy. `draws`: those of `faults.draw`, kept for other policies."""
    draws = draw(inputs, replicas, seed) if draws is None else draws
    run = Estimating(inputs, replicas, len(draws.at) + len(draws.slow_at))
    for event in events_of(inputs, draws, seed):
        run.step(*event)
    return run.result()


def events_of(inputs: Inputs, draws: Draws, seed: int) -> Iterator[tuple[NDArray[Any], ...]]:
    """What befalls each replica under a policy, with its delays: what `Estimating.step` takes, one after another."""
    replicas = draws.replicas
    notice, pairs = np.zeros(draws.at.shape), (replicas + 1) // 2
    for number, kind in enumerate(KINDS):
        figure = inputs.figures[f"notice_{kind}_s"]
        factor = doubled(resampled(figure, pairs, seed + number), replicas)
        seconds = delays(figure, inputs, draws.normal, draws.uniform) * factor
        notice = np.where(draws.kind == number, seconds, notice)
    unnoticed = np.where(draws.kind == KINDS.index("sdc"), inputs["sdc_unnoticed_s"] * draws.heavy, 0.0)
    factor, form_s = np.ones(replicas), inputs.form_s(inputs.job.gpus)
    for name in ("form_base_s", "build_s", "restore_s", "first_step_s", "communicators_s"):
        share = min(1.0, inputs[name] / form_s) if form_s > 0 else 0.0
        factor += share * (doubled(resampled(inputs.figures[name], pairs, seed + 50), replicas) - 1)
    vary = lognormal(draws.vary, inputs.spread) * factor
    return zip(*_schedule(inputs, draws, notice, unnoticed, vary), strict=True)


def estimate_given(inputs: Inputs, faults: Sequence[Fault]) -> Estimate:
    """One run with these faults, each with its own delays."""
    draws, notice, unnoticed = given(faults)
    run = Estimating(inputs, 1, len(draws.at) + len(draws.slow_at))
    for event in zip(*_schedule(inputs, draws, notice, unnoticed, np.exp(draws.vary)), strict=True):
        run.step(*event)
    return run.result()


def _schedule(inputs: Inputs, draws: Draws, notice: Floats, unnoticed: Floats, vary: Floats) -> list[NDArray[Any]]:
    """All events of each replica in their order, as columns: time, code, the fault's row, origin, nodes, where, seconds
    of notice, of wrong work, of waiting for storage, of what else the event says, and the factor of forming.
    """
    horizon, policy = inputs.days * DAY, inputs.policy
    rows = np.broadcast_to(np.arange(len(draws.at), dtype=np.float64)[:, None], draws.at.shape)
    never = retired(inputs, draws, policy.retire_after)
    if policy.expels_corrupt:  # of incidents of one host only the first is seen
        never = never | ((draws.kind == KINDS.index("sdc")) & (draws.uniform > inputs["sdc_first_share"]))
    draws_at = np.where(never, np.inf, draws.at)
    known = draws_at + notice
    columns: list[list[Floats]] = []

    def add(at: Floats, code: int, **given: Floats | float) -> None:
        names = ("ref", "origin", "nodes", "where", "notice", "wrong", "storage", "extra", "vary")
        values = [np.broadcast_to(np.asarray(given.get(name, 1.0 * (name == "vary"))), at.shape) for name in names]
        columns.append([at, np.full(at.shape, float(code)), *values])

    add(
        draws_at, FAULT, ref=rows, origin=draws.kind.astype(np.float64), nodes=draws.nodes, where=draws.where,
        notice=notice, wrong=unnoticed, storage=_outage(draws, draws_at), vary=vary,
    )  # fmt: skip
    back = np.where(np.isfinite(known), known + draws.away_s, np.inf)
    add(back, BACK, ref=rows, origin=float(ORIGINS.index("grow")), vary=np.roll(vary, 1, axis=0))
    if policy.replicas > 1:
        add(known + inputs["restart_s"] * vary, REJOIN, ref=rows, origin=draws.kind.astype(np.float64))
    evict_s = inputs["slow_evict_s"]
    slow_rows = len(draws.at) + np.broadcast_to(
        np.arange(len(draws.slow_at), dtype=np.float64)[:, None], draws.slow_at.shape
    )
    slow: dict[str, Floats | float] = {"ref": slow_rows, "where": draws.slow_where, "extra": draws.slow_excess}
    slow["origin"] = float(ORIGINS.index("slow"))
    left = np.where(draws.slow_lasts_s > evict_s, draws.slow_at + evict_s, np.inf)  # where a spare waits
    add(draws.slow_at, SLOW, **slow)
    add(left, SLOW_ENDS, nodes=1.0, **slow)
    add(draws.slow_at + draws.slow_lasts_s, SLOW_ENDS, **slow)
    add(left + draws.slow_away_s, BACK, ref=slow_rows, origin=float(ORIGINS.index("grow")))
    add(draws.planned, PLANNED, origin=float(ORIGINS.index("stop")))
    add(draws.head, HEAD, origin=float(ORIGINS.index("head")))
    add(np.full((1, draws.replicas), horizon), END)
    merged = [np.concatenate(each) for each in zip(*columns, strict=True)]
    order = np.argsort(merged[0], axis=0, kind="stable")
    last = int((np.take_along_axis(merged[0], order, axis=0) <= horizon).sum(0).max())
    found = [np.ascontiguousarray(np.take_along_axis(each, order[:last], axis=0)) for each in merged]
    return [each.astype(np.intp) if number in (2, 3) else each for number, each in enumerate(found)]  # ref, origin


def _outage(draws: Draws, at: Floats) -> Floats:
    """For how long storage stays away, at these times."""
    left = np.zeros(at.shape)
    for begin, lasts in zip(draws.storage_at, draws.storage_lasts_s, strict=True):
        during = (at >= begin) & (at < begin + lasts)
        if during.any():
            left = np.where(during, np.maximum(left, begin + lasts - np.where(during, at, 0.0)), left)
    return left


@dataclass
class Estimating:
    """The state of all replicas. Seconds that pass are booked at once, and moved where what they did is lost."""

    inputs: Inputs
    replicas: int
    num_rows: int  # of faults, and of slow nodes
    booked: dict[str, Floats] = field(init=False)
    lost: dict[str, Floats] = field(init=False)

    def __post_init__(self) -> None:
        inputs, job = self.inputs, self.inputs.job
        zero: Floats = np.zeros(self.replicas)
        self.horizon, self.columns = inputs.days * DAY, np.arange(self.replicas)
        self.booked = {state: zero.copy() for state in ("useful", *IDLE)}
        self.lost = {part: np.zeros((len(ORIGINS), self.replicas)) for part in PARTS}
        self.costs, self.members = Costs.of(inputs), job.nodes + job.spares
        speed_of, used_of = speeds(job)
        self.speed_of, self.used_of = (
            speed_of,
            used_of if inputs.policy.park else np.minimum(np.arange(self.members + 1), job.nodes),
        )
        self.healthy = zero + self.members
        self.used, self.speed = zero + self.used_of[self.members], zero + 1.0
        self.excess, self.out, self.up, self.end, self.before = (zero.copy() for _ in range(5))
        self.taken = np.zeros((self.num_rows, self.replicas))  # nodes that a row took away
        self.holds = np.zeros((self.num_rows, self.replicas), dtype=bool)  # it slows the group, or keeps a replica out
        self.away, self.away2, self.changes = (zero.copy() for _ in range(3))

    def result(self) -> Estimate:
        idle = {state: self.booked[state] for state in IDLE}
        counted = self.horizon * (1 - WARM_SHARE)
        away = self.away / counted, self.away2 / counted
        return Estimate(self.inputs, self.horizon, self.booked["useful"], self.lost, idle, *away, self.changes)

    def step(
        self, now: Floats, code: Floats, ref: NDArray[np.intp], origin: NDArray[np.intp], nodes: Floats, where: Floats,
        notice: Floats, wrong: Floats, storage: Floats, extra: Floats, vary: Floats,
    ) -> None:  # fmt: skip
        """One event of each replica."""
        live, now = now <= self.horizon, np.minimum(now, self.horizon)
        self._pass(now)
        fault, back, ends = live & (code == FAULT), live & (code == BACK), live & (code == SLOW_ENDS)
        stop, head, rejoin = live & (code == PLANNED), live & (code == HEAD), live & (code == REJOIN)
        hit, over = self._count(fault, back, live & (code == SLOW), ends, ref, nodes, where, extra)
        rejoin &= self.holds[ref, self.columns]
        self.out -= rejoin
        evict = over & (nodes > 0)
        can = self._possible()
        grow = back & (can > self.speed)
        change = hit | evict | stop | head | grow | rejoin
        if change.any():
            self._undo(hit, head, origin, nodes, wrong)
            self.up *= ~change
            needs = hit & (self._takes_copies(origin, nodes) | (not self.inputs.policy.memory))
            self._stand(
                now, change, grow | rejoin, stop, head, origin, notice * hit + storage * needs, notice * hit, vary
            )
            self.speed = np.where(change, can, self.speed)
            self.used = np.where(change, self.used_of[self.healthy.astype(np.intp)], self.used)

    def _pass(self, now: Floats) -> None:
        """Book the seconds since the last event that are not booked yet."""
        span = np.maximum(now - np.maximum(self.before, self.end), 0)
        begun = self.horizon * WARM_SHARE
        dt, gone = np.maximum(now - np.maximum(self.before, begun), 0), self.members - self.healthy
        self.away += gone * dt
        self.away2 += gone * gone * dt
        self.before = now
        trains = span * (self.speed > 0)
        self.booked["wait"] += span - trains
        self.up += trains
        self._book(trains)

    def _book(self, seconds: Floats) -> None:
        """Of training, at the present speed."""
        for state, each in self._split(seconds).items():
            self.booked[state] += each

    def _split(self, seconds: Floats) -> dict[str, Floats]:
        """What seconds of training come to, at the present speed."""
        stalls = seconds * self.costs.stall_share
        trained = (seconds - stalls) / (1 + self.costs.verify_share)
        verified = seconds - stalls - trained
        at_speed = trained * self.speed
        useful = at_speed / (1 + self.excess)
        spent = {"snapshot": stalls, "verify": verified, "shrunk": trained - at_speed, "slow": at_speed - useful}
        return spent | {"useful": useful}

    def _count(
        self, fault: Bools, back: Bools, slow: Bools, ends: Bools, ref: NDArray[np.intp], nodes: Floats, where: Floats,
        extra: Floats,
    ) -> tuple[Bools, Bools]:  # fmt: skip
        """Which nodes are up, slow and out, after an event; whether it hits the group, and ends a node's slowness."""
        columns = self.columns
        first = np.floor(where * self.members)  # of the nodes that it is of: the group's, those that wait, those away
        in_group = first < np.minimum(self.used, self.healthy)
        hit = fault & in_group
        held = self.holds[ref, columns]
        begins = slow & in_group
        over = ends & held & ((nodes == 0) | (self.healthy - self.used >= nodes))  # left only for a spare
        self.excess += extra * begins - extra * over
        self.excess = np.maximum(self.excess, 0.0)
        took = np.where(fault, np.clip(self.healthy - first, 0, nodes), nodes * over)
        self.healthy += self.taken[ref, columns] * back - took
        if self.inputs.policy.replicas > 1:
            again = hit & (where * 7919 % 1 < self.out / self.inputs.policy.replicas)  # of a replica that is out
            hit = hit & ~again
            self.out += hit
            begins = begins | hit
        marked = fault | slow
        self.taken[ref, columns] = np.where(marked | over, took, self.taken[ref, columns])
        self.holds[ref, columns] = np.where(marked, begins, held & ~over)
        return hit, over

    def _possible(self) -> Floats:
        """The speed of a group of those that are up."""
        job, policy = self.inputs.job, self.inputs.policy
        if policy.replicas > 1:
            whole = np.floor(self.healthy * policy.replicas / job.nodes)
            whole = np.clip(np.minimum(whole, policy.replicas - self.out), 0, None)
            return np.where(whole * job.units >= job.least_units * policy.replicas, whole / policy.replicas, 0.0)
        if not policy.shrinks:
            return (self.healthy >= job.nodes) * 1.0
        return self.speed_of[self.healthy.astype(np.intp)]

    def _takes_copies(self, origin: NDArray[np.intp], nodes: Floats) -> Bools:
        """Whether a fault takes a snapshot and all its copies, which a process leaves where they are."""
        return NODE_GOES[origin] & (nodes >= self.inputs.policy.copies_lost_at)

    def _undo(self, hit: Bools, head: Bools, origin: NDArray[np.intp], nodes: Floats, wrong: Floats) -> None:
        """Take back what a loss costs of the work before it."""
        inputs, costs = self.inputs, self.costs
        step_s = costs.step_s * (1 + self.excess) / np.where(self.speed > 0, self.speed, 1)
        segment = costs.segment_s if costs.interval_s else step_s * costs.every_steps
        begun = self.up - np.floor(self.up / segment) * segment
        if not costs.interval_s:  # a group begins with what is safe
            begun = np.minimum(begun + inputs["lost_committed_steps"] * step_s, self.up)
        again = wrong + costs.durable_back_s * self._takes_copies(origin, nodes)
        again = np.where(head, costs.durable_back_s, again)
        undone = np.zeros(self.replicas)
        told = (origin == ORIGINS.index("drain")) & (inputs["notice_drain_s"] == 0)  # it leaves in good order
        for state, each in self._split((begun + again) * ((hit & ~told) | head)).items():
            taken = np.minimum(each, self.booked[state])
            self.booked[state] -= taken
            undone = undone + taken
        self.lost["redo"][origin, self.columns] += undone

    def _stand(
        self, now: Floats, change: Bools, joins: Bools, stop: Bools, head: Bools, origin: NDArray[np.intp],
        late: Floats, notice: Floats, vary: Floats,
    ) -> None:  # fmt: skip
        """How long all stand still; a fault while a group forms begins that anew."""
        costs = self.costs
        join = np.where(self.end > now, 0.0, np.where(self.speed > 0, costs.join_s, costs.form_s))
        takes = np.where(joins, join, np.where(stop, costs.stop_s, np.where(head, costs.restart_s, costs.form_s)))
        until = np.minimum(now + takes * vary + late, self.horizon)
        until = np.where(joins | stop, np.maximum(until, self.end), until)  # a loss begins the forming anew
        added = np.where(change, until - np.maximum(self.end, now), 0.0)  # of one that ends sooner, some is taken back
        seen = np.minimum(notice * change, np.maximum(added, 0.0))
        for part, mask, seconds in (
            ("notice", change, seen),
            ("join", joins, added - seen),
            ("stop", stop, added - seen),
            ("form", ~joins & ~stop, added - seen),
        ):
            self.lost[part][origin, self.columns] += seconds * mask
        self.end = np.where(change, until, self.end)
        self.changes += change
