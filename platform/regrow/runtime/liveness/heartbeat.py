"""A worker's heartbeat: a thread that shows that the process runs, and listens whether its generation is over.

The thread that trains may wait in a collective for a rank that never comes: then this one breaks it off.
"""

import contextlib
import faulthandler
import json
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from regrow.control.health import NOTHING
from regrow.control.phases import KEPT, Phase
from regrow.control.slow import Spent
from regrow.parallel import tree
from regrow.runtime.abort import Breaker
from regrow.runtime.liveness.pulse import STACKS, STACKS_SIGNAL, TRACE, PulseFile, has_ended, shortened
from regrow.state.memory.control_word import ControlWord
from regrow.train.orders import hang_where_ordered

BEAT_S = 0.1
LOOK_S = 1.0  # between looks at what may be overdue
# torch's flight recorders: of gloo and others, and, where torch was built with it, of NCCL
SPENT_KEYS = {  # of a row, by the fields of `Spent`
    "step_s": "step_s",
    "data_s": "data_wait_s",
    "copy_s": "snapshot_s",
    "shard_s": "wait_shard_s",
    "replicate_s": "wait_replicate_s",
    "all_s": "wait_all_s",
}
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")

log = logging.getLogger(__name__)


class Heartbeat:
    """Beats from the moment it is made until the process ends."""

    def __init__(self, folder: Path, *, collective_timeout_s: float = math.inf) -> None:
        """`folder` is the node's keeper's. A generation that waits in a collective for so long is broken off.

        Gloo does that by itself. NCCL's way would be to end the process. Raises CheckpointError where memory does not
        hold a pulse.
        """
        self._collective_timeout_s = collective_timeout_s
        self._look_at = math.inf  # of the monotonic clock: whether a collective is overdue
        self._folder, self._pulse = folder, PulseFile(folder)
        self._generation, self._step = NOTHING, NOTHING
        self._breaker = Breaker()
        self._probe_s = 0.0
        self._phases = [(Phase.forming, time.monotonic_ns())]  # of the thread that trains, the innermost last
        self._took_s: dict[Phase, deque[float]] = {}
        self._spent, self._rows = Spent(), 0
        self._at_a_collective, self._at_a_message = _at_hosts, _at_none
        # collectives begun before the generation, by recorder, as no clock tells that may be set back; None: not
        # counted yet since the one before, which takes 50 ms
        self._before: list[int] | None = None
        self._lock = threading.Lock()
        # the signal appends, and a keeper that asks empties it before: written from an offset of its own it would grow
        self._stacks = open(folder / f"{STACKS}-{os.getpid()}", "a")  # noqa: SIM115
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)
        asked = ControlWord.read(folder).traces  # of a process that was there before
        threading.Thread(target=self._run, args=(asked,), name="heartbeat", daemon=True).start()

    def enter(self, generation: int, breaker: Breaker) -> None:
        """This process is in a generation, which `breaker` breaks off."""
        self._count()
        with self._lock:
            self._generation, self._step, self._breaker = generation, NOTHING, breaker
            self._look_at = time.monotonic() + self._collective_timeout_s
            self._spent, self._rows = Spent(), 0
            self._at_a_collective, self._at_a_message = _at_hosts, _at_none
        self._begin(Phase.forming)

    def trains(self, at_a_collective: Callable[[], bool], at_a_message: Callable[[], tuple[int, int]]) -> None:
        """The generation is ready for its first step; where its device is, and whether it waits for a message of
        another stage, `parallel.waits` knows."""
        self._at_a_collective, self._at_a_message = at_a_collective, at_a_message
        self._end(Phase.first_step)

    def stepped(self, step: int) -> None:
        if step != self._step:  # it may be told of again
            self._end(Phase.step)
        self._step = step
        self._look_at = time.monotonic() + self._collective_timeout_s

    def timed(self, row: Mapping[str, Any]) -> None:
        """What the newest step was spent on. A generation's first is left out: all compile in it."""
        rows, self._rows = self._rows, self._rows + 1
        memory_bytes = float(row["memory_bytes"])
        if rows == 0:
            self._spent = Spent(memory_bytes=memory_bytes)
            return
        more = {field: float(row.get(key, 0.0)) + getattr(self._spent, field) for field, key in SPENT_KEYS.items()}
        self._spent = Spent(steps=rows, **more, memory_bytes=memory_bytes)

    def probed(self, probe_s: float) -> None:
        self._probe_s = probe_s

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """What the thread that trains does now; as long as that takes usually, the others wait for it."""
        begun_ns = time.monotonic_ns()
        self._phases = [*self._phases, (phase, begun_ns)]
        hang_where_ordered(phase)
        try:
            yield
            self._took(phase, begun_ns)
        finally:
            outer, now_ns = self._phases[:-1], time.monotonic_ns()
            # what it was interrupted for does not count
            self._phases = [(each, since + now_ns - begun_ns) for each, since in outer]

    def _begin(self, phase: Phase) -> None:
        self._phases = [(phase, time.monotonic_ns())]
        hang_where_ordered(phase)

    def _end(self, then: Phase) -> None:
        """The outermost phase is over, and another one begins."""
        if len(self._phases) == 1:  # within another one a step may be confirmed again
            self._took(*self._phases[0])
            self._begin(then)

    def _took(self, phase: Phase, since_ns: int) -> None:
        took_s = (time.monotonic_ns() - since_ns) / 1e9
        self._took_s.setdefault(phase, deque(maxlen=KEPT)).append(took_s)

    def leave(self) -> None:
        """The generation is over for this process: nothing of it is left to break off."""
        with self._lock:
            self._generation, self._before = NOTHING, None

    def _count(self) -> None:
        """While this process is in no generation."""
        if self._before is None:
            before = [_num_begun(dump) for dump in _recorded()]
            with self._lock:
                self._before = before if self._before is None else self._before

    def _run(self, asked: int) -> None:
        said = ""
        while True:
            try:
                asked = self._look(asked)
                self._pulse.beat(self._generation, self._step, self._probe_s)  # last: what fails for long is silent
            except Exception as error:  # of one beat, as where the process has no descriptor left
                if said != (said := str(error)):
                    log.exception("a heartbeat failed; the next one follows")
            time.sleep(BEAT_S)

    def _look(self, asked: int) -> int:
        """Tell what this process does, and do what the node's keeper asks for; the number of the newest question."""
        self._count()
        self._pulse.spent(self._spent)
        took_s = list(self._took_s.items())  # of a phase that ends for the first time just now there is none yet
        longest_s = {phase: max(list(each), default=0.0) for phase, each in took_s}
        self._pulse.phase(*self._phases[-1], longest_s)
        word = ControlWord.read(self._folder)
        if word.traces != asked:
            self._say_where(word.traces)
        with self._lock:
            if self._generation > NOTHING and (self._generation <= word.over or self._is_overdue()):
                self._generation = NOTHING
                self._breaker.start()
        return word.traces

    def _is_overdue(self) -> bool:
        """Whether this process has been in one collective for longer than any may take."""
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + LOOK_S
        begun_ns = time.time_ns() - self._collective_timeout_s * 1e9
        with contextlib.suppress(KeyError, TypeError, ValueError):  # of a format that is not as we know it
            pending = [entry for dump, first in self._records() for entry in pending_collectives(dump, first)]
            return any(entry["time_created_ns"] < begun_ns for entry in pending)
        return False

    def _records(self) -> list[tuple[bytes, int]]:
        """What each recorder has, and its first number in this generation."""
        dumps = _recorded()
        return list(zip(dumps, [*(self._before or ()), *[0] * len(dumps)], strict=False))

    def _say_where(self, asked: int) -> None:
        """As torch's flight recorder knows; what it kept is for people, too.

        Its format is torch's own: where it is another one nothing is said, and so no rank is given up.
        """
        records, trace = self._records(), self._folder / f"{TRACE}-{os.getpid()}"
        try:
            said = (shortened(dump.decode(errors="replace"), first) for dump, first in records)
            trace.write_text("\n".join(said))
        except OSError:  # a part of it would take what memory is left
            trace.unlink(missing_ok=True)
        with contextlib.suppress(KeyError, TypeError, ValueError):
            found = [*(newest_collective(dump, first) for dump, first in records), self._at_a_message()]
            begun, since = sum(begun for begun, _ in found), [at_ns for _, at_ns in found if at_ns]
            waits_s = max(0.0, (time.time_ns() - min(since)) / 1e9) if since else 0.0
            # a host that has queued its collectives behind a kernel that hangs does not wait for the others
            self._pulse.answer(asked, begun, waits_s, waits=bool(since) and self._at_a_collective())


