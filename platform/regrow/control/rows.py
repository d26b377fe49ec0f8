"""Which steps have a row in the log. Rows that died with a coordinator or a rank are asked for again. Pure."""

from collections.abc import Mapping
from typing import Any

from regrow.control.commands import BeginRows, LogRow, Outbox
from regrow.control.events import Row, RowsAgain
from regrow.record.log import METRIC_KEYS


class Rows:
    """A row a step, in order; one whose step has one already was sent again."""

    def __init__(self, out: Outbox, *, logged: int) -> None:
        """`logged` is the last step that has a row; an earlier coordinator may have had more."""
        self._out, self.next_step = out, logged + 1
        self.trained = logged  # the newest step that is known of, with a row or still without
        self._has_begun = False  # rows of a group

    def begin(self, generation: int, start_step: int) -> int:
        """A group trains from `start_step`: later rows of those before are taken back, so many.

        Where none came of the last steps before that, rank 0 was lost, or cut off, before it could send them; the
        other ranks have them, too.
        """
        recomputed = max(0, self.next_step - 1 - start_step)
        self._begin(generation, min(start_step, self.next_step - 1))
        self.trained = start_step
        return recomputed

    def go_on(self, generation: int, start_step: int) -> None:
        """A group goes on that another coordinator saw begin."""
        self._begin(generation, self.next_step - 1)
        self.trained = max(self.trained, start_step)

    def take(self, event: Row | RowsAgain) -> tuple[Mapping[str, Any] | None, int | None]:
        """Have rows logged: the newest, if that is new, and the step from which rows are wanted first, if any is.

        Rows may have gone with a coordinator or a rank 0, and those on their way to a coordinator that dies come to the
        next one in any order, what was asked for too: rank 0 keeps rows, and is asked for all from the first one on.
        """
        if isinstance(event, RowsAgain):
            since, rows = event.since, event.rows
        else:
            since, rows = event.row["step"], [event.row]
        self.trained = max([self.trained, *(row["step"] for row in rows)])
        if since > self.next_step:
            return None, self.next_step
        if rows and (first := rows[0]["step"]) > self.next_step:
            self._out.record("note", text=f"rows before step {first} went with the processes that had them")
            self._begin(event.generation, first - 1)
        newest = None
        for row in rows:
            newest = row if self._log(row, event.generation) else newest
        return newest, None

    def _log(self, row: Mapping[str, Any], generation: int) -> bool:
        step = row["step"]
        if step < self.next_step:  # sent again, after a restart
            return False
        missing = [key for key in METRIC_KEYS if key not in row]
        assert not missing, f"metrics row without {missing}"
        assert step == self.next_step, f"row of step {step}, expected {self.next_step}"
        if not self._has_begun:  # of a group whose beginning is not in the log
            self._begin(generation, step - 1)
        self.next_step = step + 1
        is_late = row["generation"] != generation  # as one of a group that had nothing left to train
        self._out.append(LogRow(row, is_late))
        return True

    def _begin(self, generation: int, start_step: int) -> None:
        self.next_step, self._has_begun = start_step + 1, True
        self._out.append(BeginRows(generation, start_step))
