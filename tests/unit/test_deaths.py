"""A worker's death is told by its node's kernel, though nobody waits for it and nobody asks."""

import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from regrow.control.health import Pulse, Stalls
from regrow.runtime.liveness.deaths import Deaths

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def told(tmp_path: Path) -> Iterator["queue.Queue[int]"]:
    found: queue.Queue[int] = queue.Queue()
    deaths = Deaths(tmp_path, found.put)
    yield found
    deaths.close()


def test_each_death_is_told_once_and_those_that_live_are_not(tmp_path: Path, told: "queue.Queue[int]") -> None:
    with subprocess.Popen(SLEEPS) as first, subprocess.Popen(SLEEPS) as second:
        try:
            for process in (first, second):
                (tmp_path / f"pulse-{process.pid}").touch()
            first.kill()
            assert told.get(timeout=60) == first.pid
            first.wait()
            second.kill()
            assert told.get(timeout=60) == second.pid
        finally:
            first.kill()
            second.kill()
    assert told.empty()


def test_one_that_was_dead_before_it_was_seen_is_told_too(tmp_path: Path, told: "queue.Queue[int]") -> None:
    with subprocess.Popen(SLEEPS) as process:
        process.kill()
    (tmp_path / f"pulse-{process.pid}").touch()
    assert told.get(timeout=60) == process.pid


def test_the_pid_of_one_that_died_may_be_that_of_another_one_which_dies_too(
    tmp_path: Path, told: "queue.Queue[int]"
) -> None:
    """Its keeper has cleared away what the first one left."""
    with subprocess.Popen(SLEEPS) as first, subprocess.Popen(SLEEPS) as second:
        first.kill()
        second.kill()
    pulse = tmp_path / f"pulse-{first.pid}"
    for _ in range(2):
        pulse.touch()
        assert told.get(timeout=60) == first.pid
        pulse.unlink()
        mark = tmp_path / f"pulse-{second.pid}"
        mark.touch()
        assert told.get(timeout=60) == second.pid, "so it has looked since"
        mark.unlink()
    assert told.empty()


def test_a_process_that_is_gone_keeps_the_others_waiting_however_short_a_time_it_was_silent() -> None:
    stalls = Stalls(silence_s=30.0, timeout_s=600.0, stuck_s=0.0)
    gone, lives = (Pulse(pid, 1, 4, 0.1, 0.0, state) for pid, state in ((1, ""), (2, "S")))
    assert stalls.hung([gone, lives]) == [gone]
