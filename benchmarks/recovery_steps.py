"""What the steps that a side has finished tell of a fault: when it went on, what it lost, how long it stood still.

Both sides write a line when a step has ended; everything is read from those lines. A group is what trained together
until the next change: our generations, Ray Train's attempts.
"""

import itertools
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEDIAN_OF = 20  # last steps of a group, for how long its steps take


@dataclass(frozen=True, order=True)
class Step:
    """A finished step, as rank 0 wrote it down."""

    time: float  # unix, when it had ended
    number: int
    group: int  # later ones are larger
    world_size: int


@dataclass(frozen=True)
class Resumption:
    """How training went on after a fault."""

    any_at: float  # unix, when the next group's first step had ended
    new_at: float  # and its first one past all that had been finished before
    lost_steps: int  # finished before, and trained again
    world_size: int
    stood_still_s: float  # from the last step of the old group to the first new one, less a step of the old group


class Trail:
    """All steps that were ever in a file, those too that were taken back since."""

    def __init__(self, file: Path, parse: Callable[[dict[str, Any]], Step]) -> None:
        self._file, self._parse = file, parse
        self._seen: set[Step] = set()
        self._inode, self._offset = 0, 0

    def look(self) -> list[Step]:
        """Every step so far, in order of time."""
        try:
            with open(self._file, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:  # written anew, steps taken back
                    self._inode, self._offset = status.st_ino, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._seen.update(self._parse(json.loads(line)) for line in whole.splitlines())
        return sorted(self._seen)


def newest_group(steps: Sequence[Step]) -> int:
    """0 where there is none yet."""
    return max((step.group for step in steps), default=0)


def of_group(steps: Sequence[Step], group: int) -> list[Step]:
    return [step for step in steps if step.group == group]


def median_step_s(steps: Sequence[Step], group: int) -> float:
    """From the end of one step to the end of the next. The group has finished at least two."""
    times = [step.time for step in of_group(steps, group)][-MEDIAN_OF - 1 :]
    return statistics.median(after - before for before, after in itertools.pairwise(times))


def resumption(steps: Sequence[Step], group: int) -> Resumption | None:
    """How training went on after `group`, the newest when the fault came; None as long as it has done nothing new.

    A step of `group` that ends after the fault was finished before it went on, and counts so.
    """
    old = [step for step in steps if step.group <= group]
    later = [step for step in steps if step.group > group]
    reached = max(step.number for step in old)
    new = next((step for step in later if step.number > reached), None)
    if new is None:
        return None
    again = [step for step in later if step.time <= new.time]
    stood_still_s = new.time - old[-1].time - median_step_s(steps, group)
    return Resumption(
        any_at=again[0].time,
        new_at=new.time,
        lost_steps=reached + 1 - min(step.number for step in again),
        world_size=new.world_size,
        stood_still_s=max(0.0, stood_still_s),
    )
