"""Before anything starts: what a run will need and how fast it may be, at every world size that its cluster allows.

Memory is `footprint`'s, time `plan.cost`'s roofline; here the configuration becomes what they ask for. Needs no torch.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any

from regrow.config.check import topologies, topology_of, world_sizes
from regrow.config.schema import ActivationCheckpoint, Float8, ParallelConfig, PlanConfig, PretrainConfig
from regrow.config.snapshots import fixed_every_steps, takes_snapshots
from regrow.config.stages import slowest_share
from regrow.control.corruption import DECIDING_UNITS
from regrow.control.spacing import best_every_steps, steps_of_commit
from regrow.errors import ConfigError
from regrow.forecast.cost import Network, PassWork, StepTime, Traffic, step_time
from regrow.forecast.devices import DEVICES, GIB, MEASURED_SHARES, Device, find_device
from regrow.forecast.footprint import FLOAT32, Footprint, Rank, footprint, num_in_shards
from regrow.forecast.memory import equal_nodes, plan_snapshot_memory
from regrow.model.linears import float8_steps
from regrow.model.size import (
    flops_per_token,
    moment_bytes,
    num_params,
    num_params_of_block,
    rank_state_bytes,
)
from regrow.plan.batch import BatchPlan
from regrow.plan.mesh import MeshShape
from regrow.plan.pipeline import Stages, most_in_flight
from regrow.plan.topology import Table, Topology

USABLE_SHARE = 0.92  # of a device's memory; the rest is for its context, collectives and what lies between allocations
# elementwise operations of a block, forward and backward: how often they read or write all of a token's activations of
# the model's width, and of the feed-forward's; norms, RoPE, residuals, SwiGLU
MOVES = {True: (27, 9), False: (170, 14)}  # compiled or not; eager, norms and RoPE go through float32
FLOAT8_MOVES = (6, 3)  # activations and gradients that are cast: read twice in bfloat16, written once
LOSS_MOVES = {True: 3, False: 12}  # of the logits
CPU_BYTES_PER_S = 10e9  # of a machine without GPUs
PATIENCE_S = 5.0  # train.saver.SAFE_S: that a step waits for the snapshot before it, where their distance is set


@dataclass(frozen=True)
class Commits:
    """Of snapshots in the nodes' memory."""

    num_bytes: int = 0  # that a node's keeper sends for each
    commit_s: float = 0.0
    every_steps: int = 0  # 0: none
    steps_lost: int = 0  # that a lost node costs at most
    falls_behind: bool = False  # steps that wait for commits go on without them, and snapshots are left out


@dataclass(frozen=True)
class Forecast:
    """One world size."""

    batch: BatchPlan
    mesh: MeshShape
    memory: Footprint
    time: StepTime
    usable_bytes: int
    snapshot_bytes: int  # the most that a node's snapshots take of its memory
    offloaded_bytes: int  # and its ranks' parameters, gradients and moments, where they are not on the devices
    commits: Commits
    tokens_per_s: float
    mfu: float
    stages: Stages | None = None  # of a pipeline
    bubble_share: float = 0.0  # of a step, in which a pipeline fills and drains
    spares: int = 0  # ranks beside it, which wait: a step with them would take as long

    @property
    def num_workers(self) -> int:
        """That are there, spares among them."""
        return self.mesh.world_size + self.spares

    @property
    def idle_fraction(self) -> float:
        """Of the time of all that are there, what goes into passes for nothing and into spares; not a bubble."""
        return 1.0 - self.batch.busy_share * self.mesh.world_size / self.num_workers

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.usable_bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            "world_size": self.num_workers,
            "spares": self.spares,
            "dp_replicate": self.mesh.dp_replicate,
            "dp_shard": self.mesh.sizes["dp_shard"],
            "tp": self.mesh.tp,
            "cp": self.mesh.cp,
            "axes": self.mesh.sizes,
            "passes": self.batch.num_micro_batches,
            "idle_share": self.batch.idle_share,
            "idle_fraction": self.idle_fraction,
            "bubble_fraction": self.bubble_share,
            "blocks_of_stages": [len(each) for each in self.stages.blocks] if self.stages else [],
            "bytes": {**self.memory.kinds, "total": self.memory.total},
            "fullest_moment": self.memory.moment,
            "usable_bytes": self.usable_bytes,
            "fits": self.fits,
            "snapshot_bytes_per_node": self.snapshot_bytes,
            "commit_bytes_per_node": self.commits.num_bytes,
            "commit_s": self.commits.commit_s,
            "snapshot_every_steps": self.commits.every_steps,
            "steps_lost_most": self.commits.steps_lost,
            "offloaded_bytes_per_node": self.offloaded_bytes,
            **asdict(self.time),
            "bound_by": self.time.bound_by,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
        }


