"""A step's check of all units: each computes the same micro-batch, drawn for the step; their checksums are compared.

One forward and backward more, by all ranks, as FSDP gathers and reduces with all of them; what it reduces is dropped.
What is compared is each unit's own: its loss, and its gradients before they are summed with others'. All units gather
the same weights, so that a wrong bit in these is seen by all alike; that is for copies to tell (`control.replicas`).
"""

import contextlib
import hashlib
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import deterministic as settings

from regrow.control.verification import PER_UNIT
from regrow.parallel.checksums import BITS, GradientSums, checksum

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # without which cuBLAS refuses to be deterministic


@dataclass(frozen=True)
class VerifiedRows:
    """A micro-batch of as many sequences as the unit with most has in a pass, so that no shape is new to all."""

    num_seqs: int
    seq_len: int
    seed: int = 0

    def draw(self, step: int, vocab_size: int) -> Tensor:
        """Token ids, int64 [m, T+1]: the same on every rank, others for each step."""
        name = hashlib.sha256(f"verify {self.seed} {step}".encode()).digest()
        drawn = torch.Generator().manual_seed(int.from_bytes(name[:7], "big"))
        return torch.randint(vocab_size, (self.num_seqs, self.seq_len + 1), generator=drawn)


class UnitCheck:
    """Of one rank: the rows that all units compute, and its unit's place among the checksums of all."""

    def __init__(
        self,
        sums: GradientSums,
        *,
        unit: int,
        num_units: int,
        rows: VerifiedRows,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.sums, self.unit, self.num_units = sums, unit, num_units
        self._rows, self._vocab_size, self._device = rows, vocab_size, device
        self._kind = kind_of(device)

    def rows(self, step: int) -> Tensor:
        """Token ids, int64 [m, T+1] on the device."""
        rows = self._rows.draw(step, self._vocab_size)
        return rows.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else rows

    def slots(self, loss: Tensor, gradients: Tensor) -> Tensor:
        """This rank's share of the checksums of all units, float64 [num_units x PER_UNIT]: they are summed."""
        mine = torch.stack([torch.full_like(gradients, self._kind), checksum(loss), gradients]).double()
        slots = mine.new_zeros(self.num_units, PER_UNIT)
        slots[self.unit] = mine
        return slots.flatten()


def kind_of(device: torch.device) -> int:
    """A number below 2**48 for what may make two sound devices round differently: their kind, and libraries."""
    if device.type == "cuda":
        named: Sequence[object] = (torch.cuda.get_device_name(device), torch.backends.cudnn.version())
    else:
        named = (platform.processor() or platform.machine(), torch.backends.cpu.get_cpu_capability(), _model_of_cpu())
        named = (*named, torch.get_num_threads())
    name = repr((torch.__version__, *named))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[: BITS // 8], "big")


def _model_of_cpu() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        return next((line for line in file if line.startswith("model name")), "")
    return ""


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Kernels whose sums have one order, where the device has a choice, and was told in time (`CUBLAS`)."""
    if device.type != "cuda" or CUBLAS not in os.environ or torch.are_deterministic_algorithms_enabled():
        yield
        return
    filling = settings.fill_uninitialized_memory  # type: ignore[attr-defined]  # made by its module's class
    settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = filling  # type: ignore[attr-defined]
