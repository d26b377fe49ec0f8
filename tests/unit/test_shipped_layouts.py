"""Every shipped model on every shipped cluster, at every world size: boxes of the ranks of a replica cover each tensor
exactly once. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest

from regrow.config.check import check, world_sizes
from regrow.config.schema import PretrainConfig
from regrow.config.stages import stages_per_rank
from regrow.config.store import pretrain_config
from regrow.errors import RegrowError
from regrow.model.size import parameter_shapes
from regrow.plan.boxes import Box
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.plan.placement import dims_of, num_copies, placed, stage_of

CONF = Path(__file__).parents[2] / "conf"
CLUSTERS = sorted(path.stem for path in (CONF / "cluster").glob("*.yaml"))
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
SAMPLED = 1  # sizes of a cluster in `make test`, beside the first, the last and the full group

Split = tuple[tuple[tuple[str, int], ...], tuple[int, ...]]  # dims of a tensor that axes split, and their sizes


@cache
def composed(argument: str) -> PretrainConfig:
    return pretrain_config([argument])


def config_of(cluster: str, model: str) -> PretrainConfig | None:
    """None where the two do not go together, which one line says before anything starts."""
    config = replace(composed(f"+cluster={cluster}"), model=composed(f"model={model}").model)
    try:
        check(config)
    except RegrowError:
        return None
    return config


def meshes(config: PretrainConfig, *, every: bool) -> dict[int, MeshShape]:
    """By world size, those of groups that the table has: all, or a few."""
    table = check(config)
    sizes = sorted(table)
    if not every:
        taken = sorted(set(world_sizes(config, table).values()))
        more = Random(config.cluster.name).sample(sizes, min(SAMPLED, len(sizes)))
        sizes = sorted({sizes[0], sizes[-1], taken[-1], *more})
    return {size: table[size].mesh for size in sizes}


def counts(boxes: Iterable[Box], shape: tuple[int, ...]) -> np.ndarray:
    """How many boxes hold each cell between any two neighbouring borders of boxes."""
    held = [[(each.start, each.stop) for each in box.slices] for box in boxes if box.num_elements]
    borders = [sorted({0, size, *(end for box in held for end in box[dim])}) for dim, size in enumerate(shape)]
    cell = [{border: number for number, border in enumerate(each)} for each in borders]
    found = np.zeros([len(each) - 1 for each in borders], int)
    for box in held:
        found[tuple(slice(of[first], of[last]) for of, (first, last) in zip(cell, box, strict=True))] += 1
    return found


def splits(names: dict[str, tuple[int, ...]]) -> Iterator[tuple[Split, str]]:
    """A tensor for each way in which axes cut one: other tensors differ in what stays whole."""
    seen = set()
    for name, shape in names.items():
        dims = dims_of(name)
        split = tuple(sorted(dims.items())), tuple(shape[dim] for dim in sorted(set(dims.values())))
        if split not in seen:
            seen.add(split)
            yield split, name


def check_boxes(name: str, shape: tuple[int, ...], mesh: MeshShape) -> None:
    of_replica = mesh.dp_shard * mesh.tp
    whole = Box.whole(f"optim/exp_avg/{name}", shape)
    ranks = [Coordinates(mesh, rank) for rank in range(of_replica)]
    holders = [at for at in ranks if num_copies(name, at)[0] == 0]  # norms are whole on each rank of tp
    boxes = [placed(whole, at) for at in holders]
    assert (counts(boxes, shape) == 1).all(), f"{name} {shape} on {mesh}"
    for other in {mesh.world_size // of_replica // 2, mesh.world_size // of_replica - 1}:  # another replica or stage
        for rank in (0, of_replica // 2, of_replica - 1):
            assert placed(whole, Coordinates(mesh, other * of_replica + rank)) == placed(whole, ranks[rank])


def check_stages(names: Iterable[str], mesh: MeshShape, config: PretrainConfig) -> None:
    stages = [stage_of(name, mesh) for name in names]
    assert None not in stages, "each tensor has a stage"
    assert set(stages) == set(range(mesh.pp)), "and each rank of a pipeline something"
    if mesh.pp > 1:
        assert len(mesh.blocks) == mesh.pp * stages_per_rank(config.parallel)
        assert sum(mesh.blocks) == config.model.num_layers


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.long, id="all sizes"), False])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_boxes_of_a_replica_cover_each_tensor_of_each_model_exactly_once_at(cluster: str, every: bool) -> None:
    tried, done = 0, set()
    for config in filter(None, (config_of(cluster, model) for model in MODELS)):
        shapes = parameter_shapes(config.model)
        for mesh in meshes(config, every=every).values():
            tried += 1
            if (key := (mesh.pp, mesh.blocks, config.model.num_layers)) not in done:
                done.add(key)
                check_stages(shapes, mesh, config)
            for split, name in splits(shapes):
                if (cut := (mesh.dp_shard, mesh.tp, split)) not in done:
                    done.add(cut)
                    check_boxes(name, shapes[name], mesh)
    assert tried, "no model goes with this cluster"
