"""Forecasts for a person: rows for the world sizes that matter, what does not fit, what would help, the assumptions."""

from collections.abc import Sequence

from regrow.config.schema import Dtype, PretrainConfig
from regrow.config.snapshots import fixed_every_steps
from regrow.config.spares import most_workers, num_beyond
from regrow.forecast.cost import Network, assumptions
from regrow.forecast.devices import GIB, Device
from regrow.forecast.estimate import PATIENCE_S, USABLE_SHARE, Forecast, remedy
from regrow.forecast.footprint import KINDS
from regrow.model.size import flops_per_token, num_params
from regrow.plan.pipeline import Stages

MOST_ROWS = 12
LEAST_SLOWER = 1e-3  # of a step that is told


def to_text(config: PretrainConfig, forecasts: Sequence[Forecast], device: Device, network: Network) -> str:
    """Lines of text."""
    return "\n".join(
        [
            *_heading(config, device, network),
            *_pipeline(forecasts[-1].stages),
            *_context(config),
            "",
            *_memory(forecasts, network),
            "",
            *_time(forecasts, network),
            *_unit_away(config, forecasts),
            *_snapshots(config, forecasts[-1], network),
            "",
            *_verdict(config, forecasts, device, network),
            "",
            *(f"assumed: {assumption}" for assumption in assumptions(device)),
        ]
    )


