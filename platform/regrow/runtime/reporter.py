"""The run's report, written anew from time to time on a thread of its own: training and what is shown do not wait."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from regrow.errors import first_line

LAST_S = 120.0  # for the last report; `jobs.report` writes it again


class Reporter:
    """A report that cannot be written is told of once, and tried again when the next one is due."""

    def __init__(
        self,
        write: Callable[[], dict[str, Any]],
        *,
        every_s: float,
        written: Callable[[Mapping[str, Any]], None],
        tell: Callable[[str], None],
    ) -> None:
        """`write` writes and returns a report, `written` gets it, `tell` a line; all on this thread."""
        self._write, self._every_s, self._written, self._tell = write, every_s, written, tell
        self._told = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more of them; one that is being written is not waited for."""
        self._closed.set()

    def last(self) -> dict[str, Any] | None:
        """End, and write one more; None where storage does not take it or it takes too long, which one line says."""
        self.close()
        outcome: list[dict[str, Any]] = []

        def write() -> None:
            self._thread.join()
            try:
                outcome.append(self._write())
            except OSError as error:
                self._tell(f"report.html is not up to date ({first_line(error)}): `python -m jobs.report` writes it")

        thread = threading.Thread(target=write, name="last-report", daemon=True)
        thread.start()
        thread.join(LAST_S)
        if thread.is_alive():
            self._tell(
                f"report.html is not up to date (it took over {LAST_S:.0f} s): `python -m jobs.report` writes it"
            )
        return outcome[0] if outcome else None

    def _run(self) -> None:
        wait_s = self._every_s
        while not self._closed.wait(wait_s):
            begun = time.monotonic()
            try:
                self._written(self._write())
                self._told = False
            except OSError as error:
                if not self._told:
                    self._told = True
                    self._tell(f"the report was not written, training goes on: {first_line(error)}")
            took_s = time.monotonic() - begun  # grows with the log: at most a twentieth of the time
            wait_s = max(self._every_s, 20 * took_s)
