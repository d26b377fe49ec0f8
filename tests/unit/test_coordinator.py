"""The coordinator on the class itself, its keepers in this process: calls in and out, a storage that goes away."""

import errno
import itertools
import json
import os
import resource
import shutil
import signal
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from regrow.config.check import check
from regrow.config.schema import CheckpointConfig, ClusterConfig, ObserveConfig, PretrainConfig, SnapshotConfig
from regrow.control import health
from regrow.control.commands import Delete
from regrow.control.core import Fenced
from regrow.control.health import Pulse
from regrow.control.membership import Member
from regrow.control.nodes import MARGIN_S
from regrow.control.slow import Spent
from regrow.control.states import Answer, RowAnswer, Settling
from regrow.control.values import NEVER, Digest, SnapshotAck, Version
from regrow.data.read.corpora import Corpora
from regrow.errors import ClusterError, NotWrittenError, RegrowError, ResumeError
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.record.claim import Superseded
from regrow.record.events import Forming
from regrow.record.lock import lock_run
from regrow.record.log import METRIC_KEYS, RunLog, read_events, read_metrics
from regrow.record.work import RATIOS
from regrow.runtime import actor as module
from regrow.runtime import calls, driver, fleet, interrupts, log_writer, publisher, shell
from regrow.runtime.actor import Coordinator, start_coordinator
from regrow.runtime.clock import ControlClock
from regrow.runtime.cluster import Connection
from regrow.runtime.driver import Session
from regrow.runtime.keeper import KeeperInfo, KeeperSettings
from regrow.runtime.log_writer import LogWriter
from regrow.runtime.reporter import Reporter
from regrow.runtime.run_folder import Run
from regrow.state.disk import store
from regrow.state.disk.catalog import committed_steps
from regrow.state.disk.format import DataFile
from regrow.state.disk.upload import WriteOrder, Written
from regrow.state.memory.held import Held
from regrow.state.memory.slots import Committed
from regrow.state.memory.transport import TransportError
from regrow.storage import RETRY_DEADLINE_S, LocalStorage, Storage, StorageUnreachable
from support.actors import Handle
from support.corpus import write_rows
from support.full_disk import full_disk
from support.spans import content_of
from support.trainers import trainer_of


def make(folder: Path, *, job: str = "", **cluster: Any) -> Coordinator:
    return Coordinator(
        str(folder),
        "run",
        checkpoints="checkpoints",
        config=PretrainConfig(
            cluster=ClusterConfig(max_workers=8, wait_for_workers_s=60, **cluster),
            checkpoint=CheckpointConfig(every_steps=4, keep=2),
            observe=ObserveConfig(tensorboard=False, metrics=False),
        ),
        submitted={},
        job=job,
    )


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    made = make(tmp_path)
    yield made
    made.shell.close()


def join(made: Coordinator, *members: Member) -> Answer:
    """Each has other ports after each group."""
    after = made.ready()
    for member in members:
        made.join(replace(member, port=member.port + after), len(members))
    return until(lambda: answer if (answer := made.formation(members[0].id, after)).seat else None)


def one(pid: int, node: str = "node") -> Member:
    return Member(f"m{pid}", node, "127.0.0.1", pid, pid)


def generation_of(answer: Answer) -> int:
    assert answer.seat is not None
    return answer.seat.generation


def ended(made: Coordinator) -> Coordinator:
    """One whose process is gone."""
    made.shell.close()
    made.lock.close()
    return made


def restart(monkeypatch: pytest.MonkeyPatch, keepers: dict[str, Handle] | None = None) -> None:
    """From here on a coordinator is one that Ray has started again, beside these keepers."""
    monkeypatch.setattr(module, "is_restarted", lambda: True)
    monkeypatch.setattr(fleet, "running_keepers", lambda run_id: keepers or {})
    monkeypatch.setattr(Coordinator, "adopt_keepers", lambda self: None)


def until(condition: Callable[[], Any], deadline_s: float = 20.0) -> Any:
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


def row(generation: int, step: int) -> dict[str, Any]:
    return dict.fromkeys(METRIC_KEYS, 0.01) | {"generation": generation, "step": step, "batch_digest": 1}


def events_of(made: Coordinator, name: str) -> list[dict[str, Any]]:
    return [update.content for update in made.updates(0)[0] if update.content.get("event") == name]


class Keeper:
    """A node's, as far as the coordinator sees it."""

    def __init__(self, node: str) -> None:
        self.info = KeeperInfo(node, node, f"/dev/shm/{node}", (node, 1), Version(), ())
        self.pulse_of = list[Pulse]()
        self.killed, self.told_over, self.heard = list[int](), list[int](), list[Committed]()
        self.remembered, self.numbers = list[int](), list[int]()
        self.look = lambda: "the stacks"
        self.gpus = list
        self.threads = ThreadPoolExecutor(2)

    def serve(self, coordinator: Any, secret: bytes) -> KeeperInfo:
        """To another coordinator than the first, or to the same one again."""
        return replace(self.info, newest_generation=max(self.remembered, default=-1))

    def secret(self) -> bytes:
        return b"of the coordinator before"

    def take_place(self, place: Any) -> None:
        self.place = place

    def committed(self, state: Committed) -> None:
        self.numbers.append(state.number)
        self.heard.append(state)

    def over(self, generation: int) -> None:
        self.told_over.append(generation)

    def remember(self, generation: int) -> None:
        self.remembered.append(generation)

    def end_process(self, pid: int, started: int) -> None:
        self.killed.append(pid)

    def pulses(self) -> list[Pulse]:
        return self.pulse_of

    where = pulses

    def holdings(self, since: Version) -> list[Any]:
        return []

    def write(self, order: WriteOrder) -> "Future[Written]":
        """On a thread, as a keeper's process does beside the coordinator's."""
        return self.threads.submit(self._write, order)

    def read_back(self, folder: str, files: Sequence[DataFile], origin: str) -> "Future[str]":
        return self.threads.submit(
            lambda: "" if all(Storage.at(folder).exists(each.name) for each in files) else "gone"
        )

    def _write(self, order: WriteOrder) -> Written:
        """One file of four bytes, which is all there is."""
        Storage.at(order.folder).write_bytes(f"{order.token}.safetensors", b"head" + b"data")
        file = DataFile(f"{order.token}.safetensors", 8, 4, "", content_of("w", "float32", 1, 0))
        return Written((file,), 1, {"step": order.moment.step}, {0: ""}, {0: {"w": ("float32", (1,))}})


def train(made: Coordinator, keeper: Keeper, *, step: int = 0) -> int:
    """A group of one worker on the keeper's node."""
    generation = generation_of(join(made, one(7, keeper.info.node)))
    made.register_keeper(Handle(keeper), keeper.info)
    made.start_training(generation, step, {"workers": [{"node": keeper.info.node}]})
    return generation


def test_it_tells_the_time_by_the_clock_that_stamps_events(coordinator: Coordinator) -> None:
    begun = coordinator.now()
    coordinator.note("note", {"text": "here"})
    (told,) = events_of(coordinator, "note")
    assert begun <= told["time"] <= coordinator.now()


def test_every_write_of_an_older_generation_is_refused(coordinator: Coordinator, tmp_path: Path) -> None:
    old, new = generation_of(join(coordinator, one(1))), generation_of(join(coordinator, one(1)))
    with pytest.raises(Fenced, match=f"generation {old} is over; {new} is current"):
        coordinator.row(old, {})
    with pytest.raises(Fenced):
        coordinator.event(old, "checkpoint", {})
    with pytest.raises(Fenced):
        coordinator.commit(old, "step-00000001", b"{}")
    assert committed_steps(Storage.at(tmp_path) / "checkpoints") == []
    coordinator.commit(new, "step-00000001", b"{}")
    assert committed_steps(Storage.at(tmp_path) / "checkpoints") == [1]


