"""Partitions and slow links for `detection.py`: one drill on hosts apart (as root), as its own log and the run's tell.

Three hosts and three ranks: a link of 20 Mbit/s for so long that it is to be named; then a host's packets to the head
are dropped, while its peers are still heard and hear it, and another host comes at once. Named: the event that has the
host. At full speed: the first step of a later group of all ranks. Stock Ray Train was not run on hosts apart.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Result, side_env

from regrow.record.log import METRICS, Tail, read_events
from regrow.storage import Storage

RANKS = 3
LINK, PARTITION = "slow_link", "partition_head"
NAMES = {LINK: "slow_link", PARTITION: "one_way_partition"}
ROUND = [  # the first wait is for collectives to compare with
    f"with {RANKS} ranks: look",
    f"after 45 s: {LINK} rank=1 rate_mbit=20 for_s=100",
    f"after 110 s: {PARTITION} rank=1 one_way=1 for_s=40 and return_node",
]
ROUND_S, LOOK_S, END_S = 600, 2.0, 120  # the first and the last with what a busy machine adds

Row = dict[str, Any]


def on_hosts_apart(result: Result, storage: Path, rounds: int) -> list[str]:
    """Add seconds until each was named, and until all ranks trained again; what failed."""
    plan, folder = [*ROUND * rounds, ROUND[0]], storage / "apart"
    command = [
        *(sys.executable, "-m", "jobs.drill", "drill.hosts=apart", f"drill.nodes={RANKS}", "drill.reference=false"),
        *(f"cluster.max_workers={RANKS}", f"drill.plan={json.dumps(plan)}"),
        *("run.name=apart", f"run.storage_path={storage}", "train.steps=200000", "train.stop_at_step=null"),
    ]
    failures: list[str] = []
    with open(storage / "drill.out", "wb") as out:
        drill = subprocess.Popen(command, env=side_env(), stdout=out, stderr=out, start_new_session=True)
        give_up_at = time.monotonic() + ROUND_S * rounds
        while drill.poll() is None and len(_faults(folder)) < len(plan_parts(plan)) and time.monotonic() < give_up_at:
            time.sleep(LOOK_S)
        drill.send_signal(signal.SIGTERM)  # it has nothing more to do, and no step to end at
        try:
            drill.wait(END_S)
        except subprocess.TimeoutExpired:
            drill.kill()
    faults = _faults(folder)
    if len(faults) < len(plan_parts(plan)):
        failures.append(f"hosts apart: only {len(faults)} of {len(plan_parts(plan))} faults: {_last_line(storage)}")
    events, rows = read_events(Storage.at(str(folder))), Tail(folder / METRICS).read()[0]
    found = [met(fault, events, rows) for fault in faults if fault["kind"] in NAMES]
    for kind, name in NAMES.items():
        for what in ("named_s", "full_speed_s") if kind == PARTITION else ("named_s",):
            values = [each[what] for each in found if each["fault"] == name and each[what] is not None]
            if values:
                result.add(f"{name}_{what}", values)
    result.runs["hosts_apart"] = {"samples": found, "rounds": rounds, "round": ROUND}
    return failures + [f"never named: {each}" for each in found if each["named_s"] is None]


def met(fault: Row, events: Sequence[Row], rows: Sequence[Row]) -> Row:
    """What came of a fault; None: it was not seen."""
    at, node = fault["time"], fault["victims"][0]["node"]
    named = (event["time"] for event in events if event["time"] >= at and _names(event, node))
    full = (
        row["time"]
        for row in rows
        if row["generation"] > fault["generation"] and row["world_size"] == RANKS and row["time"] > at
    )
    named_at, full_at = next(named, None), next(full, None) if fault["kind"] == PARTITION else None
    return {
        "fault": NAMES[fault["kind"]],
        "named_s": named_at and named_at - at,
        "full_speed_s": full_at and full_at - at,
    }


def plan_parts(plan: Sequence[str]) -> list[str]:
    """A fault each."""
    return [part for line in plan for part in line.split(": ", 1)[1].split(" and ")]


def _faults(folder: Path) -> list[Row]:
    return [line for line in Tail(folder / "drill.jsonl").read()[0] if line["record"] == "fault"]


def _last_line(storage: Path) -> str:
    return (storage / "drill.out").read_text(errors="replace").strip().rpartition("\n")[2]


def _names(event: Row, node: str) -> bool:
    if event["event"] == "suspected":
        return event["node"] == node and event["kind"] == "slow_link"
    return event["event"] == "failure" and node in (event.get("nodes") or [])