def forecasts(config: PretrainConfig, device: Device, network: Network) -> list[Forecast]:
    """Of every number of workers from the smallest to the largest: the group that they make, and its spares."""
    table = topologies(config)
    sizes, of_groups = world_sizes(config, table), topologies_of_groups(config, table)
    found = {size: forecast(config, size, device, network, of_groups) for size in set(sizes.values())}
    return [replace(found[size], spares=present - size) for present, size in sizes.items()]


def topologies_of_groups(config: PretrainConfig, table: Table) -> dict[int, Topology]:
    """By world size, of all in the table that a group may have: those that are taken, and where results are verified
    those that can tell which of two units computes wrong.
    """
    sizes = set(world_sizes(config, table).values())
    if config.cluster.verify_every_steps:
        sizes |= {size for size, each in table.items() if each.mesh.num_units >= DECIDING_UNITS}
    return {size: each for size, each in table.items() if size in sizes}


def forecast(
    config: PretrainConfig, world_size: int, device: Device, network: Network, table: Table | None = None
) -> Forecast:
    """Of one world size; `table` has those that the group may have, too, and none others if it is not given."""
    table = table or {world_size: topology_of(config, world_size)}
    topology = table[world_size]
    mesh, batch, stages = topology.mesh, topology.batch, topology.stages
    rank = rank_of(config, topology)
    share = slowest_share(config.model, stages, config.data.seq_len) if stages else 1.0
    whole = replace(rank, model=config.model)
    work, traffic = pass_work(whole).times(share), pass_traffic(whole).times(share)
    time = step_time(
        work,
        traffic,
        num_passes=rank.num_passes,
        reduce_every_pass=bool(config.parallel.sync_every_micro_batch),
        shard_params=share * num_params_of_block(config.model, mesh.tp) / mesh.dp_shard,
        dp_shard=mesh.dp_shard,
        dp_replicate=mesh.dp_replicate,
        tp=mesh.tp,
        cp=mesh.cp,
        on_host=rank.offloads,
        device=device,
        network=network,
        bubble_share=topology.bubble_share,
    )
    tokens = config.optim.global_batch_seqs * config.data.seq_len
    flops = tokens * flops_per_token(config.model, config.data.seq_len)
    on_node, copied = equal_nodes(world_size, network.ranks_per_node, config.snapshot.copies)
    return Forecast(
        batch=batch,
        mesh=mesh,
        memory=footprint(rank),
        time=time,
        usable_bytes=int(device.memory_bytes * USABLE_SHARE),
        snapshot_bytes=snapshot_bytes(
            config, world_size, rank_bytes(config, table), ranks_on_node=on_node, ranks_copied=copied
        ),
        commits=_commits(config, mesh, time, network, copied),
        offloaded_bytes=_offloaded_bytes(rank, on_node) if rank.offloads else 0,
        tokens_per_s=tokens / time.step_s,
        mfu=flops / time.step_s / (world_size * device.flops),
        stages=stages,
        bubble_share=topology.bubble_share,
    )