def _at_hosts() -> bool:
    """Whether a device of which nothing is known is at a collective: it is where its host is."""
    return True


def _at_none() -> tuple[int, int]:
    """How many messages a process has taken that has taken none, and since when it waits for one."""
    return 0, 0


def _recorded() -> list[bytes]:
    torch_c = torch._C._distributed_c10d
    dumps = [getattr(torch_c, name)(True, False) for name in RECORDERS if hasattr(torch_c, name)]
    asynchronous = sys.modules.get("regrow.parallel.asynchronous")  # where it is in use
    return [*dumps, tree.flight_record(), *([asynchronous.flight_record()] if asynchronous else [])]


def _num_begun(dump: bytes) -> int:
    with contextlib.suppress(KeyError, TypeError, ValueError):  # of a format that is not as we know it
        return newest_collective(dump, 0)[0]
    return 0


def pending_collectives(dump: bytes, first: int) -> list[dict[str, Any]]:
    """The collectives from a number on that have not ended, by torch's flight recorder (JSON)."""
    entries = json.loads(dump).get("entries", [])  # none where there was no collective yet
    return [entry for entry in entries if not has_ended(entry) and entry["record_id"] >= first]


def newest_collective(dump: bytes, first: int) -> tuple[int, int]:
    """How many collectives a process has begun, and when the first of those from a number on that have not ended (unix
    time, ns; 0: none), by torch's flight recorder (JSON): one of an earlier generation, which was broken off, never
    ends there."""
    entries = json.loads(dump).get("entries", [])
    begun = 1 + max((entry["record_id"] for entry in entries), default=NOTHING)
    # a message is asked for ahead: a rank computes meanwhile
    pending = [entry for entry in pending_collectives(dump, first) if not entry.get("is_p2p", False)]
    return begun, min((int(entry["time_created_ns"]) for entry in pending), default=0)
