"""What `recovery.py` measured, and the figures that it comes to. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.measure import Result, summary

OURS, ASYNCHRONOUS, OURS_DEFAULT, TUNED, DEFAULT = "ours", "asynchronous", "ours_default", "tuned", "default"
SIDES = (DEFAULT, TUNED, OURS, ASYNCHRONOUS, OURS_DEFAULT)  # in the order of a round
OF_OURS = (OURS, ASYNCHRONOUS, OURS_DEFAULT)
RECOMPILES = "recompiles"
WORKER, NODE, REGROW, HANG = "worker_kill", "node_kill", "regrow", "hang"
FAULTS = (WORKER, NODE, REGROW, HANG)  # in the order in which a run meets them


@dataclass(frozen=True)
class Sample:
    """One fault and what followed; seconds count from the fault, for `regrow` from when the node was there."""

    side: str
    round: int
    fault: str
    new_step_s: float | None  # the first step past all that had been finished; None: not within `waited_s`
    any_step_s: float | None  # the first step at all
    visible_s: float | None  # Ray's GCS knows that the node is dead; the killed process is gone
    lost_steps: int | None
    stood_still_s: float | None
    step_s: float  # median of the group that was hit
    waited_s: float
    ranks: tuple[int, int]  # before and after; 0 after: none
    load: float  # of the machine, in the minute before
    restore_s: float | None = None  # of ours, within `stood_still_s`: until the new group had its state

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Sample":
        return cls(**{**row, "ranks": tuple(row["ranks"])})

    def row(self) -> dict[str, Any]:
        return asdict(self)


def summarize(samples: Sequence[Sample], recompiles: Sequence[int]) -> Result:
    """The figures that these samples are enough for."""
    of_side = {side: [sample for sample in samples if sample.side == side] for side in SIDES}
    result = Result(runs={side: [sample.row() for sample in found] for side, found in of_side.items()})
    result.runs[RECOMPILES] = list(recompiles)
    ours = of_side[OURS]
    for fault in (NODE, WORKER, HANG, REGROW):
        add(result, f"{fault}_s", seconds(ours, fault))
        for side, kind in ((TUNED, "tuned_stock"), (DEFAULT, "default_stock")):
            theirs = of_side[side]
            add_peer(result, side, fault, theirs)
            if fault in (NODE, WORKER):
                add_ratio(result, f"{fault}_vs_{kind}", seconds(ours, fault), seconds(theirs, fault))
    add_another(result, ASYNCHRONOUS, of_side[ASYNCHRONOUS], {"gloo": ours})
    add_another(result, OURS_DEFAULT, of_side[OURS_DEFAULT], {"ours": ours, "default_stock": of_side[DEFAULT]})
    visible = [sample for sample in of_fault(ours, NODE) if sample.new_step_s and sample.visible_s]
    add(result, "first_step_after_death_visible_s", [after_visible_s(sample) for sample in visible])
    hangs = [(sample.new_step_s, sample.step_s) for sample in of_fault(ours, HANG)]
    add(result, "hang_minus_5_steps_s", [new - 5 * step for new, step in hangs if new is not None])
    add(result, "regrow_stall_steps", stall_steps(ours))
    add(result, "regrow_stall_but_restore_steps", stall_steps(ours, but_restore=True))
    lost = [sample.lost_steps for sample in ours if sample.lost_steps is not None]
    if lost:
        result.figures["lost_steps_max"] = max(lost)
    if recompiles:
        result.figures[RECOMPILES] = max(recompiles)
    return result


def of_fault(samples: Sequence[Sample], fault: str) -> list[Sample]:
    return [sample for sample in samples if sample.fault == fault]


def seconds(samples: Sequence[Sample], fault: str) -> list[float]:
    return [sample.new_step_s for sample in of_fault(samples, fault) if sample.new_step_s is not None]


def after_visible_s(sample: Sample) -> float:
    assert sample.new_step_s is not None
    assert sample.visible_s is not None
    return sample.new_step_s - sample.visible_s


def stall_steps(samples: Sequence[Sample], *, but_restore: bool = False) -> list[float]:
    """How long groups stood still to grow, in their own steps; without restoring, where that is known."""
    steps = []
    for sample in of_fault(samples, REGROW):
        apart = sample.restore_s if but_restore else 0.0
        if sample.stood_still_s is not None and apart is not None:
            steps.append((sample.stood_still_s - apart) / sample.step_s)
    return steps


def add(result: Result, name: str, values: list[float]) -> None:
    if values:
        result.add(name, values)


def add_ratio(result: Result, name: str, ours: list[float], theirs: list[float]) -> None:
    """Of the medians, for sides of which there need not be as many samples of each."""
    if ours and theirs:
        result.figures[name] = statistics.median(ours) / statistics.median(theirs)
        result.spread[name] = [min(ours) / max(theirs), max(ours) / min(theirs)]


def add_another(result: Result, side: str, samples: Sequence[Sample], beside: Mapping[str, Sequence[Sample]]) -> None:
    """Ours in another way, against other sides."""
    for fault in (NODE, WORKER):
        add(result, f"{side}_{fault}_s", seconds(samples, fault))
        for name, theirs in beside.items():
            add_ratio(result, f"{side}_vs_{name}_{fault}", seconds(samples, fault), seconds(theirs, fault))
    lost = [sample.lost_steps for sample in samples if sample.lost_steps is not None]
    if lost:
        result.figures[f"{side}_lost_steps_max"] = max(lost)


def add_peer(result: Result, side: str, fault: str, samples: Sequence[Sample]) -> None:
    found, lost = of_fault(samples, fault), [sample.lost_steps for sample in of_fault(samples, fault)]
    if not found:
        return
    if any(sample.new_step_s is None for sample in found):  # a median would be of those that were quick
        result.peers[f"{side}_{fault}_s"] = {"not_within_s": [sample.waited_s for sample in found]}
        return
    result.peers[f"{side}_{fault}_s"] = summary(seconds(samples, fault))
    result.peers[f"{side}_{fault}_lost_steps"] = summary([count for count in lost if count is not None])
    if fault == REGROW:
        result.peers[f"{side}_regrow_stall_steps"] = summary(stall_steps(samples))


def describe(sample: Sample) -> str:
    """In a line."""
    parts = [f"{sample.side}, round {sample.round}, {sample.fault}"]
    if sample.new_step_s is None:
        parts.append(f"no new step within {sample.waited_s:.0f} s")
    else:
        parts.append(f"a new step after {sample.new_step_s:.2f} s, the first at all after {sample.any_step_s:.2f}")
        parts.append(f"{sample.lost_steps} lost, stood still for {sample.stood_still_s:.2f}")
    if sample.visible_s is not None:
        parts.append(f"visible after {sample.visible_s:.2f}")
    before, after = sample.ranks
    parts.append(f"{before} -> {after} ranks, a step {sample.step_s:.3f} s, load {sample.load:.1f}")
    return "; ".join(parts)


def graphs_compiled(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    """Of each process in all of these `generation` events, between the second and the last.

    A process says with each generation how many graphs it has compiled so far, before the generation's first step.
    """
    counts = [{worker["pid"]: worker["graphs"] for worker in group["workers"]} for group in groups]
    survivors = set(counts[0]).intersection(*counts[1:])
    assert survivors, f"no process is in all of {counts}"
    assert all(counts[1][pid] for pid in survivors), f"the first group compiled nothing: {counts}"
    return sorted(counts[-1][pid] - counts[1][pid] for pid in survivors)
