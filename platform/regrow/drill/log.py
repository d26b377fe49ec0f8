"""A run folder from outside: its rows and events as they are written, and the drill's own record."""

import os
import time
from pathlib import Path
from typing import Any

from regrow.record.events import Row
from regrow.record.log import EVENTS, METRICS, Tail, encode
from regrow.record.relative import RelativeLists

RECORD = "drill.jsonl"


class RunFollower:
    """Reads what was added to a run's logs since the last look. Rows that were taken back are read anew."""

    def __init__(self, folder: Path) -> None:
        self._metrics, self._events = Tail(folder / METRICS), Tail(folder / EVENTS)
        self.rows: list[Row] = []
        self.events: list[Row] = []
        self.num_rows_read = 0
        self._lists = RelativeLists()

    def poll(self) -> None:
        rows, anew = self._metrics.read()
        if anew:
            self.rows = []
        for row in rows:
            if "step" in row:
                while self.rows and self.rows[-1]["step"] >= row["step"]:
                    self.rows.pop()
                self.rows.append(row)
        self.num_rows_read += len(rows)
        self.events += map(self._lists.whole, self._events.read()[0])

    @property
    def step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def generations(self) -> list[Row]:
        return [event for event in self.events if event["event"] == "generation"]

    @property
    def trains(self) -> bool:
        """Whether the newest group has done a step, and nothing has broken it since, as far as was written."""
        newest = next((each for each in reversed(self.events) if each["event"] in ("generation", "failure")), None)
        if newest is None or newest["event"] == "failure" or not self.rows:
            return False
        return bool(self.rows[-1]["generation"] == newest["generation"])

    def stepped_since_start(self, started_at: float) -> bool:
        """Whether a step has ended since this unix time."""
        return bool(self.rows) and self.rows[-1]["time"] > started_at


class Record:
    """The drill's own log: what it did, when, and what it saw. Lines are added, over all of its attempts."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD
        self.session = sum(1 for line in self.read() if line["record"] == "job started" and line["why"] == "start")

    def write(self, record: str, /, **fields: Any) -> Row:
        """Add a line; what it holds."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        at = fields.pop("at", None) or time.time()
        line = {"time": at, "record": record} | fields
        with open(self.path, "ab") as file:
            file.write(encode(line))
            file.flush()
            os.fsync(file.fileno())
        return line

    def read(self) -> list[Row]:
        return Tail(self.path).read()[0]

    def next_fault(self) -> int:
        """The number of the first fault that was not carried out yet."""
        return 1 + max(
            (line["number"] for line in self.read() if line["record"] in ("fault", "not injected")), default=-1
        )

    def ended_at(self) -> int | None:
        """The step at which its plan was over, where none was set beforehand. What stands behind that is of a longer
        plan, which is not over."""
        ends = (line for line in reversed(self.read()) if line["record"] in ("plan over", "fault", "not injected"))
        return next((line["step"] if line["record"] == "plan over" else None for line in ends), None)
