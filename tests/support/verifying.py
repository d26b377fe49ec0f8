"""Real ranks that verify each other, one of them with bits flipped."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from regrow.config.schema import ModelConfig, OptimConfig, ParallelConfig
from regrow.control.verification import Checks, Outcome
from regrow.optim.adamw import create_moments
from regrow.parallel.float8 import inner_tensor
from regrow.parallel.fsdp import build_mesh
from regrow.plan.mesh import Coordinates
from regrow.state.entries import training_entries
from regrow.state.memory.writer import Snapshots
from regrow.train.build import build_step
from regrow.train.flips import BitFlipper
from regrow.train.orders import WEIGHTS, Order
from regrow.train.verify import VerifiedRows
from support.training import Training, build, micro_batches, run_steps, topology_of

MODEL = ModelConfig(vocab_size=128, dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=64)
SEQ_LEN = 16


@dataclass(frozen=True)
class Seen:
    """Of a rank: outcomes by step, losses, and how many bits were flipped on it."""

    outcomes: dict[int, Outcome]
    losses: list[float]
    flipped: int


def train_verifying(
    parallel: ParallelConfig, every_steps: int, num_steps: int, victim: int, order: Order | None, from_step: int = 1
) -> Seen:
    """Train on this rank of the default group; from this step on the victim has bits flipped."""
    optim = OptimConfig(global_batch_seqs=8, num_slices=8)
    training = Training(MODEL, parallel, optim, seq_len=SEQ_LEN, noise=0.1)
    topology = topology_of(training)
    step = build_step(
        MODEL,
        parallel,
        optim,
        mesh=build_mesh(topology.mesh, "cpu"),
        device=torch.device("cpu"),
        seed=0,
        stages=topology.stages,
        verified=VerifiedRows(topology.batch.most_slices_of_a_pass, SEQ_LEN),
    )
    flipper = BitFlipper(step.model)
    mesh = topology.mesh
    checks = Checks(every_steps, mesh.num_units, 1, num_steps, mesh.pp, mesh.num_stages)
    outcomes, losses = {}, []
    for number in range(1, num_steps + 1):
        if order is not None and dist.get_rank() == victim and number == from_step:
            flipper.obey(order)
        mine, num_micro_batches = micro_batches(training, number)
        result = step.run(
            mine, num_micro_batches=num_micro_batches, lr=1e-3, number=number, verifies=checks.is_due(number)
        ).resolve()
        losses.append(result.loss)
        if result.checksums:
            outcomes[number] = checks.judge(number, result.checksums)
    return Seen(outcomes, losses, flipper.flipped)


def snapshots_of_replicas(folders: list[str], run_id: str, replicas: int, victim: int) -> None:
    """Train and snapshot on this rank; a weight of the victim has a bit flipped between steps 2 and 3."""
    rank, optim = dist.get_rank(), OptimConfig(global_batch_seqs=8, num_slices=8)
    training = Training(MODEL, ParallelConfig(dp_replicate=replicas), optim, seq_len=SEQ_LEN, noise=0.1)
    step = build(training)
    create_moments(step.optimizer)
    entries = training_entries(step.model, step.optimizer, inner_tensor=inner_tensor)
    coordinates = Coordinates(topology_of(training).mesh, rank)
    folder, flipper = Path(folders[rank]), BitFlipper(step.model)
    writer = Snapshots(folder, entries, coordinates=coordinates, run_id=run_id, generation=1, num_slots=3)
    for number in (1, 2, 3):
        if number == 3 and rank == victim:
            flipper.obey(Order(WEIGHTS))
        run_steps(step, training, range(number, number + 1))
        assert writer.begin(number, {"step": number})
        writer.wait()
        writer.confirm(number)
