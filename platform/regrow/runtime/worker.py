"""What a worker process does, from its start to the run's end: one generation after another.

Where a rank is lost, the others find their collectives failing. They give up the group, keep process, imports and
memory, and join the next generation; what they had on the device is built and restored anew.
"""

import contextlib
import ctypes
import gc
import os
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import ray
import ray.train
import ray.util
import torch

from regrow.config.schema import Backend, PretrainConfig
from regrow.config.snapshots import takes_snapshots
from regrow.control.membership import Member
from regrow.data.read.batch import layout_of
from regrow.errors import GroupOver, RegrowError, first_line
from regrow.parallel.compile import CompileCache
from regrow.parallel.fsdp import BACKENDS
from regrow.parallel.stream import Stream, stream_of
from regrow.plan.topology import largest
from regrow.process_log import say_error
from regrow.runtime.abort import LEAVE_S, Breaker
from regrow.runtime.calls import CoordinatorClient
from regrow.runtime.generation import train_generation
from regrow.runtime.hardware.gpus import cpus_near, number_of
from regrow.runtime.hardware.interfaces import meet_at
from regrow.runtime.hardware.probe import Prober, Unfit, check_gpu
from regrow.runtime.hardware.settings import allow_descriptors, apply_device_settings
from regrow.runtime.job import Job
from regrow.runtime.liveness.probe import Lifeline
from regrow.runtime.memory_tier import MemoryTier
from regrow.runtime.process import Process
from regrow.runtime.ready import check_here
from regrow.runtime.rendezvous import (
    KEEPER_S,
    Joined,
    await_verdict,
    join_generation,
    leave_generation,
    machine_name,
    this_process,
)
from regrow.runtime.restore import changes_recipe, recipe
from regrow.runtime.warm_up import warm_up
from regrow.state.collective import PeerError
from regrow.storage import Storage
from regrow.train.callback import is_of_a_collective
from regrow.train.certificate import BrokenStep

DRAIN_S = LEAVE_S * 2 / 3  # for a device to come to rest after its collectives were aborted
THREAD_NAME = "train"  # of the thread that launches steps, in top -H and debuggers
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of mallopt(3)


def run_worker(job: Job) -> None:
    """Train as long as the run lasts, or as the others want this process.

    An error that another attempt would meet again ends the run where all ranks have it, else this process. In place,
    that goes for every exception: Ray Train would restart other ranks for it.
    """
    _name_thread(THREAD_NAME)
    meet_at(ray.util.get_node_ip_address(), os.environ)
    lifeline = Lifeline(ray.util.get_node_ip_address())
    me = this_process(uuid.uuid4().hex[:12], lifeline=lifeline.port)
    try:
        process, backend, entered = _prepare(job)
        _train_generations(process, me, backend=backend, entered=entered)
        if process.memory is not None:
            process.memory.close()
    except RegrowError as error:
        _await_verdict(job, me, 0, str(error))
    except Exception as error:
        is_late = isinstance(error, ray.exceptions.GetTimeoutError)  # the coordinator waits for storage, it may be
        if not (is_late or job.config.cluster.in_place):
            raise
        say_error(error)
        if is_late:
            os._exit(1)  # all may meet it; other processes come in their places
        _await_verdict(job, me, 0, f"{type(error).__name__}: {first_line(error)}")


def _prepare(job: Job) -> tuple[Process, str, float]:
    """What a process needs before it joins a group, and is looked at for; its backend, and when it began.

    Raises RegrowError for what this process would meet in a group: the others are not to stand still for it.
    """
    config, expected = job.config, ray.train.get_context().get_world_size()
    allow_descriptors()
    if config.cluster.gpus_per_worker or config.cluster.backend is Backend.asynchronous:
        # by a heartbeat, which breaks groups off
        watched = config.cluster.in_place and takes_snapshots(config.snapshot)
        threads = max(1, int(config.cluster.cpus_per_worker))
        apply_device_settings(os.environ, in_place=watched, compile_threads=threads)
    device, entered = device_of(config), time.time()
    backend, stream = _backend(config, device)
    prober = _fit(job, device)
    memory = MemoryTier(job) if takes_snapshots(config.snapshot) else None  # its keeper starts beside what follows
    compiled = _compiled_before(job, device)
    stream.submit(partial(_warm_up, job, device, expected, backend)).result()
    check_here(job, partial(_waits_for_storage, job))
    if memory is not None:
        memory.check_room()
        if config.cluster.check_hardware and (problem := memory.why_unfit()):
            end_process(job, problem)
    process = Process(job, device, stream, prober, memory, compiled)
    gc.collect()
    gc.freeze()  # what is imported stays: collections between generations, and in steps, need not look at it
    return process, backend, entered


