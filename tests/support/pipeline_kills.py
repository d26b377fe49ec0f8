"""A rank of pipelines that dies at a moment of a step, and how soon the others come out of it."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from regrow.accept.tiny import tiny_model
from regrow.config.schema import OptimConfig, ParallelConfig, PipelineSchedule
from regrow.parallel import context_parallel, pipeline
from regrow.parallel.asynchronous import NAME
from regrow.parallel.float8 import inner_tensor
from regrow.plan.mesh import Coordinates
from regrow.runtime.abort import Breaker, listening
from regrow.runtime.rendezvous import leave_generation
from regrow.state.collective import gather
from regrow.state.entries import training_entries
from regrow.state.memory.writer import Snapshots
from regrow.train.certificate import Certificate
from regrow.train.step import TrainStep
from support.members import OFF, Member, run_members
from support.training import Training, build, micro_batches, topology_of

OPTIM = OptimConfig(lr=1e-3, global_batch_seqs=12, num_slices=6)
TIMEOUT_S = 60.0  # of a collective: none is waited for that long
FATAL_STEP, LAST_STEP = 1, 3
LAYOUTS = {
    "2 x 2": (4, ParallelConfig(pp=2)),
    "3 stages": (3, ParallelConfig(pp=3)),
    "interleaved": (4, ParallelConfig(pp=2, schedule=PipelineSchedule.interleaved)),
    "rows shared": (4, ParallelConfig(pp=2, cp=2)),
}


@dataclass
class Moments:
    """What a rank does in a step, one after another; it dies before the one of this number, and the file says when."""

    fatal: int
    died: Path
    names: list[str] = field(default_factory=list)
    counts: bool = False

    def __call__(self, name: str) -> None:
        if self.counts:
            if len(self.names) == self.fatal:
                self.died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            self.names.append(name)

    def watch(self, step: TrainStep) -> None:
        """Every action of a step's pipeline, each message of it, attention's collectives, and what comes behind."""
        for name in ("receive", "send", "finish"):
            self._before(pipeline._Channel, name, name)
        self._before(context_parallel, "all_gather", "gather of keys and values")
        self._before(context_parallel, "reduce_scatter", "sum of their gradients")
        self._before(step, "_prepare", "backward")
        self._before(step, "update", "sums, norm and update")
        self._before(step, "_all_reduce", "all-reduce")
        check = step._raise_if_over

        def checked() -> None:
            self("action")
            check()

        step._raise_if_over = checked  # type: ignore[method-assign]

    def _before(self, owner: Any, attribute: str, name: str) -> None:
        inner = getattr(owner, attribute)

        def wrapped(*args: Any, **options: Any) -> Any:
            self(name)
            return inner(*args, **options)

        setattr(owner, attribute, wrapped)


def train(backend: str, layout: str, told: bool, victim: int, fatal: int, folder: str, member: Member) -> Any:
    """What this rank did in the fatal step; or by what it came out of it, and how many seconds after the death."""
    _, parallel = LAYOUTS[layout]
    store = dist.PrefixStore("group", member.connect(90.0))
    dist.init_process_group(
        backend,
        store=store,
        rank=member.rank,
        world_size=member.world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    training = Training(tiny_model(num_layers=6), parallel, OPTIM)

    def run(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Where the backend's collectives are awaited."""
        if backend == NAME:
            return member.stream.submit(partial(work, *arguments, **options)).result()
        return work(*arguments, **options)

    step = run(build, training, timeout_s=TIMEOUT_S)
    breaker, died = Breaker(), Path(folder, "died")
    moments = Moments(fatal if member.rank == victim else -1, died)
    breaker.watch(set().union(*run(gather, list(listening()))))
    pids = run(gather, os.getpid())
    step.certificate = Certificate(1, member.world_size, torch.device("cpu"))
    breaker.first(step.certificate.clear)
    writer = Snapshots(
        Path(folder, f"memory-{member.rank}"),
        training_entries(step.model, step.optimizer, inner_tensor=inner_tensor),
        coordinates=Coordinates(topology_of(training).mesh, member.rank),
        run_id="pipeline-kills",
        generation=1,
        writers=1,
    )
    moments.watch(step)

    def tell_of_a_death() -> None:
        """As a keeper does."""
        while is_running(pids[victim]):
            time.sleep(0.02)
        if told:
            breaker.start()

    if fatal >= 0:  # else a rank that comes to its end before the others would be taken for dead
        threading.Thread(target=tell_of_a_death, daemon=True).start()
    try:
        for number in range(LAST_STEP):
            moments.counts = number == FATAL_STEP
            mine, num_micro_batches = micro_batches(training, number)
            stats = run(step.run, mine, num_micro_batches=num_micro_batches, lr=OPTIM.lr, number=number + 1)
            run(stats.resolve)
            moments("snapshot")
            writer.begin(number, {"step": number})
            moments("the snapshot is being copied")
            writer.wait()
            writer.confirm(number)
    except Exception as error:  # as `run_worker` does
        breaker.start()
        assert backend != NAME or member.stream.drain(TIMEOUT_S)
        leave_generation()
        breaker.left()
        return type(error).__name__, time.time() - died.stat().st_mtime
    return moments.names


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(folder: Path, layout: str, victim: int, fatal: int, *, backend: str = "gloo", told: bool = True) -> list[Any]:
    """What each rank says where one of them dies at a moment of the step."""
    folder.mkdir()
    world_size, _ = LAYOUTS[layout]
    for rank in range(world_size):
        folder.joinpath(f"memory-{rank}").mkdir()
    fn = partial(train, backend, layout, told, victim, fatal, str(folder))
    ends, found = run_members(fn, world_size, folder, OFF if backend == NAME else {})
    assert ends == [-signal.SIGKILL if rank == victim and fatal >= 0 else 0 for rank in range(world_size)], found
    return found


def moments_of(folder: Path, layout: str) -> list[list[str]]:
    """By rank, where no rank dies."""
    return kill(folder, layout, 0, -1)


def of_each_kind(moments: list[str]) -> list[int]:
    """The first and the last of each."""
    last = {name: number for number, name in enumerate(moments)}
    return sorted({moments.index(name) for name in last} | set(last.values()))
