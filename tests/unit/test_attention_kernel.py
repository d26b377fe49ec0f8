"""The kernel that computes attention over whole rows is the one that was chosen."""

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

from regrow.accept.tiny import tiny_model
from regrow.config.schema import AttentionKernel, ParallelConfig
from regrow.model.attention import attend
from regrow.parallel.apply import ON_HOPPER, attention_kernels, build_model

TOKENS = torch.arange(24).reshape(2, 12)


def operators(kernel: AttentionKernel) -> set[str]:
    """Those of a forward on a CPU."""
    model = build_model(tiny_model(), ParallelConfig(attention=kernel), mesh=None, device="cpu", seed=0)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(TOKENS)
    return {event.key for event in profiled.key_averages()}


def test_flash_attention_is_used_where_it_is_chosen() -> None:
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in operators(AttentionKernel.flash)


@pytest.mark.parametrize("kernel", [AttentionKernel.cudnn, AttentionKernel.efficient])
def test_no_other_kernel_takes_the_place_of_one_that_is_not_there(kernel: AttentionKernel) -> None:
    with pytest.raises(RuntimeError, match=r"No (viable backend|available kernel)"):
        operators(kernel)


@pytest.mark.parametrize(
    ("chosen", "capability", "kernels"),
    [
        (AttentionKernel.auto, (9, 0), ON_HOPPER),
        (AttentionKernel.auto, (10, 0), ON_HOPPER),
        (AttentionKernel.auto, (8, 9), ()),
        (AttentionKernel.flash, (9, 0), (SDPBackend.FLASH_ATTENTION,)),
    ],
)
def test_on_hopper_cudnn_comes_before_flash_attention_2(
    chosen: AttentionKernel,
    capability: tuple[int, int],
    kernels: tuple[SDPBackend, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert attention_kernels(chosen, torch.device("cuda", 0)) == kernels
    assert attention_kernels(AttentionKernel.auto, torch.device("cpu")) == ()


def test_of_several_kernels_the_first_that_the_device_has_computes() -> None:
    q, k, v = (torch.randn(1, heads, 8, 16) for heads in (4, 2, 2))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        found = attend(q, k, v, None, ON_HOPPER)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in {event.key for event in profiled.key_averages()}
    assert torch.allclose(found, attend(q, k, v, None, (SDPBackend.MATH,)), atol=1e-6)
