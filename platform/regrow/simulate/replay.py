"""A run's own faults played again: what a profile says that a drill, or a finished run, should have come to.

`predict` plays a plan of faults, which come at steps, around regrow's own Control, with durations drawn from a
profile's samples of the group's size and the change's cause. What comes out are rows and events, accounted by the same
ledger and report as a run's. `replay` does that with the faults of a finished run, and sets the two beside each other.
Pure, but for the seed, and for `replay`, which reads a run folder.
"""

import math
import random
import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from regrow.config.schema import PretrainConfig
from regrow.control import events as e
from regrow.errors import ConfigError
from regrow.record.events import Cause, Event, Failure, FaultKind, Generation, Spares
from regrow.record.history import History
from regrow.record.ledger import of_kind
from regrow.record.log import Tail
from regrow.record.run_folder import find_run
from regrow.record.work import RATIOS
from regrow.show.report import as_mapping, build_report
from regrow.show.units import percent
from regrow.simulate.estimate import CAUSE_OF
from regrow.simulate.faults import Fault
from regrow.simulate.inputs import Figure, Inputs, Job, Origin, Policy
from regrow.simulate.play import Player, leave
from regrow.simulate.profile import Profile, lost_steps
from regrow.simulate.run_logs import RunLogs, arrivals, faults_of
from regrow.simulate.world import settled_for, verify_share

DRAWN = (  # figures that a Player asks for, and that are drawn here
    *("restore_s", "durable_back_s", "join_s", "communicators_s", "communicators_power", "form_base_s", "build_s"),
    *("first_step_s", "form_per_node_s"),
)
LEAST = 3  # samples of a cause and size that are drawn from; else those of the cause, else all
FAR = 1e9  # seconds that a run does not last
DRAIN_S = 15.0  # a drill's notice, where it says nothing else
OPTION = re.compile(r"(\w+)=([\d.]+)")  # of a fault, as a drill's record has it
OF_DRILL = {  # which of the simulator's kinds a drill's faults are; those that befall no rank are left out
    "kill_worker": "software",
    "corrupt_snapshot": "software",
    "hang_step": "hang",
    "hang_validation": "hang",
    "hang_snapshot": "hang",
    "stop_worker": "hang",
    "kill_node": "host",
    "black_hole_node": "network",
    "partition_node": "network",
    "partition_head": "network",
    "drain_node": "drain",
    "flip_gradients": "sdc",
    "flip_activations": "sdc",
}
BY_ITS_EVENTS = (  # several faults each, or as it comes: a run with one of them is played by its events
    *("drain_all", "restart_raylet", "kill_controller", "partition_peer"),
    *("hang_first_step", "dead_mount", "flip_weights"),
)
OF_ALL = (Cause.controller_died, Cause.corrupted, Cause.nonfinite)  # where no rank is named: all begin anew
ALL_BEGIN = (Cause.start, Cause.resume, Cause.controller_died)  # changes in which no process goes on
NODE_COMES = "return_node"


@dataclass(frozen=True)
class Planned:
    """A fault that comes once a step is logged."""

    step: int
    what: str  # a kind of the simulator, or return_node: another node comes
    where: float | None = None  # in [0, 1): which node of all; None: drawn
    deadline_s: float = DRAIN_S  # of a notice
    after_s: float | None = None  # from then on; None: within a step, drawn


@dataclass(frozen=True)
class Outcome:
    """What a run comes to: its ratios, shares of wall time by cause, counts."""

    wall_s: float
    ratios: Mapping[str, float]
    lost: Mapping[str, float]  # by the ledger's causes, over wall time
    generations: int
    lost_steps: int

    @staticmethod
    def of(report: Mapping[str, Any]) -> "Outcome":
        wall_s = report["wall_s"]
        return Outcome(
            wall_s,
            {name: report[name] for name in RATIOS if report[name] is not None},
            {cause: seconds / wall_s for cause, seconds in report["lost_s"].items()},
            report["generations"],
            sum(each["lost_steps"] or 0 for each in report["recoveries"]),
        )


@dataclass(frozen=True)
class Prediction:
    """Of several plays with other draws: means, and standard deviations."""

    mean: Outcome
    sd: Outcome
    plays: int
    profile: str  # the runs that it is made of
    faults: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of_dict(content: Mapping[str, Any]) -> "Prediction":
        given = dict(content)
        return Prediction(Outcome(**given.pop("mean")), Outcome(**given.pop("sd")), **given)


