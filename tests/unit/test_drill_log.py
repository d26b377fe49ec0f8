"""Reading a run from outside while it is written; looking at processes from outside."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from regrow.drill.log import Record, RunFollower
from regrow.drill.processes import is_alive, of_ray, send, title, tree, wait_until_gone
from regrow.record.events import Failure, Generation, Submitted
from regrow.record.log import METRIC_KEYS, RunLog
from regrow.storage import Storage


def row(step: int, generation: int) -> dict[str, object]:
    return dict.fromkeys(METRIC_KEYS, 0.0) | {"step": step, "generation": generation, "batch_digest": f"{step:016x}"}


def test_rows_are_read_once_and_those_taken_back_are_forgotten(tmp_path: Path) -> None:
    watch = RunFollower(tmp_path)
    watch.poll()
    assert (watch.step, watch.rows, watch.events) == (0, [], [])
    with RunLog(Storage.at(tmp_path)) as log:
        log.event(Submitted())
        log.begin(1, 0)
        for step in (1, 2, 3):
            log.row(row(step, 1))
        watch.poll()
        assert (watch.step, watch.num_rows_read) == (3, 3)
        log.row(row(4, 1))
        watch.poll()
        assert (watch.step, watch.num_rows_read) == (4, 4)
        log.begin(2, 2)
        log.row(row(3, 2))
        watch.poll()
        assert [(each["step"], each["generation"]) for each in watch.rows] == [(1, 1), (2, 1), (3, 2)]
        log.event(Generation(generation=2, world_size=1, start_step=2, cause="grow"))
        watch.poll()
    assert [event["event"] for event in watch.events] == ["submitted", "rollback", "generation"]
    assert [event["generation"] for event in watch.generations] == [2]


def test_a_group_trains_from_its_first_step_until_it_breaks(tmp_path: Path) -> None:
    watch, said = RunFollower(tmp_path), []
    with RunLog(Storage.at(tmp_path)) as log:
        for generation in (1, 2):
            log.event(Generation(generation=generation, world_size=1, start_step=0, cause="start"))
            log.begin(generation, generation - 1)
            watch.poll()
            said.append(watch.trains)
            log.row(row(generation, generation))
            watch.poll()
            said.append(watch.trains)
            log.event(Failure(cause="worker_died"))
            watch.poll()
            said.append(watch.trains)
    assert said == [False, True, False] * 2


def test_a_line_that_is_being_written_is_read_once_it_is_whole(tmp_path: Path) -> None:
    watch = RunFollower(tmp_path)
    with open(tmp_path / "events.jsonl", "ab", buffering=0) as file:
        file.write(b'{"time": 1, "event": "a"}\n{"time": 2, "ev')
        watch.poll()
        assert [event["event"] for event in watch.events] == ["a"]
        file.write(b'ent": "b"}\nnot json\n{"time": 3, "event": "c"}\n')
        watch.poll()
    assert [event["event"] for event in watch.events] == ["a", "b", "c"]


def test_a_record_goes_on_where_an_earlier_drill_left_it(tmp_path: Path) -> None:
    first = Record(tmp_path)
    assert (first.next_fault(), first.session) == (0, 0)
    first.write("job started", why="start")
    first.write("fault", at=5.0, number=0, kind="kill_worker")
    first.write("not injected", number=1)
    again = Record(tmp_path)
    assert (again.next_fault(), again.session) == (2, 1)
    assert [line["record"] for line in again.read()] == ["job started", "fault", "not injected"]
    assert again.read()[1]["time"] == 5.0


def test_processes_are_found_by_their_ray_and_by_descent_and_can_be_stopped(tmp_path: Path) -> None:
    sleep = "import time; time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}]); {sleep}"
    process = subprocess.Popen([sys.executable, "-c", parent], env={**os.environ, "RAY_TMPDIR": str(tmp_path)})
    try:
        give_up_at = time.monotonic() + 20
        while len(tree(process.pid)) < 2 and time.monotonic() < give_up_at:
            time.sleep(0.02)
        family = tree(process.pid)
        assert family[0] == process.pid
        assert sorted(of_ray(str(tmp_path))) == sorted(family)
        assert "time.sleep(60)" in title(family[1])
        assert send(signal.SIGSTOP, family) == family
        assert all(map(is_alive, family))  # stopped is not dead
        assert wait_until_gone(family, 0.05) == family
    finally:
        send(signal.SIGKILL, tree(process.pid))
    assert wait_until_gone(family, 10.0) == []
    assert not is_alive(process.pid)  # though nobody has waited for it yet
    process.wait()
    assert title(process.pid) == ""
    assert send(signal.SIGKILL, [process.pid]) == []


def test_a_process_that_wrote_over_its_environment_is_known_by_its_open_files(tmp_path: Path) -> None:
    inside, beside = tmp_path / "ray", tmp_path / "ray-2"
    inside.mkdir(), beside.mkdir()
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with open(inside / "log", "wb") as ours, open(beside / "log", "wb") as other:
        agent, stranger = subprocess.Popen(sleep, stdout=ours), subprocess.Popen(sleep, stdout=other)
    try:
        assert of_ray(str(inside)) == [agent.pid]
    finally:
        for each in (agent, stranger):
            each.kill()
            each.wait()
    assert of_ray(str(inside)) == []
