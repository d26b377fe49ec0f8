"""Several runs side by side: what became of each, which settings differ, whether they saw the same batches."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from regrow.errors import RegrowError
from regrow.record.events import Submitted, cause_words
from regrow.record.history import History
from regrow.record.ledger import STATES
from regrow.record.log import LogReader, is_number
from regrow.record.run_folder import run_config
from regrow.show.page import RECOVERY_PARTS, flat
from regrow.show.report import build_report
from regrow.show.units import duration, or_dash, percent, si
from regrow.storage import Storage, split_location

MOST_RUNS = 8  # beside each other
OWN = ("run.name",)  # settings that differ by their nature
ABSENT = "-"


@dataclass(frozen=True)
class RunData:
    """All that a run folder's logs say."""

    name: str
    folder: str
    report: dict[str, Any]
    history: History
    config: dict[str, Any]

    @property
    def tokens_per_s(self) -> float | None:
        """Of the median step."""
        speeds = [row["tokens_per_s"] for row in self.history.rows if is_number(row.get("tokens_per_s"))]
        return median(speeds) if speeds else None

    @property
    def validation_loss(self) -> float | None:
        """The newest one."""
        scored = (
            row["validation_loss"] for row in reversed(self.history.rows) if is_number(row.get("validation_loss"))
        )
        return next(scored, None)

    @property
    def settings(self) -> dict[str, str]:
        """By dotted name; with the commit and the versions that the newest submission was made of."""
        newest = self.history.newest(Submitted)
        made_of = {"commit": newest.git} if newest and newest.git else {}
        versions = (newest.versions if newest else None) or {}
        return dict(flat(self.config)) | made_of | {f"version of {name}": str(v) for name, v in versions.items()}


@dataclass(frozen=True)
class Agreement:
    """How far another run's steps are those of the first: batches by their digests, and what became of the loss."""

    common_steps: int
    same_batches: int  # steps with the same batch
    first_other: int | None  # the first common step with another batch
    largest_loss_difference: float | None  # over steps whose batches agree
    at_step: int | None


def load_run(storage: Storage, now: float | None = None) -> RunData:
    """Read a run folder. Raises RegrowError where it holds no run."""
    config = run_config(storage)
    history = History.read(LogReader(storage))
    ledger = history.ledger(time.time() if now is None else now)
    name = str((config.get("run") or {}).get("name") or split_location(str(storage))[1])
    return RunData(name, str(storage), build_report(history, ledger, config), history, config)


def load_runs(locations: Sequence[str], now: float | None = None) -> list[RunData]:
    """Several of them, each once. Raises RegrowError."""
    folders = list(dict.fromkeys(str(Storage.at(location)) for location in locations))
    if not 2 <= len(folders) <= MOST_RUNS:
        raise RegrowError(f"{len(folders)} different runs are given; 2 to {MOST_RUNS} can be compared")
    return [load_run(Storage.at(folder), now) for folder in folders]


def labels(runs: Sequence[RunData]) -> list[str]:
    """A name for each run, with as much of its folder as it takes to tell it from the others."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    parts = [run.folder.split("/") for run in runs]
    depth = next(n for n in range(1, 1 + max(map(len, parts))) if len({tuple(p[-n:]) for p in parts}) == len(parts))
    return ["/".join(each[-depth:]) for each in parts]


def differing_settings(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Settings and versions that are not the same in all runs: dotted name -> a value for each run."""
    settings = [run.settings for run in runs]
    names = dict.fromkeys(name for each in settings for name in each)
    found = {name: [each.get(name, ABSENT) for each in settings] for name in names if name not in OWN}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def agreement(first: RunData, other: RunData) -> Agreement:
    """Compare the steps that both have."""
    rows = {row["step"]: row for row in first.history.rows}
    pairs = [(rows[row["step"]], row) for row in other.history.rows if row["step"] in rows]
    same = [(a, b) for a, b in pairs if a.get("batch_digest") == b.get("batch_digest")]
    others = [a["step"] for a, b in pairs if a.get("batch_digest") != b.get("batch_digest")]
    losses = [
        (abs(a["loss"] - b["loss"]), a["step"])
        for a, b in same
        if is_number(a.get("loss")) and is_number(b.get("loss"))
    ]
    largest = max(losses, key=lambda each: each[0], default=(None, None))
    return Agreement(len(pairs), len(same), min(others, default=None), *largest)


def comparison(runs: Sequence[RunData]) -> dict[str, Any]:
    """The comparison as data."""
    names = labels(runs)
    return {
        "runs": [
            {
                "name": name,
                "folder": run.folder,
                "tokens_per_s": run.tokens_per_s,
                "validation_loss": run.validation_loss,
                "report": run.report,
            }
            for name, run in zip(names, runs, strict=True)
        ],
        "differing_settings": differing_settings(runs),
        "agreement_with_first": {
            name: vars(agreement(runs[0], run)) for name, run in zip(names[1:], runs[1:], strict=True)
        },
    }


