"""The page of a profile: what torch's profiler hands out, counted once."""

from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from regrow.train.profile import Spent, spent, summary


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
