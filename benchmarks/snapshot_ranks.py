"""What ranks of `snapshot.py` run: the job's own loop over real steps, some beside a snapshot."""

import itertools
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks import checkpoint_dcp as peer
from benchmarks.checkpoint_keepers import GENERATION, Place, place_of
from benchmarks.checkpoint_ranks import build, scalars, snapshots_of, wait_until
from benchmarks.measure import family_cpu_s

from regrow.config.schema import ModelConfig, OptimConfig, ParallelConfig
from regrow.control.spacing import FIRST, Choice, Spacing
from regrow.data.read.batch import RankBatch
from regrow.optim.adamw import MOMENTS
from regrow.parallel.float8 import inner_tensor
from regrow.parallel.fsdp import build_mesh, coordinates_of
from regrow.plan.mesh import plan_mesh
from regrow.state.collective import from_rank_0, gather
from regrow.state.entries import Progress, training_entries
from regrow.state.memory.slots import Committed
from regrow.state.memory.writer import Snapshots
from regrow.train.build import build_step
from regrow.train.hooks import Saver
from regrow.train.loop import LoopSettings, train
from regrow.train.metrics import Meter
from regrow.train.saver import Cadence, SnapshotSaver
from regrow.train.step import TrainStep

OURS = "ours"
SLOTS = 3  # as snapshot.slots
NEVER = 1 << 30  # no snapshot is that far from the one before
SETTLED = SLOTS  # snapshots before those that count: each slot's memory has been touched
AFTER = 1  # steps after the one in which a snapshot is committed that count as beside it
LOOK_S = 0.005
TRIED = (1, 17)  # passes that are timed, to know how many make a step
TRIES = 3  # of each


@dataclass(frozen=True)
class Cell:
    """One link and step length."""

    step_s: float
    snapshots: int  # that count
    most_steps_lost: int
    mtbf_s: float


@dataclass
class Steps:
    """The steps of one snapshot: those beside it, then as many without one."""

    beside: list[tuple[float, float]] = field(default_factory=list)  # of each step: seconds, CPU seconds
    plain: list[tuple[float, float]] = field(default_factory=list)


def compare(before: Steps, one: Steps) -> dict[str, float]:
    """What a snapshot adds to the steps beside it, were these as long as the mean of the plain ones around them."""
    plain = before.plain + one.plain
    plain_s, plain_cpu_s = (statistics.mean(values) for values in zip(*plain, strict=True))
    seconds, cpu_s = (sum(values) for values in zip(*one.beside, strict=True))
    steps = len(one.beside)
    added = {"added_s": seconds - steps * plain_s, "added_cpu_s": cpu_s - steps * plain_cpu_s}
    return {**added, "plain_s": plain_s, "plain_cpu_s": plain_cpu_s, "steps_beside": steps, "steps_plain": len(plain)}


@dataclass
class Windows:
    """Rank 0's: steps beside a snapshot and as many without one, in turn.

    So that there are both, snapshots are twice as far apart as any before had steps beside it. `spacing`, as in a job,
    makes of the same steps the K that the job would have.
    """

    cell: Cell
    saver: Any
    spacing: Spacing
    root: int  # the process that all others descend from, keepers included
    choices: list[Choice] = field(default_factory=list)
    done: bool = False
    _all: list[Steps] = field(default_factory=list)  # of each snapshot
    _begun: int = 0  # the step of the newest
    _left: int = 0  # steps that count as beside it yet, once it is committed
    _cpu_s: float = 0.0  # of all processes, when the step began
    _every: int = FIRST  # steps between snapshots
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def compared(self) -> list[dict[str, float]]:
        """Of each snapshot that counts."""
        counting = self._all[SETTLED:]
        return [compare(before, one) for before, one in itertools.pairwise(counting[: self.cell.snapshots + 1])]

    def wish(self) -> int:
        """Steps between snapshots."""
        return self._every

    def committed(self, step: int) -> None:
        with self._lock:
            self.spacing.committed(step, time.monotonic())

    def log(self, row: dict[str, Any]) -> None:
        with self._lock:
            self._take(row["step"], row["step_s"] - row["data_wait_s"])

    def _take(self, step: int, seconds: float) -> None:
        cpu_s = family_cpu_s(self.root)
        took, self._cpu_s = (seconds, cpu_s - self._cpu_s), cpu_s
        if self.saver.begun != self._begun:  # after the step before
            self._begun, self._left = self.saver.begun, AFTER
            self._every = max([FIRST, *(2 * len(each.beside) for each in self._all)])
            self._all.append(Steps())
        busy = self.saver.on_its_way()
        if self._all:
            one = self._all[-1]
            (one.beside if busy or self._left >= 0 else one.plain).append(took)
        self._left -= not busy
        self.spacing.stepped(step, seconds, time.monotonic())
        if choice := self.spacing.choose(self.cell.mtbf_s):
            self.choices.append(choice)
        self.done = len(self._all) > SETTLED + self.cell.snapshots + 1


