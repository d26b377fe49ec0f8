"""What is done to a side, and what comes of it: one sample for each fault, measured from outside, the same for all."""

import os
import random
import signal
import time

from benchmarks.recovery_cluster import Watch
from benchmarks.recovery_samples import HANG, NODE, OF_OURS, REGROW, WORKER, Sample
from benchmarks.recovery_sides import CHECKPOINT_EVERY_STEPS, MOST_WORKERS, Side, SideFailed, Worker, wait_for
from benchmarks.recovery_steps import Resumption, median_step_s, newest_group, of_group, resumption

from regrow.drill.processes import is_alive, send

START_S, RESUME_S = 300.0, 300.0  # deadlines: for a group of the size that is wanted, and for what follows a fault


class Trial:
    """One run of a side, to which faults are done in turn."""

    def __init__(self, side: Side, *, settled_steps: int, hang_wait_s: float) -> None:
        self.side, self.settled_steps, self.hang_wait_s = side, settled_steps, hang_wait_s

    def meet(self, fault: str, number: int, dice: random.Random) -> Sample:
        """Wait until the group is ready for a fault, do it, and wait for what comes.

        `number` is the round's; `dice` choose the rank and the instant. Raises SideFailed.
        """
        trail, world_size = self.side.trail, MOST_WORKERS - 1 if fault == REGROW else MOST_WORKERS
        group = wait_until_settled(self.side, self.settled_steps, world_size=world_size)
        # anywhere between two checkpoints of the stock sides
        time.sleep(dice.uniform(0, CHECKPOINT_EVERY_STEPS * median_step_s(trail.look(), group)))
        victim, load = dice.choice(self.side.workers()), os.getloadavg()[0]
        group = newest_group(trail.look())
        watch = self._watch(fault, victim)
        try:
            at = self._do(fault, victim)
            found, waited_s = self._wait(fault, group, at)
        finally:
            if watch is not None:
                watch.end()
        return Sample(
            side=self.side.name,
            round=number,
            fault=fault,
            new_step_s=found.new_at - at if found else None,
            any_step_s=found.any_at - at if found else None,
            visible_s=watch.at - at if watch and watch.at else None,
            lost_steps=found.lost_steps if found else None,
            stood_still_s=found.stood_still_s if found else None,
            step_s=median_step_s(trail.look(), group),
            waited_s=waited_s,
            ranks=(of_group(trail.look(), group)[-1].world_size, found.world_size if found else 0),
            load=load,
            restore_s=self.side.restore_s() if found else None,
        )

    def _watch(self, fault: str, victim: Worker) -> Watch | None:
        """For the moment from which a side could know."""
        if fault == NODE:
            return Watch(lambda: self.side.cluster.knows_dead(victim.node))
        return Watch(lambda: not is_alive(victim.pid)) if fault == WORKER else None

    def _do(self, fault: str, victim: Worker) -> float:
        """When it was done."""
        if fault == NODE:
            return self.side.cluster.kill_node(victim.node)
        if fault == REGROW:
            return self.side.cluster.add_node()
        if fault == WORKER:
            send(signal.SIGKILL, [victim.pid])
        else:
            send(signal.SIGSTOP, [victim.pid])
        return time.time()

    def _wait(self, fault: str, group: int, at: float) -> tuple[Resumption | None, float]:
        """How training went on, and how long it took to see. None for a stock side that bears a hang for too long."""
        trail, bears = self.side.trail, fault == HANG and self.side.name not in OF_OURS
        timeout_s = self.hang_wait_s if bears else RESUME_S
        found: Resumption | None = None
        try:
            found = wait_for(lambda: resumption(trail.look(), group), self.side, timeout_s, f"a step after a {fault}")
        except SideFailed:
            if not bears or self.side.status() is not None:
                raise
        return found, time.time() - at


def wait_until_settled(side: Side, num_steps: int, *, world_size: int) -> int:
    """Until the newest group is of that size and has finished so many steps; which it is. Raises SideFailed."""

    def settled() -> bool:
        steps = side.trail.look()
        newest = of_group(steps, newest_group(steps))
        return len(newest) >= num_steps and newest[-1].world_size == world_size

    wait_for(settled, side, START_S, f"{num_steps} steps of {world_size} ranks")
    return newest_group(side.trail.look())
