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

from regrow.drill.faults import parse_plan
from regrow.drill.findings import find
from regrow.drill.log import Record, RunFollower

HOSTS_APART = "hosts_apart"
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


def on_hosts_apart(result: Result, storage: Path, rounds: int, earlier: Sequence[Row] = ()) -> list[str]:
    """Add seconds until each was named, and until all ranks trained again, earlier calls' too; what failed."""
    plan, folder = [*ROUND * rounds, ROUND[0]], storage / "apart"
    num_faults = len(parse_plan(plan))
    command = [
        *(sys.executable, "-m", "jobs.drill", "drill.hosts=apart", f"drill.nodes={RANKS}", "drill.reference=false"),
        *(f"cluster.max_workers={RANKS}", f"drill.plan={json.dumps(plan)}"),
        *("run.name=apart", f"run.storage_path={storage}", "train.steps=200000", "train.stop_at_step=null"),
    ]
    failures: list[str] = []
    with open(storage / "drill.out", "wb") as out:
        drill = subprocess.Popen(command, env=side_env(), stdout=out, stderr=out, start_new_session=True)
        give_up_at = time.monotonic() + ROUND_S * rounds
        while drill.poll() is None and len(_faults(folder)) < num_faults and time.monotonic() < give_up_at:
            time.sleep(LOOK_S)
        drill.send_signal(signal.SIGTERM)  # it has nothing more to do, and no step to end at
        try:
            drill.wait(END_S)
        except subprocess.TimeoutExpired:
            drill.kill()
    faults = _faults(folder)
    if len(faults) < num_faults:
        failures.append(f"hosts apart: only {len(faults)} of {num_faults} faults: {_last_line(storage)}")
    watch = RunFollower(folder)
    watch.poll()
    found = [*earlier, *(met(fault, watch.events, watch.rows) for fault in faults if fault["kind"] in NAMES)]
    for kind, name in NAMES.items():
        for what in ("named_s", "full_speed_s") if kind == PARTITION else ("named_s",):
            values = [each[what] for each in found if each["fault"] == name and each[what] is not None]
            if values:
                result.add(f"{name}_{what}", values)
    result.runs[HOSTS_APART] = {"samples": found, "rounds": len(found) // len(NAMES), "round": ROUND}
    return failures + [f"never named: {each}" for each in found if each["named_s"] is None]


def met(fault: Row, events: Sequence[Row], rows: Sequence[Row]) -> Row:
    """What came of a fault; None: it was not seen."""
    at, node = fault["time"], fault["victims"][0]["node"]
    if fault["kind"] == LINK:
        return {"fault": NAMES[LINK], "named_s": find(fault, [], events, rows, 0).seconds, "full_speed_s": None}
    named = (
        event["time"]
        for event in events
        if event["event"] == "failure" and event["time"] >= at and node in (event.get("nodes") or [])
    )
    full = (
        row["time"]
        for row in rows
        if row["generation"] > fault["generation"] and row["world_size"] == RANKS and row["time"] > at
    )
    named_at, full_at = next(named, None), next(full, None)
    return {
        "fault": NAMES[PARTITION],
        "named_s": named_at and named_at - at,
        "full_speed_s": full_at and full_at - at,
    }


def _faults(folder: Path) -> list[Row]:
    return [line for line in Record(folder).read() if line["record"] == "fault"]


def _last_line(storage: Path) -> str:
    return (storage / "drill.out").read_text(errors="replace").strip().rpartition("\n")[2]
