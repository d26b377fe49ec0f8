"""One generation of a group, as one of its ranks sees it: plan, build, restore, train.

Starting, resuming, shrinking, growing and restarting after a loss are this one path.
"""

import contextlib
import os
import socket
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
import ray.train
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import regrow
from regrow.config.schema import ParallelConfig, PretrainConfig
from regrow.data.batch import layout_of
from regrow.data.corpora import order_of
from regrow.data.stream import Ask, rank_batches, ways_to_ask
from regrow.errors import CheckpointError
from regrow.model.llama import Llama, init_weights
from regrow.model.loss import IGNORE_INDEX
from regrow.model.size import flops_per_token
from regrow.parallel.compile import graphs_compiled, graphs_lowered
from regrow.parallel.compile_cache import CompileCache
from regrow.parallel.float8 import inner_tensor, refresh_float8_scales
from regrow.parallel.fsdp import build_mesh, connect, coordinates_of, replica_group
from regrow.parallel.phases import float8_steps, recipe_after
from regrow.parallel.stream import Stream
from regrow.runtime.abort import Breaker, listening
from regrow.runtime.actor import DRAIN, END_OF_FLOAT8, GROW
from regrow.runtime.hardware.peak import peak_flops
from regrow.runtime.hardware.probe import Prober
from regrow.runtime.job import CALL_TIMEOUT_S, Job
from regrow.runtime.memory_tier import SAFE_S, MemoryTier
from regrow.runtime.rendezvous import Joined, form_s
from regrow.state.collective import from_rank_0, gather
from regrow.state.disk import catalog, store
from regrow.state.entries import Entry, Progress, reset_moments, set_optimizer_step, training_entries
from regrow.storage import Storage
from regrow.train.build import build_step
from regrow.train.certificate import BrokenStep, Certificate
from regrow.train.loop import LoopSettings, NotFinite, train
from regrow.train.metrics import Meter
from regrow.train.profile import ProfileWindow
from regrow.train.step import TrainStep, evaluate

LAST_ROOM_S = 30.0  # that the snapshot of the last step waits for room; a node that is taken away gives little more


