"""How much arithmetic a token costs and a device offers: the two halves of MFU.

MFU = tokens/s * flops_per_token / peak_flops. The numerator counts what the model needs, not what activation
checkpointing repeats; the whole attention matrix, of which causality masks half and model.document_attention more; the
peak is dense bfloat16, also for float8.
"""

import time
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from regrow.config.schema import Dtype, ModelConfig
from regrow.model.size import num_matmul_params
from regrow.plan.devices import find_device

if TYPE_CHECKING:
    import torch  # only what measures needs it


@dataclass(frozen=True)
class Peak:
    """The arithmetic that one device offers a second, and where the number is from."""

    flops: float
    source: str


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """6N + 12·L·H·Q·T, forward and backward: N as `num_matmul_params`, L layers, H heads of width Q, T tokens.

    Source: PaLM, arXiv:2204.02311, appendix B.
    """
    return 6.0 * num_matmul_params(config) + 12.0 * config.num_layers * config.dim * seq_len


def peak_flops(device: "torch.device", dtype: Dtype, tflops: float | None = None) -> Peak:
    """What one device offers: `tflops` if given, else the known peak of a GPU by its name, else a measurement."""
    if tflops is not None:
        return Peak(tflops * 1e12, "given")
    if device.type == "cuda":
        import torch

        name = torch.cuda.get_device_name(device)
        known = find_device(name)
        if known is not None:
            return Peak(known.flops, f"{name}: dense bfloat16, data sheet")
    # a CPU without bfloat16 units multiplies float32 faster: the peak is what the device can do
    measured = {tried: measure_peak_flops(device, tried) for tried in (dtype, Dtype.float32)}
    best = max(measured, key=lambda tried: measured[tried])
    return Peak(measured[best], f"measured {best.value} matrix product on {device.type}")


def measure_peak_flops(device: "torch.device", dtype: Dtype, *, budget_s: float = 0.1) -> float:
    """FLOP/s of the fastest of several square matrix products, of a size that takes an eighth of `budget_s`."""
    import torch

    torch_dtype = getattr(torch, dtype.value)

    def fastest(size: int, repeats: int) -> float:
        matrix = torch.randn(size, size, device=device).div_(sqrt(size)).to(torch_dtype)
        seconds = []
        for _ in range(repeats):
            begun = time.perf_counter()
            torch.mm(matrix, matrix)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - begun)
        return min(seconds)

    size = 512
    growth = (budget_s / 8 / fastest(size, 3)) ** (1 / 3)  # the cost grows with the cube of the size
    size = min(max(size, int(size * growth) // 64 * 64), 8192)
    return 2.0 * size**3 / fastest(size, 8)
