"""The run's log on a thread of its own: training never waits for storage, and what that does not take is written later.

Works are done in their order, each until it succeeds: a row or an event that cannot be written now is kept in memory.
Once another process writes the run, all of them are dropped.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from regrow.errors import first_line
from regrow.process_log import say_error
from regrow.record.claim import Superseded

RETRY_S = 2.0  # between tries of what storage does not take
LATE_S = 30.0  # that storage may take for one work before it is told of


class LogWriter:
    """Safe to use from several threads."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """`tell` gets one line when storage stays away, and one when it is back; from the writer's thread."""
        self._tell = tell
        self._works: deque[tuple[Callable[[], object], bool]] = deque()  # and whether it is a line of the log
        self._changed = threading.Condition()
        self._put = self._done = 0  # works, so far
        self._busy_since: float | None = None  # with the first of them
        self._away_since: float | None = None
        self._slow_until = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object], *, is_line: bool = False) -> int:
        """Have something written after all that was put before; the number to `wait` for.

        `is_line`: it is a row or an event of the log, which counts where it is lost.
        """
        with self._changed:
            if not self._closed:
                self._works.append((work, is_line))
            self._put += 1
            self._changed.notify_all()
            return self._put

    def wait(self, number: int, timeout_s: float) -> bool:
        """Whether a work was done in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._done >= number or self._closed, timeout_s)
            return self._done >= number

    def flush(self, work: Callable[[], object], timeout_s: float) -> None:
        """Have all that was put so far, and then this, done. Raises OSError where that takes too long."""
        if not self.wait(self.put(work), timeout_s):
            raise OSError(f"the run's log was not written within {timeout_s:.0f} s")

    def check(self) -> None:
        """Tell of a storage that neither takes what it is given nor says why. Call it often."""
        since = self._busy_since
        if since is not None and time.monotonic() - since > LATE_S:
            self._is_away(since, f"it has not answered for {LATE_S:.0f} s")

    def close(self, timeout_s: float) -> int:
        """End once all is written, or in vain after a while: how many works were not done."""
        self.wait(self._put, timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return len(self._works)

    @property
    def num_lines(self) -> int:
        """Rows and events among the works that are not done."""
        with self._changed:
            return sum(is_line for _, is_line in self._works)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._works or self._closed)
                if self._closed:
                    return
                work, _ = self._works[0]
            self._busy_since = time.monotonic()
            try:
                work()
            except OSError as error:
                self._is_away(self._busy_since, first_line(error))
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, RETRY_S)
                continue
            except Superseded:
                with self._changed:
                    self._closed, self._busy_since = True, None
                    self._works.clear()
                    self._changed.notify_all()
                return
            except Exception as error:  # a mistake of ours; what comes after it counts
                say_error(error)
            self._is_done()
            with self._changed:
                self._works.popleft()
                self._done += 1
                self._changed.notify_all()

    def _is_away(self, since: float, why: str) -> None:
        with self._changed:
            is_news = self._away_since is None
            self._away_since = since if is_news else self._away_since
        if is_news:
            self._say(
                f"the run folder cannot be written ({why}): training goes on, the log is kept in memory until it can"
            )

    def _is_done(self) -> None:
        """With a work; storage that was slow is back once it has not been for a while."""
        now = time.monotonic()
        with self._changed:
            began, self._busy_since, since = self._busy_since or now, None, self._away_since
            if now - began > LATE_S:
                self._slow_until = now + LATE_S
            if now < self._slow_until:
                return
            self._away_since = None
        if since is not None:
            self._say(f"the run folder can be written again, after {time.monotonic() - since:.0f} s; nothing is lost")

    def _say(self, text: str) -> None:
        try:
            self._tell(text)
        except Exception as error:  # the log matters more
            say_error(error)
