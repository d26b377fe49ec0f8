"""A worker group of Ray Train that changes in place: the one file that touches Ray Train's insides, of one version.

A worker's death is not an error of the group, nor is what its train function raises: the controller goes on polling
the others, the coordinator is told, and the lost one's place is filled again when it can be. Every rank is a replica
group of its own to Ray Train (torchft's mode), so that it has no opinion on what ranks do to each other.
"""

import contextlib
import functools
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, ClassVar

import ray
from ray._private.state import state as ray_state
from ray._raylet import PlacementGroupID
from ray.exceptions import RayError, RayTaskError
from ray.train.backend import Backend
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2._internal.execution.worker_group.worker import Worker
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.train.v2.api import data_parallel_trainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from regrow.config.schema import ClusterConfig, PretrainConfig
from regrow.config.spares import most_workers
from regrow.process_log import say
from regrow.record.events import Cause
from regrow.runtime.backend import ProcessGroupBackend, ProcessGroupConfig, last_line
from regrow.runtime.calls import CoordinatorClient
from regrow.runtime.cluster import POLLS_PER_S, room_for
from regrow.runtime.late_starts import LATELY_S, LateStarts, metadata_of

MOST_LOOK_S = 1.0  # between Ray Train's polls, in which workers are asked, at POLLS_PER_S, and all else is looked after
LOOK_S = 0.5  # between looks for room
WAIT_S = 1  # for room, at most, from one look to the next: of less than a whole second Ray makes none
STILL_S = 5.0  # without a further place, before a group begins with those it has: Ray tries again every second at most
FILL_AFTER_S = 3.0  # from a worker's death, or a start in vain, to the first look for room in its place
MOST_FILL_AFTER_S = 120.0  # the same where starts on one node are in vain again and again: it doubles up to that
STARTS_IN_VAIN = 10  # of groups in a row, before the run is given up: some ten minutes
STARTS_AT_ONCE = 32  # workers that come to a group
FIRST_AT_ONCE = 1024  # workers that a group starts with: a thread each, which waits for its process
START_S = 60.0  # for a new worker to take up its function
VIEW_S = 2.0  # between tellings of the whole view: a coordinator that was restarted has forgotten
FORGET_S = 600.0  # after which a death is not told again


class InPlaceBackend(ProcessGroupBackend):
    has_replica_groups = True