def does_not_start(monkeypatch: pytest.MonkeyPatch, met: Exception) -> None:
    """No cluster: the error is made as Ray makes that of an actor whose __init__ raises."""

    def get(*_: Any, **__: Any) -> None:
        try:
            raise met
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            raised = RayTaskError("__init__", text, error, proctitle="ray::Coordinator", ip="127.0.0.1")
        raise ray.exceptions.ActorDiedError(raised)

    actor = SimpleNamespace(ready=SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr(module.ray, "remote", lambda **_: lambda cls: SimpleNamespace(remote=lambda *_, **__: actor))
    monkeypatch.setattr(module.ray, "get", get)
    node = SimpleNamespace(get_node_id=lambda: "0" * 56)
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: node)


@pytest.mark.parametrize(
    ("met", "said"),
    [
        (OSError(errno.EACCES, "Permission denied", "/runs/x/.lock"), "cannot be used: .* denied: '/runs/x/.lock'$"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot be used: .* No space left on device$"),
        (ResumeError("run folder x is in use (process 7 on h)"), r"^run folder x is in use \(process 7 on h\)$"),
        (Superseded("run folder x is written by another job now"), "^run folder x is written by another job now$"),
        (StorageUnreachable("s3://b/x: still failing after 120 s"), "^s3://b/x: still failing after 120 s$"),
        (KeyError("a bug"), None),
    ],
)
def test_what_keeps_a_coordinator_from_its_run_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, met: Exception, said: str | None
) -> None:
    does_not_start(monkeypatch, met)
    error = (
        ray.exceptions.ActorDiedError if said is None else type(met) if isinstance(met, ResumeError) else RegrowError
    )
    with pytest.raises(error, match=said) as caught:
        start_coordinator(Storage.at(tmp_path), "run")
    assert said is None or "\n" not in str(caught.value)


def test_a_job_that_waits_for_the_lock_of_another_host_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its coordinator prints is shown nowhere."""
    Storage.at(tmp_path).write_bytes("writers/000001.json", json.dumps({"host": "elsewhere", "pid": 7}).encode())
    does_not_start(monkeypatch, ResumeError("in use"))
    said = list[str]()
    held = lock_run(Storage.at(tmp_path))
    for _ in range(2):
        with pytest.raises(ResumeError):
            start_coordinator(Storage.at(tmp_path), "run", tell=said.append)
        if held is not None:
            held.close()
    (line,) = said
    assert line.startswith(f"run folder {tmp_path} is locked (process 7 on elsewhere): waiting up to 120 s")


def test_a_run_has_one_writer_and_its_generations_go_on_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.record.lock.LOCK_WAIT_S", 0.1)
    first = make(tmp_path)
    generation = generation_of(join(first, one(1)))
    with pytest.raises(ResumeError, match="is in use"):
        make(tmp_path)
    first.lock.close()  # as the process' end does: what was answered is in the log
    again = make(tmp_path)
    assert generation_of(join(again, one(1))) > generation
    for made in (first, again):
        made.shell.close()


def test_a_step_is_logged_shown_committed_and_becomes_a_checkpoint(coordinator: Coordinator, tmp_path: Path) -> None:
    keeper = Keeper("node")
    generation = train(coordinator, keeper)
    assert coordinator.row(generation, row(generation, 1)) == RowAnswer()
    shown = coordinator.updates(0)[0]
    assert [update.kind for update in shown][-1] == "row"
    assert coordinator.updates(shown[-1].number)[0] == []  # what was shown is not sent again
    coordinator.snapshots_sealed([SnapshotAck("node", Version(generation, 4), ())])
    until(lambda: committed_steps(Storage.at(tmp_path) / "checkpoints") == [4])
    until(lambda: events_of(coordinator, "checkpoint"))
    assert (keeper.heard[0].newest, keeper.heard[0].pinned) == (Version(generation, 4), Version(generation, 4))
    until(lambda: (keeper.heard[-1].newest, keeper.heard[-1].pinned) == (Version(generation, 4), NEVER))
    assert [found["step"] for found in read_metrics(Storage.at(tmp_path))] == [1], "a committed step's row is there"
    until(lambda: coordinator.settle() == Settling(False, "", None, ()))  # what was written is read back


def test_what_shows_that_a_rank_computed_wrong_is_in_the_log_before_anything_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator after this one would begin from what went wrong."""
    made, awaited = make(tmp_path, verify_every_steps=100), list[int]()
    try:
        generation = generation_of(join(made, one(1), one(2, "other")))
        made.start_training(generation, 0, {"workers": [{"node": "node"}, {"node": "other"}]})
        monkeypatch.setattr(made.shell, "await_log", lambda: awaited.append(len(events_of(made, "corruption"))))
        for step, wrong in ((4, 0), (5, 1)):
            digests = tuple(Digest(rank, "0", 2, rank * wrong) for rank in range(2))
            made.snapshots_sealed([SnapshotAck("node", Version(generation, step), (), digests=digests)])
            assert awaited == [1] * wrong
    finally:
        made.shell.close()


def test_a_coordinator_that_is_restarted_goes_on_with_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, keeper = make(tmp_path), Keeper("node")
    generation = train(first, keeper)
    for step in (1, 2):
        first.row(generation, row(generation, step))
    first.shell.close()
    first.lock.close()
    retained: list[str] = []
    restart(monkeypatch)
    monkeypatch.setattr(
        publisher,
        "try_retain",
        lambda folder, keep, **rest: retained.append(f"{folder}, all but {keep}") or "",
    )
    again = make(tmp_path)
    assert again.ready() == generation
    again.row(generation, row(generation, 2))  # sent again
    assert again.row(generation, row(generation, 5)) == RowAnswer(wanted=3)
    assert again.rows_again(generation, 3, [row(generation, 4), row(generation, 5)]) == RowAnswer()
    assert "rows before step 4 went" in events_of(again, "note")[0]["text"]
    until(lambda: retained == [f"{tmp_path}/checkpoints, all but 2"])
    again.shell.close()
    assert [found["step"] for found in read_metrics(Storage.at(tmp_path))] == [1, 2, 4, 5]
    assert [event["event"] for event in read_events(Storage.at(tmp_path))].count("submitted") == 1


def test_a_coordinator_that_is_restarted_before_its_job_is_in_the_log_begins_that_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job before was at its end: no worker was taken any more."""
    first = make(tmp_path, job="first")
    generation = train(first, Keeper("node"))
    first.row(generation, row(generation, 1))
    first.done()
    ended(first)
    restart(monkeypatch)
    begun = make(tmp_path, job="second")
    assert not begun.updates(0)[2], "the run is not over"
    newest = generation_of(join(begun, one(8)))
    assert newest > generation
    ended(begun)
    again = make(tmp_path, job="second")
    assert again.ready() == newest
    assert again.formation("m8", generation).seat is not None, "the group is known"
    ended(again)
    submitted = [event for event in read_events(Storage.at(tmp_path)) if event["event"] == "submitted"]
    assert [event["job"] for event in submitted] == ["first", "second"]


def test_a_coordinator_that_is_restarted_while_storage_is_away_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_AGAIN_S", 0.01)
    restart(monkeypatch)
    tries = list[int]()

    def read(folder: Storage) -> list[dict[str, Any]]:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("connection refused")
        return read_events(folder)

    monkeypatch.setattr(module, "read_events", read)
    made = make(tmp_path)
    assert events_of(made, "coordinator_restarted")
    made.shell.close()


def test_a_coordinator_that_is_restarted_tells_metrics_when_the_newest_step_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It told of the time when the job began to train, hours ago, as if no step had come since."""
    first = make(tmp_path)
    generation = train(first, Keeper("node"))
    ended_at = time.time() + 60.0
    first.row(generation, row(generation, 1) | {"time": ended_at})
    ended(first)
    told = defaultdict[str, list[float]](list)

    def instrument(name: str, **of_it: Any) -> SimpleNamespace:
        def take(value: float, tags: Any) -> None:
            told[name].append(value)

        return SimpleNamespace(inc=take, set=take)

    restart(monkeypatch)
    monkeypatch.setattr(module, "ray_metrics", SimpleNamespace(Counter=instrument, Gauge=instrument))
    config = PretrainConfig(observe=ObserveConfig(tensorboard=False))
    again = Coordinator(str(tmp_path), "run", checkpoints="checkpoints", config=config, submitted={})
    again.shell.close()
    assert told["regrow_last_step_timestamp_seconds"][0] == ended_at


