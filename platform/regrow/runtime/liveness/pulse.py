"""Signs of life between the workers of a node and its keeper: small files in the node's memory, no message a step.

A worker's `Pulse` says when it last ran, and in which step; a process that is stopped or stuck falls silent. The other
way goes `ControlWord`: which generations are over, and that stacks are wanted. A keeper reads pulses when it is asked.
"""

import contextlib
import json
import mmap
import os
import signal
import struct
import time
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from regrow.control.health import NOTHING, Pulse
from regrow.control.phases import PHASES, Phase
from regrow.control.slow import Spent
from regrow.errors import CheckpointError
from regrow.runtime.kept_rows import ROWS

STACKS, TRACE = "stacks", "collectives"  # what a worker leaves when it is asked where it is
STACKS_SIGNAL = signal.SIGUSR2  # has it write down where each of its threads is
LOOK_S = 0.2  # for workers to do so
MOST_SAID = 256_000  # characters, of a node's workers: a coordinator takes in what dozens of nodes say at once
NEWEST = 50  # collectives that have ended, of each record
WHERE_S = 1.0  # for workers to say whether they wait for others
_BEAT = struct.Struct("<qqqd")  # generation, step, nanoseconds of the machine's monotonic clock, seconds of a probe
_WHERE = struct.Struct("<qqqd")  # the question, collectives begun, whether one has not ended, for how long by then
_SPENT = struct.Struct("<q7d")  # `control.slow.Spent`
_PHASE = struct.Struct(f"<qq{len(PHASES)}d")  # its number, when it began, the longest of each lately
_WHERE_AT = _BEAT.size
_SPENT_AT = _WHERE_AT + _WHERE.size
_PHASE_AT = _SPENT_AT + _SPENT.size
SIZE = _PHASE_AT + _PHASE.size


class PulseFile:
    """This process' pulse."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError where memory does not hold it."""
        self.path = folder / f"pulse-{os.getpid()}"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SIZE)  # or a page that is not there would kill this process
            self._map = mmap.mmap(descriptor, SIZE)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise CheckpointError(
                f"{self.path}: no room for a worker's pulse of {SIZE} bytes ({error.strerror}); give {folder} more "
                "memory (on Kubernetes, a larger memory volume)"
            ) from error
        finally:
            os.close(descriptor)
        self.beat(NOTHING, NOTHING, 0.0)
        self.answer(0, NOTHING, 0.0, waits=False)
        self.phase(Phase.forming, time.monotonic_ns(), {})

    def beat(self, generation: int, step: int, probe_s: float) -> None:
        self._put(0, _BEAT.pack(generation, step, time.monotonic_ns(), probe_s))

    def answer(self, asked: int, collectives: int, waits_s: float, *, waits: bool) -> None:
        """Where this process is."""
        self._put(_WHERE_AT, _WHERE.pack(asked, collectives, waits, waits_s))

    def spent(self, spent: Spent) -> None:
        """What it has spent its time on, in this generation."""
        self._put(_SPENT_AT, _SPENT.pack(*astuple(spent)))

    def phase(self, phase: Phase, since_ns: int, longest_s: Mapping[Phase, float]) -> None:
        """What it does since a time of the machine's monotonic clock, and the longest of each phase lately."""
        longest = (longest_s.get(each, 0.0) for each in PHASES)
        self._put(_PHASE_AT, _PHASE.pack(PHASES.index(phase), since_ns, *longest))

    def _put(self, at: int, content: bytes) -> None:
        """Whole: `pack_into` makes zeros of it first, which a keeper may read."""
        self._map[at : at + len(content)] = content


