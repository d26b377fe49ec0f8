"""A model in this process' group, its steps timed as benchmarks/step.py does, and what profiler and allocator say."""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.profiler import ProfilerActivity

from regrow.config.schema import ModelConfig, OptimConfig, ParallelConfig
from regrow.forecast.footprint import Rank, footprint
from regrow.forecast.settle import ROOM_SHARE
from regrow.model.size import flops_per_token
from regrow.parallel.fsdp import build_mesh
from regrow.plan.mesh import plan_mesh
from regrow.runtime.hardware.peak import peak_flops
from regrow.train.build import build_step
from regrow.train.step import TrainStep

WARM_UP = 4


@dataclass(frozen=True)
class Load:
    """What a rank does in a step."""

    model: ModelConfig
    parallel: ParallelConfig
    rows: int  # of a pass
    seq_len: int
    num_passes: int = 1
    optim: OptimConfig = field(default_factory=OptimConfig)

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len * self.num_passes

    def forecast_bytes(self) -> int:
        """What `jobs.plan` says that a step allocates at most."""
        rank = Rank(
            model=self.model,
            parallel=self.parallel,
            dp_shard=plan_mesh(dist.get_world_size(), self.parallel.dp_replicate).dp_shard,
            num_passes=self.num_passes,
            rows=self.rows,
            seq_len=self.seq_len,
            on_gpu=True,
            moments=self.optim.moments,
        )
        return footprint(rank).total


@dataclass
class Timed:
    """What steps of a load came to on this rank."""

    step_s: float  # median
    tokens_per_s: float  # of this rank
    mfu: float
    allocated: int = 0  # bytes at most
    reserved: int = 0
    retries: int = 0  # allocations that had torch give memory back first, for which the device is waited for


class Loaded:
    """A model that is built, and its rows."""

    def __init__(self, load: Load, device: torch.device) -> None:
        world_size = dist.get_world_size()
        mesh = build_mesh(plan_mesh(world_size, load.parallel.dp_replicate, load.parallel.tp), device.type)
        self.load, self.device, self.number = load, device, 0
        self.step: TrainStep = build_step(load.model, load.parallel, load.optim, mesh=mesh, device=device, seed=0)
        torch.manual_seed(dist.get_rank())
        self.rows = [
            torch.randint(0, load.model.vocab_size, (load.rows, load.seq_len + 1), device=device)
            for _ in range(load.num_passes)
        ]
        self.before_update: Callable[[], Any] | None = None
        self._launched: list[Any] = []

    def run(self) -> None:
        """Launch a step; read the one before, as the loop does."""
        self.number += 1
        stats = self.step.run(
            self.rows,
            num_micro_batches=len(self.rows),
            lr=1e-4,
            digest=self.number,
            number=self.number,
            before_update=self.before_update,
        )
        self._launched.append(stats)
        if len(self._launched) > 1:
            self._launched.pop(0).resolve()

    def settle(self) -> None:
        while self._launched:
            self._launched.pop(0).resolve()
        torch.cuda.synchronize(self.device)

    def warm_up(self) -> None:
        for _ in range(WARM_UP):
            self.run()
        self.settle()

    def time(self, num_steps: int, each: Callable[[], None] | None = None) -> Timed:
        """`each` is called after every step was launched."""
        torch.cuda.reset_peak_memory_stats(self.device)
        retries = _retries(self.device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
        events[0].record()
        for number in range(num_steps):
            self.run()
            if each is not None:
                each()
            events[number + 1].record()
        self.settle()
        step_s = statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))
        tokens_per_s = self.load.tokens / step_s
        peak = peak_flops(self.device, self.load.parallel.dtype)
        memory = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        mfu = tokens_per_s * flops_per_token(self.load.model, self.load.seq_len) / peak.flops
        return Timed(step_s, tokens_per_s, mfu, *memory, _retries(self.device) - retries)


def _retries(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device)["num_alloc_retries"])


def busy(loaded: Loaded, num_steps: int = 3) -> float:
    """The share of some steps' time that the device computes, by torch's profiler: the union of its kernels.

    Operators are not looked at: noting them would double what the host takes to launch.
    """
    loaded.settle()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as running:
        for _ in range(num_steps):
            loaded.run()
        loaded.settle()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in running.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.end > event.time_range.start
    )
    covered, reached = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / (reached - spans[0][0]) if spans else 0.0


def group_alone(backend: str = "cpu:gloo,cuda:nccl") -> torch.device:
    """The default group, of this process alone; its device."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    distributed_c10d._world.group_count = 0
    named = device if backend == "nccl" else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=named)
    return device


def device_s(work: Callable[[], Any], repeats: int = 1) -> float:
    """Seconds of one, by the device's clock."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def rows_that_fit(load: Load, device: torch.device) -> int:
    """A power of two, by the forecast, as large passes as `forecast.settle` would have."""
    room = ROOM_SHARE * torch.cuda.get_device_properties(device).total_memory
    return max((rows for rows in (1, 2, 4, 8) if replace(load, rows=rows).forecast_bytes() <= room), default=1)