@dataclass
class Hooks:
    """What the loop asks; `windows` of rank 0 alone."""

    windows: Windows | None

    def step_done(self, row: Mapping[str, float]) -> None: ...

    def log(self, row: dict[str, Any]) -> None:
        if self.windows is not None:
            self.windows.log(row)

    def verified(self, step: int, outcome: Any) -> None: ...

    def wants_to_leave(self) -> bool:
        return self.windows is not None and self.windows.done

    def validate(self, step: int) -> float:
        raise AssertionError("there is no validation")


class OurSaver(SnapshotSaver):
    """The job's, and what is asked of it here."""

    @property
    def begun(self) -> int:
        return self._snapshots.begun

    def on_its_way(self) -> bool:
        return not self._snapshots.is_committed(self._snapshots.begun)


class PeerSaver:
    """DCP's `async_save` by the same loop, every so many steps as rank 0 says."""

    def __init__(self, dcp: peer.DcpSaver, told: Any) -> None:
        self._dcp, self._told = dcp, told
        self._every, self.begun = FIRST, 0

    def has_room(self, step: int) -> bool:
        return True

    def is_held(self, step: int) -> bool:
        return False

    def held_by_all(self, step: int, held: bool) -> None: ...

    def spacing(self) -> int:
        return int(self._told())

    def space(self, every_steps: int) -> None:
        self._every = every_steps or self._every

    def before_update(self) -> float:
        begun = time.perf_counter()
        self._dcp.wait()
        return time.perf_counter() - begun

    def confirm(self, step: int) -> float:
        return 0.0

    def is_checkpoint_due(self, step: int) -> bool:
        return False

    def after_step(self, progress: Progress, *, blocked: bool, read: bool) -> float:
        begun = time.perf_counter()
        if progress.step - self.begun >= self._every:
            self._dcp.begin(progress.step)  # waits for the one before
            self.begun = progress.step
        return time.perf_counter() - begun

    def finish(self, progress: Progress, *, blocked: bool) -> float:
        self._dcp.finish()
        return 0.0

    def on_its_way(self) -> bool:
        return self._dcp.is_busy


def run(
    side: str, model: ModelConfig, seq_len: int, places: list[Place], folder: Path, cell: Cell, root: int
) -> dict[str, Any]:
    """What snapshots of one cell add, as rank 0 sees it. `root` is the process that started all of them."""
    mesh, world_size = build_mesh(plan_mesh(dist.get_world_size(), 1), "cpu"), dist.get_world_size()
    parallel = ParallelConfig(reshard_after_forward=False)
    step = build_step(model, parallel, OptimConfig(lr=1e-4), mesh=mesh, device=torch.device("cpu"), seed=0)
    passes = _passes(step, model, seq_len, cell.step_s)
    entries = training_entries(step.model, step.optimizer, inner_tensor=inner_tensor)
    spacing, first = Spacing(cell.most_steps_lost), dist.get_rank() == 0
    windows: Windows | None = None

    def told() -> int:
        return windows.wish() if windows is not None else 0

    saver: Saver
    snapshots: Snapshots | None = None
    if side == OURS:
        snapshots = snapshots_of(entries, coordinates_of(mesh), places, SLOTS)
        saver = OurSaver(
            Cadence(NEVER, None),
            snapshots,
            start_step=0,
            num_ahead=0,
            want_checkpoint=lambda step: None,
            write=lambda progress: None,
            timeout_s=1.0,
            spacing=told,
        )
    else:
        dcp = peer.DcpSaver(side, _tensors(step), folder, sync_files=False)
        saver = PeerSaver(dcp, told)
    if first:
        windows = Windows(cell, saver, spacing, root)
    watching = _watch(windows, places[0].folder) if snapshots is not None and windows is not None else None
    settings = LoopSettings(
        last_step=NEVER,
        total_tokens=NEVER,
        tokens_per_step=passes * world_size * seq_len,
        seqs_per_step=passes * world_size,
        slice_seqs=1,
        num_micro_batches=passes,
        validate_every_steps=0,
        nonfinite_skips=0,
    )
    meter = Meter(1, flops_per_token=1.0, peak_flops=1.0, world_size=world_size, generation=GENERATION)
    batches, hooks = _batches(model, seq_len, passes), Hooks(windows)
    train(
        step, batches, Progress(), optim=OptimConfig(lr=1e-4), settings=settings, meter=meter, saver=saver, hooks=hooks,
        device=torch.device("cpu"),
    )  # fmt: skip
    if snapshots is not None:
        snapshots.close()
    else:
        dcp.close()
    if watching is not None:
        watching.set()
    num_bytes = sum(gather(sum(entry.memory.nbytes for entry in entries)))
    if windows is None:
        return {}
    chosen = [vars(each) for each in windows.choices]
    every_steps = spacing.every_steps  # 0: the peer's, of which nothing is chosen
    return {
        "snapshots": windows.compared,
        "every_steps": every_steps,
        "choices": chosen,
        "passes": passes,
        "state_bytes": num_bytes,
    }


