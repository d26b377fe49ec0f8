"""A whole training run on the ranks of `run_ranks`, as the job does it but on rows that count up."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from regrow.accept.tiny import count_up_rows
from regrow.config.schema import ModelConfig, OptimConfig, ParallelConfig
from regrow.config.stages import stages_of
from regrow.model.llama import Llama
from regrow.model.loss import IGNORE_INDEX
from regrow.parallel.apply import build_model
from regrow.parallel.compile import graphs_compiled
from regrow.parallel.fsdp import build_mesh, let_go_of_meshes
from regrow.plan.topology import Topology, plan_topology
from regrow.train.build import build_step
from regrow.train.step import StepResult, TrainStep, evaluate


@dataclass(frozen=True)
class Training:
    """What is trained, and for how long; never how many ranks train it."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    num_steps: int = 6
    seq_len: int = 16
    seed: int = 0
    noise: float = 0.0
    eot_id: int | None = None

    def rows(self, step: int) -> Tensor:
        """The global batch of a step."""
        return count_up_rows(
            step,
            num_rows=self.optim.global_batch_seqs,
            seq_len=self.seq_len,
            vocab_size=self.model.vocab_size,
            noise=self.noise,
        )


def topology_of(training: Training) -> Topology:
    """Of the default group, a slice a pass."""
    parallel = training.parallel
    return plan_topology(
        dist.get_world_size(),
        num_slices=training.optim.num_slices,
        dp_replicate=parallel.dp_replicate,
        tp=parallel.tp,
        cp=parallel.cp,
        stages=stages_of(training.model, parallel, training.seq_len),
    )


def build(training: Training, *, timeout_s: float | None = None) -> TrainStep:
    """Model, optimizer and step on this rank of the default group. Collective."""
    topology = topology_of(training)
    mesh = build_mesh(topology.mesh, "cpu", timeout_s=timeout_s)
    return build_step(
        training.model,
        training.parallel,
        training.optim,
        mesh=mesh,
        device=torch.device("cpu"),
        seed=training.seed,
        eot_id=training.eot_id,
        stages=topology.stages,
    )


def micro_batches(training: Training, step: int) -> tuple[list[Tensor], int]:
    """This rank's micro-batches, one a slice, of the global batch of `step`, and how many passes every rank runs."""
    optim = training.optim
    topology = topology_of(training)
    rows = training.rows(step)
    slices = rows.split(optim.global_batch_seqs // optim.num_slices)
    return [slices[index] for index in topology.slices_of(dist.get_rank())], topology.batch.num_micro_batches


def run_steps(step: TrainStep, training: Training, steps: range) -> list[StepResult]:
    results = []
    for index in steps:
        mine, num_micro_batches = micro_batches(training, index)
        results.append(step.run(mine, num_micro_batches=num_micro_batches, lr=training.optim.lr).resolve())
    return results


def train(training: Training) -> list[StepResult]:
    """Train from the seed; every step's result, the same on every rank."""
    return run_steps(build(training), training, range(training.num_steps))


def whole(tensor: Tensor) -> Tensor:
    """A parameter or gradient in full, on every rank. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_losses(training: Training) -> list[float]:
    """The same run as a loop that anyone would write: one process, no sharding, no slices, torch's own clipping."""
    with torch.device("cpu"):
        model: Llama = build_model(
            training.model, ParallelConfig(), mesh=None, device="cpu", seed=training.seed, eot_id=training.eot_id
        )
    optim, losses = training.optim, []
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": norms, "weight_decay": 0.0}],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
    )
    for index in range(training.num_steps):
        rows = training.rows(index)
        logits = model(rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        adamw.step()
        losses.append(loss.item())
    return losses


def validation(training: Training, num_rows: int) -> tuple[float, int]:
    """Loss and tokens of some rows, two at a time, each unit its own; on every rank."""
    step, topology = build(training), topology_of(training)
    unit, num_units = topology.unit_of(dist.get_rank()), topology.mesh.num_units
    rows = count_up_rows(99, num_rows=num_rows, seq_len=training.seq_len, vocab_size=training.model.vocab_size)
    mine = list(rows.split(2))[unit::num_units] or [torch.full_like(rows[:2], IGNORE_INDEX)]
    return evaluate(
        step.model,
        mine,
        num_batches=-(-len(rows.split(2)) // num_units),
        groups=step.groups,
        tensor_group=step.tensor_group,
        pipeline=step.pipeline,
        share=step.share,
        loss_function=step.loss_function,
    )


def graphs_of_groups(training: Training, sizes: list[int], folder: str) -> list[tuple[int, float]]:
    """One group after another in the same processes: graphs traced so far, and the loss of each group's last step."""
    rank, found = dist.get_rank(), []
    for number, size in enumerate(sizes):
        dist.barrier() if number == 0 else None
        dist.destroy_process_group()
        let_go_of_meshes()
        if rank >= size:
            break
        store = dist.FileStore(f"{folder}/{number}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        found.append((0, train(training)[-1].loss))
        found[-1] = (graphs_compiled(), found[-1][1])
    return found


def flags_and_digests(training: Training) -> list[tuple[bool, bool, int]]:
    """What every rank hears of a flag that each rank in turn raises, and of the digests that units count."""
    step, topology, seen = build(training), topology_of(training), []
    rank = dist.get_rank()
    for flagged in range(dist.get_world_size()):
        mine, num_micro_batches = micro_batches(training, 0)
        digest = 2**64 - 1 - topology.unit_of(rank)  # all ranks of a unit have the same
        result = step.run(
            mine,
            num_micro_batches=num_micro_batches,
            lr=0.0,
            flag=rank == flagged,
            blocked=rank == flagged,
            digest=digest,
        ).resolve()
        seen.append((result.flag, result.blocked, result.digest))
    return seen