def chosen(forecasts: Sequence[Forecast], network: Network) -> list[Forecast]:
    """The smallest and the largest size and those of whole nodes between them, thinned out where they are many."""
    first, last = forecasts[0], forecasts[-1]
    between = [each for each in forecasts[1:-1] if each.num_workers % network.ranks_per_node == 0]
    every = max(1, -(-len(between) // (MOST_ROWS - 2)))
    return [first, *between[::every], *([last] if last is not first else [])]


def spans(sizes: Sequence[int], step: int = 1) -> str:
    """World sizes in order, as a person would say them; those that are `step` apart are neighbours.

    >>> spans([32, 33, 34, 36])
    '32-34, 36'
    """
    parts: list[list[int]] = []
    for size in sizes:
        if parts and size == parts[-1][-1] + step:
            parts[-1].append(size)
        else:
            parts.append([size])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _heading(config: PretrainConfig, device: Device, network: Network) -> list[str]:
    tokens = config.optim.global_batch_seqs * config.data.seq_len
    flops = tokens * flops_per_token(config.model, config.data.seq_len)
    return [
        f"{config.model.name}: {num_params(config.model):,} parameters; {config.cluster.min_workers} to "
        f"{config.cluster.max_workers} workers, {network.ranks_per_node} a node, on {device.name}: "
        f"{device.memory_bytes / GIB:.4g} GiB, {device.flops / 1e12:.4g} TFLOP/s",
        f"a step: {config.optim.global_batch_seqs} x {config.data.seq_len} = {tokens:,} tokens, {flops:.3g} FLOPs; "
        f"the run: {config.train.steps:,} steps, {config.train.steps * flops:.3g} FLOPs",
    ]


def _memory(forecasts: Sequence[Forecast], network: Network) -> list[str]:
    on_nodes = ["snapshots", *(["offloaded"] if any(each.offloaded_bytes for each in forecasts) else [])]
    rows = [["workers", "mesh", *KINDS, "all", "fits", "when", *on_nodes]]
    for each in chosen(forecasts, network):
        kinds = [f"{each.memory.kinds[kind] / GIB:.2f}" for kind in KINDS]
        replicas = f"{each.mesh.dp_replicate}x" if each.mesh.dp_replicate > 1 else ""
        total, fits = f"{each.memory.total / GIB:.2f}", "yes" if each.fits else "NO"
        in_memory = [f"{size / GIB:.1f}" for size in (each.snapshot_bytes, each.offloaded_bytes)][: len(on_nodes)]
        size, unit = str(each.num_workers), f"x{each.mesh.tp}" if each.mesh.tp > 1 else ""
        shards = f"{each.mesh.dp_shard // each.mesh.cp}{f'xcp{each.mesh.cp}' if each.mesh.cp > 1 else ''}"
        mesh = f"{f'{each.mesh.pp}x' if each.mesh.pp > 1 else ''}{replicas}{shards}{unit}"
        rows.append([size, mesh, *kinds, total, fits, each.memory.moment, *in_memory])
    heading = f"GiB of a device at the fullest moment of a step; {' and '.join(on_nodes)}, in a node's memory"
    return [heading, *_columns(rows)]


def _time(forecasts: Sequence[Forecast], network: Network) -> list[str]:
    spares = ["spares"] if any(each.spares for each in forecasts) else []
    bubble = ["bubble"] if any(each.stages for each in forecasts) else []
    seconds = ["compute s", "network s", "update s", "step s"]
    rows = [["workers", *spares, "passes", "idle", *bubble, *seconds, "tokens/s", "MFU", "bound by"]]
    for each in chosen(forecasts, network):
        time = each.time
        seconds = [f"{value:.3g}" for value in (time.compute_s, time.network_s, time.update_s, time.step_s)]
        rows.append(
            [
                str(each.num_workers),
                *([str(each.spares)] if spares else []),
                str(each.batch.num_micro_batches),
                f"{each.batch.idle_share:.1%}",
                *([f"{each.bubble_share:.1%}"] if bubble else []),
                *seconds,
                f"{each.tokens_per_s:,.0f}",
                f"{each.mfu:.0%}",
                time.bound_by,
            ]
        )
    return ["a step, an estimate; compute and network run side by side", *_columns(rows)]


def _pipeline(stages: Stages | None) -> list[str]:
    """What stages there are, and what a reader may do about the bubble."""
    if stages is None:
        return []
    blocks = ", ".join(str(len(each)) for each in stages.blocks)
    several = f", {stages.per_rank} a rank, interleaved" if stages.per_rank > 1 else ""
    return [
        f"{len(stages.blocks)} stages of {blocks} blocks{several}; the bubble shrinks with more passes "
        "(optim.num_slices) and more stages a rank (parallel.schedule=interleaved)",
        "assumed: memory is at most that of a rank with most blocks, and with embedding and output both; messages "
        "between stages hide behind arithmetic",
    ]


def _context(config: PretrainConfig) -> list[str]:
    """What ranks that share rows share, and what they do not."""
    model, parallel, seq_len = config.model, config.parallel, config.data.seq_len
    cp = parallel.cp
    if cp == 1:
        return []
    kv_dim, item = (
        model.dim // model.num_heads * model.num_kv_heads // parallel.tp,
        2 if parallel.dtype is Dtype.bfloat16 else 4,
    )
    return [
        f"{cp} ranks share each row, {seq_len // cp:,} of its {seq_len:,} tokens each in two chunks; attention gathers "
        f"keys and values of whole rows, and waits: {2 * kv_dim * seq_len * item / GIB:.2f} GiB a row and block",
    ]


def _unit_away(config: PretrainConfig, forecasts: Sequence[Forecast]) -> list[str]:
    """What it costs that one unit is away from all that may be there, in a line, where that is allowed."""
    full = forecasts[-1]
    most, size, spares = (
        most_workers(config.cluster),
        full.mesh.tp * full.mesh.cp * full.mesh.pp,
        full.spares + num_beyond(config.cluster),
    )
    if spares >= size:
        return [f"one unit of {size} away from {most} workers costs nothing: {spares} of these are spares"]
    left = [each for each in forecasts if each.num_workers <= most - size]
    if not left or (slower := left[-1].time.step_s / full.time.step_s - 1) < LEAST_SLOWER:
        return []
    before = left[-1]
    passes = f"{before.batch.num_micro_batches} passes for {full.batch.num_micro_batches}"
    return [
        f"one unit of {size} away from {most} workers: {passes}, a step takes {slower:.1%} longer; with more workers "
        "in cluster.max_workers and cluster.spare_workers=auto a spare takes its place"
    ]


def _snapshots(config: PretrainConfig, full: Forecast, network: Network) -> list[str]:
    """What a commit takes, how far apart snapshots are, what a lost node costs."""
    commits = full.commits
    if not commits.every_steps:
        return []
    if not commits.num_bytes:
        return [
            f"snapshots every {commits.every_steps} steps stay on the one node: a lost worker costs at most "
            f"{commits.steps_lost} steps, the node itself what is not in storage"
        ]
    measured = fixed_every_steps(config.snapshot) is None
    what = (
        f"snapshots at {full.num_workers} workers: {commits.num_bytes / 1e9:.3g} GB a node to others at "
        f"{network.keepers_bytes_per_s / 1e9:.3g} GB/s (plan.keepers_gb_per_s), a commit takes {commits.commit_s:.3g} s"
    )
    if measured:
        return [f"{what}; one every {commits.every_steps} steps, a lost node costs at most {commits.steps_lost}"]
    if commits.falls_behind:
        return [
            f"{what}, longer than a step, which waits up to {PATIENCE_S:.0f} s, then goes on without; "
            f"snapshot.every_steps=auto waits for none; one every {commits.every_steps} steps as far as there is room, "
            f"a lost node costs at most {commits.steps_lost}"
        ]
    waits = commits.commit_s > full.time.step_s
    then = "longer than a step, which waits; snapshot.every_steps=auto does not" if waits else "less than a step"
    return [f"{what}, {then}; one every {commits.every_steps} steps, as many are lost with a node at most"]


def _verdict(config: PretrainConfig, forecasts: Sequence[Forecast], device: Device, network: Network) -> list[str]:
    usable = f"{device.memory_bytes * USABLE_SHARE / GIB:.1f} GiB, {USABLE_SHARE:.0%} of the device's memory"
    large = [each for each in forecasts if not each.fits]
    if not large:
        return [f"fits at every size: less than {usable}"]
    worst = max(large, key=lambda each: each.memory.total)
    size = worst.mesh.world_size
    where = spans([each.num_workers for each in large], config.parallel.tp)
    lines = [f"does not fit at {where} workers: at most {usable}, and at {size} it is {worst.memory.total / GIB:.1f}"]
    found = remedy(config, size, device, network)
    if found is None:
        lines.append(
            "no setting of `parallel` changes that: raise cluster.min_workers or parallel.cp, or shorten data.seq_len"
        )
    else:
        settings, then = found
        lines.append(
            f"{settings} would do: {then.memory.total / GIB:.1f} GiB at {size} workers, "
            f"{then.time.step_s:.3g} s a step instead of {worst.time.step_s:.3g}"
        )
    return lines


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