@dataclass(frozen=True)
class Compared:
    """A prediction, and what a run came to."""

    predicted: Prediction
    was: Outcome
    run: str = ""
    left_out: Mapping[str, int] = field(default_factory=dict)  # restarts of the whole group, by their cause

    @property
    def points(self) -> dict[str, float]:
        """Differences of the ratios, in points, predicted less measured."""
        mean = self.predicted.mean.ratios
        return {name: 100 * (mean[name] - ratio) for name, ratio in self.was.ratios.items() if name in mean}

    @property
    def causes(self) -> dict[str, tuple[float, float, bool]]:
        """By cause: shares of wall time, predicted and measured, and whether they agree: within 1.5 points or 30%."""
        names = sorted({*self.predicted.mean.lost, *self.was.lost} - {str(Cause.unfinished)})
        pairs = {name: (self.predicted.mean.lost.get(name, 0.0), self.was.lost.get(name, 0.0)) for name in names}
        return {name: (a, b, abs(a - b) <= max(0.015, 0.3 * b)) for name, (a, b) in pairs.items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "left_out": dict(self.left_out),
            "predicted": self.predicted.to_dict(),
            "was": asdict(self.was),
            "points": self.points,
            "causes": {name: list(each) for name, each in self.causes.items()},
        }

    def lines(self) -> list[str]:
        """A table, for people."""
        mean, sd = self.predicted.mean, self.predicted.sd
        lines = [
            f"{self.run}: {self.predicted.faults} faults, {self.predicted.plays} plays by {self.predicted.profile}"
        ]
        if self.left_out:
            lines.append(f"not played again, of all ranks at once: {_counted(self.left_out)}")
        lines.append(f"{'':24}{'predicted':>12}{'(sd)':>9}{'was':>11}{'points':>9}")
        for name, ratio in self.was.ratios.items():
            if name in mean.ratios:
                said = f"{percent(mean.ratios[name]):>12}{100 * sd.ratios[name]:>8.1f}p{percent(ratio):>11}"
                lines.append(f"{name:24}{said}{self.points[name]:>+9.1f}")
        for cause, (a, b, agrees) in self.causes.items():
            lines.append(
                f"  lost: {cause:16}{percent(a):>12}{'':9}{percent(b):>11}{100 * (a - b):>+9.1f}" + " !" * (not agrees)
            )
        for what in ("wall_s", "generations", "lost_steps"):
            a, s, b = (getattr(each, what) for each in (mean, sd, self.was))
            lines.append(f"{what:24}{a:>12.1f}{s:>8.1f} {b:>11.1f}")
        return lines


def predict(
    profile: Profile,
    config: PretrainConfig,
    plan: Sequence[Planned],
    *,
    last_step: int,
    plays: int = 20,
    seed: int = 0,
    nodes: int | None = None,
    per_node: int = 1,
) -> Prediction:
    """What a run of `config` would come to with these faults, up to its last step.

    `nodes` are there at the start, each with room for `per_node` ranks; None: as many as the full size takes.
    Raises ConfigError where the profile has nothing of such a run.
    """
    if not profile.steps:
        raise ConfigError("the profile has no step: make it of runs that trained")
    outcomes = []
    for number in range(plays):
        player = PlanPlayer(
            profile, config, plan, last_step=last_step, seed=seed * 1000 + number, nodes=nodes, per_node=per_node
        )
        outcomes.append(player.outcome())
    return Prediction(_each(fmean, outcomes), _each(_sd, outcomes), plays, profile.source, len(plan))


def local_folder(folder: str) -> Path:
    """A run's folder by its path, or its name below runs/. Raises ConfigError for one that is elsewhere."""
    storage = find_run(folder)
    if not storage.is_local:
        raise ConfigError(f"{folder} is not on this machine: copy its logs and config.yaml to a folder here")
    return Path(storage.local_path)


def replay(
    folder: str, config: PretrainConfig, runs: Sequence[str] = (), *, plays: int = 20, seed: int = 0
) -> Compared:
    """A finished run's faults again, by a profile of these runs, or of its own; beside what it came to.

    `config` is the one that it was last started with. Raises ConfigError for a folder without a step or a fault.
    """
    run, profile = RunLogs.read(folder), Profile.read(runs or [folder])
    plan = plan_of_drill(local_folder(folder)) or plan_of_run(run)
    left_out = _not_played(run)
    if not plan:
        but = f" but what is not played, {_counted(left_out)}" if left_out else ""
        raise ConfigError(
            f"{folder} had no faults{but}: there is nothing to play again; give a run that was interrupted"
        )
    last_step = max(run.rows[-1]["step"], *(each.step + 1 for each in plan))
    nodes, per_node = _nodes_at_first(run)
    prediction = predict(
        profile, config, plan, last_step=last_step, plays=plays, seed=seed, nodes=nodes, per_node=per_node
    )
    return Compared(prediction, Outcome.of(build_report(run.history, run.ledger, config)), folder, left_out)


