"""What a command waits for, shown while it waits: a spinner on a terminal, lines elsewhere."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from rich.text import Text

from regrow.show.units import duration

if TYPE_CHECKING:
    from rich.status import Status

QUIET_S = (
    9.0  # without a terminal, the longest silence in the first minute; then one of a minute, from an hour on of ten
)


class Waiting:
    """Shows news, and between them that something is still waited for. Used as a context; thread-safe."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._lock = threading.RLock()
        self._text, self._since, self._shown_at = "", time.monotonic(), time.monotonic()
        self._paused = 0
        self._spinner: Status | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Waiting":
        if self._stream.isatty():
            from rich.console import Console
            from rich.status import Status

            self._spinner = Status("", console=Console(file=self._stream, highlight=False))
        self._end.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="waiting")
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None
        self._text = ""

    def say(self, line: str) -> None:
        """A line that stays."""
        with self._lock:
            spins = self._spinner is not None and self._text and not self._paused
            if self._spinner is not None and spins:
                self._spinner.stop()
            print(line, file=self._stream, flush=True)
            if self._spinner is not None and spins:
                self._spinner.start()
            self._shown_at = time.monotonic()

    def on(self, text: str) -> None:
        """From now on this is waited for."""
        with self._lock:
            if text == self._text:
                return
            self._text, self._since = text, time.monotonic()
            if self._spinner is not None and not self._paused:
                self._spinner.update(Text(self._line()))
                self._spinner.start()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Others write: nothing is shown meanwhile."""
        with self._lock:
            self._paused += 1
            if self._spinner is not None:
                self._spinner.stop()
        try:
            yield
        finally:
            with self._lock:
                self._paused -= 1
                self._since = self._shown_at = time.monotonic()
                if self._spinner is not None and self._text and not self._paused:
                    self._spinner.start()

    def beat(self) -> None:
        """Show that the waiting goes on, where it is time to."""
        with self._lock:
            if not self._text or self._paused:
                return
            if self._spinner is not None:
                self._spinner.update(Text(self._line()))
                return
            now = time.monotonic()
            waited_s = now - self._since
            every_s = QUIET_S if waited_s < 60 else 60.0 if waited_s < 3600 else 600.0
            if now - self._shown_at >= every_s:
                print(self._line(), file=self._stream, flush=True)
                self._shown_at = now

    def _line(self) -> str:
        waited_s = time.monotonic() - self._since
        return f"waiting for {self._text} ({f'{waited_s:.0f} s' if waited_s < 59.5 else duration(waited_s)})"

    def _watch(self) -> None:
        while not self._end.wait(min(1.0, QUIET_S / 4)):
            self.beat()
