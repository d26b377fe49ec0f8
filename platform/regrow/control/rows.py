"""Which steps have a row in the log. Rows that died with a coordinator or a rank are asked for again. Pure."""

from collections.abc import Mapping
from typing import Any

from regrow.control.commands import BeginRows, LogRow, Outbox
from regrow.control.events import Row, RowsAgain
from regrow.record.log import METRIC_KEYS


class Rows:
    """A row a step, in order; one whose step has one already was sent again."""

    def __init__(self, out: Outbox, *, logged: int, may_be_missing: bool) -> None:
        """`logged` is the last step that has a row; `may_be_missing`: an earlier coordinator may have had more."""
        self._out, self.next_step, self._may_be_missing = out, logged + 1, may_be_missing
        self.trained = logged  # the newest step that is known of, with a row or still without

    def begin(self, generation: int, start_step: int) -> int:
        """A group trains from `start_step`: later rows of those before are taken back, so many.

        Where none came of the last steps before that, rank 0 was lost, or cut off, before it could send them; the
        other ranks have them, too.
        """
        recomputed = max(0, self.next_step - 1 - start_step)
        self._may_be_missing = self._may_be_missing or start_step >= self.next_step
        self._begin(generation, min(start_step, self.next_step - 1) if self._may_be_missing else start_step)
        self.trained = start_step
        return recomputed

    def go_on(self, generation: int, start_step: int) -> None:
        """A group goes on that another coordinator saw begin."""
        self._begin(generation, self.next_step - 1)
        self.trained = max(self.trained, start_step)

    def take(self, event: Row | RowsAgain) -> tuple[Mapping[str, Any] | None, int | None]:
        """Have rows logged: the newest, if that is new, and the step from which rows are wanted first, if any is."""
        if isinstance(event, RowsAgain):
            newest = None
            if event.rows and self._may_lack_some_before(first := event.rows[0]["step"]):
                self._out.record("note", text=f"rows before step {first} went with the processes that had them")
                self._begin(event.generation, first - 1)
            for row in event.rows:
                newest = row if self._log(row, is_late=True) else newest
            return newest, None
        if self._may_lack_some_before(event.row["step"]):
            return None, self.next_step
        is_late = event.row["generation"] != event.generation  # of a group that had nothing left to train
        return event.row if self._log(event.row, is_late=is_late) else None, None

    def _may_lack_some_before(self, step: int) -> bool:
        """Whether rows before that of this step, which is trained, may have gone with a coordinator or a rank 0."""
        self.trained = max(self.trained, step)
        return step > self.next_step and self._may_be_missing

    def _log(self, row: Mapping[str, Any], *, is_late: bool = False) -> bool:
        step = row["step"]
        if step < self.next_step:  # sent again, after a restart
            return False
        missing = [key for key in METRIC_KEYS if key not in row]
        assert not missing, f"metrics row without {missing}"
        assert step == self.next_step, f"row of step {step}, expected {self.next_step}"
        self._may_be_missing = False
        self.next_step, self.trained = step + 1, max(self.trained, step)
        self._out.append(LogRow(row, is_late))
        return True

    def _begin(self, generation: int, start_step: int) -> None:
        self.next_step = start_step + 1
        self._out.append(BeginRows(generation, start_step))