def plan_of_drill(folder: Path) -> list[Planned]:
    """The faults of a drill's record, by the steps that they came at, but for those whose victims went on; none where
    the folder is no drill's, or some of them are not played one by one."""
    path = folder / "drill.jsonl"
    lines = Tail(path).read()[0] if path.exists() else []
    notes = [(line["number"], line["what"], line.get("processes")) for line in lines if line["record"] == "note"]
    ran_on = {number for number, what, processes in notes if what == "looked at again" and processes}
    stayed = ran_on - {number for number, what, _ in notes if what == "node gone"}
    faults = [line for line in lines if line["record"] == "fault" and line["number"] not in stayed]
    if any(line["kind"] in BY_ITS_EVENTS for line in faults):
        return []
    options = [dict(OPTION.findall(line.get("what", ""))) for line in faults]
    made = [
        planned(line["kind"], line["step"], {key: float(value) for key, value in given.items()})
        for line, given in zip(faults, options, strict=True)
    ]
    return [each for each in made if each is not None]


def planned(kind: str, step: int, options: Mapping[str, float | None] | None = None) -> Planned | None:
    """A drill's fault as this module has it; None for one that takes no rank and brings no node. A victim that is
    continued later counts as taken: whether it was in time a record says."""
    deadline_s = (options or {}).get("deadline_s") or DRAIN_S
    if kind == NODE_COMES:
        return Planned(step, kind)
    return Planned(step, OF_DRILL[kind], deadline_s=deadline_s) if kind in OF_DRILL else None


def plan_of_run(run: RunLogs) -> list[Planned]:
    """What befell a run that was no drill: its failures, and each node that came."""
    times = [row["time"] for row in run.rows]
    steps = [row["step"] for row in run.rows]

    comes = [(time, NODE_COMES) for time in arrivals(run.history.events, _first_nodes(run))]
    found = []
    for time, kind in sorted(_times_of_faults(run) + comes):
        at = max(0, bisect_left(times, time) - 1)
        after_s = max(0.0, time - times[at]) if kind == NODE_COMES else None  # a group that waits for it does no step
        found.append(Planned(steps[at], kind, after_s=after_s))
    return found


