"""Several runs side by side: what became of each, which settings differ, whether they saw the same batches."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from regrow.errors import RegrowError
from regrow.record.ledger import Ledger, account
from regrow.record.log import Row, read_events, read_metrics
from regrow.show.report import report_of
from regrow.show.report_parts import flat, is_number
from regrow.show.status_folder import run_config
from regrow.storage import Storage

MOST_RUNS = 8  # that can be told apart in one plot
OWN = ("run.name",)  # settings that differ by their nature
ABSENT = "-"


@dataclass(frozen=True)
class RunData:
    """All that a run folder's logs say."""

    name: str
    folder: str
    report: dict[str, Any]
    ledger: Ledger
    metrics: list[Row]
    events: list[Row]
    config: dict[str, Any]


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
    metrics, events = read_metrics(storage), read_events(storage)
    ledger = account(metrics, events, time.time() if now is None else now)
    name = str((config.get("run") or {}).get("name") or str(storage).rstrip("/").rpartition("/")[2])
    return RunData(name, str(storage), report_of(ledger, metrics, events, config), ledger, metrics, events, config)


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
    settings = [dict(flat(run.config)) | _versions(run.events) for run in runs]
    names = dict.fromkeys(name for each in settings for name in each)
    found = {name: [each.get(name, ABSENT) for each in settings] for name in names if name not in OWN}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def agreement(first: RunData, other: RunData) -> Agreement:
    """Compare the steps that both have."""
    rows = {row["step"]: row for row in first.metrics}
    pairs = [(rows[row["step"]], row) for row in other.metrics if row["step"] in rows]
    same = [(a, b) for a, b in pairs if a.get("batch_digest") == b.get("batch_digest")]
    others = [a["step"] for a, b in pairs if a.get("batch_digest") != b.get("batch_digest")]
    losses = [
        (abs(a["loss"] - b["loss"]), a["step"])
        for a, b in same
        if is_number(a.get("loss")) and is_number(b.get("loss"))
    ]
    largest = max(losses, key=lambda each: each[0], default=(None, None))
    return Agreement(len(pairs), len(same), min(others, default=None), *largest)


def median_speed(run: RunData) -> float | None:
    """Tokens per second of the median step."""
    speeds = [row["tokens_per_s"] for row in run.metrics if is_number(row.get("tokens_per_s"))]
    return median(speeds) if speeds else None


def validation_loss(run: RunData) -> float | None:
    """The newest one."""
    scored = [row["validation_loss"] for row in run.metrics if is_number(row.get("validation_loss"))]
    return scored[-1] if scored else None


def make_comparison(runs: Sequence[RunData], now: float | None = None) -> dict[str, bytes]:
    """The comparison as a page and as data, by the suffix of the file that is to hold it."""
    from regrow.show.comparison_page import render_comparison

    names = labels(runs)
    content = {
        "runs": [
            {
                "name": name,
                "folder": run.folder,
                "tokens_per_s": median_speed(run),
                "validation_loss": validation_loss(run),
                "report": run.report,
            }
            for name, run in zip(names, runs, strict=True)
        ],
        "differing_settings": differing_settings(runs),
        "agreement_with_first": {
            name: vars(agreement(runs[0], run)) for name, run in zip(names[1:], runs[1:], strict=True)
        },
    }
    page = render_comparison(runs, names, time.time() if now is None else now)
    return {
        ".json": json.dumps(content, indent=2, allow_nan=False).encode() + b"\n",
        ".html": page.encode("utf-8", "replace"),
    }


def _versions(events: Sequence[Row]) -> dict[str, str]:
    """What the newest submission was made of."""
    submitted = [event for event in events if event["event"] == "submitted"][-1:]
    newest = submitted[0] if submitted else {}
    versions = newest.get("versions")
    found = {"commit": str(newest["git"])} if newest.get("git") else {}
    return found | {f"version of {k}": str(v) for k, v in (versions.items() if isinstance(versions, Mapping) else ())}
