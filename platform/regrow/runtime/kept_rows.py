"""Rows of metrics that a rank keeps after it has sent them: a coordinator that dies takes along what is not stored.

They are in the node's memory, too, beside its snapshots: a process that dies while no coordinator listens leaves them
to the next one there, which may go on from a snapshot that was newer than the log.

Their time is `time.monotonic()` while they are kept, and the coordinator's once rank 0 sends them: a rank knows that
clock while it is rank 0 only.
"""

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

MOST = 5_000  # rows, some 2 KB each; an outage of storage that lasts for more steps leaves a gap in the log
ROWS = "rows-"  # files in a keeper's folder, a process each: lines of a row each
KEPT_AT = "monotonic_s"  # of a row; rows of before 2026-11-28 have a `time` instead
MOST_IN_FILE = 2_000  # beyond which the older half is left out


class KeptRows:
    """Of a process that may be rank 0 in any of its generations."""

    def __init__(self, most: int = MOST) -> None:
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=most)
        self._generation = 0
        self._path: Path | None = None
        self._in_file = 0
        self.clock: Callable[[], float] = time.time  # by which rows are sent

    def keep_in(self, folder: Path) -> None:
        """Beside the node's snapshots from now on; with what a process that is gone has left there of the newest
        generation, where this one has none. Again: nothing."""
        if self._path is not None:
            return
        self._path = folder / f"{ROWS}{os.getpid()}"
        gone = [path for path in folder.glob(f"{ROWS}*") if path == self._path or not _is_alive(path)]
        left = {path: rows for path in gone if (rows := _read(path))}
        newest = max(left, key=lambda path: (left[path][-1]["generation"], len(left[path])), default=None)
        if newest is not None and not self._rows:
            seat, self._generation = self._generation, left[newest][-1]["generation"]
            self._rows.extend(left[newest])
            self.was_in(max(seat, self._generation))
        for path in gone:  # another one that is new here may look, too
            if path != newest:
                path.unlink(missing_ok=True)
        self._write()

    def was_in(self, generation: int) -> None:
        """This process has a seat in a group, which may break before it trains. Where it had none in the one before,
        the rows that it has may be of steps that were trained again without it."""
        if generation > self._generation + 1:
            self._rows.clear()
        self._generation = generation

    def begin(self, generation: int, start_step: int) -> None:
        """A group trains from `start_step`: later rows are taken back."""
        self.was_in(generation)
        self.clock = time.time
        while self._rows and self._rows[-1]["step"] > start_step:
            self._rows.pop()
        self._write()

    def add(self, row: Mapping[str, Any]) -> None:
        if self._rows and row["step"] != self._rows[-1]["step"] + 1:
            self._rows.clear()
        row = {**row, KEPT_AT: time.monotonic()}
        self._rows.append(row)
        if self._path is not None and self._in_file < MOST_IN_FILE:
            self._in_file += 1
            with contextlib.suppress(OSError), open(self._path, "a") as file:  # its memory may be full
                file.write(json.dumps(row) + "\n")
        else:
            self._write()

    def _write(self) -> None:
        """The file anew: the newest rows."""
        if self._path is not None:
            rows = list(self._rows)[-MOST_IN_FILE // 2 :]
            self._in_file = len(rows)
            with contextlib.suppress(OSError):
                self._path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def newest(self) -> list[Mapping[str, Any]]:
        """The last one, or none."""
        return self._sent(list(self._rows)[-1:])

    def since(self, step: int) -> list[Mapping[str, Any]]:
        """One after another up to the newest, from this step on, or from the first that there is."""
        return self._sent(row for row in self._rows if row["step"] >= step)

    def _sent(self, rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        ahead_s = self.clock() - time.monotonic()
        return [_timed(row, ahead_s) for row in rows]


def _timed(row: Mapping[str, Any], ahead_s: float) -> Mapping[str, Any]:
    rest = {key: value for key, value in row.items() if key != KEPT_AT}
    return {**rest, "time": row[KEPT_AT] + ahead_s} if KEPT_AT in row else rest


def _is_alive(path: Path) -> bool:
    """The process whose rows these are."""
    return Path("/proc", path.name.removeprefix(ROWS)).exists()


def _read(path: Path) -> list[Mapping[str, Any]]:
    """As far as they follow one another: a process that was killed may have left a part of one."""
    rows: list[Mapping[str, Any]] = []
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if rows and row["step"] != rows[-1]["step"] + 1:
                rows.clear()
            rows.append(row)
    return rows
