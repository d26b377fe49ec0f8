from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from regrow.config.schema import Dtype, ModelConfig
from regrow.model.llama import Llama
from regrow.model.size import num_matmul_params, num_params, parameter_shapes, rank_state_bytes
from regrow.plan.boxes import Box
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.plan.placement import placed_all, stage_of

CONF = Path(__file__).parents[2] / "conf" / "model"

# Llama 3.1 and 3.2: the safetensors metadata of Meta's repositories on Hugging Face; 1_8b: IBM's fms-fsdp; others: ours
PUBLISHED = {
    "debug": 5_048_576,
    "drill": 1_417_856,
    "150m": 151_908_096,
    "1b": 1_235_814_400,
    "1_8b": 1_884_391_424,
    "3b": 3_212_749_824,
    "8b": 8_030_261_248,
    "70b": 70_553_706_496,
    "405b": 405_853_388_800,
}


def model_config(name: str) -> ModelConfig:
    loaded = OmegaConf.load(CONF / f"{name}.yaml")
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), loaded.get("model", loaded)))
    assert isinstance(config, ModelConfig)
    return config


def test_every_model_of_the_config_has_a_published_size():
    assert {path.stem for path in CONF.glob("*.yaml")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_equals_the_published_one(name):
    config = model_config(name)
    with torch.device("meta"):
        model = Llama(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]
    assert list(parameter_shapes(config).items()) == [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert num_params(config) == PUBLISHED[name]
    assert config.name == name


@pytest.mark.parametrize("name", PUBLISHED)
def test_rope_and_widths_fit_together(name):
    config = model_config(name)
    assert config.dim % config.num_heads == 0
    assert config.num_heads % config.num_kv_heads == 0
    assert config.rope_theta == 500000.0


def test_matmul_parameters_leave_out_the_input_embedding_only():
    tied, untied = model_config("1b"), model_config("8b")
    assert num_matmul_params(tied) == num_params(tied)
    assert num_matmul_params(untied) == num_params(untied) - 128256 * 4096


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("70b", MeshShape(1, 448)),
        ("1b", MeshShape(1, 448)),  # tied
        ("8b", MeshShape(2, 24, tp=4)),
        ("405b", MeshShape(1, 16384)),  # more ranks than some parameters have rows
        ("8b", MeshShape(1, 3, pp=4, blocks=(8, 9, 9, 6))),
        ("1b", MeshShape(2, 5, pp=2, blocks=(4, 5, 5, 2), tp=2)),
    ],
)
def test_a_ranks_state_is_that_of_the_rank_that_holds_most(name, mesh):
    """As FSDP2 cuts: the first rank has a row more of each parameter whose rows do not divide."""
    wholes = [Box.whole(*each) for each in parameter_shapes(model_config(name)).items()]
    held = []
    for pipeline_rank in range(mesh.pp):
        at = Coordinates(mesh, pipeline_rank * mesh.world_size // mesh.pp)
        mine = [whole for whole in wholes if stage_of(whole.name, mesh) == pipeline_rank]
        if model_config(name).tied and pipeline_rank == mesh.pp - 1 > 0:  # a copy, which is the output
            mine += [whole for whole in wholes if whole.name == "embed.weight"]
        held.append(sum(box.num_elements for box in placed_all(mine, at)))
    assert rank_state_bytes(model_config(name), Dtype.float32, mesh) == 12 * max(held)
    assert rank_state_bytes(model_config(name), Dtype.bfloat16, mesh) == 8 * max(held)
