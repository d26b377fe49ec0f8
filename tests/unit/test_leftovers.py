"""What an earlier life of a host left behind: folders in memory, and the numbers of processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from regrow.runtime import driver, fleet, shell
from regrow.runtime import keeper as keeper_module
from regrow.runtime.fleet import Fleet
from regrow.runtime.keeper import Keeper, KeeperSettings, start_keeper
from regrow.runtime.liveness.pulse import PulseFile, started_at
from regrow.runtime.publisher import Publisher
from regrow.state.memory.node import KeeperNode, delete_run, last_used, take_over_leftovers
from regrow.storage import Storage

PATTERN = "regrow-run-*"

BEATS = """
import sys
from pathlib import Path
from regrow.runtime.liveness.pulse import PulseFile
pulse = PulseFile(Path(sys.argv[1]))
print(flush=True)
while True:
    pulse.beat(7, 8, 1.0)
"""


def folder(parent: Path, node: str, *, used_at: float, run: str = "run") -> Path:
    """Of a keeper that is gone."""
    made = parent / f"regrow-{run}-{node}"
    made.mkdir(mode=0o700)
    for name in ("g000001-r0-0.slot", "pulse-17", "word", "lock"):
        (made / name).write_text(node)
        os.utime(made / name, (used_at, used_at))
    os.utime(made, (used_at, used_at))
    return made


def test_a_host_that_comes_back_as_another_node_has_what_it_had_and_no_more(tmp_path: Path) -> None:
    older, newer = folder(tmp_path, "first-life", used_at=1e9), folder(tmp_path, "second-life", used_at=2e9)
    others = folder(tmp_path, "life", used_at=1e9, run="other"), folder(tmp_path, "alive", used_at=1e9)
    mine = tmp_path / "regrow-run-third-life"
    take_over_leftovers(mine, PATTERN, lambda: {"alive", "third-life"})
    assert (mine / "g000001-r0-0.slot").read_text() == "second-life"
    assert not (mine / "pulse-17").exists(), "of a process that is gone: nobody is to be told of its death"
    assert not older.exists()
    assert not newer.exists()
    assert all(other.exists() for other in others)
    later = folder(tmp_path, "fourth-life", used_at=3e9)  # Ray took its time to find that node dead
    take_over_leftovers(mine, PATTERN, lambda: {"third-life"})
    assert not later.exists(), "snapshots need the room"
    assert (mine / "g000001-r0-0.slot").read_text() == "second-life"


def test_a_folder_that_a_keeper_serves_is_left_alone(tmp_path: Path) -> None:
    """Of a raylet beside this one; Ray may take a node for dead that is only cut off."""
    there = tmp_path / "regrow-run-beside"
    keeper = KeeperNode(there, node="beside", host="127.0.0.1", secret=b"", run_id="run", report=print)
    keeper.start()
    take_over_leftovers(tmp_path / "regrow-run-mine", PATTERN, set)
    assert there.exists()
    keeper.close(delete=False)
    take_over_leftovers(tmp_path / "regrow-run-mine", PATTERN, set)
    assert not there.exists()


def test_nothing_is_left_of_a_run_that_is_over_and_other_runs_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soak seed 2459: a folder stayed. Ray had not yet found the host's node before dead, or something came to be in
    the folder while it was deleted."""
    mine = folder(tmp_path, "mine", used_at=time.time())
    before, other = folder(tmp_path, "before", used_at=1e9), folder(tmp_path, "mine", used_at=1e9, run="other")
    rmdir, copies = os.rmdir, ["g000002-r0-0.slot"]

    def as_a_copy_comes(path: Any, **more: Any) -> None:
        if copies and Path(path).name == mine.name:
            (mine / copies.pop()).write_text("a copy")
        rmdir(path, **more)

    monkeypatch.setattr(os, "rmdir", as_a_copy_comes)
    delete_run(mine, PATTERN)
    assert copies == []
    assert not mine.exists()
    assert not before.exists()
    assert other.exists()


def test_a_folder_that_is_being_made_or_deleted_is_left_alone_and_one_that_was_never_finished_is_not(
    tmp_path: Path,
) -> None:
    """Of keepers that start together on one host, one ended on the other's folder, which had no lock yet."""
    mine, now = tmp_path / "regrow-run-mine", time.time()
    fresh, stale = folder(tmp_path, "fresh", used_at=now), folder(tmp_path, "stale", used_at=now - 3600)
    for each, used_at in ((fresh, now), (stale, now - 3600)):
        (each / "lock").unlink()
        os.utime(each, (used_at, used_at))
    (fresh / "gone-meanwhile").symlink_to(tmp_path / "nowhere")
    take_over_leftovers(mine, PATTERN, set)
    assert fresh.exists()
    assert not stale.exists()
    assert (mine / "g000001-r0-0.slot").read_text() == "stale"
    assert last_used(tmp_path / "nowhere") == 0.0


