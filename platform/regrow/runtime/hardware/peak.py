"""The arithmetic that a device offers, from its data sheet or measured: what MFU is a share of.

MFU = tokens/s * flops_per_token / peak_flops. The numerator counts what the model needs, not what activation
checkpointing repeats; the whole attention matrix, of which causality masks half and model.document_attention more; the
peak is dense bfloat16, also for float8.
"""

import time
from dataclasses import dataclass
from math import sqrt

import torch

from regrow.config.schema import Dtype
from regrow.forecast.devices import find_device


@dataclass(frozen=True)
class Peak:
    """The arithmetic that one device offers a second, and where the number is from."""

    flops: float
    source: str


def peak_flops(device: torch.device, dtype: Dtype, tflops: float | None = None) -> Peak:
    """What one device offers: `tflops` if given, else the known peak of a GPU by its name, else a measurement."""
    if tflops is not None:
        return Peak(tflops * 1e12, "given")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = find_device(name)
        if known is not None:
            return Peak(known.flops, f"{name}: dense bfloat16, data sheet")
    # a CPU without bfloat16 units multiplies float32 faster: the peak is what the device can do
    measured = {tried: measure_peak_flops(device, tried) for tried in (dtype, Dtype.float32)}
    best = max(measured, key=lambda tried: measured[tried])
    return Peak(measured[best], f"measured {best.value} matrix product on {device.type}")


def measure_peak_flops(device: torch.device, dtype: Dtype, *, budget_s: float = 0.1) -> float:
    """FLOP/s of the fastest of several square matrix products, of a size that takes an eighth of `budget_s`."""
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
