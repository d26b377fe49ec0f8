"""A run's figures for Prometheus: what there is, what rows and events make of it, and how it gets to Ray's metrics.

All of it comes from the coordinator's process, which sees every row and event; docs/metrics.md lists the figures. Rows
only change numbers here: at most once in PUBLISH_S those that changed are handed to Ray, whose agent on the node serves
them. Ray's classes are an argument, so that nothing here needs Ray.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from regrow.config.check import world_sizes
from regrow.config.schema import PretrainConfig
from regrow.config.snapshots import fixed_every_steps, takes_snapshots
from regrow.control.cadence import FIRST_AFTER_STEPS, Cadence
from regrow.control.spacing import FIRST
from regrow.errors import first_line
from regrow.progress import last_step
from regrow.record.events import (
    FAILURES,
    GRACEFUL,
    INCIDENTS,
    SUSPICIONS,
    Cause,
    Checkpoint,
    CheckpointFailed,
    Event,
    Failure,
    Forming,
    Generation,
    Incident,
    Row,
    SnapshotSpacing,
    Spares,
    Stopped,
    Submitted,
    Trained,
    from_row,
)
from regrow.record.history import History
from regrow.record.ledger import STATES
from regrow.record.log import is_number
from regrow.record.relative import without_lists
from regrow.record.status import keep_whole
from regrow.record.work import RATIOS

PUBLISH_S = 1.0  # Ray collects every ten seconds, and never more often than this
RUN = "run"  # label of every figure
# A counter is scraped before it first grows, or rate() would miss that. Ray refuses 0; this is lost in whatever comes.
NOTHING = sys.float_info.min
FIRST_ALONE_S = 45.0  # for that: two of Ray's reports, and a scrape


@dataclass(frozen=True)
class Family:
    """One figure of a run, or one for each value of a label. Ray puts `ray_` before the name."""

    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ("",)  # of the label

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


FAMILIES = {
    family.name: family
    for family in (
        # what training does
        Family("regrow_steps_total", "optimizer steps, those done again included"),
        Family("regrow_tokens_total", "tokens of these steps"),
        Family("regrow_step_seconds_total", "time of these steps, waiting included"),
        Family("regrow_data_wait_seconds_total", "what of it was waiting for data"),
        Family("regrow_snapshot_wait_seconds_total", "what of it was waiting for snapshots and checkpoints"),
        Family("regrow_nonfinite_steps_total", "steps whose loss or gradient was NaN or infinite"),
        Family("regrow_step", "the newest step"),
        Family("regrow_target_steps", "the step at which this attempt ends"),
        Family("regrow_trained_tokens", "tokens that the weights have seen"),
        Family("regrow_loss", "of the newest step, nats a token"),
        Family("regrow_validation_loss", "of the newest validation, nats a token"),
        Family("regrow_gradient_norm", "of the newest step, before clipping"),
        Family("regrow_learning_rate", "of the newest step"),
        Family("regrow_tokens_per_second", "of the newest step, without waiting for snapshots"),
        Family("regrow_mfu_ratio", "FLOPs of the newest step over the devices' peak"),
        Family("regrow_last_step_timestamp_seconds",
               "when the newest step ended; before it, when the job was submitted or its first group formed"),
        # which ranks train
        Family("regrow_running", "1 while there is a job of this run, 0 when it has stopped"),
        Family("regrow_world_size", "ranks that train; 0 while no group does"),
        Family("regrow_spare_ranks", "ranks that wait beside the group, ready to take the places of lost ones"),
        Family("regrow_target_world_size", "ranks of the group where all of cluster.max_workers are there"),
        Family("regrow_min_world_size", "cluster.min_workers"),
        Family("regrow_generation", "number of the newest group"),
        Family("regrow_submitted_timestamp_seconds", "when the job began"),
        Family("regrow_own_ray", "1 where the job started its Ray itself, which ends with it; 0 where it joined one"),
        Family("regrow_stops_total", "jobs that ended in an orderly way, by reason", "reason",
               ("finished", "stop_at_step", "interrupted", "failed")),
        # what went wrong, and what it cost
        Family("regrow_restarts_total", "groups that began to train after another one, by cause", "cause",
               tuple(map(str, (Cause.resume, *FAILURES, *GRACEFUL)))),
        Family("regrow_failures_total", "groups that broke, by cause; one may for several", "cause",
               tuple(map(str, FAILURES))),
        Family("regrow_recomputed_steps_total", "steps that were taken back, to be done again"),
        Family("regrow_incidents_total", "events worth a look, by kind", "kind", INCIDENTS),
        Family("regrow_state_seconds_total", "time of this job by state; all states add up to it", "state", STATES),
        Family("regrow_goodput_ratio", "productive time over time since the run's first submission"),
        Family("regrow_effective_ratio", "useful seconds of the undisturbed full-size job over the same time"),
        Family("regrow_paid_ratio", "the same, spares counted as lost"),
        Family("regrow_capacity_goodput_ratio", "the same, idle passes and absent ranks counted as lost"),
        # which rank the others wait for: all ranks, of many the slowest
        Family("regrow_rank_compute_seconds", "a step's mean time on computing, by rank", "rank"),
        Family("regrow_rank_data_wait_seconds", "on waiting for data, by rank", "rank"),
        Family("regrow_rank_snapshot_wait_seconds", "on waiting for snapshots, by rank", "rank"),
        Family("regrow_rank_shard_wait_seconds", "on waiting for ranks with the same copy of the model, by rank",
               "rank"),
        Family("regrow_rank_replicate_wait_seconds", "on waiting for the other copies, by rank", "rank"),
        Family("regrow_rank_all_wait_seconds", "on waiting for all ranks, by rank", "rank"),
        Family("regrow_rank_memory_bytes", "the most that it has had of its device's memory, by rank", "rank"),
        Family("regrow_rank_temperature_celsius", "of its GPU, by rank", "rank"),
        Family("regrow_rank_power_watts", "of its GPU, by rank", "rank"),
        Family("regrow_slowest_rank", "the rank whose own time in a step is longest"),
        Family("regrow_suspects", "ranks and nodes that are suspected of something now, by kind", "kind",
               tuple(SUSPICIONS)),
        # what is safe
        Family("regrow_snapshots_total", "steps that were committed in the nodes' memory"),
        Family("regrow_snapshot_step", "the newest of them"),
        Family("regrow_snapshot_interval_seconds", "expected between two, at the present pace"),
        Family("regrow_last_snapshot_timestamp_seconds",
               "when it was committed, and later by what passed without a group; before it, when training began, or "
               "the coordinator was restarted"),
        Family("regrow_node_snapshot_seconds", "from sealed to copied, a node's newest; of many the slowest", "node"),
        Family("regrow_node_snapshot_check_seconds", "what of it were checksums, by node", "node"),
        Family("regrow_node_snapshot_send_seconds", "what of it was sending to peers, by node", "node"),
        Family("regrow_node_snapshot_bytes", "of it, by node", "node"),
        Family("regrow_checkpoint_held_up_seconds", "for which the newest one's slowest node came after most others"),
        Family("regrow_checkpoints_total", "checkpoints, by result", "result", ("committed", "failed")),
        Family("regrow_checkpoint_seconds_total", "from their beginnings to their commits"),
        Family("regrow_checkpoint_bytes_total", "written to storage"),
        Family("regrow_checkpoint_step", "the newest one's"),
        Family("regrow_checkpoint_interval_seconds", "expected between two, or to the first one, at the present pace"),
        Family("regrow_last_checkpoint_timestamp_seconds",
               "when it was committed, or the run went back to it from beyond later ones, and later by what passed "
               "without a group; before it, when the job was submitted or its first group formed"),
        # what this costs
        Family("regrow_metrics_cpu_seconds_total", "CPU time of keeping and handing over these figures"),
    )
}  # fmt: skip


Key = tuple[str, str]  # name of a family, value of its label
OF_RANKS = {  # by family, the key of a row of `commands.ShowRanks`
    "regrow_rank_compute_seconds": "compute_s",
    "regrow_rank_data_wait_seconds": "data_wait_s",
    "regrow_rank_snapshot_wait_seconds": "snapshot_s",
    "regrow_rank_shard_wait_seconds": "wait_shard_s",
    "regrow_rank_replicate_wait_seconds": "wait_replicate_s",
    "regrow_rank_all_wait_seconds": "wait_all_s",
    "regrow_rank_memory_bytes": "memory_bytes",
    "regrow_rank_temperature_celsius": "temperature_c",
    "regrow_rank_power_watts": "power_w",
}
OF_NODES = {  # the same of `commands.ShowSnapshots`
    "regrow_node_snapshot_seconds": "seconds",
    "regrow_node_snapshot_check_seconds": "check_s",
    "regrow_node_snapshot_send_seconds": "send_s",
    "regrow_node_snapshot_bytes": "bytes",
}


class Figures:
    """The numbers themselves: totals of counters since this began, the newest values of what goes up and down."""

    def __init__(
        self,
        config: PretrainConfig,
        cadence: Cadence,
        events: Sequence[Event],
        now: float,
        *,
        stepped_at: float = 0.0,
    ) -> None:
        """`events` are the run's so far, those of this job included where its coordinator was restarted; `stepped_at`
        is when the newest step that has a row ended, unix time, 0 where none has."""
        self._history = History(newest_rows=1)
        self.values: dict[Key, float] = {
            (family.name, value): 0.0 for family in FAMILIES.values() if family.is_counter for value in family.values
        }
        train, cluster = config.train, config.cluster
        self._tokens_per_step = config.optim.global_batch_seqs * config.data.seq_len
        self._cadence, self._takes_snapshots = cadence, takes_snapshots(config.snapshot)
        fixed = fixed_every_steps(config.snapshot)
        self._first_spacing = self._spacing = FIRST if fixed is None else fixed  # steps from one snapshot to the next
        self._step_s, self._generation = 0.0, 0  # smoothed, without each generation's first step, which compiles
        self._set("regrow_running", 1)
        self._target_steps = last_step(train.steps, train.stop_at_step)
        self._set("regrow_target_steps", self._target_steps)
        self._set("regrow_target_world_size", world_sizes(config).get(cluster.max_workers, cluster.max_workers))
        self._set("regrow_spare_ranks", 0)
        self._set("regrow_min_world_size", cluster.min_workers)
        self._set("regrow_own_ray", cluster.address is None)
        self._has_trained = False  # since the newest job began
        self._failed = set[tuple[int | None, str]]()  # the newest generation that broke, and each cause
        self._idle_since: float | None = None  # no group trains since then
        self._whole: dict[int, float] = {}  # steps of checkpoints, and when they were committed; 0: before the first
        for event in map(_without_lists, events):
            self._history.on(event)
            self._see(event, event.written_at)
        self._history.resume(now)
        if stepped_at > self.values.get(("regrow_last_step_timestamp_seconds", ""), math.inf):
            self._set("regrow_last_step_timestamp_seconds", stepped_at)
        self._move_on("regrow_last_snapshot_timestamp_seconds", math.inf, now)  # no log has the commits before

    def row(self, row: Row, now: float) -> None:
        """A step has just ended."""
        self._history.on(row, now)
        if row["generation"] == self._generation:
            self._step_s = 0.9 * self._step_s + 0.1 * row["step_s"] if self._step_s else row["step_s"]
        self._generation = row["generation"]
        self._add("regrow_steps_total", 1)
        self._add("regrow_tokens_total", self._tokens_per_step)
        self._add("regrow_step_seconds_total", row["step_s"])
        self._add("regrow_data_wait_seconds_total", row["data_wait_s"])
        self._add("regrow_snapshot_wait_seconds_total", row["snapshot_s"])
        self._add("regrow_nonfinite_steps_total", not (is_number(row["loss"]) and is_number(row["grad_norm"])))
        self._set("regrow_step", row["step"])
        self._set("regrow_trained_tokens", row["tokens_seen"])
        self._set("regrow_loss", row["loss"])
        self._set("regrow_validation_loss", row.get("validation_loss"))
        self._set("regrow_gradient_norm", row["grad_norm"])
        self._set("regrow_learning_rate", row["lr"])
        self._set("regrow_tokens_per_second", row["tokens_per_s"])
        self._set("regrow_mfu_ratio", row["mfu"])
        if self._idle_since is None:  # else its group is over
            self._set("regrow_world_size", row["world_size"])
        self._set("regrow_last_step_timestamp_seconds", now)

    def event(self, event: Event, now: float) -> None:
        """Something happened to the run, just now."""
        event = _without_lists(event if event.time else replace(event, time=now))
        self._history.on(event, now)
        self._see(event, now)
        match event:
            case Generation():
                self._add("regrow_recomputed_steps_total", event.recomputed_steps or 0)
                if event.cause != Cause.start:
                    self._add("regrow_restarts_total", 1, event.cause)
            case Failure():
                newest = {each for each in self._failed if event.generation is not None and each[0] == event.generation}
                if (event.generation, event.cause) not in newest:  # else another of its ranks
                    self._add("regrow_failures_total", 1, event.cause)
                self._failed = {*newest, (event.generation, event.cause)}
            case Checkpoint():
                self._add("regrow_checkpoints_total", 1, "committed")
                self._add("regrow_checkpoint_seconds_total", event.seconds or 0.0)
                self._add("regrow_checkpoint_bytes_total", event.bytes or 0)
                self._set("regrow_checkpoint_held_up_seconds", event.held_up_s)
            case CheckpointFailed():
                self._add("regrow_checkpoints_total", 1, "failed")
            case Stopped():
                self._set("regrow_running", 0)
                self._add("regrow_stops_total", 1, event.reason)
            case Incident():
                self._add("regrow_incidents_total", 1, event.name)

    def snapshot(self, step: int, now: float) -> None:
        """A step was committed in the nodes' memory."""
        self._add("regrow_snapshots_total", 1)
        self._set("regrow_snapshot_step", step)
        self._set("regrow_last_snapshot_timestamp_seconds", now)

    def ranks(self, ranks: Sequence[Mapping[str, Any]], suspects: Sequence[Mapping[str, Any]]) -> None:
        """What ranks spend their time on, the slowest first, and what they are suspected of; while a group trains."""
        if self._idle_since is not None:
            ranks = suspects = ()
        self.values.pop(("regrow_slowest_rank", ""), None)
        for key in [key for key in self.values if key[0] in OF_RANKS]:
            del self.values[key]  # ranks that are not there any more
        for row in ranks:
            for name, field in OF_RANKS.items():
                if row.get(field) is not None:
                    self.values[name, str(row["rank"])] = float(row[field])
        if ranks:
            self._set("regrow_slowest_rank", ranks[0]["rank"])
        for kind in SUSPICIONS:
            self.values["regrow_suspects", kind] = float(sum(each["kind"] == kind for each in suspects))

    def node_snapshots(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """What nodes took to make their newest snapshots safe, the slowest first."""
        for key in [key for key in self.values if key[0] in OF_NODES]:
            del self.values[key]
        for row in nodes:
            for name, field in OF_NODES.items():
                self.values[name, str(row["node"])[:12]] = float(row[field])

    def reported(self, report: Mapping[str, Any]) -> None:
        """The driver has written a report, which knows the whole run."""
        for name in RATIOS:
            self._set(f"regrow_{name}_ratio", report[name])

    def tick(self, now: float) -> None:
        """Bring up to date what depends on the time."""
        self._history.tick(now)
        for state, seconds in self._history.seconds.items():
            self.values["regrow_state_seconds_total", state] = seconds
        self._set("regrow_checkpoint_interval_seconds", self._checkpoint_interval_s(now))
        self._set("regrow_snapshot_interval_seconds", self._spacing * self._step_s or None)

    def _see(self, event: Event, now: float) -> None:
        """What an event tells of the present, whenever it is read."""
        if isinstance(event, Submitted) or (isinstance(event, Generation) and not self._has_trained):
            self._set("regrow_last_step_timestamp_seconds", now)  # nothing is late before there is a group to be
            self._whole = dict.fromkeys((0, *self._whole), now)
            self._has_trained = isinstance(event, Generation)
        if isinstance(event, Generation) and self._idle_since is not None:
            idle_s = now - self._idle_since  # nor does it grow older while there is none
            self._move_on("regrow_last_snapshot_timestamp_seconds", idle_s, now)
            self._whole = {step: min(now, at + idle_s) for step, at in self._whole.items()}
            self._idle_since = None
        newest = next(reversed(self._whole), None)
        keep_whole(self._whole, event, lambda checkpoint: checkpoint.time)
        match event:
            case Submitted():
                self._set("regrow_submitted_timestamp_seconds", event.time)
                self.values.pop(("regrow_last_snapshot_timestamp_seconds", ""), None)
                self._set("regrow_spare_ranks", 0)
                self._set("regrow_target_steps", self._target_steps)
                self._spacing = self._first_spacing
                self.values.pop(("regrow_step", ""), None)
                self._without_ranks()  # a group that died with its driver has left no word of it
            case Trained():  # before its last step where it was asked to stop
                self._set("regrow_step", event.step)
                self._set("regrow_target_steps", event.step)
            case Generation():
                if newest not in self._whole and event.start_step in self._whole:
                    self._whole[event.start_step] = now  # what was trained since is undone
                if self.values.get(("regrow_snapshot_step", ""), 0) > event.start_step:
                    del self.values["regrow_snapshot_step", ""]  # so is what it holds
                self._set("regrow_generation", event.generation)
                self._set("regrow_world_size", event.world_size)
                if self._takes_snapshots:
                    self.values.setdefault(("regrow_last_snapshot_timestamp_seconds", ""), event.time)
            case Spares():
                self._set("regrow_spare_ranks", event.count)
            case SnapshotSpacing():
                self._spacing = event.every_steps
            case Forming() | Failure() | Stopped():
                self._idle_since = now if self._idle_since is None else self._idle_since
                self._without_ranks()
        step, committed_at = next(reversed(self._whole.items()), (None, None))
        for name, value in ("checkpoint_step", step or None), ("last_checkpoint_timestamp_seconds", committed_at):
            self.values.pop((f"regrow_{name}", ""), None)
            self._set(f"regrow_{name}", value)

    def _without_ranks(self) -> None:
        self._set("regrow_world_size", 0)
        self.ranks((), ())

    def _checkpoint_interval_s(self, now: float) -> float | None:
        """By whichever way one is due first; None where there is none yet."""
        cadence = self._cadence
        by_steps, by_time = (cadence.every_steps or 0) * self._step_s, (cadence.every_minutes or 0) * 60
        by_cost = cadence.interval_s(now) or (FIRST_AFTER_STEPS * self._step_s if cadence.automatic else None)
        return min((way for way in (by_steps, by_time, by_cost) if way), default=None)

    def _move_on(self, name: str, seconds: float, now: float) -> None:
        """A time, where there is one, but not past now."""
        if (name, "") in self.values:
            self._set(name, min(now, self.values[name, ""] + seconds))

    def _add(self, name: str, value: float, label: str = "") -> None:
        self.values[name, label] = self.values.get((name, label), 0.0) + value

    def _set(self, name: str, value: float | None) -> None:
        if value is not None:
            self.values[name, ""] = float(value)


def _without_lists(event: Event) -> Event:
    """For a history that is kept: of thousands of ranks, anew with each generation."""
    return from_row(without_lists(event.to_row()))


class Instruments(Protocol):
    """The module `ray.util.metrics`."""

    def Counter(self, name: str, description: str, tag_keys: tuple[str, ...]) -> Any: ...
    def Gauge(self, name: str, description: str, tag_keys: tuple[str, ...]) -> Any: ...


class RunMetrics:
    """Takes what happens to a run and hands its figures to Ray. Never raises: they are not worth a run."""

    def __init__(
        self,
        config: PretrainConfig,
        cadence: Cadence,
        events: Sequence[Row],
        *,
        instruments: Instruments | None,
        note: Callable[[str], None],
        stepped_at: float = 0.0,
    ) -> None:
        """`instruments` is `ray.util.metrics`, None to do nothing; `note` is told if no more figures come. The newest
        step that has a row ended at `stepped_at`, unix time; 0: none has."""
        self._run, self._instruments, self._note = config.run.name, instruments, note
        self._config, self._cadence, self._stepped_at = config, cadence, stepped_at
        self._events = events if instruments is not None else ()  # until the figures are made of them
        self._made: dict[str, Any] = {}  # counters and gauges by name
        self._handed: dict[Key, float] = {}  # what Ray knows of counters
        self._first_at: dict[Key, float] = {}  # since when, by the monotonic clock
        self._is_over = False  # the run has stopped
        self._handed_at = -math.inf  # of the monotonic clock
        self.cpu_s = 0.0  # that all of this took

    @cached_property
    def _figures(self) -> Figures:
        events, self._events = [from_row(event) for event in self._events], ()
        return Figures(self._config, self._cadence, events, time.time(), stepped_at=self._stepped_at)

    def row(self, row: Row) -> None:
        self._take(lambda figures, now: figures.row(row, now))

    def event(self, event: Event) -> None:
        self._is_over = self._is_over or isinstance(event, Stopped)
        self._take(lambda figures, now: figures.event(event, now), at_once=isinstance(event, Submitted | Stopped))

    def snapshot(self, step: int) -> None:
        self._take(lambda figures, now: figures.snapshot(step, now))

    def ranks(self, ranks: Sequence[Mapping[str, Any]], suspects: Sequence[Mapping[str, Any]]) -> None:
        self._take(lambda figures, now: figures.ranks(ranks, suspects))

    def node_snapshots(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        self._take(lambda figures, now: figures.node_snapshots(nodes))

    def reported(self, report: Mapping[str, Any]) -> None:
        self._take(lambda figures, now: figures.reported(report))

    def tick(self) -> None:
        """Call it often, whatever happens or does not."""
        self._take(lambda figures, now: None)

    def _take(self, work: Callable[[Figures, float], None], *, at_once: bool = False) -> None:
        if self._instruments is None:
            return
        begun, now, steady = time.thread_time(), time.time(), time.monotonic()  # a clock that is set back is no wait
        try:
            work(self._figures, now)
            if at_once or steady - self._handed_at >= PUBLISH_S:
                self._figures.tick(now)
                self._figures.values["regrow_metrics_cpu_seconds_total", ""] = self.cpu_s
                self._hand_over(self._instruments, steady)
                self._handed_at = steady
        except Exception as error:
            self._instruments = None
            self._note(f"no more metrics: {first_line(error)}")
        self.cpu_s += time.thread_time() - begun

    def _hand_over(self, instruments: Instruments, steady: float) -> None:
        """Tell Ray by how much counters grew, and the rest anew: it forgets what it is not told for two reports."""
        for key, value in self._figures.values.items():
            family, tags = FAMILIES[key[0]], {RUN: self._run}
            growth = self._growth(key, value, steady) if family.is_counter else None
            if growth == 0.0:
                continue
            if family.label:
                tags[family.label] = key[1]
            if family.name not in self._made:
                kind = instruments.Counter if family.is_counter else instruments.Gauge
                self._made[family.name] = kind(family.name, description=family.help, tag_keys=tuple(tags))
            if growth is None:
                self._made[family.name].set(value, tags=tags)
            else:
                self._made[family.name].inc(growth, tags=tags)

    def _growth(self, key: Key, value: float, steady: float) -> float:
        """By how much a counter grows to Ray now; what comes before its first value was scraped waits for that, unless
        the run is over and Ray may be, too."""
        if key not in self._handed:
            self._handed[key], self._first_at[key] = 0.0, steady
            return NOTHING
        if steady - self._first_at[key] < FIRST_ALONE_S and not self._is_over:
            return 0.0
        growth = value - self._handed[key]
        self._handed[key] = value
        return growth