def test_a_keepers_folder_may_be_below_the_home_of_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, ...]] = []
    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *given: started.append(given)))
    monkeypatch.setattr(ray, "remote", lambda **_: lambda of: actor)
    monkeypatch.setenv("HOME", str(tmp_path))
    start_keeper("0" * 16, "a" * 56, KeeperSettings("~/memory", None, abandon_after_s=600.0))
    assert started[0][2] == f"{tmp_path}/memory/regrow-{'0' * 16}-{'a' * 12}"


class Stop(Exception):
    """Of a test."""


def test_a_keeper_whose_coordinator_is_silent_stays_for_as_long_as_a_worker_of_its_node_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It deleted its snapshots after `snapshot.abandon_after_s`, while its workers trained, and another never came."""
    ends, answers = list[Any](), [ray.exceptions.RayActorError] * 2 + [Stop]
    keeper = Keeper.__new__(Keeper)  # not an actor

    def ready() -> None:
        raise answers.pop(0) if answers else ray.exceptions.RayActorError

    keeper.folder, keeper.settings = tmp_path, KeeperSettings(str(tmp_path), None, abandon_after_s=100.0)
    keeper.coordinator = SimpleNamespace(ready=SimpleNamespace(remote=ready))
    keeper.heard_at, keeper.me = time.monotonic() - 1000, None
    monkeypatch.setattr(keeper, "close", lambda: ends.append("deleted"))
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: ends.append(no_restart))
    monkeypatch.setattr(keeper_module, "PING_S", 0.01)
    with subprocess.Popen([sys.executable, "-c", BEATS, str(tmp_path)], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        try:
            with pytest.raises(Stop):
                keeper._watch(0.0)
        finally:
            worker.kill()
    assert ends == []
    long_ago = time.monotonic_ns() - 1000 * 10**9
    with monkeypatch.context() as before:
        before.setattr(time, "monotonic_ns", lambda: long_ago)
        PulseFile(tmp_path)  # of a process that is gone, whose pid another one has
    keeper._watch(0.0)
    assert ends == ["deleted", True]


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as found:
        yield found
        found.kill()


def test_another_process_that_has_the_pid_by_now_is_not_ended(process: Any) -> None:
    pid, started = process.pid, started_at(process.pid)
    assert started > 0
    Keeper.end_process(None, pid, started - 100)  # type: ignore[arg-type]  # a worker that had it a second before
    assert process.poll() is None
    Keeper.end_process(None, pid, started)  # type: ignore[arg-type]
    assert process.wait(60) == -signal.SIGKILL
    Keeper.end_process(None, pid, started)  # type: ignore[arg-type]  # it is gone
    assert started_at(pid) == 0


class Closing:
    """A keeper that deletes what it holds for a while, and answers meanwhile, or not at all."""

    def __init__(self, closes_s: float, answers_s: float = 0.0) -> None:
        self.close = SimpleNamespace(remote=lambda: (self, "close", closes_s))
        self.secret = SimpleNamespace(remote=lambda: (self, "secret", answers_s))


def test_keepers_have_the_time_to_give_back_their_memory_and_what_stays_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each was killed after ten seconds, and what it had not deleted stayed in its node's memory."""
    clock, killed = [0.0], list[Any]()

    def wait(calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        clock[0] = min(clock[0] + timeout, max(clock[0], *(at for *_, at in calls), 0.0))
        done = [call for call in calls if call[2] <= clock[0]]
        return done, [call for call in calls if call not in done]

    monkeypatch.setattr(keeper_module.ray, "wait", wait)
    monkeypatch.setattr(keeper_module.ray, "kill", lambda handle, no_restart: killed.append((handle, clock[0])))
    never = float("inf")
    quick, large, silent, stuck = Closing(1.0), Closing(70.0), Closing(never, never), Closing(never)
    for closing, left, took_s in (
        ({"q": quick}, [], 1.0),
        ({"q": quick, "l": large}, [], 70.0),
        ({"q": quick, "s": silent}, ["s"], 2 * keeper_module.CLOSE_S),
        ({"l": large, "h": stuck}, ["h"], keeper_module.CLOSE_S + keeper_module.FREE_S),
    ):
        clock[0] = 0.0
        killed.clear()
        assert keeper_module.end_keepers(closing) == left
        assert killed == [(handle, took_s) for handle in closing.values()]
    made = Fleet("run", b"", Publisher(Storage.at(tmp_path), "run", keep=2, flush_log=lambda: None))
    monkeypatch.setattr(fleet, "running_keepers", lambda run_id: {"a" * 56: quick, "b" * 56: stuck})
    assert made.close().startswith("node bbbbbbbbbbbb: its keeper was ended before it had given its memory back; ")
    assert driver.END_S > shell.CLOSE_S + shell.DELETE_S + 2 * keeper_module.CLOSE_S + keeper_module.FREE_S
