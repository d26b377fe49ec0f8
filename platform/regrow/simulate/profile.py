"""What finished runs say of a simulation's figures: every delay by cause and world size, counts and exposure. Pure.

A profile is made of run folders alone. Applied to inputs it replaces what it has measured: a rate by the posterior of
the published one, a delay by its own samples, mixed with what was published below five. Of a size that was not measured
it takes what a named law says: `flat`, that a delay does not grow, which is an assumption and is marked as one; what
grows (communicators, a step's time) stays as it was. Without a run folder, inputs are what they were.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from regrow.errors import ConfigError
from regrow.record.events import (
    FAILURES,
    Cause,
    Checkpoint,
    Cleared,
    Failure,
    FaultKind,
    Generation,
    NodeLost,
    Ready,
    Rollback,
    Stopped,
    Submitted,
    Suspected,
)
from regrow.record.history import recoveries
from regrow.record.ledger import of_kind
from regrow.record.log import is_number, positive
from regrow.record.work import SLOW, firsts, step_times
from regrow.simulate.inputs import KINDS, Figure, Figures, Inputs, Origin, mixed, rate_of
from regrow.simulate.run_logs import (
    RunLogs,
    before,
    faults_of,
    least_workers,
    left_of,
    lost_a_worker,
    node_seconds,
    size_at,
    spacing_at,
)

DAY = 86400.0
MOST_SAMPLES = 256  # of a key

BEFALLS = (
    "rate_",
    "share_slow",
    "respawn_s",
    "away_",
    "slow_factor",
    "slow_lasts_s",
)  # of a cluster, whatever the policy
FLAT, LINEAR = "flat", "linear in nodes and time"  # laws
WITHIN = {  # what others hold at measured sizes
    "communicators_s": "form_base_s",
    "form_per_node_s": "form_base_s",
    "stop_per_gpu_s": "stop_fixed_s",
}

Key = tuple[str, str, int]  # a figure, the cause that its group was formed for, ranks of that group


@dataclass
class Profile:
    """Samples in seconds, counts, and what they are counted over."""

    runs: list[str] = field(default_factory=list)
    days: float = 0.0
    node_days: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)  # of faults by kind; planned, head, slow
    # and losses of ranks that a snapshot was there for, and lost_steps: those that all of them cost
    samples: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[int, list[tuple[float, float, float]]] = field(default_factory=lambda: defaultdict(list))
    # by world size: step_s, data_wait_s, snapshot_s of steps that are no group's first
    usual_s: dict[int, float] = field(default_factory=dict)  # by world size: an undisturbed step, without its waits
    rows: Counter[int] = field(default_factory=Counter)  # by world size: steps that usual_s is the mean of

    @staticmethod
    def of(runs: Iterable[RunLogs]) -> "Profile":
        found = Profile()
        for run in runs:
            found._add(run)
        return found

    @staticmethod
    def read(folders: Sequence[str]) -> "Profile":
        return Profile.of(map(RunLogs.read, folders))

    @property
    def source(self) -> str:
        return ", ".join(self.runs)

    @property
    def sizes(self) -> set[int]:
        """World sizes at which groups trained."""
        return set(self.usual_s)

    def of_figure(self, name: str, *, cause: str = "", size: int = 0, without: Collection[str] = ()) -> list[float]:
        """Samples of a figure, of all causes and sizes where none are given but `without` these causes; at most 256,
        evenly over their order."""
        found = [
            value
            for (figure, of_cause, of_size), values in self.samples.items()
            if figure == name and cause in ("", of_cause) and size in (0, of_size) and of_cause not in without
            for value in values
        ]
        return kept(found)

    def figures(self, prior: Figures, gpus: int) -> dict[str, Figure]:
        """These figures as the runs have them, for a job of so many ranks; without those that they say nothing of."""
        found: dict[str, Figure] = {}
        for name, figure in prior.items():
            made = self._rate(name, figure) or self._delay(name, figure, gpus)
            if made is not None:
                is_known = gpus in self.sizes or name.startswith(BEFALLS)
                found[name] = made if is_known else _by_law(made, self.sizes)
        return found

    def applied(self, inputs: Inputs) -> Inputs:
        """Inputs with what the runs have measured. What the group did about faults is regrow's own: of other policies
        only what befalls a cluster is taken."""
        found = self.figures(inputs.figures, inputs.job.gpus)
        is_own = inputs.policy.in_place and inputs.policy.replicas == 1
        taken = {name: each for name, each in found.items() if is_own or name.startswith(BEFALLS)}
        return inputs.override(taken)

    def to_json(self, prior: Figures | None = None, gpus: int = 0) -> str:
        """The content of profile.json; with the figures that come of it, each with its provenance."""
        content: dict[str, Any] = {
            "runs": self.runs,
            "days": self.days,
            "node_days": self.node_days,
            "counts": dict(sorted(self.counts.items())),
            "samples": [[*key, kept(values)] for key, values in sorted(self.samples.items())],
            "steps": [[size, kept(values)] for size, values in sorted(self.steps.items())],
            "usual_s": [[size, seconds] for size, seconds in sorted(self.usual_s.items())],
            "rows": sorted(self.rows.items()),
        }
        if prior is not None:
            figures = {**prior, **self.figures(prior, gpus)}
            content["figures"] = {name: _told(figure) for name, figure in figures.items()}
        return json.dumps(content, indent=1, allow_nan=False) + "\n"

    @staticmethod
    def of_json(text: str) -> "Profile":
        """What `to_json` wrote. Raises ConfigError for what it did not."""
        try:
            content = json.loads(text)
            made = Profile(content["runs"], content["days"], content["node_days"], Counter(content["counts"]))
            made.samples.update({(name, cause, size): values for name, cause, size, values in content["samples"]})
            made.steps.update({size: [tuple(step) for step in steps] for size, steps in content["steps"]})
            made.usual_s.update(dict(content["usual_s"]))
            of_steps = [(size, len(steps)) for size, steps in content["steps"]]  # of an earlier version, which kept few
            made.rows.update(dict(content.get("rows", of_steps)))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"this is no profile.json ({error}); make one anew with simulate.runs=[...]") from None
        return made

    # what becomes of figures

    def _rate(self, name: str, prior: Figure) -> Figure | None:
        """A rate per node and day, or per day of the job."""
        what = name.removeprefix("rate_")
        if not name.startswith("rate_") or what == "storage":
            return None
        exposure = self.node_days if what in KINDS else self.days
        if exposure <= 0 or (not self.counts[what] and exposure * prior.value < 1.0):
            return None  # that nothing came in so short a time says nothing
        return rate_of(prior, self.counts[what], exposure, f"{self.source}; law {LINEAR}")

    def _delay(self, name: str, prior: Figure, gpus: int) -> Figure | None:
        """A duration, a share of faults, or steps of a loss."""
        if name == "snapshot_every_steps":
            return None  # the configuration's
        if name == "lost_committed_steps" and self.counts["losses"]:
            return Figure(lost_steps(self)[1], Origin.measured, self.source, self.counts["losses"])
        if name == "share_slow" and self.counts["slow"]:
            faults = sum(self.counts[kind] for kind in KINDS if kind != "drain")
            return Figure(self.counts["slow"] / max(1, faults), Origin.measured, self.source, self.counts["slow"])
        if name == "step_s":
            seconds, count = self.usual_s.get(gpus), len(self.steps.get(gpus, ()))
            return Figure(seconds, Origin.measured, self.source, count) if seconds else None
        if name in WITHIN:
            source = f"{self.source}: within {WITHIN[name]}"
            return Figure(0.0, Origin.measured, source, 1) if gpus in self.sizes else None
        samples = self.of_figure(name, size=gpus) or self.of_figure(name)
        if not samples:
            return None
        return mixed(prior, samples, self.source)

    # what a run says

    def _add(self, run: RunLogs) -> None:
        self.runs.append(run.name)
        self.days += (run.ledger.end - run.ledger.begin) / DAY
        self.node_days += node_seconds(run) / DAY
        times = step_times(run.ledger, run.rows, run.history.events, run.config)
        counts = Counter(times.shapes.of_rows(run.rows))
        for shape, seconds in times.measured.items():
            size, now = shape.size, counts[shape]
            before = self.rows[size]
            known = self.usual_s.get(size, seconds)
            self.usual_s[size] = (known * before + seconds * now) / (before + now)  # of several runs: by their steps
            self.rows[size] += now
        for row, is_first in zip(run.rows, firsts(run.rows), strict=True):
            if not is_first:
                step = (row["step_s"], positive(row["data_wait_s"]), positive(row["snapshot_s"]))
                self.steps[row["world_size"]].append(step)
        self._add_faults(run)
        self._add_recoveries(run)
        self._add_returns(run)
        self._add_slowness(run)
        for steps in self.steps.values():
            steps[:] = kept(steps)
        for values in self.samples.values():
            values[:] = kept(values)

    def _add_faults(self, run: RunLogs) -> None:
        events = run.history.events
        self.counts.update(kind for _, kind in faults_of(events))
        submitted, stopped = of_kind(events, Submitted), of_kind(events, Stopped)
        self.counts["planned"] += max(0, min(len(submitted) - 1, len([e for e in stopped if e.reason != "failed"])))
        causes = [each.cause for each in run.history.interruptions]
        self.counts["head"] += causes.count(Cause.driver_died) + causes.count(Cause.controller_died)

    def _add_recoveries(self, run: RunLogs) -> None:
        """What each change of the group took, by its cause and the size that came of it."""
        ledger, rows, events = run.ledger, run.rows, run.history.events
        formed = [each.generation for each in ledger.attempts if each.generation]
        kinds = {event.generation: kind for event, kind in faults_of(events) if isinstance(event, Failure)}
        undone = {event.generation: event.seconds for event in of_kind(events, Rollback)}
        least, spacing = least_workers(run), spacing_at(run)
        changes = [generation for generation in formed if generation.cause != Cause.start]
        for entry, generation in zip(recoveries(ledger.attempts, rows, events), changes, strict=True):
            size, cause, number = generation.world_size, str(generation.cause), generation.generation
            step_s = self.usual_s.get(size, 0.0)
            first_s = None if entry["first_step_s"] is None else max(0.0, entry["first_step_s"] - step_s)
            regroup_s, restore_s = entry["regroup_s"] or 0.0, entry["reshard_s"] or 0.0
            whole_s = regroup_s + restore_s + (first_s or 0.0)
            waited = cause in FAILURES and left_of(events, before(formed, number), entry["ranks_before"] or 0) < least
            if not waited:  # for others to come; for where a change is drawn whole
                self._sample("change_s", cause, size, regroup_s + restore_s)
                self._sample("first_excess_s", cause, size, first_s)
            if cause not in FAILURES:
                self._sample("stop_fixed_s" if cause == Cause.resume else "join_s", cause, size, whole_s)
                continue
            kind, usual_s = kinds.get(before(formed, number)), self.usual_s.get(entry["ranks_before"] or 0, 0.0)
            if kind and entry["detect_s"] is not None:  # half of a step was done, on average, when it was struck
                self._sample(f"notice_{kind}_s", cause, size, max(0.0, entry["detect_s"] - usual_s / 2))
            if not waited and cause == Cause.controller_died:
                self._sample("restart_s", cause, size, whole_s)
            elif not waited:
                model_s = positive((generation.startup_s or {}).get("model"))
                self._sample("form_base_s", cause, size, max(0.0, regroup_s - model_s))
                self._sample("build_s", cause, size, model_s)
                self._sample("restore_s", cause, size, restore_s)
                self._sample("first_step_s", cause, size, first_s)
            if cause in (Cause.corrupted, Cause.nonfinite):  # back to a state from before, wherever that is from
                wrong_s = undone.get(number) or None if cause == Cause.corrupted else None
                self._sample("sdc_unnoticed_s", cause, size, wrong_s)
            elif entry["source"] == "snapshot":
                self.counts["losses"] += 1
                self.counts["lost_steps"] += entry["lost_steps"] or 0
                self._sample("snapshot_every_steps", cause, size, spacing(generation.time))
            elif entry["source"] == "checkpoint" and undone.get(number):
                self._sample("durable_back_s", cause, size, undone[number])
        started = next((each for each in ledger.attempts if each.generation), None)
        if started is not None and started.first_step_begin is not None:
            self._sample(
                "cold_start_s", str(Cause.start), started.world_size or 0, started.first_step_begin - ledger.begin
            )

    def _add_returns(self, run: RunLogs) -> None:
        """Until a lost node, or a process on a sound one, is ready to join again."""
        events = run.history.events
        size_of, ready = size_at(events), of_kind(events, Ready)
        came = []  # on new nodes
        for event in ready:
            is_new = not lost_a_worker(events, event)
            came += [event.time] if is_new else []
            self._sample("start_s" if is_new else "respawn_s", "", size_of(event.time), event.start_s)
        for begin in [event.time for event in of_kind(events, NodeLost)]:  # the next node that comes is in its place
            at = next((time for time in came if time > begin), None)
            if at is not None:
                came.remove(at)
                self._sample("away_short_s", "", size_of(at), at - begin)
        if ready:
            return
        grown = [event.time for event in of_kind(events, Generation) if event.cause == Cause.grow]
        for fault, kind in faults_of(events):  # of an earlier version: from the failure to where a group grew
            at = next((time for time in grown if time > fault.time), None)
            if at is not None:
                name = "away_short_s" if kind in (FaultKind.host, FaultKind.gpu, "drain") else "respawn_s"
                self._sample(name, "", size_of(at), at - fault.time)

    def _add_slowness(self, run: RunLogs) -> None:
        events = run.history.events
        size_of = size_at(events)
        slow = [event for event in of_kind(events, Suspected) if event.kind.startswith(SLOW)]
        self.counts["slow"] += len(slow)
        for event in slow:
            self._sample("slow_factor", event.kind, size_of(event.time), event.factor)
        for cleared in of_kind(events, Cleared):
            if cleared.kind.startswith(SLOW) and cleared.since is not None and cleared.recovered:
                self._sample("slow_lasts_s", cleared.kind, size_of(cleared.time), cleared.time - cleared.since)
        for checkpoint in of_kind(events, Checkpoint):
            if checkpoint.stall_s is not None:
                self._sample("snapshot_stall_s", "", size_of(checkpoint.time), checkpoint.stall_s)

    def _sample(self, name: str, cause: str, size: int, seconds: float | None) -> None:
        if is_number(seconds):
            self.samples[name, cause, size].append(float(seconds or 0.0))


def lost_steps(profile: Profile) -> tuple[float, float]:
    """(steps between snapshots, steps that a loss cost beside half of those), on average over losses.

    They come to what was lost: of snapshots further apart, so many steps between them as losses bear out.
    """
    lost = profile.counts["lost_steps"] / max(1, profile.counts["losses"])
    told = profile.of_figure("snapshot_every_steps")
    apart = min(fmean(told), 1 + 2 * lost) if told else 1.0
    return apart, lost - (apart - 1) / 2


def kept(values: list[Any]) -> list[Any]:
    """At most 256 of them, evenly over their order."""
    if len(values) <= MOST_SAMPLES:
        return values
    return [values[number * len(values) // MOST_SAMPLES] for number in range(MOST_SAMPLES)]


def _by_law(figure: Figure, sizes: Collection[int]) -> Figure:
    """Of a size that was not measured: assumed."""
    low, high = _range(figure.samples) if figure.samples else (figure.value / 2, figure.value * 2)
    on = " and ".join(map(str, sorted(sizes)))
    source = f"{figure.source}: measured ({figure.n}) on {on} ranks; law {FLAT}"
    return replace(figure, origin=Origin.assumed, source=source, low=low, high=high)


def _told(figure: Figure) -> dict[str, Any]:
    """As profile.json has it."""
    n = f" ({figure.n})" if figure.origin == Origin.measured else ""
    value = figure.value if math.isfinite(figure.value) else None
    return {"value": value, "provenance": f"{figure.origin}{n}", "source": figure.source}


def _range(samples: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(samples)
    return ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
