"""What became of a run, from its two logs: report.json and report.html. See docs/file-formats.md."""

import json
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from regrow.config.schema import PretrainConfig
from regrow.record.events import Cause, Checkpoint, DataFallback, Generation
from regrow.record.history import History, recoveries
from regrow.record.ledger import Ledger, lost_to
from regrow.record.log import LogReader, is_number, positive
from regrow.record.run_folder import begun_at, read_node_snapshots, read_ranks
from regrow.record.work import work_of
from regrow.show.page import run_page
from regrow.storage import Storage

Config = PretrainConfig | Mapping[str, Any]


def build_report(history: History, ledger: Ledger, config: Config) -> dict[str, Any]:
    """The content of report.json, with the history's own ledger. What the logs do not tell is None. Pure."""
    rows, wall_s = list(history.rows), ledger.end - ledger.begin
    last = rows[-1] if rows else {}
    generations, checkpoints = history.of(Generation), history.of(Checkpoint)
    loss = last.get("loss")
    work = work_of(ledger, rows, history.events, as_mapping(config))
    return {
        "steps": last.get("step") or (generations[-1].start_step if generations else 0),
        "tokens": last.get("tokens_seen"),
        "final_loss": loss if is_number(loss) else None,
        "wall_s": round(wall_s, 6),
        "goodput": round(ledger.time_s["productive"] / wall_s, 6) if wall_s > 0 else None,
        "effective": _rounded(work.effective),
        "paid": _rounded(work.paid),
        "capacity_goodput": _rounded(work.capacity_goodput),
        "time_s": {state: round(seconds, 6) for state, seconds in ledger.time_s.items()},
        "work": {
            "full_step_s": _rounded(work.full_step_s),
            "is_measured": work.is_measured,
            "useful_s": round(work.useful_s, 6),
            "slower_s": {why: round(seconds, 6) for why, seconds in work.slower_s.items()},
        },
        "lost_s": {cause: round(seconds, 6) for cause, seconds in lost_to(ledger).items()},
        "restarts": dict(Counter(each.cause for each in generations if each.cause != Cause.start)),
        "generations": len(generations),
        "recoveries": recoveries(ledger.attempts, rows, history.events),
        "data_fallbacks": sum(each.windows for each in history.of(DataFallback)),
        "checkpoints": {
            "committed": len(checkpoints),
            "stall_s": round(math.fsum(positive(each.stall_s) for each in checkpoints), 6),
        },
    }


def make_report(
    storage: Storage, config: Config, now: float | None = None, *, log: LogReader | None = None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The report of a run folder, and the content of report.json and report.html by name. Reads the logs only.

    `log` is one that is kept for the next report: it reads again only what has changed.
    """
    now = time.time() if now is None else now
    history = History.read(log or LogReader(storage))
    ledger = history.ledger(now)
    report = build_report(history, ledger, config)
    page = run_page(
        report,
        history,
        ledger,
        as_mapping(config),
        now,
        ranks=read_ranks(storage, begun_at(history)),
        node_snapshots=read_node_snapshots(storage, begun_at(history)),
    )
    return report, {
        "report.json": json.dumps(report, indent=2, allow_nan=False).encode() + b"\n",
        "report.html": page.encode("utf-8", "replace"),
    }


def write_report(
    storage: Storage, config: Config, now: float | None = None, *, log: LogReader | None = None
) -> dict[str, Any]:
    """Write report.json, then report.html, each whole or not at all, from the run folder's logs; returns the report."""
    report, files = make_report(storage, config, now, log=log)
    for name, data in files.items():
        storage.write_bytes(name, data)
    return report


def as_mapping(config: Config) -> dict[str, Any]:
    """The configuration as nested dictionaries, whether it came as dataclasses or from config.yaml."""
    return asdict(config) if is_dataclass(config) else dict(config)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
