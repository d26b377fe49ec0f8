"""Which of a group's workers count as dead, and when the group is over, without a Ray: what is polled is given."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
)
from ray.train import ControllerError, FailureConfig, WorkerGroupError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupContext, WorkerGroupState

from regrow.config.schema import ClusterConfig, PretrainConfig
from regrow.control import events as e
from regrow.control.losses import REMEMBERED_S
from regrow.record.events import Cause
from regrow.runtime import late_starts, ray_train
from regrow.runtime.backend import last_line
from regrow.runtime.ray_train import VIEW_S, InPlaceGroup, Places, remove_places
from regrow.runtime.trainer import build_trainer
from support.full_disk import full_disk
from support.told import Told, one

SIZE = 3


class Group(InPlaceGroup):
    """Of workers 0, 1 and 2. A subclass, so that a test says what asking a worker comes to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, room: int = SIZE + 5, least: int = 1) -> None:
        self.views: list[tuple[Any, ...]] = []  # of Ray, as the coordinator is told: dead, left, draining, placed
        self.started: list[int] = []  # places
        self.over: set[int] = set()  # workers that have finished
        self.dead: set[int] = set()
        self.error: Exception = WorkerHealthCheckFailedError("gone", RuntimeError("killed"))  # of the dead
        self.places = Rooms()
        self.meanwhile: list[tuple[int, Any]] = []  # what comes of starting workers while others are asked
        self.killed: list[int] = []  # actors, by the pid
        self.unfit: list[tuple[Any, ...]] = []  # as the coordinator is told: node, pid, detail, machine
        self.notes: list[tuple[str, dict[str, str]]] = []
        self.failed: list[tuple[str]] = []
        self.asked: list[tuple[Any, ...]] = []  # about workers that were started long ago
        told = {"ray_view": self.views, "unfit": self.unfit, "note": self.notes, "fail": self.failed}
        told["started"] = self.asked
        self.groups_failed = told["group_failed"] = list[tuple[Any, ...]]()
        settings = {
            "config": PretrainConfig(cluster=ClusterConfig(min_workers=least, max_workers=SIZE + 5)),
            "run_id": "run",
            "coordinator": SimpleNamespace(
                **{
                    name: SimpleNamespace(remote=lambda *said, calls=calls: calls.append(said))
                    for name, calls in told.items()
                }
            ),
        }
        group: Any = self
        group._train_run_context = SimpleNamespace(train_loop_config=settings)
        group._worker_group_context = WorkerGroupContext("1", None, SIZE, {})  # type: ignore[arg-type]
        group._world_rank_to_ongoing_poll = {}
        group._worker_health_check_timeout_s = 8.0
        group._replica_groups, group._worker_rank_to_replica_group_rank = [None] * SIZE, {}
        group._worker_group_state = WorkerGroupState(0.0, self.places, [worker(pid) for pid in range(SIZE)], None)  # type: ignore[arg-type]
        monkeypatch.setattr(WorkerGroup, "_start_impl", lambda *_: None)
        monkeypatch.setattr(ray_train, "room_for", lambda config, unit, *, avoided=(): room - len(avoided))
        monkeypatch.setattr(ray_train.ray_state, "get_draining_nodes", dict)
        monkeypatch.setattr(ray_train.ray, "kill", self.killed.append)
        monkeypatch.setattr(WorkerGroup, "_poll_workers_and_collect_errors", lambda *_: self.answers())
        self._start_impl(None)

    def answers(self) -> list[WorkerStatus]:
        asked = [each.metadata.pid for each in self.get_workers()]
        for started in self.meanwhile:
            self._filled.put(started)
        self.meanwhile.clear()
        return [
            WorkerStatus(running=pid not in self.over | self.dead, error=self.error if pid in self.dead else None)
            for pid in asked
        ]

    @property
    def told(self) -> list[tuple[str, int]]:
        """Node and pid of every process that was reported dead, in the newest view."""
        return [(node, pid) for node, pid, _, _ in self.views[-1][0]] if self.views else []

    def _heed_notices(self, places: Any) -> None:
        """Of none."""

    def _start_worker(self, place: int) -> None:
        """It takes its time."""
        self.started.append(place)

    def poll(self) -> tuple[list[int], bool]:
        """The pids of the workers there are after a poll, and whether Ray Train would go on."""
        statuses = self._poll_workers_and_collect_errors(None)
        assert not any(status.error for status in statuses)  # a death is never an error of the group
        return [each.metadata.pid for each in self.get_workers()], any(status.running for status in statuses)


def worker(pid: int, node: str = "") -> Any:
    return SimpleNamespace(actor=pid, metadata=SimpleNamespace(node_id=node or f"node-{pid}", pid=pid))