class InPlaceConfig(ProcessGroupConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return InPlaceBackend


class InPlaceTrainer(DataParallelTrainer):
    """Ray Train's, with a controller of ours."""

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        # it tidies up after a controller that died, and knows of one placement group only; see `remove_places`
        return [callback for callback in callbacks if type(callback).__name__ != "PlacementGroupCleanerCallback"]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        module: Any = data_parallel_trainer
        before, module.TrainController = module.TrainController, InPlaceController  # there is no other way in
        try:
            return super()._initialize_and_run_controller(**arguments)
        finally:
            module.TrainController = before


class Places(PlacementGroupHandle):
    """Room for each worker there may be: a placement group a worker, in place of Ray Train's one for all of them.

    Workers that compute together have one group together, on one node. A worker in a group on a node that is to be
    avoided goes with it.

    Groups that nothing can be placed in yet are pending, which also is what an autoscaler sees. One that loses its node
    is given up for a new one: Ray 2.60 tries a group that it is to move again and again without a pause, which takes
    half a core of the head (ray-project/ray#65007).
    """

    def __init__(
        self,
        run_id: str,
        bundle: dict[str, float],
        *,
        at_first: int,
        least: int,
        most: int,
        unit: int,
        room: Callable[[], int],
    ) -> None:
        """For `most` workers, `at_first` of which the group starts with, or `least`; `room` says how many the nodes of
        now could hold, were nothing else on them."""
        self._room = room
        self.run_id, self.bundle, self.at_first, self.unit = run_id, bundle, at_first, unit
        self.least, self.num_placed = least, 0  # the latter of the first workers, as `wait` saw it
        self.avoided: frozenset[str] = frozenset()  # nodes
        self.groups = [self._group() for _ in range(0, most, unit)]
        self._chosen_without = [self.avoided] * len(self.groups)  # what was avoided when they were asked for

    @property
    def placement_group(self) -> Any:
        return self

    def ready(self) -> Any:
        return self.groups[0].ready()

    def wait(self, timeout_seconds: float = 30) -> bool:
        """For the groups of the first workers, or of `least` of them where others use what the rest would need; not for
        room that there was, and that a node has taken along since."""
        seen_at = time.monotonic()
        give_up_at, there_was = seen_at + timeout_seconds, self._room() >= self.at_first
        for group in self.groups[: -(-self.at_first // self.unit)]:
            while not group.wait(WAIT_S):
                placed = self._placed()
                if len(placed) * self.unit > self.num_placed:
                    seen_at = time.monotonic()
                self.num_placed = len(placed) * self.unit
                if there_was and self._room() < self.at_first:
                    return False
                is_late = time.monotonic() > give_up_at
                if self.num_placed >= self.least and (is_late or time.monotonic() - seen_at > STILL_S):
                    self._begin_with(placed)
                    return True
                if is_late:
                    return False
        return True

    def _placed(self) -> list[int]:
        """Groups that have a node, as many as the first workers need."""
        tables = ray.util.placement_group_table()
        states = [tables.get(group.id.hex(), {}).get("state") for group in self.groups]
        return [number for number, state in enumerate(states) if state == "CREATED"][: -(-self.at_first // self.unit)]

    def _begin_with(self, placed: list[int]) -> None:
        """These groups become the first ones."""
        others = [number for number in range(len(self.groups)) if number not in set(placed)]
        self.groups = [self.groups[number] for number in [*placed, *others]]
        self.at_first = len(placed) * self.unit

    def rooms(self, places: Iterable[int]) -> dict[int, str]:
        """Those of these places in which a worker could start now, and their nodes.

        Where the node is gone or avoided, another one is asked for.
        """
        usable = {each["NodeID"] for each in ray.nodes() if each["Alive"]} - self.avoided
        by_group: dict[int, list[int]] = {}
        for place in places:
            by_group.setdefault(place // self.unit, []).append(place)
        nodes = {number: self._usable_node(number, usable) for number in by_group}
        return {place: nodes[number] for number, of_group in by_group.items() if nodes[number] for place in of_group}

    def worker(self, place: int, of: type, runtime_env: Any, tell: Callable[[str], None]) -> Worker:
        """Start a worker in this place, as `WorkerGroup._create_workers` does, which waits for its actor for good."""
        group, bundle = self.groups[place // self.unit], place % self.unit
        remote: Any = ray.remote(runtime_env=runtime_env, **bundle_to_remote_args(self.bundle))(of)
        actor = remote.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote()

        def node() -> str:
            return str(ray.util.placement_group_table(group)["bundles_to_node_id"].get(0) or "")

        return Worker(actor, metadata_of(actor, node, tell), self.bundle, placement_group_bundle_index=bundle)

    def _usable_node(self, number: int, usable: set[str]) -> str:
        """A group's node; empty where it has none yet, or asks for another one from here on."""
        table = ray.util.placement_group_table(self.groups[number])
        if table["state"] == "PENDING" and self._chosen_without[number] == self.avoided:
            return ""
        node = table["bundles_to_node_id"].get(0)
        if table["state"] == "CREATED" and node in usable:
            return str(node)
        lost, self.groups[number] = self.groups[number], self._group()
        self._chosen_without[number] = self.avoided
        ray.util.remove_placement_group(lost)
        return ""

    def _group(self) -> Any:
        elsewhere = {"ray.io/node-id": f"!in({','.join(sorted(self.avoided))})"}
        return ray.util.placement_group(
            [self.bundle] * self.unit,
            strategy="STRICT_PACK" if self.unit > 1 else "PACK",
            name=f"{self.run_id}:{secrets.token_hex(8)}",
            bundle_label_selector=[elsewhere] * self.unit if self.avoided else None,
        )

    def shutdown(self) -> None:
        for group in self.groups:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(group)


def remove_places(run_id: str) -> None:
    """Give back what a controller that died had reserved: Ray keeps it for as long as the driver lives, and for good
    where it is reserved while the job already ends."""
    for number, table in ray.util.placement_group_table().items():
        if table["state"] != "REMOVED" and table["name"].startswith(f"{run_id}:"):  # Ray forgets none
            with contextlib.suppress(Exception):  # it is being removed
                ray.util.remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(number)))


class Starts:
    """Of this process' groups, one after the other, as far as they come to nothing: the log says why, and a run for
    which that goes on is given up."""

    def __init__(self) -> None:
        self.waits_since: float | None = None  # for `min_workers` places
        self.in_vain, self._told = 0, ""  # in a row, and what the log has of them

    def lack_room(self, placed: int, cluster: ClusterConfig, coordinator: CoordinatorClient) -> None:
        """Say once that there is too little; the run ends where that has been so for too long."""
        least, patience_s, now = cluster.min_workers, cluster.wait_for_workers_s, time.monotonic()
        few = f"Ray has places for {placed} of cluster.min_workers={least} workers: the others' are in use, or gone"
        if placed >= least:  # a node went meanwhile: planned anew
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = now
            coordinator.note("note", {"text": f"{few}; the run waits for room, up to {patience_s:.0f} s"})
        elif now - self.waits_since > patience_s:
            more = "bring nodes, or let it wait longer with cluster.wait_for_workers_s"
            coordinator.fail(f"{few}, for {patience_s:.0f} s; {more}")

    def fail(self, error: Exception, coordinator: CoordinatorClient) -> None:
        """Workers died, or could not be started; returns once it is time to try again."""
        self.in_vain += 1
        why = said_of(error)
        if self.in_vain >= STARTS_IN_VAIN:
            coordinator.fail(f"no group of workers starts, tried {self.in_vain} times in a row: {why}")
        elif why != self._told:
            text = f"no group of workers starts, and it is tried up to {STARTS_IN_VAIN} times in a row: {why}"
            coordinator.note("note", {"text": text})
        self._told = why
        time.sleep(min(FILL_AFTER_S * 2 ** (self.in_vain - 1), MOST_FILL_AFTER_S))


def said_of(error: Exception) -> str:
    """Why a group has not started, in a line."""
    cause = error.__cause__ if isinstance(error, WorkerGroupStartupFailedError) else None
    return last_line(cause or error)


class InPlaceGroup(WorkerGroup):
    """A worker group whose ranks die and come back one by one. Each worker is in a place, as those before it were."""

    starts: ClassVar[Starts] = Starts()

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        self.empty: dict[int, float] = {}  # places whose worker is gone, since when
        self._raised: dict[int, Exception] = {}  # those of them whose worker's train function raised something
        self._filling: dict[int, str] = {}  # places, each of them by a thread, and their nodes
        self._filled: SimpleQueue[tuple[int, Any]] = SimpleQueue()  # with the worker, or the error where it was in vain
        self._in_vain: dict[int, tuple[str, float, float]] = {}  # of such a place: the node, left until when, how long
        self._told_of: set[str] = set()  # what keeps workers from starting
        self._starting = threading.Semaphore(STARTS_AT_ONCE)
        self._started_at: dict[int, float] = {}  # places that were filled since the group started
        self._dead: dict[tuple[str, int], tuple[float, str, str]] = {}  # processes: since when, cause and detail
        self.looked_at = self.told_at = 0.0
        self._looks = 0  # until workers are asked again
        self._ended: set[int] = set()  # places whose worker had ended by then
        settings: Any = self._train_run_context.train_loop_config  # as `runtime.trainer` says them
        config: PretrainConfig = settings["config"]
        self._cluster, self._run_id = config.cluster, settings["run_id"]
        self._coordinator, self._most = CoordinatorClient(settings["coordinator"]), most_workers(self._cluster)
        self._unit, self._late = config.parallel.tp, LateStarts(self._coordinator)
        self._avoided: Any = None  # an answer of the coordinator's, on its way
        self.draining: dict[str, float] = {}
        context = self._worker_group_context
        self._worker_group_context = replace(context, num_workers=self.at_first(context.num_workers))
        try:
            super()._start_impl(worker_group_state_builder)
        except WorkerGroupStartupTimeoutError:
            self.starts.lack_room(self._places.num_placed, self._cluster, self._coordinator)
            raise
        except RayTaskError:  # a worker lives, and cannot begin to train: most likely none can
            raise
        except (RayError, WorkerGroupStartupFailedError) as error:
            worker_group_state_builder.shutdown()  # workers that have begun already would form a group
            if self.has_started():
                self._clear_state()
            # those that have joined are gone: the next ones form no group with them
            self._coordinator.group_failed(Cause.worker_died, f"no group of workers starts: {said_of(error)}", [])
            self.starts.fail(error, self._coordinator)
            raise WorkerGroupStartupFailedError("no group of workers starts") from error  # any other ends the run
        InPlaceGroup.starts = Starts()
        self._place_of = list(range(len(self.get_workers())))  # of each of Ray Train's workers

    def at_first(self, planned: int) -> int:
        """How many workers the group starts with: as planned, or as many as there is room for since. Nodes may have
        died, or be about to go; the places that are left are filled once there is room again."""
        room = room_for(self._cluster, self._unit, avoided=ray_state.get_draining_nodes())
        return min(planned, room) if room >= self._cluster.min_workers else planned

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Places:
        remove_places(self._run_id)
        context = worker_group_context
        self._places = Places(
            self._run_id,
            context.resources_per_worker,
            at_first=context.num_workers,
            least=self._cluster.min_workers,
            most=self._most,
            unit=self._unit,
            room=lambda: room_for(self._cluster, self._unit),
        )
        return self._places

    def _create_workers(self, num_workers: int, placement_group: Any, *more: Any, **options: Any) -> list[Any]:
        if not isinstance(placement_group, Places):
            return super()._create_workers(num_workers, placement_group, *more, **options)
        if placement_group.at_first < num_workers:
            fewer = f"the run begins with {placement_group.at_first} of {num_workers} workers"
            text = f"{fewer}: Ray has no room for the others, whose nodes others may use; they come once it has"
            self._coordinator.note("note", {"text": text})
            num_workers = placement_group.at_first
            self._worker_group_context = replace(self._worker_group_context, num_workers=num_workers)
        with ThreadPoolExecutor(FIRST_AT_ONCE) as starting:
            return list(starting.map(lambda place: self._worker_for(place, placement_group), range(num_workers)))

    def _worker_for(self, place: int, places: Places) -> Any:
        runtime_env = self._get_worker_runtime_env(self._train_run_context.run_config.worker_runtime_env or {})
        tell = functools.partial(self._note_once, about="an actor that is late")  # for one reason there may be many
        worker = places.worker(place, self._worker_cls, runtime_env, tell)
        world_size = max(place + 1, self._worker_group_context.num_workers)
        return self._assign_worker_ranks([worker], place, world_size, replica_group_size=1)[0]

    def _poll_workers_and_collect_errors(self, timeout: float | None) -> list[WorkerStatus]:
        """Ask all workers, or none where it is not their turn: what else is looked after does not wait for that."""
        self._take_in()  # not while they are asked: what is answered is always of the worker in that place
        self._looks -= 1
        if self._looks <= 0:
            statuses = self._ask(timeout)
            self._looks = math.ceil(len(statuses) / (POLLS_PER_S * MOST_LOOK_S))
        else:
            running = [place not in self._ended for place in self._place_of]
            statuses = [WorkerStatus(running=each, error=None, training_report=None) for each in running]
        if time.monotonic() - self.told_at > VIEW_S:
            self._tell()
        is_empty = len(self.empty) == len(statuses)
        if is_empty and len(self._raised) == len(statuses):  # the group's error: counted, and all start anew
            return [WorkerStatus(running=False, error=self._raised[place]) for place in self._place_of]
        if is_empty or any(status.running for status in statuses):
            self._fill()
        if is_empty:  # the group is not over for that
            statuses[0] = WorkerStatus(running=True, error=None, training_report=None)
        return statuses

    def _ask(self, timeout: float | None) -> list[WorkerStatus]:
        """Of all workers; a death is noted, and is no error."""
        statuses = super()._poll_workers_and_collect_errors(timeout)
        for rank, status in enumerate(statuses):
            if status.error is not None:  # Ray Train would start a worker in place 0 for it, and wait for that for good
                if self._place_of[rank] not in self.empty:
                    self.empty[self._place_of[rank]] = time.monotonic()
                    self._note_death(rank, status.error)
                self._world_rank_to_ongoing_poll.pop(rank, None)
                statuses[rank] = WorkerStatus(running=False, error=None, training_report=None)
        of_places = zip(self._place_of, statuses, strict=True)
        self._ended = {place for place, status in of_places if not status.running}
        return statuses

    def _note_death(self, rank: int, error: Exception) -> None:
        worker = self.get_workers()[rank]
        process, cause, said = worker.metadata, Cause.worker_died, last_line(error)
        if isinstance(error, WorkerHealthCheckTimeoutError):  # whose last line names a variable that regrow sets
            cause = Cause.worker_hung
            said = f"no answer to Ray Train for {self._worker_health_check_timeout_s:g} s (cluster.silence_s)"
        elif isinstance(error, UserExceptionWithTraceback):
            cause = Cause.worker_failed
            self._raised[self._place_of[rank]] = error
        detail = f"process {process.pid} on node {process.node_id[:12]}: {said}"
        if cause == Cause.worker_failed:  # it may have joined no group, and a host that it fails on again is left alone
            self._coordinator.handle.unfit.remote(process.node_id, process.pid, said, "")
        if cause != Cause.worker_hung:  # an actor that lives keeps the place
            with contextlib.suppress(Exception):
                ray.kill(worker.actor)
        self._dead[process.node_id, process.pid] = time.monotonic(), cause, detail
        self.told_at = 0.0  # at once

    def _tell(self) -> None:
        """All that Ray shows: what was said before too."""
        now, workers = time.monotonic(), dict(zip(self._place_of, self.get_workers(), strict=True))
        living = {place: worker for place, worker in workers.items() if place not in self.empty}
        for place in self._late.to_end(living, self._started_at):
            self.empty[place], process = now, workers[place].metadata
            with contextlib.suppress(Exception):
                ray.kill(workers[place].actor)
            detail = f"process {process.pid} on node {process.node_id[:12]}: it hung before it joined"
            self._dead[process.node_id, process.pid] = now, Cause.worker_hung, detail
        self._dead = {each: death for each, death in self._dead.items() if now - death[0] < FORGET_S}
        dead = [(*process, cause, detail) for process, (_, cause, detail) in self._dead.items()]
        here = {place: each.metadata.node_id for place, each in living.items() if place not in self.empty}
        here |= self._filling
        lately = {place for place, at in self._started_at.items() if now - at < LATELY_S} | self._filling.keys()
        busy = {here[place] for place in lately if place in here}
        placed = {node: count for node, count in Counter(here.values()).items() if node in busy}
        self._coordinator.ray_view(dead, len(workers) - len(self.empty), self.draining, placed)
        self.told_at = now

    def _fill(self) -> None:
        """Have places filled, or more added, where Ray has room now: all at once, as each change of the group stops it.

        Beside the control loop.
        """
        if time.monotonic() - self.looked_at < LOOK_S:
            return
        self.looked_at = time.monotonic()
        state: Any = self._worker_group_state
        places: Places = state.placement_group_handle
        self._heed_notices(places)
        wanted = self.empty.keys() | set(range(self._most)).difference(self._place_of)
        for place, node in places.rooms(sorted(wanted - self._filling.keys())).items():  # which gives up lost groups
            failed_on, until, _ = self._in_vain.get(place, ("", 0.0, 0.0))
            if failed_on == node and time.monotonic() < until:
                continue  # most likely it fails again
            if time.monotonic() - self.empty.get(place, 0.0) < FILL_AFTER_S:
                continue  # a node that was killed is listed alive for a while
            self._filling[place] = node
            threading.Thread(target=self._start_worker, args=(place,), name=f"place-{place}", daemon=True).start()
            self.told_at = 0.0

    def _heed_notices(self, places: Places) -> None:
        """Tell the coordinator of nodes that are to be taken away; take from it where nothing is to be started."""
        draining = {node: at / 1e3 or time.time() for node, at in ray_state.get_draining_nodes().items()}  # 0: at once
        if draining.keys() != self.draining.keys():
            self.told_at = 0.0
        self.draining = draining
        if self._avoided is not None and ray.wait([self._avoided], timeout=0)[0]:
            with contextlib.suppress(ray.exceptions.RayError):
                places.avoided = frozenset(ray.get(self._avoided)) | draining.keys()
            self._avoided = None
        if self._avoided is None:
            self._avoided = self._coordinator.handle.avoided_nodes.remote()

    def _start_worker(self, place: int) -> None:
        context = self._worker_group_context
        state: Any = self._worker_group_state
        try:
            with self._starting:
                worker = self._worker_for(place, state.placement_group_handle)
                self._init_train_context([worker], state.sync_actor)
                ray.get(worker.actor.run_train_fn.remote(context.train_fn_ref), timeout=START_S)
        except Exception as error:  # its node is gone again: the place stays empty, and is tried anew
            self._filled.put((place, error))
            say(f"place {place} is not filled: {type(error).__name__}: {last_line(error)}")
            return
        self._filled.put((place, worker))
        if not self.has_started():  # the run has ended meanwhile
            ray.kill(worker.actor)

    def _take_in(self) -> None:
        """Make the workers that have started members of the group."""
        groups: Any = self._replica_groups
        ranks: Any = self._worker_rank_to_replica_group_rank
        while not self._filled.empty():
            place, worker = self._filled.get()
            node = self._filling.pop(place, "")
            if isinstance(worker, Exception):
                self._was_in_vain(place, node, worker)
                continue
            self._in_vain.pop(place, None)
            if place not in self._place_of:
                self._place_of.append(place)
            state: Any = self._worker_group_state
            rank = self._place_of.index(place)
            groups[rank : rank + 1] = [ReplicaGroup([worker], self._worker_group_context.resources_per_worker)]
            ranks[rank] = rank
            workers = [*state.workers[:rank], worker, *state.workers[rank + 1 :]]
            self._worker_group_state = replace(state, workers=workers)
            self._world_rank_to_ongoing_poll.pop(rank, None)  # of the dead one: what it says is not the new one's
            self.empty.pop(place, None)
            self._ended.discard(place)
            self._raised.pop(place, None)
            self._started_at[place] = time.monotonic()

    def _was_in_vain(self, place: int, node: str, error: Exception) -> None:
        """No worker has started in this place: the log says why, once, and its node is left for a while."""
        now = time.monotonic()
        failed_on, _, waited_s = self._in_vain.get(place, ("", 0.0, 0.0))
        wait_s = min(2 * waited_s, MOST_FILL_AFTER_S) if failed_on == node else FILL_AFTER_S
        self._in_vain[place] = node, now + wait_s, wait_s
        if place in self.empty:
            self.empty[place] = now
        text = f"no worker starts on node {node[:12]}: {last_line(error)}"
        if self.has_started():  # else the run has ended meanwhile
            self._note_once(text)

    def _note_once(self, text: str, *, about: str = "") -> None:
        if (about or text) not in self._told_of:
            self._told_of.add(about or text)
            self._coordinator.note("note", {"text": text})


class InPlaceController(TrainController):
    worker_group_cls = InPlaceGroup