def rank_of(config: PretrainConfig, topology: Topology) -> Rank:
    """The rank that has most to do; in a pipeline as many blocks as any, as many micro-batches in flight as the first
    rank, and both embedding and output: more than any has."""
    mesh, batch, stages, model, in_flight = topology.mesh, topology.batch, topology.stages, config.model, 1.0
    parallel = config.parallel
    if not float8_steps(parallel, config.train.steps):  # all of them are the tail
        parallel = replace(parallel, float8=Float8.none)
    slice_seqs = config.optim.global_batch_seqs // config.optim.num_slices
    if stages:
        model = replace(model, num_layers=max(map(stages.num_blocks_of, range(stages.pp))))
        in_flight = most_in_flight(stages.pp, stages.per_rank, batch.num_micro_batches) / stages.per_rank
    return Rank(
        model=model,
        parallel=parallel,
        dp_shard=mesh.dp_shard,
        num_passes=batch.num_micro_batches,
        rows=slice_seqs * math.ceil(batch.most_slices / batch.num_micro_batches),
        seq_len=config.data.seq_len,
        on_gpu=config.cluster.gpus_per_worker > 0,
        moments=config.optim.moments,
        more_in_flight=max(0.0, in_flight - 1.0),
    )


def pass_work(rank: Rank) -> PassWork:
    """What the devices really do: what checkpointing repeats counts, what causality masks does not.

    Of one rank; those of a unit share all of it but what is gathered and reduced.
    """
    model, parallel, tokens = rank.model, rank.parallel, rank.tokens / rank.parallel.tp
    output = model.vocab_size * model.dim
    blocks = num_params(model) - output * (1 if model.tied else 2)
    is_full = parallel.activation_checkpoint is ActivationCheckpoint.full
    times = 3 + (1 if is_full else 1 - parallel.activation_budget)  # forwards' worth of arithmetic
    in_blocks = 2.0 * times * blocks * tokens
    is_float8 = parallel.float8 is not Float8.none
    in_float8 = in_blocks if is_float8 else 0.0
    if parallel.float8 is Float8.rowwise_with_gw_hp:  # weights' gradients, a forward's worth, are made in bfloat16
        in_float8 *= (times - 1) / times
    # forward two products over half of T^2, backward five
    attention = (1.0 * times + 0.5) * 2 * model.num_layers * model.dim * rank.seq_len * tokens
    wide, hidden = MOVES[parallel.compile]
    moved = rank.item_bytes * (wide * model.dim + hidden * model.ffn_dim)
    if is_float8:
        moved += 5 * (FLOAT8_MOVES[0] * model.dim + FLOAT8_MOVES[1] * model.ffn_dim)
    logits = LOSS_MOVES[parallel.compile] * rank.item_bytes * model.vocab_size
    # gathered parameters are copied once more, gradients copied to be reduced, or added to those of earlier passes
    copied = num_params_of_block(model, parallel.tp) * (
        2 * num_gathers(rank) * rank.item_bytes + rank.item_bytes + 2 * FLOAT32
    )
    return PassWork(
        matmul_flops=6.0 * output * tokens + in_blocks - in_float8,
        float8_flops=in_float8,
        attention_flops=attention,
        memory_bytes=tokens * (model.num_layers * moved + logits) + copied,
    )


def pass_traffic(rank: Rank) -> Traffic:
    """Of one pass that reduces."""
    model, parallel = rank.model, rank.parallel
    total = num_params_of_block(model, parallel.tp)
    tables = model.vocab_size * model.dim * (1 if model.tied else 2) / parallel.tp
    # of a block's forward, what backward does again
    again = 1 - parallel.activation_budget if parallel.activation_checkpoint is ActivationCheckpoint.none else 1
    # each block gathers and scatters the sequence twice, the embedding scatters and the output gathers it
    sequences = 4 * model.num_layers * (1 + again / 2) + 2
    in_blocks = 1 if parallel.float8 is Float8.tensorwise_all_gather else rank.item_bytes
    # attention gathers keys and values of whole rows, and again where a block is computed again; backward scatters
    kv_dim = model.dim // model.num_heads * model.num_kv_heads / parallel.tp
    keys_values = 2 * kv_dim * rank.rows * rank.seq_len * rank.item_bytes * model.num_layers
    once = in_blocks * (total - tables) + rank.item_bytes * tables
    shard = FLOAT32 * total / rank.dp_shard
    return Traffic(
        gathered=num_gathers(rank) * once,
        reduced=FLOAT32 * total,
        copied=shard,
        from_host=num_gathers(rank) * shard if rank.offloads else 0.0,
        to_host=shard if rank.offloads else 0.0,
        tensor=2 * sequences * rank.item_bytes * rank.tokens * model.dim,
        context=(2 + again) * keys_values if parallel.cp > 1 else 0.0,
    )


