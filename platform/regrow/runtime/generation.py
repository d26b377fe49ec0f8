"""One generation of a group, as one of its ranks sees it: build, restore, run, leave.

Starting, resuming, shrinking, growing and restarting after a loss are this one path.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import ray
import torch
from torch.distributed.device_mesh import DeviceMesh

import regrow
from regrow.config.snapshots import fixed_every_steps
from regrow.control.phases import Phase, form_s
from regrow.data.read.batch import RankBatch, layout_of
from regrow.data.read.corpora import order_of
from regrow.data.read.outage import Patience, PatientReader
from regrow.data.stream.client import Ask, FewerFallbacks, rank_batches, seek_patience, warn, ways_to_ask
from regrow.model.linears import float8_steps
from regrow.parallel.compile import graphs_compiled, graphs_lowered
from regrow.parallel.fsdp import build_mesh, connect
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.record.events import Cause
from regrow.runtime.abort import Breaker
from regrow.runtime.calls import CoordinatorClient
from regrow.runtime.clock import clock_of
from regrow.runtime.hardware.peak import Peak, peak_flops
from regrow.runtime.hooks import GenerationHooks
from regrow.runtime.process import Process
from regrow.runtime.rendezvous import Joined
from regrow.runtime.restore import Restored, build_and_restore
from regrow.state.collective import gather
from regrow.train.build import loop_settings, meter_of
from regrow.train.certificate import BrokenStep, Certificate
from regrow.train.flips import flipping
from regrow.train.hooks import Saver
from regrow.train.loop import train
from regrow.train.metrics import Meter, NotFinite
from regrow.train.saver import Cadence, CheckpointSaver, SnapshotSaver
from regrow.train.step import go_on_from
from regrow.train.validation import Validation


def train_generation(process: Process, joined: Joined, breaker: Breaker, *, entered: float) -> bool:
    """Train as one rank of a group until the run's end, or until the group leaves; whether it was the end.

    `breaker` may end all of it from another thread. `entered` is when this process began, or began again after another
    generation. Collective. Raises RegrowError for what another attempt would meet again, Unfit for a device that is
    not; whatever a collective raises where a rank is lost.
    """
    begun, job, config = time.time(), process.job, process.job.config
    topology = job.topologies[joined.world_size]
    mesh = _connected_mesh(process, joined, topology.mesh, breaker)
    certificate = Certificate(joined.generation, joined.world_size, process.device)
    breaker.first(certificate.clear)
    restored = build_and_restore(process, joined, mesh, breaker)
    step, progress = restored.step, restored.progress
    step.certificate = certificate
    last_step = min(config.train.steps, config.train.stop_at_step or config.train.steps)
    end_of_float8 = float8_steps(config.parallel, config.train.steps)
    until = min(last_step, end_of_float8) if progress.step < end_of_float8 else last_step  # this generation
    unit, units = topology.unit_of(joined.rank), topology.mesh.num_units
    patience = _patience(process, joined, breaker)
    validation = Validation(config, job.corpora, device=process.device, unit=unit, num_units=units, patience=patience)
    process.rows.begin(joined.generation, progress.step)
    place = Coordinates(topology.mesh, joined.rank)
    compiled = process.compiled if keeps_compiled(joined, process.device) else None
    hooks = GenerationHooks(process, joined.generation, step, place, validation, breaker, progress, compiled=compiled)
    saver = _saver(process, joined, restored, place, hooks, last_step=until)
    process.stream.submit(partial(go_on_from, step, progress.step)).result()
    ready = time.time()

    batches = _batches(process, joined, patience, topology.slices_of(joined.rank), range(progress.step, until))
    peak = peak_flops(process.device, config.parallel.dtype, config.observe.peak_tflops)
    flops = sum(gather(peak.flops))
    meter = meter_of(config, joined.world_size, joined.generation, device=process.device, peak_flops=flops)
    _announce(process, joined, restored, topology.mesh, peak, meter, entered=entered, begun=begun, ready=ready)
    if restored.source == "snapshot" and isinstance(saver, SnapshotSaver):  # what came from storage is safe there
        saver.keep_restored(progress)
    left = False
    if progress.step < last_step:
        hooks.profile(progress.step)
        if process.memory is not None:
            process.memory.heartbeat.trains(step.waits.at_a_collective, step.waits.at_a_message)
        try:
            left = train(
                step,
                flipping(hooks.in_data(batches), step.model),
                progress,
                optim=config.optim,
                settings=loop_settings(config, topology, until),
                meter=meter,
                saver=saver,
                hooks=hooks,
                device=process.device,
                stream=process.stream,
            )
        except NotFinite as error:
            hooks.not_finite(progress.step, str(error))
            raise
        finally:
            if hooks.window is not None:
                hooks.window.abandon()
    elif restored.source == "snapshot":  # the run ended before this step was in storage
        saver.finish(progress, blocked=False)
    if process.memory is not None and process.memory.snapshots is not None:
        process.memory.snapshots.close()
    cause = "" if left or until == last_step else Cause.end_of_float8
    left = left or until < last_step
    hooks.close(left_at=progress.step if left else None, cause=cause)
    return not left


def keeps_compiled(joined: Joined, device: torch.device) -> bool:
    """Whether this rank gives what it compiles to the cache: the first one, and its neighbours for their own GPUs.

    Inductor's keys have the index of the device.
    """
    return joined.rank == 0 or (device.type == "cuda" and joined.beside_first)


def _connected_mesh(process: Process, joined: Joined, shape: MeshShape, breaker: Breaker) -> DeviceMesh:
    """The mesh, with all its communicators made. Collective."""
    timeout_s = process.job.config.train.collective_timeout_s
    connect_s = form_s(joined.world_size, timeout_s)
    mesh = build_mesh(shape, process.device.type, timeout_s=timeout_s, connect_s=connect_s)
    with breaker.connecting(connect_s):
        connect(mesh)
        connected = process.stream.drain(timeout_s)
    if breaker.begun or not connected:
        raise BrokenStep(f"generation {joined.generation} was over before its ranks were connected")
    return mesh


def _saver(
    process: Process, joined: Joined, restored: Restored, place: Coordinates, hooks: GenerationHooks, *, last_step: int
) -> Saver:
    """Where this rank's state is kept: in slots, which are made here, or in storage alone. Collective."""
    config = process.job.config
    cadence = Cadence(last_step, fixed_every_steps(config.snapshot), config.checkpoint.every_steps)
    if process.memory is None:
        return CheckpointSaver(cadence, hooks.write, timeout_s=config.checkpoint.timeout_s, stepped=hooks.stepped)
    snapshots = process.memory.start(restored.entries, place, joined.generation, process.stream)
    return SnapshotSaver(
        cadence,
        snapshots,
        start_step=restored.progress.step,
        num_ahead=process.stream.num_ahead,
        want_checkpoint=hooks.want_checkpoint,
        write=hooks.write,
        timeout_s=config.checkpoint.timeout_s,
        stepped=hooks.stepped,
        phase=hooks.phase,
        spacing=lambda: hooks.every_steps,
        user=restored.progress.user,
    )