def _train_generations(process: Process, me: Member, *, backend: str, entered: float) -> None:
    """One after another, to the end of the run."""
    job, memory, device, stream = process.job, process.memory, process.device, process.stream
    config, expected, after = job.config, ray.train.get_context().get_world_size(), 0
    if device.type == "cuda" and (number := number_of(uuid := _uuid_of(device))) is not None:
        me = replace(me, gpu=number, gpu_uuid=uuid)
    while True:
        joined: Joined | None = None
        breaker, broken, trouble = Breaker(), True, None
        try:
            joined = join_generation(
                CoordinatorClient(job.coordinator),
                me=me,
                after=after,
                expected=expected,
                backend=backend,
                timeout_s=config.train.collective_timeout_s,
                breaker=breaker,
                waiting=partial(_has_seat, process),
                keeper=memory.keeper if memory is not None else None,
            )
            if joined is None:
                broken = False
                return
            stream.submit(partial(_share_cores, config, device, joined.on_my_host)).result()
            over = train_generation(process, joined, breaker, entered=entered)
            broken = False
            if over:
                return
        except RegrowError as error:
            trouble = error
            _report(job, memory, joined, error)  # the others are not to wait until this process has left
            traceback.clear_frames(error.__traceback__)  # they hold the model
        except Unfit as error:
            end_process(job, str(error))
        except Exception as error:
            if not config.cluster.in_place:
                raise
            _report(job, memory, joined, error)
            traceback.clear_frames(error.__traceback__)  # they hold the model
        finally:
            if broken:  # on every way out: what reads results is told before anything is aborted
                breaker.start()
            if not breaker.stand_down() and not stream.drain(DRAIN_S):
                end_process(job, f"{device} does not come to rest after its group was broken off")
            if memory is not None:
                memory.close_snapshots()
            breaker.settle()
            if not leave_generation():
                end_process(job, "a process group cannot be destroyed")
            breaker.left()
            if memory is not None:
                memory.leave()
        after, entered = joined.generation if joined else after, time.time()
        if trouble is not None:
            _await_verdict(job, me, after, str(trouble))
            return
        gc.collect()
        if device.type == "cuda":  # NCCL and the driver do not ask torch for what it keeps
            torch.cuda.empty_cache()
        if broken:
            probe_or_end(job, process.prober)


def _has_seat(process: Process, generation: int, breaker: Breaker) -> None:
    """The others of its generation are waited for; without a keeper, a process is not told that they will not come."""
    process.rows.was_in(generation)
    if process.memory is not None:
        process.memory.waiting(generation, breaker)


def _fit(job: Job, device: torch.device) -> Prober:
    """What this process is to be probed with, now and while it trains; one whose device is not fit does not get on."""
    with _fit_or_end(job, device):
        if job.config.cluster.check_hardware:
            check_gpu(device)
        prober = Prober(device)
        prober.probe()
    return prober


def probe_or_end(job: Job, prober: Prober) -> None:
    """Look again at a device that has failed, it may be."""
    with _fit_or_end(job, prober.device):
        prober.probe()


@contextlib.contextmanager
def _fit_or_end(job: Job, device: torch.device) -> Iterator[None]:
    """Get on only with a device that computes right, and at all: some errors stay with a CUDA process to its end."""
    try:
        yield
    except Unfit as error:
        end_process(job, str(error))
    except RuntimeError as error:
        end_process(job, f"{device} does not answer: {first_line(error)}")


def _compiled_before(job: Job, device: torch.device) -> CompileCache | None:
    """What other nodes and earlier attempts compiled is torch's from here on."""
    if job.compile_cache is None or not job.config.parallel.compile:
        return None
    cache = CompileCache(Storage.at(job.compile_cache), device)
    cache.load()
    return cache