class PlanPlayer(Player):
    """A drill in virtual time: its faults come at steps, what they and steps take is drawn from a profile."""

    def __init__(
        self,
        profile: Profile,
        config: PretrainConfig,
        plan: Sequence[Planned],
        *,
        last_step: int,
        seed: int,
        nodes: int | None = None,
        per_node: int = 1,
    ) -> None:
        self.profile, self.dice = profile, random.Random(seed)
        self.plan, self.last_step = deque(plan), last_step
        super().__init__(_inputs(profile, config, nodes, per_node), config, FAR)
        self.costs = {size: self._mean_step_s(size) for size in self.costs}
        self.waits = (0.0, 0.0)  # of the step that is being done: for data, for its snapshot
        self.causes: dict[Fault, str] = {}  # that a fault was, or will be, told of with
        self.told_as: str | None = None
        self.coming: set[str] = set()  # nodes whose workers start
        self.cold_s = self._draw("cold_start_s", "", 0)

    def outcome(self) -> Outcome:
        """Raises ConfigError where what befalls it ends it before its last step."""
        played = self.play(())
        if played.steps < self.last_step:
            least = self.config.cluster.min_workers
            raise ConfigError(
                f"played again, the run ends at step {played.steps} of {self.last_step}: "
                f"{played.ended or 'too few workers are left'}, cluster.min_workers={least}; give one whose events say "
                f"which nodes came, or a plan with {NODE_COMES}"
            )
        history = History.of_logs(self.log.rows, self.log.events)
        return Outcome.of(build_report(history, history.ledger(self.end), as_mapping(self.config)))

    # what takes how long

    def _draw(self, name: str, cause: str, size: int) -> float:
        """A sample of this cause and size, where there are some; else of other changes, but none in which all begin."""
        tries = ((cause, size), (cause, 0), ("", size), ("", 0))
        others = [each for each in ALL_BEGIN if cause not in ("", each)]
        of_figure = partial(self.profile.of_figure, name, without=others)
        found = (of_figure(cause=of, size=ranks) for of, ranks in tries)
        samples = next((each for each in found if len(each) >= LEAST), None) or of_figure()
        return self.dice.choice(samples) if samples else 0.0

    def _notice(self, kind: str) -> tuple[float, str]:
        """Seconds until a fault is told of, and by which of the ledger's causes, together."""
        name = f"notice_{kind}_s"
        found = [(s, cause) for (of, cause, _), all_s in self.profile.samples.items() if of == name for s in all_s]
        return self.dice.choice(found) if found else (0.0, str(CAUSE_OF[kind]))

    def told(self, fault: Fault, *rest: Any) -> None:
        self.told_as = self.causes.get(fault)
        super().told(fault, *rest)
        self.told_as = None

    def died(self, processes: Sequence[tuple[str, int]], cause: Cause, detail: str) -> None:
        super().died(processes, Cause(self.told_as or cause), detail)
        self._placed()

    def _placed(self) -> None:
        """Where workers live or start: a group that could grow waits for those that start, for a while."""
        up = [node.name for node in self.nodes.values() if node.is_up or node.name in self.coming]
        super().tell(e.Placed(dict.fromkeys(up, self.inputs.job.gpus_per_node)))

    def _mean_step_s(self, size: int) -> float:
        steps = self._steps_of(size)
        return fmean(step for step, _, _ in steps)

    def _steps_of(self, size: int) -> list[tuple[float, float, float]]:
        """Of a size that the profile has not: of the one that is nearest."""
        nearest = min(self.profile.steps, key=lambda each: (abs(each - size), each))
        return self.profile.steps[nearest]

    def forming_s(self) -> float:
        assert self.run is not None
        cause, size = str(self.control.group.cause), len(self.run.members)
        if self.control.generation <= 1:
            return self.cold_s
        return self._draw("change_s", cause, size)

    def begin(self, run: Any, took_s: float) -> None:
        """A group's first step takes longer."""
        inputs, size, cause = self.inputs, len(run.members), str(self.control.group.cause)
        full = self.costs.get(inputs.job.gpus) or self.costs[max(self.costs)]
        first_s = self.costs[size] + (0.0 if cause == Cause.start else self._draw("first_excess_s", cause, size))
        self.inputs = inputs.with_values(step_s=first_s * full / self.costs[size])
        super().begin(run, took_s)
        self.inputs = inputs

    # what happens when

    def tell(self, event: e.Event) -> Any:
        """A step ends: it waited for data and its snapshot as steps of its size do; the next one is drawn."""
        run = self.run
        if not isinstance(event, e.Row) or run is None:
            return super().tell(event)
        data_s, snapshot_s = self.waits
        row = {**event.row, "data_wait_s": data_s, "snapshot_s": snapshot_s}
        run.step_s, *waits = self.dice.choice(self._steps_of(len(run.members)))
        self.waits = waits[0], waits[1]
        reply = super().tell(replace(event, row=row))
        if event.row["step"] >= self.last_step:
            self.end = self.now
        while self.plan and event.row["step"] >= self.plan[0].step:
            fault = self.plan.popleft()
            after_s = self.dice.random() * run.step_s if fault.after_s is None else fault.after_s
            self.at(self.now + after_s, lambda fault=fault: self._befall(fault))  # type: ignore[misc]
        return reply

    def _befall(self, planned: Planned) -> None:
        if planned.what == NODE_COMES:
            node = self.add_node(next(self.numbers))
            node.is_up = False  # until its workers are ready
            self.coming.add(node.name)
            self._placed()
            name = next((each for each in ("start_s", "respawn_s") if self.profile.of_figure(each)), "start_s")
            self.at(self.now + self._draw(name, "", 0), lambda: self._comes(node.name))
            return
        where = self.dice.random() if planned.where is None else planned.where
        notice_s, cause = self._notice(planned.what)
        takes_node = planned.what not in ("software", "hang")
        group = {member.node for member in self.run.members} if self.run is not None else set()
        up = max(1, sum(self.nodes[name].is_up for name in group))
        fault = Fault(
            at=0.0,
            kind=planned.what,
            where=where * up / self.total,  # one of the group's, as drills draw a rank
            notice_s=notice_s,
            away_s=FAR if takes_node else self._draw("respawn_s", "", 0),
            unnoticed_s=self._draw("sdc_unnoticed_s", "", 0) if planned.what == FaultKind.sdc else 0.0,
        )
        self.causes[fault] = cause
        if planned.what != "drain":
            self.strike(fault)
            return
        alive = [node for node in self.nodes.values() if node.is_up and node.members]
        alive = [node for node in alive if node.name in group] or alive
        victims = alive[int(where * len(alive)) :][:1]
        gone = replace(fault, kind="host", notice_s=0.0)
        self.causes[gone] = self._notice("host")[1]
        leave(self, victims, gone, planned.deadline_s)

    def _comes(self, name: str) -> None:
        node = self.nodes[name]
        node.is_up = True
        self.coming.discard(name)
        self.tell(e.NodesAlive(frozenset(each.name for each in self.nodes.values() if each.is_up)))
        self.join(node.members)
        if self.run is None or self.run.over:
            self.ask()


