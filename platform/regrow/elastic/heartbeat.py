"""A worker's heartbeat: a thread that shows that the process runs, and listens whether its generation is over.

The thread that trains may wait in a collective for somebody who is never coming: then this one breaks it off.
"""

import contextlib
import faulthandler
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from regrow.observe.pulse import NOTHING, STACKS, STACKS_SIGNAL, TRACE, PulseFile, Word
from regrow.parallel.break_off import Address, break_off

BEAT_S = 0.1
# torch's flight recorders: of gloo and others, and, where torch was built with it, of NCCL
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


class Heartbeat:
    """Beats from the moment it is made until the process ends."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the node's keeper's."""
        self._folder, self._pulse = folder, PulseFile(folder)
        self._generation, self._step = NOTHING, NOTHING
        self._listeners: set[Address] = set()
        self._probe_s = 0.0
        self._at_length = False
        self._entered_ns = 0  # the generation
        self._lock = threading.Lock()
        self._stacks = open(folder / f"{STACKS}-{os.getpid()}", "w")  # noqa: SIM115 (the signal writes to it)
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)
        asked = Word.read(folder).traces  # of whom was there before
        threading.Thread(target=self._run, args=(asked,), name="heartbeat", daemon=True).start()

    def enter(self, generation: int, listeners: set[Address]) -> None:
        """This process is in a generation, whose ranks' gloo, or whose store, listens at these addresses."""
        with self._lock:
            self._generation, self._step, self._listeners = generation, NOTHING, listeners
            self._entered_ns = time.time_ns()

    def stepped(self, step: int) -> None:
        self._step = step

    def probed(self, probe_s: float) -> None:
        self._probe_s = probe_s

    @contextlib.contextmanager
    def at_length(self) -> Iterator[None]:
        """What this process does now may take long, and keep the others waiting."""
        self._at_length = True
        try:
            yield
        finally:
            self._at_length = False

    def leave(self) -> None:
        """The generation is over for this process: nothing of it is left to break off."""
        with self._lock:
            self._generation = NOTHING

    def _run(self, asked: int) -> None:
        while True:
            self._pulse.beat(self._generation, self._step, self._probe_s)
            word = Word.read(self._folder)
            if word.traces != asked:
                asked = word.traces
                self._say_where(asked)
            with self._lock:
                if NOTHING < self._generation <= word.over:
                    self._generation = NOTHING
                    break_off(self._listeners)
            time.sleep(BEAT_S)

    def _say_where(self, asked: int) -> None:
        """As torch's flight recorder knows; what it kept is for people, too.

        Its format is torch's own: where it is not as we know it nothing is said, and so nobody given up.
        """
        torch_c = torch._C._distributed_c10d
        dumps = [getattr(torch_c, name)(True, False) for name in RECORDERS if hasattr(torch_c, name)]
        with contextlib.suppress(OSError):
            (self._folder / f"{TRACE}-{os.getpid()}").write_bytes(b"\n".join(dumps))
        with contextlib.suppress(KeyError, TypeError, ValueError):
            begun, waits = zip(*(newest_collective(dump, self._entered_ns) for dump in dumps), strict=True)
            self._pulse.answer(asked, sum(begun), any(waits) or self._at_length)


def newest_collective(dump: bytes, since_ns: int) -> tuple[int, bool]:
    """How many collectives a process has begun, and whether one has not ended of those since a time, by torch's flight
    recorder (JSON): one of an earlier generation, which was broken off, never ends there."""
    entries = json.loads(dump).get("entries", [])  # none where there was no collective yet
    # gloo's are retired as they end; NCCL's state is that of the device's events
    pending = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    begun = 1 + max((entry["record_id"] for entry in entries), default=NOTHING)
    return begun, any(entry["time_created_ns"] >= since_ns for entry in pending)
