"""Rules that cross fields, each naming the value and the fix. Pure: looks at the config, at nothing else."""

import re
import textwrap
from dataclasses import fields, is_dataclass
from math import gcd, isfinite, lcm, prod
from typing import TypedDict

from regrow.config.schema import (
    ActivationCheckpoint,
    AttentionKernel,
    Backend,
    CompileMode,
    DataConfig,
    Dtype,
    Float8,
    PlanJobConfig,
    PretrainConfig,
    Schedule,
    SimulateJobConfig,
)
from regrow.config.snapshots import takes_snapshots
from regrow.config.spares import AUTO, most_workers, num_beyond, parks
from regrow.config.stages import pipelines_of, stages_per_rank
from regrow.errors import BatchError, ConfigError
from regrow.plan.batch import MIN_BUSY_SHARE, check_world_sizes
from regrow.plan.mixture import plan_mixture
from regrow.plan.topology import Pipelines, Table, Topology, fewest_ranks, ranks_of_unit, taken_sizes, topology_table
from regrow.progress import last_step
from regrow.storage import CREDENTIALS

LEAST_CPUS = 1e-4  # Ray rounds to it
MOST_TIMEOUT_S = 1e9  # nanoseconds from 1970 to the end of it fit in 64 bits
BFLOAT16_BETA = 0.99  # most with moments in bfloat16, which rounds changes of up to 2^-8 away; 1 - beta is the largest
FLOAT8_MULTIPLE = 16  # of all dims of a float8 product on GPUs: torch._scaled_mm; emulated ones take any


