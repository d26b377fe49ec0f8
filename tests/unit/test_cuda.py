"""What only a GPU does, as far as it can be told without one: with torch's answers in the place of a device's."""

import threading
from collections.abc import Iterator
from typing import cast

import pytest
import torch

from regrow.control.membership import Formation, Member
from regrow.parallel.checksums import GradientSums, checksum
from regrow.parallel.stream import CudaStream
from regrow.runtime.generation import keeps_compiled
from regrow.runtime.rendezvous import Joined

GPU = torch.device("cuda", 0)


@pytest.fixture
def synchronizes(monkeypatch: pytest.MonkeyPatch) -> "Iterator[Synchronizes]":
    device = Synchronizes()
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    yield device
    device.rests.set()
    for thread in threading.enumerate():
        if thread.name == "drain":
            thread.join()


class Synchronizes:
    """A device that its host waits for."""

    def __init__(self) -> None:
        self.rests, self.waits, self.error = threading.Event(), 0, ""

    def synchronize(self, device: torch.device) -> None:
        self.waits += 1
        if self.error:
            raise torch.AcceleratorError(self.error)
        self.rests.wait()


def test_a_device_with_an_error_that_stays_is_not_waited_for(synchronizes: Synchronizes) -> None:
    """It was, for the 30 s that a device has to come to rest, and the survivors' group with it."""
    synchronizes.error = "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`"
    assert not CudaStream(GPU).drain(timeout_s=1e9)
    assert synchronizes.waits == 1


def test_a_device_is_at_rest_once_it_has_been_waited_for_twice(synchronizes: Synchronizes) -> None:
    assert not CudaStream(GPU).drain(timeout_s=0.01)
    synchronizes.rests.set()
    assert CudaStream(GPU).drain(timeout_s=1e9)


class OnDevice(torch.Tensor):
    """A tensor that says it is a GPU's, and notes which streams its memory is not to be given away before."""

    streams: list[object]

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def record_stream(self, stream: object) -> None:  # type: ignore[override]
        self.streams.append(stream)


def test_the_gradients_of_a_shard_of_one_rank_keep_their_memory_until_they_are_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FSDP lets go of them after the reduce-scatter; their checksum comes behind the all-reduce, on its stream."""
    gradients = torch.arange(1000.0)
    buffer = cast(OnDevice, gradients.clone().as_subclass(OnDevice))
    buffer.streams, sums = [], GradientSums()
    sums.open(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the all-reduce's")
    sums.allocated(buffer)
    sums.replicas_summed()
    assert buffer.streams == ["the all-reduce's"]
    assert int(sums.close()) == int(checksum(gradients))


@pytest.mark.parametrize(
    ("device", "keeping"), [(GPU, [True, True, False, False]), (torch.device("cpu"), [True, False, False, False])]
)
def test_each_gpu_of_the_first_ranks_node_keeps_what_it_has_compiled(device: torch.device, keeping: list[bool]) -> None:
    """Inductor finds what was compiled for a device of the same index alone; a CPU has none."""
    members = tuple(Member(f"{rank}", node, host=node, port=0, pid=rank) for rank, node in enumerate("aabb"))
    joined = [Joined(Formation(1, members), rank, frozenset()) for rank in range(4)]
    assert [keeps_compiled(each, device) for each in joined] == keeping
