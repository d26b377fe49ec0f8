"""What ranks of `checkpoint.py` run: a training state in any layout, steps of a stated length, saves, restores."""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import yaml
from benchmarks import checkpoint_dcp as peer
from benchmarks.checkpoint_keepers import GENERATION, RUN_ID, SECRET, Place, place_of, writers_on
from torch import Tensor

from regrow.config.schema import ModelConfig, OptimConfig, ParallelConfig
from regrow.optim.adamw import MOMENTS, build_optimizer
from regrow.parallel.apply import build_model
from regrow.parallel.float8 import inner_tensor
from regrow.parallel.fsdp import build_mesh, coordinates_of, replica_group
from regrow.plan.mesh import Coordinates, plan_mesh
from regrow.state.checksums import crc32
from regrow.state.collective import gather
from regrow.state.disk import catalog, store
from regrow.state.disk.format import COMMIT
from regrow.state.entries import Entry, training_entries
from regrow.state.memory.holders import Holder, Holders
from regrow.state.memory.ranges import BLOCK, connected
from regrow.state.memory.reader import restore_snapshot
from regrow.state.memory.slots import Committed
from regrow.state.memory.writer import Snapshots
from regrow.storage import LocalStorage

MODELS = Path(__file__).parents[1] / "conf" / "model"
SEED, OTHER_SEED = 1, 2
POLL_S = 0.002
COMMIT_S = 120.0
NUM_SLOTS = 2  # of ours
STEP = 1  # that a state to restore from is of


@dataclass
class State:
    """A rank's part of a training state."""

    entries: list[Entry]
    tensors: dict[str, Tensor]  # the same ones by the same names, as DTensors: what DCP takes
    optimizer: torch.optim.Optimizer
    coordinates: Coordinates
    replicas: dist.ProcessGroup | None  # that hold the same part

    @property
    def num_bytes(self) -> int:
        return sum(entry.memory.nbytes for entry in self.entries)


def build(model_name: str, *, dp_replicate: int = 1, seed: int = SEED) -> State:
    """The state that a seed gives, the same elements in every layout, none of them a page of zeros. Collective."""
    mesh = build_mesh(plan_mesh(dist.get_world_size(), dp_replicate), "cpu")
    content = yaml.safe_load((MODELS / f"{model_name}.yaml").read_text())
    config = ModelConfig(**content.get("model", content))
    model = build_model(config, ParallelConfig(), mesh=mesh, device="cpu", seed=seed)
    optimizer = build_optimizer(model, OptimConfig(lr=1e-4))
    entries = training_entries(model, optimizer, inner_tensor=inner_tensor)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.grad = parameter.detach() * 1e-3
        tensors[f"model/{name}"] = parameter
        for power, moment in enumerate(MOMENTS, start=2):
            tensors[f"optim/{moment}/{name}"] = optimizer.state[parameter][moment]
            optimizer.state[parameter][moment].copy_(parameter.detach() ** power)
    return State(entries, tensors, optimizer, coordinates_of(mesh), replica_group(mesh))


def scalars(step: int) -> dict[str, int]:
    return {"step": step, "cursor": step, "tokens_seen": step}


class Saver(Protocol):
    """One side's way to save the state of a step."""

    def begin(self, step: int) -> None:
        """Right after the update."""

    def wait(self) -> None:
        """Right before the next update."""

    def finish(self) -> None:
        """Until the last one is whole."""

    def close(self) -> None: ...

    @property
    def num_skipped(self) -> int:
        """Steps that could not be saved."""


def snapshots_of(
    entries: list[Entry], coordinates: Coordinates, places: Sequence[Place], num_slots: int = NUM_SLOTS
) -> Snapshots:
    """This rank's, on its node of these places."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = place_of(rank, world_size, places)
    return Snapshots(
        place.folder,
        entries,
        coordinates=coordinates,
        run_id=RUN_ID,
        generation=GENERATION,
        writers=writers_on(place, world_size, places),
        num_slots=num_slots,
    )


class OurSaver:
    """Snapshots as the loop takes them on CPU: a step's collectives have succeeded when its copy begins."""

    def __init__(self, state: State, places: Sequence[Place]) -> None:
        self.snapshots = snapshots_of(state.entries, state.coordinates, places)
        self.last = 0

    def begin(self, step: int) -> None:
        if self.snapshots.begin(step, scalars(step)):
            self.last = step
        self.snapshots.confirm(step)

    def wait(self) -> None:
        self.snapshots.wait()

    def finish(self) -> None:
        """Checked, copied to the peer, committed."""
        wait_until(lambda: Committed.read(self.snapshots.folder).newest.step >= self.last)

    def close(self) -> None:
        self.finish()
        self.snapshots.close()

    @property
    def num_skipped(self) -> int:
        return self.snapshots.skipped


