"""A process says what it is doing, readable after its death, and can be told to die in the middle of it."""

import contextlib
import mmap
import os
import signal
import struct
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).parent)  # code of the tests themselves, which is not to die

PHASES = (
    "restore",  # a trainer: from snapshots or from a checkpoint
    "slots",  # makes its slots
    "copy",  # copies its state into one
    "seal",  # makes it visible, and tells the keeper
    "take",  # a keeper: checksums what was sealed, copies it to the peer, reports it
    "push",  # of that, the copying
    "receive",  # the peer's side
    "told",  # hears of a commit, and deletes older generations
    "place",  # hears of a new peer
    "upload",  # writes its node's part to storage
    "begin",  # the coordinator: begins a generation
    "commit",  # takes reports, commits in memory
    "index",  # writes the index
    "COMMIT",  # commits in storage
    "retain",  # deletes old checkpoints
)
_CELL = struct.Struct("<q")
_ARMED, _LINES = len(PHASES), len(PHASES) + 1


class Beacon:
    """What a process is doing, readable after its death; and whether it is to die in a phase, after so many lines."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(_CELL.size * (len(PHASES) + 2)))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._lock = threading.Lock()

    def doing(self) -> set[str]:
        return {phase for cell, phase in enumerate(PHASES) if self._get(cell)}

    def arm(self, phase: str, lines: int) -> None:
        """Be killed once `lines` lines of Python have run in a phase, of one call or of several."""
        self._set(_LINES, lines)
        self._set(_ARMED, 1 + PHASES.index(phase))

    @contextlib.contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        cell = PHASES.index(phase)
        with self._lock:
            self._set(cell, self._get(cell) + 1)
        outer = sys.gettrace()
        if self._get(_ARMED) == 1 + cell:
            sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(outer)
            with self._lock:
                self._set(cell, self._get(cell) - 1)

    def mark(self, owner: Any, name: str, phase: str) -> None:
        """All calls of a function are in a phase."""
        inner = getattr(owner, name)

        def marked(*args: Any, **options: Any) -> Any:
            with self.inside(phase):
                return inner(*args, **options)

        setattr(owner, name, marked)

    def _trace(self, frame: types.FrameType, event: str, _: Any) -> Any:
        if event == "line" and not frame.f_code.co_filename.startswith(HERE):
            left = self._get(_LINES) - 1
            self._set(_LINES, left)
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._trace

    def _get(self, cell: int) -> int:
        return int(_CELL.unpack_from(self._map, cell * _CELL.size)[0])

    def _set(self, cell: int, value: int) -> None:
        _CELL.pack_into(self._map, cell * _CELL.size, value)