def train_generation(
    job: Job,
    joined: Joined,
    memory: MemoryTier | None,
    prober: Prober,
    device: torch.device,
    stream: Stream,
    breaker: Breaker,
    compiled: CompileCache | None,
    *,
    entered: float,
) -> bool:
    """Train as one rank of a group until the run's end, or until the group leaves; whether it was the end.

    Steps run on `stream`; `breaker` may end all of it from another thread. `compiled` takes what the first step
    compiles. `entered` is when this process began, or began again after another generation. Collective. Raises
    RegrowError for what another attempt would meet again, Unfit for a device that is not; whatever a collective raises
    where a rank is lost.
    """
    begun = time.time()
    config, generation, rank, world_size = job.config, joined.generation, joined.rank, joined.world_size
    topology = job.topologies[world_size]
    slices = topology.slices_of(rank)
    mesh = build_mesh(topology.mesh, device.type, timeout_s=config.train.collective_timeout_s)
    with breaker.connecting(form_s(world_size, config.train.collective_timeout_s)):
        connect(mesh)
        connected = stream.drain(config.train.collective_timeout_s)
    if breaker.begun or not connected:
        raise BrokenStep(f"generation {generation} was over before its ranks were connected")
    expected = _expected_step(job)
    step, entries = stream.submit(partial(_build, job, mesh, device, after=expected)).result()
    built = time.time()
    certificate = Certificate(generation, world_size, device)
    breaker.first(certificate.clear)
    if memory is not None:
        memory.join(generation, listening() - joined.listened, breaker)
    has_keeper = time.time()
    progress, source = stream.submit(partial(_restore, job, generation, step, entries, mesh, memory)).result()
    if _recipe(config, progress.step) != _recipe(config, expected):  # it went back to before the end of float8
        del step, entries
        step, entries = stream.submit(partial(_build, job, mesh, device, after=progress.step)).result()
        progress, source = stream.submit(partial(_restore, job, generation, step, entries, mesh, memory)).result()
    filled = time.time()
    if memory is not None:
        memory.start(entries, coordinates_of(mesh), generation, progress.step, stream)
    step.certificate = certificate
    set_optimizer_step(step.optimizer, progress.step)
    stream.submit(partial(refresh_float8_scales, step.model)).result()
    restored = time.time()

    reader, order = job.corpora.reader("train"), order_of(config, job.corpora)
    tokens_per_step = config.optim.global_batch_seqs * config.data.seq_len
    last_step = min(config.train.steps, config.train.stop_at_step or config.train.steps)
    end_of_float8 = float8_steps(config.parallel, config.train.steps)
    until = min(last_step, end_of_float8) if progress.step < end_of_float8 else last_step  # this generation
    batches = rank_batches(
        _ways_to_ask(job, generation, slices),
        order,
        reader,
        layout_of(config),
        slices=slices,
        start_step=progress.step,
        stop_step=until,
        stall_timeout_s=config.data.stall_timeout_s,
        has_fed=generation > job.first_generation,
        on_fallback=partial(_report_fallback, job.coordinator, generation, rank),
    )
    peak = peak_flops(device, config.parallel.dtype, config.observe.peak_tflops)
    meter = Meter(
        tokens_per_step=tokens_per_step,
        flops_per_token=flops_per_token(config.model, config.data.seq_len),
        peak_flops=sum(gather(peak.flops)),
        world_size=world_size,
        generation=generation,
    )
    validation = _Validation(job, device, topology.unit_of(rank), topology.mesh.num_units)
    window = _profile_window(job, device) if rank == 0 else None
    hooks = _Hooks(job, generation, step, stream, mesh, validation, memory, prober, compiled, window)
    startup_s = {
        **(job.driver_s if generation == job.first_generation else {}),
        "workers": entered - (job.fit_at if generation == job.first_generation else entered),
        "group": begun - entered,
        "model": built - begun,
        "keeper": has_keeper - built,
        "restore": filled - has_keeper,
        "slots": restored - filled,
    }
    node = ray.get_runtime_context().get_node_id()
    worker = {"host": socket.gethostname(), "node": node, "pid": os.getpid(), "device": _device_name(device)}
    workers = gather({**worker, "graphs": graphs_compiled(), "lowered": graphs_lowered()})
    if rank == 0:
        details = {
            "world_size": world_size,
            "source": source,
            "startup_s": startup_s,
            "init_s": time.time() - entered - (restored - built),
            "restore_s": restored - built,
            "workers": workers,
            "regrow": str(Path(regrow.__file__).parent),
            "peak_flops": peak.flops,
            "peak_source": peak.source,
        }
        ray.get(job.coordinator.start_training.remote(generation, progress.step, details), timeout=CALL_TIMEOUT_S)
    left = False
    if progress.step < last_step:
        settings = LoopSettings(
            last_step=until,
            total_tokens=config.train.steps * tokens_per_step,
            tokens_per_step=tokens_per_step,
            seqs_per_step=config.optim.global_batch_seqs,
            slice_seqs=layout_of(config).slice_seqs,
            num_micro_batches=topology.batch.num_micro_batches,
            snapshot_every_steps=config.snapshot.every_steps,
            checkpoint_every_steps=config.checkpoint.every_steps,
            validate_every_steps=config.train.validate_every_steps if config.train.validation_seqs else 0,
            nonfinite_skips=config.train.nonfinite_skips,
        )
        hooks.profile(progress.step)
        try:
            left = train(
                step,
                batches,
                progress,
                optim=config.optim,
                settings=settings,
                meter=meter,
                hooks=hooks,
                device=device,
                stream=stream,
            )
        except NotFinite as error:
            hooks.not_finite(progress.step, str(error))
            raise
        finally:
            if window is not None:
                window.abandon()
    elif source == "snapshot":  # the run ended before this step was in storage
        hooks.snapshot(progress, blocked=False, last=True)
        hooks.confirm(progress.step)
        hooks.save(progress, last=True)
    cause = "" if left or until == last_step else END_OF_FLOAT8
    left = left or until < last_step
    hooks.close(left_at=progress.step if left else None, cause=cause)
    return not left


