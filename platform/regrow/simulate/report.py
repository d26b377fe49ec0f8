"""What jobs.simulate says: a line a policy, JSON, and one self-contained page in the look of a run's."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow.config.schema import SimulateJobConfig
from regrow.record.events import cause_words
from regrow.record.history import History
from regrow.show.page import Cell, Page, Section
from regrow.show.timeline import draw_timeline, marks_of
from regrow.show.units import duration, percent
from regrow.simulate.charts import COLOURS, draw_spares, draw_tornado, short
from regrow.simulate.estimate import Estimate
from regrow.simulate.inputs import Figure, Origin
from regrow.simulate.study import (
    Budget,
    Loss,
    Swing,
    assumed_share,
    budgets,
    losses,
    mtbf_s,
    spare_counts,
    spares_curve,
    to_json,
    tornado,
)
from regrow.simulate.trace import sample
from regrow.simulate.world import goal_of, replicas_of

LEAST_SHARE = 1e-4  # of wall time, that is worth a line
STATES = {
    "shrunk": "fewer units than at full size",
    "slow": "beside a slow node",
    "snapshot": "stopped for a checkpoint",
    "verify": "computing what all units compare",
    "wait": "too few nodes to train",
}
PARTS = {
    "notice": "until it is noticed",
    "form": "forming again",
    "join": "taking nodes in",
    "redo": "work lost",
    "stop": "the stop itself",
}
ORIGIN_WORDS = {
    "grow": "a node came back",
    "stop": "planned stops",
    "slow": "leaving slow nodes",
    "head": "the head died",
}


@dataclass(frozen=True)
class Sweep:
    """What a sweep adds, of the policy that comes first."""

    goal: float
    curve: list[dict[str, float]]
    middle: float
    swings: list[Swing]
    budgets: list[Budget]

    @property
    def first_to_improve(self) -> Swing | None:
        """Of what regrow could do better, what gives most."""
        own = [each for each in self.swings if each.is_own and each.best > self.middle]
        return max(own, key=lambda each: each.best, default=None)

    @property
    def range(self) -> tuple[float, float]:
        """Of `effective`, as assumed inputs go to the ends of their ranges one by one: all downs, and all ups."""
        ends = [
            (min(each.at_low, each.at_high) - self.middle, each.best - self.middle)
            for each in self.swings
            if each.figure.origin == Origin.assumed
        ]
        down = math.sqrt(sum(min(0.0, low) ** 2 for low, _ in ends))
        return max(0.0, self.middle - down), min(1.0, self.middle + math.sqrt(sum(max(0.0, up) ** 2 for _, up in ends)))


def line_of(result: Estimate) -> str:
    """One policy, in one line."""
    figures = to_json(result)
    low, high = figures["interval"]
    least, most = figures["runs"]
    lost = sorted(result.lost_s.items(), key=lambda item: -item[1])[:3]
    top = ", ".join(f"{_cause(cause)} {percent(seconds / result.wall_s)}" for cause, seconds in lost)
    return (
        f"{figures['name']:14} effective {percent(figures['effective'])} ({percent(low)} to {percent(high)}; runs "
        f"{percent(least)} to {percent(most)}), goodput {percent(figures['goodput'])}, "
        f"paid {percent(figures['paid'])}; lost to {top or 'nothing'}; "
        f"{figures['assumed_share']:.0%} of that on assumptions"
    )


def figures_of(config: SimulateJobConfig, results: Sequence[Estimate], found: Sweep | None = None) -> dict[str, Any]:
    """The content of simulate.json; with what a sweep found, where there was one."""
    simulate, first = config.simulate, results[0].inputs
    job = first.job
    figures: dict[str, Any] = {
        "gpus": job.gpus,
        "nodes": job.nodes,
        "units": job.units,
        "num_slices": job.num_slices,
        "spares": job.spares,
        "days": simulate.days,
        "replicas": len(results[0].effective),
        "seed": simulate.seed,
        "faults": simulate.faults.name,
        "mtbf_s": mtbf_s(first) if math.isfinite(mtbf_s(first)) else None,
        "policies": [to_json(each) for each in results],
    }
    if found is not None:
        improve = found.first_to_improve
        figures |= {
            "goal": found.goal,
            "reached": bool(results[0].effective.mean() >= found.goal),
            "improve_first": improve.name if improve else None,
            "range": list(found.range),
            "spares_curve": found.curve,
            "tornado": [
                {"name": s.name, "low": s.low, "high": s.high, "at_low": s.at_low, "at_high": s.at_high,
                 "origin": str(s.figure.origin)}
                for s in found.swings
            ],
            "budget": [
                {"name": b.name, "now_s": b.now_s, "most_s": "any" if b.most_s == math.inf else b.most_s}
                for b in found.budgets
            ],
            "inputs": {name: _plain(each) for name, each in first.figures.items()},
        }  # fmt: skip
    elif len(simulate.spares) > 1:
        figures["spares_curve"] = spares_curve(first, simulate.spares, replicas_of(simulate), simulate.seed)
    return figures


def sweep(config: SimulateJobConfig, results: Sequence[Estimate]) -> Sweep:
    """Spares, a tornado and budgets of the policy that comes first."""
    simulate = config.simulate
    result = results[0]
    inputs, seed, replicas = result.inputs, simulate.seed, min(simulate.replicas, 32)
    goal = goal_of(simulate, inputs.job)
    counts = simulate.spares if len(simulate.spares) > 1 else spare_counts(inputs, result)
    curve = spares_curve(inputs, counts, min(replicas, 16), seed)
    middle, swings = tornado(inputs, min(replicas, 16), seed)
    return Sweep(goal, curve, middle, swings, budgets(inputs, goal, min(replicas, 16), seed))


def write_page(folder: Path, config: SimulateJobConfig, results: Sequence[Estimate]) -> Sweep | None:
    """Write simulate.json and simulate.html; what a sweep found, which they have too."""
    found = sweep(config, results) if config.simulate.sweep else None
    folder.mkdir(parents=True, exist_ok=True)
    figures = figures_of(config, results, found)
    (folder / "simulate.json").write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n")
    (folder / "simulate.html").write_text(page_of(config, results, found).render(), encoding="utf-8")
    return found


def goal_lines(found: Sweep, result: Estimate) -> list[str]:
    """Whether the goal is reached, and what to improve first."""
    effective, first = float(result.effective.mean()), found.first_to_improve
    reached = "reached" if effective >= found.goal else "not reached"
    lines = [f"goal {percent(found.goal)}: {reached}, at {percent(effective)}"]
    if first is not None:
        at = first.low if first.at_low >= first.at_high else first.high
        lines.append(
            f"improve first: {first.name}, {short(first.figure.value)} now; at {short(at)} effective would be "
            f"{percent(first.best)}"
        )
    return lines


def page_of(config: SimulateJobConfig, results: Sequence[Estimate], found: Sweep | None) -> Page:
    """All of it; what is not a comparison, of the policy that comes first."""
    result = results[0]
    inputs, figures = result.inputs, to_json(result)
    rows, events = sample(inputs, config.simulate.seed, config.optim.global_batch_seqs * config.data.seq_len)
    history = History.of_logs(rows, events)
    end = max(event.time for event in events) if not rows else max(rows[-1]["time"], events[-1].time)
    picture = draw_timeline(
        history.ledger(end), rows, marks_of(history), middle=("nodes up", "nodes_up"),
        title=f"A stretch of one run with {inputs.policy.name}, drawn by chance",
    )  # fmt: skip
    low, high = figures["interval"]
    between = mtbf_s(inputs)
    tiles = [
        ("effective", percent(figures["effective"])),
        ("90% interval", f"{100 * low:.1f}-{percent(high)}"),
        ("goodput", percent(figures["goodput"])),
        ("paid", percent(figures["paid"])),
        ("between failures", duration(between) if math.isfinite(between) else "never"),
        ("nodes away", f"{figures['away_nodes']['mean']:.1f}"),
        ("on assumptions", f"{figures['assumed_share']:.0%}"),
    ]
    job = inputs.job
    lead = (
        f"{job.gpus:,} GPUs in {job.units:,} units of {job.unit_gpus}, {job.spares} spare nodes, "
        f"{config.simulate.days:g} days, {len(result.effective)} runs, faults {config.simulate.faults.name}:"
    )
    verdict = None
    if found is not None:
        reached = figures["effective"] >= found.goal
        verdict = Cell(f"{percent(found.goal)} {'reached' if reached else 'not reached'}", "good" if reached else "bad")
    sections = [_policies(results), _losses(result), *(_swept(found, result) if found else ()), _inputs(results)]
    return Page(f"Goodput of {job.name}, simulated", lead, tiles, picture, sections, verdict)


def _policies(results: Sequence[Estimate]) -> Section:
    rows: list[Sequence[str | Cell]] = []
    for result in results:
        each = to_json(result)
        spans = [f"{100 * low:.1f} to {percent(high)}" for low, high in (each["interval"], each["runs"])]
        shares = [percent(each[name]) for name in ("effective", "goodput", "paid")]
        rows.append(
            [each["name"], shares[0], *spans, *shares[1:], f"{each['changes']:,.0f}", f"{each['assumed_share']:.0%}"]
        )
    head = ["policy", "effective", "90% interval of the mean", "90% of runs", "goodput", "paid", "changes"]
    head.append("assumed")
    note = (
        "effective: useful seconds of the undisturbed full-size job over wall time; goodput: steps that count, slow "
        "and shrunk ones too; paid: effective with spares counted; assumed: the loss that rests on assumptions."
    )
    return Section("Policies, under the same faults", note=note, head=head, rows=rows, numbers=range(1, 8))


def _losses(result: Estimate) -> Section:
    found, wall_s, figures = losses(result), result.wall_s, result.inputs.figures
    rows: list[Sequence[str | Cell]] = []
    for each in found:
        if each.seconds / wall_s < LEAST_SHARE:
            continue
        origin = _weakest([figures[name] for name in each.figures])
        what = STATES.get(each.part) or f"{_words(each.cause)}: {PARTS[each.part]}"
        rows.append(
            [
                Cell(what, colour=COLOURS[origin]),
                f"{each.seconds / wall_s:.2%}",
                duration(each.seconds * 86400 / wall_s),
                str(origin),
                Cell(", ".join(each.figures), "soft text"),
            ]
        )
    shares = {origin: sum(_share(each, figures, origin) for each in found) for origin in COLOURS}
    total = sum(shares.values()) or 1.0
    bar = [(s / total, COLOURS[o], f"{o}: {s / total:.0%} of the loss") for o, s in shares.items() if s > 0]
    note = (
        f"Of what is lost, {assumed_share(found):.0%} follows from an input that is assumed (amber), the rest from "
        "published (blue) and measured ones (green). A line has the colour of its weakest input."
    )
    head = ["lost to", "share", "a day", "rests on", "inputs"]
    return Section(f"What {result.inputs.policy.name} loses", bar=bar, note=note, head=head, rows=rows, numbers=(1, 2))


def _swept(found: Sweep, result: Estimate) -> list[Section]:
    rows: list[Sequence[str | Cell]] = [
        [f"{each['spares']:.0f}", f"{each['effective']:.2%}", f"{each['paid']:.2%}"] for each in found.curve
    ]
    low, high = found.range
    budget: list[Sequence[str | Cell]] = [
        [each.words, duration(each.now_s), _most(each), Cell(each.name, "soft")] for each in found.budgets
    ]
    return [
        Section(
            "Spare nodes", chart=draw_spares(found.curve, found.goal), head=["nodes", "effective", "paid"], rows=rows,
            numbers=range(3),
        ),
        Section(
            "What moves it", lines=goal_lines(found, result), chart=draw_tornado(found.swings, found.middle),
            note=f"Each input at both ends of its range, all others as they are; assumed ones together, as if "
            f"independent: {percent(low)} to {percent(high)}. Played over fewer days than the table above.",
        ),
        Section(
            f"What {percent(found.goal)} leaves each phase", head=["phase", "now", "at most", "input"], rows=budget,
            note="Mean seconds that a phase may take at this size, all others as they are.", numbers=(1, 2),
        ),
    ]  # fmt: skip


def _inputs(results: Sequence[Estimate]) -> Section:
    first, rows = results[0].inputs.figures, list[Sequence[str | Cell]]()
    for result in results:
        for name, each in sorted(result.inputs.figures.items()):
            if result is not results[0] and first.get(name) == each:
                continue
            span = f"{short(each.low)} to {short(each.high)}" if each.low is not None and each.high is not None else ""
            named = name if result is results[0] else f"{result.inputs.policy.name}: {name}"
            origin = Cell(str(each.origin), colour=COLOURS[each.origin])
            rows.append([named, short(each.value), span, origin, str(each.n or ""), Cell(each.source, "text")])
    head = ["input", "value", "range", "from", "n", "source"]
    return Section("Inputs", head=head, rows=rows, numbers=(1, 2, 4))


def _most(budget: Budget) -> str:
    if budget.most_s is None:
        return "not by this alone"
    return duration(budget.most_s) if math.isfinite(budget.most_s) else "any"


def _weakest(figures: Sequence[Figure]) -> Origin:
    order = (Origin.measured, Origin.published, Origin.assumed)
    return max((each.origin for each in figures), key=order.index, default=Origin.assumed)


def _share(loss: Loss, figures: Any, origin: Origin) -> float:
    return loss.seconds if _weakest([figures[name] for name in loss.figures]) == origin else 0.0


def _words(origin: str) -> str:
    return ORIGIN_WORDS.get(origin, origin)


def _cause(cause: str) -> str:
    return STATES.get(cause) or cause_words(cause)


def _plain(figure: Figure) -> dict[str, Any]:
    value = figure.value if math.isfinite(figure.value) else None
    return {"value": value, "origin": str(figure.origin), "n": figure.n, "source": figure.source}
