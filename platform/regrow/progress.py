"""How far work is, and how far it goes; `show.console` shows it."""

from collections.abc import Callable
from typing import NamedTuple


class Task(NamedTuple):
    """A part of long work, whose progress is shown."""

    name: str
    unit: str = ""  # of what is done: `B` for bytes, else a plural; empty where it cannot be counted


Progress = Callable[[Task, float, float], None]  # (task, done, total); a task ends when done == total


def last_step(steps: int, stop_at_step: int | None) -> int:
    """The step at which this attempt at a run of so many steps ends."""
    return min(steps, stop_at_step or steps)
