"""What a process keeps that goes from group to group: memory, threads, descriptors, pinned pages, compiled graphs.

On a CPU CUDA's runtime has a stand-in as far as snapshots need it: what it pins is counted, copies are done at once.
"""

import contextlib
import gc
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from regrow.accept.outlive import stream_for
from regrow.accept.ranks import Member, form_group, run_ranks
from regrow.accept.tiny import count_up_rows, tiny_model
from regrow.config.schema import OptimConfig, ParallelConfig
from regrow.control.values import SnapshotAck, Version
from regrow.parallel.compile import graphs_compiled
from regrow.parallel.float8 import inner_tensor
from regrow.parallel.fsdp import build_mesh, let_go_of_meshes
from regrow.parallel.stream import HostStream
from regrow.plan.mesh import ALONE, plan_mesh
from regrow.state.entries import Entry, training_entries
from regrow.state.memory.arenas import Arenas
from regrow.state.memory.node import KeeperNode
from regrow.state.memory.slots import Committed
from regrow.state.memory.writer import Snapshots
from regrow.train.build import build_step
from regrow.train.step import TrainStep

SETTLED = 8  # generations after which a process has made all that it keeps
COMMIT_S = 30.0
UNCOMPILED = ParallelConfig()


ALREADY_REGISTERED, NOT_REGISTERED, NO_MEMORY = 712, 713, 2  # errors of cudaHostRegister and cudaHostUnregister


class Runtime:
    """What is pinned now, by address, and how often anything was; of CUDA's runtime, or in its place."""

    def __init__(self, real: Any = None) -> None:
        self.pinned: dict[int, int] = {}  # bytes
        self.registered, self.ever = 0, 0  # calls, bytes
        self.room: int | None = None  # ranges that it pins at most
        self._real = real

    @property
    def num_bytes(self) -> int:
        return sum(self.pinned.values())

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Any:
        outcome = (
            self._real.cudaHostRegister(address, num_bytes, flags) if self._real else self._error(address, num_bytes)
        )
        if int(outcome) == 0:
            self.pinned[address] = num_bytes
            self.registered, self.ever = self.registered + 1, self.ever + num_bytes
        return outcome

    def _error(self, address: int, num_bytes: int) -> int:
        if any(begin < address + num_bytes and address < begin + size for begin, size in self.pinned.items()):
            return ALREADY_REGISTERED
        return NO_MEMORY if len(self.pinned) == self.room else 0

    def cudaHostUnregister(self, address: int) -> Any:
        known = 0 if address in self.pinned else NOT_REGISTERED
        outcome = self._real.cudaHostUnregister(address) if self._real else known
        if int(outcome) == 0:
            self.pinned.pop(address, None)
        return outcome

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _OnDevice(torch.Tensor):
    is_cuda = True


def on_a_device(entries: Sequence[Entry]) -> list[Entry]:
    """The same memory, by tensors that say they are on a device."""
    return [Entry(entry.box, entry.memory.as_subclass(_OnDevice)) for entry in entries]