def as_json(runs: Sequence[RunData]) -> str:
    return json.dumps(comparison(runs), indent=2, allow_nan=False)


def as_table(runs: Sequence[RunData]) -> Table:
    """The comparison for people: a column for each run."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("", *labels(runs)):
        table.add_column(Text(name), overflow="fold", justify="right" if name else "left")
    for title, rows in (
        ("", _summary(runs)),
        ("time by state", _states(runs)),
        ("time lost by cause, restarts, median recovery", _lost(runs)),
        ("against the first run", _agreements(runs)),
        ("differing settings", list(differing_settings(runs).items())),
    ):
        if title:
            table.add_section()
            table.add_row("")
            table.add_row(Text(title if rows else f"{title}: none", "bold"))
        for name, values in rows:
            table.add_row(Text(name), *(Text(value) for value in values))
    return table


Rows = list[tuple[str, list[str]]]


def _summary(runs: Sequence[RunData]) -> Rows:
    def sizes(run: RunData) -> str:
        found = {row["world_size"] for row in run.history.rows}
        return "-" if not found else f"{min(found):,}" + (f" to {max(found):,}" if len(found) > 1 else "")

    shown: dict[str, Callable[[RunData], str]] = {
        "steps": lambda run: f"{run.report['steps']:,}",
        "tokens": lambda run: or_dash(run.report["tokens"], si),
        "last loss": lambda run: or_dash(run.report["final_loss"], "{:.4f}".format),
        "validation loss": lambda run: or_dash(run.validation_loss, "{:.4f}".format),
        "tokens/s, median": lambda run: or_dash(run.tokens_per_s, "{:,.0f}".format),
        "ranks": sizes,
        "wall time": lambda run: duration(run.report["wall_s"]),
        "goodput": lambda run: or_dash(run.report["goodput"], percent),
        "effective": lambda run: or_dash(run.report["effective"], percent),
        "paid": lambda run: or_dash(run.report["paid"], percent),
        "capacity goodput": lambda run: or_dash(run.report["capacity_goodput"], percent),
        "checkpoints": lambda run: f"{run.report['checkpoints']['committed']:,}",
        "restarts": lambda run: f"{sum(run.report['restarts'].values()):,}",
    }
    return [(name, [show(run) for run in runs]) for name, show in shown.items()]


def _states(runs: Sequence[RunData]) -> Rows:
    def part(run: RunData, state: str) -> str:
        seconds, wall_s = run.report["time_s"][state], run.report["wall_s"]
        return f"{duration(seconds)}, {percent(seconds / wall_s)}" if wall_s > 0 else ABSENT

    states = [state for state in STATES if any(run.report["time_s"][state] > 0 for run in runs)]
    return [(state, [part(run, state) for run in runs]) for state in states]


def _lost(runs: Sequence[RunData]) -> Rows:
    """What starting and interruptions cost, a cause a row, the costliest first."""

    def cost(run: RunData, cause: str) -> str:
        seconds, times = run.report["lost_s"].get(cause), run.report["restarts"].get(cause)
        if seconds is None:
            return ABSENT
        took = [
            sum(entry[part] or 0.0 for part in RECOVERY_PARTS)
            for entry in run.report["recoveries"]
            if entry["cause"] == cause
        ]
        return duration(seconds) + (f", {times:,}x" if times else "") + (f", {duration(median(took))}" if took else "")

    causes = {cause for run in runs for cause in run.report["lost_s"]}
    costliest = sorted(causes, key=lambda cause: (-sum(run.report["lost_s"].get(cause, 0.0) for run in runs), cause))
    rows = [(cause_words(cause), [cost(run, cause) for run in runs]) for cause in costliest]
    again = [sum(entry["lost_steps"] or 0 for entry in run.report["recoveries"]) for run in runs]
    return [*rows, ("steps done again", [f"{steps:,}" for steps in again])] if rows else []


def _agreements(runs: Sequence[RunData]) -> Rows:
    """Were the same batches trained on, and how far do the losses differ?"""
    found = [None, *(agreement(runs[0], run) for run in runs[1:])]

    def row(name: str, show: Callable[[Agreement], str]) -> tuple[str, list[str]]:
        return name, ["" if each is None else show(each) for each in found]

    def difference(each: Agreement) -> str:
        at = f" at step {each.at_step:,}" if each.at_step is not None else ""
        return or_dash(each.largest_loss_difference, "{:.2e}".format) + at

    return [
        row("steps of both", lambda each: f"{each.common_steps:,}"),
        row("with the same batch", lambda each: f"{each.same_batches:,}"),
        row("first step with another batch", lambda each: or_dash(each.first_other, "{:,}".format)),
        row("largest loss difference, same batch", difference),
    ]
