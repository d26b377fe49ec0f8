"""Finished runs, read whole for a simulation: their logs, what failed in them, and when nodes were there. Pure, but for
reading.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regrow.control.spacing import FIRST
from regrow.errors import ConfigError
from regrow.record.events import (
    FAILURES,
    Cause,
    Drain,
    Event,
    Failure,
    FaultKind,
    Generation,
    NodeLost,
    Ready,
    Row,
    SnapshotSpacing,
    Submitted,
    Undrain,
    from_row,
)
from regrow.record.history import History
from regrow.record.ledger import Ledger, of_kind, on_one_clock
from regrow.record.log import LogReader
from regrow.record.run_folder import find_run, run_config
from regrow.simulate.inputs import TAKES_NODE

NODE_FOUND_S = 60.0  # after a process' end, within which its node's explains it
KIND_OF = {  # what failed by cause alone, where an event does not say
    Cause.worker_died: FaultKind.software,
    Cause.worker_failed: FaultKind.software,
    Cause.controller_died: FaultKind.software,
    Cause.nonfinite: FaultKind.software,
    Cause.worker_hung: FaultKind.hang,
    Cause.node_silent: FaultKind.host,
    Cause.corrupted: FaultKind.sdc,
}


@dataclass(frozen=True)
class RunLogs:
    """A run, read whole."""

    name: str
    config: Mapping[str, Any]
    history: History
    ledger: Ledger

    @staticmethod
    def read(folder: str) -> "RunLogs":
        """Raises ConfigError where the folder holds no finished step."""
        storage = find_run(folder)
        log = LogReader(storage)
        history = History.of_logs(*on_one_clock(log.metrics(), [from_row(each) for each in log.events()]))
        if not history.rows:
            raise ConfigError(f"{folder} has no step in its log: give the folder of a run that trained")
        if not history.events:
            raise ConfigError(f"{folder} has no event in its log: copy its events.jsonl beside metrics.jsonl")
        end = max(history.rows[-1]["time"], *(event.time for event in history.events))
        return RunLogs(folder, run_config(storage), history, history.ledger(end))

    @property
    def rows(self) -> list[Row]:
        return list(self.history.rows)


def faults_of(events: Sequence[Event]) -> list[tuple[Event, str]]:
    """What failed, and which of the simulator's kinds it was: by the event, a node's death soon after, its cause. Of a
    generation's ranks on a node, which may be told of one by one, it is one fault."""
    workers = workers_of(events)
    was_its_host = _host_losses(events, workers)
    found: list[tuple[Event, str]] = []
    known = set[tuple[int | None, str | tuple[int, ...]]]()
    for event in events:
        if isinstance(event, Drain):
            found.append((event, "drain"))
        if not isinstance(event, Failure) or event.cause == Cause.controller_died:
            continue
        ranks: list[tuple[int, ...]] = [tuple(sorted(event.ranks or []))]
        befallen = {(event.generation, each) for each in nodes_of(event, workers) or ranks}
        if befallen <= known:  # told again
            continue
        known |= befallen
        by_cause = KIND_OF[Cause(event.cause)] if event.cause in FAILURES else FaultKind.software
        kind = event.kind or str(by_cause)
        if kind == FaultKind.software and was_its_host(event):
            kind = FaultKind.host
        found.append((event, str(kind)))
    return found


def _host_losses(events: Sequence[Event], workers: Mapping[int, Sequence[Row]]) -> Callable[[Failure], bool]:
    """Whether a node of a failure was found dead soon, and nothing says that it had outlived the failure: newcomers on
    it, or a later group's failure there.
    """
    lost = [(event.time, event.node) for event in of_kind(events, NodeLost)]
    lived: list[tuple[float, str, int | None]] = [(event.time, event.node, -1) for event in of_kind(events, Ready)]
    for event in of_kind(events, Failure):
        lived += [(event.time, node, event.generation) for node in nodes_of(event, workers)]

    def outlived(failure: Failure, node: str, until: float) -> bool:
        return any(
            failure.time < time < until and name == node and number != failure.generation
            for time, name, number in lived
        )

    def was_its_host(failure: Failure) -> bool:
        nodes = nodes_of(failure, workers)
        soon = [(time, node) for time, node in lost if node in nodes and abs(time - failure.time) <= NODE_FOUND_S]
        return any(not outlived(failure, node, time) for time, node in soon)

    return was_its_host


