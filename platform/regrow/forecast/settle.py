"""What a configuration leaves open: stages of a pipeline, slices of a pass. The forecast weighs them, once for a run,
before anything starts, so that all ranks have the same numbers and a change of the group changes none.
"""

import contextlib
from dataclasses import replace
from itertools import product
from typing import TypeVar

from regrow.config.check import check, check_before_stages, topologies, topology_of, world_sizes
from regrow.config.schema import ParallelConfig, PlanConfig, PretrainConfig
from regrow.config.stages import stages_per_rank
from regrow.errors import ConfigError, RegrowError
from regrow.forecast.cost import Network
from regrow.forecast.devices import GIB, Device
from regrow.forecast.estimate import Forecast, forecast, gpu_of, network_of, topologies_of_groups

ROOM_SHARE = 0.85  # of what is usable, that larger passes may fill: torch reserves 1.1 to 1.2 of what it allocates
MOST_SIZES = 9  # of the group, that are looked at

C = TypeVar("C", bound=PretrainConfig)


def settled(config: C, *, at_most_bytes: int | None = None) -> tuple[C, str]:
    """As `settle`, for the GPUs that `cluster.name` names, with so many bytes of memory at the most. Raises RegrowError
    for what `check` refuses."""
    plan, device = PlanConfig(), None
    if config.cluster.gpus_per_worker:
        with contextlib.suppress(ConfigError):  # a cluster by another name
            device = gpu_of(config, plan)
    if device is not None and at_most_bytes is not None:
        device = replace(device, memory_bytes=min(device.memory_bytes, at_most_bytes))
    return settle(config, device, network_of(config, plan))


def settings_of(config: PretrainConfig, planned: PretrainConfig) -> list[str]:
    """What `config` leaves open and `planned` has numbers for, as arguments that a run has to be given; none where it
    would settle the same by its cluster's name alone.
    """
    nothing = {"pp": 0, "least_pp": 0, "slices_per_pass": 0, "sync_every_micro_batch": None}
    names = [name for name, each in nothing.items() if getattr(config.parallel, name) == each]
    with contextlib.suppress(RegrowError):
        of_run, _ = settled(config)
        if all(getattr(of_run.parallel, name) == getattr(planned.parallel, name) for name in names):
            return []
    return [f"parallel.{name}={str(getattr(planned.parallel, name)).lower()}" for name in names]


def settle(config: C, device: Device | None, network: Network) -> tuple[C, str]:
    """Numbers for all that is open, and why; or nothing. Raises RegrowError for what `check` refuses."""
    config, stages = settle_stages(config, device, network)
    check(config)
    config, passes = settle_passes(config, device, network)
    return config, "\n".join(filter(None, (stages, passes)))


def settle_stages(config: C, device: Device | None, network: Network) -> tuple[C, str]:
    """How many stages a pipeline has at the largest world size, and how few it may have at others.

    The fastest that fits; of others the fewest with which every size fits. Where nothing fits, what takes least memory.
    Without a GPU, or where its kind is not known (None), no pipeline where none is asked for, and no least number.
    Raises RegrowError where no number of stages passes `check`.
    """
    parallel = config.parallel
    if parallel.pp and parallel.least_pp:
        return config, ""
    if parallel.pp == 0:
        check_before_stages(config)
    if device is None or config.cluster.gpus_per_worker == 0 or parallel.pp == 1:
        return _with_stages(config, parallel.pp or 1, parallel.least_pp or 1), ""
    chosen = config if parallel.pp else _fastest_pipeline(config, device, network)
    pp = chosen.parallel.pp
    least = chosen.parallel.least_pp or _fewest_stages(chosen, device, network)
    found = f"by forecast for {device.name}: parallel.pp={pp} parallel.least_pp={least}" if pp > 1 else ""
    return _with_stages(chosen, pp, least), found


