"""Weights that Megatron-Core saved itself: the loss that they have there, they have here."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor

from regrow.config.schema import Dtype, ModelConfig, OptimConfig, ParallelConfig
from regrow.errors import CheckpointError
from regrow.optim.adamw import build_optimizer
from regrow.parallel.apply import build_model
from regrow.parallel.float8 import inner_tensor
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.record.run_folder import checkpoints_of, read_record
from regrow.state.disk import store
from regrow.state.disk.catalog import choose
from regrow.state.disk.tensors import CheckpointTensors
from regrow.state.entries import training_entries
from regrow.state.exchange import runs
from regrow.state.exchange.dcp_folder import DcpFolder
from regrow.state.exchange.runs import import_of_model
from regrow.storage import Storage
from regrow.train.step import whole_loss

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron"  # its README says how it was made
FOLDER = GOLDEN / "iter_0000000"
MODEL = ModelConfig(name="dense", vocab_size=40, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model, in conf/model as far as imports see."""
    monkeypatch.setattr(runs, "read_model", lambda name: MODEL)


def imported(run: Path, source: Path = FOLDER, **options: Any) -> str:
    return import_of_model(
        "megatron", str(source), str(run), model="dense", start=lambda total: lambda num_bytes: None, **options
    )


def saved(folder: Path) -> dict[str, Tensor]:
    tensors = CheckpointTensors(*choose(*checkpoints_of(str(folder))), lambda num_bytes: None)
    return {name: tensors.whole(name) for name in tensors.index.tensors}


def test_the_loss_there_is_the_loss_here(tmp_path: Path) -> None:
    told = imported(tmp_path / "run", moments=Dtype.bfloat16)
    assert "begins at step 0 with the weights" in told
    model = build_model(MODEL, ParallelConfig(), mesh=None, device="cpu", seed=0)
    optimizer = build_optimizer(model, OptimConfig(moments=Dtype.bfloat16))
    entries = training_entries(model, optimizer, inner_tensor=inner_tensor)
    checkpoints, index = choose(*checkpoints_of(str(tmp_path / "run")))
    store.restore(checkpoints, index, entries, Coordinates(MeshShape(1, 1)))
    theirs = json.loads((GOLDEN / "loss.json").read_text())
    rows = torch.tensor(theirs["rows"])
    loss = whole_loss(model, rows[:, :-1], rows[:, 1:]) / rows[:, 1:].numel()
    assert loss.item() == pytest.approx(theirs["loss"], rel=1e-6)
    record = read_record(Storage.at(tmp_path / "run"))
    assert record is not None
    assert record["identity"]["optim.moments"] == "bfloat16"


def another(target: Path, rename: Any = lambda key, tensor: [(key, tensor)], **changed: Tensor) -> None:
    """The same weights by other names, or with other tensors."""
    folder = DcpFolder(FOLDER)
    state = {name: tensor for key in folder.tensors for name, tensor in rename(key, folder.tensor(key))}
    torch_dcp.save(state | changed, checkpoint_id=target, no_dist=True)


def apart(key: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Each layer's by itself, norms by the names that they have without Transformer Engine."""
    inner = key.removeprefix("decoder.layers.")
    if inner == key:
        return [(key, tensor)]
    inner = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }.get(inner, inner)
    return [(f"decoder.layers.{layer}.{inner}", each.clone()) for layer, each in enumerate(tensor)]


def padded(key: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The vocabulary filled up to a multiple, and an optimizer's state beside the weights."""
    if key.startswith(("embedding", "output")):
        tensor = torch.cat([tensor, torch.full((8, tensor.shape[1]), 7.0)])
    return [(key, tensor), (f"optimizer.state.exp_avg.{key}", torch.ones(1))]


@pytest.mark.parametrize("how", [apart, padded])
def test_other_ways_to_save_the_same_weights(how: Any, tmp_path: Path) -> None:
    another(tmp_path / "iter_0000002", how)
    imported(tmp_path / "other", tmp_path / "iter_0000002")
    imported(tmp_path / "run")
    other, run = saved(tmp_path / "other"), saved(tmp_path / "run")
    assert other.keys() == run.keys()
    assert all(torch.equal(other[name], tensor) for name, tensor in run.items())


def test_what_pads_the_vocabulary_is_left_out_and_said(tmp_path: Path) -> None:
    another(tmp_path / "iter_0000002", padded)
    keys = ("embedding.word_embeddings.weight", "output_layer.weight")
    said = " and ".join(f"8 rows of {key}" for key in keys)
    assert f"Left out: {said}, which pad the vocabulary of 40." in imported(
        tmp_path / "padded", tmp_path / "iter_0000002"
    )
    assert "Left out" not in imported(tmp_path / "run")


@pytest.mark.parametrize("key", ["embedding.word_embeddings.weight", "output_layer.weight"])
def test_more_rows_than_pad_a_vocabulary_are_refused_before_anything_is_written(key: str, tmp_path: Path) -> None:
    """8192: Megatron-Core's multiple of 128, on 64 ranks of tensor parallelism. Before, any number was cut off."""
    another(tmp_path / "most", **{key: torch.zeros(8192, 16)})
    assert f"Left out: 8,152 rows of {key}, " in imported(tmp_path / "run", tmp_path / "most")
    another(tmp_path / "more", **{key: torch.zeros(8193, 16)})
    with pytest.raises(CheckpointError, match=rf"{key} has 8,193 rows, .* vocabulary of 40, .* at most 8,192"):
        imported(tmp_path / "refused", tmp_path / "more")
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_layers": 3}, "norm_weight is of 2 layers, the model dense has 3"),
        ({"ffn_dim": 32}, r"mlp.linear_fc1.weight is \[48, 16\], the model dense has \[64, 16\]"),
        ({"vocab_size": 64}, r"word_embeddings.weight is \[40, 16\], the model dense has \[64, 16\]"),
        ({"num_kv_heads": 4}, r"linear_qkv.weight is \[32, 16\], the model dense has \[48, 16\]"),
        ({"tied": True}, "holds output_layer.weight, which the model dense does not have"),
    ],
)
def test_another_model_is_refused(
    changed: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runs, "read_model", lambda name: ModelConfig(**asdict(MODEL) | changed))
    with pytest.raises(CheckpointError, match=says):
        imported(tmp_path / "run")
    assert read_record(Storage.at(tmp_path / "run")) is None


def test_what_is_no_plain_llama_is_refused(tmp_path: Path) -> None:
    def biased(key: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        return [(key, tensor), (key.replace(".weight", ".bias"), torch.zeros(2))]

    another(tmp_path / "iter_0000002", biased)
    with pytest.raises(CheckpointError, match=r"\.bias, which the model dense does not have"):
        imported(tmp_path / "run", tmp_path / "iter_0000002")
    torch_dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(CheckpointError, match="name a folder that Megatron-Core's dist_checkpointing wrote"):
        imported(tmp_path / "run", tmp_path / "other")