def num_gathers(rank: Rank) -> float:
    """How often a pass gathers the parameters."""
    return 2.0 if rank.parallel.reshard_after_forward else 1.0 / rank.num_passes


def remedy(config: PretrainConfig, world_size: int, device: Device, network: Network) -> tuple[str, Forecast] | None:
    """Settings with which a world size fits that does not, those that cost least speed first; None: there are none.

    Without those that it fits without as well.
    """
    parallel, modes, chunk = config.parallel, list(ActivationCheckpoint), ParallelConfig().loss_chunk_tokens
    tries: list[tuple[str, dict[str, Any]]] = [
        *([("slices_per_pass=1", {"slices_per_pass": 1})] if parallel.slices_per_pass > 1 else []),
        ("prefetch_blocks=1", {"prefetch_blocks": 1}),
        *([(f"loss_chunk_tokens={chunk}", {"loss_chunk_tokens": chunk})] if parallel.loss_chunk_tokens == 0 else []),
        ("reshard_after_forward=true", {"reshard_after_forward": True}),
        ("sync_every_micro_batch=true", {"sync_every_micro_batch": True}),
    ]
    for mode in modes[modes.index(parallel.activation_checkpoint) + 1 :]:
        if parallel.activation_budget < 1:  # is for blocks that are not checkpointed
            text = f"activation_checkpoint={mode.value} parallel.activation_budget=1"
            tries.append((text, {"activation_checkpoint": mode, "activation_budget": 1.0}))
        else:
            tries.append((f"activation_checkpoint={mode.value}", {"activation_checkpoint": mode}))
    may_offload = config.cluster.gpus_per_worker > 0 and parallel.pp == 1
    if may_offload and parallel.float8 is Float8.tensorwise_all_gather:
        both = {"cpu_offload": True, "float8": Float8.tensorwise}
        tries.append(("cpu_offload=true parallel.float8=tensorwise", both))
    elif may_offload:
        tries.append(("cpu_offload=true", {"cpu_offload": True}))

    def forecast_with(settings: dict[str, tuple[str, dict[str, Any]]]) -> Forecast:
        changed = reduce(lambda before, setting: replace(before, **setting[1]), settings.values(), parallel)
        return forecast(replace(config, parallel=changed), world_size, device, network)

    settings: dict[str, tuple[str, dict[str, Any]]] = {}  # by the first of their names
    found = forecast_with(settings)
    for text, values in tries:
        more = settings | {text.partition("=")[0]: (f"parallel.{text}", values)}
        tried = forecast_with(more)
        if tried.memory.total > found.memory.total:  # as a loss in chunks, where gradients in float32 are most of it
            continue
        settings, found = more, tried
        if not found.fits:
            continue
        for name in reversed(more):
            fewer = {each: setting for each, setting in settings.items() if each != name}
            if (tried := forecast_with(fewer)).fits:
                settings, found = fewer, tried
        return " ".join(text for text, _ in settings.values()), found
    return None


def gpu_of(config: PretrainConfig, plan: PlanConfig) -> Device:
    """The GPU of one worker. Raises ConfigError where its kind is not known."""
    name = plan.device or config.cluster.name
    known = find_device(name)
    if known is None:
        setting = f"plan.device={name!r}" if plan.device else f"plan.device is not given, and cluster.name={name!r}"
        raise ConfigError(f"{setting} names none of {', '.join(each.name for each in DEVICES)}; set plan.device=H100")
    memory, tflops = plan.memory_gib, config.observe.peak_tflops
    return replace(
        known,
        memory_bytes=int(memory * GIB) if memory is not None else known.memory_bytes,
        flops=tflops * 1e12 if tflops is not None else known.flops,
    )


