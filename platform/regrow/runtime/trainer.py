"""Ray Train, as it comes or with a group that changes in place, for a run.

Only its public interface is used here; `runtime.ray_train` touches its insides and is imported where that is safe.
"""

import contextlib
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, NodeDiedError, RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from regrow.record.events import Cause
from regrow.runtime.backend import ProcessGroupBackend, ProcessGroupConfig, last_line
from regrow.runtime.calls import CALL_TIMEOUT_S, CoordinatorClient
from regrow.runtime.cluster import POLLS_PER_S, worker_resources
from regrow.runtime.job import Job

# Read by Ray Train from the driver's environment and passed on to its controller.
TUNING = {
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30",  # a group that cannot be placed is planned anew after this
    "RAY_TRAIN_V2_ENABLED": "1",
}
# Each of these is an actor whose imports cost seconds of CPU: worth it where nodes come and go, not on one machine.
CLUSTER_TUNING = {
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",  # GET /api/train/v2/runs/v1 on the dashboard
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1",
}
LEAST_POLL_S = 0.25  # how soon a dead worker is noticed


def build_trainer(job: Job, *, num_workers: int, train_fn: Any, storage: str, name: str) -> Any:
    """A trainer whose group starts with so many workers, each of which calls `train_fn(job)`. Its own bookkeeping
    goes to `<storage>/<name>/`.

    The job, with the manifests of its corpora, travels with the function, which Ray Train puts into the object store
    once; settings would go to each worker by value.
    """
    config = job.config
    local, cluster = config.cluster.address is None, config.cluster
    for key, value in (TUNING | (dict.fromkeys(CLUSTER_TUNING, "0") if local else CLUSTER_TUNING)).items():
        os.environ.setdefault(key, value)
    elastic = cluster.min_workers < cluster.max_workers and not cluster.in_place
    kind: type[DataParallelTrainer] = DataParallelTrainer
    backend: BackendConfig = RestartedConfig(job.coordinator)
    poll_s = max(LEAST_POLL_S, num_workers / POLLS_PER_S)
    if cluster.in_place:
        from regrow.runtime.ray_train import MOST_LOOK_S, InPlaceConfig, InPlaceTrainer

        kind, backend, poll_s = InPlaceTrainer, InPlaceConfig(), min(poll_s, MOST_LOOK_S)
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", f"{poll_s:.2f}")
    os.environ.setdefault("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", str(cluster.silence_s))
    size: Any = (cluster.min_workers, cluster.max_workers) if elastic else num_workers
    return kind(
        partial(train_fn, job),
        train_loop_config={"config": config, "run_id": job.run_id, "coordinator": job.coordinator},
        backend_config=backend,
        scaling_config=ScalingConfig(
            num_workers=size,
            use_gpu=cluster.gpus_per_worker > 0,
            resources_per_worker=worker_resources(cluster),
        ),
        run_config=RunConfig(
            name=name,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=cluster.max_failures),
            callbacks=[ReportFailures(job.coordinator)],  # type: ignore[list-item]
        ),
    )


class RestartedBackend(ProcessGroupBackend):
    """Tells the coordinator, from Ray Train's controller, of a group that is started and ended as a whole: not only
    for failures, but for another size, too."""

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        processes = worker_group.execute(this_process)
        CoordinatorClient(backend_config.coordinator).group_started(processes)  # type: ignore[attr-defined]

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """The coordinator hears of it with the next group, if it cannot be reached now."""
        with contextlib.suppress(RayError):
            CoordinatorClient(backend_config.coordinator).group_shut_down()  # type: ignore[attr-defined]


@dataclass
class RestartedConfig(ProcessGroupConfig):
    coordinator: Any

    @property
    def backend_cls(self) -> type[Backend]:
        return RestartedBackend


def this_process() -> tuple[str, int]:
    """By node and pid."""
    return ray.get_runtime_context().get_node_id(), os.getpid()


class ReportFailures(UserCallback):
    """Tells the coordinator why a group broke, from Ray Train's controller."""

    def __init__(self, coordinator: Any) -> None:
        self.coordinator = coordinator

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        ranks = sorted(worker_exceptions)
        causes = {rank: cause_of(error) for rank, error in worker_exceptions.items()}
        # survivors fail because a peer died: the death is the cause
        first = next((rank for rank in ranks if causes[rank] == Cause.worker_died), ranks[0])
        detail = f"rank {first}: {last_line(worker_exceptions[first])}"
        told = CoordinatorClient(self.coordinator).group_failed(causes[first], detail, ranks)
        with contextlib.suppress(RayError):  # it hears of the next group
            ray.get(told, timeout=CALL_TIMEOUT_S)


def cause_of(error: Exception) -> Cause:
    """`worker_died` for a process or node that is gone, `worker_failed` for an exception in the train function."""
    text = f"{type(error).__name__} {type(error.__cause__).__name__}"
    gone = isinstance(error, ActorDiedError | ActorUnavailableError | NodeDiedError) or "HealthCheck" in text
    return Cause.worker_died if gone else Cause.worker_failed
