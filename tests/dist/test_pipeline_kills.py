"""A rank of pipelines that dies at any action of a step: all others come out of it, none waits in a receive."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
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
    """What a rank does in a step, one after another; it dies before the one of this number."""

    fatal: int
    names: list[str]
    counts: bool = False

    def __call__(self, name: str) -> None:
        if self.counts:
            if len(self.names) == self.fatal:
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
    """What this rank did in the fatal step; or how it came out of it, and how long after the death."""
    _, parallel = LAYOUTS[layout]
    store = dist.PrefixStore("group", member.connect(90.0))
    place = {"rank": member.rank, "world_size": member.world_size}
    dist.init_process_group(backend, store=store, timeout=timedelta(seconds=TIMEOUT_S), **place)
    training = Training(tiny_model(num_layers=6), parallel, OPTIM)

    def run(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Where the backend's collectives are awaited."""
        if backend == NAME:
            return member.stream.submit(partial(work, *arguments, **options)).result()
        return work(*arguments, **options)

    step = run(build, training, timeout_s=TIMEOUT_S)
    breaker, moments = Breaker(), Moments(fatal if member.rank == victim else -1, [])
    breaker.watch(set().union(*run(gather, list(listening()))))
    pids, died = run(gather, os.getpid()), Path(folder, "died")
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
        died.touch()
        if told:
            breaker.start()

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
        return type(error).__name__, time.time() - died.stat().st_mtime if died.exists() else 0.0
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


def assert_all_came_out(found: list[Any], victim: int) -> None:
    for name, seconds in [said for rank, said in enumerate(found) if rank != victim]:
        assert name in ("RuntimeError", "DistBackendError", "DistNetworkError", "BrokenStep"), name
        assert seconds < TIMEOUT_S / 2


def moments_of(folder: Path, layout: str) -> list[list[str]]:
    """By rank, where no rank dies."""
    return kill(folder, layout, 0, -1)


def of_each_kind(moments: list[str]) -> list[int]:
    """The first and the last of each."""
    last = {name: number for number, name in enumerate(moments)}
    return sorted({moments.index(name) for name in last} | set(last.values()))


@pytest.mark.parametrize(
    ("layout", "victim", "which"),
    [
        ("2 x 2", 3, "backward"),
        ("2 x 2", 0, "send"),
        pytest.param("rows shared", 1, "gather of keys and values", marks=pytest.mark.long),
        pytest.param("rows shared", 2, "sum of their gradients", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_dies_in_a_pipeline_keeps_no_other_waiting(
    layout: str, victim: int, which: str, tmp_path: Path
) -> None:
    moments = moments_of(tmp_path / "whole", layout)[victim]
    found = kill(tmp_path / "killed", layout, victim, len(moments) - 1 - moments[::-1].index(which))
    assert_all_came_out(found, victim)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("told", [True, False], ids=["told", "by the network alone"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_dies_at_any_action_keeps_no_other_waiting(layout: str, told: bool, tmp_path: Path) -> None:
    moments = moments_of(tmp_path / "whole", layout)
    world_size, parallel = LAYOUTS[layout]
    for victim in range(0, world_size, world_size // parallel.pp):  # of each stage one
        for fatal in of_each_kind(moments[victim]):
            found = kill(tmp_path / f"{victim}-{fatal}", layout, victim, fatal, told=told)
            assert_all_came_out(found, victim)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_same_where_a_dead_peer_raises_nothing(tmp_path: Path) -> None:
    """As on NCCL."""
    moments = moments_of(tmp_path / "whole", "2 x 2")
    for victim in (0, 3):
        for fatal in of_each_kind(moments[victim]):
            assert_all_came_out(kill(tmp_path / f"{victim}-{fatal}", "2 x 2", victim, fatal, backend=NAME), victim)
