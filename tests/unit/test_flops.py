import pytest
import torch

from regrow.config.schema import Dtype, ModelConfig
from regrow.forecast.devices import DEVICES, find_device
from regrow.model.size import flops_per_token
from regrow.runtime.hardware.peak import measure_peak_flops, peak_flops


def test_flops_per_token_of_llama_3_8b_at_8192_tokens():
    config = ModelConfig(vocab_size=128256, dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336)
    # 6 * 7,504,924,672 (8,030,261,248 less the input embedding) + 12 * 32 * 4096 * 8192
    assert flops_per_token(config, 8192) == 45_029_548_032 + 12_884_901_888


def test_a_given_peak_is_used_and_said_to_be_given():
    peak = peak_flops(torch.device("cpu"), Dtype.float32, 123.0)
    assert peak.flops == 123e12
    assert peak.source == "given"


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB300", 2500),
    ],
)
def test_known_gpus_are_found_by_the_name_that_torch_gives(name, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), Dtype.bfloat16).flops == tflops * 1e12


def test_each_gpu_is_found_by_its_own_name():
    """A name that contains another one stands before it."""
    assert [find_device(f"NVIDIA {device.name}") for device in DEVICES] == list(DEVICES)


def test_a_measured_peak_is_plausible_and_says_what_was_measured():
    peak = peak_flops(torch.device("cpu"), Dtype.float32)
    assert 1e9 < peak.flops < 1e14
    assert "float32 matrix product on cpu" in peak.source
    assert measure_peak_flops(torch.device("cpu"), Dtype.float32, budget_s=0.005) > 1e9
