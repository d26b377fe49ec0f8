"""What torch.distributed.checkpoint saved on several ranks can be imported: tensors in shards, some of them empty."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from regrow.parallel.fsdp import build_mesh
from regrow.plan.mesh import plan_mesh
from regrow.record.run_folder import checkpoints_of
from regrow.state.disk.catalog import choose
from regrow.state.disk.tensors import CheckpointTensors
from regrow.state.exchange.dcp import ExportedState
from support.gloo import run_ranks
from support.ragged import ragged_model
from support.runs import save_run


def saved(folder: Path) -> dict[str, Tensor]:
    tensors = CheckpointTensors(*choose(*checkpoints_of(str(folder))), lambda num_bytes: None)
    return {name: tensors.whole(name) for name in tensors.index.tensors}


def save_sharded(source: str, target: str) -> None:
    """Save the same state as torch does it on several ranks: every tensor in shards."""
    mesh = build_mesh(plan_mesh(world_size=3, dp_replicate=1), "cpu")
    state: dict[str, Any] = {
        "model": {},
        "optim": {"state": {}},
        "scalars": {"step": 2, "cursor": 24, "tokens_seen": 192},
    }
    for name, tensor in saved(Path(source)).items():
        rows = [*tensor.chunk(3), *[tensor[:0]] * 3]
        part = DTensor.from_local(
            rows[mesh.get_local_rank()], mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride(), run_check=False
        )
        kind, _, parameter = name.partition("/")
        if kind == "model":
            state["model"][parameter] = part
        else:
            moment, _, parameter = parameter.partition("/")
            state["optim"]["state"].setdefault(parameter, {})[moment] = part
    state["run"] = '{"identity": {}, "manifest_sha256": null}'
    torch_dcp.save(state, checkpoint_id=target)


def test_what_torch_saved_in_shards_is_put_together(tmp_path: Path) -> None:
    save_run(tmp_path / "run", ragged_model())
    run_ranks(save_sharded, 3, str(tmp_path / "run"), str(tmp_path / "sharded"))
    assert len(list((tmp_path / "sharded").glob("*.distcp"))) == 3
    state = ExportedState(tmp_path / "sharded")
    entries = {entry.box.name: entry for entry in state.entries(lambda num_bytes: None)}
    before = saved(tmp_path / "run")
    assert entries.keys() == before.keys()
    for name, tensor in before.items():
        assert entries[name].box.shape == tuple(tensor.shape)
        assert torch.equal(entries[name].memory.view(tensor.shape), tensor), name
