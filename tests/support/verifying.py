"""Real ranks that verify each other, one of them with bits flipped."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from regrow.config.schema import ModelConfig, OptimConfig, ParallelConfig
from regrow.control.verification import Checks, Outcome
from regrow.parallel.fsdp import build_mesh
from regrow.train.build import build_step
from regrow.train.flips import BitFlipper, Order
from regrow.train.verify import VerifiedRows
from support.training import Training, micro_batches, topology_of

MODEL = ModelConfig(vocab_size=128, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=64)
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
        verified=VerifiedRows(topology.batch.most_slices_of_a_pass, SEQ_LEN),
    )
    flipper = BitFlipper(step.model)
    checks = Checks(every_steps, topology.mesh.num_units, 1, num_steps)
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
