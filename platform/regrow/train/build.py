"""What the loop needs, from the configuration: the step on this rank of a mesh, its numbers and its meter."""

from contextlib import nullcontext

import torch
from torch.distributed.device_mesh import DeviceMesh

from regrow.config.schema import Dtype, ModelConfig, OptimConfig, ParallelConfig, PretrainConfig
from regrow.model.size import flops_per_token
from regrow.optim.adamw import build_optimizer
from regrow.parallel.apply import build_model
from regrow.parallel.checksums import GradientSums
from regrow.parallel.context_parallel import time_gathers
from regrow.parallel.fsdp import Connecting, axis_groups, coordinates_of, replica_group, shard_group, tensor_group
from regrow.parallel.pipeline import Pipeline
from regrow.parallel.waits import time_collectives
from regrow.plan.batch import BatchPlan
from regrow.plan.pipeline import Stages
from regrow.plan.topology import Topology
from regrow.train.loop import LoopSettings
from regrow.train.metrics import Meter
from regrow.train.profile import profiled_steps
from regrow.train.step import TrainStep, build_loss
from regrow.train.verify import UnitCheck, VerifiedRows


def build_step(
    model: ModelConfig,
    parallel: ParallelConfig,
    optim: OptimConfig,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    seed: int | None,
    eot_id: int | None = None,
    stages: Stages | None = None,
    verified: VerifiedRows | None = None,
    connecting: Connecting = nullcontext,
) -> TrainStep:
    """Collective over the mesh. `seed`, `eot_id`, `stages` and `connecting` are as for `build_model`.

    `verified` is the micro-batch of verifications; None: there are none.
    """
    built = build_model(
        model, parallel, mesh=mesh, device=device, seed=seed, eot_id=eot_id, stages=stages, connecting=connecting
    )
    sums, check = GradientSums(), None
    waits = time_collectives(built, device, replicated=replica_group(mesh) is not None, sums=sums)
    if built.share.cp > 1 and not parallel.compile:
        time_gathers(built, waits)
    if verified is not None:
        num_stages = len(stages.blocks) if stages is not None else 1
        place, vocab_size = coordinates_of(mesh), model.vocab_size
        check = UnitCheck(sums, place, num_stages, rows=verified, vocab_size=vocab_size, device=device)
    dtype = torch.bfloat16 if parallel.dtype is Dtype.bfloat16 else next(built.parameters()).dtype
    return TrainStep(
        built,
        build_optimizer(built, optim),
        max_grad_norm=optim.max_grad_norm,
        groups=axis_groups(mesh),
        shard_group=shard_group(mesh),
        tensor_group=tensor_group(mesh),
        pipeline=None
        if stages is None
        else Pipeline(built, stages, mesh, dtype=dtype, waits=waits, connecting=connecting),
        share=built.share,
        sync_every_micro_batch=bool(parallel.sync_every_micro_batch),
        keep_gathered=not parallel.reshard_after_forward,
        loss_function=build_loss(parallel, device, tensor_group(mesh)),
        waits=waits,
        check=check,
    )


def verified_rows(config: PretrainConfig, plan: BatchPlan) -> VerifiedRows | None:
    """What all units compute where they verify each other; None where they do not."""
    if not config.cluster.verify_every_steps:
        return None
    slice_seqs = config.optim.global_batch_seqs // config.optim.num_slices
    return VerifiedRows(slice_seqs * plan.most_slices_of_a_pass, config.data.seq_len, config.run.seed)


def loop_settings(config: PretrainConfig, topology: Topology, last_step: int) -> LoopSettings:
    """The loop's numbers in a group of this topology, until this step."""
    tokens_per_step, profiled = config.optim.global_batch_seqs * config.data.seq_len, profiled_steps(config)
    return LoopSettings(
        last_step=last_step,
        total_tokens=config.train.steps * tokens_per_step,
        tokens_per_step=tokens_per_step,
        seqs_per_step=config.optim.global_batch_seqs,
        slice_seqs=config.optim.global_batch_seqs // config.optim.num_slices,
        num_micro_batches=topology.batch.num_micro_batches,
        validate_every_steps=config.train.validate_every_steps if config.train.validation_seqs else 0,
        nonfinite_skips=config.train.nonfinite_skips,
        verify_every_steps=config.cluster.verify_every_steps,
        num_units=topology.mesh.num_units,
        pp=topology.mesh.pp,
        num_stages=topology.mesh.num_stages,
        read_at_once=frozenset({profiled.start - 1, profiled[-1]} if profiled else ()),
    )


def meter_of(
    config: PretrainConfig, world_size: int, generation: int, *, device: torch.device, peak_flops: float
) -> Meter:
    """`peak_flops` are those of all ranks together."""
    return Meter(
        tokens_per_step=config.optim.global_batch_seqs * config.data.seq_len,
        flops_per_token=flops_per_token(config.model, config.data.seq_len),
        peak_flops=peak_flops,
        world_size=world_size,
        generation=generation,
        device=device,
    )
