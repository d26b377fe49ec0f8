"""What a generation starts from: a step built for it, filled from the nodes' memory, from storage, or from the seed."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import cast

import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from regrow.config.schema import ParallelConfig, PretrainConfig
from regrow.control.phases import Phase, form_s
from regrow.control.values import NOTHING
from regrow.errors import GroupOver
from regrow.model.linears import recipe_after
from regrow.model.llama import Llama, init_weights
from regrow.parallel.float8 import inner_tensor
from regrow.parallel.fsdp import Connecting, replica_group
from regrow.plan.mesh import Coordinates
from regrow.plan.pipeline import Stages
from regrow.runtime.abort import Breaker, listening
from regrow.runtime.calls import CALL_TIMEOUT_S, CoordinatorClient
from regrow.runtime.job import Job
from regrow.runtime.memory_tier import MemoryTier
from regrow.runtime.process import Process
from regrow.runtime.rendezvous import Joined
from regrow.runtime.trusted import Checkpoints, up_to
from regrow.state.collective import from_rank_0, on_first_rank_or_each
from regrow.state.disk import store
from regrow.state.entries import Entry, Progress, reset_moments, training_entries
from regrow.storage import Storage
from regrow.train.build import build_step, verified_rows
from regrow.train.step import TrainStep


@dataclass
class Restored:
    """What a generation trains, and where it goes on."""

    step: TrainStep
    entries: list[Entry]  # of its state
    progress: Progress
    source: str  # of the state: snapshot, checkpoint or seed
    built_at: float  # unix time, the model was there
    keeper_at: float  # this rank's keeper was known
    filled_at: float  # the state was there


def build_and_restore(process: Process, joined: Joined, mesh: DeviceMesh, breaker: Breaker) -> Restored:
    """A step for this mesh with the newest committed state. Collective; raises as `restore` does."""
    job, stream, generation = process.job, process.stream, joined.generation
    expected, topology = expected_step(job), job.topologies[joined.world_size]
    place = Coordinates(topology.mesh, joined.rank)

    connect_s = form_s(joined.world_size, job.config.train.collective_timeout_s)
    make = partial(build, job, mesh, process.device, topology.stages, connecting=partial(breaker.connecting, connect_s))

    def built(after: int) -> tuple[TrainStep, list[Entry]]:
        return stream.submit(partial(make, after=after)).result()

    def filled() -> tuple[Progress, str]:
        work = partial(restore, job, generation, step, entries, mesh, place, process.memory, is_over=is_over)
        return stream.submit(work).result()

    def is_over() -> bool:
        return breaker.begun

    step, entries = built(expected)
    built_at = time.time()
    if process.memory is not None:
        process.memory.join(generation, listening() - joined.listened, breaker, speaks=joined.speaks)
        process.rows.keep_in(process.memory.folder)
    keeper_at = time.time()
    progress, source = filled()
    if recipe(job.config, progress.step) != recipe(job.config, expected):  # it went back to before the end of float8
        del step, entries
        step, entries = built(progress.step)
        progress, source = filled()
    return Restored(step, entries, progress, source, built_at, keeper_at, time.time())


def recipe(config: PretrainConfig, step: int) -> ParallelConfig:
    """What the step after this one is trained with."""
    return recipe_after(config.parallel, config.train.steps, step)


def changes_recipe(config: PretrainConfig) -> bool:
    """Whether its last steps are trained with another one than its first."""
    return recipe(config, 0) != recipe(config, config.train.steps)


def expected_step(job: Job) -> int:
    """After which step the group will most likely go on, where that makes a difference to what is built. Collective."""
    if not changes_recipe(job.config):
        return 0
    asked = dist.get_rank() == 0
    return from_rank_0(CoordinatorClient(job.coordinator).next_step() - 1 if asked else 0)


def build(
    job: Job, mesh: DeviceMesh, device: torch.device, stages: Stages | None, *, after: int, connecting: Connecting
) -> tuple[TrainStep, list[Entry]]:
    """A step, and what its state is made of, to go on after this one; nothing is filled yet. Collective."""
    config = job.config
    eot_id = job.corpora.eot_id if config.model.document_attention else None
    parallel = recipe(config, after)
    step = build_step(
        config.model,
        parallel,
        config.optim,
        mesh=mesh,
        device=device,
        seed=None,
        eot_id=eot_id,
        verified=verified_rows(config, job.topologies[dist.get_world_size()].batch),
        stages=stages,
        connecting=connecting,
    )
    return step, training_entries(step.model, step.optimizer, inner_tensor=inner_tensor)


def restore(
    job: Job,
    generation: int,
    built: TrainStep,
    entries: list[Entry],
    mesh: DeviceMesh,
    place: Coordinates,
    memory: MemoryTier | None,
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[Progress, str]:
    """Load the newest committed state that is sound, on all ranks the same one; from seed if there is none.

    Collective. From the nodes' memory, where that holds it, else from storage. A damaged checkpoint is reported, which
    has it noted, and the one before it taken; those noted before come last. `entries` are those of `built`,
    on a rank at this place of the mesh.
    Raises CheckpointError if all checkpoints are damaged, or one is another run's or of a version not read here; and
    where of those that may be restored, after a corruption was found, none is there any more. Raises GroupOver where
    the group `is_over` while storage is read.
    """
    reading = partial(memory.phase, Phase.restore) if memory is not None else nullcontext

    def still_on() -> None:
        if is_over():
            raise GroupOver(f"generation {generation} was over before its state was read")

    folder, limit = Storage.at(job.checkpoints), _trusted(job)
    folder.look = still_on
    stored = _newest_stored(job, limit)
    if memory is not None:
        restored = memory.restore(entries, place, at_least=max(0, stored))
        if restored is not None:
            return restored, "snapshot"

    def look() -> tuple[list[int], ...]:
        with reading():
            return tuple(Checkpoints.look(folder))

    found = Checkpoints(*on_first_rank_or_each(look))
    may_be_restored = up_to(limit, found, stored, folder)

    def damaged(step: int, detail: str) -> None:
        if dist.get_rank() == 0:
            report = CoordinatorClient(job.coordinator, generation)
            ray.get(report.event("checkpoint_damaged", {"step": step, "detail": detail}), timeout=CALL_TIMEOUT_S)

    restored = store.restore_newest(
        folder,
        may_be_restored,
        entries,
        place,
        replica_group(mesh),
        run_id=job.run_id,
        global_batch_seqs=job.config.optim.global_batch_seqs,
        damaged=damaged,
        reading=reading,
    )
    if restored is not None:
        return restored, "checkpoint"
    init_weights(cast(Llama, built.model), job.config.run.seed)
    reset_moments(built.optimizer)
    return Progress(), "seed"


def _trusted(job: Job) -> int | None:
    """The newest step that may be restored, after a corruption was found, by whatever job; None: any. Collective."""
    return from_rank_0(CoordinatorClient(job.coordinator).trusted_step() if dist.get_rank() == 0 else None)


def _newest_stored(job: Job, limit: int | None) -> int:
    """The newest checkpoint that may be restored, as the coordinator knows it, which has read what there was before.

    Storage itself is not asked: this rank's host may be the one where it hangs, and what memory holds is all that the
    group needs. Collective.
    """
    stored = from_rank_0(CoordinatorClient(job.coordinator).stored_step() if dist.get_rank() == 0 else NOTHING)
    return stored if limit is None or stored <= limit else NOTHING