@contextlib.contextmanager
def counting_runtime(runtime: Runtime | None = None) -> Iterator[Runtime]:
    """In CUDA's place; the same one again, where it is given."""
    runtime = runtime or Runtime()
    event = SimpleNamespace(synchronize=lambda: None, record=lambda: None, query=lambda: True)
    stream = SimpleNamespace(wait_stream=lambda other: None, wait_event=lambda event: None)
    stand_ins: dict[str, Any] = {
        "cudart": lambda: runtime,
        "Stream": lambda *_, **__: stream,
        "Event": lambda *_, **__: event,
        "current_stream": lambda *_: stream,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    with mock.patch.multiple(torch.cuda, **stand_ins):
        yield runtime


class Held:
    """What a process holds after a generation."""

    def __init__(self, form_s: float, memory_mib: float | None = None, runtime: Runtime | None = None) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.form_s = form_s
        self.memory_mib = pages * resource.getpagesize() / 2**20 if memory_mib is None else memory_mib
        self.threads, self.descriptors = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        self.pinned_bytes, self.registered = (runtime.num_bytes, runtime.registered) if runtime else (0, 0)
        self.graphs = graphs_compiled()

    @classmethod
    def on(cls, device: torch.device, form_s: float) -> "Held":
        """Of a device's memory."""
        free, total = torch.cuda.mem_get_info(device)
        return cls(form_s, (total - free) / 2**20)


def judge_flat(found: list[list[Held]], most_mib: float, what: str = "memory") -> tuple[bool, str, str]:
    """Whether processes kept no more at the end than once they had settled; the figure, and what grew."""
    ends = [(each[SETTLED], each[-1]) for each in found]
    grown = max(max(0.0, last.memory_mib - first.memory_mib) for first, last in ends)
    counts = {
        name: max(getattr(last, field) - getattr(first, field) for first, last in ends)
        for name, field in {
            "threads": "threads",
            "descriptors": "descriptors",
            "pinned bytes": "pinned_bytes",
            "registrations": "registered",
            "compiled graphs": "graphs",
        }.items()
    }
    form_s = statistics.median(held.form_s for each in found for held in each)
    figure = (
        f"{what} +{grown:.1f} MiB, {', '.join(f'{name} {more:+,d}' for name, more in counts.items())} "
        f"from generation {SETTLED + 1} to {len(found[0])}; {form_s:.2f} s to form a group"
    )
    problems = [what] * (grown > most_mib) + [name for name, more in counts.items() if more > 0]
    return not problems, figure, f"grows: {', '.join(problems)}"


def change_groups(
    backend: str, num_generations: int, parallel: ParallelConfig = UNCOMPILED, *, timeout_s: float = 240.0
) -> list[list[Held]]:
    """What each of two processes held after each generation."""
    with in_memory() as folder:
        what = (backend, str(folder), num_generations, parallel)
        return run_ranks(change_often, 2, *what, device_type="cpu", timeout_s=timeout_s)


def change_often(
    member: Member, backend: str, folder: str, num_generations: int, parallel: ParallelConfig
) -> list[Held]:
    """Form a group, train for two steps, take a snapshot as from a device and leave, again and again."""
    stream: Any = HostStream() if backend == "gloo" else stream_for(member.device)
    process = Snapshotting(Path(folder) / f"node-{member.rank}")
    held = []
    for number in range(num_generations):
        begun = time.monotonic()
        form_group(member, backend, number, timeout_s=60.0)
        mesh = build_mesh(plan_mesh(2, 1), "cpu")
        step = stream.submit(partial(step_alone, member.device, parallel, mesh)).result()
        form_s = time.monotonic() - begun
        for index in range(2):
            rows = [count_up_rows(index, num_rows=4, seq_len=16)]
            stream.submit(partial(step.run, rows, num_micro_batches=1, lr=1e-3, number=index)).result().resolve()
        process.take(step, number + 1)
        del step, mesh
        dist.destroy_process_group()
        let_go_of_meshes()
        gc.collect()
        time.sleep(0.02)  # for threads to end
        held.append(Held(form_s, runtime=process.runtime))
    process.close()
    return held


class Snapshotting:
    """The snapshots of a process with a keeper of its own, from generation to generation, as if from a device."""

    def __init__(self, folder: Path) -> None:
        self.runtime, self._reports = Runtime(), list[SnapshotAck]()
        self._keeper = KeeperNode(
            folder, node="node", host="127.0.0.1", secret=b"accept", run_id="accept", report=self._reports.append
        )
        self._keeper.start()
        self._arenas = Arenas(folder)

    def take(self, step: TrainStep, generation: int, *, num_steps: int = 1) -> None:
        """Of the state as it is; each is committed."""
        with counting_runtime(self.runtime):
            snapshots = Snapshots(
                self._keeper.folder,
                device_entries(step),
                coordinates=ALONE,
                run_id="accept",
                generation=generation,
                arenas=self._arenas,
            )
            for number in range(1, num_steps + 1):
                snapshots.begin(number, {"step": number})
                snapshots.wait()
                snapshots.confirm(number)
                self._commit(Version(generation, number))
            snapshots.close()

    def close(self) -> None:
        with counting_runtime(self.runtime):
            self._arenas.close()
        self._keeper.close(delete=True)

    def _commit(self, moment: Version) -> None:
        give_up_at = time.monotonic() + COMMIT_S
        while all(report.version != moment for report in self._reports):
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"no keeper reports step {moment.step} of generation {moment.generation}")
            time.sleep(0.002)
        self._reports.clear()
        self._keeper.committed(Committed(moment))


def device_entries(step: TrainStep) -> list[Entry]:
    """Its state's, which say that they are on a device."""
    return on_a_device(training_entries(step.model, step.optimizer, inner_tensor=inner_tensor))


def step_alone(
    device: torch.device | None = None, parallel: ParallelConfig = UNCOMPILED, mesh: Any = None
) -> TrainStep:
    """Of a tiny model, in the mesh's group or in one of this process."""
    if mesh is None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = build_mesh(plan_mesh(1, 1), "cpu")
    device = device or torch.device("cpu")
    return build_step(tiny_model(), parallel, OptimConfig(lr=1e-3), mesh=mesh, device=device, seed=0)


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """A folder for slots."""
    where = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="regrow-accept-", dir=where, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
