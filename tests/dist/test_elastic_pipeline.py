"""A pipeline's state through the nodes' memory alone, from layout to layout: boxes move between stages, moments too."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from regrow.accept.tiny import tiny_model
from regrow.config.schema import ModelConfig, OptimConfig, ParallelConfig, PipelineSchedule
from regrow.control.values import Version
from regrow.parallel.float8 import inner_tensor
from regrow.plan.mesh import Coordinates
from regrow.state.disk.catalog import open_checkpoint
from regrow.state.disk.tensors import CheckpointTensors
from regrow.state.entries import Entry, training_entries
from regrow.state.memory.held import is_whole
from regrow.state.memory.holders import Holder, Holders
from regrow.state.memory.reader import restore_snapshot
from regrow.state.memory.writer import Snapshots
from regrow.storage import Storage
from support.gloo import RankError, run_ranks
from support.keepers import RUN, SECRET, Node, write_checkpoint
from support.nodes import Nodes
from support.training import Training, build, run_steps, topology_of

OPTIM = OptimConfig(global_batch_seqs=12, num_slices=6)
MODEL = tiny_model(num_layers=6, dim=64)
TIED = replace(MODEL, tied=True)
LAYOUTS = {  # world size and how it is laid out
    "3 units": (3, ParallelConfig()),
    "2 stages": (2, ParallelConfig(pp=2)),
    "3 stages": (3, ParallelConfig(pp=3)),
    "2 x 2": (4, ParallelConfig(pp=2)),
    "interleaved": (4, ParallelConfig(pp=2, schedule=PipelineSchedule.interleaved)),
    "HSDP": (4, ParallelConfig(pp=2, dp_replicate=2)),
    "tp": (4, ParallelConfig(pp=2, tp=2)),
    "cp": (4, ParallelConfig(pp=2, cp=2)),
}
Taken = tuple[list[Entry], int, int]  # what a rank holds, the bytes it read of what this node has, and of others


def take(folders: list[str], generation: int, training: Training, holders: list[Holder]) -> Taken:
    """A rank's state: of two real steps, or restored from holders; its snapshot is taken."""
    rank, size = dist.get_rank(), dist.get_world_size()
    step = build(training)
    run_steps(step, training, range(1 if holders else 2))
    entries = training_entries(step.model, step.optimizer, inner_tensor=inner_tensor)
    place, folder, read = Coordinates(topology_of(training).mesh, rank), Path(folders[rank % len(folders)]), (0, 0)
    if holders:
        node = f"node-{folder.name[1:]}"
        found = restore_snapshot(
            entries, Holders.of(holders), node=node, folder=folder, secret=SECRET, reader=rank, place=place
        )
        assert found.scalars == {"step": 2}
        assert not found.problems
        read = found.own_bytes, found.peer_bytes
    writers = [other % len(folders) for other in range(size)].count(rank % len(folders))
    writer = Snapshots(folder, entries, coordinates=place, run_id=RUN, generation=generation, writers=writers)
    assert writer.begin(2, {"step": 2})
    writer.wait()
    writer.confirm(2)
    return entries, *read


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (MODEL, ("2 x 2", "3 units", "interleaved")),
        (TIED, ("3 stages", "2 stages", "tp")),
        *[
            pytest.param(model, layouts, marks=pytest.mark.long)
            for model, layouts in (
                (TIED, ("2 x 2", "3 units", "HSDP")),
                (MODEL, ("tp", "3 stages", "2 x 2")),
                (MODEL, ("HSDP", "interleaved", "3 stages")),
                (TIED, ("interleaved", "2 stages", "3 units")),
                (TIED, ("cp", "3 units", "cp")),
            )
        ],
    ],
)
def test_state_moves_between_stages_from_memory_with_a_node_lost_each_time_and_to_storage(
    tmp_path: Path, model: ModelConfig, layouts: tuple[str, ...]
) -> None:
    first: dict[str, torch.Tensor] = {}
    holders: list[Holder] = []
    nodes = Nodes(tmp_path, 4)
    try:
        for generation, layout in enumerate(layouts, start=1):
            (ranks, parallel), version = LAYOUTS[layout], Version(generation, 2)
            training = Training(model, parallel, OPTIM, seed=generation)
            taken = run_ranks(take, ranks, nodes.folders()[:ranks], generation, training, holders)
            first = first or whole([entries for entries, _, _ in taken])
            assert {entry.box.name for entries, _, _ in taken for entry in entries} == first.keys()
            for entries, own, peer in taken:
                for entry in entries:
                    wanted = first[entry.box.name][entry.box.slices]
                    assert torch.equal(entry.memory.view(entry.box.sizes), wanted), f"{entry.box}, {layout}"
                needed = sum(entry.memory.nbytes for entry in entries)
                assert not holders or needed <= own + peer <= max(1.02 * needed, needed + 2 * 16384 * len(entries))
            nodes.wait_for(generation, min(ranks, len(nodes.keepers)))
            own_files = [each for each in nodes.holders(generation) if not each.held.is_copy]
            held = [each.held for each in own_files]
            assert is_whole(version, held)
            assert is_whole(version, held[1:]) == (parallel.dp_replicate > 1)
            assert set(again(own_files)) == set(own_files)
            assert_stored(tmp_path / f"stored-{generation}", nodes, version, first)
            nodes.lose(next(iter(nodes.keepers)))
            holders = nodes.holders(generation)
            assert is_whole(version, [each.held for each in holders])
            nodes.set_peers()
    finally:
        nodes.close()


def again(holders: list[Holder]) -> list[Holder]:
    """As they come to a rank, by JSON."""
    return list(Holders.of_json(Holders.of(holders).to_json()))


def whole(ranks: list[list[Entry]]) -> dict[str, torch.Tensor]:
    full: dict[str, torch.Tensor] = {}
    for entry in (entry for entries in ranks for entry in entries):
        tensor = full.setdefault(entry.box.name, torch.full(entry.box.shape, torch.nan, dtype=entry.memory.dtype))
        tensor[entry.box.slices] = entry.memory.view(entry.box.sizes)
    return full


def assert_stored(folder: Path, nodes: Nodes, version: Version, state: dict[str, torch.Tensor]) -> None:
    """What keepers write of a step is all of it, each element once."""
    storage = Storage.at(folder)
    reports = [report for report in nodes.reports if report.version == version]
    there = [Node(nodes.keepers[report.node], [report]) for report in reports]
    write_checkpoint(there, storage, version.step, version.generation)
    index = open_checkpoint(storage, version.step)
    assert list(index.tensors) == sorted(state)
    assert index.num_bytes - sum(file.header_bytes for file in index.files) == sum(t.nbytes for t in state.values())
    tensors = CheckpointTensors(storage, index, lambda num_bytes: None)
    for name, tensor in state.items():
        assert torch.equal(tensors.whole(name), tensor), name


def test_a_snapshot_of_more_blocks_than_the_pipeline_has_is_refused(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    try:
        run_ranks(take, 2, nodes.folders(), 1, Training(tiny_model(num_layers=7), ParallelConfig(pp=2), OPTIM), [])
        nodes.wait_for(1, 2)
        fewer = Training(tiny_model(num_layers=6), ParallelConfig(pp=2), OPTIM)
        with pytest.raises(RankError, match=r"layers\.6\.\S+: the snapshot has Box\(.*the model no such tensor"):
            run_ranks(take, 2, nodes.folders(), 2, fewer, nodes.holders(1))
    finally:
        nodes.close()
