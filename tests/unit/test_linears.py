"""Which linears there are, and which become float8 ones: what is said is what is done."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from regrow.accept.tiny import tiny_model
from regrow.config.schema import Float8, ModelConfig
from regrow.errors import ConfigError
from regrow.model.linears import block_linears, float8_line
from regrow.model.llama import Llama
from regrow.parallel.float8 import apply_float8
from support.ragged import ragged_model

UNEVEN = replace(tiny_model(), num_heads=4, num_kv_heads=1, dim=48, ffn_dim=40)  # keys of 12 rows


def linears_of(model: Llama) -> dict[str, nn.Linear]:
    found = {name.rpartition(".")[2]: module for name, module in model.layers[0].named_modules()}
    return {name: module for name, module in found.items() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("config", [tiny_model(), ragged_model(), UNEVEN], ids=["tiny", "ragged", "uneven"])
def test_the_linears_of_a_block_are_the_models(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = Llama(config)
    assert block_linears(config) == {name: tuple(each.weight.shape) for name, each in linears_of(model).items()}


def test_what_is_said_to_be_float8_is() -> None:
    with torch.device("meta"):
        model = Llama(UNEVEN)
    apply_float8(model, Float8.rowwise, device=torch.device("cpu"), gather=False)
    converted = [name for name, each in linears_of(model).items() if type(each).__name__ == "Float8Linear"]
    assert sorted(converted) == ["wo", "wq"]
    assert float8_line(UNEVEN, "rowwise") == (
        "float8 rowwise in wq, wo of each block; not in wk (12 x 48: not multiples of 16), "
        "wv (12 x 48: not multiples of 16), w1 (40 x 48: not multiples of 16), w3 (40 x 48: not multiples of 16), "
        "w2 (48 x 40: not multiples of 16), embedding, output"
    )
    assert float8_line(replace(UNEVEN, dim=40, num_heads=5), "rowwise").startswith("float8 rowwise nowhere; not in wq")


def test_a_gpu_without_float8_is_refused_and_not_emulated_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    model = Llama(tiny_model())
    with pytest.raises(
        ConfigError, match=r"needs a GPU of compute capability 8\.9 or higher, and NVIDIA A100.* has 8\.0"
    ):
        apply_float8(model, Float8.tensorwise, device=torch.device("cuda", 0), gather=False)