def _inputs(profile: Profile, config: PretrainConfig, nodes: int | None, per_node: int) -> Inputs:
    """What a Player asks for beside what is drawn here."""
    ranks = config.cluster.max_workers
    unit = config.parallel.tp * config.parallel.cp * max(1, config.parallel.pp)
    here = nodes or -(-ranks // per_node)
    used = min(here, ranks // per_node)
    job = Job(used * per_node, unit, config.optim.num_slices, per_node, spares=here - used)
    full_s = profile.usual_s.get(ranks) or fmean(profile.usual_s.values())
    values: dict[str, float] = {}
    values |= {"step_s": full_s, "nodes_rack": 1.0, "communicators_gpus": 1.0}
    values["verify_share"] = verify_share(config, job, settled_for(config, job))
    values["snapshot_every_steps"], values["lost_committed_steps"] = lost_steps(profile)
    values |= dict.fromkeys(DRAWN, 0.0)
    figures = {name: Figure(value, Origin.measured, profile.source) for name, value in values.items()}
    return Inputs(job, Policy("in_place"), figures, days=FAR / 86400.0)


def _nodes_at_first(run: RunLogs) -> tuple[int, int]:
    """Nodes of the first group, and of the spares that waited beside it before anything befell it; ranks of a node."""
    first = next(iter(of_kind(run.history.events, Generation)), None)
    if first is None:
        return 1, 1
    in_group = len({worker.get("node") for worker in first.workers or []}) or first.world_size
    return len(_first_nodes(run)), max(1, first.world_size // in_group)


def _first_nodes(run: RunLogs) -> set[str]:
    """By their ids, or by numbers where the first group's event does not say."""
    first = next(iter(of_kind(run.history.events, Generation)), None)
    if first is None:
        return set()
    nodes = {str(worker.get("node")) for worker in first.workers or []} or set(map(str, range(first.world_size)))
    until = next((time for time, _ in _times_of_faults(run)), math.inf)
    beside = [event for event in of_kind(run.history.events, Spares) if event.time < until]
    return nodes | set(beside[-1].nodes if beside else ())


def _times_of_faults(run: RunLogs) -> list[tuple[float, str]]:
    return [(event.time, kind) for event, kind in faults_of(run.history.events) if not _is_of_all(event)]


def _not_played(run: RunLogs) -> dict[str, int]:
    """Restarts of all ranks at once, by their cause: those of the job, too."""
    failures = [each.cause for each in of_kind(run.history.events, Failure) if _is_of_all(each)]
    resumed = [each.cause for each in of_kind(run.history.events, Generation) if each.cause == Cause.resume]
    return dict(Counter(map(str, failures + resumed)))


def _is_of_all(event: Event) -> bool:
    """Whether all ranks of a group have ended, or gone back, and none of them is lost."""
    return isinstance(event, Failure) and event.cause in OF_ALL and not event.ranks


def _counted(causes: Mapping[str, int]) -> str:
    return ", ".join(f"{cause} {count}" for cause, count in sorted(causes.items()))


def _each(of: Callable[[list[float]], float], outcomes: Sequence[Outcome]) -> Outcome:
    def joined(name: str) -> dict[str, float]:
        keys = sorted({key for each in outcomes for key in getattr(each, name)})
        return {key: of([float(getattr(each, name).get(key, 0.0)) for each in outcomes]) for key in keys}

    numbers = {
        name: of([float(getattr(each, name)) for each in outcomes]) for name in ("wall_s", "generations", "lost_steps")
    }
    return Outcome(numbers["wall_s"], joined("ratios"), joined("lost"), numbers["generations"], numbers["lost_steps"])  # type: ignore[arg-type]


def _sd(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