def check(config: PretrainConfig) -> dict[int, Topology]:
    """Check everything that can be checked before anything starts; the topology of every feasible world size.

    Raises ConfigError (BatchError for the batch) for the first rule that is broken.
    """
    _check_no_credentials(config)
    for each in fields(PretrainConfig):
        check_finite(each.name, getattr(config, each.name))
    for rule in (_run, _train, _cluster, _model, _data, _optim, _parallel, _checkpoint, _observe):
        rule(config)
    optim, cluster, parallel = config.optim, config.cluster, config.parallel
    unit = parallel.tp * parallel.cp * parallel.pp
    least = -(-cluster.min_workers // unit) * unit  # others: see below
    check_world_sizes(
        num_slices=optim.num_slices,
        global_batch_seqs=optim.global_batch_seqs,
        min_workers=least,
        max_workers=cluster.max_workers,
        unit=unit,
        runs=(lambda: _sizes_of_multiples(config)) if parks(cluster) else None,
    )
    table = topologies(config)
    if parallel.pp > 1:
        _check_replanned(config, table)
    return table


def check_finite(key: str, value: object) -> None:
    """Refuse infinity and NaN wherever they stand in a setting. Raises ConfigError."""
    if is_dataclass(value):
        for each in fields(value):
            check_finite(f"{key}.{each.name}", getattr(value, each.name))
    elif isinstance(value, dict):
        for name, each in value.items():
            check_finite(f"{key}.{name}", each)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            check_finite(f"{key}[{number}]", each)
    _need(not isinstance(value, float) or isfinite(value), f"{key}={value} must be a finite number")


def _sizes_of_multiples(config: PretrainConfig) -> set[int]:
    """World sizes that are taken, of whole units of the configured axes."""
    unit = config.parallel.tp * config.parallel.cp * config.parallel.pp
    return {size for size in world_sizes(config).values() if size % unit == 0}


def _check_replanned(config: PretrainConfig, table: Table) -> None:
    """Check the sizes that are planned anew, as all are: at most 15% of the ranks' time for idle passes and ranks left
    over. Raises BatchError.
    """
    sizes, cluster, parallel = world_sizes(config, table), config.cluster, config.parallel
    width = parallel.tp * parallel.cp
    _need(
        min(sizes) < cluster.min_workers + width,
        f"cluster.min_workers={cluster.min_workers}: no group is so small with parallel.pp={parallel.pp}, "
        f"parallel.least_pp={parallel.least_pp}, parallel.tp={parallel.tp}, parallel.cp={parallel.cp} and "
        f"optim.num_slices={config.optim.num_slices}; set cluster.min_workers={min(sizes)}",
    )
    taken = {size: size for size in sizes.values()} if parks(cluster) else sizes  # spares are none that idle
    whole = {present: present // width * width for present in taken}  # less could not be part of any unit
    idle = {present: 1 - table[size].batch.busy_share * size / whole[present] for present, size in taken.items()}
    worst = max(idle, key=lambda present: (idle[present], present))
    if idle[worst] > 1 - MIN_BUSY_SHARE:
        raise BatchError(
            f"optim.num_slices={config.optim.num_slices} leaves {idle[worst]:.0%} of the ranks' time idle at {worst} "
            "workers, where parallel.pp is planned anew (at most 15% allowed); raise optim.num_slices and "
            f"optim.global_batch_seqs, or cluster.min_workers above {worst}"
        )


def check_train(config: PretrainConfig) -> None:
    """Check what a process group is made with, before there is one. Raises ConfigError."""
    check_finite("train", config.train)
    _train(config)


def check_before_stages(config: PretrainConfig) -> None:
    """Check what a number of stages is looked for with, where parallel.pp=0. Raises ConfigError."""
    _tensor_parallel(config)
    _context_parallel(config)
    _stages_per_rank(config)
    most = config.cluster.max_workers
    _need(most >= 1, f"cluster.max_workers={most} must be at least 1")


def check_data(config: PretrainConfig) -> None:
    """Check what preparing a corpus depends on, and nothing else. Raises ConfigError."""
    _check_no_credentials(config)
    check_finite("data", config.data)
    _data(config)


def check_plan(config: PlanJobConfig | SimulateJobConfig) -> None:
    """Check what jobs.plan and jobs.simulate are told about the hardware. Raises ConfigError."""
    plan, tp = config.plan, config.parallel.tp
    check_finite("plan", plan)
    _need(plan.workers_per_node >= 1, f"plan.workers_per_node={plan.workers_per_node} must be at least 1")
    _need(plan.network_gb_per_s > 0, f"plan.network_gb_per_s={plan.network_gb_per_s} must be positive")
    _need(plan.keepers_gb_per_s > 0, f"plan.keepers_gb_per_s={plan.keepers_gb_per_s} must be positive")
    _need(plan.memory_gib is None or plan.memory_gib > 0, f"plan.memory_gib={plan.memory_gib} must be positive")
    _need(
        config.cluster.address is None or tp < 1 or plan.workers_per_node % tp == 0,
        f"plan.workers_per_node={plan.workers_per_node} must be a multiple of parallel.tp={tp}, which are together "
        f"on a node: some would find no room; set parallel.tp={gcd(tp, plan.workers_per_node)}",
    )


def geometry(config: PretrainConfig, table: Table) -> list[str]:
    """What the batch looks like, for a person, a fact a line; with the idle share of every feasible world size."""
    optim, data, parallel = config.optim, config.data, config.parallel
    batch_tokens = optim.global_batch_seqs * data.seq_len
    slice_seqs, in_a_pass = optim.global_batch_seqs // optim.num_slices, parallel.slices_per_pass or 1
    ran = world_sizes(config, table)
    shares = ", ".join(f"{size}:{table[size].batch.idle_share:.1%}" for size in sorted(set(ran.values())))
    spares = ", ".join(f"{present}:{present - size}" for present, size in ran.items() if present > size)
    return [
        f"global batch {optim.global_batch_seqs} sequences x {data.seq_len} tokens = {batch_tokens:,} tokens; "
        f"{config.train.steps:,} steps = {config.train.steps * batch_tokens:,} tokens",
        f"{optim.num_slices} slices of {slice_seqs} sequences, at most {in_a_pass} in a pass, "
        f"for {_span(config.cluster.min_workers, config.cluster.max_workers)}"
        + (f", {unit} together" if (unit := parallel.tp * parallel.cp * parallel.pp) > 1 else "")
        + (", and planned anew where there are others" if parallel.pp > 1 else "")
        + ("; each pass reduces gradients" if parallel.sync_every_micro_batch else ""),
        *textwrap.wrap(f"idle share by world size: {shares}", width=110, subsequent_indent="  "),
        *textwrap.wrap(f"spares by number of workers: {spares}" * bool(spares), width=110, subsequent_indent="  "),
    ]


def _span(least: int, most: int) -> str:
    workers = "worker" if most == 1 else "workers"
    return f"{least} to {most} {workers}" if least < most else f"{most} {workers}"


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def check_run_name(name: str) -> None:
    """Raises ConfigError where no run can have it."""
    _need(
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name) is not None,
        f"run.name={name!r} must be 1 to 63 letters, digits, '.', '_' or '-', beginning with a letter or digit",
    )


def places_read(data: DataConfig) -> list[tuple[str, str | None]]:
    """The settings that name what a run reads, and what each names."""
    corpora = [(f"data.corpora.{name}", folder) for name, folder in data.corpora.items()]
    return [("data.source", data.source), ("data.tokenizer", data.tokenizer), *corpora]


def _check_no_credentials(config: PretrainConfig) -> None:
    """No line shows what it refuses; so this comes before all that may show a place."""
    written = [("run.storage_path", config.run.storage_path), ("parallel.compile_cache", config.parallel.compile_cache)]
    for setting, place in [*written, *places_read(config.data)]:
        _need(
            not CREDENTIALS.search(place or ""),
            f"{setting} has a user and a password, or a signature, in its URI, which logs and reports would show; "
            "leave it out, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY where the job runs (on "
            "Kubernetes by a Secret: submit.env_secret)",
        )


def _run(config: PretrainConfig) -> None:
    check_run_name(config.run.name)


def _train(config: PretrainConfig) -> None:
    train = config.train
    _need(train.steps >= 1, f"train.steps={train.steps} must be at least 1")
    stop = train.stop_at_step
    _need(
        stop is None or 1 <= stop <= train.steps,
        f"train.stop_at_step={stop} must be between 1 and train.steps={train.steps}",
    )
    for key, none in (
        ("validate_every_steps", "turns validation off"),
        ("validation_seqs", "turns validation off"),
        ("nonfinite_skips", "skips no step"),
        ("nonfinite_rollbacks", "ends the run instead"),
    ):
        value = getattr(train, key)
        _need(value >= 0, f"train.{key}={value} must not be negative; 0 {none}")
    timeout_s = train.collective_timeout_s
    _need(
        0 < timeout_s <= MOST_TIMEOUT_S,
        f"train.collective_timeout_s={timeout_s} must be positive, and at most {MOST_TIMEOUT_S:g} seconds",
    )


def _cluster(config: PretrainConfig) -> None:
    cluster = config.cluster
    _need(
        cluster.gpus_per_worker in (0, 1),
        f"cluster.gpus_per_worker={cluster.gpus_per_worker}: a worker is one rank on one GPU (1) or on CPU (0)",
    )
    kinds = (Backend.auto, Backend.nccl) if cluster.gpus_per_worker else tuple(set(Backend) - {Backend.nccl})
    _need(
        cluster.backend in kinds,
        f"cluster.backend={cluster.backend.value} with cluster.gpus_per_worker={cluster.gpus_per_worker}: nccl is for "
        "GPUs, gloo and asynchronous are for CPUs; cluster.backend=auto chooses",
    )
    _need(
        cluster.cpus_per_worker >= LEAST_CPUS,
        f"cluster.cpus_per_worker={cluster.cpus_per_worker} must be at least {LEAST_CPUS}",
    )
    _need(
        cluster.max_failures >= -1, f"cluster.max_failures={cluster.max_failures} must be at least 0, or -1: no limit"
    )
    threads = cluster.threads_per_worker
    _need(
        threads is None or threads >= 1,
        f"cluster.threads_per_worker={threads} must be at least 1, or null for an equal share of the node's cores",
    )
    _need(cluster.local_nodes >= 0, f"cluster.local_nodes={cluster.local_nodes} must not be negative")
    _need(
        cluster.address is None or cluster.local_nodes == 0,
        f"cluster.local_nodes={cluster.local_nodes} starts nodes here, cluster.address={cluster.address!r} joins "
        "a running cluster: set only one of them",
    )
    spares, beyond = cluster.spare_workers, num_beyond(cluster)
    _need(
        not isinstance(spares, str) or spares == AUTO,
        f"cluster.spare_workers={spares} must be auto, a number of workers beyond cluster.max_workers, or null",
    )
    _need(
        beyond == 0 or (beyond > 0 and cluster.in_place),
        f"cluster.spare_workers={spares} must not be negative, and 0 where cluster.in_place=false: "
        "a group that restarts as a whole takes all workers that are there",
    )
    for name, none in (
        ("quarantine_failures", "leaves no node alone"),
        ("probe_every_steps", "probes never"),
        ("verify_every_steps", "verifies never"),
    ):
        value = getattr(cluster, name)
        _need(value >= 0, f"cluster.{name}={value} must not be negative; 0 {none}")
    link = cluster.least_link_gb_per_s
    _need(
        link == 0 or (link > 0 and cluster.check_hardware and takes_snapshots(config.snapshot)),
        f"cluster.least_link_gb_per_s={link} must not be negative; above 0 it needs cluster.check_hardware=true and "
        "snapshot.every_steps above 0, as keepers measure links",
    )
    drain_s = cluster.drain_slow_s
    _need(drain_s >= 0, f"cluster.drain_slow_s={drain_s} must be seconds of slowness, or 0: no node is left for it")
    stuck_s = cluster.stuck_s
    _need(stuck_s == 0 or stuck_s >= 5, f"cluster.stuck_s={stuck_s} must be at least 5 seconds, or 0: never")
    for name, least in (("silence_s", 5.0), ("wait_for_workers_s", 0.0), ("quarantine_s", 60.0)):
        value = getattr(cluster, name)
        _need(value >= least, f"cluster.{name}={value} must be at least {least:g} seconds")


def _model(config: PretrainConfig) -> None:
    model = config.model
    for name in ("dim", "num_heads", "num_kv_heads", "num_layers", "ffn_dim"):
        _need(getattr(model, name) >= 1, f"model.{name}={getattr(model, name)} must be at least 1")
    for name in ("norm_eps", "rope_theta"):
        _need(getattr(model, name) > 0, f"model.{name}={getattr(model, name)} must be positive")
    _need(
        model.dim % model.num_heads == 0,
        f"model.dim={model.dim} must be a multiple of model.num_heads={model.num_heads}",
    )
    _need(
        model.num_heads % model.num_kv_heads == 0,
        f"model.num_kv_heads={model.num_kv_heads} must divide model.num_heads={model.num_heads}",
    )
    _need(
        model.dim // model.num_heads % 2 == 0,
        f"model.dim/model.num_heads={model.dim // model.num_heads} must be even: RoPE turns pairs",
    )
    data = config.data
    fewer = "" if data.tokenizer else f" or data.vocab_size={model.vocab_size}"  # one that is given has all of its ids
    _need(
        model.vocab_size >= data.vocab_size,
        f"model.vocab_size={model.vocab_size} is below the tokenizer's data.vocab_size={data.vocab_size}; "
        f"set model.vocab_size={data.vocab_size}{fewer}",
    )
    if (scaling := model.rope_scaling) is not None:
        for name, above in (("factor", 0), ("low_freq_factor", 0), ("high_freq_factor", scaling.low_freq_factor)):
            value = getattr(scaling, name)
            _need(value > above, f"model.rope_scaling.{name}={value} must be above {above}")


def _data(config: PretrainConfig) -> None:
    data = config.data
    _need(data.seq_len >= 2, f"data.seq_len={data.seq_len} must be at least 2")
    _need(data.vocab_size >= 512, f"data.vocab_size={data.vocab_size} must be at least 512: bytes, end-of-text, merges")
    _need(
        data.rows_per_shard >= data.rows_per_group >= 1 and data.rows_per_shard % data.rows_per_group == 0,
        f"data.rows_per_shard={data.rows_per_shard} must be a multiple of data.rows_per_group={data.rows_per_group}",
    )
    _need(
        0 < data.validation_fraction < 0.5,
        f"data.validation_fraction={data.validation_fraction} must be above 0 and below 0.5",
    )
    _need(
        data.source is None or data.recipe != "python_docs",
        f"data.source={data.source} is set, and data=python_docs reads none; give data=text_files or data=fineweb_edu",
    )
    _need(data.max_document_chars >= 1, f"data.max_document_chars={data.max_document_chars} must be at least 1")
    _need(data.window_steps >= 1, f"data.window_steps={data.window_steps} must be at least 1")
    _need(data.prefetch_windows >= 1, f"data.prefetch_windows={data.prefetch_windows} must be at least 1")
    _need(data.stall_timeout_s > 0, f"data.stall_timeout_s={data.stall_timeout_s} must be positive")
    _need(
        data.storage_timeout_s >= 0, f"data.storage_timeout_s={data.storage_timeout_s} must be at least 0: never wait"
    )
    _need(
        data.stream_cpus == 0 or data.stream_cpus >= LEAST_CPUS,
        f"data.stream_cpus={data.stream_cpus} must be 0, or at least {LEAST_CPUS}: Ray counts no less of a CPU",
    )
    _need(data.cache_gb > 0, f"data.cache_gb={data.cache_gb} must be positive")
    _need(
        not data.mixture or len(data.corpora) > 0,
        "data.mixture weighs corpora, but data.corpora names none; give it prepared folders by name",
    )
    if data.mixture:
        plan_mixture(
            [(stage.from_tokens, stage.weights) for stage in data.mixture], list(data.corpora), seq_len=data.seq_len
        )


def _optim(config: PretrainConfig) -> None:
    optim = config.optim
    _need(optim.num_slices >= 1, f"optim.num_slices={optim.num_slices} must be at least 1")
    _need(optim.lr > 0, f"optim.lr={optim.lr} must be positive")
    _need(optim.eps >= 0, f"optim.eps={optim.eps} must not be negative")
    _need(optim.weight_decay >= 0, f"optim.weight_decay={optim.weight_decay} must not be negative")
    for key in ("min_lr_ratio", "warmup_fraction", "decay_fraction"):
        _need(0 <= getattr(optim, key) <= 1, f"optim.{key}={getattr(optim, key)} must be between 0 and 1")
    _need(
        optim.schedule is not Schedule.wsd or optim.warmup_fraction + optim.decay_fraction <= 1,
        f"optim.warmup_fraction={optim.warmup_fraction} and optim.decay_fraction={optim.decay_fraction} "
        "add up to more than 1; lower one",
    )
    for key in ("beta1", "beta2"):
        beta = getattr(optim, key)
        _need(0 <= beta < 1, f"optim.{key}={beta} must be at least 0 and below 1")
    _need(optim.max_grad_norm > 0, f"optim.max_grad_norm={optim.max_grad_norm} must be positive")


def check_new(config: PretrainConfig) -> None:
    """Raises ConfigError for what no run should begin with; one that has goes on."""
    optim = config.optim
    _need(optim.eps > 0, f"optim.eps={optim.eps} must be positive: what has no gradient yet would become 0 / 0")
    for key in ("beta1", "beta2"):
        _need(
            optim.moments is Dtype.float32 or getattr(optim, key) <= BFLOAT16_BETA,
            f"optim.{key}={getattr(optim, key)} with optim.moments={optim.moments.value}: a step changes that moment "
            f"by less than bfloat16 keeps: it hardly falls; set optim.{key}={BFLOAT16_BETA} or less, or "
            "optim.moments=float32",
        )


def _parallel(config: PretrainConfig) -> None:
    parallel = config.parallel
    replicas, most = parallel.dp_replicate, config.cluster.max_workers
    sizes = {axis: getattr(parallel, axis) for axis in ("tp", "cp", "pp")}
    of_units = "".join(f"/parallel.{axis}={size}" for axis, size in sizes.items() if size > 1)
    for rule in (_tensor_parallel, _context_parallel, _pipeline):
        rule(config)
    _need(
        replicas >= 1 and most // prod(sizes.values()) % replicas == 0,
        f"parallel.dp_replicate={replicas} must divide cluster.max_workers={most}{of_units}",
    )
    _need(
        parallel.float8 is Float8.none or parallel.dtype is Dtype.bfloat16,
        f"parallel.float8={parallel.float8.value} needs parallel.dtype=bfloat16, not {parallel.dtype.value}",
    )
    tail = parallel.bfloat16_tail
    _need(0 <= tail <= 1, f"parallel.bfloat16_tail={tail} must be between 0 and 1, a share of train.steps")
    budget, recomputed = parallel.activation_budget, parallel.activation_checkpoint
    _need(0 <= budget <= 1, f"parallel.activation_budget={budget} must be between 0 and 1")
    _need(
        budget == 1 or (parallel.compile and recomputed is ActivationCheckpoint.none),
        f"parallel.activation_budget={budget} is torch.compile's to keep: it needs parallel.compile=true and "
        f"parallel.activation_checkpoint=none, not {recomputed.value}",
    )
    _need(
        parallel.prefetch_blocks >= 1,
        f"parallel.prefetch_blocks={parallel.prefetch_blocks} must be at least 1: the next block is always on its way",
    )
    _need(
        not (parallel.cpu_offload and parallel.float8 is Float8.tensorwise_all_gather),
        "parallel.cpu_offload=true keeps on the host what parallel.float8=tensorwise_all_gather scales on the device; "
        "set parallel.float8=tensorwise",
    )
    mode, backend = parallel.compile_mode, parallel.compile_backend
    _need(
        mode is CompileMode.default or (parallel.compile and backend == "inductor"),
        f"parallel.compile_mode={mode.value} is inductor's: it needs parallel.compile=true and "
        f"parallel.compile_backend=inductor, not {backend}",
    )
    _attention(config)
    on_cpu = config.cluster.gpus_per_worker == 0
    tokens = config.optim.global_batch_seqs // config.optim.num_slices * config.data.seq_len // parallel.cp
    _need(
        parallel.float8 is Float8.none or on_cpu or tokens % FLOAT8_MULTIPLE == 0,
        f"parallel.float8={parallel.float8.value} multiplies gradients over the tokens of a pass, which must be a "
        f"multiple of {FLOAT8_MULTIPLE} on GPUs, and a rank has {tokens} of a slice; set data.seq_len to a multiple of "
        f"{FLOAT8_MULTIPLE * parallel.cp}",
    )
    _need(
        parallel.slices_per_pass >= 0,
        f"parallel.slices_per_pass={parallel.slices_per_pass} must not be negative; 0 takes what a GPU has room for",
    )
    _need(
        parallel.loss_chunk_tokens >= 0,
        f"parallel.loss_chunk_tokens={parallel.loss_chunk_tokens} must not be negative; 0 holds all logits of a pass",
    )


def _attention(config: PretrainConfig) -> None:
    model, parallel = config.model, config.parallel
    on_cpu, kernel = config.cluster.gpus_per_worker == 0, parallel.attention
    _need(
        kernel in (AttentionKernel.auto, AttentionKernel.flash) or not on_cpu,
        f"parallel.attention={kernel.value} is a GPU's, and cluster.gpus_per_worker=0; set parallel.attention=auto",
    )
    _need(
        on_cpu or kernel not in (AttentionKernel.flash, AttentionKernel.cudnn) or parallel.dtype is Dtype.bfloat16,
        f"parallel.attention={kernel.value} takes bfloat16 on a GPU, and parallel.dtype={parallel.dtype.value}: set "
        "parallel.dtype=bfloat16, or parallel.attention=auto",
    )
    _need(
        kernel is AttentionKernel.auto or not model.document_attention,
        f"parallel.attention={kernel.value} is for attention over whole rows, and model.document_attention=true: set "
        "parallel.attention=auto",
    )
    _need(
        kernel is not AttentionKernel.cudnn or config.cluster.verify_every_steps == 0,
        f"parallel.attention=cudnn adds in no fixed order, and cluster.verify_every_steps="
        f"{config.cluster.verify_every_steps} compares gradients bit by bit; set parallel.attention=auto or flash",
    )
    _need(
        kernel is not AttentionKernel.efficient or model.num_heads == model.num_kv_heads,
        f"parallel.attention=efficient knows no grouped queries, and model.num_heads={model.num_heads} share "
        f"model.num_kv_heads={model.num_kv_heads}; set parallel.attention=auto, cudnn or flash",
    )


def _tensor_parallel(config: PretrainConfig) -> None:
    tp, model, cluster = config.parallel.tp, config.model, config.cluster
    _need(tp >= 1, f"parallel.tp={tp} must be at least 1")
    for key, value in (
        ("cluster.min_workers", cluster.min_workers),
        ("cluster.max_workers", cluster.max_workers),
        ("cluster.spare_workers", num_beyond(cluster)),
        ("model.num_heads", model.num_heads),
        ("model.num_kv_heads", model.num_kv_heads),
        ("model.ffn_dim", model.ffn_dim),
        ("model.vocab_size", model.vocab_size),
        ("data.seq_len", config.data.seq_len),
    ):
        _need(value % tp == 0, f"parallel.tp={tp} must divide {key}={value}; set parallel.tp={gcd(tp, value)}")


def _context_parallel(config: PretrainConfig) -> None:
    parallel, cluster, seq_len = config.parallel, config.cluster, config.data.seq_len
    cp, tp = parallel.cp, parallel.tp
    _need(cp >= 1, f"parallel.cp={cp} must be at least 1")
    if cp == 1:
        return
    chunks = cp * lcm(2, tp)  # two chunks a rank, and tensor parallelism shares out both together
    also = f" and parallel.tp={tp}" if tp > 1 else ""
    _need(
        seq_len % chunks == 0,
        f"data.seq_len={seq_len} must be a multiple of {chunks} for parallel.cp={cp}{also}, which cut each row in "
        f"2 x cp chunks; set data.seq_len={max(1, round(seq_len / chunks)) * chunks}",
    )
    width = tp * cp
    _need(
        cluster.max_workers % width == 0,
        f"cluster.max_workers={cluster.max_workers} must be a multiple of {ranks_of_unit(cp=cp, tp=tp)} workers; set "
        f"cluster.max_workers={-(-cluster.max_workers // width) * width}",
    )
    _need(
        cluster.min_workers >= width,
        f"cluster.min_workers={cluster.min_workers} must be at least {ranks_of_unit(cp=cp, tp=tp)} workers, which hold "
        f"a row between them; set cluster.min_workers={width}",
    )
    _need(
        parallel.attention is AttentionKernel.auto,
        f"parallel.attention={parallel.attention.value} is for attention over whole rows, and parallel.cp={cp} shares "
        "them out; set parallel.attention=auto",
    )


def _pipeline(config: PretrainConfig) -> None:
    parallel, cluster = config.parallel, config.cluster
    pp, tp, cp = parallel.pp, parallel.tp, parallel.cp
    _need(pp >= 1, f"parallel.pp={pp} must be at least 1, or 0 for what the forecast finds fastest")
    _need(
        0 <= parallel.least_pp <= pp,
        f"parallel.least_pp={parallel.least_pp} must be 1 to parallel.pp={pp}, the fewest stages that there may be, or "
        "0 for as few as fit",
    )
    _stages_per_rank(config)
    if pp == 1:
        return
    _need(
        cluster.max_workers % (pp * tp * cp) == 0,
        f"cluster.max_workers={cluster.max_workers} must be a multiple of {ranks_of_unit(pp=pp, cp=cp, tp=tp)} workers",
    )
    _need(
        cluster.min_workers >= max(1, parallel.least_pp) * tp * cp,
        f"cluster.min_workers={cluster.min_workers} must be at least "
        f"{ranks_of_unit(least_pp=parallel.least_pp, cp=cp, tp=tp)} workers",
    )
    num_stages = pp * stages_per_rank(parallel)
    _need(
        config.model.num_layers >= num_stages,
        f"model.num_layers={config.model.num_layers} are fewer than the {num_stages} stages of parallel.pp={pp}, "
        f"{stages_per_rank(parallel)} a rank: each has a block at least; lower parallel.pp",
    )
    for is_set, key, instead in (
        (parallel.cpu_offload, "parallel.cpu_offload=true", "parallel.cpu_offload=false"),
        (parallel.separate_reduce, "parallel.separate_reduce=true", "parallel.separate_reduce=false"),
    ):
        _need(not is_set, f"parallel.pp={pp} does not go with {key} yet; set {instead}")


def _stages_per_rank(config: PretrainConfig) -> None:
    per_rank = config.parallel.stages_per_rank
    _need(
        per_rank >= 2, f"parallel.stages_per_rank={per_rank} must be at least 2; parallel.schedule=one_f_one_b has one"
    )


def _observe(config: PretrainConfig) -> None:
    at, steps, peak = config.observe.profile_at_step, config.observe.profile_steps, config.observe.peak_tflops
    _need(
        peak is None or peak > 0, f"observe.peak_tflops={peak} must be positive, or null for what is known or measured"
    )
    last = last_step(config.train.steps, config.train.stop_at_step)
    _need(at is None or at >= 1, f"observe.profile_at_step={at} must be at least 1, or null for no profile")
    _need(
        at is None or at <= last,
        f"observe.profile_at_step={at} is beyond the last step of this job, {last}: set it to one that it trains, or "
        "null for no profile",
    )
    _need(1 <= steps <= 100, f"observe.profile_steps={steps} must be 1 to 100: a step's trace takes megabytes")


def _checkpoint(config: PretrainConfig) -> None:
    checkpoint, snapshot = config.checkpoint, config.snapshot
    steps, minutes = checkpoint.every_steps, checkpoint.every_minutes
    _need(
        steps is None or steps >= 1,
        f"checkpoint.every_steps={steps} must be at least 1, or null to write none by steps",
    )
    _need(
        minutes is None or minutes > 0,
        f"checkpoint.every_minutes={minutes} must be positive, or null to write none by time",
    )
    _need(checkpoint.mtbf_hours > 0, f"checkpoint.mtbf_hours={checkpoint.mtbf_hours} must be positive")
    _need(
        steps is not None or minutes is not None or checkpoint.automatic,
        "checkpoint.every_steps=null, checkpoint.every_minutes=null and checkpoint.automatic=false leave only the "
        "checkpoint at the end; set one of them, as checkpoint.automatic=true",
    )
    by_time = "checkpoint.automatic=true" if minutes is None else f"checkpoint.every_minutes={minutes}"
    _need(
        takes_snapshots(snapshot) or (minutes is None and not checkpoint.automatic),
        f"{by_time} is decided whenever a snapshot commits, and snapshot.every_steps=0 takes none; "
        "set snapshot.every_steps=auto, or use checkpoint.every_steps alone",
    )
    _need(
        checkpoint.keep >= 2,
        f"checkpoint.keep={checkpoint.keep} must be at least 2: the newest one may turn out damaged",
    )
    milestones, by_steps = checkpoint.keep_every_steps, checkpoint.every_steps
    _need(
        milestones == 0 or (milestones > 0 and bool(by_steps) and milestones % (by_steps or 1) == 0),
        f"checkpoint.keep_every_steps={milestones} must be 0 or a multiple of checkpoint.every_steps={by_steps}: "
        "what is not written cannot be kept",
    )
    _need(checkpoint.timeout_s > 0, f"checkpoint.timeout_s={checkpoint.timeout_s} must be positive")
    _need(
        snapshot.slots >= 2,
        f"snapshot.slots={snapshot.slots} must be at least 2: one is filled while the other is the newest that is safe",
    )
    cluster = config.cluster
    _need(
        snapshot.slots >= 3 or not (cluster.verify_every_steps and takes_snapshots(snapshot)),
        f"snapshot.slots={snapshot.slots} must be at least 3 with cluster.verify_every_steps="
        f"{cluster.verify_every_steps}: one is the newest verified, one the newest, and one is filled",
    )
    most_nodes = cluster.local_nodes or most_workers(cluster)
    _need(
        1 <= snapshot.copies <= max(1, most_nodes - 1),
        f"snapshot.copies={snapshot.copies} must be 1 to {max(1, most_nodes - 1)}: each is on another one of at most "
        f"{most_nodes} nodes",
    )
    every = snapshot.every_steps
    _need(
        every == AUTO if isinstance(every, str) else every >= 0,
        f"snapshot.every_steps={every} must be auto, or a number of steps from one snapshot to the next; 0 takes none",
    )
    _need(
        snapshot.most_steps_lost >= 1,
        f"snapshot.most_steps_lost={snapshot.most_steps_lost} must be at least 1: what a lost node may cost",
    )
    _need(
        snapshot.abandon_after_s >= 30,
        f"snapshot.abandon_after_s={snapshot.abandon_after_s} must be at least 30: a driver takes a while to come back",
    )


def topologies(config: PretrainConfig) -> dict[int, Topology]:
    """By world size, of every feasible one."""
    cluster, most = config.cluster, config.cluster.max_workers
    if parks(cluster):  # more units than slices: some of them are always spares
        parallel = config.parallel
        most = min(most, config.optim.num_slices * parallel.tp * parallel.cp * parallel.pp)
    return topology_table(min_workers=cluster.min_workers, max_workers=most, **_rule(config))


def world_sizes(config: PretrainConfig, table: Table | None = None) -> dict[int, int]:
    """The world size of the group by how many ranks there are, in whole units from the fewest on; others are spares."""
    table = topologies(config) if table is None else table
    tp, most = config.parallel.tp, config.cluster.max_workers
    fewest = fewest_ranks(table) if parks(config.cluster) else {size: size for size in table}
    present = range(min(table, default=most + 1), most + 1, tp)
    return {ranks: fewest[size] for ranks, size in taken_sizes(table, present, pp=config.parallel.pp).items()}


def topology_of(config: PretrainConfig, world_size: int) -> Topology:
    """Of one world size, where there is no need for the table. Raises BatchError where there is none."""
    made = topology_table(min_workers=world_size, max_workers=world_size, **_rule(config))
    if world_size not in made:
        parallel = config.parallel
        units = ranks_of_unit(pp=parallel.pp, cp=parallel.cp, tp=parallel.tp)
        raise BatchError(f"{world_size} workers are not whole units of {units}")
    return made[world_size]


class _Rule(TypedDict):
    num_slices: int
    dp_replicate: int
    tp: int
    cp: int
    slices_per_pass: int
    pipelines: Pipelines | None


def _rule(config: PretrainConfig) -> _Rule:
    return {
        "num_slices": config.optim.num_slices,
        "dp_replicate": config.parallel.dp_replicate,
        "tp": config.parallel.tp,
        "cp": config.parallel.cp,
        "slices_per_pass": config.parallel.slices_per_pass,
        "pipelines": pipelines_of(config.model, config.parallel, config.data.seq_len),
    }