def check_float8(config: PretrainConfig, device: Device) -> None:
    """Refuse float8 on GPUs that have none, as their workers do. Raises ConfigError."""
    if not device.has_float8 and float8_steps(config.parallel, config.train.steps):
        raise ConfigError(
            f"parallel.float8={config.parallel.float8.value} needs a GPU of compute capability 8.9 or higher, and "
            f"{device.name} is older; set parallel.float8=none"
        )


def share_of_this_machine(config: PretrainConfig, plan: PlanConfig, flops: float) -> Device:
    """One worker's equal share of a machine without GPUs that all of them run on; `flops` are the machine's."""
    workers = config.cluster.max_workers
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        "this machine",
        memory_bytes=int(plan.memory_gib * GIB) if plan.memory_gib is not None else memory // workers,
        flops=flops / workers,
        float8_flops=flops / workers,
        memory_bytes_per_s=CPU_BYTES_PER_S / workers,
        link_bytes_per_s=CPU_BYTES_PER_S / workers / 4,  # gloo copies in and out of sockets
        shares=MEASURED_SHARES,
    )


def network_of(config: PretrainConfig, plan: PlanConfig) -> Network:
    cluster = config.cluster
    on_node = plan.workers_per_node
    if cluster.address is None:  # on this machine
        on_node = math.ceil(cluster.max_workers / max(1, cluster.local_nodes))
    return Network(on_node, plan.network_gb_per_s * 1e9, plan.keepers_gb_per_s * 1e9)


def _commits(config: PretrainConfig, mesh: MeshShape, time: StepTime, network: Network, ranks_copied: int) -> Commits:
    """What a commit takes on this network, and how far apart snapshots are."""
    if not takes_snapshots(config.snapshot):
        return Commits()
    num_bytes = ranks_copied * rank_state_bytes(config.model, config.optim.moments, mesh)
    commit_s = num_bytes / network.keepers_bytes_per_s
    on_links_s = num_bytes / (network.ranks_per_node * network.bytes_per_s)
    commit_steps = steps_of_commit(commit_s=commit_s, step_s=time.step_s)
    every_steps = fixed_every_steps(config.snapshot)
    if every_steps is not None and commit_s > time.step_s + PATIENCE_S:
        # one that waits for the commit before it is up to `every_steps` old by then, unless these are as many
        lost = every_steps + commit_steps - 1 + (commit_steps - 1 if commit_steps > every_steps else 0)
        return Commits(num_bytes, commit_s, every_steps, lost, falls_behind=True)
    lost = every_steps or 0
    if every_steps is None:
        every_steps = best_every_steps(
            added_s=on_links_s * min(1.0, time.network_s / time.step_s),
            commit_s=commit_s,
            step_s=time.step_s,
            mtbf_s=3600 * config.checkpoint.mtbf_hours,
            most_steps_lost=config.snapshot.most_steps_lost,
        )
        lost = every_steps + commit_steps - 1
    return Commits(num_bytes, commit_s, every_steps, lost)


def _offloaded_bytes(rank: Rank, ranks_on_node: int) -> int:
    """Of the ranks of a node, what they train and its gradients in float32, and the moments."""
    return ranks_on_node * num_in_shards(rank) * (2 * FLOAT32 + moment_bytes(rank.moments))


def rank_bytes(config: PretrainConfig, table: Table) -> dict[int, int]:
    """By world size, bytes of the state that a rank holds at most."""
    return {size: rank_state_bytes(config.model, config.optim.moments, each.mesh) for size, each in table.items()}


def snapshot_bytes(
    config: PretrainConfig, world_size: int, rank_bytes: Mapping[int, int], *, ranks_on_node: int, ranks_copied: int
) -> int:
    """The most that snapshots take of a node's memory, in a group of this size and those that may come after it."""
    if not takes_snapshots(config.snapshot):
        return 0
    return plan_snapshot_memory(
        world_size, rank_bytes, slots=config.snapshot.slots, ranks_on_node=ranks_on_node, ranks_copied=ranks_copied
    ).total
