"""Ctrl-C or SIGTERM: once to stop in good order, once more to leave at once."""

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

SAME_ASK_S = 0.1  # between two signals that are one: GNU `timeout` sends its own to a process and to its group


class StopRequest:
    """Of the signals that a process gets; for a handler of them."""

    def __init__(self) -> None:
        self.asked_to_stop, self._asked_at = False, 0.0

    def heard(self) -> bool:
        """A signal has come; whether it is the first. Raises KeyboardInterrupt for one that is another."""
        now, is_first = time.monotonic(), not self.asked_to_stop
        if is_first:
            self.asked_to_stop, self._asked_at = True, now
        elif now - self._asked_at >= SAME_ASK_S:
            raise KeyboardInterrupt
        return is_first


@contextlib.contextmanager
def terminable(error: type[BaseException] = KeyboardInterrupt, *arguments: object) -> Iterator[None]:
    """SIGTERM raises `error`, so that `finally` clauses end and clean up what was begun; the same signal, sent to the
    process's group too, does not cut them short. In another thread than the main one: nothing."""
    request = StopRequest()

    def leave(signum: int, frame: FrameType | None) -> None:
        if request.heard():
            raise error(*arguments)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
