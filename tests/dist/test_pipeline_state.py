"""A pipeline's state in storage: written by stages, restored into any other layout bitwise, each byte read once."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from regrow.accept.tiny import tiny_model
from regrow.config.schema import ModelConfig, OptimConfig, ParallelConfig, PipelineSchedule
from regrow.parallel.float8 import inner_tensor
from regrow.parallel.fsdp import build_mesh, coordinates_of, replica_group
from regrow.plan.mesh import Coordinates
from regrow.state.disk import catalog, store
from regrow.state.disk.tensors import CheckpointTensors
from regrow.state.entries import Entry, Progress, training_entries
from regrow.storage import Storage
from support.gloo import RankError, run_ranks
from support.training import Training, build, run_steps, topology_of

RUN = "0123456789abcdef"
OPTIM = OptimConfig(global_batch_seqs=12, num_slices=6)
MODEL = tiny_model(num_layers=6)
TIED = tiny_model(num_layers=6, tied=True)
WHOLE = ParallelConfig()
LAYOUTS = {  # world size and how it is laid out
    "2 stages": (2, ParallelConfig(pp=2)),
    "interleaved x 2 units": (4, ParallelConfig(pp=2, schedule=PipelineSchedule.interleaved)),
    "3 stages": (3, ParallelConfig(pp=3)),
    "HSDP": (4, ParallelConfig(pp=2, dp_replicate=2)),
    "tp": (4, ParallelConfig(pp=2, tp=2)),
    "cp": (4, ParallelConfig(cp=2)),
    "3 units": (3, WHOLE),
}


def state_of(training: Training, steps: int) -> tuple[list[Entry], Coordinates, dist.ProcessGroup | None]:
    step = build(training)
    run_steps(step, training, range(steps))
    mesh = build_mesh(topology_of(training).mesh, "cpu")
    entries = training_entries(step.model, step.optimizer, inner_tensor=inner_tensor)
    return entries, coordinates_of(mesh), replica_group(mesh)


def save(folder: str, training: Training) -> list[str]:
    entries, coordinates, _ = state_of(training, 2)
    scalars = {"step": 2, "cursor": 24, "tokens_seen": 96}
    store.save(Storage.at(folder), entries, scalars=scalars, run_id=RUN, generation=1, coordinates=coordinates)
    return [entry.box.name for entry in entries]


def newest(
    folder: str, entries: list[Entry], coordinates: Coordinates, replicas: dist.ProcessGroup | None
) -> Progress | None:
    """What is restored of the one checkpoint, which is sound."""
    problems: list[str] = []
    progress = store.restore_newest(
        Storage.at(folder),
        [2],
        entries,
        coordinates,
        replicas,
        run_id=RUN,
        global_batch_seqs=12,
        damaged=lambda step, text: problems.append(text),
    )
    assert not problems
    return progress


def restore(folder: str, training: Training) -> tuple[list[Entry], int]:
    """What a rank holds then, and the bytes that it read."""
    entries, coordinates, replicas = state_of(training, 1)  # another state, to be overwritten whole
    num_bytes = store.restore(Storage.at(folder), catalog.open_checkpoint(Storage.at(folder), 2), entries, coordinates)
    assert newest(folder, entries, coordinates, replicas) is not None
    return entries, num_bytes


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        (MODEL, "2 stages", ("3 stages", "tp")),
        (MODEL, "interleaved x 2 units", ("HSDP", "3 units")),
        (MODEL, "3 units", ("interleaved x 2 units", "2 stages")),
        (TIED, "2 stages", ("3 stages", "3 units")),
        *[
            pytest.param(TIED, before, tuple(LAYOUTS), marks=pytest.mark.long, id=f"{before}, tied, to all")
            for before in ("3 stages", "HSDP", "tp", "cp")
        ],
    ],
)
def test_state_moves_between_stages_bitwise_and_each_byte_is_read_once(
    tmp_path: Path, model: ModelConfig, before: str, after: tuple[str, ...]
) -> None:
    world_size, parallel = LAYOUTS[before]
    names = run_ranks(save, world_size, str(tmp_path), Training(model, parallel, OPTIM, seed=1))
    index = catalog.open_checkpoint(Storage.at(tmp_path), 2)
    assert index.tensors.keys() == {name for each in names for name in each}
    assert list(index.tensors) == sorted(index.tensors)
    tensors = CheckpointTensors(Storage.at(tmp_path), index, lambda num_bytes: None)
    saved = {name: tensors.whole(name) for name in index.tensors}
    payload = index.num_bytes - sum(file.header_bytes for file in index.files)
    assert payload == sum(tensor.nbytes for tensor in saved.values())  # replicas and stages write each element once
    for layout in after:
        world_size, parallel = LAYOUTS[layout]
        found = run_ranks(restore, world_size, str(tmp_path), Training(model, parallel, OPTIM, seed=2))
        assert {entry.box.name for entries, _ in found for entry in entries} == saved.keys()
        for entries, num_bytes in found:
            for entry in entries:
                want = saved[entry.box.name][entry.box.slices]
                assert torch.equal(entry.memory.view(entry.box.sizes), want), f"{entry.box} {before} -> {layout}"
            needed = sum(entry.memory.nbytes for entry in entries) / parallel.dp_replicate
            assert num_bytes <= max(1.02 * needed, needed + 16384 * len(entries))  # whole chunks of small tensors


def test_a_checkpoint_of_more_blocks_than_the_pipelines_is_refused(tmp_path: Path) -> None:
    """No rank of a pipeline knows by itself which tensors are too many."""
    more = Training(tiny_model(num_layers=7), WHOLE, OPTIM)
    run_ranks(save, 1, str(tmp_path), more)
    with pytest.raises(RankError, match="holds 198 tensors, the model has 171"):
        run_ranks(restore_newest, 2, str(tmp_path), Training(MODEL, ParallelConfig(pp=2), OPTIM))


def restore_newest(folder: str, training: Training) -> None:
    newest(folder, *state_of(training, 0))