def test_what_a_drain_is_logged_with_is_the_hosts_time_whatever_the_coordinator_stood_still(
    coordinator: Coordinator,
) -> None:
    keepers = [Keeper("n1"), Keeper("n2")]
    for keeper in keepers:
        coordinator.register_keeper(Handle(keeper), keeper.info)
    generation = generation_of(join(coordinator, one(1, "n1"), one(2, "n2")))
    coordinator.start_training(generation, 0, {"workers": [{"node": "n1"}, {"node": "n2"}]})
    begun = time.time()
    coordinator.shell.clock = ControlClock(begun - 3600.0)
    assert coordinator.drain("n2") == ""
    (logged,) = events_of(coordinator, "drain")
    assert begun - 1.0 <= logged["deadline"] <= time.time() + 1.0


def test_a_coordinator_that_stood_still_ends_no_newcomers_whose_first_step_it_could_not_hear_of(
    coordinator: Coordinator,
) -> None:
    stopped_s, keepers = [0.0], {f"n{pid}": Keeper(f"n{pid}") for pid in (1, 2, 3)}
    coordinator.shell.clock = ControlClock(time.time(), lambda: time.monotonic() + stopped_s[0])
    for keeper in keepers.values():
        coordinator.register_keeper(Handle(keeper), keeper.info)
    for pids in ((1, 2), (1, 2, 3)):
        generation = generation_of(join(coordinator, *(one(pid, f"n{pid}") for pid in pids)))
        coordinator.start_training(generation, 0, {"workers": [{"node": f"n{pid}"} for pid in pids]})
        if len(pids) == 2:
            coordinator.row(generation, row(generation, 1))
    group = coordinator.shell.control.group
    assert group.first_steps.new == {"m3"}
    stopped_s[0] = group.first_steps.patience_s + 10.0
    coordinator.shell.tick()
    assert coordinator.row(generation, row(generation, 1)) == RowAnswer()
    assert events_of(coordinator, "failure") == []
    assert [keeper.killed for keeper in keepers.values()] == [[], [], []]


def test_the_nodes_of_ray_are_fetched_once_a_while_though_every_rank_asks_for_neighbours(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16,384 ranks on 2,048 nodes took 215 s of the coordinator's time: each fetched all nodes."""
    looks = list[int]()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: looks.append(1) or [])

    def start_of_a_job() -> int:
        looks.clear()
        for node in range(32):
            for _ in range(8):
                coordinator.neighbours(Keeper(f"n{node}").info)
        return len(looks)

    monkeypatch.setattr(module, "NODES_S", 3600.0)
    assert start_of_a_job() == 1
    assert start_of_a_job() == 0
    coordinator._nodes_at = 0.0
    monkeypatch.setattr(module, "NODES_S", 0.0)
    assert start_of_a_job() == 256


# time


def test_a_stopped_worker_is_found_though_nobody_asks_what_there_is_to_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The display's loop was the clock of failure detection: a slow report, and no hung worker was found."""
    made, keeper = make(tmp_path), Keeper("node")
    generation = train(made, keeper)
    made.row(generation, row(generation, 1))
    keeper.pulse_of = [Pulse(7, generation, 1, 5.0, 0.0, "T")]
    until(lambda: keeper.killed == [7])
    assert keeper.told_over == [generation]
    (failure,) = events_of(made, "failure")
    assert failure["cause"] == "worker_hung"
    stalled = events_of(made, "stalled")[0]
    made.shell.close()
    assert "the stacks" in (tmp_path / stalled["stacks"]).read_text()


# storage: a generation's number


def keepers_found(monkeypatch: pytest.MonkeyPatch, *keepers: Keeper) -> None:
    """These are what a coordinator that starts finds of an earlier one."""
    handles = {keeper.info.node: Handle(keeper) for keeper in keepers}
    monkeypatch.setattr("regrow.runtime.fleet.running_keepers", lambda run_id: handles)
    monkeypatch.setattr(module, "this_actor", lambda: None)