class BareSaver:
    """What a disk alone takes: this rank's bytes as they lie, by the writes of our files, with nothing else."""

    num_skipped = 0

    def __init__(self, state: State, folder: Path) -> None:
        self.storage = LocalStorage(folder)
        self.memory = [entry.memory.view(torch.uint8).numpy().data for entry in state.entries]

    def begin(self, step: int) -> None:
        self.storage.write_chunks(f"step-{step}-rank-{dist.get_rank()}", self.memory)

    def wait(self) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + COMMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"nothing for {COMMIT_S:.0f} s"
        time.sleep(POLL_S)


def make_saver(side: str, state: State, places: Sequence[Place], folder: Path, *, sync_files: bool) -> Saver:
    if places:
        return OurSaver(state, places)
    if side == "bare":
        return BareSaver(state, folder)
    return peer.DcpSaver(side, state.tensors, folder, sync_files=sync_files)


def steps(
    side: str, model: str, places: Sequence[Place], folder: Path, step_s: float, num_steps: int
) -> dict[str, Any]:
    """Seconds of steps without and with a snapshot each, as rank 0 sees them, and of one snapshot until it is whole.

    `host_s` are seconds a step within calls to save, of the rank with most. Each side saves once a step, or the
    step is among those skipped.
    """
    state = build(model)
    saver = make_saver(side, state, places, folder, sync_files=False)
    number, host_s = 1, 0.0

    def run(num: int, saving: bool) -> list[float]:
        nonlocal number, host_s
        seconds, host_s = [], 0.0
        for _ in range(num):
            began = time.perf_counter()
            if saving:
                saver.begin(number)
                host_s += time.perf_counter() - began
            time.sleep(step_s)  # forward and backward, which the host waits for
            if saving:
                waited = time.perf_counter()
                saver.wait()
                host_s += time.perf_counter() - waited
            state.optimizer.step()
            dist.barrier()
            seconds.append(time.perf_counter() - began)
            number += 1
        return seconds

    run(1, saving=False)
    plain = run(num_steps, saving=False)
    run(2, saving=True)  # processes start, pages are touched, plans are cached
    skipped = saver.num_skipped
    saved = run(num_steps, saving=True)
    skipped = saver.num_skipped - skipped
    host_s = max(gather(host_s)) / num_steps
    saver.finish()

    def save() -> None:
        saver.begin(number)
        saver.finish()

    whole_s = timed(save)
    saver.close()
    return {"plain_s": plain, "saved_s": saved, "host_s": host_s, "whole_s": whole_s, "skipped": skipped}


def timed(action: Callable[[], None]) -> float:
    """Seconds until every rank has done it. Collective."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def take_snapshot(model: str, places: Sequence[Place]) -> int:
    """Leave a committed snapshot in the keepers' memory; the bytes of this rank's part."""
    state = build(model)
    saver = OurSaver(state, places)
    saver.begin(STEP)
    saver.close()
    return state.num_bytes


def write_checkpoints(model: str, folder: Path) -> int:
    """One of each side below `folder`; the bytes of this rank's part."""
    state = build(model)
    store.save(
        LocalStorage(folder / "ours"),
        state.entries,
        scalars=scalars(STEP),
        run_id=RUN_ID,
        generation=GENERATION,
        coordinates=state.coordinates,
    )
    peer.save(state.tensors, folder / "dcp")
    dist.barrier()
    for path in (folder / "ours").rglob("*.safetensors"):  # written past the page cache, in which DCP's are
        path.read_bytes()
    return state.num_bytes


def restore(side: str, model: str, folder: Path, holders: Sequence[Holder], place: Place) -> float:
    """Seconds to restore this layout for the first time, as a new process does; what was restored is checked.

    `bare` is what sockets alone take: as many bytes as the rank needs, each mebibyte checksummed, from wherever.
    """
    state = build(model, seed=OTHER_SEED)
    if side == "bare":
        return timed(bare_loop(state, holders))

    def from_memory(node: str) -> None:
        done = restore_snapshot(
            state.entries, Holders.of(holders), node=node, folder=place.folder, secret=SECRET, reader=dist.get_rank()
        )
        assert not done.problems, done.problems
        assert (done.peer_bytes if node == place.node else done.own_bytes) == 0, done

    actions: dict[str, Callable[[], None]] = {
        "own": lambda: from_memory(place.node),
        "peers": lambda: from_memory("a node that holds nothing"),
        "storage": lambda: from_storage(state, LocalStorage(folder / "ours")),
        "dcp": lambda: peer.load(state.tensors, folder / "dcp"),
    }
    seconds = timed(actions[side])
    check(state, model)
    return seconds