class Rooms:
    """Where Ray has room."""

    def __init__(self) -> None:
        self.there: dict[int, str] = {}  # places, and their nodes
        self.asked: list[int] = []  # when last asked

    def rooms(self, places: Iterable[int]) -> dict[int, str]:
        self.asked = places = list(places)
        return {place: self.there[place] for place in places if place in self.there}


def until(what: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 60.0
    while not what():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(monkeypatch)


def test_the_dead_are_told_at_once_and_the_group_goes_on_without_anybody(group: Group) -> None:
    group.dead = {1}
    assert [group.poll()[1] for _ in range(3)] == [True] * 3
    assert group.told == [("node-1", 1)]
    assert len(group.views) == 1, "and not again with each look"
    group.dead = {0, 1, 2}
    assert [group.poll()[1] for _ in range(3)] == [True] * 3
    assert group.told == [("node-1", 1), ("node-0", 0), ("node-2", 2)]
    assert len(group.views) == 2
    assert group.views[-1][1] == 0


def test_a_worker_that_does_not_answer_is_told_of_with_the_setting_that_waited_for_it(group: Group) -> None:
    """The last line of Ray's message names a variable, which regrow sets."""
    group.dead, group.error = {1}, WorkerHealthCheckTimeoutError("A worker health check has been hanging for 8.1 s.")
    group.poll()
    said = "process 1 on node node-1: no answer to Ray Train for 8 s (cluster.silence_s)"
    assert group.views[-1][0] == [("node-1", 1, "worker_hung", said)]


def raised(error: Exception) -> Exception:
    """As Ray Train hands on what a train function raised."""
    return UserExceptionWithTraceback(error, f"Traceback (most recent call last):\n{error}")


def test_a_worker_that_raised_is_a_dead_one_to_ray_train_and_its_place_is_free(group: Group) -> None:
    """Ray Train would start another for place 0, in which rank 0 is, and wait for it without a deadline."""
    group.dead, group.error = {2}, raised(RuntimeError("CUDA error: unspecified launch failure\nCompile with DSA"))
    assert [group.poll() for _ in range(2)] == [([0, 1, 2], True)] * 2
    said = "RuntimeError: CUDA error: unspecified launch failure"
    assert group.views[-1][0] == [("node-2", 2, "worker_failed", f"process 2 on node node-2: {said}")]
    assert group.unfit == [("node-2", 2, said, "")]
    assert group.killed == [2]
    group.error = WorkerHealthCheckFailedError("gone", RuntimeError("killed"))
    group.poll()
    assert (group.killed, len(group.views)) == ([2], 1)
    group.over = {0, 1}
    assert not group.poll()[1], "the others have come to the end of the run"


def test_what_all_workers_raise_is_the_groups_and_counts_for_ray_train(group: Group) -> None:
    """One after another, as it is polled: it starts all of them anew, up to cluster.max_failures times."""
    for dead in ({1}, {0, 1}):
        group.dead, group.error = dead, raised(ImportError("no libcudart"))
        assert group.poll()[1]
    group.dead = {0, 1, 2}
    statuses = group._poll_workers_and_collect_errors(None)
    assert [(status.running, str(status.error).splitlines()[-1]) for status in statuses] == [
        (False, "no libcudart")
    ] * SIZE
    group.meanwhile = [(1, worker(11))]
    group._poll_workers_and_collect_errors(None)
    assert group.poll() == ([0, 11, 2], True)


def test_a_place_of_a_process_that_hangs_is_left_to_its_node(group: Group) -> None:
    """Which ends it, once the coordinator has heard of it."""
    group.dead, group.error = {1}, WorkerHealthCheckTimeoutError("hanging")
    group.poll()
    assert group.killed == []


def test_it_is_over_once_everyone_left_has_finished(group: Group) -> None:
    group.dead, group.over = {1}, {0}
    assert group.poll()[1]
    group.over = {0, 2}
    assert not group.poll()[1]


def test_who_comes_while_the_dead_are_asked_is_not_taken_for_one_of_them(group: Group) -> None:
    """Of a group whose every place was taken so, Ray Train would never have heard the end."""
    group.dead = {0, 1, 2}
    group.poll()
    group.meanwhile = [(place, worker(10 + place)) for place in range(SIZE)]
    group.poll()
    assert group.poll() == ([10, 11, 12], True)
    assert group.told == [("node-0", 0), ("node-1", 1), ("node-2", 2)]
    group.over = {10, 11, 12}
    assert not group.poll()[1]


def test_an_answer_of_a_dead_worker_that_comes_late_is_not_that_of_the_one_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray Train's own asking, which keeps what has not answered in time for the next round."""
    asks = WorkerGroup._poll_workers_and_collect_errors
    group, dead, late = Group(monkeypatch), {1}, set[int]()
    monkeypatch.setattr(WorkerGroup, "_poll_workers_and_collect_errors", asks)
    monkeypatch.setattr(WorkerGroup, "_assert_active", lambda _: None)

    def answer(pid: int) -> WorkerStatus:
        if int(pid) in dead:
            raise RuntimeError("The actor died.")
        return WorkerStatus(running=True, error=None)

    class Asked(int):
        """A worker's answer, by the worker's pid; each is one of its own."""

        __hash__ = object.__hash__
        __eq__ = object.__eq__

    def one(pid: int) -> Any:
        made = worker(pid)
        made.actor = SimpleNamespace(poll_status=SimpleNamespace(remote=lambda: Asked(pid)), pid=pid)
        return made

    def wait(asked: list[Asked], *, num_returns: int, timeout: float | None) -> tuple[list[Asked], list[Asked]]:
        return [each for each in asked if int(each) not in late], [each for each in asked if int(each) in late]

    monkeypatch.setattr("ray.wait", wait)
    monkeypatch.setattr("ray.get", answer)
    state: Any = group._worker_group_state
    group._worker_group_state = replace(state, workers=[one(pid) for pid in range(SIZE)])
    group.poll()
    assert group.told == [("node-1", 1)]
    late.add(1)
    group.poll()
    late.clear()
    group._filled.put((1, one(11)))
    assert group.poll() == ([0, 11, 2], True)
    assert (group.told, [each.pid for each in group.killed], [*group.empty]) == ([("node-1", 1)], [1], [])  # type: ignore[attr-defined]


def test_one_more_comes_and_one_that_could_not_start_leaves_its_place_empty_for_a_while(group: Group) -> None:
    group.meanwhile = [(3, worker(3))]
    group.poll()
    assert group.poll() == ([0, 1, 2, 3], True)
    group.dead = {3}
    group.poll()
    died_at = group.empty[3]
    time.sleep(0.01)
    group.meanwhile = [(3, RuntimeError("its node is gone again"))]
    group.poll()
    assert group.poll() == ([0, 1, 2, 3], True)
    assert group.empty[3] > died_at


def test_a_place_is_not_for_ever_being_filled_where_the_log_disk_is_full(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(place: int, places: Any) -> None:
        raise RuntimeError("its node is gone again")

    monkeypatch.setattr(group, "_worker_for", fails)
    with full_disk():
        InPlaceGroup._start_worker(group, 4)
    place, error = group._filled.get(timeout=60.0)
    assert (place, str(error)) == (4, "its node is gone again")


def test_what_keeps_workers_from_starting_is_told_once_and_tried_less_and_less(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a place that never had a worker, a process was started twice a second for ever, and nothing said why."""
    now, tries = [1000.0], list[float]()
    error = RuntimeError("a worker failed to initialize:\nModuleNotFoundError: No module named 'regrow'")

    def in_vain(place: int) -> None:
        tries.append(now[0] - 1000.0)
        group._filled.put((place, error))

    monkeypatch.setattr(group, "_start_worker", in_vain)
    monkeypatch.setattr(ray_train, "time", SimpleNamespace(monotonic=lambda: now[0]))
    group.places.there = {4: "broken"}
    for _ in range(3000):
        group.poll()
        until(lambda: not group._filling or not group._filled.empty())
        now[0] += 0.5
    assert tries[:5] == [0.0, 3.5, 10.0, 22.5, 47.0]  # looked at every half second
    assert {after - before for before, after in itertools.pairwise(tries[-4:])} == {ray_train.MOST_FILL_AFTER_S + 0.5}
    said = "no worker starts on node broken: ModuleNotFoundError: No module named 'regrow'"
    assert group.notes == [("note", {"text": said})]
    num_tries = len(tries)
    group.places.there = {4: "another"}
    group.poll()
    until(lambda: len(tries) > num_tries)  # at once: that one has not failed yet
    group.poll()
    assert len(group.notes) == 2


class Actor:
    """Whose making takes as long as is said: None is for good."""

    def __init__(self, takes_s: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.takes_s, self.waited_s, self.killed = takes_s, 0.0, False
        self.get_metadata = SimpleNamespace(remote=lambda: self)
        for name in ("wait", "get", "kill"):
            monkeypatch.setattr(late_starts.ray, name, getattr(self, name))

    def wait(self, asked: list[Any], *, timeout: float) -> tuple[list[Any], list[Any]]:
        self.waited_s += timeout
        return (asked, []) if self.takes_s is not None and self.takes_s <= self.waited_s else ([], asked)

    def get(self, asked: Any, *, timeout: float) -> str:
        if not self.wait([asked], timeout=timeout)[0]:
            raise GetTimeoutError("Get timed out: some object(s) not ready.")
        return "metadata"

    def kill(self, actor: Any) -> None:
        self.killed = True


@pytest.mark.parametrize(("takes_s", "late"), [(299.0, False), (800.0, True)])
def test_a_worker_whose_actor_is_late_is_told_of(takes_s: float, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert late_starts.metadata_of(Actor(takes_s, monkeypatch), lambda: "n" * 40, said.append) == "metadata"
    hint = "an import, a mount or its runtime_env may hang there"
    assert said == [f"a worker was started on node {'n' * 12} 300 s ago, and has no actor yet: {hint}"] * late


def test_a_worker_whose_actor_is_never_made_is_ended_and_its_start_was_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Train waits for it for good: so did the place, and the first group of a run."""
    actor = Actor(None, monkeypatch)
    with pytest.raises(
        WorkerGroupStartupFailedError, match="a worker on node node-4 had no actor within 900 s: an imp"
    ):
        late_starts.metadata_of(actor, lambda: "node-4", lambda text: None)
    assert (actor.killed, actor.waited_s) == (True, late_starts.ACTOR_S)


def test_many_actors_that_are_late_are_one_line(group: Group) -> None:
    for node in range(2):
        group._note_once(f"a worker was started on node {node}", about="an actor that is late")
    assert group.notes == [("note", {"text": "a worker was started on node 0"})]


def test_a_worker_that_cannot_start_as_the_run_ends_is_not_told_of(group: Group) -> None:
    group._filling[4] = "node"
    group._filled.put((4, RuntimeError("the actor died")))
    cast(Any, group)._worker_group_state = None
    group._take_in()
    assert (group.notes, group._filling) == ([], {})


def test_what_ray_shows_is_told_again_and_again_for_a_coordinator_that_was_restarted(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of places that are filled again by then; and of nodes that are to go."""
    monkeypatch.setattr(ray_train, "VIEW_S", 0.0)
    group.dead = {1}
    group.poll()
    group.meanwhile = [(1, worker(11))]
    group.poll()
    group.dead = set()
    group.draining = {"node-2": 1e9}
    for _ in range(3):
        group.poll()
    dead, left, draining, _ = group.views[-1]
    assert [(node, pid, cause) for node, pid, cause, _ in dead] == [("node-1", 1, "worker_died")]
    assert (left, draining) == (3, {"node-2": 1e9})
    assert len(group.views) == 5


def test_all_places_with_room_are_filled_at_once_and_the_coordinator_knows_how_many_come(group: Group) -> None:
    """A node with room for four joined as 3, 4, 5 ranks, each of them a stop of all."""
    group.places.there = {4: "new", 5: "new", 6: "new", 7: "new"}  # place 3 has none yet
    group.poll()
    until(lambda: sorted(group.started) == [4, 5, 6, 7])
    group.poll()
    assert group.views[-1][3] == {"new": 4}
    group.meanwhile = [(6, worker(16, "new")), (4, RuntimeError("gone")), (7, worker(17, "new"))]
    group.poll()
    assert group.poll()[0] == [0, 1, 2, 16, 17]
    group.told_at = 0.0
    group.poll()
    assert group.views[-1][3] == {"new": 3}, "two that have started, and one that is starting"
    group.dead = {17}
    group.poll()
    assert group.told == [("new", 17)]
    assert group.views[-1][3] == {"new": 2}
    group.looked_at = 0.0
    group.places.there = {3: "other", 4: "other", 5: "new", 6: "new", 7: "new"}
    group.poll()
    until(lambda: sorted(group.started) == [3, 4, 4, 5, 6, 7])  # 7 in a while: its node may be gone; 4 has another one
    group.meanwhile = [(3, worker(13, "other")), (7, worker(27, "new"))]
    group.poll()
    assert group.poll()[0] == [0, 1, 2, 16, 27, 13]


def test_a_death_is_remembered_for_as_long_as_it_is_told_again() -> None:
    assert REMEMBERED_S >= 2 * ray_train.FORGET_S


def test_a_worker_that_hangs_before_it_joins_is_ended_and_its_place_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answered Ray Train for good; with parallel.tp=8 the seven others of its unit waited as long."""
    now, told = [1000.0], Told(max_workers=8)
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(ray_train, "time", clock)
    monkeypatch.setattr(late_starts, "time", clock)
    group = Group(monkeypatch)
    settings: Any = group._train_run_context.train_loop_config
    settings["coordinator"].started = SimpleNamespace(remote=lambda processes: told(e.Started(processes)))
    monkeypatch.setattr(ray_train.ray, "wait", lambda asked, timeout: (asked, []))
    monkeypatch.setattr(ray_train.ray, "get", lambda answer: answer)
    told.form(one(0, "node-0"), one(1, "node-1"))  # 2 never comes
    told.begin(["node-0", "node-1"])
    told.clear()
    while not group.empty and now[0] < 3000.0:
        now[0] += 2.5
        told.now += 2.5
        group.poll()
    assert [*group.empty] == [2]
    assert 900.0 < now[0] - 1000.0 < 1000.0
    assert group.killed == [2]
    assert group.views[-1][0] == [("node-2", 2, "worker_hung", "process 2 on node node-2: it hung before it joined")]
    (note,), (unfit,) = told.records("note"), told.records("unfit")
    assert note["text"].startswith("process 2 on node node-2 was started 36")
    assert "ago, and has neither joined nor said why" in note["text"]
    assert (unfit["node"], unfit["pid"]) == ("node-2", 2)
    group.dead, group.error = {2}, WorkerHealthCheckFailedError("gone", RuntimeError("killed"))
    group.poll()
    assert (group.killed, group.unfit) == ([2], [])
    group.meanwhile = [(2, worker(12))]
    group.poll()
    assert group.poll() == ([0, 1, 12], True)
    for _ in range(100):
        now[0] += 2.5
        told.now += 2.5
        group.poll()
    assert (group.killed, [*group.empty]) == ([2], [])


def test_among_many_workers_notices_are_looked_for_while_it_is_not_the_workers_turn(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every 33 s at 16,384, as workers were asked: a node that is to go in 30 s was gone by then."""
    many, looks, asked, answers = 16_384, list[int](), list[int](), group.answers
    job: Any = SimpleNamespace(config=PretrainConfig(), run_id="run", coordinator=None)
    with patch.dict(os.environ):
        os.environ.pop("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", None)
        build_trainer(job, num_workers=many, train_fn=print, storage=str(tmp_path), name="run")
        poll_s = float(os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"])
    assert poll_s < VIEW_S
    monkeypatch.setattr(ray_train, "LOOK_S", 0.0)
    monkeypatch.setattr(group, "_heed_notices", lambda places: looks.append(len(looks)))
    monkeypatch.setattr(group, "answers", lambda: (asked.append(len(looks)), answers())[1])
    group._place_of = list(range(many))
    group._worker_group_state = replace(group._worker_group_state, workers=[worker(pid) for pid in range(many)])  # type: ignore[type-var]
    for _ in range(34):
        assert group.poll()[1]
        group.dead = {5}
    assert group.told == [("node-5", 5)]
    group._filled.put((5, worker(many)))
    group.over = set(range(many)) - {5}
    assert [group.poll()[1] for _ in range(33)] == [True] * 33
    assert asked == [0, 33, 66]
    assert len(looks) == 67
    group.over.add(many)
    assert [group.poll()[1] for _ in range(33)] == [True] * 32 + [False]


def test_what_a_lost_node_had_room_for_is_given_up_at_once_and_filled_later(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray tries a placement group that it is to move without a pause: a core of the head, for as long as it has it."""
    monkeypatch.setattr(ray_train, "LOOK_S", 0.0)
    group.places.there = {1: "node-1"}  # which Ray lists alive for a while
    group.dead = {1}
    group.poll()
    assert 1 in group.places.asked
    assert group.started == []
    monkeypatch.setattr(ray_train, "FILL_AFTER_S", 0.0)
    group.poll()
    until(lambda: group.started == [1])


def test_workers_that_compute_together_have_room_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    removed: list[Any] = []
    nodes = {0: "x", 1: "y", 2: "z"}  # of groups, in the order in which they are asked for
    alive = {"x", "y", "z"}

    def ask(bundles: list[Any], **options: Any) -> int:
        asked.append({"bundles": bundles, **options})
        return len(asked) - 1

    monkeypatch.setattr(ray_train.ray.util, "placement_group", ask)
    monkeypatch.setattr(ray_train.ray.util, "remove_placement_group", removed.append)
    monkeypatch.setattr(ray_train.ray, "nodes", lambda: [{"NodeID": node, "Alive": True} for node in alive])
    monkeypatch.setattr(
        ray_train.ray.util,
        "placement_group_table",
        lambda group: {
            "state": "CREATED" if group in nodes else "PENDING",
            "bundles_to_node_id": {0: nodes.get(group)},
        },
    )
    places = Places("run", {"CPU": 1.0}, at_first=2, least=2, most=4, unit=2, room=lambda: 4)
    assert [(each["bundles"], each["strategy"]) for each in asked] == [([{"CPU": 1.0}] * 2, "STRICT_PACK")] * 2
    assert places.rooms(range(4)) == {0: "x", 1: "x", 2: "y", 3: "y"}
    alive.remove("y")
    assert places.rooms(range(4)) == {0: "x", 1: "x"}  # another group is asked for, once for both
    assert places.rooms([2, 3]) == {2: "z", 3: "z"}
    assert removed == [1]
    assert places.groups == [0, 2]


@pytest.mark.parametrize(
    ("room", "least", "draining", "starts"),
    [(8, 1, 0, 3), (2, 1, 0, 2), (3, 1, 1, 2), (1, 2, 0, 3), (2, 2, 1, 3)],  # too little room: it waits for all
)
def test_a_group_starts_with_what_there_is_room_for_now(
    room: int, least: int, draining: int, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was planned may have counted a node that died with Ray Train's controller, or is about to go."""
    group = Group(monkeypatch, room=room, least=least)
    monkeypatch.setattr(ray_train.ray_state, "get_draining_nodes", lambda: {str(node): 0 for node in range(draining)})
    assert group.at_first(SIZE) == starts
    if not draining:
        assert group._worker_group_context.num_workers == starts


def test_workers_that_a_group_starts_with_do_not_wait_for_each_other(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 at a time, each until its process answered, 16,384 of them took a quarter of an hour."""
    begun = threading.Barrier(1024)  # none answers before so many have begun

    def worker_for(place: int, places: Places) -> int:
        begun.wait(60.0)
        return place

    monkeypatch.setattr(group, "_worker_for", worker_for)
    places = Places.__new__(Places)
    places.at_first = 2048
    assert group._create_workers(2048, places) == list(range(2048))


def test_room_that_a_node_has_taken_along_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    group = SimpleNamespace(wait=lambda seconds: waited.append(seconds) or len(waited) > 3)
    monkeypatch.setattr(ray_train.ray.util, "placement_group", lambda *_, **options: group)
    monkeypatch.setattr(Places, "_placed", lambda places: [])

    def wait(*room: int) -> bool:
        """`room` there is when it begins, and after each look."""
        left = list(room)
        more = {"at_first": 3, "least": 1, "most": 4, "unit": 1}
        places = Places("run", {"CPU": 1.0}, room=lambda: left.pop(0) if left else room[-1], **more)
        waited.clear()
        return places.wait(60.0)

    assert wait(3)
    assert not wait(3, 3, 2)
    assert len(waited) == 2
    assert wait(2), "others may come: what is asked for is what an autoscaler sees"


class Reserved:
    """Placement groups, by the order in which they are asked for, of which Ray has placed some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *placed: int) -> None:
        self.placed, self.asked, self.looks = set(placed), 0, 0
        monkeypatch.setattr(ray_train, "STILL_S", 0.0)
        monkeypatch.setattr(ray_train, "LOOK_S", 0.0)
        monkeypatch.setattr(ray_train.ray.util, "placement_group", self.ask)
        monkeypatch.setattr(ray_train.ray.util, "placement_group_table", self.table)
        monkeypatch.setattr(ray_train.ray.util, "remove_placement_group", lambda group: None)

    def ask(self, bundles: list[Any], **options: Any) -> Any:
        number, self.asked = self.asked, self.asked + 1
        return SimpleNamespace(
            number=number, id=SimpleNamespace(hex=lambda: str(number)), wait=lambda seconds: number in self.placed
        )

    def table(self) -> dict[str, dict[str, str]]:
        states = {True: "CREATED", False: "PENDING"}
        return {str(each): {"name": "", "state": states[each in self.placed]} for each in range(self.asked)}


@pytest.mark.parametrize(
    ("placed", "least", "unit", "first"),
    [
        ((0, 1, 3), 1, 1, [0, 1, 3]),
        ((1, 2), 2, 1, [1, 2]),
        ((1,), 2, 2, [1]),
        ((0, 1, 4), 1, 1, [0, 1, 4]),  # a spare's place does as well
        ((1,), 2, 1, None),
        ((), 1, 1, None),
    ],
)
def test_a_group_begins_with_the_places_it_has_where_others_use_the_rest(
    placed: tuple[int, ...], least: int, unit: int, first: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of those that the nodes could hold were waited for, for good, with enough of them there."""
    Reserved(monkeypatch, *placed)
    places = Places(
        "run", {"CPU": 1.0}, at_first=4 * unit, least=least, most=5 * unit, unit=unit, room=lambda: 4 * unit
    )
    assert places.wait(0.01) == (first is not None)
    assert places.num_placed == unit * len(placed)
    assert len(places.groups) == 5
    if first is not None:
        assert places.at_first == len(first) * unit
        assert [group.number for group in places.groups[: len(first)]] == first


def test_places_that_are_there_are_counted_though_a_node_has_gone_before_the_first_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log had "places for 0 of 2 workers"."""
    Reserved(monkeypatch, 0, 1, 2)
    rooms = [4, 3]
    places = Places(
        "run",
        {"CPU": 1.0},
        at_first=4,
        least=2,
        most=4,
        unit=1,
        room=lambda: rooms.pop(0) if len(rooms) > 1 else rooms[0],
    )
    assert not places.wait(30.0)
    assert places.num_placed == 3


def test_a_group_that_begins_with_fewer_says_so_and_numbers_them_by_how_many_they_are(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    Reserved(monkeypatch, 0, 2)
    places: Any = group._create_placement_group(None, group._worker_group_context)
    assert places.wait(60.0)
    monkeypatch.setattr(group, "_worker_for", lambda place, _: (place, group._worker_group_context.num_workers))
    assert group._create_workers(SIZE, places) == [(0, 2), (1, 2)]
    ((kind, said),) = group.notes
    assert kind == "note"
    assert said["text"].startswith("the run begins with 2 of 3 workers: ")


def test_too_little_room_is_said_once_and_ends_the_run_after_wait_for_workers_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was tried again and again without a word."""
    Reserved(monkeypatch, 0)
    now = [1000.0]

    def refuse(group: Any, *_: Any) -> None:
        assert not group._create_placement_group(None, group._worker_group_context).wait(-1.0)
        raise WorkerGroupStartupTimeoutError(SIZE)

    group = Group(monkeypatch, least=2)
    monkeypatch.setattr(WorkerGroup, "_start_impl", refuse)
    monkeypatch.setattr(ray_train.time, "monotonic", lambda: now[0])
    for _ in range(3):
        now[0] += 1799.0
        with pytest.raises(WorkerGroupStartupTimeoutError):
            group._start_impl(None)
    ((_, said),) = group.notes
    assert said["text"].startswith("Ray has places for 1 of cluster.min_workers=2 workers")
    assert said["text"].endswith("the run waits for room, up to 3600 s")
    assert group.failed == []
    now[0] += 3.0
    with pytest.raises(WorkerGroupStartupTimeoutError):
        group._start_impl(None)
    assert "cluster.wait_for_workers_s" in group.failed[0][0]
    monkeypatch.setattr(WorkerGroup, "_start_impl", lambda *_: None)
    group._start_impl(None)
    assert InPlaceGroup.starts.waits_since is None


def test_room_is_looked_for_every_second_or_so_though_ray_waits_for_whole_seconds_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asked to wait for half a second it answered at once: the controller and the GCS were busy with that."""
    looks = list[int]()
    group = SimpleNamespace(wait=lambda seconds: time.sleep(int(seconds)))
    monkeypatch.setattr(ray_train.ray.util, "placement_group", lambda *_, **options: group)
    monkeypatch.setattr(Places, "_placed", lambda places: looks.append(len(looks)) or [])
    places = Places("run", {"CPU": 1.0}, at_first=3, least=1, most=4, unit=1, room=lambda: 0)
    assert not places.wait(2.0)
    assert len(looks) <= 10


def test_places_that_are_removed_are_not_removed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray forgets none: at each start of a group it was asked for all that there ever were."""
    ids, removed = ["0a" * 18, "0b" * 18, "0c" * 18], list[str]()
    tables = zip(ids, [("run:1", "REMOVED"), ("run:2", "PENDING"), ("other:1", "PENDING")], strict=True)
    table = {number: {"name": name, "state": state} for number, (name, state) in tables}
    monkeypatch.setattr(ray_train.ray.util, "placement_group_table", lambda: table)
    monkeypatch.setattr(ray_train.ray.util, "remove_placement_group", lambda group: removed.append(group.id.hex()))
    remove_places("run")
    assert removed == [ids[1]]


MEMORY = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 3ba4fbd28a) "
    "was 3.09GB used / 23.54GB limit (0.131448)\n"
    "OOM kill reason: Memory usage 3286450176B exceeded threshold of 25276504B (0.1% of 25276502016B limit)\n"
)
ADVICE = "Object store memory usage: [- objects spillable: 0\n]\nRefer to the documentation on how to address it"


class Starting:
    """A group whose start comes to nothing, in a process that starts no other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group, self.slept_s, self.removed = Group(monkeypatch), list[float](), 0
        monkeypatch.setattr(InPlaceGroup, "starts", ray_train.Starts())
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=self.slept_s.append)
        monkeypatch.setattr(ray_train, "time", clock)
        self._patch = monkeypatch

    def start(self, error: Exception) -> WorkerGroupStartupFailedError:
        def dies(*_: Any) -> None:
            raise error

        def shutdown() -> None:
            self.removed += 1

        self._patch.setattr(WorkerGroup, "_start_impl", dies)
        with pytest.raises(WorkerGroupStartupFailedError) as raised:
            self.group._start_impl(SimpleNamespace(shutdown=shutdown))
        return raised.value


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Starting:
    return Starting(monkeypatch)


@pytest.mark.parametrize(
    "error",
    [OutOfMemoryError(MEMORY + ADVICE), RuntimeEnvSetupError("no pip"), ActorDiedError()],
    ids=lambda error: type(error).__name__,
)
def test_whatever_workers_die_of_at_a_groups_start_it_is_started_again_after_a_while(
    error: RayError, starting: Starting
) -> None:
    """Ray Train does so for a RayActorError as they are made; of any other, and where they begin to train, it ended."""
    raised = starting.start(error)
    assert raised.__cause__ is error
    policy = DefaultFailurePolicy(FailureConfig(max_failures=-1))
    assert policy.make_decision(ControllerError(raised)) is FailureDecision.RETRY
    assert policy.make_decision(ControllerError(error)) is FailureDecision.RAISE
    said = f"no group of workers starts, and it is tried up to 10 times in a row: {last_line(error)}"
    assert starting.group.notes == [("note", {"text": said})]
    assert starting.removed == 1
    assert not starting.group.has_started(), "one whose workers had begun already"
    assert starting.slept_s == [ray_train.FILL_AFTER_S]
    ended = (Cause.worker_died, f"no group of workers starts: {last_line(error)}", [])
    assert starting.group.groups_failed == [ended], "those that had joined are ended, and would be in the next group"


def test_an_error_that_a_worker_raises_as_it_is_to_begin_ends_the_run_at_once(starting: Starting) -> None:
    error = RayTaskError("run_train_fn", "Traceback\nImportError: no module named x", ImportError("no module named x"))
    with pytest.raises(RayTaskError) as raised:
        starting.start(error)
    assert raised.value is error
    assert starting.group.notes == starting.group.groups_failed == starting.slept_s == []


def test_a_group_that_never_starts_ends_the_run_with_the_cause_and_is_told_of_once(starting: Starting) -> None:
    made = WorkerGroupStartupFailedError("At least one of the worker actors failed to initialize.")
    made.__cause__ = OutOfMemoryError(MEMORY + ADVICE)
    for number in range(ray_train.STARTS_IN_VAIN):
        assert starting.group.failed == []
        assert len(starting.group.notes) == min(number, 1)
        starting.start(made)
    ((said,),) = starting.group.failed
    assert said == f"no group of workers starts, tried 10 times in a row: {'; '.join(MEMORY.splitlines())}"
    assert starting.slept_s[:3] == [3.0, 6.0, 12.0]
    assert max(starting.slept_s) == ray_train.MOST_FILL_AFTER_S


def test_a_group_that_starts_sets_the_starts_in_vain_back(starting: Starting, monkeypatch: pytest.MonkeyPatch) -> None:
    starting.start(ActorDiedError())
    assert InPlaceGroup.starts.in_vain == 1
    Group(monkeypatch)
    assert InPlaceGroup.starts.in_vain == 0


def test_a_node_without_memory_is_told_with_what_was_in_use_and_what_may_be() -> None:
    """Ray's last lines are what one may read, and how to turn it off."""
    error, said = OutOfMemoryError(MEMORY + ADVICE), "; ".join(MEMORY.splitlines())
    assert last_line(error) == said
    assert last_line(WorkerHealthCheckFailedError("A worker health check failed.", error)) == said
    assert last_line(ControllerError(error)) == said


def test_an_error_of_a_train_function_is_told_by_its_first_line_and_of_ray_by_its_last() -> None:
    """Those of CUDA end with advice."""
    error = raised(RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with `X` to see."))
    assert last_line(error) == "RuntimeError: CUDA error: an illegal memory access was encountered"
    group = WorkerGroupError("a snippet\nof it", {3: error, 5: ValueError("later")})
    assert last_line(group) == f"rank 3: {last_line(error)}"
    assert last_line(RuntimeError("The actor died.\n\n  its node is gone \n")) == "its node is gone"


def test_workers_that_were_ended_as_their_group_did_not_start_are_in_no_later_one() -> None:
    """One of three died as it was to begin; the two others had joined, and no view of processes names them."""
    told = Told(min_workers=1, max_workers=3)
    gone, come = [one(1, "a"), one(2, "b")], [one(11, "a"), one(12, "b"), one(13, "c")]
    told.join(*gone, expected=3)
    told(e.GroupFailed(Cause.worker_died, "no group of workers starts: ActorDiedError", ()))
    told.join(*come, expected=3)
    formation = told.ask(come[0].id).formation
    assert formation is not None
    assert set(formation.members) == set(come)
