"""A process' signs of life, as another process on its machine reads them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from regrow.control.health import NOTHING
from regrow.runtime.liveness import pulse as module
from regrow.runtime.liveness.pulse import look, process_state, read_pulses, where
from regrow.state.memory.control_word import ControlWord

WORKER = """
import sys, time
from pathlib import Path
from regrow.runtime.liveness.heartbeat import Heartbeat
from regrow.runtime.abort import Breaker
heartbeat = Heartbeat(Path(sys.argv[1]))
heartbeat.enter(3, Breaker())
heartbeat.stepped(7)
print("up", flush=True)
def where_it_waits():
    time.sleep(60)
where_it_waits()
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    give_up_at = time.monotonic() + 60.0
    while not any(pulse.step == 7 for pulse in read_pulses(tmp_path)):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()


def test_a_process_that_runs_beats_and_one_that_is_stopped_falls_silent(
    worker: subprocess.Popen[str], tmp_path: Path
) -> None:
    (pulse,) = read_pulses(tmp_path)
    assert (pulse.pid, pulse.generation, pulse.step, pulse.stopped) == (worker.pid, 3, 7, False)
    os.kill(worker.pid, signal.SIGSTOP)
    silent = []
    for _ in range(3):
        time.sleep(0.3)
        (pulse,) = read_pulses(tmp_path)
        assert pulse.stopped
        silent.append(pulse.silent_s)
    assert silent == sorted(silent)
    assert silent[-1] > 0.5
    worker.kill()
    worker.wait()
    assert [pulse.state for pulse in read_pulses(tmp_path)] == [""]
    assert read_pulses(tmp_path) == []  # what it left is cleared away
    assert not list(tmp_path.glob(f"*-{worker.pid}"))


def test_a_look_shows_what_each_thread_does_and_which_process_is_stopped(
    worker: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 2.0)  # on a busy machine
    ControlWord(traces=1).write(tmp_path)
    text = look(tmp_path)
    assert "where_it_waits" in text
    assert f"process {worker.pid}" in text
    assert "generation 3, finished step 7" in text
    assert f"collectives of {worker.pid}: " in text
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(0.2)
    ControlWord(traces=2).write(tmp_path)
    again = look(tmp_path)
    assert f"process {worker.pid}, state T" in again
    assert "where_it_waits" not in again


def test_a_process_says_where_it_is_when_it_is_asked_and_one_that_is_stopped_keeps_nobody_waiting(
    worker: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WHERE_S", 60.0)  # on a busy machine
    (pulse,) = read_pulses(tmp_path)
    assert (pulse.asked, pulse.collectives, pulse.waits) == (0, NOTHING, False)
    ControlWord(traces=4).write(tmp_path)
    (pulse,) = where(tmp_path, 4)
    assert (pulse.asked, pulse.collectives, pulse.waits) == (4, 0, False)
    os.kill(worker.pid, signal.SIGSTOP)
    ControlWord(traces=5).write(tmp_path)
    (pulse,) = where(tmp_path, 5)
    assert pulse.stopped
    assert pulse.asked == 4


def test_a_word_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert ControlWord.read(tmp_path) == ControlWord(NOTHING, 0)
    ControlWord(over=5, traces=2).write(tmp_path)
    assert ControlWord.read(tmp_path) == ControlWord(5, 2)


def test_a_process_that_is_gone_has_no_state() -> None:
    assert process_state(os.getpid()) in "RS"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert process_state(ended.pid) == ""