@pytest.mark.parametrize("blocks", [False, True], ids=["raises", "blocks"])
def test_a_number_that_storage_does_not_take_is_told_to_nobody_before_it_does(
    blocks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No keeper knows of it: it would be given out again by the next coordinator, whose group's writes would mix."""
    monkeypatch.setattr(log_writer, "RETRY_S", 0.05)
    storage = away(tmp_path, monkeypatch, blocks=blocks)
    first = make(tmp_path)
    storage.back.clear()
    first.join(one(1), 1)
    begun = time.monotonic()
    while time.monotonic() - begun < 2.0:
        answer = first.formation("m1", 0)
        assert answer.seat is None
        assert answer.wait_s > 0
    storage.back.set()
    answer = until(lambda: found if (found := first.formation("m1", 0)).seat else None)
    assert generation_of(answer) == 1
    assert [event["generation"] for event in read_events(storage) if event["event"] == "forming"] == [1]
    first.shell.close()


def test_a_number_that_went_with_a_coordinator_is_not_given_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, generation 1 of a dead coordinator and generation 1 of the next one both passed the fence."""
    storage, keeper = away(tmp_path, monkeypatch), Keeper("node")
    first = make(tmp_path)
    first.register_keeper(Handle(keeper), keeper.info)
    storage.back.clear()
    old = generation_of(join(first, one(7, "node")))
    assert keeper.remembered == [old], "training goes on without storage: the group's keepers know its number"
    assert not [event for event in read_events(storage) if event["event"] == "forming"]
    away(tmp_path, monkeypatch)  # storage is back for all but the first coordinator, which died
    keepers_found(monkeypatch, keeper)
    again = make(tmp_path)
    again.adopt_keepers()
    new = generation_of(join(again, one(8, "node")))
    assert new > old
    with pytest.raises(Fenced):
        again.row(old, {})
    again.shell.close()


def test_keepers_of_an_earlier_job_that_go_by_other_settings_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have its snapshots, so none is ended; before, the new settings were taken without a word and not heeded."""
    mine = KeeperSettings.of(SnapshotConfig())
    keepers = [Keeper(node) for node in ("same", "moved", "older", "of older code")]
    moved, older = replace(mine, folder="/mem"), replace(mine, folder="/mem", abandon_after_s=60.0)
    for keeper, settings in zip(keepers, (mine, moved, older, None), strict=True):
        keeper.info = replace(keeper.info, settings=settings)
    keepers_found(monkeypatch, *keepers)
    made = make(tmp_path)
    made.adopt_keepers()
    (note,) = events_of(made, "note")
    assert note["text"].startswith("keepers of an earlier job have snapshots of this run, and go on by that job's ")
    assert "job's snapshot.folder=/mem on 2 nodes, snapshot.abandon_after_s=60.0 on 1 node; to have" in note["text"]
    made.shell.close()


@pytest.mark.parametrize("dies", [False, True])
def test_keepers_are_not_ended_before_all_of_an_earlier_job_have_said_what_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Before, one that was late to answer was ended with the only copy of a step, as if all were in storage."""
    monkeypatch.setattr(fleet, "ANSWER_S", 0.1)
    soon, late = Keeper("soon"), Keeper("late")
    answer: Future[KeeperInfo] = Future()
    late.serve = lambda coordinator, secret: answer  # type: ignore[method-assign, assignment, return-value]
    ended = list[str]()
    keepers_found(monkeypatch, soon, late)
    made = make(tmp_path)
    monkeypatch.setattr(made.shell.fleet, "close", lambda: ended.append("keepers"))
    made.adopt_keepers()
    assert not made.shell.fleet.has_adopted
    if dies:
        answer.set_exception(ray.exceptions.ActorDiedError())
        until(lambda: made.shell.fleet.has_adopted)  # its node is gone, and what it held: nothing to wait for
    made.close(0, "interrupted", "", keep=True)
    assert ended == ["keepers"] * dies


@pytest.mark.parametrize(
    ("cause", "reason", "ends"),
    [
        (TransportError("no device for RDMA"), "interrupted", True),  # what it holds is out of reach of every job
        (OSError(errno.ENOSPC, "No space left on device"), "interrupted", False),  # the next job may reach it
        (OSError(errno.ENOSPC, "No space left on device"), "finished", True),  # none can hold a later step
    ],
)
def test_one_keeper_of_an_earlier_job_that_cannot_serve_keeps_no_others_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: Exception, reason: str, ends: bool
) -> None:
    """Before, no keeper of a run that had finished was ended, and each node's snapshots stayed in its memory."""
    fails = Keeper("fails")
    answer: Future[KeeperInfo] = Future()
    answer.set_exception(RayTaskError("serve", "traceback", cause))
    fails.serve = lambda coordinator, secret: answer  # type: ignore[method-assign, assignment, return-value]
    ended = list[str]()
    keepers_found(monkeypatch, Keeper("serves"), fails)
    made = make(tmp_path)
    monkeypatch.setattr(made.shell.fleet, "close", lambda: ended.append("keepers"))
    made.adopt_keepers()
    made.close(5, reason, "", keep=True)
    assert ended == ["keepers"] * ends


def test_a_group_that_only_keepers_know_of_is_over_when_the_coordinator_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows who its members are: they are told, and form the next one."""
    storage, keeper = away(tmp_path, monkeypatch), Keeper("node")
    first = make(tmp_path)
    known = train(first, keeper)
    until(lambda: [event for event in read_events(storage) if event["event"] == "generation"])
    storage.back.clear()
    unknown = generation_of(join(first, one(7, "node")))
    away(tmp_path, monkeypatch)
    keepers_found(monkeypatch, keeper)
    monkeypatch.setattr(module, "is_restarted", lambda: True)
    again = make(tmp_path)
    assert keeper.told_over == [unknown]
    for generation in (known, unknown):
        with pytest.raises(Fenced):
            again.row(generation, row(generation, 1))
    assert generation_of(join(again, one(7, "node"))) > unknown
    again.shell.close()


def test_a_keeper_that_answers_a_restarted_coordinator_late_has_its_place_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: Future[KeeperInfo] = Future()

    class Late(Keeper):
        def serve(self, coordinator: Any, secret: bytes) -> Any:
            return late

    away(tmp_path, monkeypatch)
    first, keeper = make(tmp_path), Late("node")
    train(first, keeper)
    until(lambda: [each for each in read_events(LocalStorage(tmp_path)) if each["event"] == "generation"])
    first.shell.close()
    keepers_found(monkeypatch, keeper)
    monkeypatch.setattr(module, "is_restarted", lambda: True)
    monkeypatch.setattr(fleet, "ANSWER_S", 0.1)
    del keeper.place
    again = make(tmp_path)
    assert not hasattr(keeper, "place")
    assert again.shell.control.newest_snapshot is None
    generation, step = again.ready(), 5
    held = Held("g-0-5", Version(generation, step), Coordinates(MeshShape(1, 1)), 1, "")
    late.set_result(replace(keeper.info, newest=held.moment, held=(held,)))
    until(lambda: hasattr(keeper, "place"))
    assert until(lambda: again.shell.control.newest_snapshot) == Version(generation, step)
    again.shell.close()


# storage: one writer


def test_of_two_coordinators_of_a_run_the_older_one_ends_its_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clusters on one bucket: before, both trained on, and wrote over each other's checkpoints."""
    monkeypatch.setattr(shell, "FLUSH_EVERY_S", 0.1)
    storage, keeper = away(tmp_path, monkeypatch), Keeper("node")
    old = make(tmp_path)
    generation = train(old, keeper)
    old.row(generation, row(generation, 1))
    until(lambda: read_metrics(storage))
    new = make(tmp_path)
    message = until(lambda: old.updates(0)[1])
    assert "is written by another job now (process " in message
    assert old.formation("m7", generation).given_up == message, "its workers hear it, too"
    old.row(generation, row(generation, 2))
    with pytest.raises(Superseded):
        old.commit(generation, "step-00000002", b"{}")
    monkeypatch.setattr(old.shell.fleet, "close", lambda: None)
    before = read_events(storage)
    begun = time.monotonic()
    assert old.close(2, "failed", message, keep=True) == ""
    assert time.monotonic() - begun < 10.0, "nothing is waited for that will not be written"
    assert read_events(storage) == before
    assert [found["step"] for found in read_metrics(storage)] == [1]
    assert new.updates(0)[1] == ""
    newer = generation_of(join(new, one(8)))
    assert newer > generation
    new.commit(newer, "step-00000002", b"{}")
    assert committed_steps(storage / "checkpoints") == [2]
    new.shell.close()


def test_what_a_coordinator_says_counts_though_its_clock_is_behind_that_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keepers and the driver take what has the higher number: it was wall time, and they heard nothing for an hour."""
    keeper, shown = Keeper("node"), list[int]()
    for clock in (2_000_000_000.0, 1_000_000_000.0):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        monkeypatch.setattr(time, "time_ns", lambda clock=clock: int(clock * 1e9))
        made = make(tmp_path)
        generation = train(made, keeper)
        made.snapshots_sealed([SnapshotAck("node", Version(generation, 1), ())])
        shown += [update.number for update in made.updates(0)[0]]
        made.shell.close()
        made.lock.close()  # type: ignore[union-attr]
    assert keeper.numbers == sorted(set(keeper.numbers))
    assert len(keeper.numbers) >= 2
    assert shown == sorted(set(shown))


# storage


class Away(LocalStorage):
    """An object store that is away for a while: it raises, or it does not answer."""

    is_local = False  # appends nowhere, has no locks

    def __init__(self, root: Path, *, blocks: bool = False) -> None:
        super().__init__(root)
        self.blocks, self.back = blocks, threading.Event()
        self.back.set()

    def join(self, *names: str) -> "Away":
        below = Away(self.root.joinpath(*names), blocks=self.blocks)
        below.back = self.back
        return below

    def write_chunks(self, name: str, chunks: Any) -> int:
        if not self.back.is_set():
            if not self.blocks:
                raise OSError("still failing after 120 s: connection refused")
            self.back.wait()
        return super().write_chunks(name, chunks)


@contextmanager
def a_run_without_storage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, blocks: bool
) -> Iterator[tuple[Coordinator, Away, Keeper, int]]:
    """A group trains, has rows in the log, and then storage goes away."""
    monkeypatch.setattr(log_writer, "LATE_S", 0.3)
    monkeypatch.setattr(log_writer, "RETRY_S", 0.05)
    monkeypatch.setattr(shell, "FLUSH_EVERY_S", 0.2)
    monkeypatch.setattr(shell, "FLUSH_S", 0.3)
    monkeypatch.setattr(shell, "FORM_S", 0.2)
    storage, made, keeper = away(folder, monkeypatch, blocks=blocks), make(folder), Keeper("node")
    generation = train(made, keeper)
    made.row(generation, row(generation, 1))
    until(lambda: read_metrics(storage))
    storage.back.clear()
    try:
        yield made, storage, keeper, generation
    finally:
        storage.back.set()
        made.shell.close()


def away(folder: Path, monkeypatch: pytest.MonkeyPatch, *, blocks: bool = False) -> Away:
    """What `Storage.at` opens from here on."""
    storage = Away(folder, blocks=blocks)
    monkeypatch.setattr(Storage, "at", staticmethod(lambda location: storage.join(*_below(folder, location))))
    return storage


def _below(folder: Path, location: Any) -> tuple[str, ...]:
    return Path(str(location)).relative_to(folder).parts


@pytest.mark.parametrize("blocks", [False, True], ids=["raises", "blocks"])
def test_while_storage_is_away_training_goes_on_and_the_log_is_written_later(
    blocks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_run_without_storage(tmp_path, monkeypatch, blocks=blocks) as (made, storage, keeper, generation):
        begun = time.monotonic()
        for step in range(2, 30):
            assert made.row(generation, row(generation, step)) == RowAnswer()
        made.snapshots_sealed([SnapshotAck("node", Version(generation, 29), ())])
        assert keeper.heard[0].newest == Version(generation, 29)
        assert time.monotonic() - begun < 5.0
        lines = lambda: [note["text"] for note in events_of(made, "note") if "run folder" in note["text"]]  # noqa: E731
        until(lines)
        time.sleep(0.5)
        (line,) = lines()
        assert "training goes on, the log is kept in memory" in line
        # a worker that hangs meanwhile is found, and the others form the next group
        keeper.pulse_of = [Pulse(7, generation, 29, 5.0, 0.0, "T")]
        until(lambda: keeper.killed == [7])
        assert generation_of(join(made, one(8))) == generation + 1
        assert made.updates(0)[1] == "", "the run goes on"
        storage.back.set()
        until(lambda: len(lines()) == 2)
        assert "can be written again" in lines()[1]
        until(lambda: len(read_metrics(storage)) == 29)
    names = [event["event"] for event in read_events(LocalStorage(tmp_path))]
    assert [name for name in names if name in ("generation", "failure", "forming")] == [
        "forming",
        "generation",
        "failure",
        "forming",
    ]


def test_a_checkpoint_that_storage_does_not_take_is_given_up_and_the_next_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.control.checkpoints.RETRY_S", 0.1)
    with a_run_without_storage(tmp_path, monkeypatch, blocks=False) as (made, storage, _, generation):
        made.snapshots_sealed([SnapshotAck("node", Version(generation, 4), ())])
        (failed,) = until(lambda: events_of(made, "checkpoint_failed"))
        assert "connection refused" in failed["detail"]
        storage.back.set()
        time.sleep(0.2)
        made.snapshots_sealed([SnapshotAck("node", Version(generation, 8), ())])
        until(lambda: [found["step"] for found in events_of(made, "checkpoint")] == [8])


@pytest.mark.parametrize(
    ("met", "said"),
    [
        (
            RayTaskError("Coordinator.commit", "ray::commit()\n  File actor.py\nOSError: full", OSError("full")),
            "OSError: full",
        ),
        (GetTimeoutError("Get timed out"), "TimeoutError: the run's coordinator has not answered for 360 s"),
    ],
)
def test_a_commit_that_fails_in_the_coordinator_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, met: Exception, said: str
) -> None:
    """It was the remote traceback, of fifteen lines; and no answer was storage that does not take it."""

    def get(*_: Any, **__: Any) -> None:
        raise met.as_instanceof_cause() if isinstance(met, RayTaskError) else met

    monkeypatch.setattr(ray, "get", get)
    client, place = calls.CoordinatorClient(Handle(SimpleNamespace(commit=lambda *_: None)), 1), Storage.at(tmp_path)
    with pytest.raises(NotWrittenError) as raised:
        store.save(place, (), scalars={"step": 7}, run_id="run", generation=1, commit=client.commit)
    assert str(raised.value) == f"checkpoint of step 7 at {place}/step-00000007 was not committed: {said}"


def test_a_notice_is_heeded_though_the_hosts_clock_was_set_forward_since_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a node with a notice of 60 s was taken away before the group left it."""
    step_s, wall = 3600.0, time.time
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: wall() - step_s)
        made = make(tmp_path)
    try:
        soon, late = time.time() + MARGIN_S / 2, time.time() + 1800.0
        made.ray_view([], 1, {"soon": soon, "late": late}, {})
        assert made.avoided_nodes() == {"soon"}
        assert [(each["node"], each["deadline"]) for each in until(lambda: events_of(made, "drain"))] == [
            ("soon", pytest.approx(soon)),
            ("late", pytest.approx(late)),
        ]
        monkeypatch.setattr(time, "time", lambda: wall() - step_s)  # and it is set back
        made.ray_view([], 1, {"soon": soon, "late": late}, {})
        assert made.avoided_nodes() == {"soon"}
    finally:
        made.shell.close()


