"""What long work tells of how far it is; `show.console` shows it."""

from collections.abc import Callable
from typing import NamedTuple


class Task(NamedTuple):
    """A part of long work, whose progress is shown."""

    name: str
    unit: str = ""  # of what is done: `B` for bytes, else a plural; empty where it cannot be counted


Progress = Callable[[Task, float, float], None]  # (task, done, total); a task ends when done == total
