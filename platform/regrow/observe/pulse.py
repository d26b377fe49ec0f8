"""Signs of life between the workers of a node and its keeper: small files in the node's memory, no message a step.

A worker's `Pulse` says when it last ran, and in which step; a process that is stopped or stuck falls silent. The other
way goes `Word`: which generations are over, and that stacks are wanted. A keeper reads pulses when it is asked to.
"""

import contextlib
import mmap
import os
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path

WORD = "word"
STACKS, TRACE = "stacks", "collectives"  # what a worker leaves when it is asked where it is
STACKS_SIGNAL = signal.SIGUSR2  # has it write down where each of its threads is
LOOK_S = 0.2  # for workers to do so
_PULSE = struct.Struct("<qqqd")  # generation, step, nanoseconds of the machine's monotonic clock, seconds of a probe
_WORD = struct.Struct("<qq")
NOTHING = -1


@dataclass(frozen=True)
class Pulse:
    """What a node knows of one of its workers."""

    pid: int
    generation: int
    step: int  # the newest one it finished in this generation
    silent_s: float  # since it last ran
    probe_s: float  # of its newest probe (`train.probe`); 0 before the first
    state: str  # of the process, as the kernel says: R, S and D run or wait, T is stopped; empty: it is gone

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")


class PulseFile:
    """This process' pulse."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"pulse-{os.getpid()}"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        os.truncate(descriptor, _PULSE.size)
        self._map = mmap.mmap(descriptor, _PULSE.size)
        os.close(descriptor)
        self.beat(NOTHING, NOTHING, 0.0)

    def beat(self, generation: int, step: int, probe_s: float) -> None:
        _PULSE.pack_into(self._map, 0, generation, step, time.monotonic_ns(), probe_s)


def read_pulses(folder: Path) -> list[Pulse]:
    """Of all workers of the node, those included that have died; a worker that died earlier leaves no file."""
    pulses = []
    for path in folder.glob("pulse-*"):
        with contextlib.suppress(OSError, struct.error):  # it is just being made
            generation, step, beat, probe_s = _PULSE.unpack(path.read_bytes())
            pid, silent_s = int(path.name.partition("-")[2]), (time.monotonic_ns() - beat) / 1e9
            pulses.append(Pulse(pid, generation, step, silent_s, probe_s, process_state(pid)))
            if not pulses[-1].state:
                for each in folder.glob(f"*-{pid}"):
                    each.unlink(missing_ok=True)
    return pulses


def process_state(pid: int) -> str:
    """The kernel's letter for a process of this machine; empty where there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    letter = status.rpartition(")")[2].split()[0]
    return "" if letter in "ZX" else letter


@dataclass(frozen=True)
class Word:
    """What a keeper has to say to its node's workers."""

    over: int = NOTHING  # this generation and all before it are over, whoever still waits in one
    traces: int = 0  # how often it has asked where everyone is

    @staticmethod
    def read(folder: Path) -> "Word":
        try:
            return Word(*_WORD.unpack((folder / WORD).read_bytes()))
        except FileNotFoundError:
            return Word()

    def write(self, folder: Path) -> None:
        temporary = folder / f".{WORD}"
        temporary.write_bytes(_WORD.pack(self.over, self.traces))
        os.replace(temporary, folder / WORD)


def look(folder: Path, word: Word) -> str:
    """Where each worker of the node is: the stacks of its threads, and its newest collectives as torch recorded them.

    `word` is a new one that asks for it. A process that is stopped says nothing but that.
    """
    pulses = [pulse for pulse in read_pulses(folder) if pulse.state]
    word.write(folder)
    answers = {pulse.pid: folder / f"{STACKS}-{pulse.pid}" for pulse in pulses}
    begins = {pid: path.stat().st_size if path.exists() else None for pid, path in answers.items()}
    for pid, begin in begins.items():
        if begin is not None:  # it listens to the signal
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
    time.sleep(LOOK_S)
    lines = []
    for pulse in pulses:
        lines.append(
            f"process {pulse.pid}, state {pulse.state}, last ran {pulse.silent_s:.1f} s ago, "
            f"generation {pulse.generation}, finished step {pulse.step}"
        )
        with contextlib.suppress(OSError):
            lines.append(answers[pulse.pid].read_bytes()[begins[pulse.pid] or 0 :].decode(errors="replace"))
        with contextlib.suppress(OSError):
            trace = folder / f"{TRACE}-{pulse.pid}"
            lines.append(f"collectives of {pulse.pid}: {trace.read_text()}")
            trace.unlink()
    return "\n".join(lines) + "\n"