def workers_of(events: Sequence[Event]) -> dict[int, list[Row]]:
    """By generation, of each rank."""
    return {event.generation: event.workers or [] for event in of_kind(events, Generation)}


def nodes_of(event: Event, workers: Mapping[int, Sequence[Row]]) -> list[str]:
    """That a failure or a drain has befallen, as it says, or by its ranks."""
    if isinstance(event, Drain):
        return [event.node]
    assert isinstance(event, Failure)
    of_group = workers.get(event.generation or 0, ())
    return event.nodes or [str(of_group[rank].get("node")) for rank in event.ranks or [] if rank < len(of_group)]


def arrivals(events: Sequence[Event], first: Collection[str]) -> list[float]:
    """When each node came beside the first ones, whatever its group was formed for; one that a fault took, too.

    The first group of another job may be on another cluster's nodes: those that it has more of have come. Where it has
    fewer, as many that come later have been there, by other ids.
    """
    workers, here, before, is_other_job = workers_of(events), set(first), set(first), False
    taken = {id(event): nodes_of(event, workers) for event, kind in faults_of(events) if kind in TAKES_NODE}
    found, owed = list[float](), 0  # nodes that were there, and that the newest job has not had yet
    for event in events:
        here -= set(taken.get(id(event), ()))
        is_other_job = is_other_job or isinstance(event, Submitted)
        if isinstance(event, Ready) and event.node not in here:
            found += [event.time - (event.start_s or 0.0)] if not owed else []
            owed = max(0, owed - 1)
            here.add(event.node)
        if isinstance(event, Generation):
            group = {str(worker.get("node")) for worker in workers[event.generation]}
            new = group - here - before  # of a version that does not say when one is ready
            there = len(here) + owed
            found += [event.time] * (len(group) - there if is_other_job else len(new) - owed)
            here, before = set(group) if is_other_job and new else here | new, group
            owed = max(0, there - len(here))
            is_other_job = False
    return found


def node_seconds(run: RunLogs) -> float:
    """Of nodes in groups, from each group's beginning to the next one's."""
    formed = [(each.generation, each.last_life) for each in run.ledger.attempts if each.generation]
    total = 0.0
    for number, (generation, life) in enumerate(formed):
        until = formed[number + 1][0].time if number + 1 < len(formed) else max(life, generation.time)
        nodes = {worker.get("node") for worker in generation.workers or []}
        total += max(0.0, until - generation.time) * (len(nodes) or generation.world_size)
    return total


def size_at(events: Sequence[Event]) -> Callable[[float], int]:
    """The world size at a time."""
    groups = [(event.time, event.world_size) for event in of_kind(events, Generation)]
    times = [time for time, _ in groups]

    def size(time: float) -> int:
        at = bisect_right(times, time) - 1
        return groups[at][1] if at >= 0 else 0

    return size


def lost_a_worker(events: Sequence[Event], ready: Ready) -> bool:
    """Whether its node had lost one before: else it is a new node."""
    lost: Collection[str] = {
        node for event in of_kind(events, Failure) if event.time < ready.time for node in event.nodes or []
    }
    back = {event.node for event in of_kind(events, Undrain) if not event.lost}
    return ready.node in lost or ready.node in back


def spacing_at(run: RunLogs) -> Callable[[float], int]:
    """Steps between snapshots at a time: as configured, or as measured; 1 in a run of before there was a choice."""
    config = run.config.get("snapshot")
    fixed = (config or {}).get("every_steps", 1)
    told = [(event.time, event.every_steps) for event in of_kind(run.history.events, SnapshotSpacing)]
    times = [time for time, _ in told]

    def spacing(time: float) -> int:
        if isinstance(fixed, int):
            return fixed
        at = bisect_right(times, time) - 1
        return told[at][1] if at >= 0 else FIRST

    return spacing


def least_workers(run: RunLogs) -> int:
    """Of a group."""
    told = [event.min_workers for event in of_kind(run.history.events, Submitted) if event.min_workers]
    cluster = run.config.get("cluster")
    return int(told[-1] if told else (cluster or {}).get("min_workers") or 1)


def before(formed: Sequence[Generation], number: int) -> int:
    """The generation before this one that trained; 0: none."""
    return max((each.generation for each in formed if each.generation < number), default=0)


def left_of(events: Sequence[Event], generation: int, ranks: int) -> int:
    """How many of a group's ranks were left when it was over."""
    lost = {rank for event in of_kind(events, Failure) if event.generation == generation for rank in event.ranks or []}
    return ranks - len(lost)