def _warm_up(job: Job, device: torch.device, expected: int, backend: str) -> None:
    """As for a group of so many, which goes on from where the run is."""
    config = job.config
    parallel = recipe(config, CoordinatorClient(job.coordinator).next_step() - 1 if changes_recipe(config) else 0)
    pass_seqs = largest(job.topologies, expected).batch.most_slices_of_a_pass * layout_of(config).slice_seqs
    seq_len = config.data.seq_len
    warm_up(device, config.model, parallel, pass_seqs=pass_seqs, seq_len=seq_len, backend=backend)


def _waits_for_storage(job: Job, problem: str) -> None:
    node = ray.get_runtime_context().get_node_id()
    CoordinatorClient(job.coordinator).note("note", {"text": f"node {node[:12]} joins once storage answers: {problem}"})


def end_process(job: Job, problem: str) -> NoReturn:
    """End this process, whose device or link cannot be trusted: nothing of it may get any further."""
    node = ray.get_runtime_context().get_node_id()
    with contextlib.suppress(ray.exceptions.RayError):
        CoordinatorClient(job.coordinator).unfit(node, os.getpid(), problem, machine_name())
    os._exit(1)


def _await_verdict(job: Job, me: Member, generation: int, message: str) -> None:
    """Whether an error is the run's: returns if it is."""
    expected = ray.train.get_context().get_world_size()
    coordinator = CoordinatorClient(job.coordinator)
    try:
        await_verdict(coordinator, generation=generation, me=me, expected=expected, message=message)
    except Exception as error:
        if not job.config.cluster.in_place:
            raise
        end_process(job, f"{message} (and no word from the coordinator: {first_line(error)})")


def _report(job: Job, memory: MemoryTier | None, joined: Joined | None, error: Exception) -> None:
    """Tell the coordinator what ended the generation here, by way of the keeper, then the worker's log all of it."""
    if joined is not None:
        _tell_what_broke(job, memory, joined, error)
    say_error(error)


def _tell_what_broke(job: Job, memory: MemoryTier | None, joined: Joined, error: Exception) -> None:
    detail = f"rank {joined.rank}: {type(error).__name__}: {first_line(error)}"[:500]
    rank = joined.rank if _is_own(error) else None
    if memory is not None:
        with contextlib.suppress(ray.exceptions.RayError):  # it is gone, or stopped
            ray.get(memory.keeper.broke.remote(joined.generation, detail, rank), timeout=KEEPER_S)
            return
    with contextlib.suppress(ray.exceptions.RayError):
        CoordinatorClient(job.coordinator, joined.generation).broke(detail, rank)


def _is_own(error: Exception) -> bool:
    """Whether it is this rank's: not one that a peer, the coordinator, or a group that is over gives it."""
    others = PeerError | GroupOver | BrokenStep | OSError | ray.exceptions.RayError
    return not (isinstance(error, others) or is_of_a_collective(error))


def device_of(config: PretrainConfig) -> torch.device:
    """This process' device, made current."""
    if config.cluster.gpus_per_worker:
        import ray.train.torch

        device = ray.train.torch.get_device()
        torch.cuda.set_device(device)
        near = cpus_near(_uuid_of(device)) & os.sched_getaffinity(0)
        if near:  # this thread, those that it starts, and the memory that they touch first
            os.sched_setaffinity(0, near)
        return device
    _keep_freed_memory()
    return torch.device("cpu")


def _uuid_of(device: torch.device) -> str:
    """As NVML gives it."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _backend(config: PretrainConfig, device: torch.device) -> tuple[str, Stream]:
    """What carries collectives, by its name in torch, and where steps run."""
    if config.cluster.backend is Backend.asynchronous:
        from regrow.parallel import asynchronous

        return asynchronous.NAME, asynchronous.default_stream()
    return BACKENDS[device.type], stream_of(device)


def _name_thread(name: str) -> None:
    """Name the calling thread in the kernel, too, which Python does not before 3.14."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def _keep_freed_memory() -> None:
    """Make glibc keep what is freed: given back to the kernel, every step's activations are page faults again."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent outside glibc
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
        mallopt(M_TOP_PAD, 64 << 20)


def _share_cores(config: PretrainConfig, device: torch.device, ranks_on_host: int) -> None:
    """This rank's number of threads, where the host computes."""
    if device.type == "cpu" or config.parallel.cpu_offload:
        torch.set_num_threads(config.cluster.threads_per_worker or max(1, (os.cpu_count() or 1) // ranks_on_host))
