"""A worker's death is told by its node's kernel, though nobody waits for it and nobody asks."""

import errno
import os
import queue
import subprocess
import sys
import threading
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


@pytest.mark.parametrize("of", ["pidfd_open", "scandir"])
def test_a_moment_without_a_free_descriptor_ends_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    real, refused = getattr(os, of), threading.Event()

    def refuses_once(*given: object) -> object:
        if threading.current_thread().name != "deaths" or refused.is_set():
            return real(*given)
        refused.set()
        raise OSError(errno.EMFILE, "Too many open files")

    with subprocess.Popen(SLEEPS) as process:
        (tmp_path / f"pulse-{process.pid}").touch()
        monkeypatch.setattr(os, of, refuses_once)
        found: queue.Queue[int] = queue.Queue()
        deaths = Deaths(tmp_path, found.put)
        try:
            assert refused.wait(60)
            process.kill()
            assert found.get(timeout=60) == process.pid
        finally:
            process.kill()
            deaths.close()


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
