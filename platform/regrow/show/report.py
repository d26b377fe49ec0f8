"""What became of a run, from its two logs: report.json and report.html. `build_report` is pure.

See docs/file-formats.md.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from regrow.config.schema import PretrainConfig
from regrow.errors import BatchError
from regrow.plan.topology import plan_topology
from regrow.record.ledger import SILENCE_S, STATES, Attempt, Ledger, account, lost_to, named, number
from regrow.record.log import Row, read_events, read_metrics
from regrow.storage import Storage

__all__ = ["SILENCE_S", "STATES", "Ledger", "account", "as_mapping", "build_report", "make_report", "write_report"]

Config = PretrainConfig | Mapping[str, Any]


def build_report(metrics: Sequence[Row], events: Sequence[Row], now: float, config: Config) -> dict[str, Any]:
    """The content of report.json. What the logs do not tell is None.

    `metrics` and `events` as `read_metrics` and `read_events` return them; `now` in unix seconds.
    """
    return report_of(account(metrics, events, now), metrics, events, config)


def report_of(ledger: Ledger, metrics: Sequence[Row], events: Sequence[Row], config: Config) -> dict[str, Any]:
    """As `build_report`, from a ledger that `account` made of the same logs."""
    wall_s = ledger.end - ledger.begin
    last = metrics[-1] if metrics else {}
    generations = [attempt.generation for attempt in ledger.attempts if attempt.generation]
    causes = [generation.get("cause", "unknown") for generation in generations]
    checkpoints = named(events, "checkpoint")
    return {
        "steps": last.get("step") or (generations[-1].get("start_step") or 0 if generations else 0),
        "tokens": last.get("tokens_seen"),
        "final_loss": _finite(last.get("loss")),
        "wall_s": round(wall_s, 6),
        "goodput": round(ledger.time_s["productive"] / wall_s, 6) if wall_s > 0 else None,
        "capacity_goodput": _capacity_goodput(ledger, metrics, as_mapping(config)),
        "time_s": {state: round(seconds, 6) for state, seconds in ledger.time_s.items()},
        "lost_s": {cause: round(seconds, 6) for cause, seconds in lost_to(ledger).items()},
        "restarts": dict(Counter(cause for cause in causes if cause != "start")),
        "generations": len(generations),
        "recoveries": _recoveries(ledger.attempts, metrics, events),
        "data_fallbacks": len(named(events, "data_fallback")),
        "checkpoints": {
            "committed": len(checkpoints),
            "stall_s": round(math.fsum(number(event, "stall_s") for event in checkpoints), 6),
        },
    }


def make_report(storage: Storage, config: Config, now: float | None = None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The report of a run folder, and the content of report.json and report.html by name. Reads the logs only."""
    from regrow.show.report_page import render_page

    now = time.time() if now is None else now
    metrics, events = read_metrics(storage), read_events(storage)
    ledger = account(metrics, events, now)
    report = report_of(ledger, metrics, events, config)
    page = render_page(report, ledger, metrics, events, as_mapping(config), now)
    return report, {
        "report.json": json.dumps(report, indent=2, allow_nan=False).encode() + b"\n",
        "report.html": page.encode("utf-8", "replace"),
    }


def write_report(storage: Storage, config: Config, now: float | None = None) -> dict[str, Any]:
    """Write report.json, then report.html, each whole or not at all, from the run folder's logs; returns the report."""
    report, files = make_report(storage, config, now)
    for name, data in files.items():
        storage.write_bytes(name, data)
    return report


def as_mapping(config: Config) -> dict[str, Any]:
    """The configuration as nested dictionaries, whether it came as dataclasses or from config.yaml."""
    return asdict(config) if is_dataclass(config) else dict(config)


def _recoveries(attempts: Sequence[Attempt], metrics: Sequence[Row], events: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry for each generation that was not a start, in order.

    `detect_s + regroup_s + reshard_s + first_step_s` is the time from the last sign of life (from the submission,
    where the job was started again) to the end of the first step.
    """
    undone: Counter[int] = Counter()
    for event in named(events, "rollback"):
        undone[event["generation"]] += event["steps"]
    rows = {(row["generation"], row["step"]): row for row in metrics}
    ranks_before, entries = None, []
    for attempt, before in zip(attempts, [None, *attempts[:-1]], strict=True):
        generation = attempt.generation
        if generation is None:
            continue
        if generation.get("cause", "unknown") != "start":
            first = rows.get((generation["generation"], (generation.get("start_step") or 0) + 1))
            failure = before.failure if before else None
            entries.append(
                {
                    "cause": generation.get("cause", "unknown"),
                    "ranks_before": failure.get("ranks_before", ranks_before) if failure else ranks_before,
                    "ranks_after": attempt.world_size,
                    **_stall(attempt, before, first),
                    "lost_steps": generation.get("recomputed_steps", undone[generation["generation"]]),
                    "source": generation.get("source"),
                }
            )
        ranks_before = attempt.world_size
    return entries


def _stall(attempt: Attempt, before: Attempt | None, first_row: Row | None) -> dict[str, float | None]:
    """The parts of one recovery in seconds; None where the logs do not tell."""
    generation = attempt.generation
    assert generation is not None
    detect_s, regroup_from = None, attempt.begin
    if before is not None and not attempt.submitted:
        regroup_from = before.last_life
    if before is not None and before.failure and before.first_step_begin is not None:
        detect_s = before.failure["time"] - before.last_life
        regroup_from = attempt.begin if attempt.submitted else before.failure["time"]
    restore_s = generation.get("restore_s")
    return {
        "detect_s": _seconds(detect_s),
        "regroup_s": _seconds(generation["time"] - (restore_s or 0.0) - regroup_from),
        "reshard_s": _seconds(restore_s),
        "first_step_s": _seconds(first_row["time"] - generation["time"]) if first_row else None,
    }


def _capacity_goodput(ledger: Ledger, metrics: Sequence[Row], config: Mapping[str, Any]) -> float | None:
    """Productive seconds weighted by the share of the ranks asked for that was there and not idle, over wall time."""
    num_slices, tp = config.get("optim", {}).get("num_slices"), config.get("parallel", {}).get("tp", 1)
    wall_s = ledger.end - ledger.begin
    if num_slices is None or wall_s <= 0:
        return None
    world_sizes = [row["world_size"] for row in metrics]
    most = max([config.get("cluster", {}).get("max_workers") or 1, *world_sizes])
    share = {size: size / most * _busy_share(num_slices, size, tp) for size in set(world_sizes)}
    useful = math.fsum(s * share[size] for s, size in zip(ledger.productive_s.tolist(), world_sizes, strict=True))
    return round(useful / wall_s, 6)


def _busy_share(num_slices: int, world_size: int, tp: int) -> float:
    try:
        return plan_topology(world_size, num_slices=num_slices, tp=tp).batch.busy_share
    except BatchError:
        return min(1.0, num_slices * tp / world_size)  # no such topology: the configuration changed under the run


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(max(0.0, value), 6)
