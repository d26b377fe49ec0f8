"""A worker group of Ray Train that changes in place: the one file that touches Ray Train's insides, of one version.

A worker's death is not an error of the group: the controller goes on polling the others, the
coordinator is told, and the dead one's place is filled again when it can be. Every rank is a replica group of its own
to Ray Train (torchft's mode), so that it has no opinion on what ranks do to each other.
"""

import contextlib
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import ray
from ray._private.state import state as ray_state
from ray._raylet import PlacementGroupID
from ray.train.backend import Backend
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2.api import data_parallel_trainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.placement_group import PlacementGroup

from regrow.record.events import Cause
from regrow.runtime.backend import ProcessGroupBackend, ProcessGroupConfig, last_line
from regrow.runtime.calls import CoordinatorClient

LOOK_S = 0.5  # between looks for room
FILL_AFTER_S = 3.0  # from a worker's death to the first look for room in its place
STARTS_AT_ONCE = 32  # workers
START_S = 60.0  # for a new worker to take up its function


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

    Workers that compute together have one group together, on one node. Who is in a group on a node that is to be
    avoided goes with it.

    Groups that nothing can be placed in yet are pending, which also is what an autoscaler sees. One that loses its node
    is given up for a new one: Ray 2.60 tries a group that it is to move again and again without a pause, which takes
    half a core of the head (ray-project/ray#65007).
    """

    def __init__(self, run_id: str, bundle: dict[str, float], *, at_first: int, most: int, unit: int) -> None:
        self.run_id, self.bundle, self.at_first, self.unit = run_id, bundle, at_first, unit
        self.avoided: frozenset[str] = frozenset()  # nodes
        self.groups = [self._group() for _ in range(0, most, unit)]
        self._chosen_without = [self.avoided] * len(self.groups)  # what was avoided when they were asked for

    @property
    def placement_group(self) -> Any:
        return self

    def ready(self) -> Any:
        return self.groups[0].ready()

    def wait(self, timeout_seconds: float = 30) -> bool:
        give_up_at = time.monotonic() + timeout_seconds
        return all(
            group.wait(max(0.0, give_up_at - time.monotonic()))
            for group in self.groups[: -(-self.at_first // self.unit)]
        )

    def has_room(self, place: int) -> bool:
        """Whether a worker could start there now; where the node is gone or avoided, another one is asked for."""
        number = place // self.unit
        table = ray.util.placement_group_table(self.groups[number])
        if table["state"] == "PENDING" and self._chosen_without[number] == self.avoided:
            return False
        node = table["bundles_to_node_id"].get(0)
        usable = {each["NodeID"] for each in ray.nodes() if each["Alive"]} - self.avoided
        if table["state"] == "CREATED" and node in usable:
            return True
        lost, self.groups[number] = self.groups[number], self._group()
        self._chosen_without[number] = self.avoided
        ray.util.remove_placement_group(lost)
        return False

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
    """Give back what a controller that died had reserved: Ray keeps it for as long as the driver lives."""
    for number, table in ray.util.placement_group_table().items():
        if table["name"].startswith(f"{run_id}:"):
            with contextlib.suppress(Exception):  # it is being removed
                ray.util.remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(number)))


class InPlaceGroup(WorkerGroup):
    """A worker group whose ranks die and come back one by one. A rank here is a place, whoever is in it."""

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        self._empty: dict[int, float] = {}  # places whose worker is gone, since when
        self._filling: set[int] = set()  # places, each of them by a thread
        self._filled: SimpleQueue[tuple[int, Any]] = SimpleQueue()  # with whom; None where it was in vain
        self._looked_at = 0.0
        job = self._train_run_context.train_loop_config["job"]  # type: ignore[index]
        cluster, self._run_id = job.config.cluster, job.run_id
        self._coordinator, self._most = CoordinatorClient(job.coordinator), cluster.max_workers + cluster.spare_workers
        self._unit = job.config.parallel.tp
        self._avoided: Any = None  # an answer of the coordinator's, on its way
        self._draining: dict[str, float] = {}
        super()._start_impl(worker_group_state_builder)

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Places:
        context = worker_group_context
        return Places(
            self._run_id, context.resources_per_worker, at_first=context.num_workers, most=self._most, unit=self._unit
        )

    def _create_workers(self, num_workers: int, placement_group: Any, *more: Any, **options: Any) -> list[Any]:
        if not isinstance(placement_group, Places):
            return super()._create_workers(num_workers, placement_group, *more, **options)
        with ThreadPoolExecutor(STARTS_AT_ONCE) as starting:
            return list(starting.map(lambda place: self._worker_for(place, placement_group), range(num_workers)))

    def _worker_for(self, place: int, places: Places) -> Any:
        (worker,) = super()._create_workers(
            1,
            places.groups[place // places.unit],
            places.bundle,
            placement_group_bundle_indices=[place % places.unit],
            starting_world_rank=place,
            world_size=max(place + 1, self._worker_group_context.num_workers),
            replica_group_size=1,
        )
        return worker

    def _poll_workers_and_collect_errors(self, timeout: float | None) -> list[WorkerStatus]:
        self._take_in()  # not while they are asked: what is answered is always of the worker in that place
        statuses = super()._poll_workers_and_collect_errors(timeout)
        for place, status in enumerate(statuses):
            if isinstance(status.error, WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError):
                if place not in self._empty:
                    self._empty[place] = time.monotonic()
                    self._tell(place, status.error)
                self._world_rank_to_ongoing_poll.pop(place, None)
                statuses[place] = WorkerStatus(running=False, error=None, training_report=None)
        nobody = len(self._empty) == len(statuses)
        if nobody or any(status.running for status in statuses):
            self._fill()
        if nobody:  # the group is not over for that
            statuses[0] = WorkerStatus(running=True, error=None, training_report=None)
        return statuses

    def _tell(self, place: int, error: Exception) -> None:
        worker = self.get_workers()[place]
        process = (worker.metadata.node_id, worker.metadata.pid)
        left = len(self.get_workers()) - len(self._empty)
        cause = Cause.worker_hung if isinstance(error, WorkerHealthCheckTimeoutError) else Cause.worker_died
        self._coordinator.members_died([process], left, cause, f"place {place}: {last_line(error)}")

    def _fill(self) -> None:
        """Have empty places filled, or one added, where Ray has room for them now; beside the control loop."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        state: Any = self._worker_group_state
        places: Places = state.placement_group_handle
        self._heed_notices(places)
        candidates = list(self._empty)
        if len(state.workers) < self._most:
            candidates.append(len(state.workers))
        for place in candidates:
            # a node that was killed is listed alive for a while
            waited = time.monotonic() - self._empty.get(place, 0.0) > FILL_AFTER_S
            if place not in self._filling and places.has_room(place) and waited:
                self._filling.add(place)
                threading.Thread(target=self._start_worker, args=(place,), name=f"place-{place}", daemon=True).start()

    def _heed_notices(self, places: Places) -> None:
        """Tell the coordinator of nodes that are to be taken away; take from it where nothing is to be started."""
        draining = {node: at / 1e3 or time.time() for node, at in ray_state.get_draining_nodes().items()}  # 0: at once
        if draining.keys() != self._draining.keys():
            self._draining = draining
            self._coordinator.draining(draining)
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
            worker = self._worker_for(place, state.placement_group_handle)
            self._init_train_context([worker], state.sync_actor)
            ray.get(worker.actor.run_train_fn.remote(context.train_fn_ref), timeout=START_S)
        except Exception as error:  # its node is gone again: the place stays empty, and is tried anew
            print(f"place {place} is not filled: {type(error).__name__}: {last_line(error)}", flush=True)
            self._filled.put((place, None))
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
            self._filling.discard(place)
            if worker is None:
                if place in self._empty:
                    self._empty[place] = time.monotonic()
                continue
            state: Any = self._worker_group_state
            groups[place : place + 1] = [ReplicaGroup([worker], self._worker_group_context.resources_per_worker)]
            ranks[place] = place
            workers = [*state.workers[:place], worker, *state.workers[place + 1 :]]
            self._worker_group_state = replace(state, workers=workers)
            self._empty.pop(place, None)


class InPlaceController(TrainController):
    worker_group_cls = InPlaceGroup
