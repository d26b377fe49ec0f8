"""A pulse is read while it is written: no reader sees a half of it."""

import contextlib
import errno
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import regrow
from regrow.errors import CheckpointError
from regrow.runtime.kept_rows import ROWS
from regrow.runtime.liveness.heartbeat import pending_collectives
from regrow.runtime.liveness.pulse import SIZE, STACKS, TRACE, PulseFile, has_ended, look, read_pulses, shortened
from support.beside_writer import read_beside_writer

BEAT = """
import sys
from pathlib import Path
from regrow.control.phases import Phase
from regrow.runtime.liveness.pulse import PulseFile
pulse = PulseFile(Path(sys.argv[1]))
pulse.beat(7, 8, 1.0)
print(flush=True)
while True:
    pulse.beat(7, 8, 1.0)
"""

# files of more bytes cannot be written whole: as where memory has a few pages left
TRACED = """
import os, resource, sys
from pathlib import Path
from regrow.runtime.liveness import pulse
from regrow.runtime.liveness.heartbeat import Heartbeat
from regrow.state.memory.control_word import ControlWord
folder = Path(sys.argv[1])
heartbeat = Heartbeat(folder)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
pulse.WHERE_S = 120.0
ControlWord(traces=1).write(folder)
(said,) = pulse.where(folder, 1)
trace = folder / f"{pulse.TRACE}-{os.getpid()}"
print(said.asked, trace.stat().st_size > 64 if trace.exists() else "none")
"""

# how long the file of stacks is after a look, and after many more
LOOKED = """
import os, sys
from pathlib import Path
from regrow.runtime.liveness import pulse
from regrow.runtime.liveness.heartbeat import Heartbeat
folder = Path(sys.argv[1])
heartbeat = Heartbeat(folder)
stacks = folder / f"{pulse.STACKS}-{os.getpid()}"
sizes = []
for _ in range(8):
    assert "most recent call first" in pulse.look(folder)
    sizes.append(stacks.stat().st_size)
print(sizes[0], sizes[-1])
"""

# a phase ends for the first time while the heart beats; then the process has no descriptor left for a moment
BEATS_ON = """
import sys, threading, time
from collections import deque
from pathlib import Path
from regrow.control.phases import Phase
from regrow.runtime.liveness import heartbeat as module
from regrow.runtime.liveness.pulse import read_pulses
folder, failed, read = Path(sys.argv[1]), threading.Event(), module.ControlWord.read

def await_beat():
    begun = time.monotonic()
    while (now := time.monotonic()) - read_pulses(folder)[0].silent_s <= begun:
        assert now < begun + 60, "it does not beat any more"
        time.sleep(0.01)

class Late(deque):
    def append(self, took_s):
        await_beat()
        await_beat()
        super().append(took_s)

def fail(folder):
    failed.set()
    raise OSError(24, "Too many open files")

module.deque = Late
heartbeat = module.Heartbeat(folder)
with heartbeat.phase(Phase.snapshot):
    pass
module.ControlWord.read = staticmethod(fail)
assert failed.wait(60)
module.ControlWord.read = staticmethod(read)
await_beat()
print("beats")
"""


def test_a_process_that_runs_never_seems_to_have_stood_still(tmp_path: Path) -> None:
    """It did, for as long as its machine had been up, to a keeper that read between two stores: it was ended."""
    seen = read_beside_writer(BEAT, tmp_path, lambda folder: read_pulses(folder)[0])
    assert {(each.generation, each.step, each.probe_s) for each in seen} == {(7, 8, 1.0)}
    assert max(each.silent_s for each in seen) < 600.0


def test_a_pulse_that_is_just_being_made_says_nothing(tmp_path: Path) -> None:
    """A file of zeros would say that its process has stood still since the machine was started."""
    (tmp_path / f"pulse-{os.getpid()}").write_bytes(bytes(SIZE))
    assert read_pulses(tmp_path) == []


def test_of_a_process_that_is_gone_only_its_rows_stay(tmp_path: Path) -> None:
    """Another process of the node is to have them."""
    path = str(Path(regrow.__file__).parents[1])
    command = [sys.executable, "-c", BEAT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"PYTHONPATH": path}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    for name in (STACKS, ROWS.removesuffix("-")):
        (tmp_path / f"{name}-{process.pid}").write_text("")
    assert [each.state for each in read_pulses(tmp_path)] == [""]
    assert [each.name for each in tmp_path.iterdir()] == [f"{ROWS}{process.pid}"]