def bare_loop(state: State, holders: Sequence[Holder]) -> Callable[[], None]:
    """Fills a rank's memory with its share of the bytes that the files of a snapshot have, one after another."""
    sizes = gather(state.num_bytes)
    files = [each for each in holders if not each.held.is_copy]
    of_file = sum(sizes) // len(files)  # a header's bytes are as good as a tensor's
    begin = sum(sizes[: dist.get_rank()])
    memory = torch.cat([entry.memory.view(torch.uint8) for entry in state.entries]).numpy().data

    def run() -> None:
        at = 0
        while at < len(memory):
            number, offset = divmod(begin + at, of_file)
            size = min(of_file - offset, len(memory) - at) if number < len(files) else 0
            if not size:  # what does not divide
                break
            holder = files[number]
            with connected(holder.address, SECRET) as connection:
                connection.send({"op": "get", "file": holder.held.file, "ranges": [(offset, size)]})
                for first in range(at, at + size, BLOCK):
                    part = memory[first : min(first + BLOCK, at + size)]
                    connection.receive_into(part)
                    crc32(part)
            at += size

    return run


def from_storage(state: State, storage: LocalStorage) -> None:
    """Restore as the job does where memory has nothing. Collective where there are replicas."""
    store.restore(storage, catalog.open_checkpoint(storage, STEP, run_id=RUN_ID), state.entries, state.coordinates)
    store.share_parts(state.entries, state.coordinates, state.replicas)


def check(state: State, model: str, dp_replicate: int = 1) -> None:
    """The state is, bit for bit, the one that was saved."""
    expected = build(model, dp_replicate=dp_replicate).entries
    for entry, want in zip(state.entries, expected, strict=True):
        assert torch.equal(entry.memory, want.memory), entry.box.name


class CountingStorage(LocalStorage):
    """Counts the bytes that are read through it and the folders below it."""

    def __init__(self, root: Path, counted: list[int] | None = None) -> None:
        super().__init__(root)
        self.counted = [] if counted is None else counted  # of each read, by whichever thread

    def join(self, *names: str) -> "CountingStorage":
        return CountingStorage(self.root.joinpath(*names), self.counted)

    def read_bytes(self, name: str) -> bytes:
        data = super().read_bytes(name)
        self.counted.append(len(data))
        return data

    def read_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        data = super().read_range(name, offset, num_bytes)
        self.counted.append(len(data))
        return data

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        num_bytes = super().read_into(name, offset, buffer)
        self.counted.append(num_bytes)
        return num_bytes


def count_bytes(model: str, folder: Path, dp_replicate: int) -> dict[str, int]:
    """What this rank reads from storage to restore its part, by either side."""
    state = build(model, dp_replicate=dp_replicate, seed=OTHER_SEED)
    storage = CountingStorage(folder / "ours")
    from_storage(state, storage)
    check(state, model, dp_replicate)
    theirs = peer.load_counted(state.tensors, folder / "dcp")
    return {"needed": state.num_bytes, "ours": sum(storage.counted), "dcp": theirs}


def durable(side: str, model: str, places: Sequence[Place], folder: Path, num_saves: int) -> dict[str, Any]:
    """Seconds from the beginning of the copy until a checkpoint is whole in `folder`, of each save but the first ones.

    Those touch the memory that later ones use again, which a run does once: our two slots, DCP's stager.
    """
    state = build(model)
    saver = make_saver(side, state, places, folder, sync_files=True)
    seconds = []
    for step in range(1, 1 + NUM_SLOTS + num_saves):

        def save(step: int = step) -> None:
            saver.begin(step)
            saver.finish()
            if places:  # keepers write what was committed
                wait_until((folder / catalog.step_folder(step) / COMMIT).exists)

        seconds.append(timed(save))
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
            folder.mkdir()
        dist.barrier()
    saver.close()
    return {"seconds": seconds[NUM_SLOTS:]}