def _patience(process: Process, joined: Joined, breaker: Breaker) -> Patience:
    """With storage that fails: the run's log tells which rank waits, and it stops with its group."""
    job, memory = process.job, process.memory
    coordinator = CoordinatorClient(job.coordinator, joined.generation)

    def on_wait(detail: str) -> None:
        coordinator.event("data_waits", {"rank": joined.rank, "reason": detail})

    def waiting() -> AbstractContextManager[None]:
        return memory.phase(Phase.storage) if memory is not None else nullcontext()

    return Patience(job.config.data.storage_timeout_s, on_wait, lambda: breaker.begun, waiting)


def _batches(process: Process, joined: Joined, patience: Patience, slices: range, steps: range) -> Iterator[RankBatch]:
    """This rank's rows of these steps, from the token stream. Collective."""
    job, config = process.job, process.job.config
    layout, nodes = layout_of(config), {member.node for member in joined.formation.members}
    return rank_batches(
        _ways_to_ask(process, joined.generation, slices),
        order_of(config, job.corpora),
        PatientReader(job.corpora.reader("train"), patience),
        layout,
        slices=slices,
        start_step=steps.start,
        stop_step=steps.stop,
        stall_timeout_s=config.data.stall_timeout_s,
        has_fed=joined.generation > job.first_generation,
        seek_patience_s=seek_patience(layout, seq_len=config.data.seq_len, num_nodes=len(nodes)),
        on_fallback=_fallbacks(CoordinatorClient(job.coordinator, joined.generation), joined),
        on_failed_ask=partial(_forget_fetcher, process),
        is_over=patience.is_over,
    )


