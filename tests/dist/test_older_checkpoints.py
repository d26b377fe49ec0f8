"""Checkpoints that older code wrote are restored bit for bit, into layouts that they were not written in."""

from pathlib import Path
from zlib import crc32

import pytest
import torch

from regrow.config.schema import Dtype, ModelConfig, OptimConfig, ParallelConfig
from regrow.parallel.float8 import inner_tensor
from regrow.parallel.fsdp import build_mesh, coordinates_of, replica_group
from regrow.plan.mesh import plan_mesh
from regrow.state.disk import catalog, store
from regrow.state.disk.catalog import open_checkpoint
from regrow.state.disk.tensors import CheckpointTensors
from regrow.state.entries import training_entries
from regrow.storage import Storage
from regrow.train.build import build_step
from support.gloo import run_ranks
from support.state import whole

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"  # its README says how they were made
RUN = "0123456789abcdef"
MODEL = ModelConfig(name="golden", vocab_size=14, dim=4, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=6)
VERSIONS = {
    2: Dtype.float32,
    3: Dtype.bfloat16,
    4: Dtype.float32,
}  # and of step of the same number: how it keeps moments


def expected(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    index = torch.arange(torch.Size(shape).numel())
    return ((31 * index + crc32(name.encode())) % 251 / 8).view(shape)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_byte_of_an_older_checkpoint_is_read_in_its_place(version: int) -> None:
    index = open_checkpoint(Storage.at(GOLDEN), version, run_id=RUN)
    assert index.scalars == {"step": version, "cursor": 12 * version, "tokens_seen": 96 * version}
    assert len(index.tensors) == 36
    catalog.verify(Storage.at(GOLDEN), index, lambda num_bytes: None)
    tensors = CheckpointTensors(Storage.at(GOLDEN), index, lambda num_bytes: None)
    for name, (_, shape) in index.tensors.items():
        assert torch.equal(tensors.whole(name).float(), expected(name, shape)), name


def restored(version: int, replicas: int, tp: int) -> dict[str, torch.Tensor]:
    mesh = build_mesh(plan_mesh(torch.distributed.get_world_size(), replicas, tp), "cpu")
    optim = OptimConfig(moments=VERSIONS[version])
    step = build_step(MODEL, ParallelConfig(tp=tp), optim, mesh=mesh, device=torch.device("cpu"), seed=0)
    entries = training_entries(step.model, step.optimizer, inner_tensor=inner_tensor)
    index = open_checkpoint(Storage.at(GOLDEN), version, run_id=RUN)
    store.restore(Storage.at(GOLDEN), index, entries, coordinates_of(mesh))
    store.share_parts(entries, coordinates_of(mesh), replica_group(mesh))
    return whole(entries)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("world_size", "replicas", "tp"), [(1, 1, 1), (3, 1, 1), (4, 2, 1), (2, 1, 2), (4, 1, 2)])
def test_an_older_checkpoint_is_restored_into_any_layout(version: int, world_size: int, replicas: int, tp: int) -> None:
    state = run_ranks(restored, world_size, version, replicas, tp)[0]
    assert len(state) == 36
    for name, tensor in state.items():
        assert torch.equal(tensor.float(), expected(name, tuple(tensor.shape))), name
