"""A step's check of all units: each computes the same micro-batch, drawn for the step; their checksums are compared.

One micro-batch more, forward and backward, by all ranks, as FSDP gathers and reduces with all of them; what it reduces
is dropped. In a pipeline it goes ahead of the step's own ones, with no bubble of its own. What is compared is each
unit's own, stage by stage: what it gives out, the loss or activations, and its gradients before they are summed with
others'. All units gather the same weights, so that a wrong bit in these is seen by all alike; that is for copies to
tell (`control.replicas`).
"""

import contextlib
import hashlib
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import deterministic as settings

from regrow.control.verification import PER_STAGE
from regrow.parallel.checksums import BITS, GradientSums, checksum, folded
from regrow.parallel.fsdp import prepare_pass
from regrow.plan.mesh import Coordinates

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
    """Of one rank: the rows that all units compute, and its stages' places among the checksums of all."""

    def __init__(
        self,
        sums: GradientSums,
        place: Coordinates,
        num_stages: int,
        *,
        rows: VerifiedRows,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """`num_stages` are those of a unit."""
        self.sums, self.device, self.kind = sums, device, kind_of(device)
        self.unit, self.num_units = place.mesh.unit_of(place.rank), place.mesh.num_units
        self.num_stages = num_stages
        self._rows, self._vocab_size = rows, vocab_size

    def begin(self, step: int) -> "VerifyingPass":
        """The pass of a step that verifies."""
        rows = self._rows.draw(step, self._vocab_size)
        if self.device.type == "cuda":
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        return VerifyingPass(self, rows)


class VerifyingPass:
    """What this rank's stages come to with the micro-batch that all units compute."""

    def __init__(self, check: UnitCheck, rows: Tensor) -> None:
        """`rows` are token ids, int64 [m, T+1] on the device."""
        self.rows, self._check = rows, check
        self._slots = torch.zeros(
            check.num_units, check.num_stages, PER_STAGE, dtype=torch.float64, device=check.device
        )

    def forward(self, stage: int, run: Callable[[], Tensor]) -> Tensor:
        """What a stage gives out: activations, or the loss."""
        with deterministic(self._check.device):
            out = run()
        mine = self._slots[self._check.unit, stage]
        mine[0], mine[1] = self._check.kind, checksum(out)
        return out

    def backward(self, stage: int, module: nn.Module, run: Callable[[], None], x: Tensor | None = None) -> None:
        """Of a stage; its gradients are summed over ranks, and dropped. `x` came into it."""
        check = self._check
        # parameters are shards behind it, whose gradients are dropped
        prepare_pass(module, reduce=True, free=True, last=check.num_stages == 1)
        check.sums.open(check.device)
        with deterministic(check.device):
            run()
        gradients = check.sums.close()
        if x is not None and x.grad is not None:
            gradients = folded(gradients + checksum(x.grad))
        self._slots[check.unit, stage, 2] = gradients
        module.zero_grad(set_to_none=True)

    def slots(self) -> Tensor:
        """This rank's share of the checksums of all units, float64 [num_units x num_stages x PER_STAGE]: they are
        summed."""
        return self._slots.flatten()


def kind_of(device: torch.device) -> int:
    """A number below 2**40 for what may make two sound devices round differently: their kind, and libraries."""
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