def _announce(
    process: Process,
    joined: Joined,
    restored: Restored,
    shape: MeshShape,
    peak: Peak,
    meter: Meter,
    *,
    entered: float,
    begun: float,
    ready: float,
) -> None:
    """Tell the coordinator that the group is ready, and where the time went; rows have its time. Collective."""
    job, first = process.job, joined.generation == process.job.first_generation
    node = ray.get_runtime_context().get_node_id()
    worker = {"host": socket.gethostname(), "node": node, "pid": os.getpid(), "device": _device_name(process.device)}
    workers = gather({**worker, "graphs": graphs_compiled(), "lowered": graphs_lowered()})
    if joined.rank != 0:
        return
    startup_s = {
        **(job.driver_s if first else {}),
        "workers": entered - (job.fit_at if first else entered),
        "group": begun - entered,
        "model": restored.built_at - begun,
        "keeper": restored.keeper_at - restored.built_at,
        "restore": restored.filled_at - restored.keeper_at,
        "slots": ready - restored.filled_at,
    }
    details = {
        "world_size": joined.world_size,
        "axes": shape.sizes,
        "source": restored.source,
        "startup_s": startup_s,
        "init_s": time.time() - entered - (ready - restored.built_at),
        "restore_s": ready - restored.built_at,
        "workers": workers,
        "regrow": str(Path(regrow.__file__).parent),
        "peak_flops": peak.flops,
        "peak_source": peak.source,
    }
    coordinator = CoordinatorClient(job.coordinator, joined.generation)
    coordinator.start_training(restored.progress.step, details)
    meter.clock = process.rows.clock = clock_of(coordinator.now)


def _ways_to_ask(process: Process, generation: int, slices: range) -> list[Ask]:
    """How this rank asks for its slices; for all ranks of its node together, where there are several. Collective.

    The fetcher of the generation before is this one's: all ranks at once would ask the stream's one actor for theirs.
    """
    job, layout = process.job, layout_of(process.job.config)
    node_id = ray.get_runtime_context().get_node_id()
    everyones = gather((node_id, slices.start, slices.stop))
    slices_on_node = [range(start, stop) for node, start, stop in everyones if node == node_id]
    if len(slices_on_node) == 1:
        return ways_to_ask(job.stream, None, layout, group=generation, slices_on_node=slices_on_node)
    if process.fetcher is None:
        with contextlib.suppress(ray.exceptions.RayError):  # a stream that died comes back, without fetchers
            process.fetcher = ray.get(job.stream.fetcher.remote(node_id), timeout=job.config.data.stall_timeout_s)
    return ways_to_ask(job.stream, process.fetcher, layout, group=generation, slices_on_node=slices_on_node)


def _forget_fetcher(process: Process) -> None:
    """Have the next generation ask for another: one that has failed may be gone for good, with its stream."""
    process.fetcher = None


def _fallbacks(coordinator: CoordinatorClient, joined: Joined) -> FewerFallbacks:
    """Where it is told that a rank reads windows from the shards itself: in the run's log; in its worker's, where it is
    not the first rank of its node: a late stream is late for all of them, and they may be many thousands."""
    return FewerFallbacks(partial(_report_fallback, coordinator, joined.rank) if joined.speaks else warn)


def _report_fallback(coordinator: CoordinatorClient, rank: int, window: int, reason: str, windows: int) -> None:
    coordinator.event("data_fallback", {"rank": rank, "window": window, "reason": reason, "windows": windows})


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{torch.get_num_threads()}"
