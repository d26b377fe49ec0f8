"""Checksums of a unit's gradients before they are summed with others', to compare units by: of one pass, on the device.

Sums of whole numbers have no order, so that a checksum is the same whatever the kernel that adds does. It tells any one
flipped bit. Exact as float64, over up to 512 ranks that share a stage too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

BITS = 44  # of a checksum: sums of 512 of them are exact in float64
COLUMNS = 256  # each has a factor of its own, so that elements that change places show
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def checksum(tensor: Tensor) -> Tensor:
    """Of a tensor's bits: a whole number below 2**44, int64 [] on its device."""
    words = tensor.detach().contiguous().flatten()
    words = words.view(WORDS[words.element_size()])
    rows = words.numel() // COLUMNS
    whole = rows * COLUMNS
    columns = words[:whole].view(rows, COLUMNS).sum(0, dtype=torch.int64)
    columns[: words.numel() - whole] += words[whole:]
    factors = torch.arange(1, 2 * COLUMNS, 2, device=words.device)  # odd: no bit is lost
    return folded((columns * factors).sum())


def folded(value: Tensor) -> Tensor:
    """The lowest 44 bits of int64."""
    return value & ((1 << BITS) - 1)


class GradientSums:
    """While it is `open`, adds up what a rank gives to the sums over others: its own unit's gradients."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._unsummed: Tensor | None = None  # the buffer of a shard group of one rank, that nothing is summed over
        self._added: torch.cuda.Event | None = None  # FSDP reduces on a stream of its own, and may not be waited for

    def open(self, device: torch.device) -> None:
        self._sum, self._added = torch.zeros((), dtype=torch.int64, device=device), None

    def close(self) -> Tensor:
        """The checksum, int64 []."""
        assert self._sum is not None, "not open"
        if self._added is not None:
            self._added.wait()
        taken, self._sum, self._unsummed = folded(self._sum), None, None
        return taken

    def summing(self, gradients: Tensor) -> None:
        """About to be summed over other ranks, which may be none but replicas."""
        self._unsummed = None
        if self._sum is not None:
            self._sum.add_(checksum(gradients))
            if self._sum.is_cuda:
                self._added = torch.cuda.Event()
                self._added.record()

    def allocated(self, buffer: Tensor) -> None:
        """For gradients that are to be summed, or for what comes of that; the former first."""
        if self._sum is not None and self._unsummed is None:
            self._unsummed = buffer

    def replicas_summed(self) -> None:
        """Of a shard group of one rank this is all that is heard."""
        if self._unsummed is not None:
            if self._unsummed.is_cuda:  # on the all-reduce's stream, for which FSDP does not hold on to it
                self._unsummed.record_stream(torch.cuda.current_stream())
            self.summing(self._unsummed)


class CheckedReduceScatter(DefaultReduceScatter):
    """FSDP's, which tells the sums of what it is given."""

    def __init__(self, sums: GradientSums) -> None:
        self._sums = sums

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer: Tensor = super().allocate(size, dtype=dtype, device=device)
        self._sums.allocated(buffer)
        return buffer
