"""A stock side of `recovery.py`: Ray Train's elasticity as it comes, around the model and step of `jobs.pretrain`.

python benchmarks/recovery_stock.py SETTINGS-AS-JSON

The training function is what Ray's guides on elastic training and FSDP2 teach: it saves a distributed checkpoint every
few steps, reports it, and begins from `ray.train.get_checkpoint()`. Rank 0 writes a line for each step that has ended
(`steps.jsonl`), and one for each group (`groups.jsonl`).

Tuned, it differs by environment variables (`recovery_sides.TUNED_ENV`) and by a scaling policy that asks for nothing
that cannot be had: by default it decides by reservations that are up to 20 seconds old, asks for as many workers as
before, and waits a minute for a placement group that cannot be placed.
"""

import contextlib
import itertools
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy

# what `ray.train` gives too, but not to a type checker
from ray.train.v2.api.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.torch.torch_trainer import TorchTrainer

from regrow.config.store import load_run_config

COLLECTIVE_TIMEOUT_S = 10  # tuned
LOOK_FOR_ROOM_S = {False: 60.0, True: 1.0}  # as it comes, and tuned: between looks for more nodes
GCS_NOTICES_S = 20.0  # at most, that a node is dead
CONNECT_S = 0.5


def main(settings: dict[str, Any]) -> None:
    settings["config"] = load_run_config(Path(settings["config"]))  # here: workers start sooner without hydra
    ray.init(address=settings["address"], log_to_driver=False)
    tuned = settings["tuned"]
    least, most = settings["workers"]
    trainer = (TunedTrainer if tuned else TorchTrainer)(
        train_fn,
        train_loop_config=settings,
        torch_config=TorchConfig("gloo", timeout_s=COLLECTIVE_TIMEOUT_S) if tuned else TorchConfig("gloo"),
        scaling_config=ScalingConfig(
            num_workers=(least, most),
            resources_per_worker={"CPU": settings["cpus"]},
            elastic_resize_monitor_interval_s=LOOK_FOR_ROOM_S[tuned],
        ),
        run_config=RunConfig(
            name="run",
            storage_path=settings["folder"],
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


def train_fn(settings: dict[str, Any]) -> None:
    """Train until the process is ended."""
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from regrow.data.read.shards import ShardReader
    from regrow.optim.schedule import lr_at
    from regrow.parallel.fsdp import build_mesh
    from regrow.plan.batch import plan_batch
    from regrow.plan.mesh import plan_mesh
    from regrow.train.build import build_step
    from regrow.train.orders import hang_where_ordered

    config = settings["config"]
    optim, parallel = config.optim, config.parallel
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    mesh = build_mesh(plan_mesh(world_size, parallel.dp_replicate), "cpu")
    step = build_step(config.model, parallel, optim, mesh=mesh, device=torch.device("cpu"), seed=config.run.seed)
    model, optimizer = step.model, step.optimizer

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": torch.tensor(finished)}

    finished = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            loaded = state()
            dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        finished = int(loaded["step"])

    group = begin_group(Path(settings["folder"]), rank, world_size)
    plan = plan_batch(num_slices=optim.num_slices, world_size=world_size, slices_per_pass=parallel.slices_per_pass)
    slice_seqs = optim.global_batch_seqs // optim.num_slices
    mine = plan.ranges[rank]
    reader = ShardReader(settings["corpus"], "train")
    tokens_per_step = optim.global_batch_seqs * config.data.seq_len
    with open(Path(settings["folder"]) / "steps.jsonl", "a", buffering=1) as lines:
        for number in itertools.count(finished + 1):
            hang_where_ordered("step")  # of detection.py
            first = (number - 1) * optim.global_batch_seqs
            rows = np.arange(first + mine.start * slice_seqs, first + mine.stop * slice_seqs) % reader.num_rows
            slices = torch.from_numpy(reader.read(rows).astype("int64")).unflatten(0, (-1, slice_seqs))
            lr = lr_at(number * tokens_per_step, total_tokens=config.train.steps * tokens_per_step, config=optim)
            passes = slices.tensor_split(min(len(slices), plan.num_micro_batches))
            micro_batches = [rows_of_pass.flatten(0, 1) for rows_of_pass in passes]
            result = step.run(micro_batches, num_micro_batches=plan.num_micro_batches, lr=lr).resolve()
            finished = number
            if rank == 0:
                ended = {"time": time.time(), "number": number, "group": group, "world_size": world_size}
                lines.write(json.dumps(ended) + "\n")
            if number % settings["checkpoint_every_steps"] == 0:
                with tempfile.TemporaryDirectory() as folder:
                    dcp.save(state(), checkpoint_id=folder)
                    reported = ray.train.Checkpoint.from_directory(folder)
                    ray.train.report({"step": number, "loss": result.loss}, checkpoint=reported)


def begin_group(folder: Path, rank: int, world_size: int) -> int:
    """Write down which ranks train from here on; the number of the group, on rank 0. Collective."""
    import torch.distributed as dist

    workers: list[Any] = [None] * world_size
    dist.all_gather_object(workers, {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()})
    if rank:
        return 0
    with open(folder / "groups.jsonl", "a+") as groups:
        groups.seek(0)
        group = len(groups.readlines()) + 1
        groups.write(json.dumps({"time": time.time(), "group": group, "workers": workers}) + "\n")
    return group


class CurrentReservations(ElasticScalingPolicy):
    """Decides by what is reserved now, not by what was."""

    def make_decision_for_non_running_worker_group(self) -> Any:
        wait_until_gcs_knows_the_dead()
        return super().make_decision_for_non_running_worker_group()

    def _get_reserved_resources(self) -> Any:
        reserved = self._autoscaling_coordinator.get_reserved_resources
        with contextlib.suppress(ray.exceptions.RayError):  # it is asked again
            return ray.get(reserved.remote(self._requester_id, recompute=True), timeout=5)
        return None


class TunedTrainer(TorchTrainer):
    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        arguments["scaling_policy"] = CurrentReservations(arguments["train_run_context"].scaling_config)
        return super()._initialize_and_run_controller(**arguments)


def wait_until_gcs_knows_the_dead() -> None:
    """A raylet that refuses connections is dead: wait until the GCS will not place anything there."""
    give_up_at = time.monotonic() + GCS_NOTICES_S
    while time.monotonic() < give_up_at:
        alive = [node for node in ray.nodes() if node["Alive"]]
        if all(listens(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in alive):
            return
        time.sleep(0.02)


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
