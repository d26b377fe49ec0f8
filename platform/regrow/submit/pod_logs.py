"""A pod's log lines, each once, over as many connections as it takes."""

from collections.abc import Callable


class PodLogs:
    """Takes lines as `kubectl logs --timestamps` has them, and passes on those that it did not before.

    Where to go on is told by the newest line's own time, never by this machine's clock. The server knows whole seconds
    only, and sends the lines of that second again.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._newest, self._at_newest = b"", 0  # a time, and how many lines of it were passed on
        self._skip = 0  # lines of that time that come again

    @property
    def since(self) -> str | None:
        """The time to ask for lines from; None: from the beginning."""
        return self._newest.decode() or None

    def reconnect(self) -> None:
        """The lines of the newest time may come again."""
        self._skip = self._at_newest

    def take(self, line: bytes) -> None:
        """A line with its time before it."""
        time, _, text = line.partition(b" ")
        key, newest = _sortable(time), _sortable(self._newest)
        if key < newest:
            return
        if key > newest:
            self._newest, self._at_newest, self._skip = time, 0, 0
        elif self._skip:
            self._skip -= 1
            return
        self._at_newest += 1
        self._write(text)


def _sortable(time: bytes) -> tuple[bytes, bytes]:
    """Of one zone, as the kubelet's are: 2026-01-01T00:00:00.5Z, with as many digits as it takes."""
    whole, _, part = time.rstrip(b"Z").partition(b".")
    return whole, part.ljust(9, b"0")