def test_the_log_is_waited_for_longer_than_its_storage_is_asked_again() -> None:
    """Before, for 60 s: a store that failed for longer just at COMMIT cost the checkpoint, and in the end the log."""
    assert min(shell.FLUSH_S, shell.CLOSE_S) > RETRY_DEADLINE_S + log_writer.RETRY_S
    assert calls.COMMIT_TIMEOUT_S > shell.FLUSH_S + RETRY_DEADLINE_S


def test_a_run_whose_storage_stays_away_ends_and_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "CLOSE_S", 0.5)
    with a_run_without_storage(tmp_path, monkeypatch, blocks=True) as (made, _, _, generation):
        made.row(generation, row(generation, 2))
        monkeypatch.setattr(made.shell.fleet, "close", lambda: None)
        assert "storage is away" in made.close(2, "finished", "", keep=False)


@pytest.mark.parametrize(
    ("is_local", "lost"),
    [
        (True, "the last 6 rows and events of the run's log are lost"),
        (False, "at least the last 6 rows and events of the run's log are lost"),
    ],
)
def test_what_is_lost_is_counted_in_rows_and_events(
    is_local: bool, lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of TensorBoard, ranks.json, flushes and closes counted, too."""
    monkeypatch.setattr(shell, "CLOSE_S", 0.3)
    if not is_local:
        away(tmp_path, monkeypatch)
    config = PretrainConfig(observe=ObserveConfig(tensorboard=is_local, metrics=False))
    made = Coordinator(str(tmp_path), "run", checkpoints="checkpoints", config=config, submitted={})
    generation = train(made, Keeper("node"))
    made.row(generation, row(generation, 1))
    until(lambda: read_metrics(Storage.at(tmp_path)))
    failing = "regrow.record.log._Appender.append" if is_local else "regrow.record.log.RunLog.flush"
    monkeypatch.setattr(failing, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    if not is_local:
        made.shell._writer.put(made.shell._log.flush)
        until(lambda: any("cannot be written" in each["text"] for each in events_of(made, "note")))
    for step in range(2, 6):
        made.row(generation, row(generation, step))
    until(lambda: any("cannot be written" in each["text"] for each in events_of(made, "note")))
    monkeypatch.setattr(made.shell.fleet, "close", lambda: None)
    assert made.close(5, "finished", "", keep=False) == f"storage is away: {lost}"  # its note, and "stopped"


def test_what_the_log_does_not_take_is_tried_until_it_does_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full for a while."""
    monkeypatch.setattr(log_writer, "RETRY_S", 0.01)
    told, written, full = list[str](), list[int](), [True]
    writer = LogWriter(told.append)

    def write(number: int) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        written.append(number)

    numbers = [writer.put(lambda number=number: write(number)) for number in range(5)]  # type: ignore[misc]
    assert not writer.wait(numbers[-1], 0.2)
    with pytest.raises(OSError, match="was not written within 0 s"):
        writer.flush(lambda: None, 0.0)
    full[0] = False
    assert writer.wait(numbers[-1], 20.0)
    assert written == list(range(5))
    assert ["No space left" in told[0], "written again" in told[1], len(told)] == [True, True, 2]
    assert writer.close(1.0) == 0


def test_a_word_of_storage_that_cannot_be_said_does_not_end_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk that is full is that of this process' output, too: no row was written any more, and no COMMIT."""
    monkeypatch.setattr(log_writer, "RETRY_S", 0.01)
    errors = [OSError(28, "No space left on device")]

    def tell(text: str) -> None:
        raise OSError(28, "No space left on device")

    def write() -> None:
        if errors:
            raise errors.pop()

    writer = LogWriter(tell)
    with full_disk():
        assert writer.wait(writer.put(write), 20.0)
        assert writer.wait(writer.put(lambda: 1 // 0), 20.0)
        assert writer.wait(writer.put(write), 20.0)


def test_a_full_disk_of_its_own_output_keeps_a_coordinator_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_run_without_storage(tmp_path, monkeypatch, blocks=False) as (made, storage, _, _), full_disk():
        made.note("note", {"text": "meanwhile"})
        until(lambda: any("cannot be written" in each["text"] for each in events_of(made, "note")))
        storage.back.set()
        monkeypatch.setattr(shell, "FLUSH_S", 60.0)
        made.shell._flush_log()
        assert "meanwhile" in [each.get("text") for each in read_events(storage)]


def test_a_mistake_in_one_work_does_not_keep_the_others_from_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    writer, written = LogWriter(print), list[int]()
    writer.put(lambda: 1 // 0)
    writer.put(lambda: written.append(1))
    assert writer.close(20.0) == 0
    assert written == [1]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_tensorboard_that_fails_keeps_nothing_from_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer does not recover from a disk that was full."""

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("regrow.show.tensorboard.TensorBoard.open", staticmethod(full))
    config = PretrainConfig(observe=ObserveConfig(tensorboard=True, metrics=False))
    made = Coordinator(str(tmp_path), "run", checkpoints="checkpoints", config=config, submitted={})
    generation = train(made, Keeper("node"))
    for step in (1, 2):
        made.row(generation, row(generation, step))
    until(lambda: len(read_metrics(Storage.at(tmp_path))) == 2)
    assert ["no more TensorBoard" in note["text"] for note in events_of(made, "note")] == [True]
    made.shell.close()


# what ranks spend their time on


def test_the_first_file_of_what_ranks_spend_their_time_on_has_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had none, and the next one came half a minute later."""
    monkeypatch.setattr(health, "READ_S", 0.0)
    made, keeper, file = make(tmp_path), Keeper("node"), tmp_path / "ranks.json"
    generation, steps = train(made, keeper), itertools.count(1)

    def is_written() -> bool:
        step = next(steps)
        keeper.pulse_of = [Pulse(7, generation, step, 0.0, 0.0, "R", spent=Spent(step, 2.0 * step))]
        made.row(generation, row(generation, step))
        return file.exists()

    until(is_written)
    made.shell.close()
    assert [each["step_s"] for each in json.loads(file.read_bytes())["ranks"]] == [2.0]


# reports


def test_a_report_that_cannot_be_written_delays_nothing_is_told_of_once_and_tried_again() -> None:
    told, reports, away = list[str](), list[Any](), [True]

    def write() -> dict[str, Any]:
        if away[0]:
            raise OSError("still failing after 120 s")
        return {"goodput": 0.9}

    reporter = Reporter(write, every_s=0.01, written=reports.append, tell=told.append)
    until(lambda: told)
    time.sleep(0.1)
    assert told == ["the report was not written, training goes on: still failing after 120 s"]
    away[0] = False
    until(lambda: reports)
    assert reporter.last() == {"goodput": 0.9}


def test_a_last_report_that_takes_too_long_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.runtime.reporter.LAST_S", 0.1)
    told, back = list[str](), threading.Event()

    def write() -> dict[str, Any]:
        back.wait(20.0)
        raise OSError("away")

    reporter = Reporter(write, every_s=60.0, written=print, tell=told.append)
    assert reporter.last() is None
    assert told == ["report.html is not up to date (it took over 0 s): `python -m jobs.report` writes it"]
    back.set()


# the end


def test_a_slow_deletion_of_old_checkpoints_does_not_fail_a_job_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the coordinator waited for it, the driver for the coordinator, and a finished job had failed."""
    monkeypatch.setattr(shell, "DELETE_S", 0.2)
    made, going_on = make(tmp_path), threading.Event()
    monkeypatch.setattr(publisher, "try_retain", lambda folder, **rest: going_on.wait(60.0) or "")
    monkeypatch.setattr(made.shell.fleet, "close", lambda: None)
    made.shell.publisher.delete(Delete())
    begun = time.monotonic()
    assert (
        made.close(4, "finished", "", keep=False)
        == "old checkpoints are still being deleted: the next attempt goes on with it"
    )
    assert time.monotonic() - begun < 10.0
    going_on.set()
    assert [event["event"] for event in read_events(Storage.at(tmp_path))] == ["submitted", "stopped"]


def test_the_log_of_a_run_is_read_by_whoever_resumes_it(tmp_path: Path) -> None:
    """The last step that has a row, which the next coordinator must know, is in the log."""
    with RunLog(Storage.at(tmp_path)) as log:
        log.event(Forming(generation=1))
        log.begin(1, 0)
        log.row(row(1, 1))
    made = make(tmp_path)
    assert made.next_step() == 2
    made.shell.close()


# the driver's end of a run: `train` itself, Ray Train's group and the terminal in this process


class Terminal:
    """Where the driver's lines go."""

    def __init__(self) -> None:
        self.said = list[str]()
        self.goodput = 0.0

    def message(self, text: str) -> None:
        self.said.append(text)

    def row(self, row: dict[str, Any]) -> None:
        pass


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A group of one worker has trained to step 5, of which step 4 is in storage and 5 is committed in memory alone;
    Ray Train's group is there, and never ends by itself: its workers are dead."""
    config = PretrainConfig(
        cluster=ClusterConfig(max_workers=8, address="auto"),
        checkpoint=CheckpointConfig(every_steps=4, keep=2, timeout_s=2.0),
        observe=ObserveConfig(tensorboard=False, metrics=False),
    )
    made = Coordinator(str(tmp_path), "run", checkpoints="checkpoints", config=config, submitted={})
    monkeypatch.setattr(fleet, "running_keepers", lambda run_id: {})
    monkeypatch.setattr(module, "this_actor", lambda: None)
    made.adopt_keepers()
    keeper = Keeper("node")
    generation = train(made, keeper)
    for step in range(1, 6):
        made.row(generation, row(generation, step))
        if step > 3:
            made.snapshots_sealed([SnapshotAck("node", Version(generation, step), ())])
        until(lambda: step < 4 or committed_steps(Storage.at(tmp_path) / "checkpoints") == [4])  # noqa: B023
    until(lambda: made.settling() == Settling(False, "", 5, ("node",)))
    ended = list[str]()
    monkeypatch.setattr(made.shell.fleet, "close", lambda: ended.append("keepers"))
    monkeypatch.setattr("regrow.control.checkpoints.ASK_AGAIN_S", 0.1)
    monkeypatch.setattr(driver, "LEAVE_S", 0.3)
    monkeypatch.setattr(driver, "stop_stream", lambda stream: None)
    monkeypatch.setattr(driver, "write_report", lambda *_, **__: dict.fromkeys(RATIOS, 1.0))
    monkeypatch.setattr(ray, "get", lambda reference, timeout=None: reference.outcome.result(timeout))
    found = object.__new__(Session)
    found.config, found.run = config, Run(Storage.at(tmp_path), "run", None)
    found.console, found.coordinator = Terminal(), Handle(made)  # type: ignore[assignment]
    found.connection, found.stream = Connection("", "the logs"), None
    found.messages, found.shown, found.startup_s = SimpleQueue(), made.updates(0)[0][-1].number, None
    found.interrupts, found.is_over = driver.Interrupts(found.console), False
    forever = threading.Event()
    found.trainer = SimpleNamespace(fit=forever.wait)
    found.ended, found.made = ended, made  # type: ignore[attr-defined]
    yield found
    forever.set()
    made.shell.close()


def said(session: Session) -> list[str]:
    return session.console.said  # type: ignore[attr-defined, no-any-return]


def interrupt(session: Session, times: int) -> None:
    """Ctrl-C, once the driver listens for it; again once it has said what it does about that, and is another one."""

    def fit() -> None:
        for number in range(times):
            until(lambda: len(said(session)) > number and session.interrupts.asked_to_stop == bool(number))  # noqa: B023
            time.sleep(number * interrupts.SAME_ASK_S)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()

    session.trainer = SimpleNamespace(fit=fit)


def test_a_signal_to_a_process_and_to_its_group_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GNU `timeout` sends it: the second one took the checkpoint away that the first one had asked for."""
    now = [100.0]
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    terminal = Terminal()
    with driver.Interrupts(terminal).taken():  # type: ignore[arg-type]
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            now[0] += interrupts.SAME_ASK_S / 2
        now[0] += 0.15  # two quick presses of keys are two
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert len(terminal.said) == 1


def lose_the_worker(session: Session) -> None:
    session.coordinator.ray_view.remote([("node", 7, "worker_died", "gone")], 0, {}, {})


def test_a_job_that_is_stopped_while_it_waits_for_workers_ends_with_its_newest_step_in_storage(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: "stopped at step 0 of 1000; its checkpoint is committed", and memory was deleted."""
    monkeypatch.setattr(driver, "write_report", lambda *_, **__: {"final_loss": 2.5})
    lose_the_worker(session)
    interrupt(session, 1)
    assert session.train() == "interrupted"
    assert committed_steps(Storage.at(tmp_path) / "checkpoints") == [5, 4]
    assert "stopped at step 5 of 320, loss 2.5000; its checkpoint is committed" in said(session)[-1]
    assert session.ended == ["keepers"]  # type: ignore[attr-defined]


def test_a_job_that_is_given_up_ends_with_its_newest_step_in_storage(session: Session, tmp_path: Path) -> None:
    generation = session.made.ready()  # type: ignore[attr-defined]
    session.coordinator.trouble.remote(generation, one(7, "node"), 1, "the corpus is not mounted")
    with pytest.raises(RegrowError, match="the corpus is not mounted"):
        session.train()
    assert committed_steps(Storage.at(tmp_path) / "checkpoints") == [5, 4]
    assert session.ended == ["keepers"]  # type: ignore[attr-defined]


def test_what_storage_does_not_take_stays_with_its_keepers_and_one_line_says_so(
    session: Session, tmp_path: Path
) -> None:
    shutil.move(tmp_path / "checkpoints", tmp_path / "elsewhere")
    (tmp_path / "checkpoints").write_text("no folder")
    lose_the_worker(session)
    session.interrupts.asked_to_stop = True
    with pytest.raises(RegrowError, match="step 5 is committed in memory and is not in storage") as raised:
        session.train()
    assert "Not a directory" in str(raised.value)
    assert "node node keeps it for snapshot.abandon_after_s=600: the same command goes on from it" in str(raised.value)
    assert session.ended == []  # type: ignore[attr-defined]
    failed = events_of(session.made, "checkpoint_failed")  # type: ignore[attr-defined]
    assert len(failed) > 1, "it was tried again"


@pytest.mark.parametrize(
    ("place", "error", "reason"),
    [
        ("_trainer", ClusterError("no room"), "failed"),
        ("_trainer", OSError(errno.ENOSPC, "No space left on device", "/runs"), "failed"),
        ("_prepare", KeyboardInterrupt(), "interrupted"),
        ("await_coordinator", KeyboardInterrupt(), "interrupted"),
    ],
)
def test_a_job_that_ends_before_it_has_workers_says_so_in_the_log_and_leaves_keepers_that_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException, reason: str
) -> None:
    """Before, status found no word of its end, and the next job counted a driver that had died; and the keepers of an
    earlier job, which nothing had asked yet what they hold, were ended with what they held."""

    def fail(*_: object) -> None:
        raise error

    config = PretrainConfig(
        cluster=ClusterConfig(address="auto"), observe=ObserveConfig(tensorboard=False, metrics=False)
    )
    ended = list[str]()
    monkeypatch.setattr(
        driver,
        "make_coordinator",
        lambda folder, *arguments, **more: Handle(Coordinator(str(folder), *arguments, **more)),
    )
    monkeypatch.setattr(driver, "await_coordinator", lambda *_: None)
    monkeypatch.setattr(driver, "start_stream", lambda *_, **__: None)
    monkeypatch.setattr(driver if place == "await_coordinator" else Session, place, fail)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="here:1"))
    monkeypatch.setattr(ray, "get", lambda reference, timeout=None: reference.outcome.result(timeout))
    monkeypatch.setattr(fleet, "running_keepers", lambda run_id: {"node": "the keeper that holds step 150"})
    monkeypatch.setattr(fleet, "end_keepers", ended.extend)
    run, terminal = Run(Storage.at(tmp_path), "run", 100), Terminal()
    write_rows(tmp_path / "rows", num_rows=24)
    with pytest.raises(type(error)) as caught:
        Session(
            config,
            run,
            Corpora.at(tmp_path / "rows"),
            terminal,
            driver.Startup(),
            Connection("", ""),
            [],
            check(config),  # type: ignore[arg-type]
        )
    assert caught.value is error
    last = read_events(run.folder)[-1]
    assert (last["event"], last["reason"], last["detail"]) == ("stopped", reason, str(error))
    assert ended == []


def test_a_job_that_ends_before_it_has_workers_says_what_the_one_before_has_left_in_memory(session: Session) -> None:
    driver._end_unbegun(session, KeyboardInterrupt())
    assert "step 5 is committed in memory and is not in storage; node node keeps it" in said(session)[-1]
    assert session.ended == []  # type: ignore[attr-defined]


def train_the_last_step(session: Session) -> None:
    session.config.train.steps = 6
    made = session.made  # type: ignore[attr-defined]
    made.row(made.ready(), row(made.ready(), 6))
    made.done()


def test_a_run_whose_last_step_is_in_no_snapshot_has_failed(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, nothing of that was known once the step before was being written: "interrupted", which it was not."""
    train_the_last_step(session)
    lost = "step 6 is neither committed in memory nor in storage: its snapshot was not committed in time"
    with pytest.raises(RegrowError, match=lost):
        session.train()
    assert committed_steps(Storage.at(tmp_path) / "checkpoints") == [5, 4]
    last = read_events(Storage.at(tmp_path))[-1]
    assert (last["event"], last["step"], last["reason"], last["detail"]) == ("stopped", 5, "failed", lost)


def test_a_run_that_ends_early_and_was_not_asked_to_has_failed(session: Session) -> None:
    session.made.done()  # type: ignore[attr-defined]
    with pytest.raises(RegrowError, match="the run ended at step 5 of 320, and nothing says why"):
        session.train()


def test_a_run_that_is_stopped_as_storage_is_full_does_not_say_that_all_is_committed(session: Session) -> None:
    """Before: "stopped at step 4 of 320; its checkpoint is committed", of a run that the ranks had trained further."""
    generation = session.made.ready()  # type: ignore[attr-defined]
    failed = {"step": 9, "detail": "No space left on device"}
    session.coordinator.event.remote(generation, "checkpoint_failed", failed)
    lose_the_worker(session)
    interrupt(session, 1)
    with pytest.raises(RegrowError, match=r"step 9 is neither .*: No space left on device"):
        session.train()


def test_a_signal_to_a_run_that_has_ended_does_not_cut_its_end_short(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: "interrupted" and 130 of a run that had finished, and its log had no end."""
    monkeypatch.setattr(driver, "write_report", lambda *_, **__: {"final_loss": 2.5})
    session.config.train.steps = 5
    session.made.done()  # type: ignore[attr-defined]
    ends = list[str]()

    def close() -> None:
        until(lambda: ends.append(read_events(Storage.at(tmp_path))[-1]["event"]) or ends[-1] == "stopped")
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(session.made.shell.fleet, "close", close)  # type: ignore[attr-defined]
    assert session.train() == "finished"
    assert driver.ENDING in said(session)
    assert "finished 5 steps, loss 2.5000" in said(session)[-1]
    last = read_events(Storage.at(tmp_path))[-1]
    assert (last["event"], last["reason"]) == ("stopped", "finished")


@pytest.mark.parametrize("place", ["stop_stream", "close", "last"])
def test_a_run_that_has_failed_says_so_where_its_end_is_cut_short(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Before, its error, or that a step is in memory alone, came after its log's end and the report: "interrupted"."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    owner = {"stop_stream": driver, "close": Session, "last": Reporter}[place]
    monkeypatch.setattr(owner, place, interrupted)
    monkeypatch.setattr(Session, "_settle", lambda session: Settling(False, "no room", 7, ("node",)))
    session.made.done()  # type: ignore[attr-defined]
    with pytest.raises(RegrowError, match=r"step 7 is committed in memory and is not in storage \(no room\)"):
        session.train()
    assert said(session)[-1] == driver.LEFT


@pytest.mark.parametrize("place", ["_settle", "_fit"])
def test_a_run_that_was_given_up_says_why_where_it_is_left_at_once(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Before: "interrupted" alone."""

    def interrupted(session: Session) -> None:
        until(session._show)
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, place, interrupted)
    shutil.move(tmp_path / "checkpoints", tmp_path / "elsewhere")
    (tmp_path / "checkpoints").write_text("no folder")
    generation = session.made.ready()  # type: ignore[attr-defined]
    session.coordinator.trouble.remote(generation, one(7, "node"), 1, "the corpus is not mounted")
    with pytest.raises(RegrowError, match="the corpus is not mounted"):
        session.train()
    assert "step 5 is committed in memory and is not in storage" in said(session)[-1]


def test_what_a_run_has_failed_by_is_shown_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "_settle", lambda session: Settling(False, "no room", 7, ("node",)))
    session.made.done()  # type: ignore[attr-defined]
    with pytest.raises(RegrowError, match="step 7 is committed in memory"):
        session.train()
    assert not [line for line in said(session) if "step 7" in line]


def test_who_is_asked_twice_leaves_at_once_and_says_what_stays_behind(session: Session, tmp_path: Path) -> None:
    shutil.move(tmp_path / "checkpoints", tmp_path / "elsewhere")
    (tmp_path / "checkpoints").write_text("no folder")
    lose_the_worker(session)
    interrupt(session, 2)
    with pytest.raises(KeyboardInterrupt):
        session.train()
    assert "step 5 is committed in memory and is not in storage" in said(session)[-1]
    assert session.ended == []  # type: ignore[attr-defined]


REFUSED = ray.exceptions.ActorDiedError(
    ray.exceptions.RayTaskError("TrainController.__init__", "...\nOSError: refused", OSError("refused"))
)


def controllers_end_at_once(
    session: Session, monkeypatch: pytest.MonkeyPatch, error: ray.exceptions.RayError = REFUSED
) -> list[bool]:
    """As Ray tells of one whose constructor raised: it reads storage there. How often another one was made."""
    more = list[bool]()

    def fit() -> None:
        raise error

    def another(*, is_first: bool) -> Any:
        more.append(is_first)
        assert len(more) < 1000
        return SimpleNamespace(fit=fit)

    session.trainer, session.job = SimpleNamespace(fit=fit), SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setattr(session, "_trainer", another)
    monkeypatch.setattr(driver, "replace", lambda job, **changes: job)
    return more


def test_controllers_that_end_before_any_group_is_formed_end_the_job(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before, 500 were made in 3 ms, each of them a failure in the log, and so on for ever."""
    monkeypatch.setattr(driver, "AGAIN_S", 0.0)
    more = controllers_end_at_once(session, monkeypatch)
    said = r"^Ray Train's controller died 30 times in a row before a group was formed: OSError: refused"
    with pytest.raises(RegrowError, match=said) as raised:
        session.train()
    assert "\n" not in str(raised.value)
    assert more == [False] * 29
    assert len(events_of(session.made, "failure")) == 30  # type: ignore[attr-defined]
    assert committed_steps(Storage.at(tmp_path) / "checkpoints") == [5, 4]


def test_controllers_end_the_job_after_as_many_failures_as_it_may_have(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "AGAIN_S", 0.0)
    session.config.cluster.max_failures = 2
    more = controllers_end_at_once(session, monkeypatch)
    said = r"^Ray Train's controller died 3 times, with cluster\.max_failures=2: OSError: refused"
    with pytest.raises(RegrowError, match=said):
        session.train()
    assert len(more) == 2


def test_a_controller_on_a_node_without_memory_is_followed_by_another_one(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray has an error of its own for that, which is none of an actor's: the run ended."""
    monkeypatch.setattr(driver, "AGAIN_S", 0.0)
    session.config.cluster.max_failures = 1
    killed = ray.exceptions.OutOfMemoryError("Memory on the node was 9GB used\nMemory usage exceeded\nadvice")
    more = controllers_end_at_once(session, monkeypatch, killed)
    said = r"^Ray Train's controller died 2 times, with .*: Memory on the node was 9GB used; Memory usage exceeded"
    with pytest.raises(RegrowError, match=said):
        session.train()
    assert more == [False]


def test_a_job_that_is_stopped_while_its_controllers_end_waits_for_no_other(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "AGAIN_S", 3600.0)
    monkeypatch.setattr(driver, "write_report", lambda *_, **__: {"final_loss": 2.5})
    more = controllers_end_at_once(session, monkeypatch)
    threading.Timer(0.5, lambda: setattr(session.interrupts, "asked_to_stop", True)).start()
    assert session.train() == "interrupted"
    assert more == []


# the keepers' secret


def test_a_coordinator_that_is_restarted_goes_by_the_secret_of_the_first_keeper_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that an actor is made with holds it: Ray's state keeps that."""
    first = ended(make(tmp_path))
    hung, answers = Keeper("hung"), Keeper("node")
    stopped = threading.Event()
    hung.secret = lambda: hung.threads.submit(stopped.wait)  # type: ignore[assignment, return-value, method-assign]
    restart(monkeypatch, {"hung": Handle(hung), "node": Handle(answers)})
    again = make(tmp_path)
    stopped.set()
    again.shell.close()
    assert again.secret() == b"of the coordinator before"
    assert len(first.secret()) == 32


def test_a_coordinator_that_is_restarted_and_finds_no_keeper_makes_another_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ended(make(tmp_path))
    restart(monkeypatch)
    again = make(tmp_path)
    again.shell.close()
    assert len(again.secret()) == 32
    assert again.secret() != first.secret()


def test_what_ray_train_shows_of_a_jobs_settings_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the function that makes what GET /api/train/v2/runs and the export log say of `train_loop_config`."""
    from ray.train.v2._internal.state.schema import RunSettings

    secret = bytes(range(0x61, 0x81))
    monkeypatch.setattr("secrets.token_bytes", lambda count: secret)
    config = PretrainConfig(observe=ObserveConfig(tensorboard=False, metrics=False))
    made = Coordinator(str(tmp_path), "run", checkpoints="checkpoints", config=config, submitted={})
    assert made.secret() == secret  # workers ask for it
    trainer = trainer_of(tmp_path, Corpora.at(tmp_path), config, run_id="0123456789abcdef", coordinator=made)
    sanitize = RunSettings._sanitize_train_loop_config
    shown, beside = json.dumps(sanitize(trainer.train_loop_config)), json.dumps(sanitize({"beside": secret}))
    made.shell.close()
    assert "0123456789abcdef" in shown
    assert "abcdefgh" in beside  # what is handed to workers it does show
    assert [form for form in ("abcdefgh", secret.hex()) if form in shown] == []


def test_a_report_changes_no_figures_that_the_timer_is_handing_over(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dictionary that changed its size meanwhile ended the job's metrics."""
    others = list[bool]()

    def another() -> None:
        others.append(coordinator.shell.lock.acquire(blocking=False))
        if others[0]:
            coordinator.shell.lock.release()

    def reported(report: Any) -> None:
        other = threading.Thread(target=another)
        other.start()
        other.join()

    monkeypatch.setattr(coordinator.shell.metrics, "reported", reported)
    coordinator.reported(dict.fromkeys(RATIOS, 0.5))
    assert others == [False]


def test_a_coordinator_may_open_as_many_files_as_there_may_be_nodes(tmp_path: Path) -> None:
    """It holds a connection to each; Ray's processes begin with the limit of the shell that has started Ray."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))
    try:
        make(tmp_path).shell.close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
