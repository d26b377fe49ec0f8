"""The page of a profile: what torch's profiler hands out, counted once."""

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from regrow.train.profile import Spent, kind_of, spent, summary


def event(number: int, name: str, start_us: float, end_us: float, device: DeviceType, **more: bool) -> FunctionEvent:
    return FunctionEvent(
        id=number,
        name=name,
        thread=1,
        start_us=start_us,
        end_us=end_us,
        device_type=DeviceType(int(device)),  # equal, and another object, as each is that the profiler makes
        use_device="cuda",
        is_legacy=False,
        stack=[],
        **more,
    )


def test_on_a_gpu_kernels_count_and_neither_their_operators_nor_annotations() -> None:
    """As of a product of 1 ms and an all-gather of 0.5 ms in an annotation of FSDP's: each has its kernel's time."""
    note = event(1, "FSDP::all_gather", 0, 40, DeviceType.CPU)
    gather = event(2, "c10d::_allgather_base_", 5, 20, DeviceType.CPU)
    product = event(3, "aten::mm", 50, 70, DeviceType.CPU)
    gather_kernel = event(2, "ncclDevKernel_AllGather_RING_LL", 100, 600, DeviceType.CUDA)
    product_kernel = event(3, "nvjet_hsh_128x256", 600, 1600, DeviceType.CUDA)
    of_device = event(1, "FSDP::all_gather", 100, 600, DeviceType.CUDA, is_user_annotation=True)
    for operator, kernel in ((gather, gather_kernel), (product, product_kernel)):
        operator.append_kernel(kernel.name, 0, kernel.time_range.elapsed_us())
    events = EventList([note, gather, product, gather_kernel, product_kernel, of_device], use_device="cuda")
    events._build_tree()
    found = spent(events.key_averages(), "cuda")
    assert found == [Spent(product_kernel.name, 1e-3, 1), Spent(gather_kernel.name, 0.5e-3, 1)]
    assert "| all | 1.50 | |" in summary(found, title="steps 1 to 1", num_steps=1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_poi_fused__scaled_mm__to_copy_clamp_mul_reciprocal_silu_t_view_18", "fused by torch.compile"),
        ("triton_red_fused__fused_rms_norm__to_copy_abs_max_t_view_9", "fused by torch.compile"),
        ("triton_per_fused_linear_sum_4", "fused by torch.compile"),
        ("triton_for_fused_copy_0", "fused by torch.compile"),
        ("triton_spl_fused_cumsum_0", "fused by torch.compile"),
        ("cpp_fused_mm_silu_3", "fused by torch.compile"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("triton_tem_fused__scaled_mm_t_2", "matrix products"),
    ],
)
def test_what_the_compiler_fused_is_no_product_for_the_operators_in_its_name(name: str, kind: str) -> None:
    """A compiled model's page had nothing that was fused: each such kernel was a product or a copy."""
    assert kind_of(name) == kind
