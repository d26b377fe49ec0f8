"""Which steps have a row in the log. A row that a coordinator had when it died may be missing, and only that. Pure."""

from collections.abc import Mapping
from typing import Any

from regrow.control.commands import BeginRows, Outbox
from regrow.record.log import METRIC_KEYS


class Rows:
    """A row a step, in order; one whose step has one already was sent again."""

    def __init__(self, out: Outbox, *, logged: int, may_be_missing: bool) -> None:
        """`logged` is the last step that has a row; `may_be_missing`: an earlier coordinator may have had more."""
        self._out, self.next_step, self._may_be_missing = out, logged + 1, may_be_missing

    def begin(self, generation: int, start_step: int) -> int:
        """A group trains from `start_step`: later rows of those before are taken back, so many."""
        recomputed = max(0, self.next_step - 1 - start_step)
        if start_step >= self.next_step and self._may_be_missing:
            self._note_missing(start_step + 1)
        self._begin(generation, start_step)
        return recomputed

    def go_on(self, generation: int, start_step: int) -> int:
        """A group goes on that another coordinator saw begin; after which step, as far as is known."""
        last = max(start_step, self.next_step - 1)
        self._begin(generation, last)
        return last

    def take(self, generation: int, row: Mapping[str, Any]) -> bool:
        """Whether the row is new, and next to be logged."""
        step = row["step"]
        if step < self.next_step:  # sent again, after a restart
            return False
        missing = [key for key in METRIC_KEYS if key not in row]
        assert not missing, f"metrics row without {missing}"
        if step > self.next_step and self._may_be_missing:
            self._note_missing(step)
            self._begin(generation, step - 1)
        assert step == self.next_step, f"row of step {step}, expected {self.next_step}"
        self._may_be_missing = False
        self.next_step += 1
        return True

    def _begin(self, generation: int, start_step: int) -> None:
        self.next_step = start_step + 1
        self._out.append(BeginRows(generation, start_step))

    def _note_missing(self, step: int) -> None:
        self._out.record("note", text=f"rows before step {step} went with the coordinator that died")