def test_a_pulse_that_memory_does_not_hold_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written through a map, a page that is not there would kill the worker."""

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    mapped: list[Any] = []
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(mmap, "mmap", lambda *of: mapped.append(of))
    with pytest.raises(CheckpointError, match=r"no room for .*No space left on device.*; give .* more memory"):
        PulseFile(tmp_path)
    assert not mapped
    assert list(tmp_path.iterdir()) == []


def collective(number: int, *, ended: bool) -> dict[str, Any]:
    """As NCCL's recorder has one."""
    state = {"state": "completed" if ended else "scheduled", "retired": ended}
    return {"record_id": number, "time_created_ns": number, "profiling_name": "nccl:all_reduce " * 30, **state}


@pytest.mark.parametrize("format_", ["ours", "another"])
def test_a_look_brings_what_a_worker_waits_in_and_not_all_that_it_has_done(tmp_path: Path, format_: str) -> None:
    """64 nodes of eight brought half a gigabyte through the coordinator."""
    pulse, waits = PulseFile(tmp_path), {1000, 1990, 1999}
    record = {"version": "2.10", "entries": [collective(number, ended=number not in waits) for number in range(2000)]}
    trace = tmp_path / f"{TRACE}-{os.getpid()}"
    trace.write_text(f'{json.dumps(record)}\n{{"entries": []}}' if format_ == "ours" else "x" * 1_000_000)
    assert trace.stat().st_size >= 1_000_000
    said = look(tmp_path)
    assert len(said) < 300_000
    assert not trace.exists()
    (line,) = [each for each in said.splitlines() if each.startswith(f"collectives of {os.getpid()}: ")]
    if format_ == "ours":
        found = line.partition(": ")[2]
        assert [each["record_id"] for each in pending_collectives(found.encode(), 0)] == sorted(waits)
        entries = json.loads(found)["entries"]
        assert [each["record_id"] for each in entries if has_ended(each)] == [*range(1948, 1990), *range(1991, 1999)]
    assert pulse.path.exists()


def test_of_an_earlier_generation_which_was_broken_off_and_never_ends_nothing_is_said() -> None:
    record = {"entries": [collective(number, ended=False) for number in range(4)], "version": "2.10"}
    said = json.loads(shortened(json.dumps(record), first=2))
    assert said == {"entries": record["entries"][2:], "version": "2.10"}


def test_a_node_whose_workers_wait_in_many_collectives_says_no_more_than_a_node_may(tmp_path: Path) -> None:
    """The first of those, in which a worker hangs, is among what it says."""
    pulse = PulseFile(tmp_path).path.read_bytes()
    with contextlib.ExitStack() as processes:
        sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
        for process in [processes.enter_context(subprocess.Popen(sleeps)) for _ in range(8)]:
            processes.callback(process.kill)
            (tmp_path / f"pulse-{process.pid}").write_bytes(pulse)
            record = {"entries": [collective(number, ended=number < 1000) for number in range(2000)]}
            (tmp_path / f"{TRACE}-{process.pid}").write_text(json.dumps(record))
        said = look(tmp_path)
    assert said.count('"record_id": 1000,') == 8
    assert len(said) < 300_000


def test_a_look_has_the_stacks_of_now_and_their_file_does_not_grow(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-c", LOOKED, str(tmp_path)], capture_output=True, text=True, timeout=300, check=True
    )
    first, last = map(int, said.stdout.split())
    assert 0 < last < 2 * first


def test_the_heart_beats_on_whatever_a_beat_of_it_meets(tmp_path: Path) -> None:
    """Its thread ended, and the process was killed as one that is silent."""
    said = subprocess.run(
        [sys.executable, "-c", BEATS_ON, str(tmp_path)], capture_output=True, text=True, timeout=300, check=True
    )
    assert said.stdout == "beats\n"
    assert said.stderr.count("Too many open files") == 1, "it is said once"


@pytest.mark.parametrize(("limit", "trace"), [(64, "none"), (1 << 30, "True")])
def test_a_trace_of_collectives_is_whole_or_not_there(tmp_path: Path, limit: int, trace: str) -> None:
    """A part of one would take the last page, just when a hang is looked into."""
    command = [sys.executable, "-c", TRACED, str(tmp_path), str(limit)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert said.stdout == f"1 {trace}\n"
