"""The kernel that computes attention over whole rows is the one that was chosen."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from regrow.config.schema import AttentionKernel, ParallelConfig
from regrow.parallel.apply import build_model
from regrow.testing.tiny import tiny_model

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
