"""The run's log for a rank that writes it beside its steps: storage that fails for a while costs no row, and no run."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from regrow.errors import first_line
from regrow.record.events import Event, Rollback
from regrow.record.log import RunLog

RETRY_EVERY_S = 1.0


class PatientLog:
    """Rows and events that cannot be written are kept, and written before what comes next. Of one thread."""

    def __init__(self, log: RunLog, tell: Callable[[str], None]) -> None:
        """`tell` gets one line when storage fails, and one when it takes everything again."""
        self._log, self._tell = log, tell
        self._kept: deque[Callable[[], object]] = deque()

    def begin(self, generation: int, start_step: int, *, timeout_s: float = 0.0) -> Rollback:
        """As RunLog's, after all that is kept. Raises OSError where storage still fails after so many seconds."""
        give_up_at, told = time.monotonic() + timeout_s, False
        while True:
            try:
                self._write_kept()
                return self._log.begin(generation, start_step)
            except OSError as error:
                if time.monotonic() >= give_up_at:
                    raise
                if not told:
                    self._tell(
                        f"the run's log cannot be written ({first_line(error)}): training waits for it, up to "
                        f"{timeout_s:.0f} s"
                    )
                told = True
                time.sleep(RETRY_EVERY_S)

    def row(self, row: Mapping[str, Any]) -> None:
        self._put(lambda: self._log.row(row))

    def event(self, event: Event) -> None:
        stamped = event if event.time else replace(event, time=time.time())
        self._put(lambda: self._log.event(stamped))

    def flush(self) -> None:
        """Have everything durable. Raises OSError where storage fails."""
        self._write_kept()
        self._log.flush()

    def close(self) -> None:
        """Raises OSError where storage fails, for good then: what is kept is lost, and told of."""
        try:
            self._write_kept()
        except OSError:
            self._tell(f"{len(self._kept)} lines of the log were not written")
            raise
        finally:
            self._log.close()

    def _put(self, work: Callable[[], object]) -> None:
        waits = bool(self._kept)
        self._kept.append(work)
        try:
            self._write_kept()
        except OSError as error:
            if not waits:
                self._tell(
                    f"the run's log cannot be written ({first_line(error)}): training goes on, and what belongs there "
                    "is kept until it can, or until a checkpoint is due"
                )
            return
        if waits:
            self._tell("the run's log can be written again; nothing is lost")

    def _write_kept(self) -> None:
        while self._kept:
            self._kept[0]()
            self._kept.popleft()