def _fastest_pipeline(config: C, device: Device, network: Network) -> C:
    """At the largest world size, of those that fit at every one; where none does, what takes least memory."""
    cluster, parallel = config.cluster, config.parallel
    units = max(1, cluster.max_workers // (parallel.tp * parallel.cp))
    most = max(1, min(units, config.model.num_layers // stages_per_rank(parallel)))
    tried: list[tuple[Forecast, C]] = []
    refused: RegrowError | None = None
    for pp in [each for each in range(1, most + 1) if units % each == 0]:
        try:
            each, full = _with_any_least(config, pp)
        except RegrowError as error:
            refused = refused or error
            continue
        each, _ = settle_passes(each, device, network)
        found = forecast(each, full, device, network)
        tried.append((found, _with_stages(config, pp, parallel.least_pp)))
    if not tried:
        assert refused is not None
        raise refused
    for found, each in sorted(tried, key=lambda one: one[0].time.step_s):
        if not found.fits:
            continue
        least = parallel.least_pp or _fewest_stages(each, device, network)
        each = _with_stages(each, each.parallel.pp, least)
        if _is_sound(each, device, network):
            return each
    return min(tried, key=lambda one: one[0].memory.total)[1]


def _with_any_least(config: C, pp: int) -> tuple[C, int]:
    """With so many stages where all workers are there, and a least number that `check` takes; the size of that group.
    Raises RegrowError."""
    refused: RegrowError | None = None
    for least in [config.parallel.least_pp] if config.parallel.least_pp else range(1, pp + 1):
        each = _with_stages(config, pp, least)
        try:
            table = check(each)
        except RegrowError as error:
            refused = refused or error
            continue
        return each, world_sizes(each, table)[config.cluster.max_workers]
    assert refused is not None
    raise refused


def _fewest_stages(config: C, device: Device, network: Network) -> int:
    """Of all world sizes but the multiples of the configured pipeline; that pipeline's, where fewer do not fit."""
    pp = config.parallel.pp
    found = (least for least in range(1, pp) if _is_sound(_with_stages(config, pp, least), device, network))
    return next(found, pp)


def _is_sound(config: PretrainConfig, device: Device, network: Network) -> bool:
    """Whether `check` takes it, and all world sizes fit."""
    try:
        check(config)
    except RegrowError:
        return False
    return _fits(settle_passes(config, device, network)[0], 1.0, device, network)


def _with_stages(config: C, pp: int, least_pp: int) -> C:
    return replace(config, parallel=replace(config.parallel, pp=pp, least_pp=least_pp))


def settle_passes(config: C, device: Device | None, network: Network) -> tuple[C, str]:
    """How many slices a pass has, and when gradients are reduced, where that is open: numbers, and why; or nothing.

    Few large passes launch less, gather less often and add to fewer gradients; gradients that every pass reduces take
    traffic and leave room for larger passes. The forecast weighs them, before anything starts and once for a run, so
    that a change of the group changes no shapes and all ranks have the same.

    Without a GPU, or where its kind is not known (None), a pass is a slice, and the last one reduces. So in a pipeline,
    where few large passes are a large bubble.
    """
    parallel = config.parallel
    if parallel.slices_per_pass and parallel.sync_every_micro_batch is not None:
        return config, ""
    if device is None or config.cluster.gpus_per_worker == 0 or parallel.pp > 1:
        return _with(config, parallel.slices_per_pass or 1, bool(parallel.sync_every_micro_batch)), ""
    chosen = _fastest_that_fits(config, device, network)
    table = topologies(chosen)
    least = min(table)
    at_least = forecast(chosen, least, device, network, table)
    passes, reduced = chosen.parallel.slices_per_pass, chosen.parallel.sync_every_micro_batch
    return chosen, (
        f"by forecast for {device.name}: parallel.slices_per_pass={passes} "
        f"parallel.sync_every_micro_batch={str(reduced).lower()}, {at_least.memory.total / GIB:.0f} of "
        f"{at_least.usable_bytes / GIB:.0f} GiB at {least} workers"
    )


def _fastest_that_fits(config: C, device: Device, network: Network) -> C:
    """The fastest at the largest world size that fits all; where none does, what takes least memory."""
    parallel = config.parallel
    full = max(world_sizes(config).values())
    most = topology_of(config, full).batch.most_slices
    # passes of one size: each other one would be compiled too
    sizes = [parallel.slices_per_pass] if parallel.slices_per_pass else [n for n in range(1, most + 1) if most % n == 0]
    reduces = [False, True] if parallel.sync_every_micro_batch is None else [parallel.sync_every_micro_batch]
    tried = [_with(config, size, reduce) for size, reduce in product(sizes, reduces)]
    plainest, smallest = tried[: len(reduces)], tried[len(reduces) - 1]
    times = [forecast(each, full, device, network).time.step_s for each in tried]
    for _, number in sorted((time, number) for number, time in enumerate(times)):
        room = 1.0 if tried[number] in plainest else ROOM_SHARE
        if _fits(tried[number], room, device, network):
            return tried[number]
    return smallest


def _fits(config: PretrainConfig, room: float, device: Device, network: Network) -> bool:
    table = topologies_of_groups(config, topologies(config))
    sizes = list(table)
    looked_at = {*sizes[:: max(1, len(sizes) // (MOST_SIZES - 2))], sizes[0], sizes[-1]}
    # by stages and replicas, which each rank's state and gradients depend on
    smallest = {(table[size].mesh.pp, table[size].mesh.dp_replicate): size for size in reversed(sizes)}
    looked_at |= set(smallest.values())
    found = (forecast(config, size, device, network, table) for size in sorted(looked_at))
    return all(each.memory.total <= room * each.usable_bytes for each in found)


def _with(config: C, slices_per_pass: int, reduce: bool) -> C:
    parallel: ParallelConfig = replace(config.parallel, slices_per_pass=slices_per_pass, sync_every_micro_batch=reduce)
    return replace(config, parallel=parallel)