def _watch(windows: Windows, folder: Path) -> threading.Event:
    """Tell of commits, as the coordinator hears of them."""
    over = threading.Event()

    def look() -> None:
        newest = -1
        while not over.wait(LOOK_S):
            if (step := Committed.read(folder).newest.step) > newest:
                newest = step
                windows.committed(step)

    threading.Thread(target=look, daemon=True).start()
    return over


def _passes(step: TrainStep, model: ModelConfig, seq_len: int, step_s: float) -> int:
    """How many forward and backward passes a step of this length has. Collective."""
    rows = torch.randint(model.vocab_size, (1, seq_len + 1))

    def seconds(passes: int) -> float:
        dist.barrier()
        begun = time.perf_counter()
        step.run([rows] * passes, num_micro_batches=passes, lr=0.0).resolve()
        return time.perf_counter() - begun

    few, many = TRIED
    seconds(few)  # touches memory
    few_s, many_s = (statistics.median(seconds(passes) for _ in range(TRIES)) for passes in TRIED)
    pass_s = (many_s - few_s) / (many - few)
    update_s = few_s - few * pass_s
    return int(from_rank_0(max(1, round((step_s - update_s) / max(pass_s, 1e-3)))))


def _batches(model: ModelConfig, seq_len: int, passes: int) -> Iterator[RankBatch]:
    generator = np.random.default_rng(dist.get_rank())
    rows = generator.integers(model.vocab_size, size=(passes, seq_len + 1), dtype=np.uint32)
    for number in itertools.count():
        yield RankBatch(number, np.arange(passes), rows)


def _tensors(step: TrainStep) -> dict[str, Any]:
    """What DCP takes."""
    tensors: dict[str, Any] = {}
    for name, parameter in step.model.named_parameters():
        tensors[f"model/{name}"] = parameter
        for moment in MOMENTS:
            tensors[f"optim/{moment}/{name}"] = step.optimizer.state[parameter][moment]
    return tensors


def commit_again_and_again(model: str, places: list[Place], num_commits: int) -> dict[str, Any]:
    """Seconds from the seal of all ranks' slots to the commit, the trainer idle, and the bytes of a node."""
    state, world_size = build(model), dist.get_world_size()
    place = place_of(dist.get_rank(), world_size, places)
    snapshots = snapshots_of(state.entries, state.coordinates, places)
    seconds = []
    for number in range(1, 3 + num_commits):
        assert snapshots.begin(number, scalars(number))
        snapshots.wait()
        dist.barrier()
        begun = time.perf_counter()
        snapshots.confirm(number)
        wait_until(lambda number=number: Committed.read(place.folder).newest.step >= number)  # type: ignore[misc]
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
    snapshots.close()
    on_node = sum(size for where, size in gather((place.node, state.num_bytes)) if where == places[0].node)
    return {"seconds": seconds[2:], "bytes": on_node}  # two slots, touched once
