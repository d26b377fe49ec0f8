"""Whole jobs for `detection.py`: ours, and stock Ray Train as it comes and tuned, on raylets of this machine.

To each side the same is done: a worker's process is killed, a node with all its processes (another comes at once), a
rank goes on running and takes no further step (`train.orders`, as where a kernel hangs or a thread waits for nothing);
to ours also in a validation, and one rank's steps are made 15% longer, for which stock has no notion.
Named: ours, the event that has the process or node. Stock names none. At full speed: the first step of a later group of
all ranks. A side that has not done it after GIVEN_UP_S is given up.
"""

import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import Result
from benchmarks.recovery_cluster import Cluster
from benchmarks.recovery_faults import wait_until_settled
from benchmarks.recovery_samples import DEFAULT, OURS, TUNED
from benchmarks.recovery_sides import (
    MOST_WORKERS,
    Ours,
    Side,
    SideFailed,
    Stock,
    Worker,
    environment_of,
    prepare_corpus,
    wait_for,
    write_config,
)
from benchmarks.recovery_steps import newest_group

from regrow.drill.processes import send
from regrow.train.orders import HANG, ORDERS, SLOW, Order

WHOLE_JOBS = "whole_jobs"
WORKER, NODE, HUNG, IN_VALIDATION, SLOWER = "process_death", "node_death", "hang", "hang_in_validation", "slow_rank"
OF_ALL, OF_OURS = (WORKER, NODE, HUNG), (WORKER, NODE, HUNG, IN_VALIDATION, SLOWER)
NAMED_BY = ("failure", "suspected")  # events
SETTLED_STEPS = 10
GIVEN_UP_S = {OURS: 300.0, DEFAULT: 120.0, TUNED: 120.0}
SLOWER_BY = 0.15
SETTINGS = ["train.validate_every_steps=20", "cluster.quarantine_failures=0"]  # each node suffers many


class Trial:
    """One run of a side, to which faults are done in turn."""

    def __init__(self, side: Side, orders: Path) -> None:
        self.side, self.orders, self.given_up_s = side, orders, GIVEN_UP_S[side.name]

    def meet(self, fault: str, dice: random.Random) -> dict[str, Any]:
        """What came of a fault: seconds until it was named, and until all ranks trained again; None: given up."""
        wait_until_settled(self.side, SETTLED_STEPS, world_size=MOST_WORKERS)
        group, victim = newest_group(self.side.trail.look()), dice.choice(self.side.workers())
        at = self._do(fault, victim)
        named_at = self._wait(lambda: self._named_at(victim, at)) if isinstance(self.side, Ours) else None
        full_at = self._wait(lambda: self._full_at(group)) if fault != SLOWER else None
        if fault == SLOWER:
            (self.orders / f"{victim.pid}.json").unlink()
        return {
            "side": self.side.name,
            "fault": fault,
            "named_s": named_at and named_at - at,
            "full_speed_s": full_at and full_at - at,
        }

    def _do(self, fault: str, victim: Worker) -> float:
        """When it was done."""
        if fault == NODE:
            killed_at = self.side.cluster.kill_node(victim.node)
            self.side.cluster.add_node()
            return killed_at
        at = time.time()
        if fault == WORKER:
            send(signal.SIGKILL, [victim.pid])
        elif fault == SLOWER:
            Order(SLOW, share=SLOWER_BY, until=at + self.given_up_s).leave(self.orders, victim.pid)
        else:
            phase = "validation" if fault == IN_VALIDATION else "step"
            Order(HANG, phase=phase).leave(self.orders, victim.pid)
            begun = self.orders / f"{victim.pid}.hangs"
            wait_for(begun.exists, self.side, self.given_up_s, "a rank that hangs")
            at = begun.stat().st_mtime
        return at

    def _named_at(self, victim: Worker, at: float) -> float | None:
        assert isinstance(self.side, Ours)
        for event in sorted((e for name in NAMED_BY for e in self.side.job.events(name)), key=lambda e: e["time"]):
            if event["time"] >= at:
                said = f"{event.get('detail', '')} {event.get('pid', '')} {event.get('node', '')}"
                if str(victim.pid) in said or victim.node[:12] in said:
                    return float(event["time"])
        return None

    def _full_at(self, group: int) -> float | None:
        steps = self.side.trail.look()
        return next((each.time for each in steps if each.group > group and each.world_size == MOST_WORKERS), None)

    def _wait(self, condition: Any) -> float | None:
        try:
            return float(wait_for(condition, self.side, self.given_up_s, "what follows a fault"))
        except SideFailed:
            if self.side.status() is not None:
                raise
            return None


@contextmanager
def running(name: str, storage: Path, number: int) -> Iterator[Trial]:
    """A run of a side, and its cluster."""
    orders = storage / f"orders-{name}-{number}".replace(" ", "-")
    orders.mkdir()
    with Cluster(MOST_WORKERS, environment_of(name) | {ORDERS: str(orders)}) as cluster:
        run = orders.name.removeprefix("orders-")
        if name == OURS:
            with Ours(cluster, storage, run, SETTINGS) as ours:
                yield Trial(ours, orders)
            return
        config = write_config(storage / f"config-{number}")
        corpus = prepare_corpus(config, storage)
        with Stock(cluster, storage, run, corpus=corpus, config=config, tuned=name == TUNED) as stock:
            yield Trial(stock, orders)


def of_whole_jobs(
    result: Result,
    storage: Path,
    rounds: int,
    stock_rounds: int,
    sides: Sequence[str],
    earlier: Sequence[dict[str, Any]] = (),
) -> list[str]:
    """Add what was measured, samples of earlier calls included; what failed.

    A side that is given up is ended, and its next round begins anew.
    """
    found = list(earlier)
    failures: list[str] = []
    for name in sides:
        faults = OF_OURS if name == OURS else OF_ALL
        first = sum((each["side"], each["fault"]) == (name, WORKER) for each in earlier)
        numbers = range(first, first + (rounds if name == OURS else stock_rounds))
        left = [(number, fault) for number in numbers for fault in faults]
        while left:
            try:
                with running(name, storage, len(left)) as trial:
                    while left:
                        number, fault = left.pop(0)
                        met = trial.meet(fault, random.Random(f"{number} {fault}"))
                        print(met, flush=True)
                        found.append(met)
                        if fault != SLOWER and met["full_speed_s"] is None:
                            break
            except SideFailed as failure:
                print(f"FAILED {name}: {failure}", flush=True)
                failures.append(f"{name}: {failure}".splitlines()[0])
    _summarize(result, found)
    return failures


def _summarize(result: Result, found: Sequence[dict[str, Any]]) -> None:
    for name in dict.fromkeys(each["side"] for each in found):
        for fault in OF_OURS:
            met = [each for each in found if each["side"] == name and each["fault"] == fault]
            for what in ("named_s", "full_speed_s"):
                values = [each[what] for each in met if each[what] is not None]
                key = f"{fault}_{what}" if name == OURS else f"{name}_{fault}_{what}".replace(" ", "_")
                if values:
                    result.add(key, values)
            given_up = sum(each["full_speed_s"] is None for each in met if fault != SLOWER)
            if given_up:
                result.runs[f"{name}_{fault}_given_up".replace(" ", "_")] = {"of": len(met), "given_up": given_up}
    result.runs[WHOLE_JOBS] = {"samples": list(found), "given_up_s": GIVEN_UP_S}
