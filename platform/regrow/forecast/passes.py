"""How many slices a pass has, and when gradients are reduced, where the configuration leaves that open.

Few large passes launch less, gather less often and add to fewer gradients; gradients that every pass reduces take
traffic and leave room for larger passes. The forecast weighs them, before anything starts and once for a run, so that
a change of the group changes no shapes and all ranks have the same. Needs no torch.
"""

import contextlib
from dataclasses import replace
from itertools import product
from typing import TypeVar

from regrow.config.check import check
from regrow.config.schema import ParallelConfig, PlanConfig, PretrainConfig
from regrow.config.topology import topologies, topology_of
from regrow.errors import ConfigError
from regrow.forecast.cost import Network
from regrow.forecast.devices import GIB, Device
from regrow.forecast.estimate import forecast, gpu_of, network_of

ROOM_SHARE = 0.85  # of what is usable, that larger passes may fill: what compiled blocks keep on a GPU is an assumption
MOST_SIZES = 9  # of the group, that are looked at

C = TypeVar("C", bound=PretrainConfig)


def settled(config: C) -> tuple[C, str]:
    """As `settle_passes`, for the GPUs that `cluster.name` names. Raises RegrowError for what `check` refuses."""
    check(config)
    plan, device = PlanConfig(), None
    if config.cluster.gpus_per_worker:
        with contextlib.suppress(ConfigError):  # a cluster by another name
            device = gpu_of(config, plan)
    return settle_passes(config, device, network_of(config, plan))


def settle_passes(config: C, device: Device | None, network: Network) -> tuple[C, str]:
    """Put numbers in place of what is open, and say which and why; empty where nothing was.

    Without a GPU, or where its kind is not known (None), a pass is a slice, and the last one reduces.
    """
    parallel = config.parallel
    if parallel.slices_per_pass and parallel.sync_every_micro_batch is not None:
        return config, ""
    if device is None or config.cluster.gpus_per_worker == 0:
        return _with(config, parallel.slices_per_pass or 1, bool(parallel.sync_every_micro_batch)), ""
    chosen = _fastest_that_fits(config, device, network)
    at_least = forecast(chosen, config.cluster.min_workers, device, network)
    passes, reduced = chosen.parallel.slices_per_pass, chosen.parallel.sync_every_micro_batch
    return chosen, (
        f"by forecast for {device.name}: parallel.slices_per_pass={passes} "
        f"parallel.sync_every_micro_batch={str(reduced).lower()}, {at_least.memory.total / GIB:.0f} of "
        f"{at_least.usable_bytes / GIB:.0f} GiB at {config.cluster.min_workers} workers"
    )


def _fastest_that_fits(config: C, device: Device, network: Network) -> C:
    """The fastest at the largest world size that fits all; where none does, what takes least memory."""
    parallel, cluster = config.parallel, config.cluster
    most = topology_of(config, cluster.max_workers).batch.most_slices
    # passes of one size: each other one would be compiled too
    sizes = [parallel.slices_per_pass] if parallel.slices_per_pass else [n for n in range(1, most + 1) if most % n == 0]
    reduces = [False, True] if parallel.sync_every_micro_batch is None else [parallel.sync_every_micro_batch]
    tried = [_with(config, size, reduce) for size, reduce in product(sizes, reduces)]
    plainest, smallest = tried[: len(reduces)], tried[len(reduces) - 1]
    times = [forecast(each, cluster.max_workers, device, network).time.step_s for each in tried]
    for _, number in sorted((time, number) for number, time in enumerate(times)):
        room = 1.0 if tried[number] in plainest else ROOM_SHARE
        if _fits(tried[number], room, device, network):
            return tried[number]
    return smallest


def _fits(config: PretrainConfig, room: float, device: Device, network: Network) -> bool:
    table = topologies(config)
    sizes = list(table)
    looked_at = {*sizes[:: max(1, len(sizes) // (MOST_SIZES - 2))], sizes[0], sizes[-1]}
    found = (forecast(config, size, device, network, table) for size in sorted(looked_at))
    return all(each.memory.total <= room * each.usable_bytes for each in found)


def _with(config: C, slices_per_pass: int, reduce: bool) -> C:
    parallel: ParallelConfig = replace(config.parallel, slices_per_pass=slices_per_pass, sync_every_micro_batch=reduce)
    return replace(config, parallel=parallel)
