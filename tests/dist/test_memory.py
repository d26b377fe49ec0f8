"""Real training state through the nodes' memory alone: FSDP2 and HSDP, float8 all-gather weights, a node gone."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from regrow.control.replicas import Replicas, Unequal
from regrow.control.values import Version
from regrow.state.memory.holders import Holder, Holders
from regrow.state.memory.reader import restore_snapshot
from regrow.state.memory.writer import Snapshots
from support.gloo import run_ranks
from support.keepers import RUN, SECRET
from support.nodes import Nodes
from support.state import entries_after, whole
from support.verifying import snapshots_of_replicas


def take(
    folders: list[str], generation: int, replicas: int, tp: int, float8: bool, even: bool, holders: list[Holder]
) -> dict[str, torch.Tensor]:
    """Some ranks' state: of two real steps, or restored from holders; its snapshot is taken. The whole of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    steps = 1 if holders else 2
    entries, coordinates, _ = entries_after(steps, replicas=replicas, tp=tp, float8=float8, even=even, seed=generation)
    folder = Path(folders[rank % len(folders)])
    if holders:
        result = restore_snapshot(
            entries, Holders.of(holders), node=f"node-{folder.name[1:]}", folder=folder, secret=SECRET, reader=rank
        )
        assert result.scalars == {"step": 2}
        assert not result.problems
    writers = [other % len(folders) for other in range(size)].count(rank % len(folders))
    writer = Snapshots(folder, entries, coordinates=coordinates, run_id=RUN, generation=generation, writers=writers)
    assert writer.begin(2, {"step": 2})
    writer.wait()
    writer.confirm(2)
    return whole(entries)


@pytest.mark.parametrize(("ranks", "replicas", "odd", "decided"), [(3, 3, (1,), True), (4, 2, (1, 3), False)])
def test_a_bit_flipped_in_a_replica_s_weights_is_found_in_the_next_snapshot(
    tmp_path: Path, ranks: int, replicas: int, odd: tuple[int, ...], decided: bool
) -> None:
    """By the reports of real keepers, of real HSDP replicas of one rank, and of two."""
    nodes, found = Nodes(tmp_path, ranks), Replicas()
    try:
        run_ranks(snapshots_of_replicas, ranks, nodes.folders(), RUN, replicas, 1)
        give_up_at = time.monotonic() + 30
        while len(nodes.reports) < 3 * ranks:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        unequal = [found.take([report]) for report in sorted(nodes.reports, key=lambda each: each.version)]
        assert set(unequal) == {None, Unequal(Version(1, 3), odd, decided)}
    finally:
        for node in list(nodes.keepers):
            nodes.lose(node)


@pytest.mark.parametrize(
    ("float8", "layouts"),
    [
        (True, [(3, 1, 1), (2, 1, 1), (3, 1, 1)]),
        (False, [(4, 2, 1), (5, 1, 1), (4, 2, 1)]),
        (True, [(6, 1, 2), (4, 1, 2), (6, 1, 2)]),
        pytest.param(False, [(4, 1, 2), (8, 2, 2)], marks=pytest.mark.long),
        (False, [(4, 2, 1), (4, 1, 2), (3, 1, 1)]),
    ],
)
def test_state_moves_from_layout_to_layout_and_back_without_storage_and_with_a_node_lost_each_time(
    tmp_path: Path, float8: bool, layouts: list[tuple[int, int, int]]
) -> None:
    first: dict[str, torch.Tensor] = {}
    holders: list[Holder] = []
    nodes, even = Nodes(tmp_path, 4), any(tp > 1 for _, _, tp in layouts)
    try:
        for generation, (ranks, replicas, tp) in enumerate(layouts, start=1):
            saved = run_ranks(take, ranks, nodes.folders()[:ranks], generation, replicas, tp, float8, even, holders)[0]
            first = first or saved
            assert saved.keys() == first.keys()
            for name, tensor in first.items():
                assert torch.equal(saved[name], tensor), name
            nodes.wait_for(generation, min(ranks, len(nodes.keepers)))
            nodes.lose(next(iter(nodes.keepers)))
            holders = nodes.holders(generation)
            nodes.set_peers()
    finally:
        nodes.close()
