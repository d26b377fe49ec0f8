"""What `runtime.ray_train` takes for granted of Ray Train's insides: where it no longer holds, that needs a look."""

import dataclasses
import inspect
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import ray

from regrow.runtime import cluster as local_cluster
from regrow.runtime.cluster import KNOWN_RAY, why_not_in_place

PINNED = Path(__file__).parents[2] / "constraints.txt"


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_version_that_is_pinned_installed_and_known_is_one() -> None:
    pinned = re.search(r"^ray==(.*)$", PINNED.read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[1].startswith(KNOWN_RAY), (
        f"constraints.txt pins Ray {pinned[1]}, groups change in place under {KNOWN_RAY}x"
    )
    assert ray.__version__.startswith(KNOWN_RAY), f"this is Ray {ray.__version__}"
    assert why_not_in_place() == ""


def test_another_version_says_that_all_workers_restart_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster.ray, "__version__", "2.61.0")
    assert why_not_in_place() == (
        "groups change in place under Ray 2.60.x, and this is 2.61.0: a failure restarts all workers; "
        "install the Ray of constraints.txt, or say cluster.in_place=false"
    )


def test_every_method_that_is_overridden_is_there_with_its_parameters() -> None:
    from ray.train.v2._internal.execution.worker_group import WorkerGroup
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    assert parameters(WorkerGroup._start_impl) == ["worker_group_state_builder"]
    assert parameters(WorkerGroup._create_placement_group) == ["scaling_config", "worker_group_context"]
    assert parameters(WorkerGroup._create_workers) == [
        "num_workers",
        "placement_group",
        "resources_per_worker",
        "placement_group_bundle_indices",
        "starting_world_rank",
        "world_size",
        "replica_group_size",
    ]
    assert parameters(WorkerGroup._get_worker_runtime_env) == ["custom_runtime_env"]
    assert parameters(WorkerGroup._assign_worker_ranks) == [
        "workers",
        "starting_world_rank",
        "world_size",
        "replica_group_size",
    ]
    assert parameters(WorkerGroup._poll_workers_and_collect_errors) == ["timeout"]
    assert parameters(WorkerGroup._init_train_context)[:2] == ["workers", "sync_actor"]
    assert parameters(DataParallelTrainer._create_default_callbacks) == []
    assert callable(DataParallelTrainer._initialize_and_run_controller)


def test_every_name_that_is_read_or_set_is_there() -> None:
    from ray._private.state import state
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.worker_group import WorkerGroup
    from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
    from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
    from ray.train.v2._internal.execution.worker_group.state import WorkerGroupState, WorkerGroupStateBuilder
    from ray.train.v2._internal.execution.worker_group.worker import Worker
    from ray.train.v2.api import data_parallel_trainer

    source = inspect.getsource(WorkerGroup)
    for name in (
        "_world_rank_to_ongoing_poll",
        "_worker_rank_to_replica_group_rank",
        "_worker_group_state",
        "_worker_group_context",
        "_replica_groups",
        "_train_run_context",
        "_worker_cls",
    ):
        assert re.search(rf"self\.{name}\b", source), name
    for ours in (
        "empty",
        "_raised",
        "_filling",
        "_filled",
        "_in_vain",
        "_told_of",
        "looked_at",
        "_looks",
        "_ended",
        "_ask",
        "told_at",
        "starts",
        "_coordinator",
        "_most",
        "_avoided",
        "draining",
    ):
        assert not re.search(rf"self\.{ours}\b", source), f"Ray Train's group now has a {ours} of its own"
    assert TrainController.worker_group_cls is WorkerGroup
    assert data_parallel_trainer.TrainController is TrainController
    assert {"workers", "placement_group_handle", "sync_actor"} <= {f.name for f in dataclasses.fields(WorkerGroupState)}
    assert {"running", "error", "training_report"} <= {f.name for f in dataclasses.fields(WorkerStatus)}
    error = RuntimeError("what a train function raised")
    assert UserExceptionWithTraceback(error, "")._base_exc is error
    assert [f.name for f in dataclasses.fields(Worker)][:3] == ["actor", "metadata", "resources"]
    assert "placement_group_bundle_index" in {f.name for f in dataclasses.fields(Worker)}
    assert parameters(ReplicaGroup)[:2] == ["workers", "resources_per_worker"]
    assert callable(state.get_draining_nodes)
    assert callable(WorkerGroup.has_started)
    assert callable(WorkerGroup._clear_state)
    assert callable(WorkerGroupStateBuilder.shutdown)


def test_a_dataset_runs_in_a_thread_that_can_be_shut_down() -> None:
    """As `data.stream.dataset.end_executions` does where a task hangs."""
    from ray.data._internal.execution.streaming_executor import StreamingExecutor

    assert issubclass(StreamingExecutor, threading.Thread)
    assert parameters(StreamingExecutor.shutdown) == ["force", "exception"]


def test_the_callback_that_is_left_out_is_still_called_so() -> None:
    """Under another name it would be left in, and remove the places of a group that goes on."""
    import ray.train.v2._internal.callbacks.placement_group_callback as module

    assert hasattr(module, "PlacementGroupCleanerCallback")
