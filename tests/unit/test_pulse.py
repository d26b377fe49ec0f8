"""A pulse is read while it is written: no reader sees a half of it."""

import errno
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
from regrow.runtime.liveness.pulse import SIZE, STACKS, PulseFile, read_pulses
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


@pytest.mark.parametrize(("limit", "trace"), [(64, "none"), (1 << 30, "True")])
def test_a_trace_of_collectives_is_whole_or_not_there(tmp_path: Path, limit: int, trace: str) -> None:
    """A part of one would take the last page, just when a hang is looked into."""
    command = [sys.executable, "-c", TRACED, str(tmp_path), str(limit)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert said.stdout == f"1 {trace}\n"