def read_pulses(folder: Path) -> list[Pulse]:
    """Of all workers of the node, those included that have died; a worker that died earlier leaves no file."""
    pulses = []
    for path in folder.glob("pulse-*"):
        with contextlib.suppress(OSError, struct.error):  # it is just being made
            content = path.read_bytes()
            generation, step, beat, probe_s = _BEAT.unpack_from(content)
            if not beat:  # nothing is in it yet
                continue
            asked, collectives, waits, waits_s = _WHERE.unpack_from(content, _WHERE_AT)
            number, since, *longest = _PHASE.unpack_from(content, _PHASE_AT)
            pid, now = int(path.name.partition("-")[2]), time.monotonic_ns()
            pulses.append(
                Pulse(
                    pid,
                    generation,
                    step,
                    (now - beat) / 1e9,
                    probe_s,
                    process_state(pid),
                    asked,
                    collectives,
                    bool(waits),
                    waits_s,
                    PHASES[number],
                    (now - since) / 1e9,
                    tuple(longest),
                    Spent(*_SPENT.unpack_from(content, _SPENT_AT)),
                )
            )
            if not pulses[-1].state:
                for each in folder.glob(f"*-{pid}"):
                    if not each.name.startswith(ROWS):  # which another process of this node is to have
                        each.unlink(missing_ok=True)
    return pulses


def last_beat(folder: Path) -> float:
    """When a worker of the node that runs still has last beaten, of the monotonic clock; 0 where there is none."""
    return max((time.monotonic() - pulse.silent_s for pulse in read_pulses(folder) if pulse.state), default=0.0)


def process_state(pid: int) -> str:
    """The kernel's letter for a process of this machine; empty where there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    letter = status.rpartition(")")[2].split()[0]
    return "" if letter in "ZX" else letter


def started_at(pid: int) -> int:
    """When a process of this machine began, in the kernel's ticks since it booted; 0 where there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(status.rpartition(")")[2].split()[19])


def where(folder: Path, asked: int) -> list[Pulse]:
    """The pulses once all that run have answered the question of this number, just asked; or after a while."""
    give_up_at = time.monotonic() + WHERE_S
    while True:
        pulses = read_pulses(folder)
        late = any(pulse.state and not pulse.stopped and pulse.asked != asked for pulse in pulses)
        if not late or time.monotonic() > give_up_at:
            return pulses
        time.sleep(0.02)


def has_ended(collective: Mapping[str, Any]) -> bool:
    """By an entry of torch's flight recorder: gloo's are retired as they end; NCCL's state is that of the device's
    events."""
    return bool(collective["retired"] or collective["state"] == "completed")


def shortened(record: str, first: int = 0) -> str:
    """A flight record (JSON), of the collectives from a number on those that have not ended, oldest first, and the
    newest of the others; as it is where its format is another one."""
    try:
        content = json.loads(record)
        entries = [each for each in content.pop("entries") if int(each.get("record_id", first)) >= first]
        over = [each for each in entries if has_ended(each)]
        pending = [each for each in entries if not has_ended(each)]
        return json.dumps({"entries": pending + over[-NEWEST:], **content})
    except (AttributeError, KeyError, TypeError, ValueError):
        return record


def look(folder: Path) -> str:
    """Where each worker of the node is: the stacks of its threads, and its newest collectives as torch recorded them;
    `MOST_SAID` characters, and some for each worker.

    A `ControlWord` has just asked for these. A process that is stopped says nothing but that.
    """
    pulses = [pulse for pulse in read_pulses(folder) if pulse.state]
    answers = {pulse.pid: folder / f"{STACKS}-{pulse.pid}" for pulse in pulses}
    for pid, path in answers.items():
        with contextlib.suppress(OSError):  # one without that file does not listen to the signal
            os.truncate(path, 0)
            os.kill(pid, STACKS_SIGNAL)
    time.sleep(LOOK_S)
    most, lines = MOST_SAID // max(len(pulses), 1), []
    for pulse in pulses:
        lines.append(
            f"process {pulse.pid}, state {pulse.state}, last ran {pulse.silent_s:.1f} s ago, "
            f"generation {pulse.generation}, finished step {pulse.step}"
        )
        stacks = ""
        with contextlib.suppress(OSError):
            stacks = _cut(answers[pulse.pid].read_text(errors="replace"), most // 2)
            lines.append(stacks)
        with contextlib.suppress(OSError):
            trace = folder / f"{TRACE}-{pulse.pid}"
            records = "\n".join(map(shortened, trace.read_text(errors="replace").split("\n")))
            lines.append(f"collectives of {pulse.pid}: {_cut(records, most - len(stacks))}")
            trace.unlink()
    return "\n".join(lines) + "\n"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ... and {len(text) - most:,} characters"
