"""The deaths of a node's workers, known from its kernel at once."""

import contextlib
import errno
import os
import selectors
import threading
from collections.abc import Callable
from pathlib import Path

LOOK_S = 0.5  # between looks for workers that are new
NONE_FREE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # for a moment: of descriptors, or of what they take


class Deaths:
    """Watches the processes that have a pulse in a folder (`runtime.liveness.pulse`), on a thread of its own."""

    def __init__(self, folder: Path, tell: Callable[[int], None]) -> None:
        """`tell` gets the pid of each that has died, once for each pulse that it left."""
        self._folder, self._tell = folder, tell
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deaths", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        known: set[int] = set()
        with selectors.DefaultSelector() as waiting:
            while not self._closed.is_set():
                there = self._with_a_pulse(known)
                for pid in there - known:
                    try:
                        waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                    except ProcessLookupError:  # it died before it was seen
                        self._tell(pid)
                    except OSError as error:
                        if error.errno not in NONE_FREE:  # a kernel without: others find out
                            return
                        there = there - {pid}
                for key, _ in waiting.select(LOOK_S):
                    waiting.unregister(key.fileobj)
                    os.close(key.fd)
                    self._tell(key.data)
                known = there | {key.data for key in waiting.get_map().values()}  # a pid may be another process' later
            for key in list(waiting.get_map().values()):
                with contextlib.suppress(OSError):
                    os.close(key.fd)

    def _with_a_pulse(self, known: set[int]) -> set[int]:
        """Pids; those that are known where the folder cannot be looked into now."""
        try:
            return {int(path.name.partition("-")[2]) for path in self._folder.glob("pulse-*")}
        except OSError as error:
            if error.errno not in NONE_FREE:
                raise
            return known
