"""Rows of metrics that a rank keeps after it has sent them: a coordinator that dies takes along what is not stored."""

from collections import deque
from collections.abc import Mapping
from typing import Any

MOST = 5_000  # rows, some 2 KB each; an outage of storage that lasts for more steps leaves a gap in the log


class KeptRows:
    """Of a process that may be rank 0 in any of its generations."""

    def __init__(self, most: int = MOST) -> None:
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=most)
        self._generation = 0

    def begin(self, generation: int, start_step: int) -> None:
        """A group trains from `start_step`: later rows are taken back. Where this process was not in the generation
        before, those that it has may be of steps that were trained again without it."""
        if generation > self._generation + 1:
            self._rows.clear()
        self._generation = generation
        while self._rows and self._rows[-1]["step"] > start_step:
            self._rows.pop()

    def add(self, row: Mapping[str, Any]) -> None:
        if self._rows and row["step"] != self._rows[-1]["step"] + 1:
            self._rows.clear()
        self._rows.append(row)

    def newest(self) -> list[Mapping[str, Any]]:
        """The last one, or none."""
        return list(self._rows)[-1:]

    def since(self, step: int) -> list[Mapping[str, Any]]:
        """One after another up to the newest, from this step on, or from the first that there is."""
        return [row for row in self._rows if row["step"] >= step]