class _Validation:
    """This rank's share of the first rows of the validation splits, the same rows whatever the world size."""

    def __init__(self, job: Job, device: torch.device, unit: int, num_units: int) -> None:
        config = job.config
        reader = job.corpora.reader("validation")
        rows = reader.first_rows(config.train.validation_seqs)
        size = config.optim.global_batch_seqs // config.optim.num_slices
        starts = range(0, len(rows), size)
        self.num_batches = -(-len(starts) // num_units)
        read = [reader.read(rows[start : start + size]).astype("int64") for start in starts[unit::num_units]]
        # of one shape, which compiles once: the last one is filled up, and a rank without any has one of filling
        full = torch.full((len(read) or 1, size, config.data.seq_len + 1), IGNORE_INDEX)
        for batch, tokens in zip(full, read, strict=False):
            batch[: len(tokens)] = torch.from_numpy(tokens)
        self.batches = list(full.to(device))


class _Hooks:
    """The loop's wishes, carried out through the coordinator; see `train.loop.Hooks`."""

    def __init__(
        self,
        job: Job,
        generation: int,
        step: TrainStep,
        stream: Stream,
        mesh: DeviceMesh,
        validation: _Validation,
        memory: MemoryTier | None,
        prober: Prober,
        compiled: CompileCache | None,
        window: ProfileWindow | None = None,
    ) -> None:
        self.window = window
        self.prober, self.probed = prober, 0
        self.memory, self.snapshots = memory, memory.snapshots if memory is not None else None
        self.job, self.generation, self.step, self.stream = job, generation, step, stream
        self.validation = validation
        self.rank = dist.get_rank()
        self.coordinates = coordinates_of(mesh)
        self.compiled = compiled  # until it has been told
        self.replies: deque[Any] = deque()  # of rows on their way to the coordinator
        self.stop = ""  # why to leave

    def log(self, row: dict[str, Any]) -> None:
        if self.rank == 0:
            self.replies.append(self.job.coordinator.row.remote(self.generation, row))
            self.profile(row["step"])
            if self.compiled is not None:
                threading.Thread(target=self.compiled.keep_new, name="compile-cache", daemon=True).start()
                self.compiled = None

    def profile(self, step: int) -> None:
        """Training has come to the end of this step."""
        with self._at_length():
            written = self.window.after(step) if self.window is not None else None
        if written is not None:
            self.job.coordinator.note.remote("profile", {"step": step, "folder": written})

    def wants_to_leave(self) -> bool:
        ready, _ = ray.wait(list(self.replies), num_returns=len(self.replies), timeout=0) if self.replies else ([], [])
        for reply in ready:  # raises what the coordinator raised: a fenced-off rank ends here
            self.stop = ray.get(reply) or self.stop
            self.replies.remove(reply)
        return bool(self.stop)

    def has_room(self, num_snapshots: int) -> bool:
        if self.snapshots is None or self.snapshots.room() >= num_snapshots:
            return True
        # a step ahead, what is not committed now will be by then, unless keepers fall behind
        return num_snapshots > 1 and not self.snapshots.is_late

    def snapshot(self, progress: Progress, *, blocked: bool, last: bool) -> float:
        begun = time.perf_counter()
        if self.snapshots is not None and self.snapshots.begun != progress.step:
            with self._at_length():
                room = not blocked or all(gather(self.snapshots.await_room(LAST_ROOM_S if last else SAFE_S)))
            if room and self.stream.num_ahead:
                with self._at_length():
                    self.snapshots.await_room(LAST_ROOM_S)
            if room and not self.snapshots.begin(progress.step, progress.to_dict()):
                raise RuntimeError(f"the room for the snapshot of step {progress.step} is gone")
        return time.perf_counter() - begun

    def confirm(self, step: int) -> float:
        waited_s = self.memory.confirm(step) if self.memory is not None else 0.0
        every_steps = self.job.config.cluster.probe_every_steps
        if every_steps and step % every_steps == 0 and step > self.probed:
            self.probed = step
            seconds = self.prober.probe()
            if self.memory is not None:
                self.memory.probed(seconds)
        return waited_s

    def await_snapshot(self) -> float:
        return self.snapshots.wait() if self.snapshots is not None else 0.0

    def save(self, progress: Progress, *, last: bool) -> float:
        begun = time.perf_counter()
        if self.snapshots is None or (last and self.snapshots.begun != progress.step):
            with self._at_length():
                self._save_here(progress)
        elif self.rank == 0 and self.stop not in (GROW, DRAIN):  # keepers write it, from memory
            self.replies.append(self.job.coordinator.want_checkpoint.remote(self.generation, progress.step))
        return time.perf_counter() - begun

    def _save_here(self, progress: Progress) -> None:
        """Without a snapshot, training stands still while the ranks write."""
        begun = time.perf_counter()
        config, folder = self.job.config.checkpoint, Storage.at(self.job.checkpoints)
        index = store.save(
            folder,
            training_entries(self.step.model, self.step.optimizer, inner_tensor=inner_tensor),
            scalars=progress.to_dict(),
            run_id=self.job.run_id,
            generation=self.generation,
            coordinates=self.coordinates,
            commit=self._commit,
        )
        stall_s = time.perf_counter() - begun
        if self.rank == 0:
            fields = {"step": progress.step, "seconds": stall_s, "stall_s": stall_s, "bytes": index.num_bytes}
            self.replies.append(self.job.coordinator.event.remote(self.generation, "checkpoint", fields))
            if problem := catalog.try_retain(folder, keep=config.keep):
                self.replies.append(self.job.coordinator.event.remote(self.generation, "note", {"text": problem}))

    def validate(self, step: int) -> float:
        begun = time.perf_counter()
        with self._at_length():  # the first one compiles
            score = partial(
                evaluate,
                self.step.model,
                self.validation.batches,
                num_batches=self.validation.num_batches,
                group=self.step.group,
                tensor_group=self.step.tensor_group,
                loss_function=self.step.loss_function,
                certificate=self.step.certificate,
                number=step,
            )
            loss_sum, num_tokens = self.stream.submit(score).result()
        loss = loss_sum / max(num_tokens, 1)
        if self.rank == 0:
            fields = {"step": step, "loss": loss, "seconds": time.perf_counter() - begun}
            self.replies.append(self.job.coordinator.event.remote(self.generation, "validation", fields))
        return loss

    def not_finite(self, step: int, detail: str) -> None:
        """Every rank is about to leave for this."""
        if self.rank == 0:
            call = self.job.coordinator.not_finite.remote(self.generation, step, detail)
            ray.get([*self.replies, call], timeout=CALL_TIMEOUT_S)

    def close(self, *, left_at: int | None, cause: str) -> None:
        """Wait until the coordinator has everything; say that the group left after a step, and why if it was not told
        to, or that it has finished."""
        if self.snapshots is not None:
            self.snapshots.close()
        if self.rank == 0:
            coordinator = self.job.coordinator
            left = left_at is not None
            over = coordinator.leaving.remote(self.generation, left_at, cause) if left else coordinator.done.remote()
            self.replies.append(over)
        ray.get(list(self.replies), timeout=CALL_TIMEOUT_S)
        self.replies.clear()

    def _at_length(self) -> contextlib.AbstractContextManager[None]:
        """Nobody is to be given up for what takes long here."""
        return self.memory.at_length() if self.memory is not None else contextlib.nullcontext()

    def _commit(self, step_folder: str, pointer: bytes) -> None:
        ray.get(self.job.coordinator.commit.remote(self.generation, step_folder, pointer), timeout=CALL_TIMEOUT_S)


def _recipe(config: PretrainConfig, step: int) -> ParallelConfig:
    """What the step after this one is trained with."""
    return recipe_after(config.parallel, config.train.steps, step)


def _expected_step(job: Job) -> int:
    """After which step the group will most likely go on, where that makes a difference to what is built. Collective."""
    config = job.config
    if _recipe(config, 0) == _recipe(config, config.train.steps):
        return 0
    asked = dist.get_rank() == 0
    return from_rank_0(ray.get(job.coordinator.next_step.remote(), timeout=CALL_TIMEOUT_S) - 1 if asked else 0)


def _build(job: Job, mesh: DeviceMesh, device: torch.device, *, after: int) -> tuple[TrainStep, list[Entry]]:
    """A step, and what its state is made of, to go on after this one; nothing is filled yet. Collective."""
    config = job.config
    eot_id = job.corpora.eot_id if config.model.document_attention else None
    recipe = _recipe(config, after)
    step = build_step(config.model, recipe, config.optim, mesh=mesh, device=device, seed=None, eot_id=eot_id)
    return step, training_entries(step.model, step.optimizer, inner_tensor=inner_tensor)


def _restore(
    job: Job,
    generation: int,
    built: TrainStep,
    entries: list[Entry],
    mesh: DeviceMesh,
    memory: MemoryTier | None,
) -> tuple[Progress, str]:
    """Load the newest committed state that is sound, on all ranks the same one; from seed if there is none.

    Collective. From the nodes' memory, where that holds it, else from storage. A damaged checkpoint is reported and the
    one before it taken. `entries` are those of `built`.
    Raises CheckpointError if all checkpoints are damaged.
    """
    folder, coordinates = Storage.at(job.checkpoints), coordinates_of(mesh)
    steps = from_rank_0(catalog.committed_steps(folder) if dist.get_rank() == 0 else [])
    if memory is not None:
        restored = memory.restore(entries, at_least=steps[0] if steps else 0)
        if restored is not None:
            return restored, "snapshot"
    for step in steps:
        problem = ""
        index = None
        try:
            index = catalog.open_checkpoint(folder, step, run_id=job.run_id)
            store.restore(folder, index, entries, coordinates)
        except CheckpointError as error:
            problem = str(error)
        problems = [found for found in gather(problem) if found]
        if not problems:
            assert index is not None
            store.share_parts(entries, coordinates, replica_group(mesh))
            return Progress(**index.scalars), "checkpoint"
        if dist.get_rank() == 0:
            fields = {"step": step, "detail": problems[0]}
            ray.get(job.coordinator.event.remote(generation, "checkpoint_damaged", fields), timeout=CALL_TIMEOUT_S)
    if steps:
        raise CheckpointError(
            f"none of the checkpoints at {folder} (steps {', '.join(map(str, steps))}) can be restored; {problems[0]}; "
            "choose another run.name to start over"
        )
    init_weights(cast(Llama, built.model), job.config.run.seed)
    reset_moments(built.optimizer)
    return Progress(), "seed"


def _ways_to_ask(job: Job, generation: int, slices: range) -> list[Ask]:
    """How this rank asks for its slices; for all ranks of its node together, where there are several. Collective."""
    node_id = ray.get_runtime_context().get_node_id()
    slices_on_node = [part for node, part in gather((node_id, slices)) if node == node_id]
    fetcher = None
    if len(slices_on_node) > 1:
        with contextlib.suppress(ray.exceptions.RayError):  # a stream that died comes back, without fetchers
            fetcher = ray.get(job.stream.fetcher.remote(node_id), timeout=job.config.data.stall_timeout_s)
    return ways_to_ask(job.stream, fetcher, layout_of(job.config), group=generation, slices_on_node=slices_on_node)


def _profile_window(job: Job, device: torch.device) -> ProfileWindow | None:
    observe = job.config.observe
    if observe.profile_at_step is None:
        return None
    return ProfileWindow(Storage.at(job.folder), device, first=observe.profile_at_step, num_steps=observe.profile_steps)


def _report_fallback(coordinator: Any, generation: int, rank: int, window: int, reason: str) -> None:
    """Tell the run's log that a rank reads a window from the shards itself."""
    coordinator.event.remote(generation, "data_fallback", {"rank": rank, "window": window, "reason": reason})


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{torch.get_num_threads()}"
